"""Queue a task that is covered from queued to finished: the first takes its key, and who comes next gets that one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace as replace_fields
from functools import partial
from typing import Any

from celery import Task
from celery.result import ResultBase
from kombu.utils.uuid import uuid
from redis.exceptions import ResponseError

from only_one.attempt import CARRIED_ON, Attempt
from only_one.errors import AlreadyRunning, OnlyOneError
from only_one.events import Busy, emit, logger
from only_one.holder import Holder, Identity, is_dead
from only_one.lock import drive, give_back
from only_one.plan import Cover, Policy
from only_one.policies import BufferOne, PutBack
from only_one.protocol import TROUBLE, acquire, expiry_in, extend, replace, take_over
from only_one.servers import Server

from . import buffer
from .put_back import HEADER, Header
from .results import warn_of_rpc
from .task_call import TaskCall
from .waiting import waits_for

_UNTIL_PUBLISHED = 30.0
"""Seconds for which the key is taken at first, so that a producer that dies before it has published blocks nobody."""

_LEAST = 0.001
"""Seconds; less cannot be told to the server."""

_CARRIED = ("task_id", "link", "link_error", "chain", "chord", "group_id")
"""Somebody waits for a task that is called with one of these, so it is always published, and the worker decides."""


class Publication(TaskCall):
    """One call of a task's `apply_async`.

    Attributes:
        id: the id of the task, if it is published as the first with its key.
    """

    def __init__(
        self, task: Task, apply_async: Callable[..., Any], args: Any, kwargs: Any, options: dict[str, Any]
    ) -> None:
        """See `apply_async`, which is the task's own, for the others."""
        self.id = options.get("task_id") or uuid()
        super().__init__(task, Identity(task.name or "", self.id, 0, "queued"))
        self._apply_async = apply_async
        self._args = args
        self._kwargs = kwargs
        self._options = options
        self._is_published = False
        self._holder: Holder | None = None

    def queue(self, cover: Cover) -> Any:
        """Publish the task's message, unless its key is taken.

        Returns:
            The `AsyncResult` of the task that is published, or of the one that is there, or what the policies give.
            A result says which it is: `is_duplicate`, and with that `holder`, who has the key.

        Raises:
            OnlyOneError: as the policies say.
        """
        result = self._queue(cover)
        if isinstance(result, ResultBase):
            told: Any = result
            told.is_duplicate, told.holder = not self._is_published, self._holder
            if told.is_duplicate:
                warn_of_rpc(told)
        return result

    def _queue(self, cover: Cover) -> Any:
        if self._is_none_of_ours():
            return self._publish()
        plan = cover.plan_for(self)
        delay = self._options.get("countdown") or self._options.get("eta")
        expires = self._options.get("expires", self._task.expires)
        seconds = waits_for(self.app, plan.queue_timeout, expires, delay)
        is_newest_only = isinstance(plan.when_busy, BufferOne)
        if plan.server is None or seconds < _LEAST:  # the worker says that it has expired
            return self._publish()
        if self._is_waited_for and not is_newest_only:
            return self._publish()
        key = plan.prefix + cover.make_key(self, *self._as_sent())
        at_first = replace_fields(plan, ttl=min(seconds, _UNTIL_PUBLISHED), limit=seconds, timeout=seconds)
        this = Attempt(at_first, plan.server, self, key)
        try:
            next_step = self._number(this, plan.server, cover) if is_newest_only else self._take(this, plan.server)
        except TROUBLE as error:
            instead = this.down(error)
            return self._publish() if instead is CARRIED_ON else instead
        except BaseException:
            this.abandon()
            raise
        return next_step()

    def default_policy(self) -> Policy:
        """Who comes next gets the one that is there."""
        return self._one_that_is_there

    def put_back(self, server: Server, key: str, wish: PutBack) -> Any:  # noqa: ARG002 - it is in no queue yet
        """There is nothing to put back yet: a `retry()` that was configured for all is for those that run.

        Raises:
            OnlyOneError: where it is not about a key that is taken.
        """
        if not isinstance(wish.error, AlreadyRunning):
            raise wish.error
        return self._one_that_is_there(wish.error)

    def _one_that_is_there(self, error: AlreadyRunning) -> Any:
        """Its result; what holds the key without being a task has none to give, and the worker will meet it, too."""
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

    def _take(self, this: Attempt, server: Server) -> Callable[[], Any]:
        """Take the key; returns what is to be done then."""
        steps = acquire(server.dialect, this.key, this.token, expiry_in(this.plan.ttl))
        found = drive(server.client, steps)
        if found is not None and this.plan.takeover and is_dead(found):
            found = drive(server.client, take_over(server.dialect, this.key, found, this.token, this.plan.ttl))
        if found is None:
            return partial(self._queue_first, this, server)
        self._holder = Holder.parse(found)
        return partial(this.busy, found)

    def _queue_first(self, this: Attempt, server: Server) -> Any:
        try:
            result = self._publish(Header(self.id, 0, key=this.key, token=this.token.decode()))
        except BaseException:
            self._give_back(this, server)
            raise
        # A task's own `apply_async` may have published nothing, or under an id of its own.
        if result is not None:
            self._lengthen(this, server, result.id)
        return result

    def _give_back(self, this: Attempt, server: Server) -> None:
        try:
            give_back(server.client, server.dialect, this.key, this.token)
        except TROUBLE as error:
            logger.debug("%s could not be released, and will be in the background: %s", this.key, error)
            this.adrift(settled=True)

    def _lengthen(self, this: Attempt, server: Server, task_id: str) -> None:
        # It compares with the token of a task that is queued: a worker may have begun it, and have its own lease.
        milliseconds = round(this.plan.limit * 1000)
        steps = extend(this.key, this.token, milliseconds)
        if task_id != self.id:
            token = Identity(self._task.name, task_id, 0, "queued").token(this.plan.limit)
            steps = replace(this.key, this.token, token, milliseconds)
        try:
            drive(server.client, steps)
        except TROUBLE as error:
            level = logging.WARNING if isinstance(error, ResponseError) else logging.DEBUG
            logger.log(level, "%s is queued, and may be queued again in %g s: %s", this.key, _UNTIL_PUBLISHED, error)

    def _number(self, this: Attempt, server: Server, cover: Cover) -> Callable[[], Any]:
        """Number the trigger, as `buffer_one` does it; returns what is to be done then."""
        digest = ""  # one that is like no other
        if not self._is_waited_for:
            with suppress(OnlyOneError):  # its arguments cannot be compared
                digest = cover.digest(*self._as_sent())
        found = buffer.arrive_anew(server, this.key, self.app, self.id, digest, this.plan.limit)
        if isinstance(found, int):
            return partial(self._queue_newest, this, server, found)
        return partial(self._get_newest, this, found)

    def _queue_newest(self, this: Attempt, server: Server, trigger: int) -> Any:
        result = self._publish(Header(self.id, 0, key=this.key, trigger=trigger))
        try:
            buffer.published(server, this.key, self.app, trigger)
        except TROUBLE as error:
            logger.debug("%s is queued, and may be queued again: %s", this.key, error)
        return result

    def _get_newest(self, this: Attempt, task_id: str) -> Any:
        emit(Busy(this.key, this.name, b""))
        return self._task.AsyncResult(task_id)
