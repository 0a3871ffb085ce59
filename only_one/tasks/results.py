"""Tells the copies of a task's message that its result is stored: until then its run may have been for nothing."""

from __future__ import annotations

from typing import Any

from celery import signals


def _on_end(sender: Any, **_: Any) -> None:
    getattr(sender.request, "only_one_stored", lambda: None)()


signals.task_postrun.connect(_on_end)
