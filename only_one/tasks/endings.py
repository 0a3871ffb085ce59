"""What a worker's main process does for a task that was killed or revoked: it gives the key back.

On this machine a caller would take it over by itself. On others it would wait for the lease, or for `timeout`.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any

from celery import signals
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from only_one.clock import now
from only_one.events import logger
from only_one.holder import Holder, is_dead, is_queued, machine
from only_one.lock import RAW, give_back
from only_one.plan import Cover
from only_one.servers import Server

from .put_back import header_of
from .task_call import call_from_outside, key_from_outside
from .wrapping import covers_of, queue_cover_of

_DEAD_WITHIN = 10.0
"""Seconds within which a process that is to be killed is; Celery tells it before it does it."""

_LOOKS_EVERY = 0.02

_at_work = threading.Lock()
"""Held while a thread of ours does something: the pool does not fork then, as its new child would inherit whatever lock
of Python, Celery or redis-py the thread has, and nobody to let it go."""

with suppress(AttributeError):  # where nothing forks
    os.register_at_fork(before=_at_work.acquire, after_in_parent=_at_work.release, after_in_child=_at_work.release)


def _on_failure(sender: Any, task_id: str, exception: Any, args: Any, kwargs: Any, **_: Any) -> None:
    if isinstance(exception, (TimeLimitExceeded, WorkerLostError)):
        _watch(sender, task_id, args, kwargs, None)


def _on_revoked(sender: Any, request: Any, terminated: bool, **_: Any) -> None:  # noqa: FBT001 - Celery's
    if terminated or queue_cover_of(sender) is not None:
        _watch(sender, request.id, request.args, request.kwargs, header_of(request).key)


def _watch(task: Any, task_id: str, args: Any, kwargs: Any, key: str | None) -> None:
    """Give the keys of a task back as soon as its process is dead, in a thread, as the worker has others to see to."""
    for cover in covers_of(task):
        given = (task, cover, task_id, args, kwargs, key if cover.task is not None else None)
        threading.Thread(target=_release, args=given, name="only_one-endings", daemon=True).start()


def _release(task: Any, cover: Cover, task_id: str, args: Any, kwargs: Any, key: str | None) -> None:
    try:
        with _at_work:
            call = call_from_outside(task, cover)
            plan = cover.plan_for(call)
            key = key or key_from_outside(task, cover, call, args, kwargs)
        if plan.server is not None:
            _release_when_dead(plan.server, key, task_id, takeover=plan.takeover)
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
    """Whether there is no more to do: the key was given back as its process is dead, or never began, or is not its."""
    value: bytes | None = server.client.execute_command("GET", key, **RAW)
    if value is None or (holder := Holder.parse(value)) is None or holder.task_id != task_id:
        return True
    if not is_queued(value) and not takeover:
        return True
    if not (is_queued(value) or is_dead(value) or _has_ended(holder)):
        return False
    # A task that is queued may just have begun: then it is its process that is waited for.
    return give_back(server.client, server.dialect, key, value).fate == "held"


def _has_ended(holder: Holder) -> bool:
    """Whether it is a child of ours that has ended; it seems alive until Celery waits for it, which may take 5 s."""
    if holder.machine != machine():
        return False
    with suppress(ChildProcessError, AttributeError):  # it is another's, or macOS before Python 3.13 cannot tell
        return os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


signals.task_failure.connect(_on_failure)
signals.task_revoked.connect(_on_revoked)
