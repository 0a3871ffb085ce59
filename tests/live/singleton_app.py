"""The tasks of examples/singleton.py, which take until the test lets them go on."""

from __future__ import annotations

import os

from celery import current_task

from examples import singleton
from tests.live.workers import note, wait_at

app = singleton.app
strict = singleton.configured


def work(_seconds: float) -> None:
    """Write down the begin and the end, and wait in between."""
    task_id = current_task.request.id
    note("begin", task_id)
    wait_at(task_id)
    note("end", task_id)


if "LIVE_URL" in os.environ:  # in a worker
    app.conf.only_one_lease = 600  # so that no expiry explains within a test that a key is free
    singleton.work = work
