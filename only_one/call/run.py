"""Run a decorated function if its key is free: sync and async side by side, which differ by ``await``."""

import asyncio
import time
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from types import AsyncGeneratorType, GeneratorType
from typing import Any

from only_one.clock import now
from only_one.connections.asyncio_client import AsyncClient
from only_one.driver import drive, drive_async
from only_one.errors import ConfigurationError
from only_one.lock.lease import Lease, current

from .effective_options import Args, Caller, Decoration, Kwargs
from .locked_call import AsyncLockedCall, LockedCall

_CONTEXTS: tuple[Any, ...] = (contextmanager, asynccontextmanager)

_YET_TO_RUN = frozenset({Future, GeneratorType, AsyncGeneratorType, *(type(each(iter)(())) for each in _CONTEXTS)})
"""The types of results whose code has not run when they are returned."""


def run(decoration: Decoration, caller: Caller, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, else return or raise as the policies say."""
    options = decoration.options_for(caller)
    key = caller.key or options.prefix + decoration.make_key(caller, args, kwargs)
    if options.server is None:
        return _run_as(_switched_off(key, caller), decoration, args, kwargs)
    while True:
        call = LockedCall(options, options.server, key, caller)
        with call:
            if call.resolve_acquire(drive(call.server.client, call.acquire())):
                _run_and_release(call, decoration, args, kwargs)
        if not call.pause:
            return call.result
        time.sleep(call.pause)


# A function of its own: an exception that arrives on the line of a `try` inside of a `with` skips the `__exit__`.
def _run_and_release(call: LockedCall, decoration: Decoration, args: Args, kwargs: Kwargs) -> None:
    try:
        if call.claim_work():
            call.result = _run_as(call.lease, decoration, args, kwargs)
            call.has_succeeded = True
    except BaseException as error:
        call.ended_by = error
        raise
    finally:
        drive(call.server.client, call.release())


async def run_async(decoration: Decoration, caller: Caller, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, else return or raise as the policies say."""
    options = decoration.options_for(caller)
    key = caller.key or options.prefix + decoration.make_key(caller, args, kwargs)
    if options.server is None:
        return await _run_as_async(_switched_off(key, caller), decoration, args, kwargs)
    client = await options.server.async_client()
    while True:
        call = AsyncLockedCall(options, options.server, key, caller)
        with call:
            acquired = await drive_async(client, call.acquire())
            if call.is_cancelled_anew():  # redis-py loses a cancellation that comes with the reply
                raise asyncio.CancelledError
            if call.resolve_acquire(acquired):
                await _run_and_release_async(call, client, decoration, args, kwargs)
        if not call.pause:
            return call.result
        await asyncio.sleep(call.pause)


async def _run_and_release_async(
    call: AsyncLockedCall, client: AsyncClient, decoration: Decoration, args: Args, kwargs: Kwargs
) -> None:
    try:
        if call.claim_work():
            call.result = await _run_as_async(call.lease, decoration, args, kwargs)
            call.has_succeeded = True
    except BaseException as error:
        call.ended_by = error
        if not isinstance(error, asyncio.CancelledError) or not call.withdraw_cancellation():
            raise
    finally:
        if not isinstance(call.ended_by, GeneratorExit):  # a closed coroutine can await nothing more
            await drive_async(client, call.release())


def _switched_off(key: str, caller: Caller) -> Lease:
    """The lease of a run while the locking is switched off: it looks held, by this run, and never expires."""
    return Lease(None, key, caller.token_factory.token(None), now(), inf, inf)


def _run_as(lease: Lease, decoration: Decoration, args: Args, kwargs: Kwargs) -> Any:
    reset = current.set(lease)
    try:
        return _checked(decoration, decoration.function(*args, **kwargs))
    finally:
        current.reset(reset)


async def _run_as_async(lease: Lease, decoration: Decoration, args: Args, kwargs: Kwargs) -> Any:
    reset = current.set(lease)
    try:
        return _checked(decoration, await decoration.function(*args, **kwargs))
    finally:
        with suppress(ValueError):  # the coroutine may be closed in another context
            current.reset(reset)


def _checked(decoration: Decoration, result: Any) -> Any:
    """The result of a function, unless the result has code that is yet to run: the key would be released before that.

    Raises:
        ConfigurationError: for a coroutine, a future, a generator, a context manager and the like.
    """
    has_run = type(result) not in _YET_TO_RUN and not hasattr(type(result), "__await__")
    is_done = type(result) is Future and result.done()  # the function has waited for it
    if has_run or is_done:
        return result
    end = getattr(result, "close", None) or getattr(result, "cancel", None)
    if end is not None:
        end()
    problem = f"the result of {decoration.name}, of type {type(result).__name__}, would run after the key is released"
    instead = "write @only_one directly above the async def, or above a function that consumes the generator"
    msg = f"{problem}: {instead}, waits for the future or enters the context"
    raise ConfigurationError(msg)
