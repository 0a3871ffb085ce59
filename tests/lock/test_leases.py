"""Keys that are renewed while a run lives, are lost when they are lost, and are never left behind.

What a run holds is watched from outside, by another client.
Faults are real: servers are stopped and cut off while a run holds its key.
Leases are long, and renewed when the test says so; that they are kept in time under load is `live.test_ten_leases`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from only_one import LockLost, LockUnavailable, only_one, skip, subscribe
from only_one.clock import now
from only_one.connections import node as nodes
from only_one.events import Event, Lost
from only_one.lock import renewal
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Program, Running, RunningAsync
from tests.proxy import Fault, Proxy
from tests.renewal import fails_to_renew, is_awaited, is_idle, is_renewed, later, renew_now

NAME = "k"
LONG = 3600.0
"""Seconds that no test takes, so that no key expires by itself."""

KINDS = (Running, RunningAsync)
RELEASES = ("DELIFEQ", "DELEX", "EVAL")


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(redis_url) as proxy:
        yield proxy


def client_that_tries_again(url: str) -> Any:
    """A client with the retries of redis-py, which `from_url` leaves out."""
    return redis.Redis(**redis.connection.parse_url(url))  # type: ignore[no-untyped-call]


def hasty_client(url: str, seconds: float = 1) -> Any:
    """A client that soon gives up, and does not ask twice."""
    options = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)


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


# Runs that are longer than their lease


def test_what_a_run_may_ask_of_its_lock(direct: Any, key: str) -> None:
    times: list[tuple[dict[str, Any], float]] = [
        ({"lease": 300}, 300),
        ({"timeout": 3000, "lease": 300}, 300),
        ({"timeout": 7 * 24 * LONG}, 7 * 24 * LONG),
        ({}, 30),  # without a number: 30 s, renewed
    ]
    for options, expected in times:
        for kind in KINDS:
            with kind(**options) as run:
                lock = run.lock
                assert lock.key == key
                assert lock.holder.pid == os.getpid()
                assert lock.is_held
                lock.ensure_held()
                assert lock.expires_at - lock.begun == pytest.approx(expected)
                before = lock.expires_in
                assert 0 < lock.expires_in <= before <= expected
                assert (expected - LIMIT) * 1000 < direct.pttl(key) <= expected * 1000


def test_runs_are_renewed_again_and_again(direct: Any, prefix: str, losses: list[Lost]) -> None:
    """In threads and in event loops, each for a whole lease, and when a third of it has gone by."""
    week = 7 * 24 * LONG
    with Running("thread", lease=week) as thread, RunningAsync("async", lease=week) as run_async:
        for run in (thread, run_async):
            lock = run.lock
            assert lock.renew_at - lock.begun == pytest.approx(week / 3)
            assert is_awaited(lock)
            token = direct.get(lock.key)
            for _ in range(3):
                direct.pexpire(lock.key, 30_000)
                assert is_renewed(lock)
                assert (week - LIMIT) * 1000 < direct.pttl(lock.key) <= week * 1000
                assert lock.expires_at - lock.renew_at == pytest.approx(week * 2 / 3)
                assert is_awaited(lock)
            assert direct.get(lock.key) == token == lock.token
    assert direct.exists(f"{prefix}thread", f"{prefix}async") == 0
    assert losses == []


@pytest.mark.parametrize("times", [{"timeout": 600}, {"timeout": 600, "lease": 400}], ids=["never renewed", "renewed"])
def test_no_key_outlives_its_timeout(direct: Any, times: dict[str, Any], losses: list[Lost]) -> None:
    """It is renewed until then and no longer, the run is told, and leaves alone what is there by then."""
    runs = [Running("sync", **times), RunningAsync("async", **times)]
    with runs[0], runs[1]:
        locks = [run.lock for run in runs]
        for lock in locks:
            direct.pexpire(lock.key, 1_000_000)
        with later(350):
            if "lease" in times:
                assert eventually(lambda: all(0 < direct.pttl(lock.key) <= 250_000 for lock in locks))
            for lock in locks:
                assert eventually(lambda lock=lock: lock.renew_at == pytest.approx(lock.begun + 600))  # type: ignore[misc]
                assert lock.expires_at == pytest.approx(lock.begun + 600)
            assert all(lock.is_held for lock in locks)
            assert all(is_awaited(lock) for lock in locks)
        with later(600):
            assert eventually(lambda: len(losses) == len(runs))
            for lock in locks:
                direct.set(lock.key, "the next one")
                assert not lock.is_held
                assert lock.expires_in == 0
                with pytest.raises(LockLost) as caught:
                    lock.ensure_held()
                assert (caught.value.key, caught.value.reason, caught.value.holder) == (lock.key, "overrun", None)
            for run in runs:
                run.__exit__()
    assert [run.result for run in runs] == ["done", "done"]
    assert [direct.get(lock.key) for lock in locks] == [b"the next one"] * 2
    assert [lost.reason for lost in losses] == ["overrun"] * 2


# The thread


THREADS = """
import sys, threading
import redis
before = set(threading.enumerate())
import only_one
from rigs.waiting import eventually
only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])
go_on, begun = threading.Event(), threading.Semaphore(0)

