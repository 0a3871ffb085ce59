"""One call's attempt to run: what is decided about it, from acquiring the key to releasing it.

Nothing here sends a command: `acquire` and `release` yield them, and `driver` sends them, sync or async.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from only_one.connections.server import Server
from only_one.errors import AlreadyRunning, ConfigurationError, LockLost, LockUnavailable
from only_one.events import Acquired, Busy, Down, Lost, Reclaimed, Released, emit, logger, wanted
from only_one.lock.commands import TROUBLE, Commands, ReleaseResult, acquire, now, take_over
from only_one.lock.current_lock import Lease
from only_one.lock.holder import active_tokens, is_dead, is_queued, kept
from only_one.lock.redis_lock import AsyncLock, Lock
from only_one.lock.renewal import hold, let_go, release_later
from only_one.policies import CarryOn, RequeueRequest, fail, skip

from .effective_options import Caller, EffectiveOptions

if TYPE_CHECKING:
    from typing_extensions import Self

CARRIED_ON = object()
"""What `LockedCall.down` gives where the policy lets the run begin without its key."""


class LockedCall:
    """One call that asks for its key. As a context manager it leaves nothing behind, whatever is raised inside.

    Attributes:
        options: the effective options.
        server: where the key is.
        client: redis-py's, by which the commands are sent.
        caller: who calls.
        name: the task's name, or the function's.
        key: the key as it is in Redis.
        token: the value that says whose it is.
        lease: the lock as the run sees it; there is none before `may_run`.
        result: what the call gives.
        ended_by: what the function has raised.
        lost: how the run has lost its key, if it has.
    """

    lock_of_redis_py: type[Lock | AsyncLock] = Lock
    waits_until_told = True

    result: Any = None
    ended_by: BaseException | None = None
    lost: LockLost | None = None
    _value: bytes | None = None
    _taken_over: bytes | None = None
    _problem: Exception | None = None
    _is_acquired = _leaves_nothing = _has_succeeded = False

    def __init__(self, options: EffectiveOptions, server: Server, client: Any, caller: Caller, key: str) -> None:
        self.options = options
        self.server = server
        self.client = client
        self.caller = caller
        self.name = caller.name
        self.key = key
        self.token = caller.token_factory.token(options.timeout)
        self._asked_at = now()  # before the command is sent, so that the key never outlives what its holder believes

    def __enter__(self) -> Self:
        active_tokens.add(self.token)  # before it is sent: to others in this process it is a call that lives
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and self.token in active_tokens:  # else it is the parent's, and this a forked child
            self.abandon()
        active_tokens.discard(self.token)

    # Before the function

    def acquire(self) -> Commands[None]:
        """Acquire the key; `may_run` says what comes of it."""
        options, features = self.options, self.server.features
        try:
            if self.caller.queued is None:
                value = yield from acquire(features, self.key, self.token, options.expiry)
            else:
                value = yield from take_over(features, self.key, self.caller.queued, self.token, options.ttl)
            if value is not None and self._may_be_taken(value):
                self._taken_over = value
                value = yield from take_over(features, self.key, value, self.token, options.ttl)
            self._value = value
        except TROUBLE as error:
            self._problem = error

    def _may_be_taken(self, value: bytes) -> bool:
        """Whether who holds the key has not begun, or is dead."""
        if is_queued(value):
            return self.caller.can_take_queued(value)
        return self.options.takeover and is_dead(value)

    def may_run(self) -> bool:
        """Whether the function is to run. If it is not, `result` is what the call gives."""
        if self._value is not None:
            self._leaves_nothing = True
            self.result = self.busy(self._value)
            return False
        self.lease = Lease(self.server, self.key, self.token, self._asked_at, self.options.ttl, self.options.limit)
        if self._problem is None and not self.lease.is_held:
            self._problem = TimeoutError("the answer came when the key had expired again")
        if self._problem is not None:
            self.result = self.down(self._problem)
            self.lease.lose("unavailable")
            return self.result is CARRIED_ON
        self._is_acquired = True
        self.lease.on_loss.append(self._lost)
        hold(self.lease)
        if self._taken_over is not None and wanted(Reclaimed) and not is_queued(self._taken_over):
            emit(Reclaimed(self.key, self.name, self._taken_over))
        if wanted(Acquired):
            emit(Acquired(self.key, self.name, self.token))
        return True

    def is_current(self) -> bool:
        """Whether the work is still to be done, now that the key is ours."""
        return not self._is_acquired or self.caller.is_current(self.options, self.server, self.key)

    def busy(self, value: bytes) -> Any:
        """What `when_busy` gives, as `value` holds the key."""
        policy = self.caller.on_busy(self.options, self.server, self.key, value)
        if wanted(Busy):
            emit(Busy(self.key, self.name, value))
        elif policy is skip:
            return None
        try:
            return policy(AlreadyRunning(self.key, value.decode(errors="backslashreplace")))
        except CarryOn:
            msg = "when_busy ends in carry_on, which would run two at a time: write when_busy=skip or when_busy=fail"
            raise ConfigurationError(msg) from None
        except RequeueRequest as how:
            return self.caller.requeue(self.server, self.key, how)

    def down(self, problem: Exception) -> Any:
        """What `when_down` gives, or `CARRIED_ON`."""
        # A server that refuses has carried out what it was sent before, if redis-py has sent it twice.
        self.clean_up(no_write_in_flight=isinstance(problem, ResponseError))
        error = LockUnavailable(self.key, f"{type(problem).__name__}: {problem}")
        error.__cause__ = problem
        if wanted(Down):
            emit(Down(self.key, self.name, error))
        is_requeued = False
        try:
            return self.options.when_down(error)
        except CarryOn:
            return CARRIED_ON
        except RequeueRequest as how:
            is_requeued = True
            return self.caller.requeue(self.server, self.key, how)
        finally:
            if not is_requeued:
                self._clean_up_queued()

    # After the function

    def succeed(self, result: Any) -> None:
        """The function has returned."""
        self.result = result
        self._has_succeeded = True

    def release(self) -> Commands[None]:
        """Release the key, or keep it for the rest of `at_least`; no error in it replaces the run's own."""
        if not self._is_acquired or self.token not in active_tokens:
            return
        self.lost = self._end()
        at_end = self.caller.at_end(self.options, self.server, self.key, self.ended_by)
        retained = self._retained() if self._has_succeeded else at_end.retained
        lock = self.lock_of_redis_py.held(self.client, self.server.features, self.key, self.token, self.options.ttl)
        outcome = None
        try:
            outcome = yield from lock.end(retained, at_end.marker)
        except Exception as error:  # noqa: BLE001 - the run has its own result or exception
            logger.debug("%s could not be released, and will be in the background: %s", self.key, error)
        else:
            if at_end.marker and (outcome.has_redeliveries or outcome.status != "held"):
                at_end.on_marked()
        self._released(outcome, is_kept=retained is not None)

    def abandon(self) -> None:
        """Leave nothing behind, if the key has not been released in the ordinary way."""
        if self._leaves_nothing:
            return
        if self._is_acquired:
            self.lease.lose("released")  # so that it is not renewed any more
            self._released(None, is_kept=False)
        else:
            self.clean_up(no_write_in_flight=False)
            self._clean_up_queued()

    def clean_up(self, *, no_write_in_flight: bool) -> None:
        """Release the key in the background: whether the token is stored there is not known."""
        until = now() + self.options.ttl
        release_later(self.server, self.key, self.token, until, no_write_in_flight=no_write_in_flight)
        self._leaves_nothing = True

    def _clean_up_queued(self) -> None:
        """Release in the background what was stored when the task was queued: it does not wait any more."""
        if self.caller.queued is not None:
            until = now() + self.options.queue_timeout
            release_later(self.server, self.key, self.caller.queued, until, no_write_in_flight=True)

    def _end(self) -> LockLost | None:
        """The function has returned or raised: a loss until now is told. From here on nothing is lost."""
        lost = self.lease.loss()
        if lost is not None:
            self._tell(lost)
        self.lease.lose("released")
        return lost

    def _retained(self) -> tuple[bytes, int] | None:
        """What is stored at the key after a run that has succeeded, and for how many milliseconds; None if nothing."""
        if not self.options.at_least:
            return None
        milliseconds = round((self._asked_at + self.options.at_least - now()) * 1000)
        return (kept(self.token, self.options.at_least), milliseconds) if milliseconds > 0 else None

    def _released(self, outcome: ReleaseResult | None, *, is_kept: bool) -> None:
        """The key has been released; with None for an outcome, whether it has is not known."""
        if outcome is None:
            self.clean_up(no_write_in_flight=True)
        elif outcome.status == "taken" and self.lost is None:
            self.lost = LockLost(self.key, "taken", outcome.value.decode(errors="backslashreplace"))
            self._tell(self.lost)
        self._leaves_nothing = True
        let_go(self.lease)
        if wanted(Released):
            status = (
                "unknown" if outcome is None else "kept" if is_kept and outcome.status == "held" else outcome.status
            )
            emit(Released(self.key, self.name, status, now() - self._asked_at))

    # A lost key

    def _tell(self, lost: LockLost) -> None:
        """Tell of a loss that is seen at the end of the run: in a thread of its own, like any other."""
        # No daemon, so that the process does not end before.
        thread = threading.Thread(target=self.lease.tell_loss, args=(lost,), name="only_one-lost", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # none can be started: at a limit, or while the interpreter shuts down
            self.lease.tell_loss(lost)
        else:
            if self.waits_until_told:
                thread.join()

    def _lost(self, lost: LockLost) -> None:
        """Tell whoever listens, and the policy, unless that is to be heeded by the run itself."""
        if wanted(Lost):
            emit(Lost(self.key, self.name, lost.reason, lost.value))
        policy = self.options.when_lost
        if policy is fail:
            return
        try:
            policy(lost)
        except CarryOn:
            pass
        except Exception:  # noqa: BLE001 - there is no call left that could raise it
            logger.exception("when_lost of %s failed", self.name)


class AsyncLockedCall(LockedCall):
    """The same in an event loop, where `when_lost=fail` stops the run at once."""

    lock_of_redis_py = AsyncLock
    waits_until_told = False  # the loop has others to see to

    def __init__(self, options: EffectiveOptions, server: Server, client: Any, caller: Caller, key: str) -> None:
        super().__init__(options, server, client, caller, key)
        self._loop = asyncio.get_running_loop()
        self._task: Any = asyncio.current_task()
        self._is_over = self._is_cancelled = False

    def is_withdrawn(self) -> bool:
        """Take our cancellation back, if there was one; returns whether it was the only one."""
        if not self._is_cancelled:
            return False
        self._is_cancelled = False
        uncancel = getattr(self._task, "uncancel", None)  # from Python 3.11
        return uncancel is None or uncancel() == 0

    def _end(self) -> LockLost | None:
        """The same, and from here on the run is not cancelled."""
        self._is_over = True
        self.is_withdrawn()  # where the run has kept it to itself
        return super()._end()

    def _lost(self, lost: LockLost) -> None:
        super()._lost(lost)
        if self.options.when_lost is fail:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        # In the loop's own thread, so the run cannot end between the look and the leap.
        if not self._is_over:
            self._is_cancelled = True
            self._task.cancel()
