"""Keys that are renewed while a run lives, are lost when they are lost, and are never left behind.

What a run holds is watched from outside, by another client or another process.
Faults are real: servers are stopped, killed and cut off while a run holds its key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from only_one import LockLost, LockUnavailable, configure, current_lock, only_one, skip, subscribe
from only_one.events import Event, Lost
from only_one.testing import RedisServer, guarded, redis_server
from tests.proxy import Fault, Proxy
from tests.waiting import LIMIT, eventually

if TYPE_CHECKING:
    from typing_extensions import Self

NAME = "k"
LEASE = 0.4
"""Seconds; a renewal may be late by two thirds of them, on a machine that has other things to do."""

RENEWALS = ("EVAL", "EVALSHA")
RELEASES = ("DELIFEQ", "DELEX", "EVALSHA", "EVAL")


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


@pytest.fixture
def direct(redis_url: str, prefix: str) -> Iterator[Any]:  # noqa: ARG001 - its settings are put back after ours
    """A client of the shared server, past every proxy; what the test covers takes its keys there."""
    with redis.Redis.from_url(redis_url) as client, configure(redis=redis_url):
        yield client


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def hasty(proxy: Proxy) -> Iterator[Any]:
    """A client through the proxy that soon gives up, and does not ask twice."""
    with hasty_client(proxy.url) as client:
        yield client


def default_client(url: str, **options: Any) -> Any:
    """A client with the retries of redis-py, which `from_url` leaves out."""
    return redis.Redis(**redis.connection.parse_url(url), **options)  # type: ignore[no-untyped-call]


def hasty_client(url: str) -> Any:
    return redis.Redis.from_url(url, socket_timeout=0.2, socket_connect_timeout=0.2, retry=Retry(NoBackoff(), 0))


@pytest.fixture
def losses() -> Iterator[list[Lost]]:
    """What was told of lost keys."""
    found: list[Lost] = []

    def note(event: Event) -> None:
        if isinstance(event, Lost):
            found.append(event)

    unsubscribe = subscribe(note)
    yield found
    unsubscribe()


class Running(AbstractContextManager["Running"]):
    """A covered run in a thread of its own, until the end of the block.

    Attributes:
        lock: what `current_lock()` gave it.
        result: what it returned or raised.
    """

    lock: Any

    def __init__(self, key: str = NAME, **options: Any) -> None:
        self._started = threading.Event()
        self.finish = threading.Event()
        self.result: Any = None
        self._call = self._cover(key, options)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _cover(self, key: str, options: dict[str, Any]) -> Callable[[], Any]:
        @only_one(key, **options)
        def work() -> str:
            self._begin()
            assert self.finish.wait(60)
            return "done"

        return work

    def _begin(self) -> None:
        self.lock = current_lock()
        self._started.set()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.result = error
        finally:
            self._started.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(LIMIT)
        assert self.result is None, self.result
        assert hasattr(self, "lock"), "it did not run"
        return self

    def __exit__(self, *_: object) -> None:
        self.finish.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


class RunningAsync(Running):
    """The same in an event loop of its own."""

    def _cover(self, key: str, options: dict[str, Any]) -> Callable[[], Any]:
        @only_one(key, **options)
        async def work() -> str:
            self._begin()
            await asyncio.to_thread(self.finish.wait, 60)
            return "done"

        return lambda: asyncio.run(work())


@pytest.fixture(params=[Running, RunningAsync], ids=["sync", "async"])
def running(request: pytest.FixtureRequest) -> type[Running]:
    """Both kinds of runs in turn."""
    kind: type[Running] = request.param
    return kind


WATCH = """
import json, select, sys
import redis
client, keys = redis.Redis.from_url(sys.argv[1]), sys.argv[2:]
seen = {key: {"polls": 0, "missing": 0, "longest": 0, "values": []} for key in keys}
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    for key, found in seen.items():
        value, expiry = client.pipeline().get(key).pttl(key).execute()
        found["polls"] += 1
        found["missing"] += expiry <= 0
        found["longest"] = max(found["longest"], expiry)
        if value and value.decode() not in found["values"]:
            found["values"].append(value.decode())
