"""Covered tasks that are put back while their key is busy.

The broker delivers again when the test says so, or, where `LIVE_VISIBILITY` is set, after so many seconds.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery

from only_one import configure, only_one, retry
from rigs.sweeps import soon
from tests.live.brokers import consumed, options_for_redis
from tests.live.workers import PREFIX, RESULTS, URL, note, use_broker, wait_at

OTHER = "other"
"""A queue beside the usual one."""

DIRECT = "direct"
"""One more, of a direct exchange of its own."""

LOCKS = "LIVE_LOCKS"
"""The server of the locks, which is another than the broker."""

VISIBLE_AFTER = "LIVE_VISIBILITY"
VISIBILITY = 0.9
"""Seconds: what is put back waits for a third of it at the longest."""

TIMEOUT = 600

app = Celery("put back", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.accept_content = ["json", "pickle"]
app.conf.broker_transport_options = (
    soon(float(os.environ[VISIBLE_AFTER]))
    if VISIBLE_AFTER in os.environ
    else options_for_redis(visibility_timeout=VISIBILITY, unacked_restore_limit=0)
)

if URL in os.environ:  # in a worker
    app.conf.result_backend = os.environ[RESULTS]
    use_broker(app)
    app.amqp.queues.add(
        DIRECT, exchange=f"{DIRECT}s", exchange_type="direct", routing_key=DIRECT, **consumed().get("options", {})
    )
    configure(redis=os.environ[LOCKS], prefix=PREFIX)


class Trouble(Exception):
    """Raised by a run."""


def request_of(task: Any) -> dict[str, Any]:
    """All that a run is told of its message, as far as JSON can say it."""
    found: dict[str, Any] = json.loads(json.dumps(vars(task.request), default=str))
    return found


@app.task(bind=True)  # type: ignore[untyped-decorator]
@only_one("{key}", timeout=TIMEOUT, when_busy=retry())
def waits(self: Any, key: str, number: int = 0, *, fails: bool = False) -> Any:
    """Tells what its message says, in a note; returns its number."""
    note("ran", key, number, json.dumps(request_of(self)).replace(" ", ""))
    if fails:
        raise Trouble(key)
    return number


@app.task(bind=True, acks_late=True)  # type: ignore[untyped-decorator]
@only_one("{key}", timeout=TIMEOUT, when_busy=retry())
def waits_late(self: Any, key: str, number: int = 0) -> int:
    """The same, with a message that is acknowledged when it has ended."""
    note("ran", key, number, self.request.retries)
    return number


@app.task(bind=True)  # type: ignore[untyped-decorator]
@only_one("{key}", timeout=TIMEOUT, when_busy=retry())
def polls(self: Any, key: str) -> int:
    """Is replaced by itself once, and holds its key until its gate is opened."""
    if self.request.replaced_task_nesting:
        return 1
    try:
        raise self.replace(self.si(key))
    finally:
        note("replaced", key)
        wait_at(key)


@app.task  # type: ignore[untyped-decorator]
@only_one("{key}", timeout=TIMEOUT, when_busy=retry(0.2, max_retries=3))
def gives_up(key: str) -> None:
    note("ran", key)


@app.task  # type: ignore[untyped-decorator]
@only_one("{key}", timeout=TIMEOUT, when_busy=retry())
def contends(key: str, seconds: float) -> None:
    """One of many for a key."""
    note("begin", key)
    time.sleep(seconds)
    note("end", key)


@app.task(bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def fills(self: Any, until: str, seconds: float) -> None:
    """Takes the place of others, again and again."""
    time.sleep(seconds)
    with redis.Redis.from_url(os.environ[URL]) as client:
        if not client.exists(until):
            self.apply_async((until, seconds), queue=self.request.delivery_info["routing_key"])


@app.task  # type: ignore[untyped-decorator]
def add(before: Any, number: int) -> Any:
    """What comes after."""
    return (sum(before) if isinstance(before, list) else before) + number


@app.task  # type: ignore[untyped-decorator]
def hear(result: Any, key: str) -> None:
    """A link."""
    note("heard", key, result)


@app.task  # type: ignore[untyped-decorator]
def hear_of_trouble(request: Any, error: Any, _traceback: Any, key: str) -> None:
    """A link for errors."""
    note("trouble", key, request.id, type(error).__name__)