def ours():
    return set(threading.enumerate()) - before

@only_one.only_one("{number}")
def run(number):
    begun.release()
    go_on.wait()

print(len(ours()))
for number in range(20):
    before.add(thread := threading.Thread(target=run, args=[number], daemon=True))
    thread.start()
for number in range(20):
    begun.acquire()
# Runs that begin at the same time may each start one, of which one stays; another has a look at the server.
eventually(lambda: len(ours()) == 1)
print(*[thread.daemon for thread in ours()])
go_on.set()
"""


def test_one_daemon_thread_that_is_started_by_the_first_lease(redis_url: str, prefix: str) -> None:
    with Program(THREADS, redis_url, prefix) as program:
        assert [program.line(), program.line()] == ["0", "True"]


@pytest.mark.usefixtures("direct")
def test_a_second_thread_that_was_started_at_the_same_time_ends() -> None:
    with Running():
        second = threading.Thread(target=renewal._renewer.run, daemon=True)
        second.start()
        second.join(LIMIT)
        assert not second.is_alive()


@contextmanager
def no_more_threads() -> Iterator[None]:
    """The system starts no thread, as where a limit is reached: there is no room for a stack of 64 TB."""
    threading.stack_size(2**46)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_no_thread_can_be_started_for(direct: Any, kind: type[Running], losses: list[Lost]) -> None:
    """The run tells of it at its end, and others are renewed as before."""
    told: list[str] = []
    with (
        kind(lease=LONG, when_lost=lambda lost: told.append(lost.reason)) as run,
        Running("other", lease=LONG) as other,
    ):
        assert is_renewed(other.lock)
        with no_more_threads():
            direct.delete(run.lock.key)
            renew_now(run.lock)
            assert eventually(lambda: not run.lock.is_held)
            assert is_renewed(other.lock)
            assert told == []
            run.__exit__()
        assert told == ["deleted"]
        assert is_renewed(other.lock)
    assert run.result == other.result == "done"
    assert [lost.reason for lost in losses] == ["deleted"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [{}, {"lease": 60}, {"timeout": 600, "lease": 60}, {"timeout": 600}])
def test_a_call_whose_key_no_thread_could_renew_says_so(
    direct: Any, key: str, monkeypatch: pytest.MonkeyPatch, kind: type[Running], times: dict[str, Any]
) -> None:
    """Before it asks for its key; a call without a lease needs no thread."""
    monkeypatch.setattr(renewal, "_renewer", renewal._Renewer())
    run = kind(**times)
    run.finish.set()
    call = run._call
    with no_more_threads():
        if "lease" not in times and times:
            assert call() == "done"
            return
        with pytest.raises(LockUnavailable, match=r"can't start new thread.*: write timeout= without lease="):
            call()
    assert renewal._renewer.pending_releases == {}
    assert not direct.exists(key)
    assert call() == "done"


AFTER_MAIN = """
import sys, threading
from only_one import LockUnavailable, configure, current_lock, only_one
from tests.renewal import is_renewed

