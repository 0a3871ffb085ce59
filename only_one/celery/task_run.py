"""A task's run: whether a call is one, and what it does when its key is busy, before it begins and when it ends.

A task is never skipped because of its own lock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from celery import Task
from celery._state import get_current_task
from celery.exceptions import Ignore, Retry

from only_one.call.effective_options import AtEnd, Caller, Decoration, EffectiveOptions, Policy
from only_one.connections.server import Server
from only_one.errors import AlreadyRunning, LockUnavailable
from only_one.events import logger
from only_one.lock.commands import TROUBLE, drive, now
from only_one.lock.current_lock import Lease, current_lease
from only_one.lock.holder import Holder, TokenFactory
from only_one.policies import BufferOne, RequeueRequest, fail, retry, skip

from . import coalescing, redelivery
from .broker import check_countdown, remembered_for, waits_for
from .requeue import header_of, publish


def caller_of(decoration: Decoration, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Caller:
    """Who calls `wrapper`: the current task where that is its run, else a plain function.

    A function that is called directly, or from another task's run, is none of that task's.
    """
    bound = bool(args) and isinstance(args[0], Task) and runs(args[0], wrapper)
    task = get_current_task()
    if task is None or task.request.called_directly or not runs(task, wrapper):
        if decoration.task is not None:
            return caller_from_outside(decoration.task, decoration)
        return decoration.plain_bound if bound else decoration.plain
    request = task.request
    if _is_within(current_lease(), request.id, request.retries):
        return TaskCaller(task, TokenFactory(task.name, request.id, request.retries), bound=bound)
    caller = MessageRun(task, request, bound=bound, is_unique_in_queue=decoration.task is not None)
    if decoration.task is not None:
        request.only_one_has_begun = True
        # A retry may have other arguments than those of which the key was that has come with its message.
        caller.key = None if request.retries else caller.header.key
        caller.queued = caller.header.token.encode() if caller.header.token else None
    return caller


def _is_within(lease: Lease | None, task_id: str, attempt: int) -> bool:
    """Whether this is called from inside of the run itself."""
    holder = lease.holder if lease else None
    return holder is not None and (holder.task_id, holder.attempt) == (task_id, attempt)


def caller_from_outside(task: Any, decoration: Decoration) -> Caller:
    """The call of a task's function by somebody else than its own run, who gives the arguments without `self`."""
    return TaskCaller(task, bound=decoration.task is None and is_bound(task))


def key_from_outside(task: Any, decoration: Decoration, caller: Caller, args: Any, kwargs: Any) -> str:
    """The key of such a call, as it is in Redis."""
    given = (task, *(args or ())) if caller.bound else tuple(args or ())
    return decoration.options_for(caller).prefix + decoration.make_key(caller, given, kwargs or {})


def runs(task: Task, wrapper: Callable[..., Any]) -> bool:
    """Whether `wrapper` is the task's `run`, under whatever Celery has put around it."""
    return any(each is wrapper for each in functions_of(task))


def functions_of(task: Any) -> list[Any]:
    """The task's `run`, and what it wraps: Celery puts functions of its own around it, for autoretry and pydantic."""
    function, functions = getattr(task.run, "__func__", task.run), []
    while function is not None:
        functions.append(function)
        function = getattr(function, "__wrapped__", None)
        function = getattr(function, "__func__", function)
    return functions


def is_bound(task: Any) -> bool:
    """Whether the task itself is the first argument of its function."""
    return not isinstance(inspect.getattr_static(type(task), "run"), staticmethod)


def decorations_of(task: Any) -> list[Decoration]:
    """The decorations of a task's function, each once: wrappers copy the attributes of the function that they wrap."""
    return list(dict.fromkeys(each.__only_one__ for each in functions_of(task) if hasattr(each, "__only_one__")))


def queue_decoration_of(task: Any) -> Decoration | None:
    """What makes a task unique from queued to finished, if anything does."""
    return next((decoration for decoration in decorations_of(task) if decoration.task is not None), None)


