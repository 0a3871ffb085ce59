"""One run, and what may come between its beginning and its end: what it returns or raises is what the call gives."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import finalize

import pytest
import redis
import redis.asyncio
from celery.exceptions import Ignore, SoftTimeLimitExceeded, Terminated
from redis.backoff import NoBackoff
from redis.retry import Retry

from only_one import (
    AlreadyRunning,
    ConfigurationError,
    LockUnavailable,
    carry_on,
    configure,
    current_lock,
    fail,
    only_one,
)
from only_one.call.locked_call import LockedCall
from only_one.clock import now
from only_one.connections.asyncio_client import AsyncClient
from only_one.driver import drive
from only_one.lock import renewal
from only_one.lock.token import active_tokens
from rigs.waiting import LIMIT, eventually
from tests.proxy import Fault, Proxy

NAME = "k"
LONG = 3600.0
"""Seconds that no test takes, so that no key expires by itself."""

RELEASES = ("DELIFEQ", "DELEX", "EVAL")


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


@pytest.fixture
def direct(redis_url: str, prefix: str) -> Iterator[Any]:  # noqa: ARG001 - its settings are restored after ours
    """A client past every proxy; what the test decorates acquires its keys on the same server."""
    with redis.Redis.from_url(redis_url) as client, configure(redis=redis_url):
        yield client


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Any]:
    """A client through the proxy that waits for as long as it takes, and does not ask twice."""
    with redis.Redis.from_url(proxy.url, socket_timeout=None, retry=Retry(NoBackoff(), 0)) as client:
        yield client


@pytest.fixture(params=["def", "async def"])
def decorate(request: pytest.FixtureRequest) -> Callable[..., Callable[[], Any]]:
    """Decorates a function of each kind, and gives what calls it."""

    def sync(work: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        return only_one(work, key=NAME, lease=LONG, **options)

    def via_asyncio(work: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        async def work_async() -> Any:
            return work()

        decorated: Any = only_one(work_async, key=NAME, lease=LONG, **options)
        return lambda: asyncio.run(decorated())

    return sync if request.param == "def" else via_asyncio


def done() -> str:
    return "done"


# Trouble at the end


def test_an_exception_says_nothing_of_a_release_that_failed(proxy: Proxy, client: Any) -> None:
    cause = KeyError("cause")

    with ExitStack() as stack:

        @only_one(NAME, redis=client)
        def run() -> None:
            stack.enter_context(proxy.cut())
            raise ValueError(NAME) from cause

        with pytest.raises(ValueError, match=NAME) as caught:
            run()
    assert caught.value.__cause__ is cause
    assert caught.value.__context__ is None
    assert not hasattr(caught.value, "__notes__")


class HardStop(BaseException):
    """What a signal handler raises that nobody must catch."""


@contextmanager
def interrupted(fault: Fault, error: type[BaseException]) -> Iterator[None]:
    """Raise an error in the main thread, by a signal, as soon as a fault has met its command.

    A signal that comes when the thread is about to wait for a reply, and does not yet, ends no waiting: the next does.
    """
    raised = threading.Event()

    def interrupt(*_: object) -> None:
        if not raised.is_set():
            raised.set()
            raise error

    def send() -> None:
        fault.met.wait(LIMIT)
        while not raised.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)
            raised.wait(0.1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        fault.let_go()


@pytest.mark.interrupts
def test_an_exception_that_interrupts_the_release_reaches_the_caller_and_the_key_is_freed(
    proxy: Proxy, client: Any, direct: Any, key: str
) -> None:
    run = only_one(done, key=NAME, lease=LONG, redis=client)
    assert run() == "done"
    for error in (SoftTimeLimitExceeded, Terminated, Ignore, HardStop):
        with interrupted(proxy.hold_up(*RELEASES), error), pytest.raises(error):
            run()
        assert eventually(lambda: not direct.exists(key))
        # Or the next fault might meet what is sent in the background.
        assert eventually(lambda: all(each.key != key for each in list(renewal._renewer.pending_releases.values())))
    assert run() == "done"


def test_settings_that_change_during_a_run_are_not_the_runs(direct: Any, prefix: str, key: str, proxy: Proxy) -> None:
    @only_one(NAME, lease=LONG)
    def run() -> bool:
        configure(prefix=f"{prefix}other:", redis=proxy.url, active=False)
        return bool(direct.exists(key))

    assert run()
    assert not direct.exists(key)
    assert proxy.commands == []


# What is left when it is over


def test_nothing_is_left_of_a_call_that_has_ended(
    proxy: Proxy, client: Any, direct: Any, key: str, decorate: Any
) -> None:
    """However it has ended: nothing of it is kept, and nothing is sent for it."""
    tokens: list[bytes] = []
    before = set(active_tokens)

    def work() -> None:
        tokens.append(current_lock().token)
        assert tokens[-1] in renewal._renewer.leases
        raise ValueError(NAME)

    run = decorate(work, redis=client)
    with pytest.raises(ValueError, match=NAME):
        run()
    direct.set(key, "somebody else's")
    with pytest.raises(AlreadyRunning):
        decorate(work, redis=client, when_busy=fail)()
    assert run() is None
    direct.delete(key)
    assert not renewal._renewer.pending_releases

    direct.hset(key, "of another", "type")
    with pytest.raises(LockUnavailable):
        run()
    direct.delete(key)
    assert eventually(lambda: not renewal._renewer.pending_releases)  # as the server has refused, "missing" is final

    with proxy.refused(), pytest.raises(LockUnavailable):
        run()
    fault = proxy.lose_request(*RELEASES, times=2)
    with pytest.raises(ValueError, match=NAME):
        run()
    assert fault.met.is_set()
    assert eventually(lambda: tokens[-1] not in renewal._renewer.pending_releases)
    assert not {*tokens} & {*renewal._renewer.leases}
    assert active_tokens == before


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_result_is_freed_at_once_when_the_caller_drops_it(kind: str) -> None:
    """It may be large: it is in no cycle that only the garbage collector finds."""

    class Result:
        pass

    def work() -> Result:
        return Result()

    async def work_async() -> Result:
        return Result()

    freed: list[bool] = []
    call: Any = only_one(work, key=NAME, lease=LONG)
    call_async: Any = only_one(work_async, key=NAME, lease=LONG)

    async def use() -> None:
        await call_async()  # the first one learns by errors which commands the server knows; they keep its frames
        result = await call_async() if kind == "async def" else call()
        finalize(result, lambda: freed.append(True))
        del result
        assert freed == [True]

    gc.disable()
    try:
        asyncio.run(use())
    finally:
        gc.enable()


@pytest.mark.usefixtures("direct")
def test_a_key_that_is_acquired_by_a_call_that_does_not_know_it_yet_is_busy(
    redis_url: str, decorate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names this process, but is none that was forgotten in it."""
    others: list[Any] = []
    other = only_one(done, key=NAME)
    assert other() == "done"

    class Client(redis.Redis):
        def execute_command(self, *args: Any, **options: Any) -> Any:
            reply = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
            if args[0] == "SET":
                others.append(other())
            return reply

    execute = AsyncClient.execute_command

    async def execute_async(self: Any, *args: Any, **options: Any) -> Any:
        reply = await execute(self, *args, **options)
        if args[0] == "SET":
            others.append(other())
        return reply

    monkeypatch.setattr(AsyncClient, "execute_command", execute_async)
    with Client.from_url(redis_url) as client:
        assert decorate(done, redis=client)() == "done"
    assert others == [None]


