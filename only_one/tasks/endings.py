"""What a worker's main process does for a run whose own process was killed: it gives the key back.

On this machine a caller would take it over by itself. On others it would wait for the lease, or for `timeout`.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

from celery import signals
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from only_one.clock import now
from only_one.events import logger
from only_one.holder import Holder, Identity, is_dead, machine
from only_one.lock import RAW, give_back
from only_one.plan import Call, Cover

from .delivery import Delivery
from .wrapping import functions_of

_DEAD_WITHIN = 10.0
"""Seconds within which a process that is to be killed is; Celery tells it before it does it."""

_LOOKS_EVERY = 0.02


def _on_failure(sender: Any, task_id: str, exception: Any, args: Any = (), kwargs: Any = None, **_: Any) -> None:
    if isinstance(exception, (TimeLimitExceeded, WorkerLostError)):
        _watch(sender, task_id, args, kwargs)


def _on_revoked(sender: Any, request: Any, terminated: bool = False, **_: Any) -> None:  # noqa: FBT001, FBT002 - Celery's
    if terminated:
        _watch(sender, request.id, request.args, request.kwargs)


def _watch(task: Any, task_id: str, args: Any, kwargs: Any) -> None:
    """Give the keys of a task back as soon as its process is dead, in a thread, as the worker has others to see to."""
    # Wrappers copy what they find on the function that they wrap.
    for cover in {each.__only_one__ for each in functions_of(task) if hasattr(each, "__only_one__")}:
        given = (task, cover, task_id, tuple(args or ()), dict(kwargs or {}))
        threading.Thread(target=_release, args=given, name="only_one-endings", daemon=True).start()


def _release(task: Any, cover: Cover, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        _release_when_dead(task, cover, task_id, args, kwargs)
    except Exception as error:  # noqa: BLE001 - there is nobody to raise it to, and the key expires by itself
        logger.debug("the key of %s[%s] could not be given back: %s", task.name, task_id, error)


def _release_when_dead(task: Any, cover: Cover, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    request = SimpleNamespace(id=task_id, retries=0, headers=None)
    bound = not isinstance(inspect.getattr_static(type(task), "run"), staticmethod)
    call = Call(task.name, Identity(task.name, task_id), bound, task.app, Delivery(task, request))
    plan = cover.plan_for(call)
    key = plan.prefix + cover.make_key(call, (task, *args) if bound else args, kwargs)
    if plan.server is None or not plan.takeover:
        return
    value = plan.server.client.execute_command("GET", key, **RAW)
    holder = Holder.parse(value or b"")
    if holder is None or holder.task_id != task_id:
        return
    until = now() + _DEAD_WITHIN
    while not (is_dead(value) or _has_ended(holder)):
        if now() > until:
            return
        time.sleep(_LOOKS_EVERY)
    give_back(plan.server.client, plan.server.dialect, key, value)


def _has_ended(holder: Holder) -> bool:
    """Whether it is a child of ours that has ended; it seems alive until Celery waits for it, which may take 5 s."""
    if holder.machine != machine() or not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


signals.task_failure.connect(_on_failure, weak=False, dispatch_uid="only_one")
signals.task_revoked.connect(_on_revoked, weak=False, dispatch_uid="only_one")
