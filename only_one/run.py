"""One covered run: take the key, run, give the key back. Sync and async stand side by side."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from math import inf
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from redis.exceptions import ResponseError

from . import settings
from .clock import now
from .errors import AlreadyRunning, ConfigurationError, LockLost, LockUnavailable
from .events import Acquired, Busy, Down, Lost, Reclaimed, Released, emit, logger, wanted
from .holder import is_dead, kept
from .lease import Lease
from .leases import generation, hold, is_adrift, let_go, release_later
from .lock import AsyncLock, Lock, drive, drive_async, take, take_async
from .plan import Args, Call, Cover, Kwargs, Plan
from .policies import CarryOn, carry_on, fail, skip
from .protocol import HELD, TROUBLE, Outcome, take_over
from .servers import Server

_current: ContextVar[Lease] = ContextVar("only_one_current_lock")

_CARRY_ON = object()
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


class _Run:
    """A call that has asked for its key: what is decided about it, without waiting for the server."""

    __slots__ = ("call", "generation", "is_settled", "key", "lease", "plan", "server", "token")

    def __init__(self, plan: Plan, server: Server, call: Call, key: str, token: bytes, begun: float) -> None:
        self.plan = plan
        self.server = server
        self.call = call
        self.key = key
        self.token = token
        self.lease = Lease(server, key, token, begun, plan.ttl, plan.limit)
        self.generation = generation()
        self.is_settled = False

    @property
    def name(self) -> str:
        """The task's name, or the function's."""
        return self.call.name

    def taken(self, reclaimed: bytes | None) -> None:
        """The key is ours; `reclaimed` is what stood there before, if it was taken over."""
        self.lease.on_loss.append(self._lost)
        hold(self.lease)
        if reclaimed is not None and wanted(Reclaimed):
            emit(Reclaimed(self.key, self.name, reclaimed))
        if wanted(Acquired):
            emit(Acquired(self.key, self.name, self.token))

    def down(self, problem: Exception) -> Any:
        """What `when_down` gives, or `_CARRY_ON`."""
        # A server that refuses has done with what it was sent before, if redis-py has sent it twice.
        self.adrift(settled=isinstance(problem, ResponseError))
        error = LockUnavailable(self.key, f"{type(problem).__name__}: {problem}")
        error.__cause__ = problem
        if wanted(Down):
            emit(Down(self.key, self.name, error))
        try:
            return self.plan.when_down(error)
        except CarryOn:
            self.lease.lose("unavailable")
            return _CARRY_ON

    def adrift(self, *, settled: bool) -> None:
        """Whether the token stands on the server is not known: see to it in the background."""
        release_later(self.server, self.key, self.token, now() + self.plan.ttl, settled=settled)
        self.is_settled = True

    def abandon(self) -> None:
        """Leave nothing behind, if the key has not been given back in the ordinary way."""
        if not self.is_settled and not self.is_inherited:
            let_go(self.lease)
            self.lease.lose("released")
            self.adrift(settled=False)

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked off in the middle of the run, which stays the parent's."""
        return self.generation is not generation()

    @property
    def to_be_kept(self) -> int:
        """Milliseconds for which the key stays after a run that has succeeded now, or 0."""
        return max(0, round((self.lease.begun + self.plan.at_least - now()) * 1000)) if self.plan.at_least else 0

    def kept_value(self) -> bytes:
        """What stands under a key that is kept."""
        return kept(self.token, self.plan.at_least)

    def ended(self) -> LockLost | None:
        """The function has returned or raised: what was lost until now is told. From here on nothing is lost."""
        lost = self.lease.loss()
        if lost is not None:
            self.lease.tell_loss(lost)
        self.lease.lose("released")
        return lost

    def released(self, outcome: Outcome | None, lost: LockLost | None, *, is_kept: bool) -> LockLost | None:
        """The key has been given back, or with None for an outcome could not be; returns how it was lost, if it was."""
        if outcome is None:
            self.adrift(settled=True)
        elif outcome.fate == "taken" and lost is None:
            lost = LockLost(self.key, "taken", outcome.value.decode(errors="backslashreplace"))
            self.lease.tell_loss(lost)
        self.is_settled = True
        let_go(self.lease)
        if wanted(Released):
            fate = "unknown" if outcome is None else "kept" if is_kept and outcome is HELD else outcome.fate
            emit(Released(self.key, self.name, fate, now() - self.lease.begun))
        return lost

    def _lost(self, lost: LockLost) -> None:
        """Tell whoever listens, and the policy, unless that is to be heeded by the run itself."""
        if wanted(Lost):
            emit(Lost(self.key, self.name, lost.reason, lost.value))
        policy = self.plan.when_lost
        if policy is carry_on or policy is fail:
            return
        try:
            policy(lost)
        except CarryOn:
            pass
        except Exception:  # noqa: BLE001 - there is no call left that could raise it
            logger.exception("when_lost of %s failed", self.name)


