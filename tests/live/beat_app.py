"""What beats send to a worker, each by a clock of its own: a task that keeps its key."""

from __future__ import annotations

import os
import time
from datetime import datetime
from typing import Any

from celery.schedules import schedstate, schedule
from celery.signals import before_task_publish

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


@app.task(name="tick", shared=False, ignore_result=True)  # type: ignore[untyped-decorator]
@only_one("tick", lease=5, at_least=AT_LEAST)
def run(number: str) -> None:
    """Take no time, so that without `at_least` it might run again at once."""
    note("run", number)


if URL in os.environ:  # in a beat or a worker
    app.conf.beat_schedule = {"tick": {"task": "tick", "schedule": EveryTick(INTERVAL, app=app), "args": [""]}}

    @before_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def about_to_send(body: Any, **_: Any) -> None:
        """Write into the message of which tick it is; what becomes of it, `tests.live.app` writes down."""
        body[0][0] = str(int(ticks_until(time.time())))
