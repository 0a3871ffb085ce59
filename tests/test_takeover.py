"""Keys of dead holders: free at once on their own machine, and with their lease elsewhere.

All of the holders here hold for minutes, so that no expiry can explain that the next call runs. Most of them are one
and the same: a process that was killed, whose token is put under one key after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from only_one import configure, current_lock, only_one, subscribe
from only_one.events import Event, Reclaimed
from only_one.holder import Holder as HolderOf
from rigs.namespaces import HOST_NAMED
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Holder, Program, Running
from tests.lock.test_holder import CONTAINER, changed, in_container
from tests.proxy import Proxy
from tests.renewal import is_renewed

TIMEOUT = 600
HALF = TIMEOUT * 1000 // 2


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}k"


@pytest.fixture(scope="module")
def token(redis_url: str) -> bytes:
    """What a holder had under its key when it was killed."""
    with Holder(redis_url, "test:dead:", timeout=TIMEOUT) as holder:
        holder.kill()
    with redis_py.Redis.from_url(redis_url) as client:
        client.delete("test:dead:k")
    return holder.token


@pytest.fixture
def dead(redis: Any, key: str, token: bytes) -> bytes:
    """The key is a dead holder's; this is what stands there."""
    redis.set(key, token, px=TIMEOUT * 1000)
    return token


@pytest.fixture
def reclaimed() -> Iterator[list[Reclaimed]]:
    """What was told of keys that were taken over."""
    found: list[Reclaimed] = []

    def note(event: Event) -> None:
        if isinstance(event, Reclaimed):
            found.append(event)

    unsubscribe = subscribe(note)
    yield found
    unsubscribe()


def call(**options: Any) -> Any:
    """What a call with the key gives: "done", or None if it did not run."""
    return only_one(lambda: "done", key="k", **{"timeout": TIMEOUT, **options})()


def call_async(**options: Any) -> Any:
    """The same in an event loop."""

    @only_one("k", **{"timeout": TIMEOUT, **options})
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    return asyncio.run(work())


both = pytest.mark.parametrize("calls", [call, call_async], ids=["sync", "async"])


# A holder that is killed


@both
@pytest.mark.parametrize("times", [{"lease": TIMEOUT}, {"timeout": TIMEOUT}], ids=["lease", "timeout"])
def test_a_holder_that_is_killed(
    redis: Any,
    redis_url: str,
    prefix: str,
    key: str,
    dead: bytes,
    reclaimed: list[Reclaimed],
    calls: Callable[..., Any],
    times: dict[str, Any],
) -> None:
    """It had taken over itself, from one that was killed; and it was seen alive just before, or never."""
    with Holder(redis_url, prefix, is_async=calls is call, **times) as holder:
        assert holder.token != dead
        if "lease" in times:
            assert calls() is None
        holder.kill()
    assert redis.get(key) == holder.token
    assert redis.pttl(key) > HALF
    assert calls() == "done"
    assert not redis.exists(key)
    (event,) = reclaimed
    assert (event.key, event.value) == (key, holder.token)
    assert event.holder is not None
    assert (event.holder.pid, event.holder.host) == (holder.pid, socket.gethostname())
    assert str(holder.pid) in str(event)


@both
@pytest.mark.parametrize("way", ["decode_responses", "script_flush", "resp3"])
def test_whatever_the_client(
    redis: Any, redis_url: str, key: str, dead: bytes, calls: Callable[..., Any], way: str
) -> None:
    known: dict[str, dict[str, Any]] = {"decode_responses": {"decode_responses": True}, "resp3": {"protocol": 3}}
    with redis_py.Redis.from_url(redis_url, **known.get(way, {})) as client:
        for _ in range(2):  # the script that takes over is not known to the server at first
            redis.set(key, dead, px=TIMEOUT * 1000)
            if way == "script_flush":
                redis.script_flush()
            assert calls(redis=client) == "done"
            assert not redis.exists(key)


