"""Keys of dead holders: free at once on their own machine, and with their lease elsewhere.

Nearly all of the holders here have `timeout=600`, so that no expiry can explain that the next call runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from redis.backoff import NoBackoff
from redis.retry import Retry

from only_one import LockUnavailable, configure, only_one, subscribe
from only_one.events import Event, Reclaimed
from only_one.holder import Holder as HolderOf
from only_one.servers import find_server
from only_one.testing import RedisServer
from tests.faults.programs import SLACK, Holder, Program, Running
from tests.proxy import Proxy
from tests.test_holder import CONTAINER, changed, in_container
from tests.waiting import LIMIT, eventually

TIMEOUT = 600


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}k"


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
@pytest.mark.parametrize("seen", ["never", "just before"])
def test_a_holder_that_is_killed(
    redis: Any, redis_url: str, prefix: str, key: str, calls: Callable[..., Any], reclaimed: list[Reclaimed], seen: str
) -> None:
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        if seen == "just before":
            assert calls() is None
        holder.kill()
        assert redis.get(key) == holder.token
        assert redis.pttl(key) > 500_000
        begun = time.monotonic()
        assert calls() == "done"
        assert time.monotonic() - begun < SLACK
    assert not redis.exists(key)
    (event,) = reclaimed
    assert (event.key, event.value) == (key, holder.token)
    assert event.holder is not None
    assert (event.holder.pid, event.holder.host) == (holder.pid, socket.gethostname())
    assert str(holder.pid) in str(event)


@both
@pytest.mark.parametrize("way", ["decode_responses", "script_flush", "resp3", "unix_socket"])
def test_a_holder_that_is_killed_whatever_the_client(
    server: RedisServer, prefix: str, key: str, calls: Callable[..., Any], way: str
) -> None:
    url = f"unix://{server.unix_socket}" if way == "unix_socket" else server.url
    known: dict[str, dict[str, Any]] = {"decode_responses": {"decode_responses": True}, "resp3": {"protocol": 3}}
    options = known.get(way, {})
    with redis_py.Redis.from_url(url, **options) as client:
        with Holder(server.url, prefix, timeout=TIMEOUT) as holder:
            assert calls(redis=client) is None
            holder.kill()
        for _ in range(3):  # the script that takes over is not known to the server at first
            client.set(key, holder.token, px=TIMEOUT * 1000)
            if way == "script_flush":
                client.script_flush()
            assert calls(redis=client) == "done"
            assert not client.exists(key)


@both
def test_a_holder_that_renewed_is_killed(
    redis: Any, redis_url: str, prefix: str, key: str, calls: Callable[..., Any]
) -> None:
    with Holder(redis_url, prefix, lease=300, is_async=True) as holder:
        holder.kill()
        assert redis.pttl(key) > 200_000
        assert calls() == "done"


@pytest.mark.usefixtures("redis")
def test_the_key_that_is_taken_over_is_the_run_s_own(redis_url: str, prefix: str, key: str, redis: Any) -> None:
    """With its own time, its own renewal and its own holder."""
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        holder.kill()
    with Running(lease=0.6) as run:
        assert redis.get(key) == run.lock.token
        assert 0 < redis.pttl(key) <= 600
        assert not eventually(lambda: not run.lock.is_held or not redis.exists(key), 1.5)
        assert run.lock.fence > 0
        assert call() is None
    assert run.result == "done"
    assert not redis.exists(key)


@pytest.mark.usefixtures("redis")
def test_a_holder_that_is_killed_again_and_again(redis_url: str, prefix: str) -> None:
    """The one that took over is killed in turn."""
    for _ in range(3):
        with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
            assert call() is None
            holder.kill()
    assert call() == "done"


SUCCESSORS = """
import json, os, random, sys, time
import redis
import only_one
url, prefix, witness, rounds, processes, seed = json.loads(sys.argv[1])
number, jitter = int(sys.argv[2]), random.Random(f"{seed}/{sys.argv[2]}")
only_one.configure(redis=url, prefix=prefix)
client = redis.Redis.from_url(url)
lines = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
taken_over = []
only_one.subscribe(lambda event: taken_over.append(event) if isinstance(event, only_one.Reclaimed) else None)