print(json.dumps(seen), flush=True)
"""


@contextmanager
def watched(url: str, *keys: str) -> Iterator[dict[str, Any]]:
    """Another process that looks at keys during the block; what it has seen is known after it."""
    seen: dict[str, Any] = {}
    command = [sys.executable, "-c", WATCH, url, *keys]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield seen
        process.stdin.close()
        seen.update(json.loads(process.stdout.read()))


# Runs that are longer than their lease


def deadline(lock: Any) -> float:
    """When a lock will expire."""
    expires_in: float = lock.expires_in
    return time.monotonic() + expires_in


def is_renewed(lock: Any) -> bool:
    """Whether a lock is renewed soon."""
    before = deadline(lock)
    return eventually(lambda: deadline(lock) > before + 0.05)


def assert_kept(seen: dict[str, Any], keys: list[str], lease: float = LEASE) -> None:
    """All of the keys were there all the time, never for longer than a lease, and each was one run's."""
    assert list(seen) == keys
    for found in seen.values():
        assert found["polls"] > 20
        assert found["missing"] == 0
        assert 0 < found["longest"] <= lease * 1000
        assert len(found["values"]) == 1


def test_runs_that_wait_for_ten_leases_keep_their_keys(direct: Any, redis_url: str, prefix: str) -> None:
    names = ["main", "thread", "async"]
    keys = [f"{prefix}{name}" for name in names]

    @only_one(names[0], lease=LEASE)
    def wait() -> bool:
        with (
            Running(names[1], lease=LEASE) as thread,
            RunningAsync(names[2], lease=LEASE) as loop,
            watched(redis_url, *keys) as seen,
        ):
            time.sleep(10 * LEASE)
            assert thread.lock.is_held
            assert loop.lock.is_held
        assert_kept(seen, keys)
        return current_lock().is_held

    assert wait()
    assert direct.exists(*keys) == 0


def test_runs_that_compute_for_ten_leases_keep_their_keys(direct: Any, redis_url: str, prefix: str) -> None:
    names = ["main", "thread", "async"]
    keys = [f"{prefix}{name}" for name in names]
    held: list[bool] = []
    lease = 1.0  # each of its turns at the interpreter has the thread wait for all those that compute
    enough = threading.Event()

    def compute(name_: str) -> None:
        assert name_ in names
        while not enough.is_set():
            sum(range(1000))
        held.append(current_lock().is_held)

    run = only_one("{name_}", lease=lease)(compute)

    @only_one("async", lease=lease)
    async def run_async() -> None:
        compute("async")

    threads = [threading.Thread(target=run, args=["thread"]), threading.Thread(target=asyncio.run, args=[run_async()])]

    @only_one("main", lease=lease)
    def run_all() -> None:
        for thread in threads:
            thread.start()
        assert eventually(lambda: direct.exists(*keys) == len(keys))
        with watched(redis_url, *keys) as seen:
            until = time.monotonic() + 10 * lease
            while time.monotonic() < until:
                sum(range(1000))
        enough.set()
        assert_kept(seen, keys, lease)
        held.append(current_lock().is_held)

    run_all()
    for thread in threads:
        thread.join()
    assert held == [True] * 3
    assert direct.exists(*keys) == 0


@pytest.mark.usefixtures("direct")
def test_what_a_run_may_ask_of_its_lock(running: type[Running], key: str) -> None:
    with running(lease=30) as run:
        lock = run.lock
        assert lock.key == key
        assert lock.holder.pid == os.getpid()
        assert lock.is_held
        lock.ensure_held()
        assert 20 < lock.expires_in <= 30
        before = lock.expires_in
        assert lock.expires_in <= before
    with running(timeout=30, lease=1) as run:
        assert 0 < run.lock.expires_in <= 1
    with running(timeout=30) as run:
        assert 20 < run.lock.expires_in <= 30
    with running() as run:  # without a number: 30 s, renewed
        assert 20 < run.lock.expires_in <= 30


def test_the_key_is_never_renewed_past_the_timeout(
    running: type[Running], direct: Any, key: str, losses: list[Lost]
) -> None:
    lease, timeout, latest = 1.0, 1.5, 0.0
    with running(lease=lease, timeout=timeout) as run:
        began = time.monotonic()
        while run.lock.is_held:
            moment = time.monotonic()
            latest = max(latest, moment + direct.pttl(key) / 1000)
            time.sleep(0.01)
        assert lease < time.monotonic() - began  # it was renewed
        # And at no time for longer than to the limit, as the server counts: from when the command has arrived.
        assert latest - began < timeout + 0.1
        assert eventually(lambda: not direct.exists(key))
        with pytest.raises(LockLost, match="overrun"):
            run.lock.ensure_held()
    assert run.result == "done"
    assert [lost.reason for lost in losses] == ["overrun"]