configure(redis=sys.argv[1], prefix=sys.argv[2])

@only_one("k", lease=60)
def work():
    return "renewed" if is_renewed(current_lock()) else "not renewed"

def call_when_main_has_ended():
    threading.main_thread().join()
    try:
        said = work()
    except LockUnavailable as error:
        said = str(error)
    print(said, flush=True)

threading.Thread(target=call_when_main_has_ended).start()
"""


def test_a_first_call_after_the_main_thread_has_ended_is_renewed_or_says_so(redis_url: str, prefix: str) -> None:
    """From Python 3.12 on no thread can be started by then."""
    with Program(AFTER_MAIN, redis_url, prefix) as program:
        said = program.line()
    assert said == "renewed" or "new thread at interpreter shutdown (nothing could renew the key: write" in said


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("step", ["cleanups.release_due", "look_at_a_new_server"])
def test_whatever_goes_wrong_in_one_turn_the_next_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    with Running(lease=LONG) as run:
        assert is_renewed(run.lock)

        def fail() -> None:
            msg = "nobody has thought of it"
            raise MemoryError(msg)

        monkeypatch.setattr(f"only_one.lock.renewal._renewer.{step}", fail)
        assert all(is_renewed(run.lock) for _ in range(3))
        monkeypatch.undo()
        assert is_renewed(run.lock)
    assert eventually(lambda: "nobody has thought of it" in caplog.text)


FORKS = """
import asyncio, os, sys
import only_one
from tests.renewal import is_awaited, is_renewed
only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])
mine = os.getpid()

@only_one.only_one("child")
def child():
    return is_renewed(only_one.current_lock())

def body():
    assert is_awaited(only_one.current_lock())  # a thread that is at work may hold a lock that the child would wait for
    pid = os.fork()
    if not pid:
        return child()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and is_renewed(only_one.current_lock())

@only_one.only_one("parent")
def parent():
    return body()

@only_one.only_one("parent")
async def parent_async():
    return body()

for run in (parent, lambda: asyncio.run(parent_async())):
    result = run()
    if os.getpid() != mine:
        os._exit(0 if result else 1)
    print(result)