class _AsyncRun(_Run):
    """The same in an event loop, where `when_lost=fail` stops the run at once."""

    __slots__ = ("is_cancelled", "is_over", "loop", "task")

    def __init__(self, plan: Plan, server: Server, call: Call, key: str, token: bytes, begun: float) -> None:
        super().__init__(plan, server, call, key, token, begun)
        self.loop = asyncio.get_running_loop()
        self.task = asyncio.current_task()
        self.is_over = False
        self.is_cancelled = False

    def ended(self) -> LockLost | None:
        self.is_over = True
        return super().ended()

    def is_withdrawn(self) -> bool:
        """Whether a cancellation was ours alone; if so it is taken back."""
        if not self.is_cancelled or self.task is None:
            return False
        uncancel = getattr(self.task, "uncancel", None)  # from Python 3.11
        return uncancel is None or uncancel() == 0

    def _lost(self, lost: LockLost) -> None:
        super()._lost(lost)
        if self.plan.when_lost is fail and not self.is_over:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        # In the loop's own thread, so the run cannot end between the look and the leap.
        if not self.is_over and self.task is not None:
            self.is_cancelled = True
            self.task.cancel()


def _busy(plan: Plan, call: Call, key: str, value: bytes) -> Any:
    """What `when_busy` gives."""
    if wanted(Busy):
        emit(Busy(key, call.name, value))
    try:
        return plan.when_busy(AlreadyRunning(key, value.decode(errors="backslashreplace")))
    except CarryOn:
        msg = "when_busy ends in carry_on, which would run two at a time: write when_busy=skip or when_busy=fail"
        raise ConfigurationError(msg) from None


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


def _ask(plan: Plan, server: Server, key: str, token: bytes, begun: float) -> tuple[bytes | None, bytes | None]:
    """What stands in the way, or None if the key is ours; and whose it was, if it was taken over."""
    found, reclaimed = take(server.client, server.dialect, key, token, plan.ttl_ms), None
    if found is not None and plan.takeover and (is_adrift(found) or is_dead(found)):
        reclaimed, found = found, drive(server.client, take_over(key, found, token, plan.ttl_ms))
    if found is None and now() >= begun + plan.ttl:
        msg = "the answer came when the key had expired again"
        raise TimeoutError(msg)
    return found, reclaimed


