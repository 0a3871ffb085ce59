"""What a task's `run` is made of."""

from __future__ import annotations

import inspect
from typing import Any

from only_one.plan import Cover


def functions_of(task: Any) -> list[Any]:
    """The task's `run`, and what it wraps: Celery puts functions of its own around it, for autoretry and pydantic."""
    found, functions = getattr(task.run, "__func__", task.run), []
    while found is not None:
        functions.append(found)
        found = getattr(found, "__wrapped__", None)
        found = getattr(found, "__func__", found)
    return functions


def is_bound(task: Any) -> bool:
    """Whether the task itself is the first argument of its function."""
    return not isinstance(inspect.getattr_static(type(task), "run"), staticmethod)


def covers_of(task: Any) -> list[Cover]:
    """What covers a task's function, each once: wrappers copy what they find on the function that they wrap."""
    return list(dict.fromkeys(each.__only_one__ for each in functions_of(task) if hasattr(each, "__only_one__")))


def queue_cover_of(task: Any) -> Cover | None:
    """What covers a task from queued to finished, if it is covered so."""
    return next((cover for cover in covers_of(task) if cover.task is not None), None)