"""


def test_a_fork_in_the_middle_of_a_run(redis_url: str, prefix: str) -> None:
    """The child returns from the run and releases nothing; runs of its own are renewed by a thread of its own."""
    with Program(FORKS, redis_url, prefix) as program:
        assert [program.line(), program.line()] == ["True", "True"]


# Connections that break


def test_a_connection_that_is_gone_for_less_than_the_lease(proxy: Proxy, direct: Any, losses: list[Lost]) -> None:
    """Whatever client the run was given: what fails is tried again by itself, and does not wait for its turn."""
    with (
        client_that_tries_again(proxy.url) as client,
        Running("ours", lease=LONG, redis=proxy.url) as ours,
        Running("default", lease=LONG, redis=client) as default,
    ):
        locks = [ours.lock, default.lock]
        expiries, values = [lock.expires_at for lock in locks], direct.mget([lock.key for lock in locks])
        with proxy.cut():
            assert all(fails_to_renew(lock) for lock in locks)
            assert all(lock.is_held for lock in locks)
        for lock, before in zip(locks, expiries, strict=True):
            assert eventually(lambda lock=lock, before=before: lock.expires_at > before)  # type: ignore[misc]
        assert direct.mget([lock.key for lock in locks]) == values
    assert ours.result == default.result == "done"
    assert direct.exists(*[lock.key for lock in locks]) == 0
    assert losses == []


def test_a_connection_that_is_gone_for_more_than_the_lease(proxy: Proxy, direct: Any, losses: list[Lost]) -> None:
    """What is lost is never taken back."""
    runs = [Running("sync", lease=LONG, redis=proxy.url), RunningAsync("async", lease=LONG, redis=proxy.url)]
    with runs[0], runs[1]:
        locks = [run.lock for run in runs]
        with later(LONG):
            with proxy.cut():
                assert eventually(lambda: len(losses) == len(runs))
            for lock in locks:
                direct.set(lock.key, "the next one")
                assert not lock.is_held
                with pytest.raises(LockLost, match="expired"):
                    lock.ensure_held()
            proxy.forget_commands()
            with Running("another", lease=LONG, redis=proxy.url) as another:
                renew_now(*locks)
                assert is_renewed(another.lock)
                assert proxy.commands.count("EVAL") == 1
            assert not any(lock.is_held for lock in locks)
    assert [run.result for run in runs] == ["done", "done"]
    assert [direct.get(lock.key) for lock in locks] == [b"the next one"] * 2
    assert [lost.reason for lost in losses] == ["expired"] * 2


def test_why_a_renewal_failed(proxy: Proxy, direct: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once until the reason is another, by a thread that may take its time, and is the cause of a loss."""
    assert direct
    texts: list[str] = []
    lets_go = threading.Event()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            lets_go.wait(LIMIT)

    slow, log = Slow(), logging.getLogger("only_one")
    log.addHandler(slow)
    try:
        with Running(lease=LONG, redis=proxy.url) as run, Running("other", lease=LONG) as other:
            caplog.set_level(logging.DEBUG, "only_one")
            with proxy.cut():
                assert fails_to_renew(run.lock)
                assert eventually(lambda: texts)
                assert is_renewed(other.lock)
                assert fails_to_renew(run.lock)
                assert run.lock.trouble
                with later(LONG), pytest.raises(LockLost, match="expired") as caught:
                    run.lock.ensure_held()
                assert isinstance(caught.value.__cause__, redis.ConnectionError)
            caplog.set_level(logging.INFO, "only_one")
            assert is_renewed(other.lock)
            lets_go.set()
    finally:
        lets_go.set()
        log.removeHandler(slow)
    told = [text for text in texts if "could not be renewed" in text]
    assert len(told) == len(set(told))
    assert told[0].startswith(run.lock.key)
    assert "ConnectionError" in told[0]


def test_scripts_that_are_flushed_during_a_run(direct: Any, key: str, losses: list[Lost]) -> None:
    with Running(lease=LONG) as run:
        for _ in range(2):
            direct.script_flush()
            assert is_renewed(run.lock)
        assert direct.get(key) == run.lock.token
        direct.script_flush()
    assert run.result == "done"
    assert direct.exists(key) == 0
    assert losses == []


# Keys that are taken away


def test_keys_that_are_taken_away_during_a_run(direct: Any, prefix: str, losses: list[Lost]) -> None:
    """Deleted, overwritten, or of another type: the run is told, and leaves what is there by then alone."""
    values: dict[str, Any] = {"none": None, "text": b"by hand", "binary": b"\xff\x00", "empty": b""}
    values["hash"] = {b"a": b"1"}
    runs = {name: (RunningAsync if name == "none" else Running)(name, lease=LONG) for name in values}
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(runs[name])
            direct.delete(prefix + name)
            if isinstance(value, dict):
                direct.hset(prefix + name, mapping=value)
            elif value is not None:
                direct.set(prefix + name, value)
        renew_now(*[run.lock for run in runs.values()])
        for name, run in runs.items():
            assert eventually(lambda run=run: not run.lock.is_held)  # type: ignore[misc]
            assert run.lock.expires_in == 0
            with pytest.raises(LockLost, match="deleted" if name == "none" else "taken"):
                run.lock.ensure_held()
        # What is lost is lost, whatever becomes of the key.
        direct.set(prefix + "none", runs["none"].lock.token, px=30_000)
        another = stack.enter_context(Running("another", lease=LONG))
        renew_now(*[run.lock for run in runs.values()])
        assert is_renewed(another.lock)
        assert direct.pttl(prefix + "none") <= 30_000
    for name, value in values.items():
        assert runs[name].result == "done"
        assert (direct.hgetall if name == "hash" else direct.get)(prefix + name) == value
        assert direct.pttl(prefix + name) == (-2 if value is None else -1)
    told = {lost.key: lost.reason for lost in losses}
    assert told == {prefix + name: "deleted" if name == "none" else "taken" for name in values}
    assert len(losses) == len(values)


