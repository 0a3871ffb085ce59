"""Run a decorated function if its key is free. Sync and async stand side by side, and differ by `await`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from only_one.errors import ConfigurationError
from only_one.lock.commands import drive, drive_async, now
from only_one.lock.current_lock import Lease, current
from only_one.policies import fail

from .effective_options import Args, Caller, Decoration, Kwargs
from .locked_call import AsyncLockedCall, LockedCall

_UNFINISHED = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})


def run(decoration: Decoration, caller: Caller, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    options = decoration.options_for(caller)
    key = caller.key or options.prefix + decoration.make_key(caller, args, kwargs)
    if options.server is None:
        return _run_as(_unlocked(key), decoration, args, kwargs)
    with LockedCall(options, options.server, options.server.client, caller, key) as call:
        drive(call.client, call.acquire())
        if call.may_run():
            _run_and_release(call, decoration, args, kwargs)
    return _result(call)


def _run_and_release(call: LockedCall, decoration: Decoration, args: Args, kwargs: Kwargs) -> None:
    try:
        if call.is_current():
            call.succeed(_run_as(call.lease, decoration, args, kwargs))
    except BaseException as error:
        call.ended_by = error
        raise
    finally:
        drive(call.client, call.release())


async def run_async(decoration: Decoration, caller: Caller, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    options = decoration.options_for(caller)
    key = caller.key or options.prefix + decoration.make_key(caller, args, kwargs)
    if options.server is None:
        return await _run_as_async(_unlocked(key), decoration, args, kwargs)
    client = await options.server.async_client()
    with AsyncLockedCall(options, options.server, client, caller, key) as call:
        cancellations = _cancellations()
        await drive_async(client, call.acquire())
        if _cancellations() > cancellations:  # redis-py loses one that comes when the reply has come, too
            raise asyncio.CancelledError
        if call.may_run():
            await _run_and_release_async(call, decoration, args, kwargs)
    return _result(call)


async def _run_and_release_async(call: AsyncLockedCall, decoration: Decoration, args: Args, kwargs: Kwargs) -> None:
    try:
        if call.is_current():
            call.succeed(await _run_as_async(call.lease, decoration, args, kwargs))
    except BaseException as error:
        call.ended_by = error
        if not isinstance(error, asyncio.CancelledError) or not call.is_withdrawn():
            raise
    finally:
        await drive_async(call.client, call.release())


def _result(call: LockedCall) -> Any:
    if call.lost is not None and call.options.when_lost is fail:
        raise call.lost
    return call.result


def _run_as(lease: Lease, decoration: Decoration, args: Args, kwargs: Kwargs) -> Any:
    reset = current.set(lease)
    try:
        result = decoration.function(*args, **kwargs)
        if type(result) in _UNFINISHED:
            _refuse_unfinished(decoration, result)
        return result
    finally:
        current.reset(reset)


async def _run_as_async(lease: Lease, decoration: Decoration, args: Args, kwargs: Kwargs) -> Any:
    reset = current.set(lease)
    try:
        return await decoration.function(*args, **kwargs)
    finally:
        current.reset(reset)


def _refuse_unfinished(decoration: Decoration, result: Any) -> None:
    """The key would be released before the work is done."""
    getattr(result, "close", lambda: None)()
    msg = (
        f"{decoration.name} returned a {type(result).__name__}, which has yet to run, and nothing would cover it: "
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