def test_a_run_that_is_still_under_way_when_its_loop_ends_frees_its_key(direct: Any, key: str) -> None:
    ended: list[str] = []

    @only_one(NAME, lease=LONG)
    async def run() -> None:
        try:
            await asyncio.sleep(LIMIT)
        finally:
            ended.append("run")

    async def main() -> None:
        tasks.append(asyncio.ensure_future(run()))
        assert await asyncio.to_thread(eventually, lambda: direct.exists(key))

    tasks: list[asyncio.Future[Any]] = []
    asyncio.run(main())
    assert ended == ["run"]
    assert eventually(lambda: not direct.exists(key))


def test_a_loop_that_ends_leaves_no_connection_open(direct: Any, redis_url: str, prefix: str) -> None:
    def connections() -> int:
        return sum(each["name"] == prefix for each in direct.client_list())

    @only_one(NAME, redis=f"{redis_url}?client_name={prefix}")
    async def run() -> bool:
        return connections() > 0

    assert all(asyncio.run(run()) for _ in range(3))
    assert eventually(lambda: connections() <= 1)  # the one of the thread that renews, which looks at new servers


def call_of(prefix: str) -> LockedCall:
    """A call that is about to acquire its key."""
    decoration: Any = only_one(done, key=NAME, timeout=LONG).__only_one__  # type: ignore[attr-defined]
    options: Any = decoration.options_for(decoration.plain)
    return LockedCall(options, options.server, options.server.client, decoration.plain, f"{prefix}{NAME}")


