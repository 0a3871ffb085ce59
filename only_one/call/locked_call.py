"""One call that acquires a key: busy, server down, run, lost key and release, and the policy that decides each.

Nothing here sends a command: ``acquire`` and ``release`` yield commands, and ``run`` sends them, sync or async.
Only the caller sends some, if it is a Celery task, when it is asked.
"""

import asyncio
import threading
from contextlib import suppress
from logging import ERROR
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from redis.exceptions import ResponseError

from only_one.clock import now
from only_one.connections.server import Server
from only_one.connections.server_features import is_of_another_type, level_of
from only_one.driver import TROUBLE, Commands, is_of_signal_handler, unanswered
from only_one.errors import AlreadyRunning, ConfigurationError, LockLost, LockUnavailable, OnlyOneError
from only_one.events import Acquired, Busy, Down, Lost, Reclaimed, Released, emit, log, warn_of_first_skip
from only_one.holder import is_queued
from only_one.lock.commands import ReleaseResult, Retained, acquire, end, replace
from only_one.lock.lease import Lease
from only_one.lock.liveness import is_dead
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import hold, let_go, release_later, start_thread
from only_one.lock.token import active_tokens, kept, this_process
from only_one.policies import CarryOn, RequeueRequest, check_result, fail, skip

from .effective_options import Call, Caller, EffectiveOptions, Policy
from .owed_key import owed_to, to_store

if TYPE_CHECKING:
    from typing_extensions import Self

CARRIED_ON = object()
"""In place of a policy's result: it lets the run begin without its key."""


