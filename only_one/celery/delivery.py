"""The delivery of a task's message to a worker, and its run: when the key is busy, before the run and at its end.

A task is never skipped because of its own lock.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from logging import INFO
from math import inf
from typing import Any, NoReturn

from celery import Task, _state, signals
from celery.exceptions import Ignore, Retry
from kombu.utils.uuid import uuid

from only_one.call.effective_options import AtEnd, Call, Caller, Decoration, Policy
from only_one.call.job_queues import Job, JobCaller
from only_one.clock import now
from only_one.connections.server import Server
from only_one.driver import drive
from only_one.errors import AlreadyRunning, LockUnavailable
from only_one.events import log
from only_one.holder import Holder, Work, work_held_by
from only_one.lock.commands import Retained, evaluate
from only_one.lock.liveness import is_gone
from only_one.policies import BufferOne, RequeueRequest, carry_on, fail, retry, skip
from only_one.policies import Retry as RetryPolicy

from . import coalescing, redelivery
from .broker import remembered_for
from .queue_timeout import longest_wait
from .requeue import Header, header_of, publish, work_of
from .task_functions import (
    TaskCaller,
    async_function_of,
    functions_of,
    functions_with_bases,
    task_of_items,
)

_STATE = "only_one_delivery"
"""The attribute of Celery's request that has the state of its delivery."""


@dataclass(eq=False)
class DeliveryState:
    """What has become of a delivery so far: the calls in it tell each other, and ``ended_tasks`` at its end.

    A base's ``__call__`` may call the task's function more than once in a delivery.

    Attributes:
        runs: by key, the decoration whose run holds the key; None once that run is over.
        markers: server, key and name of the completion markers of these runs, in which the stored result is noted.
        requeued: the signature by which the message was published again; None if it was not.
        withdraws: whether a unique task's key is withdrawn at the end, because no run has begun and no message waits.
        is_over: whether the message was requeued or dropped, so that no later call runs.
    """

    runs: dict[str, Decoration | None] = field(default_factory=dict)
    markers: list[tuple[Server, str, str]] = field(default_factory=list)
    requeued: Any = None
    withdraws: bool = True
    is_over: bool = False


def state_of(request: Any) -> DeliveryState:
    """The state of the delivery that Celery's request is about. Celery's copies of the request have the same one."""
    # The request gets headers, because Celery makes headers of unknown attributes when it copies a request without any:
    # the next message would carry the state, which cannot be serialized.
    request.headers = request.headers or {}
    state: DeliveryState = vars(request).setdefault(_STATE, DeliveryState())
    return state


_task_in_context: ContextVar[tuple[Any, Any, Any]] = ContextVar("only_one_task", default=(None, None, None))
"""The task that is under way, its request, and the same of the task that has applied it.

Celery's own stack of tasks is not copied to other threads.
"""


def _on_begin(task: Any, **_: Any) -> None:
    """Let an async function find its task, if a base's ``__call__`` awaits it in a thread with a copied context."""
    if async_function_of(unwrapped(task)) is not None:
        _task_in_context.set((task, task.request, _task_in_context.get()))


def _on_end(task: Any, **_: Any) -> None:
    _, request, before = _task_in_context.get()
    if request is task.request:  # else the task is not async, and may be applied by one that is
        _task_in_context.set(before)


signals.task_prerun.connect(_on_begin)
signals.task_postrun.connect(_on_end)


def current_task() -> Any:
    """The Celery task that is under way here; None if there is none."""
    return unwrapped(_state.get_current_task() or _task_in_context.get()[0])


def unwrapped(task: Any) -> Any:
    """The task itself: where New Relic's agent is installed, Celery runs an object that wraps the task."""
    wrapped = getattr(task, "__wrapped__", None)  # a task's own `__wrapped__` is its function
    return wrapped if isinstance(wrapped, Task) else task


