"""Shared tasks: Celery announces a task to every app of its process; a test, or a page, has none but its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

_LISTENERS = ("celery.app.builtins", "only_one.celery.lazy_tasks")


def forget_shared_tasks(until_undone: pytest.MonkeyPatch) -> None:
    """Have new apps of this process begin without the tasks of others."""
    for listener in _LISTENERS:
        import_module(listener)
    state: Any = import_module("celery._state")
    those = {each for each in state._on_app_finalizers if each.__module__ in _LISTENERS}  # noqa: SLF001 - no public way
    until_undone.setattr(state, "_on_app_finalizers", those)