def test_a_key_that_another_has_got_during_a_run(direct: Any, key: str, losses: list[Lost]) -> None:
    with Running(lease=LONG) as first:
        direct.delete(key)
        with Running(lease=LONG) as second:
            renew_now(first.lock)
            assert eventually(lambda: not first.lock.is_held)
            with pytest.raises(LockLost, match="taken") as caught:
                first.lock.ensure_held()
            assert caught.value.holder == second.lock.holder
            first.__exit__()
            assert direct.get(key) == second.lock.token
            assert direct.pttl(key) > LONG * 500
            assert second.lock.is_held
    assert [(lost.reason, lost.holder) for lost in losses] == [("taken", second.lock.holder)]


def test_a_renewal_that_is_answered_when_its_run_has_ended(
    proxy: Proxy, direct: Any, key: str, losses: list[Lost]
) -> None:
    """The key is gone by then, and was not lost."""
    with Running(lease=LONG, redis=proxy.url) as run, Running("other", lease=LONG, redis=proxy.url) as other:
        assert is_awaited(run.lock)
        pool = run.lock.server.node_of("").client.connection_pool
        pool.connection_kwargs["socket_timeout"] = LIMIT
        pool.disconnect()
        held = proxy.hold_up("EVAL")
        renew_now(run.lock)
        assert held.met.wait(LIMIT)
        run.__exit__()
        assert not direct.exists(key)
        held.let_go()
        assert is_renewed(other.lock)
    assert eventually(lambda: "only_one-lost" not in {thread.name for thread in threading.enumerate()})
    assert losses == []


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
        return "default", "any will do"


def test_a_client_that_raises_something_else_loses_no_other_lease(proxy: Proxy, redis_url: str) -> None:
    mood = Moody()
    with (
        redis.Redis.from_url(proxy.url, credential_provider=mood, retry=Retry(NoBackoff(), 0)) as moody,
        Running(lease=LONG, redis=moody) as run,
        Running("other", lease=LONG, redis=redis_url) as other,
    ):
        mood.fails = True
        with proxy.cut():
            renew_now(run.lock)
            assert mood.failed.wait(LIMIT)
        assert is_renewed(other.lock)
        mood.fails = False
        assert is_renewed(run.lock)
    assert run.result == other.result == "done"


class Failures:
    """Notes when the thread that renews has found that a server does not answer, and what a lease was by then.

    Attributes:
        expiries: when the lease was to expire, at each of the failures.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.expiries: list[float] = []
        self.watched: Any = None
        fail = nodes.Node.fail

        def note(node: nodes.Node, rest: float | None = None) -> None:
            if self.watched is not None:
                self.expiries.append(self.watched.expires_at)
            fail(node, rest)

        monkeypatch.setattr(nodes.Node, "fail", note)


def is_waited_for_patiently(lock: Any) -> bool:
    """Whether its renewals come through on a slow machine, too, as its server may take its time from now on."""
    pool = lock.server.node_of(lock.key).client.connection_pool
    pool.connection_kwargs.update(socket_timeout=LIMIT, socket_connect_timeout=LIMIT)
    pool.disconnect()
    return is_renewed(lock)


def test_a_server_that_is_down_loses_no_lease_on_another(
    proxy: Proxy, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not waited for as patiently as the run does, and only when the others have had their turn."""
    failures = Failures(monkeypatch)
    with (
        client_that_tries_again(proxy.url) as patient,
        Running("down", lease=LONG, redis=patient) as down,
        Running(lease=LONG, redis=redis_url) as run,
    ):
        node = down.lock.server.node_of(down.lock.key)
        options = node.client.connection_pool.connection_kwargs
        assert (options["socket_timeout"], options["socket_connect_timeout"]) == (0.5, 0.25)
        assert options["retry"]._retries == 0
        assert is_renewed(down.lock)
        assert is_waited_for_patiently(run.lock)
        assert is_idle()
        with proxy.black_hole():
            node.fail(0)
            before, failures.watched = run.lock.expires_at, run.lock
            renew_now(down.lock, run.lock)
            assert eventually(lambda: failures.expiries)
            assert failures.expiries[0] > before