def caller_of(task: Any, decoration: Decoration, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Caller:
    """The caller of ``wrapper``: the current task if the call is the task's run, else a plain function.

    ``task`` is the current task. If its function is called directly, or by the run of another task, that is no run.
    Exception: ``map``, ``starmap`` and ``chunks`` run the task for each of their items.

    Raises:
        Ignore: if the task's message was requeued or dropped in this delivery. Code between Celery and the function has
            caught the first ``Ignore``, and calls the function once more.
    """
    bound = bool(args) and isinstance(args[0], Task) and wrapper in functions_with_bases(args[0])
    plain = decoration.plain_bound if bound else decoration.plain
    if task is None:
        return plain
    calls_its_base = bound and args[0] is task
    if not (calls_its_base or wrapper in functions_of(task)):
        return plain
    request = task.request if _state.get_current_task() else _task_in_context.get()[1]
    state = vars(request).get(_STATE) or DeliveryState()
    if state.is_over:
        raise Ignore
    if request.called_directly:
        running = _state.get_current_worker_task()
        if running is None or task_of_items(running, running.request.kwargs) != task.name:
            return plain
        return ItemCaller(task, running.request, bound=bound)
    is_inside = decoration in state.runs.values()  # the task's run calls its own function
    if is_inside or request.is_eager:  # no message was delivered for the call
        return TaskCaller(task, work_of(request), bound=bound)
    return TaskRun(task, request, bound=bound, decoration=decoration)


def _has_tasks_after_it(request: Any) -> bool:
    """Whether other tasks receive the result: the body of a chord, or later tasks of a chain."""
    return bool(request.chord or request.chain)


class ItemCaller(JobCaller):
    """The run of a task for one item of ``map``, ``starmap`` or ``chunks``, whose message has the whole list.

    An item of a redelivered list waits for its run in the first delivery. If another run has its key, it fails by
    default: it has no message of its own to requeue, and a skip would lose its work if its first run was killed.
    An item also fails if other tasks receive the list's result. Any other item is skipped by default.
    """

    check = TaskCaller.check

    def __init__(self, task: Any, request: Any, *, bound: bool) -> None:
        """``request`` is that of the list."""
        job = Job(str(request.id), request.retries, start=request, queue="celery.map")
        super().__init__(task.name, job, bound=bound)
        self.app = task.app
        is_redelivered = (request.delivery_info or {}).get("redelivered")
        self._may_skip = not (is_redelivered or _has_tasks_after_it(request))

    def on_busy(self, call: Call, value: bytes) -> Policy:
        """The policy for a key that holds ``value``."""
        fails = call.options.when_busy is None and not self._may_skip
        return fail if fails else super().on_busy(call, value)


def _is_redelivered(request: Any) -> bool:
    """Whether the message says that it was delivered before."""
    # A dead-letter queue brings back rejected messages. Messages that it delays by their expiry have not begun.
    deaths = (request.headers or {}).get("x-death") or ()
    was_rejected = any(each.get("reason") in {"rejected", "delivery_limit"} for each in deaths)
    return was_rejected or bool((request.delivery_info or {}).get("redelivered"))


class Delivery(TaskCaller):
    """One delivery of a task's message to a worker, and what its message says. Other deliveries may have its work.

    Attributes:
        decoration: the decoration of the task's function.
        work: the work of the message.
        header: our header in the message.
        state: what has become of this delivery so far.
    """

    def __init__(self, task: Any, request: Any, *, bound: bool = False, decoration: Decoration) -> None:
        self.work = work_of(request)
        super().__init__(task, self.work, bound=bound)
        self._request = request
        self.decoration = decoration
        self._began = now()
        self.state = state_of(request)
        self.header = header_of(request)
        if decoration.is_unique:
            self.key = self.header.key
            self.queued = self.header.token.encode() if self.header.token else None
        # A requeued message is a new one for the broker, so the header says whether a run may have begun before. An
        # earlier version says it only by the missing lineage: the first requeue gives a lineage to new work only.
        has_no_lineage = self.header.times and not self.header.lineage
        if _is_redelivered(request) or has_no_lineage:
            self.header = self.header._replace(has_begun=True)

    def marker(self, key: str) -> str:
        """The name of the completion marker of the message's work for a key."""
        replacement = f".{self.work.replacement}" if self.work.replacement else ""
        lineage = f":{self.header.lineage}" if self.header.lineage else ""
        return f"{{{key}}}:copy:{self.work.id}:{self.work.attempt}{replacement}{lineage}"

    def arrive(self, call: Call, token: str, *, begins: bool) -> int:
        """Number this task for ``buffer_one``; see ``coalescing.arrive`` for the arguments and the result."""
        # New work is newer than all before it. A retry and a replacement keep the number of their task id. The last
        # task of a chain that replaces a task has that task's id, but is new work.
        is_replacement = self.work.replacement and self._request.parent_id == self.work.id
        is_continued = self.header.has_begun or self.work.attempt or is_replacement
        trigger = self.header.trigger
        if trigger is None and not is_continued:
            trigger = coalescing.NEWEST
        return coalescing.arrive(call, self.app, self.work.id, trigger, uuid(), token, begins=begins)

    def retained_value(self, call: Call) -> Retained | None:
        """The value for a unique task's key while its retry waits, or its message that another decorator has requeued.

        Returns:
            The value, which has no time left if the message has expired; None if no message waits, or if its arguments
                have another key.
        """
        ended_by = call.ended_by
        again = ended_by.sig if isinstance(ended_by, Retry) else self.state.requeued
        if again is None or not self.decoration.is_unique:
            return None
        if not self.keeps_key(self.decoration, call.key, self._request, again.args, again.kwargs):
            return None
        begins_in = getattr(ended_by, "when", None) or again.options.get("countdown")
        seconds = longest_wait(self.app, call.options.queue_timeout, again.options.get("expires"), begins_in)
        work = self.work._replace(attempt=again.options.get("retries"))
        return self.waiting_value(call.key, work, seconds)


class TaskRun(Delivery):
    """The run of a delivered message: what a call does when its key is busy, before the run and at its end.

    A method that drops or requeues the message raises ``Ignore``: so this delivery ends without a result.
    """

    def on_busy(self, call: Call, value: bytes) -> Policy:
        """The policy for a key that holds ``value``.

        Raises:
            Ignore: if the holder is this very task. If the work is done, or another message does it, this message is
                dropped; else it is requeued.
        """
        if self.state.runs.get(call.key) is not None:  # two decorators of the task have the same key
            return super().on_busy(call, value)
        self._carry_key(call)
        holder = Holder.parse(value)
        held = work_held_by(holder)
        if held is not None and held.id == self.work.id:
            self._end_unless_policy_decides(call, held, is_kept=holder is not None and holder.state == "kept")
        # A policy would put another result in the place of that of the run that has ended.
        with redelivery.suppress_trouble(self.work.id):
            self._end_if_run_has_ended(call)
        if self._has_replaced(held):
            return retry()
        return call.options.when_busy or self._default_when_busy()

    def _has_replaced(self, held: Work | None) -> bool:
        """Whether this task, of a chain or group, has replaced the holder. Their ids differ."""
        return held is not None and held.id == self._request.parent_id and held.replacement < self.work.replacement

    def _default_when_busy(self) -> Policy:
        """The policy for a busy key by default.

        It is ``skip``. Exceptions: a retry, a replacement and a redelivery are requeued, because their work has begun;
        and a task whose result other tasks receive fails. A task that comes after a replaced one in its chain counts as
        a replacement, because Celery gives it the same ``replaced_task_nesting``.
        """
        is_continued = bool(self.work.attempt or self.work.replacement)
        if is_continued or self.header.has_begun:
            return retry()
        return fail if _has_tasks_after_it(self._request) else skip

    def on_down(self, call: Call) -> Policy:
        """The policy for a server that could not be asked; a redelivery waits, because its run may be under way."""
        when_down = call.options.when_down
        return retry() if self.header.has_begun and when_down is not carry_on else when_down

    def _end_unless_policy_decides(self, call: Call, held: Work, *, is_kept: bool) -> None:
        """Requeue or drop this message, because work with its task id holds the key; or return for ``when_busy``."""
        is_by_earlier_attempt = held < self.work
        may_have_run = self.header.has_begun or call.key in self.state.runs
        is_by_other_work = not (is_by_earlier_attempt or may_have_run)  # the task id is used again
        if is_by_other_work and isinstance(call.options.when_busy, RetryPolicy):
            return
        if is_by_earlier_attempt or is_by_other_work:
            self.requeue(call, RequeueRequest(AlreadyRunning(call.key), retry()))  # whatever the limit of the policy
        if held == self.work:
            self._requeue_until_run_ends(call, is_kept=is_kept)
        self._drop(call, "it is out of date")

    def _requeue_until_run_ends(self, call: Call, *, is_kept: bool) -> NoReturn:
        """Requeue this redelivery until its run has ended and its result is stored; then drop it."""
        ended = b""
        with redelivery.suppress_trouble(self.work.id):
            ended = self._drop_if_needless(call, waits=0 if is_kept else remembered_for(self.app)).ended
        if is_kept and not ended:
            self._drop(call, "it is out of date")
        self._request.expires = None  # it has begun in time
        self._requeue(call, self.header, None)

    def requeue(self, call: Call, how: RequeueRequest) -> Any:
        """Requeue the message, under the same id and with all that it carries, as a policy says.

        Returns:
            None for a task that ``buffer_one`` drops for a newer one.

        Raises:
            Ignore: so that this delivery ends without a result.
            OnlyOneError: the error that the policy was called with, at the limit ``max_retries``.
        """
        header, policy = self.header, how.policy
        if isinstance(how.error, AlreadyRunning):  # else asking again would take as long again
            with redelivery.suppress_trouble(self.work.id):
                if header.has_begun:
                    self._drop_if_needless(call)
                if isinstance(policy, BufferOne):
                    header = header._replace(trigger=self.arrive(call, how.error.value, begins=False))
                    if not header.trigger:
                        return None
        # Only now, because a redelivery that is dropped must not fail.
        if policy.max_retries is not None and header.times >= policy.max_retries:
            raise how.error from how.error.__cause__  # so that the `RequeueRequest` is not shown as its context
        # The lineage of new work tells its completion marker from those of earlier work with its id.
        if not (header.has_begun or header.lineage):
            header = header._replace(lineage=uuid())
        self._requeue(call, header, policy.countdown, is_down=isinstance(how.error, LockUnavailable))

    def _requeue(self, call: Call, header: Header, countdown: float | None, *, is_down: bool = False) -> NoReturn:
        """Publish the message; unless the server is down, store how often, and for ``buffer_one`` that it waits."""
        self.state.requeued = again = publish(self._task, self._request, header, countdown)
        self._close(withdraws=False)
        if is_down:
            raise Ignore
        with redelivery.suppress_trouble(self.work.id):
            milliseconds, beside = round(remembered_for(self.app) * 1000), (self.marker(call.key),)
            noted = evaluate(redelivery.REQUEUED, call.key, header.times + 1, milliseconds, beside=beside)
            drive(call.server.client, noted)
            if header.trigger is not None:
                most = longest_wait(self.app, inf, again.options.get("expires"), None)
                eta = again.options.get("countdown")
                coalescing.note_published(call, self.app, header.trigger, most, eta, is_requeued=True)
        raise Ignore

    def _drop(self, call: Call, reason: str, *, is_done: bool = False) -> NoReturn:
        """Drop the message without a run, and log why.

        Args:
            call: the call.
            reason: why, for the log.
            is_done: whether the work is done. Then the task's key is withdrawn, so that no call that has taken it over
                stores the task's value again. Else another message of the work has the key, or waits for it.
        """
        self._close(withdraws=is_done)
        extra = {"only_one_key": call.key}
        log(INFO, "redelivery of %s[%s] dropped: %s", self.name, self.header.id, reason, extra=extra)
        raise Ignore

    def _close(self, *, withdraws: bool) -> None:
        """Let no later call in the delivery run, and no ``self.retry()`` publish: a base may catch the ``Ignore``."""
        self.state.is_over, self.state.withdraws = True, withdraws
        if not withdraws:
            self.state.markers = []  # another message does the work, and no result of an earlier call in it is stored
        self._request.called_directly = True  # then `self.retry()` raises its error again

    def claim_work(self, call: Call) -> bool:
        """Whether the work is still to be done, now that the key is ours: ``buffer_one`` drops it for newer work.

        Raises:
            Ignore: for a redelivery that is dropped, or requeued until the result of its run is stored.
        """
        self._carry_key(call)
        # Another decorator may have a key though the server of the unique one is away, whose key the message has.
        if self.decoration.is_unique or self.header.key is None:
            self.state.withdraws = False
        with redelivery.suppress_trouble(self.work.id):
            if self._end_if_run_has_ended(call):
                log(INFO, "%s[%s] is run again: its run has ended, but stored no result", self.name, self.work.id)
            if isinstance(call.options.when_busy, BufferOne):
                trigger = self.arrive(call, call.token.decode(), begins=True)
                if not trigger:
                    return False
                if self.header.trigger is None:  # another decorator of it would give it a later number
                    self._carry(self.header._replace(trigger=trigger))
        self.state.runs[call.key] = self.decoration
        return True

    def _end_if_run_has_ended(self, call: Call) -> bool:
        """Drop a redelivery if its run has stored its result; requeue it if the run has ended and may yet store it.

        Returns:
            Whether its run has ended and has stored no result, if the delivery goes on.
        """
        # If this delivery has called the function before, the completion marker may be that of the earlier call.
        if not self.header.has_begun or call.key in self.state.runs:
            return False
        marker = self._drop_if_needless(call)
        if marker.age < redelivery.STORES_WITHIN and not is_gone(marker.ended):
            self._requeue(call, self.header, None)
        return bool(marker.ended)

    def _drop_if_needless(self, call: Call, waits: float = 0) -> redelivery.CompletionMarker:
        """Drop the message if the result of its run is stored, or if it was requeued more often.

        Args:
            call: the call.
            waits: seconds for which the run that holds the key is asked to tell of its end; 0 if it is not.

        Returns:
            The completion marker of its work, if the delivery goes on.
        """
        marker = drive(call.server.client, redelivery.read_marker(call.key, self.marker(call.key), waits))
        if marker.is_stored:
            self._drop(call, "its run has ended", is_done=True)
        if self.header.times < marker.times:
            self._drop(call, "a later message waits")
        return marker

    def _carry_key(self, call: Call) -> None:
        """Put a unique task's key into its header, if its message has none: it was published without a key."""
        if self.decoration.is_unique and self.header.key is None:
            self._carry(self.header._replace(key=call.key))

    def _carry(self, header: Header) -> None:
        """Put a header into the request, for later calls in this delivery and for later messages of the task."""
        self.header = header
        self._request.headers = {**self._request.headers, **header.as_headers()}
        vars(self._request).update(header.as_headers())  # which comes before the headers, if the message has one

    def can_take_queued(self, call: Call, value: bytes) -> bool:  # noqa: ARG002
        """Whether the key may be taken over from ``value``, a task that is queued: not from a retry of this task."""
        queued = work_held_by(Holder.parse(value))
        is_retry_of_it = queued is not None and queued.id == self.work.id and queued > self.work
        return not is_retry_of_it

    def at_end(self, call: Call) -> AtEnd:
        """The retained value for a retry, and the marker that tells redeliveries that the run has ended."""
        marker = None
        # A redelivery of a task that is superseded finds that out by itself, and stores the result if this one cannot.
        if self.state.runs.get(call.key) is not None:
            self.state.runs[call.key] = None
            if self._task.acks_late:
                name, seconds = self.marker(call.key), now() - self._began
                marker = redelivery.marker_update(self._task, name, call.ended_by, seconds)
        return self.retained_value(call), marker

    def on_marked(self, call: Call) -> None:
        """Have ``ended_tasks`` note in the marker that the result is stored, once it is."""
        self.state.markers.append((call.server, call.key, self.marker(call.key)))