def test_the_key_that_is_taken_over_is_the_run_s_own(redis: Any, key: str, dead: bytes) -> None:
    """With its own time, its own renewal and its own holder."""
    week = 7 * 24 * 3600
    with Running(lease=week) as run:
        assert redis.get(key) == run.lock.token != dead
        assert (week - LIMIT) * 1000 < redis.pttl(key) <= week * 1000
        redis.pexpire(key, 30_000)
        assert is_renewed(run.lock)
        assert redis.pttl(key) > 30_000
        assert run.lock.fence > 0
        assert call() is None
    assert run.result == "done"
    assert not redis.exists(key)


SUCCESSORS = """
import json, os, random, sys, time
import redis
import only_one
from rigs.waiting import LIMIT
url, prefix, witness, rounds, processes, seed = json.loads(sys.argv[1])
number, jitter = int(sys.argv[2]), random.Random(f"{seed}/{sys.argv[2]}")
only_one.configure(redis=url, prefix=prefix)
client = redis.Redis.from_url(url)
lines = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
taken_over = []
only_one.subscribe(lambda event: taken_over.append(event) if isinstance(event, only_one.Reclaimed) else None)

def wait_for(name, count):
    until = time.monotonic() + LIMIT
    while int(client.get(prefix + name) or 0) < count:
        if time.monotonic() > until:
            sys.exit(f"waited too long for {name}")
        time.sleep(0.0005)

@only_one.only_one("dead:{round_}", timeout=600)
def run(round_):
    os.write(lines, f"begin {round_} {number}\\n".encode())
    wait_for(f"skipped:{round_}", processes - 1)  # so that a second one could not come after the first
    os.write(lines, f"end {round_} {number}\\n".encode())
    return True

for round_ in range(rounds):
    client.incr(f"{prefix}ready:{round_}")
    wait_for(f"ready:{round_}", processes)
    time.sleep(jitter.choice([0, 0, jitter.uniform(0, 0.002)]))
    if not run(round_):
        client.incr(f"{prefix}skipped:{round_}")
print(json.dumps([number, len(taken_over)]), flush=True)
"""


@pytest.mark.soak
def test_of_eight_that_find_the_same_dead_holder_one_runs(
    server: RedisServer, prefix: str, tmp_path: Path, token: bytes, record_property: Callable[[str, object], None]
) -> None:
    """Each round has the key of a dead holder; the runs write to a file that knows nothing of the lock."""
    seed, rounds, processes = int(os.environ.get("ONLY_ONE_SOAK_SEED", random.randrange(2**32))), 60, 8
    print("seed", seed)
    record_property("seed", seed)
    witness = tmp_path / "witness"
    with redis_py.Redis.from_url(server.url) as client:
        for round_ in range(rounds):
            client.set(f"{prefix}dead:{round_}", token, px=TIMEOUT * 1000)
        shared = json.dumps([server.url, prefix, str(witness), rounds, processes, seed])
        programs = [Program(SUCCESSORS, shared, str(number)) for number in range(processes)]
        try:
            counts = [program.says() for program in programs]
        finally:
            for program in programs:
                program.__exit__()
        assert [number for number, _ in counts] == list(range(processes))
        assert sum(count for _, count in counts) == rounds
        stats = client.info("commandstats")
        tried = stats["cmdstat_eval"]["calls"]
        print("taken over", rounds, "times in", tried, "attempts")
        record_property("taken over", rounds)
        record_property("attempts", tried)
        assert tried > rounds * 1.2  # they did meet
        assert not list(client.scan_iter(match=f"{prefix}dead:*"))
    lines = [line.split() for line in witness.read_text(encoding="ascii").splitlines()]
    assert len(lines) == 2 * rounds
    for round_ in range(rounds):
        own = [line for line in lines if line[1] == str(round_)]
        assert [what for what, *_ in own] == ["begin", "end"]
        assert own[0][2] == own[1][2]


# Holders that live


