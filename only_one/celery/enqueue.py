"""Enqueue: `delay` and `apply_async` of a task that is unique from queued to finished, and what a duplicate gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace as replace_fields
from typing import Any
from weakref import WeakSet

from celery import Task
from celery.backends.rpc import RPCBackend
from celery.result import ResultBase
from kombu.utils.uuid import uuid
from redis.exceptions import ResponseError

from only_one.call.effective_options import Decoration, EffectiveOptions, Policy
from only_one.call.locked_call import CARRIED_ON, LockedCall
from only_one.connections.server import Server
from only_one.errors import AlreadyRunning, OnlyOneError
from only_one.events import Busy, emit, logger
from only_one.lock.commands import TROUBLE, acquire, drive, expiry_in, release_now, replace, take_over
from only_one.lock.holder import Holder, TokenFactory, is_dead
from only_one.policies import BufferOne, RequeueRequest

from . import coalescing
from .broker import waits_for
from .requeue import HEADER, Header
from .task_run import TaskCaller

_UNTIL_PUBLISHED = 30.0
"""Seconds for which the key is acquired at first: a producer that dies before it has published blocks nobody."""

_CARRIED = ("task_id", "link", "link_error", "chain", "chord", "group_id")
"""Somebody waits for a task that is called with one of these, so it is always published, and the worker decides."""

_warned: WeakSet[Any] = WeakSet()


class Publication(TaskCaller):
    """One call of a task's `apply_async`.

    Attributes:
        id: the id of the task, if it is published as the first with its key.
    """

    def __init__(
        self, task: Task, apply_async: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]
    ) -> None:
        """See `apply_async`, which is the task's own, for the others."""
        self.id = options.get("task_id") or uuid()
        super().__init__(task, TokenFactory(task.name or "", self.id, 0, "queued"))
        self._apply_async = apply_async
        self._args = args
        self._kwargs = kwargs
        self._options = options
        self._is_published = False
        self._holder: Holder | None = None

    def queue(self, decoration: Decoration) -> Any:
        """Publish the task's message, unless its key is taken.

        Returns:
            The `AsyncResult` of the task that is published, or of the existing one, or what the policies give.
            A result says which it is: `is_duplicate`, and with that `holder`, who has the key.

        Raises:
            OnlyOneError: as the policies say.
        """
        result = self._queue(decoration)
        if isinstance(result, ResultBase):
            marked: Any = result
            marked.is_duplicate, marked.holder = not self._is_published, self._holder
            if marked.is_duplicate:
                _warn_of_rpc(marked)
        return result

    def _queue(self, decoration: Decoration) -> Any:
        if self._is_none_of_ours():
            return self._publish()
        options = decoration.options_for(self)
        delay = self._options.get("countdown") or self._options.get("eta")
        expires = self._options.get("expires", self._task.expires)
        seconds = waits_for(self.app, options.queue_timeout, expires, delay)
        only_newest = isinstance(options.when_busy, BufferOne)
        if options.server is None or seconds * 1000 < 1:  # the worker says that it has expired
            return self._publish()
        if self._is_waited_for and not only_newest:
            return self._publish()
        key = options.prefix + decoration.make_key(self, *self._as_sent())
        at_first = replace_fields(options, ttl=min(seconds, _UNTIL_PUBLISHED), limit=seconds, timeout=seconds)
        with LockedCall(at_first, options.server, options.server.client, self, key) as call:
            try:
                existing = self._number(call, decoration) if only_newest else self._acquire(call)
            except TROUBLE as error:
                instead = call.down(error)
                return self._publish() if instead is CARRIED_ON else instead
        if isinstance(existing, int):
            return self._queue_newest(call, existing)
        if isinstance(existing, str):
            emit(Busy(key, call.name, b""))
            return self._task.AsyncResult(existing)
        if existing is None:
            return self._queue_first(call)
        self._holder = Holder.parse(existing)
        return call.busy(existing)

    def on_busy(self, options: EffectiveOptions, server: Server, key: str, value: bytes) -> Policy:  # noqa: ARG002
        """A duplicate gets the existing task, where no policy is configured."""
        return options.when_busy or self._existing

    def requeue(self, server: Server, key: str, how: RequeueRequest) -> Any:  # noqa: ARG002 - it is in no queue yet
        """There is nothing to requeue yet: a `retry()` that was configured for all is for those that run.

        Raises:
            OnlyOneError: where it is not about a key that is taken.
        """
        if not isinstance(how.error, AlreadyRunning):
            raise how.error
        return self._existing(how.error)

    def _existing(self, error: AlreadyRunning) -> Any:
        """The result of the existing task; a holder that is no task has none to give, and the worker will meet it."""
        return self._publish() if error.task_id is None else self._task.AsyncResult(error.task_id)

    @property
    def _is_waited_for(self) -> bool:
        return any(self._options.get(each) for each in _CARRIED)

    def _is_none_of_ours(self) -> bool:
        if self._options.get("retries") or HEADER in dict(self._options.get("headers") or {}):
            return True  # it is sent again
        # What is no list Celery refuses.
        return bool(self.app.conf.task_always_eager) or not isinstance(self._args or (), (list, tuple))

    def _publish(self, header: Header | None = None) -> Any:
        self._is_published, self._holder = True, None
        if header is None:
            return self._apply_async(self._args, self._kwargs, **self._options)
        headers = {**dict(self._options.get("headers") or {}), **header.as_headers()}
        return self._apply_async(self._args, self._kwargs, **{**self._options, "task_id": self.id, "headers": headers})

    def _as_sent(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments as the worker will see them, for a task with pydantic's models."""
        args, kwargs = self._args, self._kwargs
        dump = getattr(self._task, "_dump_pydantic_arguments", None)
        if dump is not None and self._options.get("serializer") != "pickle":
            args, kwargs = dump(args, kwargs)
        return tuple(args or ()), kwargs or {}

    def _acquire(self, call: LockedCall) -> bytes | None:
        """Acquire the key: None if it is ours, else what is stored there."""
        features, ttl = call.server.features, call.options.ttl
        value = drive(call.client, acquire(features, call.key, call.token, expiry_in(ttl)))
        if value is not None and call.options.takeover and is_dead(value):
            value = drive(call.client, take_over(features, call.key, value, call.token, ttl))
        return value

    def _queue_first(self, call: LockedCall) -> Any:
        try:
            result = self._publish(Header(self.id, 0, key=call.key, token=call.token.decode()))
        except BaseException:
            self._release(call)
            raise
        # A task's own `apply_async` may have published nothing, or under an id of its own.
        if result is not None:
            self._lengthen(call, result.id)
        return result

    def _release(self, call: LockedCall) -> None:
        try:
            release_now(call.client, call.server.features, call.key, call.token)
        except TROUBLE as error:
            logger.debug("%s could not be released, and will be in the background: %s", call.key, error)
            call.clean_up(no_write_in_flight=True)

    def _lengthen(self, call: LockedCall, task_id: str) -> None:
        # It compares with the token of a task that is queued: a worker may have begun it, and have its own lease.
        limit, token = call.options.limit, call.token
        if task_id != self.id:
            token = TokenFactory(self._task.name, task_id, 0, "queued").token(limit)
        try:
            drive(call.client, replace(call.key, call.token, token, round(limit * 1000)))
        except TROUBLE as error:
            level = logging.WARNING if isinstance(error, ResponseError) else logging.DEBUG
            logger.log(level, "%s is queued, and may be queued again in %g s: %s", call.key, _UNTIL_PUBLISHED, error)

    def _number(self, call: LockedCall, decoration: Decoration) -> int | str:
        """Number the task for `buffer_one`: its number, or the id of the pending task with the same arguments."""
        digest = ""  # one that is like no other
        if not self._is_waited_for:
            with suppress(OnlyOneError):  # its arguments cannot be compared
                digest = decoration.digest(*self._as_sent())
        return coalescing.arrive_anew(call.server, call.key, self.app, self.id, digest, call.options.limit)

    def _queue_newest(self, call: LockedCall, trigger: int) -> Any:
        result = self._publish(Header(self.id, 0, key=call.key, trigger=trigger))
        try:
            coalescing.published(call.server, call.key, self.app, trigger)
        except TROUBLE as error:
            logger.debug("%s is queued, and may be queued again: %s", call.key, error)
        return result


def _warn_of_rpc(result: Any) -> None:
    """Say, once for each application, that a result can be read once, and only by the process that has queued it."""
    if isinstance(result.backend, RPCBackend) and result.app not in _warned:
        _warned.add(result.app)
        logger.warning(
            "%s was queued already: get() of this duplicate may wait for ever, as rpc:// gives a result only once, and "
            "only to the process that has queued the task; use a result backend that stores results, such as Redis",
            result.id,
        )


def _in_one_line(record: logging.LogRecord) -> bool:
    """What beat logs of a duplicate that it does not send, without traceback and stack: nothing is wrong with it."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and isinstance(error.__cause__ or error.__context__, AlreadyRunning):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


logging.getLogger("celery.beat").addFilter(_in_one_line)
