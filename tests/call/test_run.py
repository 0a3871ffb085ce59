"""One run, and what may come between its beginning and its end: what it returns or raises is what the call gives."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from contextlib import suppress
from typing import Any
from weakref import finalize

import pytest

from only_one import AlreadyRunning, ConfigurationError, LockUnavailable, current_lock, fail, only_one
from only_one.lock import renewal
from only_one.lock.token import active_tokens
from rigs.proxy import Proxy
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, as_async, both, decorated, patient
from tests.lock.test_leases import LONG, RELEASES

NAME = "k"


# What is left when it is over


@both
def test_nothing_is_left_of_a_call_that_has_ended(proxy: Proxy, redis: Any, key: str, decorate: Decorate) -> None:
    """However it has ended: nothing of it is kept, and nothing is sent for it."""
    tokens: list[bytes] = []
    before = active_tokens.copy()

    def work() -> None:
        tokens.append(current_lock().token)
        assert tokens[-1] in renewal._renewer.leases
        raise ValueError(NAME)

    run = decorate(work, lease=LONG, redis=patient(proxy.url))
    with pytest.raises(ValueError, match=NAME):
        run()
    redis.set(key, b"somebody else's \xff")
    with pytest.raises(AlreadyRunning):
        decorate(work, lease=LONG, redis=patient(proxy.url), when_busy=fail)()
    assert run() is None
    redis.delete(key)
    assert not renewal._renewer.pending_releases

    redis.hset(key, "of another", "type")
    with pytest.raises(LockUnavailable, match=f"{key}.*WRONGTYPE"):
        run()
    redis.delete(key)
    assert eventually(lambda: not renewal._renewer.pending_releases)  # as the server has refused, "missing" is final

    with proxy.refused(), pytest.raises(LockUnavailable):
        run()
    fault = proxy.lose_request(*RELEASES, times=2)
    with pytest.raises(ValueError, match=NAME) as raised:
        run()
    assert raised.value.__context__ is raised.value.__cause__ is None
    assert fault.met.is_set()
    assert eventually(lambda: tokens[-1] not in renewal._renewer.pending_releases)
    assert not {*tokens} & {*renewal._renewer.leases}
    assert active_tokens == before


def test_an_async_run_that_is_closed_ends_and_its_key_is_freed(redis: Any, key: str) -> None:
    """As Python closes a coroutine that nobody awaits any more, in whatever context, and without an event loop."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(LIMIT)
        finally:
            ended.set()

    async def main() -> None:
        call = decorated(work, lease=LONG)()
        task = asyncio.ensure_future(call)
        await asyncio.wait_for(begun.wait(), LIMIT)
        call.close()
        assert ended.is_set()
        task.cancel()
        with suppress(RuntimeError):  # it cannot be awaited again
            await task

    asyncio.run(main())
    assert eventually(lambda: not redis.exists(key))


@pytest.mark.usefixtures("redis")
@pytest.mark.parametrize("end", ["returns", "raises"])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_result_or_an_exception_is_freed_at_once_when_the_caller_drops_it(kind: str, end: str) -> None:
    """It may be large, or hold the arguments: it is in no cycle that only the garbage collector finds."""

    class Result(Exception):
        pass

    def work() -> Result:
        if end == "raises":
            raise Result
        return Result()

    freed: list[bool] = []
    is_freed: list[bool] = []
    call = decorated(as_async(work) if kind == "async def" else work, lease=LONG)

    async def use() -> None:
        freed.clear()
        try:
            result = await call() if kind == "async def" else call()
            finalize(result, freed.append, True)
            del result
        except Result as error:
            finalize(error, freed.append, True)
        is_freed.append(bool(freed))

    gc.disable()
    try:
        for _ in range(2):  # the first one learns by errors which commands the server knows; they keep its frames
            asyncio.run(use())
    finally:
        gc.enable()
    assert is_freed[-1]


# Threads and tasks that a run begins


@pytest.mark.usefixtures("redis")
def test_current_lock_is_that_of_the_context() -> None:
    @only_one("outer")
    async def outer() -> None:
        mine, elsewhere = current_lock(), contextvars.Context()
        assert await asyncio.to_thread(current_lock) is contextvars.copy_context().run(current_lock) is mine
        with pytest.raises(ConfigurationError, match=r"^current_lock.* outside of .*, and give its threads the lock$"):
            elsewhere.run(current_lock)
        assert elsewhere.run(lambda: mine.fence) == mine.fence
        await asyncio.gather(inner("a"), inner("b"))
        await inner("c")
        assert current_lock() is mine

    @only_one("{name_}")
    async def inner(name_: str) -> None:
        mine = current_lock()
        assert mine.key.endswith(name_)
        await asyncio.sleep(0)
        assert current_lock() is mine

    asyncio.run(outer())