def test_a_holder_that_lives_is_busy(
    redis: Any, redis_url: str, prefix: str, key: str, reclaimed: list[Reclaimed]
) -> None:
    """As long as it is the one that the token names, and not one that has got its process number since."""
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        assert [call(), call(), call_async()] == [None] * 3
        holder.stop()
        assert [call(), call(), call_async()] == [None] * 3
        holder.resume()
        assert call() is None
        assert redis.get(key) == holder.token
        assert reclaimed == []
        start = json.loads(holder.token)["process_start"]
        if start is not None:  # where it can be read
            for calls in (call, call_async):
                redis.set(key, changed(holder.token, process_start=start - 1), px=TIMEOUT * 1000)
                assert calls() == "done"


@pytest.mark.usefixtures("redis")
def test_a_thread_of_this_process_is_busy(
    busy: Callable[..., AbstractContextManager[None]], reclaimed: list[Reclaimed]
) -> None:
    with busy("k", timeout=TIMEOUT):
        assert [call(), call_async()] == [None, None]
    assert call() == "done"
    assert reclaimed == []


@pytest.mark.usefixtures("redis")
def test_a_call_from_inside_its_own_run_is_busy(reclaimed: list[Reclaimed]) -> None:
    assert only_one(lambda: [call(), "outer"], key="k", timeout=TIMEOUT)() == [None, "outer"]
    assert reclaimed == []


ZOMBIE = """
import json, os, sys
import only_one
url, prefix = sys.argv[1:]
only_one.configure(redis=url, prefix=prefix)

@only_one.only_one("k", timeout=600)
def hold(then):
    return then()

def die():
    os.kill(os.getpid(), 9)

pid = os.fork()
if not pid:
    hold(die)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
before = hold(lambda: "done")
os.waitpid(pid, 0)
print(json.dumps([before, hold(lambda: "done")]), flush=True)
"""


@pytest.mark.usefixtures("redis")
def test_a_zombie_is_busy_until_it_is_waited_for(redis_url: str, prefix: str) -> None:
    with Program(ZOMBIE, redis_url, prefix) as program:
        assert program.says() == [None, "done"]


# Holders elsewhere


@in_container
@pytest.mark.parametrize(
    ("host", "times"),
    [("the same", {"lease": TIMEOUT}), ("another", {"timeout": TIMEOUT})],
    ids=["same name", "another"],
)
def test_a_holder_in_another_container_keeps_its_key(
    redis: Any, redis_url: str, prefix: str, key: str, reclaimed: list[Reclaimed], host: str, times: dict[str, Any]
) -> None:
    """Until it expires, which it does as nobody renews it."""
    assert CONTAINER is not None
    inside = CONTAINER if host == "the same" else [*CONTAINER, *HOST_NAMED]
    with Holder(redis_url, prefix, inside=inside, **times) as holder:
        found = HolderOf.parse(holder.token)
        assert found is not None
        assert found.host == (socket.gethostname() if host == "the same" else "elsewhere")
        assert found.pid == 1
        holder.kill()
        assert holder.line() == ""  # the holder is gone with the process that had started it
    assert [call(), call_async()] == [None, None]
    assert redis.get(key) == holder.token
    assert HALF < redis.pttl(key) <= TIMEOUT * 1000
    redis.pexpire(key, 1)
    assert eventually(lambda: call() == "done")
    assert reclaimed == []


# Keys that are not to be taken over


def test_a_key_that_is_kept_though_its_process_has_ended(
    redis: Any, key: str, token: bytes, reclaimed: list[Reclaimed]
) -> None:
    assert call(at_least=TIMEOUT - 100) == "done"
    ended = {name: json.loads(token)[name] for name in ("pid", "process_start", "process")}
    value = changed(redis.get(key), **ended)
    redis.set(key, value, px=TIMEOUT * 1000)
    assert [call(), call_async()] == [None, None]
    assert redis.get(key) == value
    assert reclaimed == []
    redis.set(key, changed(value, state="running"), px=TIMEOUT * 1000)
    assert call() == "done"  # it was for its state that it was left alone


