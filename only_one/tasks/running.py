"""The task whose run calls a covered function: its name, id and attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Task
from celery._state import get_current_task

from only_one.holder import Identity
from only_one.plan import Call, Cover


def call_of(cover: Cover, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """Who calls `wrapper`: the current task where that is its run, else a plain function.

    A function that is called directly, or from another task's run, is none of that task's.
    """
    bound = bool(args) and isinstance(args[0], Task) and _runs(args[0], wrapper)
    task = get_current_task()
    if task is None or task.request.called_directly or not _runs(task, wrapper):
        return cover.plain_bound if bound else cover.plain
    request = task.request
    return Call(task.name, Identity(task.name, request.id, request.retries), bound=bound)


def _runs(task: Task, wrapper: Callable[..., Any]) -> bool:
    """Whether `wrapper` is the task's `run`, under whatever Celery has put around it (autoretry, pydantic)."""
    found = getattr(task.run, "__func__", task.run)
    while found is not None:
        if found is wrapper:
            return True
        found = getattr(found, "__wrapped__", None)
        found = getattr(found, "__func__", found)
    return False
