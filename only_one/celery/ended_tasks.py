"""Ended tasks: the keys of tasks that were killed, revoked or never begun, and the results that are stored.

A run that was killed cannot release its key: the worker's main process does, as soon as Celery tells it.
A caller on this machine would take the key over anyhow; on others it would wait for the lease, or for ``timeout``.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery import signals
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from redis.exceptions import ResponseError

from only_one.call.effective_options import Call, Decoration, EffectiveOptions
from only_one.clock import now
from only_one.connections.server import Server
from only_one.driver import RAW, TROUBLE, drive, is_of_signal_handler
from only_one.holder import Holder, is_queued
from only_one.lock.commands import Retained, evaluate
from only_one.lock.liveness import is_dead
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import finish_pending_releases, release_later
from only_one.lock.token import machine

from . import redelivery
from .delivery import Delivery, caller_from_outside, decorations_of, key_of_message, task_of_items, unwrapped
from .received_tasks import begun_request, warn_once, withdraw, withdrawal_of
from .work import work_held_by, work_of

_WAITS_FOR_A_SERVER = 300.0
"""Seconds for which a server that is away is asked again."""

_AT_ONCE = 1000
"""Keys that the server goes through for one reply."""

_at_work = threading.Lock()
"""Held while a thread of ours does something: the pool does not fork then, because its new child would inherit every
lock of Python, Celery or redis-py that the thread has acquired, and have nobody to release it.
"""

with suppress(AttributeError):  # where nothing forks
    os.register_at_fork(before=_at_work.acquire, after_in_parent=_at_work.release, after_in_child=_at_work.release)


def _on_failure(sender: Any, task_id: str, exception: Any, args: Any, kwargs: Any, **_: Any) -> None:
    if isinstance(exception, (TimeLimitExceeded, WorkerLostError)):
        # Older releases of Celery do not have the request at hand here; that of a unique task is known all the same.
        request = sender.request if sender.request.id == task_id else begun_request(task_id)
        _watch(sender, task_id, args, kwargs, request)


def _on_revoked(sender: Any, request: Any, terminated: bool, **_: Any) -> None:  # noqa: FBT001
    """The task was revoked, or has expired. One that has not begun takes no thread: there may be thousands of them."""
    may_have_begun = (request.delivery_info or {}).get("redelivered")  # in a process that was killed
    if terminated or may_have_begun:
        _watch(sender, request.id, request.args, request.kwargs, request)
    if not terminated and (withdrawal := withdrawal_of(sender, request)):
        release_later(withdrawal)


def _on_retry(sender: Any, request: Any, reason: Any = None, **_: Any) -> None:
    """The process was lost, and Celery has sent the task again: ``retry_on_worker_lost``."""
    if isinstance(getattr(reason, "exc", None), WorkerLostError):
        again = sender.signature_from_request(request, countdown=reason.when, retries=request.retries + 1)
        request.only_one_requeued = again
        _watch(sender, request.id, request.args, request.kwargs, request)


def _watch(task: Any, task_id: str, args: Any, kwargs: Any, request: Any) -> None:
    """Release a task's keys as soon as its process is dead, in a thread: the worker has other tasks to serve."""
    arguments: tuple[Any, Any] | None = (args or (), kwargs or {})
    if name := task_of_items(task, kwargs):
        task, arguments = task.app.tasks.get(name), None
    for decoration in decorations_of(task) if task else ():
        ending = _Ending(task, decoration, str(task_id), arguments, request)
        threading.Thread(target=ending.release_keys, name="only_one-endings", daemon=True).start()


