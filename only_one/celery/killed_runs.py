"""Killed runs: a run that was killed cannot release its key, so the worker's main process does, once Celery tells it.

Its renewing thread asks for the key: a child that is forked meanwhile would inherit the locks of any other thread.
A caller on this machine would take the key over anyhow; on others it would wait for the lease, or for ``timeout``.
"""

import os
from contextlib import suppress
from typing import Any

from redis.exceptions import MovedError, ResponseError

from only_one.call.effective_options import Call, Decoration, EffectiveOptions
from only_one.clock import now
from only_one.driver import Command
from only_one.holder import Holder, is_queued
from only_one.lock.commands import Retained
from only_one.lock.liveness import is_dead
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import log_beside, release_later
from only_one.lock.token import machine

from .delivery import Delivery
from .received_tasks import warn_once
from .task_functions import decorations_of, key_of_message, task_of_items
from .work import work_held_by

_NOT_RELEASED = "a key of {}, whose run was killed or revoked, could not be released"

_LOOKS_AGAIN_AFTER = 0.02

_PATIENCE = 10.0
"""Seconds for which a process may live on: Celery tells that it kills a process before it does so."""

_WAITS_FOR_A_SERVER = 300.0
"""Seconds for which a server that is away is asked again."""

_AT_ONCE = 1000
"""Keys that the server goes through for one reply."""


def release_when_dead(task: Any, args: Any, kwargs: Any, request: Any) -> None:
    """Have the keys of a run released as soon as its process is dead, by its message's arguments and request."""
    arguments: tuple[Any, Any] | None = (args or (), kwargs or {})
    if name := task_of_items(task, kwargs):
        task, arguments = task.app.tasks.get(name), None  # which of its items was under way is not known
    for decoration in decorations_of(task) if task else ():
        try:
            _watch_run(task, decoration, arguments, request)
        except Exception as error:  # noqa: BLE001 - the key expires by itself
            warn_once(_NOT_RELEASED.format(task.name), error)


def _watch_run(task: Any, decoration: Decoration, arguments: tuple[Any, Any] | None, request: Any) -> None:
    """The same for one decoration of the task."""
    delivery = Delivery(task, request, decoration=decoration)
    options = decoration.options_for(delivery)
    if options.server is None:
        return
    key = None
    if arguments is not None:
        key = delivery.key or key_of_message(task, decoration, options.prefix, *arguments)
    if key is None:
        release_later(_SearchEverywhere(options.server, options.prefix, delivery, options))
    else:
        for_retry = delivery.retained_value(Call(options, options.server, key))
        release_later(_Ending(options.server, key, delivery, options, for_retry))


class _Ending(PendingRelease):
    """The release of a key as soon as the process of its run is dead, which the renewing thread asks for.

    Attributes:
        delivery: the delivery whose run it was.
        options: the effective options of the run.
        for_retry: the value that keeps the key, if the message is sent again.
    """

    def __init__(
        self, server: Any, key: Any, delivery: Delivery, options: EffectiveOptions, for_retry: Retained | None = None
    ) -> None:
        name = f"{delivery.work} {key!r} {id(server)}"
        super().__init__(server, key, name.encode(), now() + _PATIENCE)
        self.delivery, self.options, self.for_retry = delivery, options, for_retry
        self._gives_up = now() + _WAITS_FOR_A_SERVER

    def command(self) -> Command:
        """The command that asks for the holder."""
        return ("GET", self.key)

    def note_reply(self, command: Command, reply: Any) -> bool:  # noqa: ARG002
        """Do what is due by the reply; returns whether nothing is left to do, or the time for it is over."""
        self.try_at = now() + _LOOKS_AGAIN_AFTER
        if isinstance(reply, MovedError):  # the node that has the slot by now is asked next
            return now() >= self.until
        if isinstance(reply, Exception):
            warn_once(_NOT_RELEASED.format(self.delivery.name), reply, log_beside)
            if not isinstance(reply, ResponseError):  # the server is away, and may be back soon
                self.until = min(now() + _PATIENCE, self._gives_up)
        elif self.is_over(reply):
            return True
        return now() >= self.until

    def is_over(self, reply: Any) -> bool:
        """Release the key if its process is dead, or store the value for the retry; whether nothing is left to do."""
        value: bytes = reply or b""
        holder = Holder.parse(value)
        if holder is None or holder.task_id != self.delivery.work.id:
            return True
        held = work_held_by(holder)
        is_of_a_retry = held is not None and held > self.delivery.work
        if is_of_a_retry:  # which the run had published before it was killed
            return True
        if not self.options.takeover and not is_queued(value):
            return True
        # A task that is queued may just have begun: then its process is waited for.
        has_ended = is_queued(value) or is_dead(value) or _has_ended(holder)
        if has_ended:
            until = now() + max(self.options.ttl, self.options.queue_timeout)
            release_later(PendingRelease(self.server, self.key, value, until, retained=self.for_retry))
        return has_ended and self.for_retry is not None


class _SearchEverywhere(_Ending):
    """The search on each node, begun by the renewing thread: it asks a cluster's nodes where keys are by now."""

    def is_over(self, reply: Any) -> bool:  # noqa: ARG002
        """Begin it."""
        for node in self.server.nodes():
            release_later(_Search(node, self.options.prefix, self.delivery, self.options))
        return True


class _Search(_Ending):
    """The same for all keys of a node that begin with a prefix: the message does not give its run's."""

    _cursor = 0

    def command(self) -> Command:
        """The command that gives more of the keys, those with a string."""
        pattern = "".join(f"\\{each}" for each in self.key) + "*"  # the prefix has no wildcards
        return ("SCAN", self._cursor, "MATCH", pattern, "COUNT", _AT_ONCE, "TYPE", "string")

    def is_over(self, reply: Any) -> bool:
        """See to these keys, before more are asked for; whether they were the last."""
        cursor, keys = reply
        for key in keys:
            release_later(_Ending(self.options.server, key, self.delivery, self.options))
        self._cursor = int(cursor)
        return not self._cursor


def _has_ended(holder: Holder) -> bool:
    """Whether it is a child of ours that has ended; it seems alive until Celery waits for it, which may take 5 s."""
    with suppress(ChildProcessError, AttributeError):  # another's; or macOS, Python < 3.13
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return holder.machine == machine() and os.waitid(os.P_PID, holder.pid, options) is not None
    return False
