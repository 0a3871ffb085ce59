"""The Celery application: two tasks, on a schedule that is shorter than their runs.

```
celery -A examples.feeds.app worker
celery -A examples.feeds.app beat
```
"""

import os
import signal
import time
from typing import Any

from celery import Celery, Task
from celery.signals import after_task_publish, beat_init

from only_one import only_one, subscribe

from .journal import note, note_skip, row_of, witnessed

BROKER = os.environ.get("DEMO_BROKER_URL", "redis://localhost:6379/1")
FEEDS = {"planet": 2.1, "news": 2.6, "weather": 1.8, "jobs": 3.2}
"""Seconds that it takes to fetch a feed, by its name."""

app = Celery("feeds", broker=BROKER, backend=BROKER)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 1


@app.task  # type: ignore[untyped-decorator]
@only_one("{name}:{feed_url}")
def import_feed(feed_url: str) -> None:
    """Fetch a feed; one run at a time per feed.

    Args:
        feed_url: where the feed would be; a pause stands for the slow server.
    """
    name = row_of(feed_url)
    with witnessed(name):
        time.sleep(FEEDS[name])


class SingleTask(Task):  # type: ignore[misc]  # Celery has no types
    """The recipe of 2010: a class-based task of which one runs at a time."""

    @only_one(key="SingleTask", timeout=60 * 5)
    def run(self) -> None:
        """Take longer than the schedule leaves it."""
        with witnessed("SingleTask"):
            time.sleep(2.5)


single_task = app.register_task(SingleTask())

app.conf.beat_schedule = {
    name: {"task": import_feed.name, "schedule": 1.0, "args": [f"https://feeds.example.org/{name}"]} for name in FEEDS
}
app.conf.beat_schedule["single task"] = {"task": single_task.name, "schedule": 1.0}

# What follows is for the journal alone.


@after_task_publish.connect  # type: ignore[untyped-decorator]
def note_tick(sender: str, body: Any, **_: object) -> None:
    """Note what beat publishes."""
    args = body[0]
    note("tick", row_of(args[0] if args else sender))


@beat_init.connect  # type: ignore[untyped-decorator]
def end_between_ticks(sender: Any, **_: object) -> None:
    """Celery's own handler may end beat when a tick is published but not yet noted."""
    signal.signal(signal.SIGTERM, lambda *_: sender.stop())


subscribe(note_skip)