def wait_for(name, count):
    until = time.monotonic() + 30
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


def test_of_eight_that_find_the_same_dead_holder_one_runs(server: RedisServer, prefix: str, tmp_path: Path) -> None:
    """Each round has the key of a dead holder; the runs write to a file that knows nothing of the lock."""
    seed, rounds, processes = random.randrange(2**32), 60, 8
    print("seed", seed)
    witness = tmp_path / "witness"
    with redis_py.Redis.from_url(server.url) as client:
        with Holder(server.url, prefix, timeout=TIMEOUT) as holder:
            holder.kill()
        for round_ in range(rounds):
            client.set(f"{prefix}dead:{round_}", holder.token, px=TIMEOUT * 1000)
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
        tried = sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))
        print("taken over", rounds, "times in", tried, "attempts")
        assert tried > rounds * 1.2  # they did meet
        assert not list(client.scan_iter(match=f"{prefix}dead:*"))
    lines = [line.split() for line in witness.read_text(encoding="ascii").splitlines()]
    assert len(lines) == 2 * rounds
    for round_ in range(rounds):
        own = [line for line in lines if line[1] == str(round_)]
        assert [what for what, *_ in own] == ["begin", "end"]
        assert own[0][2] == own[1][2]


# Holders that live


@both
def test_a_holder_that_lives_is_busy(
    redis: Any, redis_url: str, prefix: str, key: str, calls: Callable[..., Any], reclaimed: list[Reclaimed]
) -> None:
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        assert [calls() for _ in range(3)] == [None] * 3
        holder.stop()
        assert [calls() for _ in range(3)] == [None] * 3
        holder.resume()
        assert calls() is None
        assert redis.get(key) == holder.token
    assert reclaimed == []


@pytest.mark.usefixtures("redis")
def test_a_thread_of_this_process_is_busy(
    busy: Callable[..., AbstractContextManager[None]], reclaimed: list[Reclaimed]
) -> None:
    with busy("k", timeout=TIMEOUT):
        assert call() is None
        assert call_async() is None
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


@both
def test_a_number_that_is_another_s_by_now(
    redis: Any, redis_url: str, prefix: str, key: str, calls: Callable[..., Any]
) -> None:
    """The holder's process id is one of a living process, which began at another time."""
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        start = json.loads(holder.token)["process_start"]
        if start is None:
            pytest.skip("no start time can be read here")
        redis.set(key, changed(holder.token, process_start=start - 1), px=TIMEOUT * 1000)
        assert calls() == "done"
        redis.set(key, holder.token, px=TIMEOUT * 1000)
        assert calls() is None


# Holders elsewhere


