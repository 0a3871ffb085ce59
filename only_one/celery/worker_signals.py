"""Celery's signals: keys of tasks that were killed, revoked or never begun, of tasks that a worker has received.

A run that was killed cannot release its key: the worker's main process does, as soon as Celery tells it.
On this machine a caller would take the key over by itself; on others it would wait for the lease, or for `timeout`.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from math import inf
from typing import Any

from celery import signals
from celery.app.task import Context
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from only_one.call.effective_options import Decoration
from only_one.connections.server import Server
from only_one.events import logger
from only_one.lock.commands import RAW, drive, now, release_now, replace
from only_one.lock.current_lock import Lease
from only_one.lock.holder import Holder, TokenFactory, is_dead, is_queued, machine
from only_one.lock.renewal import hold
from only_one.settings import DEFAULT_LEASE

from . import coalescing
from .broker import waits_for
from .requeue import header_of
from .task_run import caller_from_outside, decorations_of, key_from_outside, queue_decoration_of

_DEAD_WITHIN = 10.0
"""Seconds within which a process that is to be killed is dead; Celery tells it before it does it."""

_LOOKS_EVERY = 0.02

_LOOKS_AGAIN_AFTER = 1.0
"""Seconds after which a received retry is looked at again whose previous attempt has not ended yet."""

_BACKS_OFF = 10.0
"""Seconds for which no received task is told of where the server did not answer: the worker has messages to receive."""

_at_work = threading.Lock()
"""Held while a thread of ours does something: the pool does not fork then, because its new child would inherit whatever
lock of Python, Celery or redis-py the thread has, and nobody to release it."""

with suppress(AttributeError):  # where nothing forks
    os.register_at_fork(before=_at_work.acquire, after_in_parent=_at_work.release, after_in_child=_at_work.release)


# Tasks that were killed or revoked


def _on_failure(sender: Any, task_id: str, exception: Any, args: Any, kwargs: Any, **_: Any) -> None:
    if isinstance(exception, (TimeLimitExceeded, WorkerLostError)):
        _watch(sender, task_id, args, kwargs, None)


def _on_revoked(sender: Any, request: Any, terminated: bool, **_: Any) -> None:  # noqa: FBT001 - Celery's
    """It was revoked, or has expired."""
    decoration, header = queue_decoration_of(sender), header_of(request)
    if terminated or decoration is not None:
        _watch(sender, request.id, request.args, request.kwargs, header.key)
    if decoration is not None and header.trigger is not None:
        _forget(sender, decoration, request)


def _watch(task: Any, task_id: str, args: Any, kwargs: Any, key: str | None) -> None:
    """Release a task's keys as soon as its process is dead, in a thread: the worker has others to serve."""
    for decoration in decorations_of(task):
        given = (task, decoration, task_id, args, kwargs, key if decoration.task is not None else None)
        threading.Thread(target=_release, args=given, name="only_one-endings", daemon=True).start()


def _release(task: Any, decoration: Decoration, task_id: str, args: Any, kwargs: Any, key: str | None) -> None:
    try:
        with _at_work:
            caller = caller_from_outside(task, decoration)
            options = decoration.options_for(caller)
            key = key or key_from_outside(task, decoration, caller, args, kwargs)
        if options.server is not None:
            _release_when_dead(options.server, key, task_id, takeover=options.takeover)
    except Exception as error:  # noqa: BLE001 - there is nobody to raise it to, and the key expires by itself
        logger.debug("the key of %s[%s] could not be given back: %s", task.name, task_id, error)


def _release_when_dead(server: Server, key: str, task_id: str, *, takeover: bool) -> None:
    until = now() + _DEAD_WITHIN
    while now() < until:
        with _at_work:
            if _is_released(server, key, task_id, takeover=takeover):
                return
        time.sleep(_LOOKS_EVERY)


def _is_released(server: Server, key: str, task_id: str, *, takeover: bool) -> bool:
    """Whether there is no more to do: the key was released because its process is dead, or it is not the task's."""
    value: bytes | None = server.client.execute_command("GET", key, **RAW)
    if value is None or (holder := Holder.parse(value)) is None or holder.task_id != task_id:
        return True
    if not is_queued(value) and not takeover:
        return True
    if not (is_queued(value) or is_dead(value) or _has_ended(holder)):
        return False
    # A task that is queued may just have begun: then it is its process that is waited for.
    return release_now(server.client, server.features, key, value).status == "held"


def _has_ended(holder: Holder) -> bool:
    """Whether it is a child of ours that has ended; it seems alive until Celery waits for it, which may take 5 s."""
    if holder.machine != machine():
        return False
    with suppress(ChildProcessError, AttributeError):  # it is another's, or macOS before Python 3.13 cannot tell
        return os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


# Tasks that have ended


