"""A task's run: whether a call is one, and what it does when its key is busy, before it begins and when it ends.

A task is never skipped because of its own lock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Task
from celery._state import get_current_task
from celery.exceptions import Ignore, Retry

from only_one.call.driver import current_lease, run, run_async
from only_one.call.options import Args, AtEnd, Caller, Decoration, EffectiveOptions, Kwargs, Policy
from only_one.connections.server import Server
from only_one.errors import AlreadyRunning, LockUnavailable
from only_one.lock.holder import Holder, TokenFactory
from only_one.lock.lease import Lease
from only_one.policies import BufferOne, RequeueRequest, fail, retry, skip

from . import coalescing
from .app_settings import TaskCaller
from .redelivery import Delivery
from .requeue import publish, waits_for


def run_task(decoration: Decoration, wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Run a function that may be that of the current task, if its key is free."""
    return run(decoration, caller_of(decoration, wrapper, args), args, kwargs)


async def run_task_async(decoration: Decoration, wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Run an `async def` function that may be that of the current task, if its key is free."""
    return await run_async(decoration, caller_of(decoration, wrapper, args), args, kwargs)


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
    this = MessageRun(task, request, bound=bound, is_unique_in_queue=decoration.task is not None)
    if decoration.task is not None:
        request.only_one_has_begun = True
        # A retry may have other arguments than those of which the key was that has come with its message.
        this.key = None if request.retries else this.header.key
        this.queued = this.header.token.encode() if this.header.token else None
    return this


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
    """What covers a task's function, each once: wrappers copy the attributes of the function that they wrap."""
    return list(dict.fromkeys(each.__only_one__ for each in functions_of(task) if hasattr(each, "__only_one__")))


def queue_decoration_of(task: Any) -> Decoration | None:
    """What makes a task unique from queued to finished, if anything does."""
    return next((decoration for decoration in decorations_of(task) if decoration.task is not None), None)


class MessageRun(Delivery):
    """The run of a task's message in a worker."""

    def on_busy(self, options: EffectiveOptions, server: Server, key: str, value: bytes) -> Policy:
        """The key is taken by `value`, which may be of this very task: then it waits for that in the queue.

        Returns:
            The policy. Where none is configured, None would do harm as a result if the work has begun, or if others
            would be given it.

        Raises:
            Ignore: where it is this task; a message whose work is done was dropped, the others requeued.
        """
        request, holder = self._request, Holder.parse(value)
        if holder is not None and holder.task_id == self.id and holder.attempt is not None and not request.is_eager:
            if holder.state == "kept" or holder.attempt > self.attempt:
                raise self.drop(key, "it is out of date")
            if holder.attempt == self.attempt:
                with self.unless_down("asked for"):
                    self.check_marker(server, key, waits=True)
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
        with self.unless_down():
            self.check_marker(server, key)
            if how.only_newest:
                header = header._replace(trigger=coalescing.arrive(server, key, self.app, self.id, header.trigger))
                if header.trigger is None:
                    return None
        times = publish(self._task, self._request, header, how.countdown)
        with self.unless_down():
            self.note_requeued(server, key, times)
            if header.trigger is not None:
                coalescing.published(server, key, self.app, header.trigger)
        raise Ignore

    def is_current(self, options: EffectiveOptions, server: Server, key: str) -> bool:
        """The key is ours: whether the work is still to be done.

        Raises:
            Ignore: for a redelivery that is dropped, or requeued until the result of its run is stored.
        """
        only_newest = isinstance(options.when_busy, BufferOne) and not self._request.is_eager
        may_be_another = self.may_be_another
        if not only_newest and not may_be_another:
            return True
        with self.unless_down():
            if may_be_another and self.must_wait(server, key):
                self._wait(server, key)
            if only_newest:
                self.is_superseded = not coalescing.begin(server, key, self.app, self.id, self.header.trigger)
        return not self.is_superseded

    def can_take_queued(self, value: bytes) -> bool:
        """A retry of this very task is ahead of it; all else that waits in a queue has not begun."""
        holder = Holder.parse(value)
        return holder is None or holder.task_id != self.id or (holder.attempt or 0) <= self.attempt

    def at_end(self, options: EffectiveOptions, server: Server, key: str, ended_by: BaseException | None) -> AtEnd:
        """What is stored at the key for a retry, and the marker that tells redeliveries that the run has ended."""
        noted = partial(self.mark_when_stored, server, key)
        return AtEnd(self.retained_value(options, ended_by), self.marker_update(key, ended_by), noted)

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