def test_a_run_that_overruns_its_timeout_is_told_so(
    running: type[Running], direct: Any, key: str, losses: list[Lost], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "only_one"), running(timeout=0.1) as run:
        assert eventually(lambda: not direct.exists(key))
        assert not run.lock.is_held
        assert run.lock.expires_in == 0
        with pytest.raises(LockLost) as caught:
            run.lock.ensure_held()
        assert (caught.value.key, caught.value.reason, caught.value.holder) == (key, "overrun", None)
        direct.set(key, "the next one")

    assert run.result == "done"
    assert direct.get(key) == b"the next one"
    assert [(lost.key, lost.reason) for lost in losses] == [(key, "overrun")]
    assert [record.levelname for record in caplog.records if key in record.getMessage()] == ["WARNING"]


# The thread


def python(program: str, *arguments: str) -> list[str]:
    """The command that runs a program; forking beside a thread, which some of them do on purpose, warns."""
    return [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *arguments]


THREADS = """
import sys, threading, time
import redis
before = set(threading.enumerate())
import only_one
only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])
go_on = threading.Event()

@only_one.only_one("{number}")
def run(number):
    begun.release()
    go_on.wait(10)

print(len(set(threading.enumerate()) - before), flush=True)
begun = threading.Semaphore(0)
for number in range(20):
    before.add(thread := threading.Thread(target=run, args=[number]))
    thread.start()
for number in range(20):
    begun.acquire(timeout=10)
until = time.monotonic() + 10
while len(ours := set(threading.enumerate()) - before) > 1 and time.monotonic() < until:
    pass  # runs that begin at the same time may each start one, of which one stays
print(*[thread.daemon for thread in ours], flush=True)
go_on.set()
"""