@pytest.mark.usefixtures("direct")
def test_tokens_of_unknown_fate_lose_no_lease(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are to be released on a server that does not answer: each lease has its turn in between."""
    failures = Failures(monkeypatch)
    clients = [hasty_client(proxy.url) for _ in range(5)]

    def work() -> None: ...

    calls = [only_one(str(number), redis=client, when_down=skip)(work) for number, client in enumerate(clients)]
    with Running(lease=LONG) as run, proxy.black_hole():
        assert is_waited_for_patiently(run.lock)
        failures.watched = run.lock
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        assert eventually(lambda: failures.expiries)
        for thread in threads:
            thread.join()
        before, count = run.lock.expires_at, len(failures.expiries)
        renew_now(run.lock)
        # The thread may have been waiting for one when it was told.
        assert eventually(lambda: len(failures.expiries) > count + 1)
        assert failures.expiries[count + 1] > before
    for client in clients:
        client.close()


# Tokens of unknown fate


def freed(client: Any, key: str) -> bool:
    """Whether a key is free soon, long before it would expire by itself."""
    return eventually(lambda: not client.exists(key))


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


def succeeds(call: Callable[[], Any]) -> bool:
    """Whether a call runs; with short time-outs it may not."""
    with suppress(LockUnavailable):
        return bool(call() == "done")
    return False


@pytest.mark.soak
def test_a_server_that_is_frozen_during_an_acquire(
    server: RedisServer, key: str, caller: type[Caller], record_property: Callable[[str, object], None]
) -> None:
    seed = random.randrange(2**32)
    record_property("seed", seed)
    pauses = random.Random(seed)
    late = 0
    with redis.Redis.from_url(server.url) as client, hasty_client(server.url, 0.1) as hasty:
        call = caller(lease=LONG, redis=hasty)
        for _ in range(50):
            assert eventually(lambda: succeeds(call))
            before = sets(client)
            server.pause()
            try:
                with pytest.raises(LockUnavailable):
                    call()
                threading.Event().wait(pauses.uniform(0, 0.2))
            finally:
                server.resume()
            late += eventually(partial(has_set_since, client, before), 1)
            assert freed(client, key)
        call.close()
    record_property("acquires that were carried out late", late)
    assert late > 25  # it did carry out what it was sent before it was frozen


def test_a_command_that_arrives_long_after_its_caller_has_given_up(
    proxy: Proxy, direct: Any, key: str, caller: type[Caller]
) -> None:
    with hasty_client(proxy.url) as hasty:
        call = caller(lease=LONG, redis=hasty)
        assert eventually(lambda: succeeds(call))
        held = proxy.hold_up("SET", times=2)
        with pytest.raises(LockUnavailable):
            call()
        assert held.met.is_set()
        proxy.forget_commands()
        assert eventually(lambda: len(proxy.commands) >= 3)  # "it is not there" is not taken for an answer
        assert not direct.exists(key)

        before = sets(direct)
        held.let_go()
        assert eventually(lambda: has_set_since(direct, before))
        assert freed(direct, key)
        assert eventually(lambda: succeeds(call))
        call.close()


def test_a_set_that_a_server_carries_out_after_being_frozen_for_longer_than_the_lease_leaves_no_key(
    proxy: Proxy, direct: Any, key: str, caller: type[Caller]
) -> None:
    """The proxy is the frozen server: nothing is answered, and of all that was sent the SET is carried out last."""
    with hasty_client(proxy.url) as hasty:
        call = caller(lease=LONG, redis=hasty)
        assert eventually(lambda: succeeds(call))
        held, frozen = proxy.hold_up("SET", times=2), proxy.lose_request(*RELEASES, times=10**6, then="hang")
        with pytest.raises(LockUnavailable):
            call()
        with later(LONG):  # and it is asked for in vain
            left = renewal._renewer.pending_releases
            assert eventually(lambda: all(each.try_at > now() + LONG for each in list(left.values())))
        before, frozen.left = sets(direct), 0
        held.let_go()
        assert eventually(partial(has_set_since, direct, before))
        assert freed(direct, key)
        call.close()


def test_an_answer_that_comes_when_the_key_has_expired_again(
    proxy: Proxy, direct: Any, key: str, caller: type[Caller]
) -> None:
    with redis.Redis.from_url(proxy.url, socket_timeout=None) as client, ThreadPoolExecutor(1) as pool:
        call = caller(lease=LONG, redis=client)
        assert call() == "done"
        held = proxy.hold_up("SET")
        called = pool.submit(call)
        assert held.met.wait(LIMIT)
        with later(LONG):
            held.let_go()
            with pytest.raises(LockUnavailable, match="had expired again"):
                called.result(LIMIT)
        assert freed(direct, key)
        call.close()


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task; again where Python before 3.12 loses it, as redis-py has just sent something."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)


@pytest.mark.parametrize("arrives", ["at all", "late", "never"])
def test_an_acquire_that_is_cancelled(proxy: Proxy, direct: Any, key: str, arrives: str) -> None:
    # One that waits for a reply for as long as it takes.
    with redis.Redis.from_url(proxy.url, socket_timeout=None) as client:

        @only_one(NAME, lease=LONG, redis=client)
        async def run() -> str:
            return "done"

        async def main() -> None:
            assert await run() == "done"
            faults: dict[str, Callable[[str], Fault]] = {
                "at all": partial(proxy.lose_reply, then="hang"),
                "late": proxy.hold_up,
                "never": partial(proxy.lose_request, then="hang"),
            }
            fault = faults[arrives]("SET")
            task = asyncio.ensure_future(run())
            assert await asyncio.to_thread(fault.met.wait, LIMIT)
            if arrives == "at all":
                assert await asyncio.to_thread(eventually, lambda: direct.exists(key))
            await cancel(task)
            assert task.cancelled()
            before = sets(direct)
            fault.let_go()
            if arrives == "late":
                assert await asyncio.to_thread(eventually, lambda: has_set_since(direct, before))
            assert await asyncio.to_thread(freed, direct, key)
            assert await run() == "done"

        asyncio.run(main())
    assert not direct.exists(key)


def test_a_release_that_is_cancelled(proxy: Proxy, direct: Any, key: str) -> None:
    with redis.Redis.from_url(proxy.url, socket_timeout=None) as client:

        @only_one(NAME, lease=LONG, redis=client)
        async def run() -> str:
            return "done"

        async def main() -> None:
            assert await run() == "done"
            fault = proxy.lose_request(*RELEASES, then="hang")
            task = asyncio.ensure_future(run())
            assert await asyncio.to_thread(fault.met.wait, LIMIT)
            await cancel(task)
            assert await asyncio.to_thread(freed, direct, key)

        asyncio.run(main())


def test_a_connection_that_is_gone_at_the_end_of_a_run(proxy: Proxy, direct: Any, losses: list[Lost]) -> None:
    runs = [Running("sync", lease=LONG, redis=proxy.url), RunningAsync("async", lease=LONG, redis=proxy.url)]
    with runs[0], runs[1]:
        keys = [run.lock.key for run in runs]
        assert all(is_awaited(run.lock) for run in runs)  # it is woken for what is left behind
        with proxy.cut():
            for run in runs:
                run.__exit__()
                assert run.result == "done"
            assert direct.exists(*keys) == 2
        assert eventually(lambda: not direct.exists(*keys))
    assert losses == []
