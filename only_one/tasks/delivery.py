"""One delivery of a Celery task's message: no work is lost behind a key that is taken, and nothing behind itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from only_one.clock import now
from only_one.errors import AlreadyRunning, LockUnavailable
from only_one.events import logger
from only_one.holder import Holder, Identity, is_gone
from only_one.lock import drive
from only_one.plan import Plan, Policy
from only_one.policies import BufferOne, PutBack, fail, retry, skip
from only_one.protocol import TROUBLE, Note, Outcome, Steps
from only_one.servers import Server

from . import buffer
from .broker import marks_redeliveries, redelivers_at_any_time, remembered_for, visibility_timeout
from .notes import ask_of_copy, look_for_copies, number_copy, tell_copies_of_result
from .put_back import header_of, publish
from .task_call import TaskCall
from .waiting import waits_for

_STORES_WITHIN = 30
"""Seconds within which a run that has ended has stored its result, or never does, if nobody can see its process."""


class Predecessor(Exception):
    """Raised where the key is held by an attempt of the same task before this one, which is cleaning up."""

    def put_back(self) -> Any:
        """Wait in the queue instead of in a worker."""
        delivery, server, key = self.args
        return delivery.wait(server, key)


class Delivery(TaskCall):
    """The current delivery of a task's message.

    Attributes:
        id: the task's id.
        attempt: how many times the task has been retried.
        header: what the message carries for us.
    """

    def __init__(self, task: Task, request: Any, *, bound: bool, covers_queue: bool) -> None:
        """See above.

        Args:
            task: the task.
            request: its current request.
            bound: the first argument of its function is the task itself.
            covers_queue: it is covered from queued to finished, through its waits for a retry, too.
        """
        super().__init__(task, Identity(task.name or "", request.id, request.retries), bound=bound)
        self.id = request.id
        self.attempt = request.retries
        self.header = header_of(request)
        if covers_queue:
            self.key = self.header.key
            self.queued = self.header.token.encode() if self.header.token else None
        self._request = request
        self._covers_queue = covers_queue
        self._began = now()
        self._is_superseded = False
        self._has_note = False

    def default_policy(self) -> Policy:
        """None would do harm where the work has begun, and where others would be given it for a result."""
        request = self._request
        if not request.is_eager and (self.attempt or self._is_redelivered):
            return retry()
        return fail if request.chord or request.chain else skip

    @property
    def _is_redelivered(self) -> bool:
        """Whether the broker says that it has delivered the message before."""
        return bool((self._request.delivery_info or {}).get("redelivered"))

    @property
    def _is_acknowledged_on_failure(self) -> bool:
        said = getattr(self._task, "acks_on_failure", None)  # since Celery 5.7
        return bool(self._task.acks_on_failure_or_timeout if said is None else said)

    @property
    def _may_be_redelivered(self) -> bool:
        return self._is_redelivered or bool(self._task.acks_late and not marks_redeliveries(self.app))

    def meet(self, server: Server, key: str, value: bytes) -> None:
        """Nothing is skipped behind itself: the key is taken by `value`, which may be this very task.

        Raises:
            Predecessor: if it is an attempt before this one.
            Ignore: if this is a copy of a message whose work is done, or is under way: then it was put back.
        """
        holder = Holder.parse(value)
        if holder is None or holder.task_id != self.id or holder.attempt is None or self._request.is_eager:
            return
        if holder.state == "kept" or holder.attempt > self.attempt:
            raise self._drop(key, "it is out of date")
        if holder.attempt < self.attempt:
            raise Predecessor(self, server, key)
        # The copy asks, the release answers: whether the run has ended is not for the result backend to say.
        try:
            has_ended = drive(server.client, ask_of_copy(key, self._copies(key), remembered_for(self.app))).is_stored
        except TROUBLE as error:
            logger.debug("the run of %s cannot be asked: %s", self.id, error)
            has_ended = False
        if has_ended:
            raise self._drop(key, "its run has ended")
        self.wait(server, key)

    def wait(self, server: Server, key: str) -> Any:
        """Put the message back until the key is free, or its run's result is stored."""
        return self.put_back(server, key, PutBack(AlreadyRunning(key)))

    def put_back(self, server: Server, key: str, wish: PutBack) -> Any:
        """Put the message back into its queue, under the same id and with all that it carries.

        Returns:
            None for a trigger that a newer one has taken the place of.

        Raises:
            Ignore: so that this delivery ends without a result.
            AlreadyRunning: at the limit, and where there is no queue.
        """
        header = self.header
        if self._request.is_eager or (wish.max_retries is not None and header.times >= wish.max_retries):
            raise wish.error
        if isinstance(wish.error, LockUnavailable):  # to ask it again would take as long again, and say nothing
            publish(self._task, self._request, header, wish.countdown)
            raise Ignore
        copies = self._copies(key)
        try:
            if header.number < drive(server.client, look_for_copies(key, copies)).number:
                raise self._drop(key, "a later copy of it waits")
            if wish.only_newest:
                header = header._replace(trigger=buffer.arrive(server, key, self.app, self.id, header.trigger))
                if header.trigger is None:
                    return None
        except TROUBLE as error:
            logger.debug("copies of %s cannot be told apart: %s", self.id, error)
        number = publish(self._task, self._request, header, wish.countdown)
        try:
            drive(server.client, number_copy(key, copies, number, remembered_for(self.app)))
            if header.trigger is not None:
                buffer.published(server, key, self.app, header.trigger)
        except TROUBLE as error:
            logger.debug("copies of %s cannot be told apart: %s", self.id, error)
        raise Ignore

    def may_begin(self, plan: Plan, server: Server, key: str) -> bool:
        """The key is ours: whether the work is still to be done.

        Raises:
            Ignore: for a copy of a message whose run has ended.
        """
        try:
            if self.header.number or self._may_be_redelivered:
                self._make_way(server, key)
            if isinstance(plan.when_busy, BufferOne) and not self._request.is_eager:
                self._is_superseded = not buffer.begin(server, key, self.app, self.id, self.header.trigger)
                return not self._is_superseded
        except TROUBLE as error:
            logger.debug("copies of %s cannot be told apart: %s", self.id, error)
        return True

    def _make_way(self, server: Server, key: str) -> None:
        """Leave the work to the run that has done it, or to a later copy.

        Raises:
            Ignore: where this copy is not to do it; it was dropped, or waits for the run's result to be stored.
        """
        found = drive(server.client, look_for_copies(key, self._copies(key)))
        if self.header.number < found.number:
            raise self._drop(key, "a later copy of it waits")
        if found.is_stored:
            raise self._drop(key, "its run has ended")
        if found.age < _STORES_WITHIN and not is_gone(found.ended):
            self.wait(server, key)
        if found.ended:
            logger.info("%s[%s] is run again: its run has ended, but stored no result", self._task.name, self.id)

    def may_take(self, value: bytes) -> bool:
        """A retry of this very task is ahead of it; all else that waits in a queue has not begun."""
        holder = Holder.parse(value)
        return holder is None or holder.task_id != self.id or (holder.attempt or 0) <= self.attempt

    def stays(self, plan: Plan, ended_by: BaseException | None) -> tuple[bytes, int] | None:
        """A task that is covered from queued to finished keeps its key while it waits to be retried."""
        if not self._covers_queue or self._request.is_eager or not self._is_retried_as_it_is(ended_by):
            return None
        seconds = waits_for(self.app, plan.queue_timeout, self._request.expires, getattr(ended_by, "when", None))
        identity = Identity(self._task.name, self.id, self.attempt + 1, "queued")
        return (identity.token(seconds), round(seconds * 1000)) if seconds > 0 else None

    def _is_retried_as_it_is(self, ended_by: BaseException | None) -> bool:
        """Whether it was published again with the same arguments, which are another key's if they are others."""
        sig = ended_by.sig if isinstance(ended_by, Retry) else None
        if sig is None:
            return False
        return list(sig.args) == list(self._request.args or ()) and sig.kwargs == dict(self._request.kwargs or {})

    def note(self, key: str, ended_by: BaseException | None) -> Note | None:
        """Where copies of the message are told that its run has ended, as it can only have with acks_late.

        A run that was rejected, ignored or interrupted by a signal has not ended: a copy is to do its work.
        Nor has one that failed, if its message is not acknowledged then: it may come back by a dead-letter queue.
        """
        has_ended = ended_by is None or isinstance(ended_by, Retry)
        if isinstance(ended_by, Exception) and not isinstance(ended_by, (Ignore, Reject)):
            has_ended = has_ended or self._is_acknowledged_on_failure
        # Where nothing has run, a copy finds that out, too, and stores the result that this one may not come to store.
        if not self._task.acks_late or not has_ended or self._is_superseded:
            return None
        self._has_note = True
        # There may be a copy that could not ask, as it waits for a free place in a worker.
        may_be_unseen = redelivers_at_any_time(self.app) or now() - self._began > visibility_timeout(self.app) / 2
        return Note(self._copies(key), round(1000 * remembered_for(self.app)) if may_be_unseen else 0)

    def told(self, server: Server, key: str, outcome: Outcome | None) -> None:
        """The copies know now that the run has ended; when its result is stored they are to know that, too."""
        if self._has_note and outcome is not None and (outcome.has_copies or outcome.fate != "held"):
            self._request.only_one_stored = partial(self._say, server, tell_copies_of_result(key, self._copies(key)))

    def _say(self, server: Server, steps: Steps[Any]) -> None:
        try:
            drive(server.client, steps)
        except TROUBLE as error:
            logger.debug("copies of %s cannot be told: %s", self.id, error)

    def _copies(self, key: str) -> str:
        return f"{{{key}}}:copy:{self.id}:{self.attempt}"

    def _drop(self, key: str, reason: str) -> Ignore:
        logger.info("a copy of %s[%s] was dropped: %s", self._task.name, self.id, reason, extra={"only_one_key": key})
        return Ignore(reason)
