"""Killed runs: the worker's main process releases the key of a run that was killed, once Celery tells it.

A caller on this machine would take the key over anyhow. On other machines it would wait for the lease, or for
``timeout``. The renewing thread of the main process sends the commands, because a child that is forked meanwhile would
inherit the locks of any other thread.
"""

import os
from contextlib import suppress
from typing import Any

from redis.exceptions import MovedError, ResponseError

from only_one.call.effective_options import Call, Decoration, EffectiveOptions
from only_one.clock import now
from only_one.driver import Command
from only_one.events import warn_once
from only_one.holder import Holder, is_queued, work_held_by
from only_one.lock.commands import Retained
from only_one.lock.liveness import is_dead
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import log_beside, release_later
from only_one.lock.token import machine

from .delivery import Delivery
from .task_functions import decorations_of, task_of_items

_NOT_RELEASED = "a key of %s, whose run was killed or revoked, could not be released"

_LOOKS_AGAIN_AFTER = 0.02

_PATIENCE = 10.0
"""Seconds for which a process may live on. Celery tells us before it kills the process."""

_WAITS_FOR_A_SERVER = 300.0
"""Seconds for which a server that is away is asked again."""

_AT_ONCE = 1000
"""Keys that the server goes through for one reply to ``SCAN``."""


def release_when_dead(task: Any, args: Any, kwargs: Any, request: Any) -> None:
    """Release the keys of a run as soon as its process is dead; ``args`` and ``kwargs`` are those of its message."""
    arguments: tuple[Any, Any] | None = (args or (), kwargs or {})
    if name := task_of_items(task, kwargs):
        task, arguments = task.app.tasks.get(name), None  # nobody knows which of the items was under way
    for decoration in decorations_of(task) if task else ():
        try:
            _watch_run(task, decoration, arguments, request)
        except Exception as error:  # noqa: BLE001 - the key expires by itself
            warn_once((task.name, type(error)), _NOT_RELEASED, task.name, exc_info=error)


def _watch_run(task: Any, decoration: Decoration, arguments: tuple[Any, Any] | None, request: Any) -> None:
    """Release the key of one decoration of the task; if ``arguments`` do not give it, search for it by its holder."""
    delivery = Delivery(task, request, decoration=decoration)
    options = decoration.options_for(delivery)
    if options.server is None:
        return
    key = delivery.key_in_message(options.prefix, *arguments) if arguments else None
    if key is None:
        # A cluster is asked here which nodes it has, with short time-outs; the thread searches them.
        for node in options.server.nodes.all():
            release_later(_SearchOfNode(node, options.prefix, delivery, options))
    else:
        for_retry = delivery.retained_value(Call(options, options.server, key))
        release_later(_KilledRun(options.server, key, delivery, options, for_retry))


class _KilledRun(PendingRelease):
    """The release of a killed run's key: the renewing thread asks for the holder until its process is dead.

    Attributes:
        delivery: the delivery whose run it was.
        options: the effective options of the run.
        for_retry: the value to store in place of the token, if the message is sent again.
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
        """Act on the reply; returns whether nothing is left to do, or the time for it is over."""
        self.try_at = now() + _LOOKS_AGAIN_AFTER
        if isinstance(reply, Exception):
            if not isinstance(reply, MovedError):  # after which the next command goes to the node that has the slot
                name = self.delivery.name
                warn_once((name, type(reply)), _NOT_RELEASED, name, exc_info=reply, log=log_beside)
            if not isinstance(reply, ResponseError):  # the server is away, and may be back soon
                self.until = min(now() + _PATIENCE, self._gives_up)
        elif self.act_on(reply):
            return True
        return now() >= self.until

    def act_on(self, reply: Any) -> bool:
        """Release the key if its process is dead, or store the value for the retry.

        Returns:
            Whether nothing is left to do.
        """
        value: bytes = reply or b""
        holder = Holder.parse(value)
        if holder is None or holder.task_id != self.delivery.work.id:
            return True
        held = work_held_by(holder)
        if held is not None and held > self.delivery.work:  # a retry, which the run had published before it was killed
            return True
        if not self.options.takeover and not is_queued(value):
            return True
        has_ended = is_queued(value) or is_dead(value) or _is_unreaped(holder)
        if has_ended:
            until = now() + max(self.options.ttl, self.options.queue_timeout)
            release_later(PendingRelease(self.server, self.key, value, until, retained=self.for_retry))
        # The task that waits may begin between the reply and the release. Then its process is waited for.
        return has_ended and self.for_retry is not None


class _SearchOfNode(_KilledRun):
    """A search for the key of a killed run whose message does not give the key; its ``key`` is the prefix of all keys.

    Its ``server`` is a node: each node of a cluster is searched.
    """

    _cursor = 0

    def command(self) -> Command:
        """The command that gives more of the keys at which a string is stored."""
        pattern = "".join(f"\\{each}" for each in self.key) + "*"  # the prefix has no wildcards
        return ("SCAN", self._cursor, "MATCH", pattern, "COUNT", _AT_ONCE, "TYPE", "string")

    def act_on(self, reply: Any) -> bool:
        """Release each of the keys if it is the run's; returns whether these keys were the last."""
        cursor, keys = reply
        for key in keys:
            release_later(_KilledRun(self.options.server, key, self.delivery, self.options))
        self._cursor = int(cursor)
        return not self._cursor


def _is_unreaped(holder: Holder) -> bool:
    """Whether the holder is a child of ours that has ended, though Celery waits for it only after up to 5 s."""
    with suppress(ChildProcessError, AttributeError):  # it is no child of ours; macOS before Python 3.13
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return holder.machine == machine() and os.waitid(os.P_PID, holder.pid, options) is not None
    return False
