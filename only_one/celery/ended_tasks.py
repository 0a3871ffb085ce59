"""Ended tasks: the keys of tasks that were killed, revoked or never begun, and the results that are stored.

A run that was killed cannot release its key: the worker's main process does, as soon as Celery tells it.
Its renewing thread asks for the key: a child that is forked meanwhile would inherit the locks of any other thread.
A caller on this machine would take the key over anyhow; on others it would wait for the lease, or for ``timeout``.
"""

import os
import sys
from contextlib import suppress
from typing import Any

from celery import signals
from celery.app.task import Context
from celery.exceptions import Reject, TimeLimitExceeded, WorkerLostError
from celery.states import FAILURE, SUCCESS
from redis.exceptions import ResponseError

from only_one.call.effective_options import Call, Decoration, EffectiveOptions, effective_options
from only_one.call.owed_key import Withdrawal, note_of
from only_one.clock import now
from only_one.driver import RAW, Command, drive
from only_one.holder import Holder, is_queued
from only_one.lock.commands import Retained, evaluate
from only_one.lock.liveness import is_dead
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import finish_pending_releases, log_beside, release_later
from only_one.lock.token import machine, words_of

from . import coalescing, redelivery
from .app_settings import app_options
from .delivery import (
    Delivery,
    decorations_of,
    key_of_message,
    queue_options_of,
    task_of_items,
    unique_decoration_of,
    unwrapped,
)
from .received_tasks import begun_request, warn_once
from .requeue import header_of
from .work import work_held_by, work_of

_NOT_RELEASED = "a key of {}, whose run was killed or revoked, could not be released"

_LOOKS_AGAIN_AFTER = 0.02

_PATIENCE = 10.0
"""Seconds for which a process may live on: Celery tells that it kills a process before it does so."""

_WAITS_FOR_A_SERVER = 300.0
"""Seconds for which a server that is away is asked again."""

_AT_ONCE = 1000
"""Keys that the server goes through for one reply."""


def withdrawal_of(app: Any, task: Any, request: Any) -> Withdrawal | None:
    """The withdrawal of a unique task that has ended without having begun, also if a call has taken its key over.

    Args:
        app: the app.
        task: the task; None if it is known only to another version of the code, which has sent it.
        request: its request.

    Returns:
        The withdrawal; None if the task has no key.
    """
    header, work = header_of(request), work_of(request)
    key = header.key or _key_of_retry(task, request)
    if key is None:
        return None
    options = queue_options_of(task) if task else None
    if options is None:  # in that other version it is unique; what its decorator said of the server is not known here
        options = effective_options({}, *app_options(app))
    if options.server is None:
        return None
    return Withdrawal(
        options.server,
        key,
        words_of(*work),
        until=now() + options.queue_timeout,
        no_write_in_flight=True,
        note=note_of(key, *work),
        triggers=coalescing.triggers_of(key),
        number=header.trigger,
    )


def _key_of_retry(task: Any, request: Any) -> str | None:
    """The key of a retry that Celery has sent because its process was lost, and whose message had none; else None."""
    decoration = unique_decoration_of(task) if task and request.retries else None
    if decoration is not None:
        with suppress(Exception):  # of arguments that have no key
            prefix = decoration.options_for(decoration.plain).prefix
            return key_of_message(task, decoration, prefix, request.args, request.kwargs)
    return None


def withdraw(app: Any, task: Any, request: Any) -> None:
    """Release the key of a unique task that has ended without having begun; in the background, if that fails."""
    withdrawal = withdrawal_of(app, task, request)
    if withdrawal is None:
        return
    try:
        withdrawal.server.client.execute_command(*withdrawal.command(), **RAW)
    except Exception as error:  # noqa: BLE001 - nobody to raise it to
        warn_once(f"a key of {task.name}, which ended without it, could not be released yet", error)
        release_later(withdrawal)


def withdraw_later(app: Any, task: Any, request: Any) -> None:
    """The same in the background at once: the worker has other messages, and the server may not answer."""
    if withdrawal := withdrawal_of(app, task, request):
        release_later(withdrawal)


def _on_failure(sender: Any, task_id: str, exception: Any, args: Any, kwargs: Any, **_: Any) -> None:
    if isinstance(exception, (TimeLimitExceeded, WorkerLostError)):
        # Older releases of Celery do not have the request at hand here; that of a unique task is known all the same.
        request = sender.request if sender.request.id == task_id else begun_request(task_id)
        request = request or Context(id=task_id, retries=sys.maxsize)  # the last attempt, if it is not known which
        withdraw_later(sender.app, sender, request)
        _watch(sender, args, kwargs, request)


def _on_revoked(sender: Any, request: Any, terminated: bool, **_: Any) -> None:  # noqa: FBT001
    """The task was revoked, or has expired."""
    withdraw_later(sender.app, sender, request)
    may_have_begun = (request.delivery_info or {}).get("redelivered")  # in a process that was killed
    if terminated or may_have_begun:
        _watch(sender, request.args, request.kwargs, request)


