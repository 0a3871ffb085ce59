"""What beats send to a worker, each by a clock of its own: one task that keeps its key, and one that does not."""

from __future__ import annotations

import os
import time
from datetime import datetime
from typing import Any

from celery.schedules import schedstate, schedule
from celery.signals import after_task_publish, before_task_publish, task_postrun

from only_one import only_one
from tests.live.app import app
from tests.live.workers import URL, note

INTERVAL = 3.0
"""Seconds between two ticks of a beat."""
AT_LEAST = 2.1
"""Longer than two clocks are apart, and shorter than the interval."""


def ticks_until(moment: float) -> float:
    """How many ticks there have been, by this machine's clock."""
    return (moment + float(os.environ["LIVE_CLOCK"])) / INTERVAL


class EveryTick(schedule):  # type: ignore[misc]  # Celery has no types
    """Due whenever this machine's clock shows a multiple of the interval, as a crontab is, but for the minutes."""

    def is_due(self, last_run_at: datetime) -> Any:
        passed = ticks_until(time.time())
        due = int(passed) > int(ticks_until(last_run_at.timestamp()))
        return schedstate(is_due=due, next=(1 - passed % 1) * INTERVAL)


def task_of(name: str, **options: Any) -> Any:
    """A task that takes no time, and may run again at once, unless its options say otherwise."""

    @only_one("{name}", lease=5, **options)
    def run(tick: str) -> str:  # noqa: ARG001 - for the witness
        return "done"

    return app.task(name=name, shared=False, ignore_result=True)(run)


TASKS = [task_of("kept_for_a_tick", at_least=AT_LEAST), task_of("released")]

if URL in os.environ:  # in a beat or a worker
    app.conf.beat_schedule = {
        task.name: {"task": task.name, "schedule": EveryTick(INTERVAL, app=app), "args": [""]} for task in TASKS
    }

    @before_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def about_to_send(headers: dict[str, Any], body: Any, **_: Any) -> None:
        """Write into the message of which tick it is."""
        body[0][0] = f"{headers['task']}-{int(ticks_until(time.time()))}"

    @after_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def sent(body: Any, **_: Any) -> None:
        """Write down what a beat has sent."""
        note("sent", body[0][0])

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def ended(args: list[str], retval: Any, **_: Any) -> None:
        """Write down what has become of it."""
        note("result", args[0], retval)
