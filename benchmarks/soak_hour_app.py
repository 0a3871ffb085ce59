"""The tasks and functions of `benchmarks.soak_hour`, and the processes that call them.

Each run appends lines to the witness file: its begin, each tenth of a second in which it believes that it holds its
key, and its end. The file knows nothing of the locks. A line is a JSON list: of what it is, its name, and facts.
The time is that of `CLOCK_BOOTTIME`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import after_task_publish, beat_init, before_task_publish, task_postrun
from kombu.exceptions import OperationalError

from only_one import OnlyOneError, buffer_one, configure, current_lock, only_one, retry
from only_one.clock import now
from rigs.programs import READY
from rigs.sweeps import soon

LOCKS = "SOAK_LOCKS"
BROKER = "SOAK_BROKER"
WITNESS = "SOAK_WITNESS"
"""The variables of the environment: two URLs, and the path of the witness file."""

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


OPTIONS = {
    # A killed worker that was looking for such messages would keep the others waiting for 5 minutes by default.
    "redis": {**soon(VISIBILITY), "unacked_mutex_expire": 3},
    "amqp": {"confirm_publish": True},  # or the client may lose messages when the broker is killed
}


def note(table: str, name: str, /, **facts: object) -> None:
    """Append one line to the witness file, in one write."""
    os.write(_witness, json.dumps([table, name, facts]).encode() + b"\n")


ENDS = {"SUCCESS": "skipped", "FAILURE": "failed", "REJECTED": "rejected by Celery"}
"""What a task has come to without a run, by its state: Celery rejects a retry while the broker is away."""

if WITNESS in os.environ:  # in a process that the soak has started
    _witness = os.open(os.environ[WITNESS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    app.conf.broker_url = os.environ[BROKER]
    app.conf.broker_transport_options = OPTIONS[os.environ[BROKER].partition(":")[0]]
    app.conf.beat_schedule = {"below": {"task": "below", "schedule": 1.0, "args": ["0", 0.05]}}
    configure(redis=os.environ[LOCKS], prefix=PREFIX, queue_timeout=QUEUE_TIMEOUT)

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def _outcome(task_id: str, state: str, retval: Any, **_: Any) -> None:
        """Write down the outcome of a delivery, when its key has been released."""
        # A requeue fails if its broker is away; that of Redis never is.
        may_be_away = not os.environ[BROKER].startswith("redis")
        is_expected = isinstance(retval, OnlyOneError) or (may_be_away and isinstance(retval, OperationalError))
        if state in ENDS:
            note("tasks", task_id, end=ENDS[state])
        if state == "FAILURE" and not is_expected:
            note("tasks", task_id, error=repr(retval))


def _steps(kind: str, key: str, seconds: float, task_id: str = "", end: str = "done") -> Iterator[float]:
    """A run: writes down what it believes, and yields the seconds to wait until it wants to go on."""
    lock, run, begun_at = current_lock(), uuid4().hex, now()
    note("runs", run, kind=kind, key=key, task=task_id, begun_at=begun_at)
    while True:
        at = now()  # before the question: a lock that is held then was held at this time, too
        if lock.is_held:
            note("runs", run, held_until=at)
        if at >= begun_at + seconds:
            break
        yield min(BEAT, begun_at + seconds - at)
    note("runs", run, end=end)


def _body(kind: str, prefix: str) -> Callable[..., str]:
    """What a task does: it runs for some seconds, and as often before as it is to retry by itself."""

    def run(self: Any, key: str, seconds: float, retries: int = 0) -> str:
        end = "retry" if self.request.retries < retries else "done"
        for pause in _steps(kind, f"{prefix}:{key}", seconds, self.request.id, end):
            time.sleep(pause)
        if end == "retry":
            raise self.retry(countdown=0.1)
        return end

    return run


def _task(name: str, run: Callable[..., str | None], **options: Any) -> Any:
    return app.task(bind=True, shared=False, name=name, **options)(run)


_AGAIN = only_one("again:{key}", lease=1, when_busy=retry(0.3), when_down=retry(0.3))
_NEWEST = only_one("newest:{key}", lease=1.5, when_busy=buffer_one(0.3), when_down=retry(0.3))
_EARLY = {"acks_late": False, "reject_on_worker_lost": False}

TASKS: dict[str, Any] = {
    # It shares its keys with the plain functions.
    "below": _task("below", only_one("shared:{key}", lease=1.5)(_body("below", "shared"))),
    # Its message is acknowledged when it begins, so a kill loses it.
    "early": _task("early", only_one("early:{key}", lease=2)(_body("early", "early")), **_EARLY),
    # Unique from queued to finished.
    "above": only_one("above:{key}", lease=2)(_task("above", _body("above", "above"))),
    # It waits for its key, and retries by itself.
    "again": _task("again", _AGAIN(_body("again", "again")), max_retries=None),
    # One runs, and the newest waits.
    "newest": _task("newest", _NEWEST(_body("newest", "newest"))),
}


@only_one("shared:{key}", lease=1)
def plain(key: str, seconds: float) -> str:
    """A function outside of Celery."""
    for pause in _steps("plain", f"shared:{key}", seconds):
        time.sleep(pause)
    return "done"


@only_one("shared:{key}", lease=1)
async def plain_async(key: str, seconds: float) -> str:
    """The same in an event loop."""
    for pause in _steps("plain_async", f"shared:{key}", seconds):
        await asyncio.sleep(pause)
    return "done"


def _arguments(dice: random.Random) -> tuple[str, float]:
    seconds = dice.uniform(2, 3) if dice.random() < LONG else dice.uniform(0.01, 0.3)
    return str(dice.randrange(KEYS)), seconds


def _about_to_send(headers: dict[str, Any], **_: Any) -> None:
    headers["sent_at"] = now()


def _sent(headers: dict[str, Any], body: Any, **_: Any) -> None:
    """Write down that a task was sent."""
    name = headers["task"]
    note("tasks", headers["id"], name=name, key=f"{name}:{body[0][0]}", sent_at=headers["sent_at"])


@beat_init.connect(weak=False)  # type: ignore[untyped-decorator]
def begin_to_send(**_: Any) -> None:
    """Write down from now on which tasks this process sends: beat, or a producer; a worker sends some once more."""
    before_task_publish.connect(_about_to_send)
    after_task_publish.connect(_sent)
    print(READY, flush=True)


def send_tasks(seed: int) -> None:
    """Send tasks, until the process is ended."""
    begin_to_send()
    dice = random.Random(seed)
    while True:
        time.sleep(dice.uniform(0.06, 0.18))
        name = dice.choice(list(TASKS))
        retries = {"retries": dice.choice([0, 0, 0, 1, 2])} if name == "again" else {}
        with suppress(OnlyOneError, OperationalError):  # the server of the locks, or the broker, is away
            TASKS[name].apply_async(_arguments(dice), retries)


def call_functions(seed: int) -> None:
    """Call the plain functions in one event loop and in threads, until the process is ended."""
    dice = random.Random(seed)

    async def call_in_turn() -> None:
        while True:
            await asyncio.sleep(dice.uniform(0.2, 0.8))
            arguments, is_async = _arguments(dice), dice.random() < 1 / 2
            with suppress(OnlyOneError):
                await (plain_async(*arguments) if is_async else asyncio.to_thread(plain, *arguments))

    async def call_in_parallel() -> None:
        await asyncio.gather(*(call_in_turn() for _ in range(5)))

    print(READY, flush=True)
    asyncio.run(call_in_parallel())