def _on_end(sender: Any, task: Any, **_: Any) -> None:
    """Its result is stored; or a signal handler, `before_start` or a base class has kept it from running."""
    getattr(task.request, "only_one_stored", lambda: None)()
    decoration = queue_decoration_of(sender)
    if decoration is not None and not getattr(task.request, "only_one_has_begun", False):
        _forget(sender, decoration, task.request)


def _forget(task: Any, decoration: Decoration, request: Any) -> None:
    """Release the key of a task that was unique from when it was queued, and has ended without having begun."""
    header = header_of(request)
    server = decoration.options_for(caller_from_outside(task, decoration)).server
    if header.key is None or server is None:
        return
    try:
        if header.token:
            release_now(server.client, server.features, header.key, header.token.encode())
        else:  # a retry, whose message was published before the key was its own
            _is_released(server, header.key, request.id, takeover=False)
        if header.trigger is not None:
            coalescing.withdraw(server, header.key, task.app, header.trigger)
    except Exception as error:  # noqa: BLE001 - there is nobody to raise it to, and it is forgotten by itself
        logger.debug("the key of %s could not be given back: %s", task.name, error)


# Tasks that a worker has received and has not begun: their keys name the worker's process, which is seen to die

_waiting: dict[Lease, tuple[Server, bytes]] = {}
"""The keys that name this process, where they are, and what was stored before; one that others have by now is lost."""

_swept_at = _backs_off_until = -inf


def _on_received(sender: Any, request: Any, **_: Any) -> None:
    global _backs_off_until  # noqa: PLW0603 - that of the process
    if now() < _backs_off_until:
        return
    try:
        _receive(sender, request)
    except Exception as error:  # noqa: BLE001 - the task runs all the same, and its key expires by itself
        logger.debug("%s[%s] is received, which its key does not say: %s", request.name, request.id, error)
        _backs_off_until = now() + _BACKS_OFF


def _receive(consumer: Any, request: Any) -> None:
    """Store this process at the key of a task that was queued with it, for as long as it lives and the task waits."""
    decoration = queue_decoration_of(request.task)
    if decoration is None:
        return
    header = header_of(Context(request.request_dict))
    if header.key is None or not (header.token or header.attempt):
        return
    options = decoration.options_for(caller_from_outside(request.task, decoration))
    begins_in = waits_for(request.app, 0, None, request.eta)
    limit = waits_for(request.app, options.queue_timeout, request.expires, request.eta)
    if options.server is None or limit <= 0:
        return
    token = _token_factory(request, header.attempt, "received").token(limit)
    lease = Lease(options.server, header.key, token, now(), min(DEFAULT_LEASE, limit), limit)
    # It is not renewed before it may begin: any number may wait for that.
    lease.expires_at += begins_in
    lease.renew_at += begins_in
    milliseconds = round(min(DEFAULT_LEASE + begins_in, limit) * 1000)
    queued = header.token.encode() if header.token else b""
    became = drive(options.server.client, replace(header.key, queued, token, milliseconds))
    if became.status == "taken":  # by a retry, or by the worker that had the message before this one
        holder = Holder.parse(became.value)
        if holder is None or holder.task_id != request.id or holder.attempt is None:
            return
        if is_queued(became.value) and holder.attempt == header.attempt:
            became = drive(options.server.client, replace(header.key, became.value, token, milliseconds))
        elif holder.attempt < header.attempt:
            consumer.timer.call_after(_LOOKS_AGAIN_AFTER, _on_received, (consumer, request))
    if became.status == "held":
        request.request_dict.update(header._replace(token=token.decode()).as_headers())
        _sweep()
        _waiting[lease] = options.server, queued or _token_factory(request, header.attempt, "queued").token(limit)
        hold(lease)


def _token_factory(request: Any, attempt: int, state: str) -> TokenFactory:
    return TokenFactory(request.task.name, request.id, attempt, state)


def _sweep() -> None:
    """Forget what has begun since."""
    global _swept_at  # noqa: PLW0603 - that of the process
    if now() >= _swept_at + DEFAULT_LEASE:
        _swept_at = now()
        for lease in [each for each in _waiting if each.reason is not None]:
            del _waiting[lease]


def _on_shutdown(**_: Any) -> None:
    """What has not begun is in its queue again, and no worker's."""
    while _waiting:
        lease, (server, queued) = _waiting.popitem()
        left = round((lease.ends_at - now()) * 1000)
        if lease.reason is not None or left <= 0:
            continue
        try:
            drive(server.client, replace(lease.key, lease.token, queued, left))
        except Exception as error:  # noqa: BLE001 - the next worker that receives it says so
            logger.debug("%s is queued again, which it does not say: %s", lease.key, error)
            return


signals.task_failure.connect(_on_failure)
signals.task_revoked.connect(_on_revoked)
signals.task_postrun.connect(_on_end)
signals.task_received.connect(_on_received)
signals.worker_shutdown.connect(_on_shutdown)