def test_a_key_of_which_nothing_is_known_is_looked_for_until_it_has_expired(prefix: str) -> None:
    with configure(redis="redis://127.0.0.1:1/0"), call_of(prefix) as call:
        before = now()
        with pytest.raises(LockUnavailable):
            call.resolve_acquire(drive(call.client, call.acquire()))
    pending = renewal._renewer.pending_releases[call.token]
    assert not pending.no_write_in_flight
    assert before + LONG <= pending.until <= now() + LONG


def test_a_call_that_is_interrupted_before_its_run_holds_its_key_no_more(direct: Any, prefix: str) -> None:
    with suppress(KeyboardInterrupt), call_of(prefix) as call:
        assert call.resolve_acquire(drive(call.client, call.acquire()))
        assert call.lease.is_held
        raise KeyboardInterrupt
    assert (call.lease.is_held, call.lease.reason) == (False, "released")
    assert call.token not in renewal._renewer.leases
    assert eventually(lambda: not direct.exists(call.key))


# What a call may not give


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> Any:
    yield 1


@pytest.mark.parametrize("unfinished", [coroutine, generator, async_generator])
def test_a_result_that_has_yet_to_run_is_refused(direct: Any, key: str, unfinished: Callable[[], Any]) -> None:
    """The key would be released before the work begins; and nothing warns of a coroutine that is never awaited."""

    @only_one(NAME)
    def run() -> object:
        return unfinished()

    with pytest.raises(ConfigurationError, match=r"write @only_one directly above"):
        run()
    assert not direct.exists(key)


def test_when_busy_may_not_carry_on_by_a_detour(direct: Any, key: str) -> None:
    runs: list[int] = []
    direct.set(key, "taken")
    run = only_one(NAME, when_busy=lambda error: carry_on(error))(lambda: runs.append(1))  # noqa: PLW0108
    with pytest.raises(ConfigurationError, match="when_busy=skip or when_busy=fail"):
        run()
    assert runs == []


# Threads and tasks that a run begins


@pytest.mark.usefixtures("direct")
def test_current_lock_is_that_of_the_context() -> None:
    @only_one("outer")
    async def outer() -> None:
        mine = current_lock()
        assert await asyncio.to_thread(current_lock) is mine
        assert contextvars.copy_context().run(current_lock) is mine
        with pytest.raises(ConfigurationError, match="outside of a decorated function"):
            contextvars.Context().run(current_lock)
        assert list(await asyncio.gather(inner("a"), inner("b"))) == ["a", "b"]
        assert current_lock() is mine
        assert await inner("c") == "c"
        assert current_lock() is mine

    @only_one("{name_}")
    async def inner(name_: str) -> str:
        mine = current_lock()
        assert mine.key.endswith(name_)
        await asyncio.sleep(0)
        assert current_lock() is mine
        return name_

    asyncio.run(outer())