@dataclass
class _Ending:
    """The end of a task's run that was killed or revoked, for one of the task's decorations.

    Attributes:
        arguments: the message's, positional and keyword; None for an item of a list: which was under way is not known.
        request: the task's request; None if it is not known.
        retained: the value that keeps the message's key, if the message is sent again.
    """

    task: Any
    decoration: Decoration
    task_id: str
    arguments: tuple[Any, Any] | None
    request: Any
    retained: Retained | None = None

    def release_keys(self) -> None:
        until = (begun := now()) + 10  # Celery tells that it kills a process before it does it
        keys: list[Any] | None = None
        while keys != [] and now() < until:
            try:
                with _at_work:
                    options = self.decoration.options_for(caller_from_outside(self.task, self.decoration))
                    if (server := options.server) is None:
                        return
                    if keys is None and (key := self._end_message(options, server)):
                        keys = [key]
                if keys is None:
                    keys = _all_keys(server, options.prefix)
                keys = [key for key in keys if not self._is_free(options, server, key)]
            except Exception as error:  # noqa: BLE001 - nobody to raise it to; the key expires by itself
                text = f"a key of {self.task.name}, whose run was killed or revoked, could not be released"
                warn_once(text, type(error).__name__)
                if not isinstance(error, TROUBLE):
                    return
                if not isinstance(error, ResponseError):  # the server is away, and may be back soon
                    until = min(now() + 10, begun + _WAITS_FOR_A_SERVER)
            time.sleep(0.02)

    def _end_message(self, options: EffectiveOptions, server: Server) -> str | None:
        """Withdraw a unique task that never began, unless its message is sent again; the message's key, if known."""
        if self.arguments is None:
            return None
        given = (self.task, self.decoration, options.prefix, *self.arguments)
        if self.request is None:
            return key_of_message(*given)
        delivery = Delivery(self.task, self.request, bound=False, decoration=self.decoration)
        withdrawal = withdrawal_of(self.task, self.request)
        is_sent_again = "only_one_requeued" in vars(self.request)
        if withdrawal:
            release_later(withdrawal.of_a_retry() if is_sent_again else withdrawal)
        if key := delivery.key or key_of_message(*given):
            self.retained = delivery.retained_value(Call(options, server, key))
        return key

    def _is_free(self, options: EffectiveOptions, server: Server, key: Any) -> bool:
        """Release the key if its process is dead, or store the retained value; whether nothing is left to do there."""
        value = _ask(server, key, "GET", key) or b""
        holder = Holder.parse(value)
        if holder is None or holder.task_id != self.task_id:
            return True
        held = work_held_by(holder)
        is_of_a_retry = held is not None and self.request is not None and held > work_of(self.request)
        if is_of_a_retry:  # which the run had published before it was killed
            return True
        if not options.takeover and not is_queued(value):
            return True
        # A task that is queued may just have begun: then its process is waited for.
        is_over = is_queued(value) or is_dead(value) or _has_ended(holder)
        if is_over:
            until = now() + max(options.ttl, options.queue_timeout)
            release_later(PendingRelease(server, key, value, until, no_write_in_flight=True, retained=self.retained))
        return is_over and self.retained is not None


def _all_keys(server: Server, prefix: str) -> list[Any]:
    """All keys that begin with the prefix, and have a string."""
    pattern = "".join(f"\\{each}" for each in prefix) + "*"  # the prefix has no wildcards
    if server.node_of(prefix).host:  # one node of a cluster
        with _at_work:
            return [*server.client.scan_iter(match=pattern, count=_AT_ONCE, _type="string", NEVER_DECODE=True)]
    keys: list[Any] = []
    cursor = 0
    while True:
        cursor, more = _ask(server, prefix, "SCAN", cursor, "MATCH", pattern, "COUNT", _AT_ONCE, "TYPE", "string")
        keys += more
        if not cursor:
            return keys


def _ask(server: Server, key: Any, *command: Any) -> Any:
    """The reply to a command, by a client with short time-outs, and not while its server backs off: forks wait."""
    if type(_at_work).__module__.partition(".")[0] in {"gevent", "eventlet"}:
        # Greenlets must share no connection with the renewing thread, which is native; and a pool of them never forks.
        return server.client.execute_command(*command, **RAW)
    while True:
        with _at_work:
            node = server.node_of(key)
            if node.backs_off_until <= now():
                (reply,) = node.send([command])
                break
        time.sleep(0.1)
    if isinstance(reply, Exception):
        raise reply
    return reply


def _has_ended(holder: Holder) -> bool:
    """Whether it is a child of ours that has ended; it seems alive until Celery waits for it, which may take 5 s."""
    with suppress(ChildProcessError, AttributeError):  # another's; or macOS, Python < 3.13
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return holder.machine == machine() and os.waitid(os.P_PID, holder.pid, options) is not None
    return False


def _on_end(sender: Any, task: Any, **_: Any) -> None:
    """The task has ended. If its soft time limit comes only now, Celery would log it: all is done again."""
    handled = sys.exc_info()[1]
    try:
        _end(unwrapped(sender), task.request, handled)
    except Exception as error:
        if not is_of_signal_handler(error):
            raise
        _end(unwrapped(sender), task.request, handled)


def _end(task: Any, request: Any, error: BaseException | None) -> None:
    """Note that the result is stored, or withdraw a task that never began.

    Its process may be told to exit before the result is stored, as by SIGTERM: then a redelivery does the work. And a
    signal handler, ``before_start`` or a base class may have kept it from running.
    """
    is_stored = error is None or isinstance(error, Exception)
    for server, key, marker in vars(request).get("only_one_markers", ()) if is_stored else ():
        with redelivery.unless_down(request.id):
            drive(server.client, evaluate(redelivery.STORED, key, beside=(marker,)))
    if not vars(request).get("only_one_has_begun"):
        withdraw(task, request)


signals.task_failure.connect(_on_failure)
signals.task_retry.connect(_on_retry)
signals.task_revoked.connect(_on_revoked)
signals.task_postrun.connect(_on_end)
# A child of the pool ends without calling what is registered with `atexit`.
signals.worker_process_shutdown.connect(lambda **_: finish_pending_releases(), weak=False)
