"""The Celery application: `import_feed` of Celery's cookbook, on a schedule that is shorter than its runs.

```
celery -A examples.feeds.app worker
celery -A examples.feeds.app beat
```
"""

from __future__ import annotations

import os
from urllib.request import urlopen

from celery import Celery

from only_one import only_one

from . import recording, store
from .journal import witnessed
from .patience import PATIENCE
from .single_task import SingleTask

BROKER = os.environ.get("DEMO_BROKER_URL", "redis://localhost:6379/1")
FEEDS = os.environ.get("DEMO_FEEDS", "").split()
INTERVAL = 1.0
FETCH_TIMEOUT = 10 * PATIENCE

app = Celery("feeds", broker=BROKER, backend=BROKER)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 1


@app.task  # type: ignore[untyped-decorator]
@only_one("{name}:{feed_url:md5}", lease=3 * PATIENCE)
def import_feed(feed_url: str) -> int:
    """Fetch a feed and store its entries; one run at a time per feed.

    Args:
        feed_url: where the feed is.

    Returns:
        How many entries the feed has.
    """
    with witnessed(recording.row_of("import_feed", [feed_url])):
        with urlopen(feed_url, timeout=FETCH_TIMEOUT) as answer:  # noqa: S310 - the URLs are our own
            document = answer.read()
        return store.save(feed_url, document)


single_task = app.register_task(SingleTask())

app.conf.beat_schedule = {
    **{f"import {url}": {"task": import_feed.name, "schedule": INTERVAL, "args": [url]} for url in FEEDS},
    "single task": {"task": single_task.name, "schedule": INTERVAL},
}

recording.connect()
