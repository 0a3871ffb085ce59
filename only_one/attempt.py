"""One call's attempt to run: what is decided about it, and told of it, without waiting for the server."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from .clock import now
from .errors import LockLost, LockUnavailable
from .events import Acquired, Down, Lost, Reclaimed, Released, emit, logger, wanted
from .holder import is_queued, kept
from .lease import Lease
from .leases import generation, hold, let_go, release_later
from .plan import Call, Plan
from .policies import CarryOn, PutBack, fail
from .protocol import Note, Outcome
from .servers import Server

_RELEASED = "released"

CARRIED_ON = object()
"""What `Attempt.down` gives where the policy lets the run begin without its key."""


class Attempt:
    """A call that has asked for its key: what is decided about it, without waiting for the server."""

    __slots__ = ("call", "generation", "is_settled", "key", "lease", "plan", "server", "token")

    waits_until_told = True

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

    def lateness(self) -> TimeoutError | None:
        """What is wrong if the key, now that the server has said that it is ours, has expired again."""
        return None if self.lease.is_held else TimeoutError("the answer came when the key had expired again")

    def taken(self, reclaimed: bytes | None) -> None:
        """The key is ours; `reclaimed` is what stood there before, if it was taken over."""
        self.lease.on_loss.append(self._lost)
        hold(self.lease)
        if reclaimed is not None and wanted(Reclaimed) and not is_queued(reclaimed):
            emit(Reclaimed(self.key, self.name, reclaimed))
        if wanted(Acquired):
            emit(Acquired(self.key, self.name, self.token))

    def is_superseded(self) -> bool:
        """Whether the key is ours, but the work is not to be done any more."""
        task = self.call.task
        return task is not None and not task.may_begin(self.plan, self.server, self.key)

    def note(self, ended_by: BaseException | None) -> Note | None:
        """Where copies of a task's message are to be told that its run has ended, if they are."""
        task = self.call.task
        return None if task is None else task.note(self.key, ended_by)

    def down(self, problem: Exception) -> Any:
        """What `when_down` gives, or `CARRIED_ON`."""
        # A server that refuses has done with what it was sent before, if redis-py has sent it twice.
        self.adrift(settled=isinstance(problem, ResponseError))
        error = LockUnavailable(self.key, f"{type(problem).__name__}: {problem}")
        error.__cause__ = problem
        if wanted(Down):
            emit(Down(self.key, self.name, error))
        is_put_back = False
        try:
            return self.plan.when_down(error)
        except CarryOn:
            self.lease.lose("unavailable")
            return CARRIED_ON
        except PutBack as wish:
            if self.call.task is None:
                raise error from problem
            is_put_back = True
            return self.call.task.put_back(self.server, self.key, wish)
        finally:
            if not is_put_back:
                self._no_longer_queued()

    def adrift(self, *, settled: bool) -> None:
        """Whether the token stands on the server is not known: see to it in the background."""
        release_later(self.server, self.key, self.token, now() + self.plan.ttl, settled=settled)
        self.is_settled = True

    def _no_longer_queued(self) -> None:
        """What stands there for a task that was queued goes, too, as the task does not wait any more."""
        if self.call.queued is not None:
            release_later(self.server, self.key, self.call.queued, now() + self.plan.queue_timeout, settled=True)

    def abandon(self) -> None:
        """Leave nothing behind, if the key has not been given back in the ordinary way."""
        if not self.is_settled and not self.is_inherited:
            self.lease.lose(_RELEASED)  # and is renewed no more
            self.adrift(settled=False)
            self._no_longer_queued()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked off in the middle of the run, which stays the parent's."""
        return self.generation is not generation()

    def stays(self, ended_by: BaseException | None, *, succeeded: bool) -> tuple[bytes, int] | None:
        """What stands under the key after the run, and for how many milliseconds; None if it is given back."""
        task = self.call.task
        if not succeeded:
            return None if task is None else task.stays(self.plan, ended_by)
        if not self.plan.at_least:
            return None
        milliseconds = round((self.lease.begun + self.plan.at_least - now()) * 1000)
        return (kept(self.token, self.plan.at_least), milliseconds) if milliseconds > 0 else None

    def ended(self) -> LockLost | None:
        """The function has returned or raised: what was lost until now is told. From here on nothing is lost."""
        lost = self.lease.loss()
        if lost is not None:
            self._tell(lost)
        self.lease.lose(_RELEASED)
        return lost

    def released(self, outcome: Outcome | None, lost: LockLost | None, *, is_kept: bool) -> LockLost | None:
        """The key has been given back, or with None for an outcome could not be; returns how it was lost, if it was."""
        if self.call.task is not None:
            self.call.task.told(self.server, self.key, outcome)
        if outcome is None:
            self.adrift(settled=True)
        elif outcome.fate == "taken" and lost is None:
            lost = LockLost(self.key, "taken", outcome.value.decode(errors="backslashreplace"))
            self._tell(lost)
        self.is_settled = True
        let_go(self.lease)
        if wanted(Released):
            fate = "unknown" if outcome is None else "kept" if is_kept and outcome.fate == "held" else outcome.fate
            emit(Released(self.key, self.name, fate, now() - self.lease.begun))
        return lost

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
        policy = self.plan.when_lost
        if policy is fail:
            return
        try:
            policy(lost)
        except CarryOn:
            pass
        except Exception:  # noqa: BLE001 - there is no call left that could raise it
            logger.exception("when_lost of %s failed", self.name)


class AsyncAttempt(Attempt):
    """The same in an event loop, where `when_lost=fail` stops the run at once."""

    __slots__ = ("is_cancelled", "is_over", "loop", "task")

    waits_until_told = False  # the loop has others to see to

    def __init__(self, plan: Plan, server: Server, call: Call, key: str, token: bytes, begun: float) -> None:
        super().__init__(plan, server, call, key, token, begun)
        self.loop = asyncio.get_running_loop()
        self.task: Any = asyncio.current_task()
        self.is_over = False
        self.is_cancelled = False

    def ended(self) -> LockLost | None:
        """The same, and from here on the run is not cancelled."""
        self.is_over = True
        self.is_withdrawn()  # where the run has kept it to itself
        return super().ended()

    def is_withdrawn(self) -> bool:
        """Take our cancellation back, if there was one; returns whether it was the only one."""
        if not self.is_cancelled:
            return False
        self.is_cancelled = False
        uncancel = getattr(self.task, "uncancel", None)  # from Python 3.11
        return uncancel is None or uncancel() == 0

    def _lost(self, lost: LockLost) -> None:
        super()._lost(lost)
        if self.plan.when_lost is fail:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        # In the loop's own thread, so the run cannot end between the look and the leap.
        if not self.is_over:
            self.is_cancelled = True
            self.task.cancel()
