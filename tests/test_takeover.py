"""Keys of dead holders: free at once on their own machine, and with their lease elsewhere.

All of the holders here hold for minutes, so that no expiry can explain that the next call runs. Some are killed; what
is found first is the token of a process that there is not.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import redis as redis_py

from only_one import Reclaimed, configure
from only_one.holder import Holder as HolderOf
from rigs.namespaces import host_named
from rigs.servers import RedisServer
from rigs.waiting import eventually
from tests.decorated import Decorate, both, call_both, decorated, events, token_of_the_dead
from tests.faults.programs import Holder
from tests.lock.test_holder import CONTAINER, changed, in_container

TIMEOUT = 600
HALF = TIMEOUT * 1000 // 2
DEAD = token_of_the_dead()


@pytest.fixture
def taken_over() -> Iterator[list[Reclaimed]]:
    """The events of keys that were taken over."""
    with events(Reclaimed) as seen:
        yield seen


def is_busy() -> bool:
    """Whether neither a sync call nor an async one runs."""
    return call_both(timeout=TIMEOUT) == [None, None]


# A holder that is killed


@both
@pytest.mark.parametrize(
    "times", [{"lease": TIMEOUT}, {"timeout": TIMEOUT}, {"lease": TIMEOUT, "at_least": TIMEOUT}], ids=", ".join
)
def test_a_holder_that_is_killed(
    redis: Any, redis_url: str, prefix: str, key: str, decorate: Decorate, times: dict[str, Any]
) -> None:
    """It had taken over itself, from one that was killed; and it was seen alive just before, or never."""
    redis.set(key, DEAD, px=TIMEOUT * 1000)
    function = decorate(lambda: "ran", timeout=TIMEOUT)
    with Holder(redis_url, prefix, **times) as holder:
        assert holder.token != DEAD
        if "lease" in times:
            assert function() is None
        holder.kill()
    assert redis.get(key) == holder.token
    assert redis.pttl(key) > HALF
    with events(Reclaimed) as taken_over:
        assert function() == "ran"
    assert not redis.exists(key)
    (event,) = taken_over
    assert (event.key, event.name, event.value) == (key, f"{__name__}.{function.__qualname__}", holder.token)
    assert (event.holder.pid, event.holder.host) == (holder.pid, socket.gethostname())
    assert str(event).endswith(f" took over {key} from {event.holder}, which has ended without releasing it")


def run_after_dead_holders(url: str, prefix: str, rounds: int, processes: int, seed: str) -> int:
    """In each round, call as soon as all processes are there; returns how many keys this one has taken over."""

    def are_there(what: str, number: int) -> bool:
        return eventually(lambda: client.llen(f"{prefix}{what}") == number, pause=0.0005)

    def work(round_: int) -> bool:
        # Until all others were skipped: a second one, beside it or after it, would be missed there.
        assert are_there(f"skipped:{round_}", processes - 1)
        return True

    jitter = random.Random(seed)
    with redis_py.Redis.from_url(url) as client, configure(redis=url, prefix=prefix), events(Reclaimed) as taken_over:
        function = decorated(work, "dead:{round_}", timeout=TIMEOUT)
        for round_ in range(rounds):
            client.rpush(f"{prefix}ready:{round_}", seed)
            assert are_there(f"ready:{round_}", processes)
            time.sleep(jitter.choice([0, 0, jitter.uniform(0, 0.002)]))
            if not function(round_):
                client.rpush(f"{prefix}skipped:{round_}", seed)
    return len(taken_over)


@pytest.mark.soak
def test_of_eight_that_find_the_same_dead_holder_one_runs(server: RedisServer, prefix: str) -> None:
    """Each round has the key of a dead holder."""
    seed, rounds, processes = os.environ.get("ONLY_ONE_SOAK_SEED") or str(random.randrange(2**32)), 60, 8
    print("seed", seed)
    with redis_py.Redis.from_url(server.url) as client, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for round_ in range(rounds):
            client.set(f"{prefix}dead:{round_}", DEAD, px=TIMEOUT * 1000)
        shared = server.url, prefix, rounds, processes
        calls = [pool.submit(run_after_dead_holders, *shared, f"{seed}/{number}") for number in range(processes)]
        assert sum(each.result() for each in calls) == rounds
        attempts = client.info("commandstats")["cmdstat_eval"]["calls"]
        print(attempts, "attempts to take", rounds, "keys over")
        assert attempts > rounds * 1.2  # they did meet
        assert not list(client.scan_iter(match=f"{prefix}dead:*"))


# Holders that live


def test_a_holder_that_lives_is_busy(
    redis: Any, redis_url: str, prefix: str, key: str, taken_over: list[Reclaimed]
) -> None:
    """As long as it is the one that the token names, and not one that has got its process number since."""
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        assert is_busy()
        holder.stop()
        assert is_busy()
        holder.resume()
        assert is_busy()
        assert redis.get(key) == holder.token
        assert taken_over == []
        start = json.loads(holder.token)["process_start"]
        if start is not None:  # where it can be read
            redis.set(key, changed(holder.token, process_start=start - 1), px=TIMEOUT * 1000)
            assert call_both(timeout=TIMEOUT) == ["ran", "ran"]


# Holders elsewhere


@in_container
@pytest.mark.parametrize(
    ("host", "times"),
    [("the same", {"lease": TIMEOUT}), ("another", {"timeout": TIMEOUT})],
    ids=["same name", "another"],
)
def test_a_holder_in_another_container_keeps_its_key(
    redis: Any, redis_url: str, prefix: str, key: str, taken_over: list[Reclaimed], host: str, times: dict[str, Any]
) -> None:
    """Until it expires, which it does as nobody renews it."""
    assert CONTAINER is not None
    inside = CONTAINER if host == "the same" else [*CONTAINER, *host_named("elsewhere")]
    with Holder(redis_url, prefix, inside=inside, **times) as holder:
        parsed = HolderOf.parse(holder.token)
        assert parsed is not None
        assert parsed.host == (socket.gethostname() if host == "the same" else "elsewhere")
        assert parsed.pid == 1
        holder.kill()
        assert holder.line() == ""  # the holder is gone with the process that had started it
    assert is_busy()
    assert redis.get(key) == holder.token
    assert HALF < redis.pttl(key) <= TIMEOUT * 1000
    redis.pexpire(key, 1)
    assert eventually(decorated(lambda: "ran", timeout=TIMEOUT))
    assert taken_over == []
