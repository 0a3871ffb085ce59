"""The tasks of `benchmarks.kills`: units of work on a few keys, in workers that are killed.

A run has a file of its key locked for as long as it lives, by the system, which sees to it when a process is killed
and knows nothing of Redis. What it has done it writes into another file, which is opened to append.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks.sweeps import soon
from only_one import configure, only_one, retry
from tests.live.brokers import countdown_of, options_for_redis
from tests.live.workers import use_broker

URL = "KILLS_URL"
RESULTS = "KILLS_RESULTS"
FOLDER = "KILLS_FOLDER"

ALONE = "alone-"
"""What the names of the locked files begin with."""

LEASE = 1.5
"""Seconds for which those on another machine wait for a holder that was killed."""

VISIBILITY = 3.0
"""Seconds after which the broker delivers the messages of a killed worker again; and those of a slow one."""

TRANSPORT = {
    **soon(VISIBILITY),
    # A worker that is killed while it looks for such messages has all others wait for so long, 5 minutes by default.
    "unacked_mutex_expire": 3,
}

app = Celery("kills", set_as_current=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=options_for_redis(**TRANSPORT),
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=2,
)

if URL in os.environ:  # in a worker
    use_broker(app)
    app.conf.result_backend = os.environ[RESULTS]
    configure(redis=os.environ[URL], prefix="kills:")


def note(*words: object) -> None:
    """Append a line to the file that tells what was done."""
    with Path(os.environ[FOLDER], "witness").open("ab", buffering=0) as file:
        file.write(" ".join(map(str, words)).encode() + b"\n")


@contextmanager
def alone(key: str, unit: int) -> Iterator[None]:
    """Write down whether another run with this key lives."""
    with Path(os.environ[FOLDER], f"{ALONE}{key}").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("overlap", unit, key)
        note("begin", unit, key)
        yield
        note("end", unit, key)


def work(task: Any, key: str, unit: int, seconds: float, retries: int) -> int:
    """Do a unit of work after some retries."""
    with alone(key, unit):
        time.sleep(seconds)
        if task.request.retries < retries:
            note("retry", unit, key)
            raise task.retry(countdown=countdown_of(0.1))
        note("done", unit, key)
    return unit


@app.task(bind=True, max_retries=None)  # type: ignore[untyped-decorator]
@only_one("{key}", lease=LEASE, when_busy=retry())
def loud(self: Any, key: str, unit: int, seconds: float, retries: int) -> int:
    """A unit of work whose result is stored, where there is a backend."""
    return work(self, key, unit, seconds, retries)


@app.task(bind=True, max_retries=None, ignore_result=True)  # type: ignore[untyped-decorator]
@only_one("{key}", lease=LEASE, when_busy=retry())
def silent(self: Any, key: str, unit: int, seconds: float, retries: int) -> int:
    """A unit of work whose result is ignored."""
    return work(self, key, unit, seconds, retries)
