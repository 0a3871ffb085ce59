"""Enqueue deduplication: ``delay`` and ``apply_async`` of a unique task, and the result that a duplicate gets."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from celery import Task
from celery.backends.rpc import RPCBackend
from celery.result import EagerResult, ResultBase, ResultSet
from kombu.utils.uuid import uuid
from redis.exceptions import ResponseError

from only_one.call.effective_options import Call, Decoration, Policy
from only_one.call.locked_call import LockedCall
from only_one.driver import TROUBLE, drive
from only_one.errors import AlreadyRunning, OnlyOneError
from only_one.events import Busy, emit, log, warn_once
from only_one.holder import Holder, Work, work_held_by
from only_one.lock.commands import release_now, replace
from only_one.lock.liveness import is_dead
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import is_to_be_released, release_later
from only_one.policies import BufferOne, RequeueRequest

from . import coalescing, redelivery
from .delivery import current_task
from .queue_timeout import longest_wait
from .requeue import HEADER, Header
from .task_functions import TaskCaller

_UNTIL_PUBLISHED = 30.0
"""Seconds for which the key is acquired at first, so a producer that dies before it has published blocks nobody."""


class Publication(TaskCaller):
    """One call of a task's ``apply_async``.

    Attributes:
        id: the id of the task, if it is published with a header of ours; without one, Celery makes an id.
    """

    def __init__(self, task: Task, publish: Callable[..., Any], args: Any, kwargs: Any, options: Any) -> None:
        """See ``apply_async`` for the arguments; ``publish`` is the task's own ``apply_async``."""
        self.id = str(options.get("task_id") or uuid())
        super().__init__(task, Work(self.id, 0, 0), "queued")
        self._apply_async = publish
        self._args = args
        self._kwargs = kwargs
        self._options: dict[str, Any] = options
        self._is_published = False
        self._holder: Holder | None = None

    def queue(self, decoration: Decoration) -> Any:
        """Publish the task's message, unless its key is busy.

        Returns:
            The ``AsyncResult`` of the published task, or of the existing task, or the result of a policy.
            An ``AsyncResult`` has ``is_duplicate``, and ``holder``: the holder of the key.

        Raises:
            OnlyOneError: as the policies say.
        """
        try:
            result = self._queue(decoration)
        except OnlyOneError:
            # Celery calls a linked task with `parent_id`, at the end of the task that it is linked to. That task has
            # done its work, and an error here would make it fail: the linked task is published, and the worker decides.
            if not self._options.get("parent_id"):
                raise
            result = self._publish()
        if isinstance(result, ResultBase):
            marked: Any = result
            marked.is_duplicate, marked.holder = not self._is_published, self._holder
            if marked.is_duplicate and isinstance(marked.backend, RPCBackend):
                warn_once(
                    (RPCBackend, marked.app.main),
                    "%s was queued already: get() of this duplicate may wait for ever, as rpc:// gives a result only "
                    "once, and only to the process that has queued the task; use a result backend that stores "
                    "results, such as Redis",
                    marked.id,
                )
        return result

    def _queue(self, decoration: Decoration) -> Any:
        given = self._options
        carried = dict(given.get("headers") or {}).get(HEADER)
        # A header with this task's id: the task is requeued or retried. Others are copied from another task's message.
        if isinstance(carried, dict) and carried.get("id") == self.id:
            self._forget_key_of_other_arguments(decoration, carried)
            return self._publish()
        if self._needs_no_key():
            return self._publish()
        options = decoration.options_for(self)
        eta, expires = given.get("countdown") or given.get("eta"), given.get("expires", self._task.expires)
        seconds = longest_wait(self.app, options.queue_timeout, expires, eta)
        only_newest = isinstance(options.when_busy, BufferOne)
        # A task that somebody waits for is always published, and the worker decides.
        is_waited_for = any(given.get(each) for each in ("task_id", "link", "link_error", "chain", "chord", "group_id"))
        is_expired = seconds * 1000 < 1  # the worker revokes it
        needs_no_key = is_expired or (is_waited_for and not only_newest)
        if options.server is None or needs_no_key:
            return self._publish()
        args, kwargs = self._as_sent()
        key = options.prefix + decoration.make_key(self, args, kwargs)
        until_published = options.not_renewed(min(seconds, _UNTIL_PUBLISHED), seconds)
        call = LockedCall(until_published, options.server, key, self)
        if not only_newest:
            return self._queue_first(call)
        digest = ""  # equal to no other call's
        if not is_waited_for:
            with suppress(OnlyOneError):  # its arguments cannot be compared
                digest = decoration.digest(args, kwargs)
        return self._queue_newest(call, digest, seconds, eta, is_waited_for=is_waited_for)

    def _needs_no_key(self) -> bool:
        """Whether the call is the running task's retry or replacement, is refused by Celery, or runs at once."""
        task = current_task() if self._options.get("replaced_task_nesting") else None
        is_replacement = task is not None and str(task.request.id) == self.id
        is_sent_again = bool(self._options.get("retries")) or is_replacement
        is_refused = not (isinstance(self._args or (), (list, tuple)) and isinstance(self._kwargs or {}, Mapping))
        # An item of `conf`, because an attribute takes twice as long.
        return is_sent_again or is_refused or bool(self.app.conf["task_always_eager"])

    def on_busy(self, call: Call, value: bytes) -> Policy:
        """The policy for a duplicate; if none is configured, the function that returns the existing task's result."""
        self._holder = Holder.parse(value)
        return call.options.when_busy or self._existing

    def can_take_queued(self, call: Call, value: bytes) -> bool:
        """A task that waits in its queue keeps its key, unless its ``delay()`` failed here, or its worker died."""
        # A duplicate should not pay for parsing the value twice, so this looks for the word in it first.
        is_lost = call.options.takeover and b'"received"' in value and is_dead(value)
        return is_lost or is_to_be_released(value)

    def requeue(self, call: Call, how: RequeueRequest) -> Any:
        """Give a duplicate its result: nothing can be requeued yet. ``retry()`` may be configured for all tasks.

        If a policy of the user's own ends in ``buffer_one``, the task is published, and waits for its key in a worker.

        Raises:
            OnlyOneError: if it is not about a busy key.
        """
        if not isinstance(how.error, AlreadyRunning):
            return super().requeue(call, how)
        return self._publish() if isinstance(how.policy, BufferOne) else self._existing(how.error)

    def _existing(self, error: Any) -> Any:
        """The result of the existing task. If the holder is no task, the task is published, and the worker decides."""
        return self._publish() if work_held_by(self._holder) is None else self._task.AsyncResult(error.task_id)

    def _forget_key_of_other_arguments(self, decoration: Decoration, carried: dict[str, Any]) -> None:
        """Drop the task's key from the header of a retry whose arguments give another key, made when it begins."""
        request: Any = self._task.request
        key = carried.get("key") if str(request.id) == self.id else None
        if key and not self.keeps_key(decoration, key, request, self._args, self._kwargs):
            without = {name: value for name, value in carried.items() if name != "key"}
            self._options = {**self._options, "headers": {**self._options["headers"], HEADER: without}}

    def _publish(self, header: Header | None = None) -> Any:
        self._is_published, self._holder = True, None
        if header is None:
            return self._apply_async(self._args, self._kwargs, **self._options)
        headers = {**dict(self._options.get("headers") or {}), **header.as_headers()}
        return self._apply_async(self._args, self._kwargs, **{**self._options, "task_id": self.id, "headers": headers})

    def _as_sent(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments as the worker will see them: of pydantic's models, Celery sends the dumps."""
        args, kwargs = self._args, self._kwargs
        dump = getattr(self._task, "_dump_pydantic_arguments", None)
        if dump is not None and self._options.get("serializer", self._task.serializer) != "pickle":
            args, kwargs = dump(args, kwargs)
        return tuple(args or ()), kwargs or {}

    def _queue_first(self, call: LockedCall) -> Any:
        """Acquire the key, and publish the task."""
        with call:
            problem = drive(call.server.client, call.acquire())
            if problem is not None:
                return self._publish() if call.resolve_acquire(problem) else call.result
            is_over = True
            try:
                result = self._publish(Header(self.id, 0, key=call.key, token=call.token.decode()))
                is_over = isinstance(result, EagerResult)
            finally:
                if is_over:
                    # Now, so that the task can be published again at once. If publishing has raised and this release
                    # fails, `call` releases the key in the background.
                    with suppress(*TROUBLE):
                        release_now(call.server.client, call.server.features, call.key, call.token)
        # A task's own `apply_async` may have run the task, or have published nothing, a group, or a task of another id.
        task_id = None if isinstance(result, (EagerResult, ResultSet)) else getattr(result, "id", None)
        if task_id is not None:
            self._lengthen(call, str(task_id))
        return result

    def _lengthen(self, call: LockedCall, task_id: str) -> None:
        """Let the key of the published task live for as long as the task may wait; in the background, if that fails."""
        limit = call.options.timeout or 0  # `_queue` has set the `timeout`
        waiting = self.waiting_value(call.key, Work(task_id, 0, 0), limit)
        if task_id == self.id:  # the message has its value
            waiting = waiting._replace(value=call.token)
        # Only in place of the queued token: a worker may have begun the task, and renews the key itself.
        try:
            drive(call.server.client, replace(call.key, call.token, waiting.value, limit))
        except TROUBLE as error:
            level = logging.WARNING if isinstance(error, ResponseError) else logging.DEBUG  # else it may be back soon
            log(level, "%s is queued, and may be queued again in %g s: %s", call.key, _UNTIL_PUBLISHED, error)
            release_later(PendingRelease(call.server, call.key, call.token, waiting.until, retained=waiting))

    def _queue_newest(self, call: LockedCall, digest: str, most: float, eta: Any, *, is_waited_for: bool) -> Any:
        """Publish the task with its number; or give the newest task's result, if that is an equal call which waits.

        If the server is away, a task that somebody waits for is published without a number: the worker gives it one.
        """
        try:
            trigger = coalescing.queue_anew(call, self.app, self.id, digest)
        except TROUBLE as error:
            return self._publish() if is_waited_for or call.resolve_acquire(error) else call.result
        if isinstance(trigger, bytes):
            emit(Busy, call.key, self.name, b"")
            return self._task.AsyncResult(trigger.decode())
        replacement = self._options.get("replaced_task_nesting", 0)
        result = self._publish(Header(self.id, 0, key=call.key, trigger=trigger, replacement=replacement))
        # A task's own `apply_async` may have run the task, have given it another id, or not have published it yet.
        if getattr(result, "id", None) == self.id and not isinstance(result, EagerResult):
            with redelivery.suppress_trouble(self.id):
                coalescing.note_published(call, self.app, trigger, most, eta)
        return result


def _in_one_line(record: logging.LogRecord) -> bool:
    """Log beat's message about a busy task in one line, without its traceback: nothing is wrong."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and isinstance(error.__cause__ or error.__context__, AlreadyRunning):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


logging.getLogger("celery.beat").addFilter(_in_one_line)
