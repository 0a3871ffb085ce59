"""What the journal learns from Celery and from only_one, apart from the runs themselves."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from celery import current_task
from celery.signals import after_task_publish, beat_init

from only_one import subscribe

from .journal import note, note_event


def row_of(task_name: str, args: Sequence[Any]) -> str:
    """The row of the timeline that a call belongs to: its feed's name, or the task's where there is no feed.

    Args:
        task_name: the task's full name.
        args: the call's positional arguments.
    """
    return str(args[0]).rpartition("/")[2] if args else task_name.rpartition(".")[2]


def connect() -> None:
    """Note what beat publishes, and the calls that only_one skips."""
    after_task_publish.connect(_on_publish)
    beat_init.connect(_end_between_ticks)
    subscribe(lambda event: note_event(event, row_of(current_task.name, current_task.request.args)))


def _on_publish(sender: str, body: Sequence[Any], **_: object) -> None:
    note("tick", row_of(sender, body[0]))


def _end_between_ticks(sender: Any, **_: object) -> None:
    """Celery's own handler may end beat when a tick is published but not yet noted."""
    signal.signal(signal.SIGTERM, lambda *_: sender.stop())
