"""What beats send to a worker: Celery's own, of which there are two, and Django's, with the schedule in its database.

A job goes on until so many ticks of its own schedule have been done with meanwhile, however long that takes.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from celery import Celery
from celery.schedules import schedstate, schedule
from celery.signals import after_task_publish, before_task_publish, task_postrun

from only_one import only_one
from rigs.waiting import eventually
from tests.live.workers import Witness, note

EVERY = 0.5
"""Seconds between two ticks of a beat."""
MEANWHILE = 3
"""Ticks that are done with while a job runs."""

INTERVAL = 3.0
"""Seconds between two ticks of a beat that goes by a clock of its own."""
AT_LEAST = 2.1
"""Longer than two such clocks are apart, and shorter than the interval."""

app = Celery("beat", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.task_ignore_result = True


def ticks_until(moment: float) -> float:
    """How many ticks there have been, by this machine's clock."""
    return (moment + float(os.environ["LIVE_CLOCK"])) / INTERVAL


class EveryTick(schedule):  # type: ignore[misc]  # Celery has no types
    """Due whenever this machine's clock shows a multiple of the interval, as a crontab is, but for the minutes."""

    def is_due(self, last_run_at: datetime) -> Any:
        passed = ticks_until(time.time())
        due = int(passed) > int(ticks_until(last_run_at.timestamp()))
        return schedstate(is_due=due, next=(1 - passed % 1) * INTERVAL)


@app.task(bind=True)  # type: ignore[untyped-decorator]
@only_one("{schedule}")
def job(self: Any, schedule: str) -> str:
    """Runs for longer than its schedule leaves it."""
    note("begin", schedule, self.request.id)
    witness = Witness(Path(os.environ["LIVE_WITNESS"]))
    before = len(witness.lines("seen", schedule))

    def is_done() -> bool:
        return len(witness.lines("seen", schedule)) >= before + MEANWHILE or bool(witness.lines("over"))

    assert eventually(is_done)
    note("end", schedule, self.request.id)
    return "done"


@app.task  # type: ignore[untyped-decorator]
@only_one("{schedule}", at_least=600)
def kept(schedule: str) -> str:  # noqa: ARG001 - for the key
    """Takes no time, and nobody waits here until it may run again."""
    return "done"


@app.task  # type: ignore[untyped-decorator]
@only_one("{name}", lease=5, at_least=AT_LEAST)
def kept_for_a_tick(schedule: str) -> str:  # noqa: ARG001 - for the witness
    """Takes no time, and may run again at the next tick."""
    return "done"


@app.task  # type: ignore[untyped-decorator]
@only_one("{name}", lease=5)
def released(schedule: str) -> str:  # noqa: ARG001 - for the witness
    """Takes no time, and may run again at once."""
    return "done"


def prepare_database() -> None:
    """Make the database of django-celery-beat, with the schedule in it; nothing else sends what is in there."""
    import django  # noqa: PLC0415 - in Django's beat only
    from django.conf import settings  # noqa: PLC0415

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["LIVE_DATABASE"]}
    settings.configure(
        INSTALLED_APPS=["django_celery_beat"],
        DATABASES={"default": database},
        MIGRATION_MODULES={"django_celery_beat": None},  # the tables as they are now, without their history
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    )
    django.setup()

    from django.core.management import call_command  # noqa: PLC0415 - not before Django is set up
    from django_celery_beat.models import IntervalSchedule, PeriodicTask  # noqa: PLC0415

    call_command("migrate", verbosity=0, run_syncdb=True)
    interval = IntervalSchedule.objects.create(every=EVERY * 1e6, period=IntervalSchedule.MICROSECONDS)
    PeriodicTask.objects.create(name="job", task=job.name, interval=interval, args=json.dumps(["django"]))


if "LIVE_URL" in os.environ:  # in a beat or a worker
    app.conf.broker_url = os.environ["LIVE_URL"]
    app.conf.only_one_prefix = os.environ["LIVE_PREFIX"]

    def tick(headers: dict[str, Any], body: Any) -> list[object]:
        """What is noted of a message: its schedule, or the tick that it is of, its id, and who sends it."""
        return [body[0][0], headers["id"], os.getpid()]

    @before_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def about_to_send(headers: dict[str, Any], body: Any, **_: Any) -> None:
        """Write down what a beat is about to send; it may be ended in this moment."""
        if "LIVE_CLOCK" in os.environ:
            body[0][0] = f"{headers['task'].rpartition('.')[2]}-{int(ticks_until(time.time()))}"
        note("about", *tick(headers, body))

    @after_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def sent(headers: dict[str, Any], body: Any, **_: Any) -> None:
        """Write down what a beat has sent."""
        note("sent", *tick(headers, body))

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def seen(task_id: str, args: list[str], retval: Any, **_: Any) -> None:
        """Write down what has become of it."""
        note("seen", args[0], task_id, retval)

    if "LIVE_DATABASE" in os.environ:
        prepare_database()
    elif "LIVE_CLOCK" in os.environ:
        app.conf.beat_schedule = {
            task.name: {"task": task.name, "schedule": EveryTick(INTERVAL, app=app), "args": [""]}
            for task in (kept_for_a_tick, released)
        }
    else:
        app.conf.beat_schedule = {
            "job": {"task": job.name, "schedule": EVERY, "args": ["celery"]},
            "kept": {"task": kept.name, "schedule": EVERY, "args": ["kept"]},
        }
