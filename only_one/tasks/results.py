"""Tells the copies of a task's message that its result is stored: until then its run may have been for nothing."""

from __future__ import annotations

from typing import Any

from celery import signals


def _on_end(sender: Any, task: Any = None, **_: Any) -> None:  # noqa: ARG001 - Celery's
    delivery = getattr(task.request, "only_one_delivery", None) if task is not None else None
    if delivery is not None:
        delivery.result_is_stored()


signals.task_postrun.connect(_on_end, weak=False, dispatch_uid="only_one_results")