def test_one_daemon_thread_that_is_started_by_the_first_lease(redis_url: str, prefix: str) -> None:
    done = subprocess.run(python(THREADS, redis_url, prefix), capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split("\n")[:2] == ["0", "True"]


FORKS = """
import os, sys, time
import redis
import only_one
url, prefix, lease = sys.argv[1], sys.argv[2], float(sys.argv[3])
only_one.configure(redis=url, prefix=prefix)
client = redis.Redis.from_url(url)

def stays(key, seconds):
    until, found = time.monotonic() + seconds, True
    while time.monotonic() < until:
        found = found and client.exists(prefix + key) == 1
        time.sleep(0.01)
    return found

@only_one.only_one("child", lease=lease)
def child():
    # On a thread that the child had to start anew.
    return stays("child", 3 * lease) and only_one.current_lock().is_held

@only_one.only_one("parent", lease=lease)
def parent():
    pid = os.fork()
    if not pid:
        return child()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), stays("parent", 2 * lease), flush=True)
    return only_one.current_lock().is_held

mine = os.getpid()
result = parent()
if os.getpid() != mine:
    os._exit(10 + result)  # the child has returned from the parent's run
print(result, client.exists(prefix + "parent", prefix + "child"))
"""


def test_a_fork_in_the_middle_of_a_run(redis_url: str, prefix: str) -> None:
    """The child returns from the run and releases nothing; runs of its own are renewed by a thread of its own."""
    command = python(FORKS, redis_url, prefix, str(LEASE))
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["11 True", "True 0"]


ORPHAN = """
import os, sys, time
import only_one
only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])

@only_one.only_one("child", lease=float(sys.argv[3]))
def child():
    time.sleep(60)

@only_one.only_one("parent", lease=float(sys.argv[3]))
def parent():
    if os.fork():
        print("forked", flush=True)
        time.sleep(60)
    child()

parent()
"""


def test_a_child_does_not_renew_the_key_of_its_parent(direct: Any, redis_url: str, prefix: str) -> None:
    command = python(ORPHAN, redis_url, prefix, str(LEASE))
    with guarded(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.guardian.stdout is not None
        assert program.guardian.stdout.readline() == "forked\n"
        assert eventually(lambda: direct.exists(f"{prefix}child"))
        assert direct.exists(f"{prefix}parent")
        program.signal(signal.SIGSTOP)  # it renews no more, and its end does not end the child
        assert eventually(lambda: not direct.exists(f"{prefix}parent"))
        assert direct.exists(f"{prefix}child")


# Connections that break


@pytest.mark.parametrize("client", ["ours", "default"])
@pytest.mark.parametrize("way", ["cut", "refused", "black_hole"])
def test_a_connection_that_is_gone_for_less_than_the_lease(
    proxy: Proxy, direct: Any, key: str, way: str, client: str, losses: list[Lost]
) -> None:
    lease = 1.8
    source = proxy.url if client == "ours" else default_client(proxy.url, socket_timeout=0.2)
    with Running(lease=lease, redis=source) as run:
        token = direct.get(key)
        with getattr(proxy, way)():
            assert eventually(lambda: run.lock.expires_in < lease * 0.5)  # a renewal is overdue
            assert run.lock.is_held
        assert eventually(lambda: run.lock.expires_in > lease * 0.7)
        assert run.lock.is_held
        assert direct.get(key) == token
        assert direct.pttl(key) > lease * 500
    assert run.result == "done"
    assert losses == []
    assert eventually(lambda: not direct.exists(key))


@pytest.mark.parametrize("way", ["cut", "refused", "black_hole"])
def test_a_connection_that_is_gone_for_more_than_the_lease(
    running: type[Running], proxy: Proxy, hasty: Any, direct: Any, key: str, way: str, losses: list[Lost]
) -> None:
    with running(lease=LEASE, redis=hasty) as run:
        assert is_renewed(run.lock)
        with getattr(proxy, way)():
            assert eventually(lambda: not direct.exists(key))
            # Its deadline was counted from before the command was sent: it has known for longer than the server.
            assert not run.lock.is_held
            with pytest.raises(LockLost, match="expired"):
                run.lock.ensure_held()
        assert direct.set(key, "the next one", nx=True, px=60_000)
        connected = len(proxy.commands)
        assert hasty.ping()
        assert not eventually(lambda: run.lock.is_held, 2 * LEASE)  # what is lost is never taken back
        assert proxy.commands[connected:] == ["PING"]
    assert run.result == "done"
    assert direct.get(key) == b"the next one"
    assert [lost.reason for lost in losses] == ["expired"]


def test_scripts_that_are_flushed_during_a_run(direct: Any, key: str, losses: list[Lost]) -> None:
    with Running(lease=LEASE) as run:
        for _ in range(10):
            direct.script_flush()
            assert is_renewed(run.lock)
        assert direct.get(key) == run.lock.token
        direct.script_flush()
    assert run.result == "done"
    assert direct.exists(key) == 0
    assert losses == []


def test_a_server_that_forgets_everything_during_a_run(
    running: type[Running], server: RedisServer, losses: list[Lost]
) -> None:
    with redis.Redis.from_url(server.url) as client, running(lease=2) as run:
        server.kill()
        server.start()
        assert eventually(lambda: not run.lock.is_held)
        with pytest.raises(LockLost, match="deleted"):
            run.lock.ensure_held()

        with running("another", lease=LEASE) as later:  # renewal goes on
            assert not eventually(lambda: not later.lock.is_held, 3 * LEASE)
        assert client.dbsize() == 0
    assert run.result == "done"
    assert [lost.reason for lost in losses] == ["deleted"]


@pytest.mark.usefixtures("prefix")
def test_a_server_that_remembers_everything_during_a_run(key: str, losses: list[Lost]) -> None:
    with redis_server("--appendonly", "yes") as server, redis.Redis.from_url(server.url) as client:
        with Running(lease=5, redis=server.url) as run:
            token = client.get(key)
            server.kill()
            server.start()
            assert client.get(key) == token
            assert 0 < client.pttl(key) <= 5_000
            assert is_renewed(run.lock)
            assert run.lock.is_held
            assert client.get(key) == token
        assert client.exists(key) == 0
    assert losses == []


# Keys that are taken away


def test_a_key_that_is_deleted_during_a_run(running: type[Running], direct: Any, key: str, losses: list[Lost]) -> None:
    with running(lease=LEASE) as run:
        direct.delete(key)
        assert eventually(lambda: not run.lock.is_held)
        assert run.lock.expires_in == 0
        with pytest.raises(LockLost, match="deleted"):
            run.lock.ensure_held()
        assert not direct.exists(key)
    assert run.result == "done"
    assert [(lost.key, lost.reason) for lost in losses] == [(key, "deleted")]


def test_a_key_that_another_has_got_during_a_run(
    running: type[Running], direct: Any, key: str, losses: list[Lost]
) -> None:
    with running(lease=LEASE) as first:
        direct.delete(key)
        with running(lease=60) as second:
            assert eventually(lambda: not first.lock.is_held)
            with pytest.raises(LockLost, match="taken") as caught:
                first.lock.ensure_held()
            assert caught.value.holder == second.lock.holder
            first.__exit__()
            assert direct.get(key) == second.lock.token
            assert direct.pttl(key) > 50_000
            assert second.lock.is_held
    assert [(lost.reason, lost.holder) for lost in losses] == [("taken", second.lock.holder)]


@pytest.mark.parametrize("value", [b"by hand", b"\xff\x00", b""])
def test_a_key_that_is_overwritten_during_a_run(
    running: type[Running], direct: Any, key: str, value: bytes, losses: list[Lost]
) -> None:
    with running(lease=LEASE) as run:
        direct.set(key, value)
        assert eventually(lambda: not run.lock.is_held)
        with pytest.raises(LockLost, match="taken"):
            run.lock.ensure_held()
    assert (direct.get(key), direct.pttl(key)) == (value, -1)
    assert [lost.reason for lost in losses] == ["taken"]


def test_a_key_that_becomes_something_else_during_a_run(direct: Any, key: str, losses: list[Lost]) -> None:
    with Running(lease=LEASE) as run:
        direct.delete(key)
        direct.hset(key, "a", "1")
        assert eventually(lambda: not run.lock.is_held)
    assert run.result == "done"
    assert (direct.hgetall(key), direct.pttl(key)) == ({b"a": b"1"}, -1)
    assert [lost.reason for lost in losses] == ["taken"]


def test_a_key_that_is_overwritten_just_before_the_end(
    running: type[Running], direct: Any, key: str, losses: list[Lost]
) -> None:
    with running(lease=60) as run:
        direct.set(key, "by hand")
    assert run.result == "done"
    assert direct.get(key) == b"by hand"
    assert [lost.reason for lost in losses] == ["taken"]


STOPPED = """
import sys, time
import only_one
only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])

@only_one.only_one("k", lease=float(sys.argv[3]))
def run():
    print("begun", flush=True)
    while only_one.current_lock().is_held:
        time.sleep(0.01)
    try:
        only_one.current_lock().ensure_held()
    except only_one.LockLost as lost:
        print(lost.reason, flush=True)

run()
"""


def test_a_holder_that_is_stopped_past_its_lease(direct: Any, redis_url: str, prefix: str, key: str) -> None:
    """The next one runs; the stopped one finds out that it has lost, and releases nothing."""
    with guarded(python(STOPPED, redis_url, prefix, "1"), stdout=subprocess.PIPE, text=True) as program:
        stdout = program.guardian.stdout
        assert stdout is not None
        assert stdout.readline() == "begun\n"
        program.signal(signal.SIGSTOP)
        assert eventually(lambda: not direct.exists(key))
        with Running(lease=60) as second:
            token = direct.get(key)
            program.signal(signal.SIGCONT)
            assert stdout.readline() in {"expired\n", "taken\n"}
            assert program.wait(LIMIT) == 0
            assert direct.get(key) == token == second.lock.token
            assert second.lock.is_held


# Trouble that stays where it is


class Moody(CredentialProvider):
    """Credentials that are there at first, and later fail in a way that redis-py knows nothing of."""

    def __init__(self) -> None:
        self.fails = False
        self.failed = threading.Event()

    def get_credentials(self) -> tuple[str, str]:
        if self.fails:
            self.failed.set()
            msg = "no token today"
            raise RuntimeError(msg)
        return "default", "secret"


def test_a_client_that_raises_something_else_loses_no_other_lease(server: RedisServer, redis_url: str) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "secret")
    mood = Moody()
    with (
        Proxy(server.url) as proxy,
        redis.Redis.from_url(proxy.url, credential_provider=mood, retry=Retry(NoBackoff(), 0)) as moody,
        Running(lease=3, redis=moody) as run,
        Running("other", lease=LEASE, redis=redis_url) as other,
    ):
        mood.fails = True
        with proxy.cut():
            assert mood.failed.wait(LIMIT)
        assert not eventually(lambda: not other.lock.is_held, 3 * LEASE)
        mood.fails = False
        assert is_renewed(run.lock)
    assert run.result == other.result == "done"


@pytest.mark.parametrize("way", ["refused", "black_hole"])
def test_a_server_that_is_down_loses_no_lease_on_another(proxy: Proxy, redis_url: str, way: str) -> None:
    """However long redis-py tries by itself to renew what is on the one."""
    with (
        default_client(proxy.url, socket_timeout=0.5, socket_connect_timeout=0.5) as slow,
        Running("slow", lease=1, redis=slow),
        Running(lease=1, redis=redis_url) as run,
        getattr(proxy, way)(),
    ):
        assert not eventually(lambda: not run.lock.is_held, 2)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("clients", [1, 20])
def test_tokens_of_unknown_fate_lose_no_lease(proxy: Proxy, clients: int) -> None:
    """However many there are to be released on a server that does not answer, and by however many clients."""
    sources = [hasty_client(proxy.url) for _ in range(clients)]

    def work() -> None: ...

    calls = [only_one(str(number), redis=sources[number % clients], when_down=skip)(work) for number in range(20)]
    with Running(lease=1) as run, proxy.black_hole():
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not eventually(lambda: not run.lock.is_held, 2)


# Tokens of unknown fate


def freed(client: Any, key: str) -> bool:
    """Whether a key is free soon, long before it would expire by itself."""
    return eventually(lambda: not client.exists(key), 5)


def sets(client: Any) -> int:
    """How many SET commands the server has carried out."""
    calls: int = client.info("commandstats").get("cmdstat_set", {"calls": 0})["calls"]
    return calls


def has_set_since(client: Any, before: int) -> bool:
    """Whether the server has carried out a SET since it had done so `before` times."""
    return sets(client) > before


class Caller:
    """A call that takes a key and gives it back."""

    def __init__(self, **options: Any) -> None:
        @only_one(NAME, **options)
        def run() -> str:
            return "done"

        self._run = run

    def __call__(self) -> Any:
        return self._run()

    def close(self) -> None:
        """Leave nothing open."""


class AsyncCaller(Caller):
    """The same in an event loop that lives on from call to call, and its connections with it."""

    def __init__(self, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()

        @only_one(NAME, **options)
        async def run() -> str:
            return "done"

        self._run_async = run

    def __call__(self) -> Any:
        return self._loop.run_until_complete(self._run_async())

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@pytest.fixture(params=[Caller, AsyncCaller], ids=["sync", "async"])
def caller(request: pytest.FixtureRequest) -> type[Caller]:
    """Both kinds of calls in turn."""
    kind: type[Caller] = request.param
    return kind


def test_a_server_that_is_frozen_during_an_acquire(server: RedisServer, key: str, caller: type[Caller]) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    pauses = random.Random(seed)
    short = {"socket_timeout": 0.1, "socket_connect_timeout": 0.1, "retry": Retry(NoBackoff(), 0)}
    late = 0
    with redis.Redis.from_url(server.url) as client, redis.Redis.from_url(server.url, **short) as hasty:
        call = caller(lease=60, redis=hasty)
        for _ in range(20):
            assert eventually(lambda: succeeds(call))
            before = sets(client)
            server.pause()
            try:
                with pytest.raises(LockUnavailable):
                    call()
                time.sleep(pauses.uniform(0, 0.2))
            finally:
                server.resume()
            late += eventually(partial(has_set_since, client, before), 1)
            assert freed(client, key)
        call.close()
    assert late > 10  # it did carry out what it was sent before it was frozen


def succeeds(call: Callable[[], Any]) -> bool:
    """Whether a call runs; with time-outs as short as these it may not."""
    with suppress(LockUnavailable):
        return bool(call() == "done")
    return False


def test_a_command_that_arrives_long_after_its_caller_has_given_up(
    proxy: Proxy, hasty: Any, direct: Any, key: str, caller: type[Caller]
) -> None:
    call = caller(lease=60, redis=hasty)
    assert call() == "done"
    held = proxy.hold_up("SET", times=2)
    with pytest.raises(LockUnavailable):
        call()
    assert held.met.is_set()
    proxy.forget_commands()
    assert eventually(lambda: len(proxy.commands) >= 3)  # "it is not there" is not taken for an answer
    assert not direct.exists(key)

    before = sets(direct)
    held.let_go()
    assert eventually(lambda: sets(direct) > before)
    assert freed(direct, key)
    assert call() == "done"
    call.close()


class Interruption(BaseException):
    """What a signal handler may raise, as Celery's does at a soft time limit."""


@pytest.mark.interrupts
def test_an_acquire_that_is_interrupted_by_a_signal(proxy: Proxy, direct: Any, key: str) -> None:
    def interrupt(*_: object) -> None:
        raise Interruption

    @only_one(NAME, lease=60, redis=proxy.url)
    def run() -> str:
        return "done"

    assert run() == "done"
    held = proxy.hold_up("SET")

    def interrupt_when_sent() -> None:
        held.met.wait(LIMIT)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=interrupt_when_sent)
    sender.start()
    try:
        with pytest.raises(Interruption):
            run()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    held.let_go()
    assert freed(direct, key)
    assert run() == "done"


@pytest.mark.parametrize("arrives", ["at all", "late", "never"])
def test_an_acquire_that_is_cancelled(proxy: Proxy, direct: Any, key: str, arrives: str) -> None:
    @only_one(NAME, lease=60, redis=proxy.url)
    async def run() -> str:
        return "done"

    async def cancel() -> None:
        assert await run() == "done"
        faults: dict[str, Callable[[str], Fault]] = {
            "at all": partial(proxy.lose_reply, then="hang"),
            "late": proxy.hold_up,
            "never": partial(proxy.lose_request, then="hang"),
        }
        fault = faults[arrives]("SET")
        task = asyncio.ensure_future(run())
        await asyncio.to_thread(fault.met.wait, LIMIT)
        # Python before 3.12 loses a cancellation that comes when redis-py has just sent something.
        await asyncio.sleep(0.1)
        assert direct.exists(key) == (arrives == "at all")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fault.let_go()
        assert await asyncio.to_thread(freed, direct, key)
        assert await run() == "done"

    asyncio.run(cancel())
    assert not direct.exists(key)


def test_a_run_and_a_release_that_are_cancelled(proxy: Proxy, direct: Any, key: str) -> None:
    begun: list[float] = []

    @only_one(NAME, lease=60, redis=proxy.url)
    async def run(seconds: float) -> str:
        begun.append(seconds)
        await asyncio.sleep(seconds)
        return "done"

    async def cancel() -> None:
        assert await run(0) == "done"
        task = asyncio.ensure_future(run(60))
        assert await asyncio.to_thread(eventually, lambda: 60 in begun)
        assert direct.exists(key)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not direct.exists(key)

        fault = proxy.lose_request(*RELEASES, then="hang")
        task = asyncio.ensure_future(run(0))
        await asyncio.to_thread(fault.met.wait, LIMIT)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(freed, direct, key)

    asyncio.run(cancel())


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_server_that_is_frozen_at_the_end_of_a_run(server: RedisServer, key: str, ending: str) -> None:
    @only_one(NAME, lease=60, redis=hasty_client(server.url))
    def run() -> str:
        server.pause()
        if ending == "raises":
            msg = "the run's own"
            raise KeyError(msg)
        return "done"

    with redis.Redis.from_url(server.url) as client:
        if ending == "raises":
            with pytest.raises(KeyError, match="the run's own"):
                run()
        else:
            assert run() == "done"
        server.resume()
        assert freed(client, key)


@pytest.mark.parametrize("way", ["cut", "refused", "black_hole"])
def test_a_connection_that_is_gone_at_the_end_of_a_run(
    running: type[Running], proxy: Proxy, hasty: Any, direct: Any, key: str, way: str, losses: list[Lost]
) -> None:
    with running(lease=60, redis=hasty) as run:
        with getattr(proxy, way)():
            run.__exit__()
            assert run.result == "done"
            assert direct.exists(key)
        assert freed(direct, key)
    assert losses == []
