"""The tasks and functions of `benchmarks.soak_hour`, and the processes that call them.

Each run appends lines to the witness file: its begin, each tenth of a second in which it believes that it holds its
key, and its end. The file knows nothing of the locks. A line is a JSON list: the time, a word, and what belongs to it.
The time is that of `CLOCK_BOOTTIME`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import after_task_publish, beat_init, before_task_publish, task_postrun, worker_ready
from kombu.exceptions import OperationalError

from only_one import OnlyOneError, buffer_one, configure, current_lock, only_one, retry
from only_one.clock import now
from rigs.sweeps import soon

LOCKS = "SOAK_LOCKS"
BROKER = "SOAK_BROKER"
WITNESS = "SOAK_WITNESS"
NAME = "SOAK_NAME"
"""The variables of the environment: two URLs, the path of the witness file, and the name of the process."""

PREFIX = "soak:"
QUEUE_TIMEOUT = 20.0
"""Seconds for which a queued task's key lives if its message is lost; no other key of the soak lives longer."""

VISIBILITY = 3.0
"""Seconds after which a Redis broker delivers the messages of a killed or paused worker again."""

KEYS = 4
"""Of each kind of task."""

BEAT = 0.1
"""Seconds between two lines of a run that holds its key."""

LONG = 0.04
"""The share of runs that take longer than their lease."""

app = Celery("soak", set_as_current=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_ignore_result=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=2,
)


def options_of(url: str) -> dict[str, Any]:
    """The transport options for the broker at a URL."""
    if url.startswith("redis"):
        # A killed worker that was looking for such messages would keep the others waiting for 5 minutes by default.
        return {**soon(VISIBILITY), "unacked_mutex_expire": 3}
    return {"confirm_publish": True}  # or the client may lose messages when the broker is killed


def note(*words: object, at: float | None = None) -> None:
    """Append one line to the witness file, in one write."""
    line = json.dumps([now() if at is None else at, *words])
    os.write(_witness, line.encode() + b"\n")


_published_at: dict[str, float] = {}

