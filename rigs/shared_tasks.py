"""Shared tasks: Celery announces a task to every app of its process; a test, or a page, has none but its own."""

from __future__ import annotations

from celery import _state


def forget_shared_tasks() -> None:
    """Have new apps of this process begin without the tasks that there are; what listens to apps stays."""
    listeners = _state._on_app_finalizers  # noqa: SLF001 - no public way
    listeners -= {each for each in listeners if each.__module__ in {"celery.app", "celery.app.base"}}