@in_container
@pytest.mark.parametrize("host", ["the same", "another"])
def test_a_holder_in_another_container_keeps_its_lease(
    redis: Any, redis_url: str, prefix: str, key: str, reclaimed: list[Reclaimed], host: str
) -> None:
    """Within its lease the next call runs, and not before."""
    assert CONTAINER is not None
    lease = 1.5
    inside = CONTAINER if host == "the same" else [*CONTAINER, "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]
    with Holder(redis_url, prefix, lease=lease, inside=inside) as holder:
        found = HolderOf.parse(holder.token)
        assert found is not None
        assert found.host == (socket.gethostname() if host == "the same" else "elsewhere")
        assert found.pid == 1
        assert call() is None
        holder.kill()
        assert holder.line() == ""  # the holder is gone with the process that had started it
        left = redis.pttl(key) / 1000
        killed = time.monotonic()
        assert 0 < left <= lease
        assert eventually(call, lease + SLACK)
        took = time.monotonic() - killed
    print(f"free {took:.3f} s after the kill, {left:.3f} s of the lease were left")
    assert took > left - 0.1
    assert reclaimed == []


@in_container
def test_a_holder_in_another_container_keeps_its_timeout(
    redis: Any, redis_url: str, prefix: str, key: str, reclaimed: list[Reclaimed]
) -> None:
    assert CONTAINER is not None
    with Holder(redis_url, prefix, timeout=TIMEOUT, inside=CONTAINER) as holder:
        holder.kill()
        assert holder.line() == ""
        assert [call(), call_async()] == [None, None]
        assert redis.get(key) == holder.token
        assert redis.pttl(key) > 500_000
    assert reclaimed == []


# Keys that are not to be taken over


AT_LEAST = """
import sys
import only_one
only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])
print(only_one.only_one(lambda: "done", key="k", timeout=600, at_least=float(sys.argv[3]))())
"""


def test_a_key_that_is_kept_though_its_process_has_ended(
    redis: Any, redis_url: str, prefix: str, key: str, reclaimed: list[Reclaimed]
) -> None:
    command = [sys.executable, "-c", AT_LEAST, redis_url, prefix]
    done = subprocess.run([*command, "500"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "done\n"
    value = redis.get(key)
    found = HolderOf.parse(value)
    assert found is not None
    assert found.state == "kept"
    with pytest.raises(ProcessLookupError):
        os.kill(found.pid, 0)
    assert [call(), call_async()] == [None, None]
    assert redis.get(key) == value
    assert 400_000 < redis.pttl(key) <= 500_000
    assert reclaimed == []


@both
def test_takeover_that_is_switched_off(
    redis: Any, redis_url: str, prefix: str, key: str, calls: Callable[..., Any]
) -> None:
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        holder.kill()
    assert calls(takeover=False) is None
    with configure(takeover=False):
        assert calls() is None
        assert redis.get(key) == holder.token
        assert calls(takeover=True) == "done"  # the decorator is the most specific


def test_takeover_that_is_switched_off_and_on_again(redis: Any, redis_url: str, prefix: str, key: str) -> None:
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        holder.kill()
    run = only_one(lambda: "done", key="k", timeout=TIMEOUT)
    with configure(takeover=False):
        assert run() is None
    assert redis.get(key) == holder.token
    assert run() == "done"


@both
def test_a_forged_holder_is_busy(redis: Any, redis_url: str, prefix: str, key: str, calls: Callable[..., Any]) -> None:
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        holder.kill()
    for pid in (0, -1, 2**31, 2**64, 10**30, "1", None):
        value = changed(holder.token, pid=pid)
        redis.set(key, value, px=TIMEOUT * 1000)
        assert calls() is None, pid
        assert redis.get(key) == value
    redis.set(key, holder.token, px=TIMEOUT * 1000)
    assert calls() == "done"  # it was for its number that the others were left alone


@pytest.mark.parametrize("value", [b"", b"\xff", b"somebody", b"{}", b"[]", b'{"only_one":1}'])
def test_what_is_no_holder_is_busy(redis: Any, key: str, value: bytes) -> None:
    redis.set(key, value)
    assert [call(), call_async()] == [None, None]
    assert redis.get(key) == value


# Compare and set


def test_another_that_takes_over_in_between(
    redis: Any, redis_url: str, prefix: str, key: str, reclaimed: list[Reclaimed]
) -> None:
    """Between the look at the dead holder and the command that replaces it, the key becomes another's."""
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        holder.kill()
    with Proxy(redis_url) as proxy:
        held = proxy.hold_up("EVALSHA", "EVAL")
        results: list[Any] = []
        caller = threading.Thread(target=lambda: results.append(call(redis=proxy.url)))
        caller.start()
        assert held.met.wait(LIMIT)
        with Running(lease=60) as other:
            held.let_go()
            caller.join(LIMIT)
            assert results == [None]
            assert redis.get(key) == other.lock.token
            assert redis.pttl(key) > 30_000
        assert other.result == "done"
    assert [event.value for event in reclaimed] == [holder.token]


@pytest.mark.parametrize("becomes", ["free", "ours"])
def test_a_takeover_whose_first_try_went_astray(
    redis: Any, redis_url: str, prefix: str, key: str, becomes: str
) -> None:
    """The key has become free in between, or the takeover was carried out and its reply lost."""
    with Holder(redis_url, prefix, timeout=TIMEOUT) as holder:
        holder.kill()
    results: list[Any] = []
    with Proxy(redis_url) as proxy:
        if becomes == "ours":
            assert call(redis=proxy.url) == "done"  # the script is known from here on
            redis.set(key, holder.token, px=TIMEOUT * 1000)
            proxy.lose_reply("EVALSHA")
            results.append(call(redis=proxy.url))
        else:
            held = proxy.hold_up("EVALSHA", "EVAL")
            caller = threading.Thread(target=lambda: results.append(call(redis=proxy.url)))
            caller.start()
            assert held.met.wait(LIMIT)
            redis.delete(key)
            held.let_go()
            caller.join(LIMIT)
    assert results == ["done"]
    assert not redis.exists(key)


# Tokens of our own that nobody holds


def hasty_client(url: str) -> Any:
    """A client that soon gives up, and does not ask twice."""
    return redis_py.Redis.from_url(url, socket_timeout=0.2, socket_connect_timeout=0.2, retry=Retry(NoBackoff(), 0))


@pytest.fixture
def stranded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread in the background reaches no server, so that what is left behind stays there."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        client = hasty_client(f"redis://127.0.0.1:{nobody.getsockname()[1]}/0")
    monkeypatch.setattr("only_one.servers.Server.background", client)


@pytest.fixture(params=["sync", "async"])
def lasting(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Both kinds of calls, with connections that live on from call to call."""
    if request.param == "sync":
        yield call
        return
    loop = asyncio.new_event_loop()

    def call_in_loop(**options: Any) -> Any:
        @only_one("k", timeout=TIMEOUT, **options)
        async def work() -> str:
            return "done"

        return loop.run_until_complete(work())

    yield call_in_loop
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@pytest.mark.usefixtures("stranded")
def test_a_forgotten_token_of_our_own_does_not_block(
    server: RedisServer, key: str, lasting: Callable[..., Any], reclaimed: list[Reclaimed]
) -> None:
    """The acquire timed out on a frozen server, which carries it out when it goes on."""
    with redis_py.Redis.from_url(server.url) as client, hasty_client(server.url) as hasty:
        kept = find_server(hasty)  # as a function that is covered once keeps it, with its connections
        assert eventually(lambda: succeeds(lasting, hasty))
        server.pause()
        try:
            with pytest.raises(LockUnavailable):
                lasting(redis=hasty)
        finally:
            server.resume()
        assert eventually(lambda: client.exists(key))
        token = client.get(key)
        found = HolderOf.parse(token)
        assert found is not None
        assert found.pid == os.getpid()
        assert client.pttl(key) > 500_000
        assert eventually(lambda: succeeds(lasting, hasty), SLACK)
        assert [event.value for event in reclaimed] == [token]
        assert not client.exists(key)
        assert find_server(hasty) is kept


def succeeds(calls: Callable[..., Any], client: Any) -> bool:
    """Whether a call runs; with time-outs as short as these the server may be too slow."""
    with suppress(LockUnavailable):
        return bool(calls(redis=client) == "done")
    return False


@pytest.mark.usefixtures("stranded")
def test_a_forgotten_token_does_not_block_though_takeover_is_of_no_use_to_others(
    server: RedisServer, prefix: str, key: str
) -> None:
    """The process that forgot it lives: to others it is busy, and to itself it is not."""
    with redis_py.Redis.from_url(server.url) as client, hasty_client(server.url) as hasty:
        kept = find_server(hasty)
        assert eventually(lambda: succeeds(call, hasty))
        server.pause()
        try:
            with pytest.raises(LockUnavailable):
                call(redis=hasty)
        finally:
            server.resume()
        assert eventually(lambda: client.exists(key))
        command = [sys.executable, "-c", AT_LEAST, server.url, prefix, "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == "None\n"
        assert eventually(lambda: succeeds(call, hasty), SLACK)
        assert find_server(hasty) is kept


# What a dead holder may have left at work


def test_the_children_of_a_holder_may_go_on_where_takeover_is_off(redis: Any, redis_url: str, prefix: str) -> None:
    """That is what `takeover=False` is for: the holder has left work behind its back."""
    with Holder(redis_url, prefix, lease=1.0, takeover=False) as holder:
        os.kill(holder.pid, signal.SIGKILL)
        assert holder.process.wait(LIMIT) == 128 + signal.SIGKILL
        left = redis.pttl(f"{prefix}k") / 1000
        begun = time.monotonic()
        assert call(takeover=False) is None
        assert eventually(lambda: call(takeover=False), 1 + SLACK)
        assert time.monotonic() - begun > left - 0.1
