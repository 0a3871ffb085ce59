"""One covered run: take the key, run, give the key back. Sync and async stand side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from math import inf
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from .attempt import CARRIED_ON, AsyncAttempt, Attempt
from .clock import now
from .errors import AlreadyRunning, ConfigurationError, LockLost
from .events import Busy, emit, logger, wanted
from .holder import is_dead, is_queued, under_way
from .lease import Lease
from .lock import AsyncLock, Lock, drive, drive_async, take, take_async
from .plan import Args, Call, Cover, Kwargs, Plan
from .policies import CarryOn, PutBack, fail, skip
from .protocol import TROUBLE, take_over
from .servers import Server

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


def _may_be_taken(plan: Plan, call: Call, found: bytes) -> bool:
    """Whether who holds the key has not begun, or is dead."""
    if is_queued(found):
        return call.task is None or call.task.may_take(found)
    return plan.takeover and is_dead(found)


def busy(plan: Plan, server: Server, call: Call, key: str, value: bytes) -> Any:
    """What `when_busy` gives."""
    task = call.task
    if task is not None:
        task.meet(server, key, value)
    if wanted(Busy):
        emit(Busy(key, call.name, value))
    policy = plan.when_busy or (skip if task is None else task.default_policy())
    try:
        return policy(AlreadyRunning(key, value.decode(errors="backslashreplace")))
    except CarryOn:
        msg = "when_busy ends in carry_on, which would run two at a time: write when_busy=skip or when_busy=fail"
        raise ConfigurationError(msg) from None
    except PutBack as wish:
        if task is None:
            raise wish.error from None
        return task.put_back(server, key, wish)


def _refuse_unfinished(cover: Cover, result: Any) -> None:
    """The key would be given back before the work is done."""
    getattr(result, "close", lambda: None)()
    msg = (
        f"{cover.name} returned a {type(result).__name__}, which has yet to run, and nothing would cover it: "
        "write @only_one directly above the async def, or above a function that consumes the generator"
    )
    raise ConfigurationError(msg)


def _unlocked(key: str) -> Lease:
    """The lock of a run where the locking is switched off: held, for all that the run can see."""
    return Lease(None, key, b"", now(), inf, inf)


def run(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    plan = cover.plan_for(call)
    key = call.key or plan.prefix + cover.make_key(call, args, kwargs)
    server = plan.server
    if server is None:
        return _run_as(_unlocked(key), cover, args, kwargs)
    token, begun = call.identity.token(plan.free_in), now()
    found, reclaimed, this, problem = None, None, None, None
    under_way.add(token)  # before it is sent: to others in this process it is a call that lives
    try:
        try:
            found = (
                take(server.client, server.dialect, key, token, plan.expiry)
                if call.queued is None
                else drive(server.client, take_over(key, call.queued, token, plan.ttl))
            )
            if found is not None and _may_be_taken(plan, call, found):
                reclaimed, found = found, None
                found = drive(server.client, take_over(key, reclaimed, token, plan.ttl))
        except TROUBLE as error:
            problem = error
        if found is not None:
            if plan.when_busy is skip and call.task is None and not wanted(Busy):
                return None
            return busy(plan, server, call, key, found)
        this = Attempt(plan, server, call, key, token, begun)
        problem = problem or this.lateness()
        if problem is not None:
            instead = this.down(problem)
            return _run_as(this.lease, cover, args, kwargs) if instead is CARRIED_ON else instead
        return _run_held(this, server.client, reclaimed, cover, args, kwargs)
    except BaseException:
        # What has come in between a command and what was to follow it is to leave nothing behind.
        if found is None:
            (this or Attempt(plan, server, call, key, token, begun)).abandon()
        raise
    finally:
        under_way.discard(token)


def _run_held(this: Attempt, client: Any, reclaimed: bytes | None, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    succeeded, ended_by = False, None
    try:
        this.taken(reclaimed)
        if this.is_superseded():
            return None
        result = _run_as(this.lease, cover, args, kwargs)
        succeeded = True
    except BaseException as error:
        ended_by = error
        raise
    finally:
        lost = _give_back(this, client, succeeded=succeeded, ended_by=ended_by)
    if lost is not None and this.plan.when_lost is fail:
        raise lost
    return result


def _run_as(lease: Lease, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    reset = _current.set(lease)
    try:
        result = cover.function(*args, **kwargs)
        if type(result) in _UNFINISHED:
            _refuse_unfinished(cover, result)
        return result
    finally:
        _current.reset(reset)


def _give_back(this: Attempt, client: Any, *, succeeded: bool, ended_by: BaseException | None) -> LockLost | None:
    if this.is_inherited:
        return None
    lost = this.ended()
    stays = this.stays(ended_by, succeeded=succeeded)
    lock = Lock.held(client, this.server.dialect, this.key, this.token, this.plan.ttl)
    outcome, note = None, this.note(ended_by)
    try:
        outcome = lock.keep(*stays, note) if stays else lock.give_back(note)
    except Exception as error:  # noqa: BLE001 - nothing in here may take the place of the run's own result or exception
        logger.debug("%s could not be released, and will be in the background: %s", this.key, error)
    finally:
        lost = this.released(outcome, lost, is_kept=stays is not None)
    return lost


def _cancellations() -> int:
    """How often the running task has been cancelled; 0 before Python 3.11, which does not count."""
    cancelling: Callable[[], int] = getattr(asyncio.current_task(), "cancelling", int)
    return cancelling()


def _heed_cancellation(before: int) -> None:
    """redis-py loses a cancellation that comes when the reply has come, too."""
    if _cancellations() > before:
        raise asyncio.CancelledError


async def run_async(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    plan = cover.plan_for(call)
    key = call.key or plan.prefix + cover.make_key(call, args, kwargs)
    server = plan.server
    if server is None:
        return await _run_as_async(_unlocked(key), cover, args, kwargs)
    client = await server.async_client()
    token, begun = call.identity.token(plan.free_in), now()
    found, reclaimed, this, problem = None, None, None, None
    cancellations = _cancellations()
    under_way.add(token)
    try:
        try:
            found = await (
                take_async(client, server.dialect, key, token, plan.expiry)
                if call.queued is None
                else drive_async(client, take_over(key, call.queued, token, plan.ttl))
            )
            if found is not None and _may_be_taken(plan, call, found):
                reclaimed, found = found, None
                found = await drive_async(client, take_over(key, reclaimed, token, plan.ttl))
        except TROUBLE as error:
            problem = error
        _heed_cancellation(cancellations)
        if found is not None:
            if plan.when_busy is skip and call.task is None and not wanted(Busy):
                return None
            return busy(plan, server, call, key, found)
        this = AsyncAttempt(plan, server, call, key, token, begun)
        problem = problem or this.lateness()
        if problem is not None:
            instead = this.down(problem)
            return await _run_as_async(this.lease, cover, args, kwargs) if instead is CARRIED_ON else instead
        return await _run_held_async(this, client, reclaimed, cover, args, kwargs)
    except BaseException:
        # What has come in between a command and what was to follow it is to leave nothing behind.
        if found is None:
            (this or Attempt(plan, server, call, key, token, begun)).abandon()
        raise
    finally:
        under_way.discard(token)


async def _run_held_async(
    this: AsyncAttempt, client: Any, reclaimed: bytes | None, cover: Cover, args: Args, kwargs: Kwargs
) -> Any:
    result, succeeded, ended_by = None, False, None
    try:
        this.taken(reclaimed)
        if this.is_superseded():
            return None
        result = await _run_as_async(this.lease, cover, args, kwargs)
        succeeded = True
    except BaseException as error:
        ended_by = error
        if not isinstance(error, asyncio.CancelledError) or not this.is_withdrawn():
            raise
    finally:
        lost = await _give_back_async(this, client, succeeded=succeeded, ended_by=ended_by)
    if lost is not None and this.plan.when_lost is fail:
        raise lost
    return result


async def _run_as_async(lease: Lease, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    reset = _current.set(lease)
    try:
        return await cover.function(*args, **kwargs)
    finally:
        _current.reset(reset)


async def _give_back_async(
    this: AsyncAttempt, client: Any, *, succeeded: bool, ended_by: BaseException | None
) -> LockLost | None:
    if this.is_inherited:
        return None
    lost = this.ended()
    stays = this.stays(ended_by, succeeded=succeeded)
    lock = AsyncLock.held(client, this.server.dialect, this.key, this.token, this.plan.ttl)
    outcome, note = None, this.note(ended_by)
    try:
        outcome = await (lock.keep(*stays, note) if stays else lock.give_back(note))
    except Exception as error:  # noqa: BLE001 - nothing in here may take the place of the run's own result or exception
        logger.debug("%s could not be released, and will be in the background: %s", this.key, error)
    finally:
        lost = this.released(outcome, lost, is_kept=stays is not None)
    return lost