class LockedCall(Call):
    """One call that asks for its key. As a context manager it leaves nothing behind, whatever is raised inside.

    Attributes:
        caller: the plain function or the task that calls.
        lease: the lock as the run sees it; there is none before ``resolve_acquire``.
        result: the result of the call.
        has_succeeded: whether the function has returned.
        lost: how the run has lost its key, or None.
        pause: seconds until another call asks for the key, because a previous attempt of the caller's work holds it; 0
            if the policy decides.
    """

    waits_until_told = True

    result: Any = None
    lost: LockLost | None = None
    pause = 0.0
    has_succeeded = _may_come_late = False
    _owed: Retained | None = None
    _retained: Retained | None = None
    """The value that the release stores in place of the token."""
    _stage: Literal["asked", "held", "kept later"] | None = "asked"
    """Whether the key may be ours, is ours, or will be kept in the background; None once it is seen to."""

    def __init__(self, options: EffectiveOptions, server: Server, key: str, caller: Caller) -> None:
        super().__init__(options, server, key)
        self.caller = caller
        self.token = caller.token_factory.token(options.timeout)
        self._unanswered = unanswered.get()
        self._asked_at = now()  # before SET: the key never outlives what its holder believes

    def __enter__(self) -> "Self":
        active_tokens[self.token] = self.caller  # before SET, too: others in this process see that it lives
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.ended_by = None  # its traceback leads back here: the call's arguments would live until a collection
        # A token that is not active is the parent's, and this a forked child.
        if error is not None and self.token in active_tokens:
            if self._stage == "held":
                self.lease.lose("released")  # so that it is not renewed any more
                self._released(None)
            elif self._stage == "asked":
                self.clean_up()
        if self._stage != "kept later":  # of which others in this process see that it is not free
            active_tokens.pop(self.token, None)
        lost = self.lost if self.options.when_lost is fail else None
        if error is None and lost is not None:
            raise lost

    def acquire(self) -> Commands[bytes | Exception | None]:
        """Acquire the key: None if it is ours, else the value stored there, or the error of the server."""
        if self.options.lease is not None and (error := start_thread()):  # before SET: the key could not be renewed
            self._stage = None
            return error
        try:
            if self.caller.queued is None:
                value = yield from acquire(self.server.features, self.key, self.token, self.options.ttl)
            else:
                value = yield from self._take_over(self.caller.queued)
            while value is not None and self._can_take(value):  # which may have changed hands meanwhile
                value = yield from self._take_over(value)
            if value is not None and self.caller.is_held_by_own(value):
                self.pause = self.caller.waits(self, (yield ("PTTL", self.key)) / 1000)
        except TROUBLE as error:
            if is_of_signal_handler(error):  # which may be one of the system's, such as a `TimeoutError`
                raise
            return error
        return value

    def _take_over(self, before: bytes) -> Commands[bytes | None]:
        """Acquire the key from a task that waits, or from a holder that is dead; returns what ``acquire`` does."""
        is_own = before == self.caller.queued
        owed = None if is_own else (yield from owed_to(self.key, before, self.token))
        became = yield from replace(self.key, before, self.token, self.options.ttl)
        if became.status == "gone":
            return (yield from acquire(self.server.features, self.key, self.token, self.options.ttl))
        if became.status == "taken":
            return became.value
        self._owed = owed
        # What this process has left itself, as where an acquire was cancelled, is of no process that was killed.
        is_killed = not is_queued(before) and not before.startswith(this_process().mark)
        if is_killed:
            emit(Reclaimed, self.key, self.caller.name, before)
        return None

    def _can_take(self, value: bytes) -> bool:
        """Whether the call may take the key over from ``value``: from a task that waits, or a holder that is dead."""
        if is_queued(value):
            return self.caller.can_take_queued(self, value)
        return self.options.takeover and is_dead(value)

    def resolve_acquire(self, acquired: bytes | Exception | None) -> bool:
        """Whether the function may run, by the result of ``acquire``. If not, ``result`` is the result of the call."""
        # Of a SET that was sent twice, the first may be carried out when the call is over.
        self._may_come_late = unanswered.get() != self._unanswered
        if isinstance(acquired, bytes):
            if self._may_come_late:
                self.clean_up()
            self._stage = None
            if not self.pause:
                self.result = self.busy(acquired)
            return False
        limit = self.options.timeout or inf
        self.lease = Lease(self.server, self.key, self.token, self._asked_at, self.options.ttl, limit)
        too_late = None if self.lease.is_held else TimeoutError("the answer came when the key had expired again")
        problem = acquired or too_late
        if problem is not None:
            self.result = self.down(problem)
            self.lease.lose("unavailable")
            return self.result is CARRIED_ON
        self._stage = "held"
        self.lease.on_loss.append(self._lost)
        hold(self.lease)
        emit(Acquired, self.key, self.caller.name, self.token)
        return True

    def claim_work(self) -> bool:
        """Whether the work is still to be done, now that the key is ours."""
        return self._stage != "held" or self.caller.claim_work(self)

    def busy(self, value: bytes) -> Any:
        """The result that ``when_busy`` gives if the key holds ``value``."""
        policy = self.caller.on_busy(self, value)
        emit(Busy, self.key, self.caller.name, value)
        if policy is skip:
            warn_of_first_skip(self.key, self.caller.name, value)
            return None
        result = self._ask(policy, AlreadyRunning(self.key, value.decode(errors="backslashreplace")))
        if result is CARRIED_ON:
            msg = "when_busy ends in carry_on, which would run two at a time: write when_busy=skip or when_busy=fail"
            raise ConfigurationError(msg)
        return result

    def down(self, problem: Exception) -> Any:
        """The result that ``when_down`` gives, or ``CARRIED_ON``."""
        if self._stage == "asked":
            # A server that refuses has stored nothing, unless a previous attempt is still to come.
            self.clean_up(no_write_in_flight=isinstance(problem, ResponseError))
        error = LockUnavailable(self.key, self.server.describe(problem))
        problem.__suppress_context__ = True  # the system's error, of which it tells already
        error.__cause__ = problem.with_traceback(None)
        emit(Down, self.key, self.caller.name, error)
        return self._ask(self.caller.on_down(self), error)

    def _ask(self, policy: Policy, error: OnlyOneError) -> Any:
        """The result that a policy gives, or ``CARRIED_ON``."""
        try:
            return check_result(policy(error))
        except CarryOn:
            return CARRIED_ON
        except RequeueRequest as how:
            return self.caller.requeue(self, how)

    def release(self) -> Commands[None]:
        """Release the key, or keep it for ``at_least``; no error here replaces the run's own result or exception."""
        if self._stage != "held" or self.token not in active_tokens:
            return
        self.lost = self.lease.loss()
        if self.lost is not None:
            self._tell(self.lost)
        self.lease.lose("released")  # from here on nothing is lost
        for_retry, marker = self.caller.at_end(self)
        raised = self.ended_by
        exits = isinstance(raised, SystemExit) and raised.code in (None, 0) and not is_of_signal_handler(raised)
        # A program may end by `sys.exit()`, and has done its work.
        has_succeeded = self.has_succeeded or (exits and self.caller.app is None)
        kept = self._kept() if has_succeeded else None
        # A key names one task that waits: a retry gives way to the task from which the key was taken over.
        owed = to_store(self._owed) if self._owed else None
        self._retained = kept or owed or (None if has_succeeded else for_retry)
        became: ReleaseResult | None = None
        try:
            became = yield from end(self.server.features, self.key, self.token, self._retained, marker)
            is_marked = became.has_redeliveries or became.status != "held"
            if marker and is_marked:
                self.caller.on_marked(self)
            has_expired = became.status == "gone" and now() > self.lease.expires_at  # while it was released
            is_deleted = self.lost is not None and self.lost.reason == "deleted"
            comes_back = has_expired and not is_deleted
            if self._retained and comes_back:
                became = None
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            # Any other is not raised: the run has its own result or exception.
            if marker is None and is_of_another_type(error):
                became = ReleaseResult("taken")
            log(level_of(error), "%s could not be released: %s", self.key, error)
        self._released(became)

    def clean_up(self, *, no_write_in_flight: bool = False, retained: Retained | None = None) -> None:
        """Release the key in the background, or store a retained value: whether the token is there is not known."""
        is_final = no_write_in_flight and not self._may_come_late
        until = now() + self.options.ttl
        if self._stage == "held":  # perhaps for longer, by `extend`
            until = max(until, self.lease.may_live_until)
        if self.server.is_known:  # else nothing was sent
            release_later(PendingRelease(self.server, self.key, self.token, until, is_final, retained))
        self._stage = "kept later" if retained else None  # not before: if a signal handler raises, it is done again

    def _kept(self) -> Retained | None:
        """The value to store at the key after a successful run, for the rest of ``at_least``; None if that is over."""
        at_least = self.options.at_least
        until = self._asked_at + at_least
        return Retained(kept(self.token, at_least), until) if at_least and until > now() else None

    def _released(self, became: ReleaseResult | None) -> None:
        """Finish after a release; with None for a result it is not known whether the key was released."""
        if became is None:
            self.clean_up(no_write_in_flight=True, retained=self._retained)
        else:
            # A key that is gone may have been released by the first of two commands, or have expired meanwhile.
            is_certain = unanswered.get() == self._unanswered and now() < self.lease.expires_at
            is_deleted = became.status == "gone" and is_certain
            is_lost = is_deleted or became.status == "taken"
            if self.lost is None and is_lost:
                reason = "deleted" if is_deleted else "taken"
                self.lost = LockLost(self.key, reason, became.value.decode(errors="backslashreplace"))
                self._tell(self.lost)
            self._stage = None
            if self._may_come_late:
                self.clean_up()
        let_go(self.lease)
        outcome: Any = "unknown" if became is None else became.status
        is_kept = self._retained is not None and self._retained.note is None  # and not a task's that waits
        outcome = "kept" if is_kept and outcome == "held" else outcome
        emit(Released, self.key, self.caller.name, outcome, now() - self._asked_at)

    def _tell(self, lost: LockLost) -> None:
        """Tell the run of a loss that is seen at its end: in a thread of its own, like any other loss."""
        try:
            tell = self.lease.on_loss.pop()  # not in the thread, for which an async run does not wait
        except IndexError:  # it has been told
            return
        # No daemon, so that the process does not end before.
        thread = threading.Thread(target=tell, args=(lost,), name="only_one-lost", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # none can be started: at a limit, or while the interpreter shuts down
            tell(lost)
        else:
            if self.waits_until_told:
                thread.join()

    def _lost(self, lost: LockLost) -> None:
        """Tell the listeners, and the policy unless that is ``fail``, which the run itself obeys."""
        emit(Lost, self.key, self.caller.name, lost.reason, lost.value)
        if self.options.when_lost is fail:
            return
        try:
            with suppress(CarryOn):
                check_result(self.options.when_lost(lost))
        except (Exception, SystemExit):  # noqa: BLE001 - there is no call left that could raise it
            log(ERROR, "when_lost of %s failed", self.caller.name, exc_info=True)


class AsyncLockedCall(LockedCall):
    """The same in an event loop, where ``when_lost=fail`` cancels the run at once."""

    waits_until_told = False  # the loop has others to see to

    def __init__(self, options: EffectiveOptions, server: Server, key: str, caller: Caller) -> None:
        super().__init__(options, server, key, caller)
        self._task: Any = asyncio.current_task()
        self._cancellations = self._cancelling()
        self._is_over = self._is_cancelled = False

    def _cancelling(self) -> int:
        """How often the task has been cancelled so far; 0 before Python 3.11, which does not count."""
        return int(getattr(self._task, "cancelling", int)())

    def is_cancelled_anew(self) -> bool:
        """Whether the task was cancelled since the call began: what it has suppressed before may be counted still."""
        return self._cancelling() > self._cancellations

    def withdraw_cancellation(self) -> bool:
        """Withdraw our cancellation, if there was one, and return whether it was the only one."""
        if not self._is_cancelled:
            return False
        self._is_cancelled = False
        getattr(self._task, "uncancel", int)()  # from Python 3.11
        return not self.is_cancelled_anew()

    def release(self) -> Commands[None]:
        """The same, and from here on the run is not cancelled."""
        self._is_over = True
        self.withdraw_cancellation()  # if the run has suppressed it
        return super().release()

    def _lost(self, lost: LockLost) -> None:
        super()._lost(lost)
        if self.options.when_lost is fail:
            with suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        # In the loop's own thread, so the run cannot end between check and cancel.
        if not self._is_over:
            self._is_cancelled = True
            self._task.cancel()