def test_takeover_that_is_switched_off(redis: Any, key: str, dead: bytes) -> None:
    assert [call(takeover=False), call_async(takeover=False)] == [None, None]
    run = only_one(lambda: "done", key="k", timeout=TIMEOUT)
    with configure(takeover=False):
        assert [run(), call_async()] == [None, None]
        assert redis.get(key) == dead
        assert call(takeover=True) == "done"  # the decorator is the most specific
        redis.set(key, dead, px=TIMEOUT * 1000)
    assert run() == "done"


def test_a_forged_holder_is_busy(redis: Any, key: str, token: bytes) -> None:
    for pid in (0, -1, 2**31, 2**64, 10**30, "1", None):
        value = changed(token, pid=pid)
        redis.set(key, value, px=TIMEOUT * 1000)
        assert [call(), call_async()] == [None, None], pid
        assert redis.get(key) == value
    redis.set(key, changed(token), px=TIMEOUT * 1000)
    assert call() == "done"  # it was for its number that the others were left alone


@pytest.mark.parametrize("value", [b"", b"\xff", b"somebody", b"{}", b"[]", b'{"only_one":1}'])
def test_what_is_no_holder_is_busy(redis: Any, key: str, value: bytes) -> None:
    redis.set(key, value)
    assert [call(), call_async()] == [None, None]
    assert redis.get(key) == value


# Compare and set


def test_another_that_takes_over_in_between(
    redis: Any, redis_url: str, key: str, dead: bytes, reclaimed: list[Reclaimed]
) -> None:
    """Between the look at the dead holder and the command that replaces it, the key becomes another's."""
    # By a client without time-outs, as the command is held up.
    with Proxy(redis_url) as proxy, redis_py.Redis.from_url(proxy.url) as client:
        held = proxy.hold_up("EVAL")
        results: list[Any] = []
        caller = threading.Thread(target=lambda: results.append(call(redis=client)))
        caller.start()
        assert held.met.wait(LIMIT)
        with Running(lease=60) as other:
            held.let_go()
            caller.join(LIMIT)
            assert results == [None]
            assert redis.get(key) == other.lock.token
        assert other.result == "done"
    assert [event.value for event in reclaimed] == [dead]


@pytest.mark.parametrize("becomes", ["free", "ours"])
def test_a_takeover_whose_first_try_went_astray(
    redis: Any, redis_url: str, key: str, dead: bytes, becomes: str
) -> None:
    """The key has become free in between, or the takeover was carried out and its reply lost."""
    results: list[Any] = []
    with Proxy(redis_url) as proxy, redis_py.Redis.from_url(proxy.url) as client:
        if becomes == "ours":
            assert call(redis=client) == "done"  # the script is known from here on
            redis.set(key, dead, px=TIMEOUT * 1000)
            proxy.lose_reply("EVAL")
            results.append(call(redis=client))
        else:
            held = proxy.hold_up("EVAL")
            caller = threading.Thread(target=lambda: results.append(call(redis=client)))
            caller.start()
            assert held.met.wait(LIMIT)
            redis.delete(key)
            held.let_go()
            caller.join(LIMIT)
    assert results == ["done"]
    assert not redis.exists(key)


# Tokens of our own that nobody holds


OTHER = """
import sys
import only_one
only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])
print(only_one.only_one(lambda: '"done"', key="k", timeout=600)() or "null")
"""


def test_a_forgotten_token_of_our_own_does_not_block(
    redis: Any, redis_url: str, prefix: str, key: str, reclaimed: list[Reclaimed]
) -> None:
    """As an acquire leaves one that timed out: to others it is busy, as its process lives, and to itself it is not."""
    tokens = []
    only_one(lambda: tokens.append(current_lock().token), key="k", timeout=TIMEOUT)()
    for calls in (call, call_async):
        redis.set(key, tokens[0], px=TIMEOUT * 1000)
        if calls is call:
            with Program(OTHER, redis_url, prefix) as program:
                assert program.says() is None
        assert calls() == "done"
        assert not redis.exists(key)
    assert [event.value for event in reclaimed] == tokens * 2
