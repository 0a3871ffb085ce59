"""What a task's `run` is made of."""

from __future__ import annotations

from typing import Any


def functions_of(task: Any) -> list[Any]:
    """The task's `run`, and what it wraps: Celery puts functions of its own around it, for autoretry and pydantic."""
    found, functions = getattr(task.run, "__func__", task.run), []
    while found is not None:
        functions.append(found)
        found = getattr(found, "__wrapped__", None)
        found = getattr(found, "__func__", found)
    return functions
