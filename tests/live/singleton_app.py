"""The tasks of examples/singleton, which take until the test lets them go on."""

from __future__ import annotations

import os

from celery import current_task

from examples.singleton import configured, tasks, work
from tests.live.workers import note, wait_at

app = tasks.app
strict = configured.app


def take(seconds: float) -> None:  # noqa: ARG001 - nothing here depends on how long anything takes
    """Write down the begin and the end, and wait in between."""
    task_id = current_task.request.id
    note("begin", task_id)
    wait_at(task_id)
    note("end", task_id)


if "LIVE_URL" in os.environ:  # in a worker
    app.conf.only_one_lease = 600  # so that no expiry explains within a test that a key is free
    work.take = take