class TaskCaller(Caller):
    """A call of a task's function: it has its app's settings, and is otherwise like the call of a plain function."""

    def __init__(self, task: Task, token_factory: TokenFactory | None = None, *, bound: bool = False) -> None:
        self._task: Any = task  # whose name is None for type checkers
        super().__init__(self._task.name, token_factory or TokenFactory(self._task.name), bound=bound)
        self.app = task.app

    def check(self, options: EffectiveOptions) -> None:
        """Refuse countdowns after which the broker would redeliver the message.

        Raises:
            ConfigurationError: saying what to write instead.
        """
        for policy in (options.when_busy, options.when_down):
            check_countdown(self.app, getattr(policy, "countdown", None))


class MessageRun(TaskCaller):
    """The run of a task's message in a worker: one delivery, among others with the same task id and attempt.

    Attributes:
        id: the task's id.
        attempt: how many times the task has been retried.
        header: what the message carries for us.
        is_unique_in_queue: whether the task is unique from queued to finished, through its waits for a retry, too.
        is_superseded: whether it has the key, but a newer one that `buffer_one` coalesces does the work.
    """

    is_superseded = False

    def __init__(self, task: Any, request: Any, *, bound: bool, is_unique_in_queue: bool) -> None:
        super().__init__(task, TokenFactory(task.name, request.id, request.retries), bound=bound)
        self.id = request.id
        self.attempt = request.retries
        self.header = header_of(request)
        self.is_unique_in_queue = is_unique_in_queue
        self._request = request
        self._began = now()

    @property
    def is_redelivered(self) -> bool:
        """Whether the broker says that it has delivered the message before."""
        return bool((self._request.delivery_info or {}).get("redelivered"))

    def on_busy(self, options: EffectiveOptions, server: Server, key: str, value: bytes) -> Policy:
        """The policy for a key that holds `value`; if the holder is this very task, the message waits in the queue.

        By default that is `skip`, but where None would do harm: a retry or a redelivery is requeued, and a task whose
        result others receive fails.

        Raises:
            Ignore: if the holder is this task: a message whose work is done is dropped, the others are requeued.
        """
        request, holder = self._request, Holder.parse(value)
        if holder is not None and holder.task_id == self.id and holder.attempt is not None and not request.is_eager:
            if holder.state == "kept" or holder.attempt > self.attempt:
                raise self._drop(key, "it is out of date")
            if holder.attempt == self.attempt:
                with self._unless_down("asked for"):
                    self._check_marker(server, key, waits=True)
            self._wait(server, key)
        if options.when_busy is not None:
            return options.when_busy
        if not request.is_eager and (self.attempt or self.is_redelivered):
            return retry()
        return fail if request.chord or request.chain else skip

    def _wait(self, server: Server, key: str) -> None:
        """Requeue the message until the key is free, or its run's result is stored."""
        self.requeue(server, key, RequeueRequest(AlreadyRunning(key)))

    def requeue(self, server: Server, key: str, how: RequeueRequest) -> Any:
        """Requeue the message, under the same id and with all that it carries.

        Returns:
            None for a task that `buffer_one` drops for a newer one.

        Raises:
            Ignore: so that this delivery ends without a result.
            AlreadyRunning: at the limit, and where there is no queue.
        """
        header = self.header
        if self._request.is_eager or (how.max_retries is not None and header.times >= how.max_retries):
            raise how.error
        if isinstance(how.error, LockUnavailable):  # to ask it again would take as long again, and say nothing
            publish(self._task, self._request, header, how.countdown)
            raise Ignore
        with self._unless_down():
            self._check_marker(server, key)
            if how.only_newest:
                header = header._replace(trigger=coalescing.arrive(server, key, self.app, self.id, header.trigger))
                if header.trigger is None:
                    return None
        times = publish(self._task, self._request, header, how.countdown)
        with self._unless_down():
            seconds = remembered_for(self.app)
            drive(server.client, redelivery.note_requeued(key, self._marker(key), times, seconds))
            if header.trigger is not None:
                coalescing.published(server, key, self.app, header.trigger)
        raise Ignore

    def is_current(self, options: EffectiveOptions, server: Server, key: str) -> bool:
        """The key is ours: whether the work is still to be done.

        Raises:
            Ignore: for a redelivery that is dropped, or requeued until the result of its run is stored.
        """
        only_newest = isinstance(options.when_busy, BufferOne) and not self._request.is_eager
        may_be_redelivery = redelivery.may_be_redelivery(self._task, self.header, is_redelivered=self.is_redelivered)
        if not only_newest and not may_be_redelivery:
            return True
        with self._unless_down():
            if may_be_redelivery:
                self._wait_for_result(server, key)
            if only_newest:
                self.is_superseded = not coalescing.begin(server, key, self.app, self.id, self.header.trigger)
        return not self.is_superseded

    def can_take_queued(self, value: bytes) -> bool:
        """A retry of this very task is ahead of it; all else that waits in a queue has not begun."""
        holder = Holder.parse(value)
        return holder is None or holder.task_id != self.id or (holder.attempt or 0) <= self.attempt

    def at_end(self, options: EffectiveOptions, server: Server, key: str, ended_by: BaseException | None) -> AtEnd:
        """What is stored at the key for a retry, and the marker that tells redeliveries that the run has ended."""
        marker = None
        # Where nothing has run, a redelivery finds that out, too, and stores the result that this one may not store.
        if not self.is_superseded:
            marker = redelivery.marker_update(self._task, self._marker(key), ended_by, now() - self._began)
        return AtEnd(self.retained_value(options, ended_by), marker, partial(self._mark_when_stored, server, key))

    def retained_value(self, options: EffectiveOptions, ended_by: BaseException | None) -> tuple[bytes, int] | None:
        """A task that is unique from queued to finished keeps its key while it waits to be retried."""
        if not self.is_unique_in_queue or self._request.is_eager or not self._is_retried_as_it_is(ended_by):
            return None
        seconds = waits_for(self.app, options.queue_timeout, self._request.expires, getattr(ended_by, "when", None))
        token_factory = TokenFactory(self._task.name, self.id, self.attempt + 1, "queued")
        return (token_factory.token(seconds), round(seconds * 1000)) if seconds > 0 else None

    def _is_retried_as_it_is(self, ended_by: BaseException | None) -> bool:
        """Whether it was published again with the same arguments, which are another key's if they are others."""
        sig = ended_by.sig if isinstance(ended_by, Retry) else None
        if sig is None:
            return False
        return list(sig.args) == list(self._request.args or ()) and sig.kwargs == dict(self._request.kwargs or {})

    def _wait_for_result(self, server: Server, key: str) -> None:
        """Requeue the message if a run of this attempt has ended, and may still store its result; the key is ours."""
        marker = self._check_marker(server, key)
        if marker.may_be_stored_yet:
            self._wait(server, key)
        if marker.ended:
            logger.info("%s[%s] is run again: its run has ended, but stored no result", self.name, self.id)

    def _check_marker(self, server: Server, key: str, *, waits: bool = False) -> redelivery.CompletionMarker:
        """Read what is known of the messages of this attempt.

        Args:
            server: where the key is.
            key: the key as it is in Redis.
            waits: whether the run that holds the key is asked to tell of its end.

        Raises:
            Ignore: if this delivery is dropped: its run has ended, or its message was requeued more often.
        """
        seconds = remembered_for(self.app) if waits else 0
        marker = drive(server.client, redelivery.read_marker(key, self._marker(key), seconds))
        reason = marker.reason_to_drop(self.header.times)
        if reason:
            raise self._drop(key, reason)
        return marker

    def _mark_when_stored(self, server: Server, key: str) -> None:
        """The marker is set; when the result is stored, `worker_signals` notes that, too."""
        self._request.only_one_stored = partial(self._mark_stored, server, key)

    def _mark_stored(self, server: Server, key: str) -> None:
        with self._unless_down("told"):
            drive(server.client, redelivery.mark_stored(key, self._marker(key)))

    def _marker(self, key: str) -> str:
        """The name of the completion marker."""
        return f"{{{key}}}:copy:{self.id}:{self.attempt}"

    @contextmanager
    def _unless_down(self, doing: str = "told apart") -> Iterator[None]:
        """Go on where the server cannot be asked: the message is requeued, or the work done, all the same."""
        try:
            yield
        except TROUBLE as error:
            logger.debug("copies of %s cannot be %s: %s", self.id, doing, error)

    def _drop(self, key: str, reason: str) -> Ignore:
        """Log that this delivery ends without a run; returns what it ends with."""
        logger.info("a copy of %s[%s] was dropped: %s", self.name, self.id, reason, extra={"only_one_key": key})
        return Ignore(reason)
