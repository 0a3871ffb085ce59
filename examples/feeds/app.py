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
from urllib.request import urlopen
from xml.etree import ElementTree as ET

from celery import Celery, Task
from celery.signals import after_task_publish, beat_init

from only_one import only_one, subscribe

from .journal import directory, note, note_skip, row_of, witnessed

BROKER = os.environ.get("DEMO_BROKER_URL", "redis://localhost:6379/1")
FEEDS = os.environ.get("DEMO_FEEDS", "").split()
INTERVAL = 1.0

app = Celery("feeds", broker=BROKER, backend=BROKER)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 1


@app.task  # type: ignore[untyped-decorator]
@only_one("{name}:{feed_url}")
def import_feed(feed_url: str) -> int:
    """Fetch a feed and store its entries; one run at a time per feed.

    Args:
        feed_url: where the feed is.

    Returns:
        How many entries the feed has.
    """
    with witnessed(row_of(feed_url)):
        with urlopen(feed_url, timeout=60) as answer:  # noqa: S310 - the URLs are our own
            titles = [str(title.text) for title in ET.parse(answer).iter("title")]  # noqa: S314 - and the feeds
        (directory() / f"{row_of(feed_url)}.feed").write_text("\n".join(titles))
        return len(titles)


class SingleTask(Task):  # type: ignore[misc]  # Celery has no types
    """The recipe of 2010: a class-based task of which one runs at a time."""

    @only_one(key="SingleTask", timeout=60 * 5)
    def run(self) -> None:
        """Take longer than the schedule leaves it."""
        with witnessed("SingleTask"):
            time.sleep(2.5)


single_task = app.register_task(SingleTask())

app.conf.beat_schedule = {
    **{f"import {url}": {"task": import_feed.name, "schedule": INTERVAL, "args": [url]} for url in FEEDS},
    "single task": {"task": single_task.name, "schedule": INTERVAL},
}

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
