"""Covered tasks whose messages are delivered more than once, by a broker that waits for 3 s only.

A run writes down its begin and, last of all, its end, in a file that does not use the lock.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import redis
from celery import Celery
from celery.exceptions import Reject
from celery.signals import task_received

from benchmarks.sweeps import soon
from only_one import configure, only_one
from tests.live.workers import PREFIX, RESULTS, URL, note

VISIBILITY = 3.0
LONG = 6.0
"""Seconds of a run that is so long that the broker delivers its message again."""
SHORT = 0.3
LEASE = 1.5
TIMEOUT = 600

app = Celery("redelivery", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_transport_options = soon(VISIBILITY)

if URL in os.environ:  # in a worker
    app.conf.broker_url = os.environ[URL]
    app.conf.result_backend = os.environ[RESULTS]
    configure(redis=os.environ[URL], prefix=PREFIX)


@task_received.connect(weak=False)  # type: ignore[untyped-decorator]
def receive(request: Any, **_: Any) -> None:
    """Write down what a worker is given."""
    note("received", request.args[0])


class Trouble(Exception):
    """Raised by a run."""


def next_number(gate: str) -> int:
    """Which of its task's runs this is."""
    with redis.Redis.from_url(os.environ[URL]) as client:
        return int(client.incr(f"runs:{gate}"))


@app.task(bind=True, max_retries=3)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def cleans_up(self: Any, gate: str, seconds: float) -> str:
    """Is retried, and cleans up for a while after it has said so."""
    attempt = self.request.retries
    note("begin", gate, attempt)
    try:
        if not attempt:
            raise self.retry(countdown=0)
        return f"attempt {attempt}"
    finally:
        time.sleep(0 if attempt else seconds)
        note("end", gate)


def work(task: Any, gate: str, seconds: float, how: str) -> str:
    """Take some time, and end as is said in the first run."""
    number = next_number(gate)
    note("begin", gate, task.request.retries)
    time.sleep(seconds if number == 1 else SHORT)
    note("end", gate)
    if number > 1 or how == "return":
        return f"run {number}"
    if how == "exception":
        raise Trouble(gate)
    if how == "retry":
        raise task.retry(countdown=0)
    if how == "reject":
        raise Reject(how, requeue=False)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@app.task(bind=True, acks_late=True)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def late(self: Any, gate: str, seconds: float = LONG, how: str = "return") -> str:
    """Its message is acknowledged when it has ended, and when its process is killed."""
    return work(self, gate, seconds, how)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def safe(self: Any, gate: str, seconds: float = LONG, how: str = "return") -> str:
    """Its message is delivered again, too, when its process is killed."""
    return work(self, gate, seconds, how)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
@only_one("{gate}", lease=LEASE)
def leased(self: Any, gate: str, seconds: float = LONG, how: str = "return") -> str:
    """Its key outlives it by a lease."""
    return work(self, gate, seconds, how)
