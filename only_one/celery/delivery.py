"""A task's run: whether a call is one, and its behaviour when its key is busy, before it begins and when it ends.

A task is never skipped because of its own lock.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import INFO
from math import inf
from typing import Any, NoReturn

from celery import Task, _state
from celery.exceptions import Ignore, Retry
from kombu.utils.uuid import uuid

from only_one.call.effective_options import AtEnd, Call, Caller, Decoration, Policy
from only_one.call.job_queues import Job, JobCaller
from only_one.call.owed_key import note_of
from only_one.clock import now
from only_one.driver import drive
from only_one.errors import AlreadyRunning, LockUnavailable
from only_one.events import log
from only_one.holder import Holder
from only_one.lock.commands import Retained, evaluate
from only_one.lock.liveness import is_gone
from only_one.policies import BufferOne, RequeueRequest, carry_on, fail, retry, skip
from only_one.policies import Retry as RetryPolicy

from . import coalescing, redelivery
from .broker import marks_redeliveries, remembered_for, waits_for
from .requeue import Header, end_delivery, header_of, publish
from .task_functions import TaskCaller, functions_of, functions_with_bases, task_of_items
from .work import Work, work_held_by, work_of

_called: ContextVar[Any] = ContextVar("only_one_called", default=(None, None))
"""A task and its request, for the threads to which the context is copied: Celery's stack of tasks is of one thread."""


@contextmanager
def called(task: Any) -> Iterator[None]:
    """A block in which a task calls its function, perhaps in another thread."""
    before = _called.set((task, task.request))
    try:
        yield
    finally:
        _called.reset(before)


def current_task() -> Any:
    """The task of Celery that is under way here; None if there is none."""
    return unwrapped(_state.get_current_task() or _called.get()[0])


def unwrapped(task: Any) -> Any:
    """The task itself: New Relic's agent has Celery run an object that wraps it. A task wraps its function."""
    wrapped = getattr(task, "__wrapped__", None)
    return wrapped if isinstance(wrapped, Task) else task