def run(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    plan = cover.plan
    if plan is None or plan.made_from is not settings.current:
        plan = cover.make_plan()
    key = plan.prefix + (cover.bound_key if call.bound else cover.key)(call.name, args, kwargs)
    server = plan.server
    if server is None:
        return _run_as(_unlocked(key), cover, args, kwargs)
    token, begun = call.identity.token(plan.free_in), now()
    found, reclaimed, this = None, None, None
    problem: Exception | None = None
    try:
        try:
            found, reclaimed = _ask(plan, server, key, token, begun)
        except TROUBLE as error:
            problem = error
        if found is not None:
            return None if plan.when_busy is skip and not wanted(Busy) else _busy(plan, call, key, found)
        this = _Run(plan, server, call, key, token, begun)
        if problem is not None:
            instead = this.down(problem)
            return _run_as(this.lease, cover, args, kwargs) if instead is _CARRY_ON else instead
        return _run_held(this, server.client, reclaimed, cover, args, kwargs)
    except BaseException:
        # What has come in between a command and what was to follow it is to leave nothing behind.
        if this is not None:
            this.abandon()
        elif found is None:
            _Run(plan, server, call, key, token, begun).abandon()
        raise


def _run_held(this: _Run, client: Any, reclaimed: bytes | None, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    succeeded = False
    try:
        this.taken(reclaimed)
        result = _run_as(this.lease, cover, args, kwargs)
        succeeded = True
    finally:
        lost = _give_back(this, client, succeeded=succeeded)
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


def _give_back(this: _Run, client: Any, *, succeeded: bool) -> LockLost | None:
    if this.is_inherited:
        return None
    lost = this.ended()
    to_be_kept = this.to_be_kept if succeeded else 0
    lock = Lock.held(client, this.server.dialect, this.key, this.token, this.plan.ttl)
    outcome = None
    try:
        outcome = lock.keep(this.kept_value(), to_be_kept) if to_be_kept else lock.give_back()
    except Exception as error:  # noqa: BLE001 - nothing in here may take the place of the run's own result or exception
        logger.debug("%s could not be released, and will be in the background: %s", this.key, error)
    finally:
        lost = this.released(outcome, lost, is_kept=to_be_kept > 0)
    return lost


async def _ask_async(
    plan: Plan, server: Server, client: Any, key: str, token: bytes, begun: float
) -> tuple[bytes | None, bytes | None]:
    """What stands in the way, or None if the key is ours; and whose it was, if it was taken over."""
    found, reclaimed = await take_async(client, server.dialect, key, token, plan.ttl_ms), None
    if found is not None and plan.takeover and (is_adrift(found) or is_dead(found)):
        reclaimed, found = found, await drive_async(client, take_over(key, found, token, plan.ttl_ms))
    if found is None and now() >= begun + plan.ttl:
        msg = "the answer came when the key had expired again"
        raise TimeoutError(msg)
    return found, reclaimed


async def run_async(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    plan = cover.plan
    if plan is None or plan.made_from is not settings.current:
        plan = cover.make_plan()
    key = plan.prefix + (cover.bound_key if call.bound else cover.key)(call.name, args, kwargs)
    server = plan.server
    if server is None:
        return await _run_as_async(_unlocked(key), cover, args, kwargs)
    client = await server.async_client()
    token, begun = call.identity.token(plan.free_in), now()
    found, reclaimed, this = None, None, None
    problem: Exception | None = None
    try:
        try:
            found, reclaimed = await _ask_async(plan, server, client, key, token, begun)
        except TROUBLE as error:
            problem = error
        if found is not None:
            return None if plan.when_busy is skip and not wanted(Busy) else _busy(plan, call, key, found)
        this = _AsyncRun(plan, server, call, key, token, begun)
        if problem is not None:
            instead = this.down(problem)
            return await _run_as_async(this.lease, cover, args, kwargs) if instead is _CARRY_ON else instead
        return await _run_held_async(this, client, reclaimed, cover, args, kwargs)
    except BaseException:
        # What has come in between a command and what was to follow it is to leave nothing behind.
        if this is not None:
            this.abandon()
        elif found is None:
            _Run(plan, server, call, key, token, begun).abandon()
        raise


async def _run_held_async(
    this: _AsyncRun, client: Any, reclaimed: bytes | None, cover: Cover, args: Args, kwargs: Kwargs
) -> Any:
    result, succeeded = None, False
    try:
        this.taken(reclaimed)
        result = await _run_as_async(this.lease, cover, args, kwargs)
        succeeded = True
    except asyncio.CancelledError:
        if not this.is_withdrawn():
            raise
    finally:
        lost = await _give_back_async(this, client, succeeded=succeeded)
    if lost is not None and this.plan.when_lost is fail:
        raise lost
    return result


async def _run_as_async(lease: Lease, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    reset = _current.set(lease)
    try:
        return await cover.function(*args, **kwargs)
    finally:
        _current.reset(reset)


async def _give_back_async(this: _AsyncRun, client: Any, *, succeeded: bool) -> LockLost | None:
    if this.is_inherited:
        return None
    lost = this.ended()
    to_be_kept = this.to_be_kept if succeeded else 0
    lock = AsyncLock.held(client, this.server.dialect, this.key, this.token, this.plan.ttl)
    outcome = None
    try:
        outcome = await (lock.keep(this.kept_value(), to_be_kept) if to_be_kept else lock.give_back())
    except Exception as error:  # noqa: BLE001 - nothing in here may take the place of the run's own result or exception
        logger.debug("%s could not be released, and will be in the background: %s", this.key, error)
    finally:
        lost = this.released(outcome, lost, is_kept=to_be_kept > 0)
    return lost