if WITNESS in os.environ:  # in a process that the soak has started
    _witness = os.open(os.environ[WITNESS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    app.conf.broker_url = os.environ[BROKER]
    app.conf.broker_transport_options = options_of(os.environ[BROKER])
    app.conf.beat_schedule = {"below": {"task": "below", "schedule": 1.0, "args": ["0", 0.05]}}
    configure(redis=os.environ[LOCKS], prefix=PREFIX, queue_timeout=QUEUE_TIMEOUT)

    @beat_init.connect(weak=False)  # type: ignore[untyped-decorator]  # Celery has no types
    @worker_ready.connect(weak=False)  # type: ignore[untyped-decorator]
    def _ready(**_: Any) -> None:
        note("ready", os.environ[NAME])

    def _about_to_send(headers: dict[str, Any], **_: Any) -> None:
        _published_at[headers["id"]] = now()

    def _sent(headers: dict[str, Any], body: Any, **_: Any) -> None:
        note("sent", headers["id"], headers["task"], body[0][0], at=_published_at.pop(headers["id"]))

    if not os.environ[NAME].startswith("worker"):  # workers send tasks again, under the same id
        before_task_publish.connect(_about_to_send)
        after_task_publish.connect(_sent)

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def _outcome(task_id: str, state: str, retval: Any, **_: Any) -> None:
        """Write down the outcome of a delivery, when its key has been released."""
        result = type(retval).__name__ if isinstance(retval, BaseException) else retval
        # A requeue fails if its broker is away; that of Redis never is.
        may_be_away = not os.environ[BROKER].startswith("redis")
        is_expected = isinstance(retval, OnlyOneError) or state != "FAILURE"
        is_expected |= may_be_away and isinstance(retval, OperationalError)
        note("outcome", task_id, state, result, is_expected)


def _steps(kind: str, key: str, seconds: float, task_id: str = "", end: str = "done") -> Iterator[float]:
    """A run: writes down what it believes, and yields the seconds to wait until it wants to go on."""
    lock, run = current_lock(), uuid4().hex
    ends_at = now() + seconds
    note("begin", run, kind, key, task_id)
    while True:
        at = now()  # before the question: a lock that is held then was held at this time, too
        note("held" if lock.is_held else "lost", run, at=at)
        if at >= ends_at:
            break
        yield min(BEAT, ends_at - at)
    note("end", run, end)


def _run(kind: str, key: str, seconds: float, task_id: str = "", end: str = "done") -> str:
    for pause in _steps(kind, key, seconds, task_id, end):
        time.sleep(pause)
    return end


@app.task(bind=True, shared=False, name="below")  # type: ignore[untyped-decorator]
@only_one("shared:{key}", lease=1.5)
def below(self: Any, key: str, seconds: float) -> str:
    """Shares its keys with the plain functions."""
    return _run("below", f"shared:{key}", seconds, self.request.id)


@app.task(bind=True, shared=False, name="early", acks_late=False, reject_on_worker_lost=False)  # type: ignore[untyped-decorator]
@only_one("early:{key}", lease=2)
def early(self: Any, key: str, seconds: float) -> str:
    """Its message is acknowledged when it begins, so a kill loses it."""
    return _run("early", f"early:{key}", seconds, self.request.id)


@only_one("above:{key}", lease=2)
@app.task(bind=True, shared=False, name="above")  # type: ignore[untyped-decorator]
def above(self: Any, key: str, seconds: float) -> str:
    """Unique from queued to finished."""
    return _run("above", f"above:{key}", seconds, self.request.id)


@app.task(bind=True, shared=False, name="again", max_retries=None)  # type: ignore[untyped-decorator]
@only_one("again:{key}", lease=1, when_busy=retry(0.3), when_down=retry(0.3))
def again(self: Any, key: str, seconds: float, retries: int = 0) -> str:
    """Waits for its key, and retries by itself."""
    if self.request.retries < retries:
        _run("again", f"again:{key}", seconds, self.request.id, "retry")
        raise self.retry(countdown=0.1)
    return _run("again", f"again:{key}", seconds, self.request.id)


@app.task(bind=True, shared=False, name="newest")  # type: ignore[untyped-decorator]
@only_one("newest:{key}", lease=1.5, when_busy=buffer_one(0.3), when_down=retry(0.3))
def newest(self: Any, key: str, seconds: float) -> str:
    """One runs, and the newest waits."""
    return _run("newest", f"newest:{key}", seconds, self.request.id)


@only_one("shared:{key}", lease=1)
def plain(key: str, seconds: float) -> str:
    """A function outside of Celery."""
    return _run("plain", f"shared:{key}", seconds)


@only_one("shared:{key}", lease=1)
async def plain_async(key: str, seconds: float) -> str:
    """The same in an event loop."""
    for pause in _steps("plain_async", f"shared:{key}", seconds):
        await asyncio.sleep(pause)
    return "done"


class Caller:
    """A process that calls until SIGTERM ends it.

    Args:
        seed: of what it calls.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._is_ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._is_ended.set())

    def send_tasks(self) -> None:
        """Send tasks."""
        note("ready", os.environ[NAME])
        while not self._is_ended.wait(self._random.uniform(0.06, 0.18)):
            task = self._random.choice([below, early, above, again, newest])
            retries = {"retries": self._random.choice([0, 0, 0, 1, 2])} if task is again else {}
            try:
                task.apply_async(self._arguments(), retries)
            except (OnlyOneError, OperationalError) as error:  # the server of the locks, or the broker, is away
                note("refused", type(error).__name__)

    def call_functions(self) -> None:
        """Call the plain functions in one event loop and in threads."""

        async def call_in_turn() -> None:
            while not self._is_ended.is_set():
                await asyncio.sleep(self._random.uniform(0.2, 0.8))
                arguments, is_async = self._arguments(), self._random.random() < 1 / 2
                try:
                    result = await (plain_async(*arguments) if is_async else asyncio.to_thread(plain, *arguments))
                    note("called", result)
                except OnlyOneError as error:
                    note("refused", type(error).__name__)

        async def call_in_parallel() -> None:
            await asyncio.gather(*(call_in_turn() for _ in range(5)))

        note("ready", os.environ[NAME])
        asyncio.run(call_in_parallel())

    def _arguments(self) -> tuple[str, float]:
        is_long = self._random.random() < LONG
        seconds = self._random.uniform(2, 3) if is_long else self._random.uniform(0.01, 0.3)
        return str(self._random.randrange(KEYS)), seconds