def caller_of(task: Any, decoration: Decoration, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Caller:
    """The caller of ``wrapper``: the current task if this is its run, else a plain function.

    A function that is called directly, or from another task's run, is none of that task's; but by ``map`` and the like.

    Raises:
        Ignore: if an earlier call has ended this delivery by it, and somebody above has caught that to call once more.
    """
    bound = bool(args) and isinstance(args[0], Task) and wrapper in functions_with_bases(args[0])
    is_its_run = task is not None and (wrapper in functions_of(task) or (bound and args[0] is task))
    plain = decoration.plain_bound if bound else decoration.plain
    if task is None or not is_its_run:
        return plain
    request = task.request if _state.get_current_task() else _called.get()[1]
    if "only_one_is_over" in vars(request):
        raise Ignore
    if request.called_directly:
        running = _state.get_current_worker_task()
        if running is None or task_of_items(running, running.request.kwargs) != task.name:
            return plain
        return ItemCaller(task, running.request, bound=bound)
    under_way = vars(request).get("only_one_under_way")
    is_inside = under_way and decoration in under_way.values()  # a call from inside its own run
    if is_inside or request.is_eager:  # which has no message
        return TaskCaller(task, work_of(request).token_factory(task), bound=bound)
    return Delivery(task, request, bound=bound, decoration=decoration)


class ItemCaller(JobCaller):
    """The call of a task's function by ``map``, ``starmap`` or ``chunks``: one of those of the list's message.

    If that is delivered again, its items meet those of the first delivery, and wait for them. By default they fail then
    where another run has the key: an item has no message of its own that could wait, and its run may have been killed.
    """

    check = TaskCaller.check

    def __init__(self, task: Any, request: Any, *, bound: bool) -> None:
        """``request`` is that of the list."""
        job = Job(str(request.id), request.retries, start=request, queue="celery.map")
        super().__init__(task.name, job, bound=bound)
        self.app = task.app
        self._is_redelivered = bool((request.delivery_info or {}).get("redelivered"))

    def on_busy(self, call: Call, value: bytes) -> Policy:
        """The policy for a key that holds ``value``."""
        fails = self._is_redelivered and call.options.when_busy is None
        return fail if fails else super().on_busy(call, value)


class Delivery(TaskCaller):
    """The run of a task's message in a worker: one delivery, among others with the same task id and attempt.

    Attributes:
        header: our header in the message.
        work: the work of the message.
        under_way: the keys that runs of this message hold, one of each decorator of the task; None for a run that is
            over. The task may call it once more in this delivery, as a base's ``__call__`` does that tries again.
        is_redelivered: whether the broker says that it has delivered the message before, or that it was rejected.
        is_superseded: whether it has the key, but a newer task that ``buffer_one`` coalesces does the work.
    """

    is_superseded = False

    def __init__(self, task: Any, request: Any, *, bound: bool = False, decoration: Decoration) -> None:
        self.work = work_of(request)
        super().__init__(task, self.work.token_factory(task), bound=bound)
        self.header = header_of(request, self.work)
        # In the copy that Celery makes for a call from inside, all that it does not know would be headers: where there
        # are none, the next message would carry what we note here, and could not be serialized.
        request.headers = request.headers or {}
        self.under_way: dict[str, Decoration | None] = vars(request).setdefault("only_one_under_way", {})
        self._decoration = decoration
        if decoration.is_unique:
            self.key = self.header.key
            self.queued = self.header.token.encode() if self.header.token else None
        died = (request.headers or {}).get("x-death") or ()
        # It comes back by a dead-letter queue; one that has only expired in a queue is delayed, and has not begun.
        was_rejected = any(each.get("reason") in {"rejected", "delivery_limit"} for each in died)
        self.is_redelivered = was_rejected or bool((request.delivery_info or {}).get("redelivered"))
        has_waited = self.header.times and not self.header.lineage  # an earlier version says so of a redelivery
        if self.is_redelivered or has_waited:  # as a message that is requeued, it is none for the broker
            self.header = self.header._replace(has_begun=True)
        self._request = request
        self._began = now()

    @property
    def may_be_redelivered(self) -> bool:
        """Whether the broker may have delivered the message before."""
        return self.is_redelivered or not marks_redeliveries(self.app)

    @property
    def is_first_delivery(self) -> bool:
        """Whether this is new work for certain, also under an id that was used before: no redelivery, no requeue."""
        return not (self.header.times or self.may_be_redelivered)

    def on_busy(self, call: Call, value: bytes) -> Policy:
        """The policy for a key that holds ``value``; if the holder is this very task, the message waits in the queue.

        By default that is ``skip``. Exceptions: a retry or a redelivery is requeued, and a task whose result others
        receive fails.

        Raises:
            Ignore: if the holder is this task: a message whose work is done is dropped, the others are requeued.
        """
        if self.under_way.get(call.key) is not None:  # two decorators of the task have the same key
            return super().on_busy(call, value)
        self._carry_key(call)
        request, holder = self._request, Holder.parse(value)
        held = work_held_by(holder)
        if held is not None and held.id == self.work.id:
            is_kept = holder is not None and holder.state == "kept"
            self._wait_for_own(call, held, is_kept=is_kept)
        # A task of a chain or group that replaces another has an id of its own.
        is_of_replaced = held is not None and held.id == request.parent_id and held.replacement < self.work.replacement
        if call.options.when_busy is not None and not is_of_replaced:
            # Where its run has ended, no policy puts another result in the place of the run's.
            if self.header.has_begun and call.key not in self.under_way:
                with redelivery.unless_down(self.work.id):
                    self._wait_for_result(call)
            return call.options.when_busy
        is_continued = bool(self.work.attempt or self.work.replacement)
        if is_continued or self.header.has_begun:
            return retry()
        return fail if request.chord or request.chain else skip

    def on_down(self, call: Call) -> Policy:
        """The policy for a server that could not be asked; a redelivery waits, because its run may be under way."""
        return retry() if self.header.has_begun and call.options.when_down is not carry_on else call.options.when_down

    def _wait_for_own(self, call: Call, held: Work, *, is_kept: bool) -> None:
        """End this delivery, because work with its task id holds the key; or return if ``when_busy`` must decide.

        Raises:
            Ignore: the message is requeued after earlier work, and while its own runs; it is dropped after later work.
        """
        has_to_wait = isinstance(call.options.when_busy, RetryPolicy)
        # A kept key may be that of earlier work with this id, for which a message waits that is requeued by now.
        may_be_new = self.is_first_delivery or (is_kept and not self.may_be_redelivered)
        decides = has_to_wait and may_be_new
        if decides and held >= self.work:
            return
        # A message that was requeued as new work, and is no redelivery, has not run: the other work has only its id.
        may_have_run = self.may_be_redelivered or not self.header.lineage
        is_late = held > self.work and may_have_run
        if is_late:
            self._drop(call, "it is out of date")
        if held == self.work:
            self._wait_for_run(call, is_kept=is_kept)
        self.requeue(call, RequeueRequest(AlreadyRunning(call.key), retry()))

    def _wait_for_run(self, call: Call, *, is_kept: bool) -> NoReturn:
        """Requeue this redelivery until its run has ended, and its result is stored; drop it if both is so.

        Raises:
            Ignore: so that this delivery ends without a result.
        """
        ended = b""
        with redelivery.unless_down(self.work.id):
            ended = self._check_marker(call, waits=0 if is_kept else remembered_for(self.app)).ended
        if is_kept and not ended:
            self._drop(call, "it is out of date")
        self._request.expires = None  # it has begun in time
        self._request.only_one_markers = []  # as where a delivery is dropped for a later message
        self._publish_again(call, self.header, None)

    def requeue(self, call: Call, how: RequeueRequest) -> Any:
        """Requeue the message, under the same id and with all that it carries, as a policy says.

        Returns:
            None for a task that ``buffer_one`` drops for a newer one.

        Raises:
            Ignore: so that this delivery ends without a result.
            AlreadyRunning: at the limit.
        """
        header, policy = self.header, how.policy
        if policy.max_retries is not None and header.times >= policy.max_retries:
            raise how.error from how.error.__cause__  # not in the context of the request
        # An earlier call in this delivery may have noted that its run has ended: what is requeued is none of that run.
        if self.is_first_delivery or call.key in self.under_way:
            header = header._replace(lineage=uuid())
        if isinstance(how.error, LockUnavailable):  # asking again would take as long again
            publish(self._task, self._request, header, policy.countdown)
            raise Ignore
        with redelivery.unless_down(self.work.id):
            if not self.is_first_delivery:
                self._check_marker(call)
            if isinstance(policy, BufferOne):
                held_by: str = getattr(how.error, "value", "")
                header = header._replace(trigger=self.arrive(call, held_by, begins=False))
                if not header.trigger:
                    return None
        self._publish_again(call, header, policy.countdown)

    def _publish_again(self, call: Call, header: Header, countdown: float | None) -> NoReturn:
        """Publish the message, and note in the completion marker how often that was done.

        Raises:
            Ignore: so that this delivery ends without a result.
        """
        publish(self._task, self._request, header, countdown)
        with redelivery.unless_down(self.work.id):
            milliseconds, beside = round(remembered_for(self.app) * 1000), (self.marker(call.key),)
            noted = evaluate(redelivery.REQUEUED, call.key, header.times + 1, milliseconds, beside=beside)
            drive(call.server.client, noted)
            if header.trigger is not None:
                requeued = self._request.only_one_requeued.options
                most = waits_for(self.app, inf, requeued.get("expires"), None)
                seconds = coalescing.trusted_for(self.app, most, requeued.get("countdown"))
                coalescing.note_published(call.server, call.key, self.app, header.trigger, seconds)
        raise Ignore

    def arrive(self, call: Call, token: str, *, begins: bool) -> int:
        """Number this task; see ``coalescing.arrive`` for the arguments and the result."""
        trigger = self.header.trigger
        # A retry, a replacement and another call in one delivery go on with what their task's id has; new work is newer
        # than all before it. So is the last task of a chain that replaces another, and has that one's id.
        is_replacement = self.work.replacement and self._request.parent_id == self.work.id
        is_the_first = not (self.work.attempt or is_replacement or call.key in self.under_way)
        is_new = is_the_first and self.is_first_delivery
        if trigger is None and is_new:
            trigger = coalescing.NEWEST
        given = (call.server, call.key, self.app, self.work.id, trigger, uuid(), token)
        return coalescing.arrive(*given, begins=begins)

    def claim_work(self, call: Call) -> bool:
        """Whether the work is still to be done, now that the key is ours.

        Raises:
            Ignore: for a redelivery that is dropped, or requeued until the result of its run is stored.
        """
        self._carry_key(call)
        # Where the task is not unique any more, the key in its message may be another: that is withdrawn at the end.
        if self.header.key in (None, call.key):
            self._request.only_one_has_begun = True
        is_unmarked = self._task.acks_late and self.may_be_redelivered
        # What has been noted of the work since an earlier call in this delivery began was noted by that call.
        is_first_call = call.key not in self.under_way
        may_be_redelivery = is_first_call and (self.header.times or self.is_redelivered or is_unmarked)
        with redelivery.unless_down(self.work.id):
            if may_be_redelivery and self._wait_for_result(call).ended:
                log(INFO, "%s[%s] is run again: its run has ended, but stored no result", self.name, self.work.id)
            if isinstance(call.options.when_busy, BufferOne):
                trigger = self.arrive(call, call.token.decode(), begins=True)
                self.is_superseded = not trigger
                if self.header.trigger is None and trigger:  # another decorator of it would give it a later number
                    self._carry(self.header._replace(trigger=trigger))
        if not self.is_superseded:
            self.under_way[call.key] = self._decoration
        return not self.is_superseded

    def _wait_for_result(self, call: Call) -> redelivery.CompletionMarker:
        """End this delivery if its run has ended, and has stored its result or may yet do so; else read its marker.

        Raises:
            Ignore: the message is dropped, or requeued until the result is stored.
        """
        marker = self._check_marker(call)
        if marker.age < redelivery.STORES_WITHIN and not is_gone(marker.ended):
            self._publish_again(call, self.header, None)
        return marker

    def _carry_key(self, call: Call) -> None:
        """A task that was sent with an id of its own has no key in its message: its later messages have it."""
        if self._decoration.is_unique and self.header.key is None:
            self._carry(self.header._replace(key=call.key))

    def _carry(self, header: Header) -> None:
        """Have the task's later calls and messages find this header."""
        self.header = header
        self._request.headers = {**self._request.headers, **header.as_headers()}
        vars(self._request).update(header.as_headers())  # in the place of the message's, if it had one

    def can_take_queued(self, call: Call, value: bytes) -> bool:  # noqa: ARG002
        """A retry of this very task goes first; no other task that waits in a queue has begun."""
        queued = work_held_by(Holder.parse(value))
        return queued is None or queued.id != self.work.id or queued <= self.work

    def at_end(self, call: Call) -> AtEnd:
        """The retained value for a retry, and the marker that tells redeliveries that the run has ended."""
        if call.key in self.under_way:
            self.under_way[call.key] = None
        marker = None
        # Where nothing has run, a redelivery finds that out, too, and stores the result that this one may not store.
        if self._task.acks_late and not self.is_superseded:
            marker = redelivery.marker_update(self._task, self.marker(call.key), call.ended_by, now() - self._began)
        return self.retained_value(call), marker

    def retained_value(self, call: Call) -> Retained | None:
        """The value that keeps a unique task's key while its message waits for a retry, or another decorator's key."""
        if not self._decoration.is_unique:
            return None
        request, ended_by = self._request, call.ended_by
        sig = ended_by.sig if isinstance(ended_by, Retry) else vars(request).get("only_one_requeued")
        if sig is None:
            return None
        if not self.keeps_key(self._decoration, call.key, request, sig.args, sig.kwargs):
            return None
        begins_in = getattr(ended_by, "when", None) or sig.options.get("countdown")
        expires = sig.options.get("expires", request.expires)
        seconds = waits_for(self.app, call.options.queue_timeout, expires, begins_in)
        work = self.work._replace(attempt=sig.options.get("retries", self.work.attempt + 1))
        token = work.token_factory(self._task, "queued").token(seconds)
        note = note_of(call.key, *work)
        return Retained(token, now() + seconds, note) if seconds > 0 else None

    def _check_marker(self, call: Call, waits: float = 0) -> redelivery.CompletionMarker:
        """Read the completion marker of this work, and drop this delivery if it has no work to do.

        Args:
            call: the call.
            waits: seconds for which the run that holds the key is asked to tell of its end; 0 if it is not.

        Raises:
            Ignore: if this delivery is dropped: its run has ended, or its message was requeued more often.
        """
        marker = drive(call.server.client, redelivery.read_marker(call.key, self.marker(call.key), waits))
        if marker.is_stored or self.header.times < marker.times:
            reason = "its run has ended" if marker.is_stored else "a later message waits"
            self._drop(call, reason, waits_no_more=marker.is_stored)
        return marker

    def on_marked(self, call: Call) -> None:
        """Have ``ended_tasks`` note in the marker when the result is stored, too."""
        markers = vars(self._request).setdefault("only_one_markers", [])
        markers.append((call.server, call.key, self.marker(call.key)))

    def marker(self, key: str) -> str:
        """The name of the completion marker."""
        return self.work.marker(key, self.header.lineage)

    def _drop(self, call: Call, reason: str, *, waits_no_more: bool = False) -> NoReturn:
        """End this delivery without a run, and log why.

        Args:
            call: the call.
            reason: why, for the log.
            waits_no_more: whether no other message of this work waits either: so a call that has requeued this message
                must not store its value now. Else another message has begun, whose key this one leaves alone.

        Raises:
            Ignore: always.
        """
        self._request.only_one_has_begun = not waits_no_more
        end_delivery(self._request)
        if not waits_no_more:  # an earlier call in this delivery has ended, and what comes of the work is not stored
            self._request.only_one_markers = []
        extra = {"only_one_key": call.key}
        log(INFO, "redelivery of %s[%s] dropped: %s", self.name, self.header.id, reason, extra=extra)
        raise Ignore
