"""Run a decorated function if its key is free. Sync and async stand side by side, and differ by `await`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from math import inf
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from .attempt import AsyncAttempt, Attempt
from .clock import now
from .errors import ConfigurationError
from .lease import Lease
from .lock.redis_lock import drive, drive_async
from .plan import Args, Call, Cover, Kwargs
from .policies import fail

_current: ContextVar[Lease] = ContextVar(__name__)

_UNFINISHED = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})


def current_lock() -> Lease:
    """The lock of the run that calls this.

    It has `.key`, `.holder`, `.expires_in`, `.is_held`, `.ensure_held()`, `.extend(seconds)` and `.fence`.

    Raises:
        ConfigurationError: outside of a covered run.
    """
    try:
        return _current.get()
    except LookupError:
        msg = "current_lock() was called outside of a covered run: call it in a function that has @only_one above it"
        raise ConfigurationError(msg) from None


def current_lease() -> Lease | None:
    """The lock of the run that calls this, or None outside of one."""
    return _current.get(None)


def run(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    plan = cover.plan_for(call)
    key = call.key or plan.prefix + cover.make_key(call, args, kwargs)
    if plan.server is None:
        return _run_as(_unlocked(key), cover, args, kwargs)
    client = plan.server.client
    with Attempt(plan, plan.server, call, key) as attempt:
        drive(client, attempt.acquire())
        if attempt.may_run():
            _run_and_release(attempt, client, cover, args, kwargs)
    return _result(attempt)


def _run_and_release(attempt: Attempt, client: Any, cover: Cover, args: Args, kwargs: Kwargs) -> None:
    try:
        if attempt.is_current():
            attempt.succeed(_run_as(attempt.lease, cover, args, kwargs))
    except BaseException as error:
        attempt.ended_by = error
        raise
    finally:
        drive(client, attempt.release())


async def run_async(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    plan = cover.plan_for(call)
    key = call.key or plan.prefix + cover.make_key(call, args, kwargs)
    if plan.server is None:
        return await _run_as_async(_unlocked(key), cover, args, kwargs)
    client = await plan.server.async_client()
    with AsyncAttempt(plan, plan.server, call, key) as attempt:
        cancellations = _cancellations()
        await drive_async(client, attempt.acquire())
        if _cancellations() > cancellations:  # redis-py loses one that comes when the reply has come, too
            raise asyncio.CancelledError
        if attempt.may_run():
            await _run_and_release_async(attempt, client, cover, args, kwargs)
    return _result(attempt)


async def _run_and_release_async(attempt: AsyncAttempt, client: Any, cover: Cover, args: Args, kwargs: Kwargs) -> None:
    try:
        if attempt.is_current():
            attempt.succeed(await _run_as_async(attempt.lease, cover, args, kwargs))
    except BaseException as error:
        attempt.ended_by = error
        if not isinstance(error, asyncio.CancelledError) or not attempt.is_withdrawn():
            raise
    finally:
        await drive_async(client, attempt.release())


def _result(attempt: Attempt) -> Any:
    if attempt.lost is not None and attempt.plan.when_lost is fail:
        raise attempt.lost
    return attempt.result


def _run_as(lease: Lease, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    reset = _current.set(lease)
    try:
        result = cover.function(*args, **kwargs)
        if type(result) in _UNFINISHED:
            _refuse_unfinished(cover, result)
        return result
    finally:
        _current.reset(reset)


async def _run_as_async(lease: Lease, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    reset = _current.set(lease)
    try:
        return await cover.function(*args, **kwargs)
    finally:
        _current.reset(reset)


def _refuse_unfinished(cover: Cover, result: Any) -> None:
    """The key would be released before the work is done."""
    getattr(result, "close", lambda: None)()
    msg = (
        f"{cover.name} returned a {type(result).__name__}, which has yet to run, and nothing would cover it: "
        "write @only_one directly above the async def, or above a function that consumes the generator"
    )
    raise ConfigurationError(msg)


def _unlocked(key: str) -> Lease:
    """The lock of a run where the locking is switched off: held, for all that the run can see."""
    return Lease(None, key, b"", now(), inf, inf)


def _cancellations() -> int:
    """How often the running task has been cancelled; 0 before Python 3.11, which does not count."""
    cancelling: Callable[[], int] = getattr(asyncio.current_task(), "cancelling", int)
    return cancelling()
