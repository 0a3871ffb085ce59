"""A job that takes longer than its schedule leaves it, and the beats that send it: Celery's own, and Django's.

The job goes on until so many of its own ticks have been sent meanwhile, however long that takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import after_task_publish, before_task_publish, task_postrun

from only_one import only_one
from tests.live.crew import Witness, note
from tests.waiting import LIMIT, eventually

EVERY = 0.25
"""Seconds between two ticks of a beat."""
MEANWHILE = 5
"""Ticks that are sent while a job runs."""

app = Celery("beat", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.task_ignore_result = True


def prepare_database() -> None:
    """Make the database of django-celery-beat, with the schedule in it."""
    from django.core.management import call_command  # noqa: PLC0415 - not before Django is set up
    from django_celery_beat.models import IntervalSchedule, PeriodicTask  # noqa: PLC0415

    call_command("migrate", verbosity=0)
    interval = IntervalSchedule.objects.create(every=EVERY * 1e6, period=IntervalSchedule.MICROSECONDS)
    PeriodicTask.objects.create(name="job", task=job.name, interval=interval)


if "LIVE_URL" in os.environ:  # in a beat or a worker
    app.conf.broker_url = os.environ["LIVE_URL"]
    app.conf.only_one_prefix = os.environ["LIVE_PREFIX"]

    @before_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def about_to_send(headers: dict[str, Any], **_: Any) -> None:
        """Write down what a beat is about to send; it may be ended in this moment."""
        note("about", headers["id"])

    @after_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def sent(headers: dict[str, Any], **_: Any) -> None:
        """Write down what a beat has sent."""
        note("sent", headers["id"])

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def seen(task_id: str, retval: Any, **_: Any) -> None:
        """Write down what has become of it."""
        note("seen", task_id, retval)


if "LIVE_DATABASE" in os.environ:
    import django
    from django.conf import settings

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["LIVE_DATABASE"]}
    settings.configure(
        INSTALLED_APPS=["django_celery_beat"],
        DATABASES={"default": database},
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    )
    django.setup()
elif "LIVE_URL" in os.environ:
    app.conf.beat_schedule = {"job": {"task": "tests.live.beat_app.job", "schedule": EVERY}}


@app.task(bind=True)  # type: ignore[untyped-decorator]
@only_one
def job(self: Any) -> str:
    """Runs for longer than its schedule."""
    note("begin", self.request.id)
    witness = Witness(Path(os.environ["LIVE_WITNESS"]))
    before = len(witness.lines("sent"))
    assert eventually(lambda: len(witness.lines("sent")) >= before + MEANWHILE, LIMIT)
    note("end", self.request.id)
    return "done"
