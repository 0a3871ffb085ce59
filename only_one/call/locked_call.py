"""One call that acquires a key: busy, server down, run, lost key and release, and the policy that decides each.

``acquire`` and ``release`` are command generators: they send nothing, and ``run`` sends their commands, sync or async.
Exception: a caller that is a Celery task sends commands of its own when the call asks it.
"""

import asyncio
import threading
from contextlib import suppress
from logging import ERROR
from math import inf
from typing import Any, Literal

from redis.exceptions import ResponseError

from only_one.clock import now
from only_one.connections.server import Server
from only_one.connections.server_features import is_of_another_type, level_of
from only_one.driver import TROUBLE, Commands, is_of_signal_handler, unanswered
from only_one.errors import AlreadyRunning, ConfigurationError, LockLost, LockUnavailable, OnlyOneError
from only_one.events import Acquired, Busy, Down, Lost, Reclaimed, Released, emit, log, warn_of_first_skip
from only_one.forks import see_fork
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

CARRIED_ON = object()
"""The result of a policy that ends in ``carry_on``: the run begins without its key."""


class LockedCall(Call):
    """One call that asks for its key.

    As a context manager it releases the key after any exception, and raises ``LockLost`` at the end of the block if the
    run has lost its key and ``when_lost`` is ``fail``.

    Attributes:
        waits_until_told: whether the call ends only after ``when_lost`` has returned, if the loss is seen at its end.
        caller: the plain function or the task that calls.
        lease: the lock as the run sees it; there is none before ``resolve_acquire``.
        result: the result of the call.
        has_succeeded: whether the function has returned.
        lost: how the run has lost its key, or None.
        pause: seconds after which the key is asked for again, because a previous attempt of the caller's work holds it;
            0 if the policy decides.
    """

    waits_until_told = True

    result: Any = None
    lost: LockLost | None = None
    pause = 0.0
    has_succeeded = False
    # Whether the key may be ours, is ours, or will be kept in the background; None once nothing is left to do.
    _stage: Literal["asked", "held", "kept later"] | None = "asked"
    # From the acquire: the value of the queued task from which the key was taken over, or may have been.
    _owed: Retained | None = None
    # From the reply on: whether a SET of the token may arrive after the call, because it was sent twice.
    _may_come_late = False
    # From the release on: the value that it stores in place of the token.
    _retained: Retained | None = None

    def __init__(self, options: EffectiveOptions, server: Server, key: str, caller: Caller) -> None:
        super().__init__(options, server, key)
        self.caller = caller
        self.token = caller.token_factory.token(options.timeout)
        self._unanswered_before = unanswered.get()
        self._asked_at = now()  # before SET, so the holder never takes the key for its own after the expiry

    def __enter__(self) -> None:
        active_tokens[self.token] = self.caller  # before SET, so no other call of this process takes the key over

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.ended_by = None  # the traceback refers to this call, whose arguments would live until garbage is collected
        if error is not None and self._is_of_this_process():
            if self._stage == "held":
                self.lease.lose("released")  # so that it is not renewed any more
                if self.has_succeeded and self.caller.app is not None:
                    # Celery stores no result if an exception has interrupted the release. So the key is not kept for
                    # `at_least`: a redelivery would find it, and be dropped.
                    self.has_succeeded = False
                    self._retained = self._to_retain(None)
                self._finish_release(None)
            elif self._stage == "asked":
                self.clean_up()
        if self._stage != "kept later":  # else others in this process must not take the key over
            active_tokens.pop(self.token, None)
        lost = self.lost if self.options.when_lost is fail else None
        if error is None and lost is not None:
            raise lost

    def _is_of_this_process(self) -> bool:
        """Whether the call began in this process. In a child that was forked in its run, the key is the parent's."""
        see_fork()
        return self.token in active_tokens

    def acquire(self) -> Commands[bytes | Exception | None]:
        """Acquire the key, and set ``pause`` if a previous attempt of the caller's work holds it.

        Returns:
            None if the key is ours, else the value that is stored there, or the error of the server or of a thread that
            cannot be started.
        """
        if self.options.lease is not None and (error := start_thread()):  # before SET: the key could not be renewed
            self._stage = None
            return error
        try:
            if self.caller.queued is None:
                value = yield from acquire(self.server.features, self.key, self.token, self.options.ttl)
            else:
                value = yield from self._take_over(self.caller.queued)
            while value is not None and self._can_take(value):  # the next value, if another call was faster
                value = yield from self._take_over(value)
            if value is not None and self.caller.is_held_by_own(value):
                self.pause = self.caller.asks_again_in(self, (yield ("PTTL", self.key)) / 1000)
        except TROUBLE as error:
            return error
        return value

    def _take_over(self, before: bytes) -> Commands[bytes | None]:
        """Acquire the key from a task that waits, or from a dead holder, whose value is ``before``.

        Returns:
            None if the key is ours, else the value that is stored there now.
        """
        is_own = before == self.caller.queued
        self._owed = None if is_own else (yield from owed_to(self.key, before, self.token))
        result = yield from replace(self.key, before, self.token, self.options.ttl)
        if result.status == "gone":
            self._owed = None  # the task has run meanwhile
            return (yield from acquire(self.server.features, self.key, self.token, self.options.ttl))
        if result.status == "taken":
            return result.value
        # A token of this very process, as a cancelled acquire leaves it, does not mean that a process was killed.
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
        """Whether the function may run, by the result of ``acquire``.

        If not, ``pause`` says when the key is asked for again; if it is 0, ``result`` is the result of the call.
        """
        self._may_come_late = unanswered.get() != self._unanswered_before
        if isinstance(acquired, bytes):
            if self._may_come_late:
                self.clean_up()
            self._stage = None
            if not self.pause:
                self.result = self.busy(acquired)
            return False
        limit = self.options.timeout or inf
        self.lease = Lease(self.server, self.key, self.token, self._asked_at, self.options.ttl, limit)
        expired = None if self.lease.is_held else TimeoutError("the answer came when the key had expired again")
        problem = acquired or expired
        if problem is not None:
            self.result = self.down(problem)
            self.lease.lose("unavailable")
            return self.result is CARRIED_ON
        self._stage = "held"
        self.lease.on_loss.append(self._on_loss)
        hold(self.lease)
        emit(Acquired, self.key, self.caller.name, self.token)
        return True

    def claim_work(self) -> bool:
        """Whether the work must still be done, now that the key is ours or the run goes on without it."""
        return self._stage != "held" or self.caller.claim_work(self)

    def busy(self, value: bytes) -> Any:
        """The result of the policy for a busy key that holds ``value``."""
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
        """The result of the policy for a server that could not be asked, or ``CARRIED_ON``."""
        if self._stage == "asked":
            # A server that refuses has stored nothing, and no other write is in flight, unless SET was sent twice.
            self.clean_up(no_write_in_flight=isinstance(problem, ResponseError))
        error = LockUnavailable(self.key, self.server.describe(problem))
        problem.__suppress_context__ = True  # the text of redis-py's error has that of its context, the system's error
        error.__cause__ = problem.with_traceback(None)
        emit(Down, self.key, self.caller.name, error)
        return self._ask(self.caller.on_down(self), error)

    def _ask(self, policy: Policy, error: OnlyOneError) -> Any:
        """The result of a policy, or ``CARRIED_ON``."""
        try:
            return check_result(policy(error))
        except CarryOn:
            return CARRIED_ON
        except RequeueRequest as how:
            return self.caller.requeue(self, how)

    def release(self) -> Commands[None]:
        """Release the key, or keep it for ``at_least``; no error here replaces the run's own result or exception."""
        if self._stage != "held" or not self._is_of_this_process():
            return
        self.lost = self.lease.loss()
        if self.lost is not None:
            self.lease.lose(self.lost.reason)  # first, or the late reply to a renewal would make it look held again
            self._tell_loss(self.lost)
        self.lease.lose("released")  # from here on no loss is noted
        for_retry, marker = self.caller.at_end(self)
        self._retained = self._to_retain(for_retry)
        result: ReleaseResult | None
        unanswered_before = unanswered.get()  # the other commands of the call cannot have deleted the key
        try:
            result = yield from end(self.server.features, self.key, self.token, self._retained, marker)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            result = ReleaseResult("taken") if marker is None and is_of_another_type(error) else None
            log(level_of(error), "%s could not be released: %s", self.key, error)
        else:
            is_marked = result.has_redeliveries or result.status != "held"
            if marker and is_marked:
                self.caller.on_marked(self)
        self._finish_release(result, was_sent_twice=unanswered.get() != unanswered_before)

    def _to_retain(self, for_retry: Retained | None) -> Retained | None:
        """The value to store in place of the token: of a run that has succeeded, an owed one, or that of a retry.

        A key names one waiting task: a retry gives way to the task from which the key was taken over.
        """
        error, at_least = self.ended_by, self.options.at_least
        exits = isinstance(error, SystemExit) and error.code in (None, 0) and not is_of_signal_handler(error)
        # A program that ends by `sys.exit()` has succeeded; a task that does has not.
        has_succeeded = self.has_succeeded or (exits and self.caller.app is None)
        until = self._asked_at + at_least
        must_keep = has_succeeded and at_least and until > now()
        if must_keep:
            return Retained(kept(self.token, at_least), until)
        if self._owed is not None:
            return to_store(self._owed)
        return None if has_succeeded else for_retry

    def clean_up(self, *, no_write_in_flight: bool = False, retained: Retained | None = None) -> None:
        """Release the key in the background, or store a retained value: the token may be stored there.

        Args:
            no_write_in_flight: whether the server has finished every SET of the token, if none was sent twice. A
                release may still be in flight.
            retained: the value to store in place of the token; by default an owed one.
        """
        if retained is None and self._owed is not None:
            retained = to_store(self._owed)
        is_final = no_write_in_flight and not self._may_come_late
        until = now() + self.options.ttl
        if self._stage == "held":  # perhaps for longer, by `extend`
            until = max(until, self.lease.expires_at, self.lease.asked_until)
        if self.server.is_known:  # no command was sent to an unknown server
            release_later(PendingRelease(self.server, self.key, self.token, until, is_final, retained))
        # Last, so that `__exit__` cleans up again if a signal handler has raised an exception meanwhile.
        self._stage = "kept later" if retained else None

    def _finish_release(self, result: ReleaseResult | None, *, was_sent_twice: bool = False) -> None:
        """Finish the call after its release.

        Args:
            result: the result of the release; None if no reply has told it.
            was_sent_twice: whether a key that is missing may have been deleted by the first of two releases.
        """
        outcome: Any = "unknown"
        if result is None:
            self.clean_up(no_write_in_flight=True, retained=self._retained)
        else:
            outcome = result.status
            is_missing = result.status == "gone" and not was_sent_twice
            is_deleted_by_another = is_missing and now() < self.lease.expires_at
            reason = "deleted" if is_deleted_by_another else result.status
            if self.lost is None and reason in ("deleted", "taken"):
                self.lost = LockLost(self.key, reason, result.value.decode(errors="backslashreplace"))
                self._tell_loss(self.lost)
            self._stage = None
            if self._may_come_late:
                self.clean_up()
        let_go(self.lease)
        if self.lost is None:
            self.lease.on_loss.clear()  # it refers to this call, whose result would live until garbage is collected
        is_kept = self._retained is not None and self._retained.note is None  # a note: the value of a task that waits
        outcome = "kept" if is_kept and outcome == "held" else outcome
        emit(Released, self.key, self.caller.name, outcome, now() - self._asked_at)

    def _tell_loss(self, lost: LockLost) -> None:
        """Tell the run of a loss that is seen at its end: once, and in another thread, like any other loss."""
        # No daemon, because the process must not end before the run was told.
        thread = threading.Thread(target=self.lease.tell_loss, args=(lost,), name="only_one-lost", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # none can be started: at a limit, or while the interpreter shuts down
            self.lease.tell_loss(lost)
        else:
            if self.waits_until_told:
                thread.join()

    def _on_loss(self, lost: LockLost) -> None:
        """Emit the event, and call ``when_lost``. Exception: the call itself acts for ``fail``, at its end."""
        emit(Lost, self.key, self.caller.name, lost.reason, lost.value)
        if self.options.when_lost is fail:
            return
        try:
            with suppress(CarryOn):
                check_result(self.options.when_lost(lost))
        except (Exception, SystemExit):  # noqa: BLE001 - this thread has no caller that could handle it
            log(ERROR, "when_lost of %s failed", self.caller.name, exc_info=True)


class AsyncLockedCall(LockedCall):
    """A call in an event loop, where ``when_lost=fail`` cancels the run at once."""

    waits_until_told = False  # a wait would stop all tasks of the loop

    def __init__(self, options: EffectiveOptions, server: Server, key: str, caller: Caller) -> None:
        super().__init__(options, server, key, caller)
        self._task: Any = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._cancellations = self._cancelling()
        self._is_over = self._is_cancelled_by_us = False

    def _cancelling(self) -> int:
        """How often the task has been cancelled so far; 0 before Python 3.11, which does not count."""
        return int(getattr(self._task, "cancelling", int)())  # `int()` is 0

    def is_cancelled_anew(self) -> bool:
        """Whether the task was cancelled since the call began; an earlier cancellation may still be counted."""
        return self._cancelling() > self._cancellations

    def withdraw_cancellation(self) -> bool:
        """Withdraw our cancellation, if there was one, and return whether it was the only one."""
        if not self._is_cancelled_by_us:
            return False
        self._is_cancelled_by_us = False
        getattr(self._task, "uncancel", int)()  # there is no `uncancel` before Python 3.11
        return not self.is_cancelled_anew()

    def release(self) -> Commands[None]:
        """Release the key, see ``LockedCall``; from here on a loss does not cancel the run."""
        self._is_over = True
        self.withdraw_cancellation()  # the run may have suppressed our `CancelledError`
        return super().release()

    def _on_loss(self, lost: LockLost) -> None:
        super()._on_loss(lost)
        if self.options.when_lost is fail:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        # In the loop's own thread, where the run cannot end between this check and the cancellation.
        if not self._is_over:
            self._is_cancelled_by_us = True
            self._task.cancel()
