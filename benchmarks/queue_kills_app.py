"""The tasks of `benchmarks.queue_kills`, which are covered from queued to finished, and what calls them and is killed.

What calls and what runs writes down what it does, in a file that is opened to append, with the time of the monotonic
clock. A run has a file of its key locked for as long as it lives, by the system, which knows nothing of Redis.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from celery import Celery
from celery.signals import after_task_publish, before_task_publish

from benchmarks.kills_app import ALONE, TRANSPORT
from only_one import only_one

URL = "QUEUE_KILLS_URL"
FOLDER = "QUEUE_KILLS_FOLDER"
QUEUE_TIMEOUT = "QUEUE_KILLS_TIMEOUT"

PREFIX = "queue_kills:"
TIMEOUT = 3600
KEYS = 60
LONGEST_RUN = 0.4
LONGEST_PAUSE = 0.06
LONGEST_CALL = 0.006
"""Seconds after the beginning of a call within which it is killed, where it is killed at any moment."""

LONGEST_COUNTDOWN = 1.0
WITH_COUNTDOWN = 0.1

POINTS = ["at any moment", "taken, not published", "published, not lengthened", "before it has said the id"]
"""Where in a call its process is killed."""

OF_POINTS = [3, 2, 2, 1]
"""How often it is there."""

app = Celery("queue_kills", set_as_current=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=TRANSPORT,
    only_one_prefix=PREFIX,
    worker_prefetch_multiplier=2,
)


def use(url: str, queue_timeout: float) -> None:
    """Have the broker, the results and the keys on one server."""
    app.conf.update(broker_url=url, result_backend=url, only_one_redis=url, only_one_queue_timeout=queue_timeout)


if URL in os.environ:  # not in the program that starts all others
    use(os.environ[URL], float(os.environ[QUEUE_TIMEOUT]))


def note(*words: object) -> None:
    """Append a line to the file that tells what was done."""
    with Path(os.environ[FOLDER], "witness").open("ab", buffering=0) as file:
        file.write(" ".join(map(str, [time.monotonic(), *words])).encode() + b"\n")


@contextmanager
def _alone(task_id: str, key: str) -> Iterator[None]:
    with Path(os.environ[FOLDER], f"{ALONE}{key}").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("overlap", task_id, key)
        note("begin", task_id, key)
        yield
        note("end", task_id, key)


def _work(task: Any, key: str, seconds: float, retries: int) -> None:
    with _alone(task.request.id, key):
        time.sleep(seconds)
        if task.request.retries < retries:
            raise task.retry(countdown=0.1)


@only_one("{key}", timeout=TIMEOUT)
@app.task(bind=True, max_retries=None)  # type: ignore[untyped-decorator]  # Celery has no types
def ordinary(self: Any, key: str, seconds: float, retries: int) -> None:
    """Its message is acknowledged when it begins: a killed run is not run again."""
    _work(self, key, seconds, retries)


@only_one("{key}", timeout=TIMEOUT)
@app.task(bind=True, max_retries=None, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
def late(self: Any, key: str, seconds: float, retries: int) -> None:
    """Its message is acknowledged when it has ended: a killed run is run again."""
    _work(self, key, seconds, retries)


class Producer:
    """Calls tasks until it is killed, or told to end (SIGTERM); SIGUSR1 says to have itself killed in the next call."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._is_ended = False
        self._point = ""

    def run(self) -> None:
        """Call tasks."""
        signal.signal(signal.SIGUSR1, self._on_doom)
        signal.signal(signal.SIGTERM, self._on_end)
        before_task_publish.connect(self._before_publish)
        after_task_publish.connect(self._after_publish)
        sys.setswitchinterval(1e-5)  # the thread that kills is not to wait
        note("ready", os.getpid())
        while not self._is_ended:
            self._call()
            time.sleep(self._random.uniform(0, LONGEST_PAUSE))

    def _on_doom(self, *_: object) -> None:
        self._point = self._random.choices(POINTS, OF_POINTS)[0]

    def _on_end(self, *_: object) -> None:
        self._is_ended = True

    def _call(self) -> None:
        choose = self._random
        task, key = choose.choice([ordinary, late]), f"k{choose.randrange(KEYS)}"
        given = (key, choose.uniform(0, LONGEST_RUN), choose.choice([0, 0, 0, 1]))
        countdown = choose.uniform(0, LONGEST_COUNTDOWN) if choose.random() < WITH_COUNTDOWN else None
        if self._point == POINTS[0]:
            threading.Timer(choose.uniform(0, LONGEST_CALL), self._die).start()
        result = task.apply_async(given, countdown=countdown) if countdown else task.delay(*given)
        if self._point == POINTS[3]:
            self._die()
        note("returned", result.id, key)

    def _before_publish(self, **_: Any) -> None:
        if self._point == POINTS[1]:
            self._die()

    def _after_publish(self, **_: Any) -> None:
        if self._point == POINTS[2]:
            self._die()

    def _die(self) -> NoReturn:
        note("dies", POINTS.index(self._point), os.getpid())
        while True:
            os.kill(os.getpid(), signal.SIGKILL)
