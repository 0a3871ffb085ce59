"""The recipe of 2010: a class-based task of which one runs at a time, whatever its arguments."""

from __future__ import annotations

import time

from celery import Task

from only_one import only_one

from . import store
from .journal import witnessed

PAUSE = 0.5


class SingleTask(Task):  # type: ignore[misc]  # Celery has no types
    """Keep the store small; register it with `app.register_task(SingleTask())`."""

    @only_one(key="SingleTask", timeout=60 * 5)
    def run(self) -> None:
        """Drop what is old, a little at a time, so that imports get in between."""
        with witnessed("SingleTask"):
            for _ in range(5):
                store.prune(keep=100)
                time.sleep(PAUSE)