def _on_retry(sender: Any, request: Any, reason: Any = None, **_: Any) -> None:
    """The process was lost, and Celery has sent the task again: ``retry_on_worker_lost``."""
    if isinstance(getattr(reason, "exc", None), WorkerLostError):
        again = sender.signature_from_request(request, countdown=reason.when, retries=request.retries + 1)
        request.only_one_requeued = again
        if withdrawal := withdrawal_of(sender.app, sender, request):
            release_later(withdrawal.of_a_retry())
        _watch(sender, request.args, request.kwargs, request)


def _on_unknown(sender: Any, message: Any, **found: Any) -> None:
    """The worker has no such task, and drops the message: another version of the code has sent it."""
    withdraw_later(sender.app, None, Context({**(message.headers or {}), "id": found["id"]}))


def _watch(task: Any, args: Any, kwargs: Any, request: Any) -> None:
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
    delivery = Delivery(task, request, bound=False, decoration=decoration)
    options = decoration.options_for(delivery)
    if options.server is None:
        return
    key = None
    if arguments is not None:
        key = delivery.key or key_of_message(task, decoration, options.prefix, *arguments)
    if key is None:
        for node in options.server.nodes():
            release_later(_Search(node, options.prefix, delivery, options))
    else:
        ending = _Ending(options.server, key, delivery, options)
        ending.for_retry = delivery.retained_value(Call(options, options.server, key))
        release_later(ending)


class _Ending(PendingRelease):
    """The release of a key as soon as the process of its run is dead, which the renewing thread asks for.

    Attributes:
        delivery: the delivery whose run it was.
        options: the effective options of the run.
        for_retry: the value that keeps the key, if the message is sent again.
    """

    for_retry: Retained | None = None

    def __init__(self, server: Any, key: Any, delivery: Delivery, options: EffectiveOptions) -> None:
        name = f"{type(self).__name__} {delivery.work} {key!r} {id(server)}"
        super().__init__(server, key, name.encode(), now() + _PATIENCE, no_write_in_flight=True)
        self.delivery, self.options = delivery, options
        self._gives_up = now() + _WAITS_FOR_A_SERVER

    def command(self) -> Command:
        """The command that asks for the holder."""
        return ("GET", self.key)

    def note_reply(self, command: Command, reply: Any) -> bool:  # noqa: ARG002
        """Do what is due by the reply; returns whether nothing is left to do, or the time for it is over."""
        self.try_at = now() + _LOOKS_AGAIN_AFTER
        if not isinstance(reply, Exception):
            return self.is_over(reply) or now() >= self.until
        warn_once(_NOT_RELEASED.format(self.delivery.name), reply, log_beside)
        if not isinstance(reply, ResponseError):  # the server is away, and may be back soon
            self.until = min(now() + _PATIENCE, self._gives_up)
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
            given = (self.server, self.key, value, until)
            release_later(PendingRelease(*given, no_write_in_flight=True, retained=self.for_retry))
        return has_ended and self.for_retry is not None


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


def _on_end(sender: Any, task: Any, state: Any = None, **_: Any) -> None:
    """Note that the result is stored, or withdraw a task that never began.

    Celery drops what is raised here, as a soft time limit may be, and asks the next receiver: it does all again.
    """
    request, error = task.request, sys.exc_info()[1]
    if vars(request).get("only_one_end_is_noted"):
        return
    for server, key, marker in vars(request).get("only_one_markers", ()) if _is_stored(task, state, error) else ():
        with redelivery.unless_down(request.id):
            drive(server.client, evaluate(redelivery.STORED, key, beside=(marker,)))
    if not vars(request).get("only_one_has_begun"):  # a signal handler, `before_start` or a base class has prevented it
        withdraw(task.app, unwrapped(sender), request)
    request.only_one_end_is_noted = True


def _is_stored(task: Any, state: Any, error: BaseException | None) -> bool:
    """Whether what came of a run is stored, or its message acknowledged without; else a redelivery does the work.

    Its process may be told to exit before, as by SIGTERM. And a result may fail to be stored: then the task has failed.
    """
    if error is not None and not isinstance(error, Exception):
        return False
    has_failed = state == FAILURE or (state == SUCCESS and error is not None and not isinstance(error, Reject))
    return not has_failed or redelivery.acks_failures(task)


signals.task_failure.connect(_on_failure)
signals.task_unknown.connect(_on_unknown)
signals.task_retry.connect(_on_retry)
signals.task_revoked.connect(_on_revoked)
signals.task_postrun.connect(_on_end)
signals.task_postrun.connect(_on_end, dispatch_uid="only_one: once more")
# A child of the pool ends without calling what is registered with `atexit`.
signals.worker_process_shutdown.connect(lambda **_: finish_pending_releases(), weak=False)
