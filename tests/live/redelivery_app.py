"""Covered tasks whose messages are delivered more than once, when the test says so.

A run writes down its begin and, last of all, its end, in a file that does not use the lock.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import redis
from celery import Celery
from celery.backends.base import DisabledBackend
from celery.exceptions import Reject
from celery.signals import task_received

from only_one import Released, configure, only_one, subscribe
from tests.live.brokers import options_for_redis
from tests.live.workers import PREFIX, RESULTS, URL, note, use_broker, wait_at

VISIBILITY = 0.9
"""Seconds: what is put back waits for a third of it at the longest."""

LONG = VISIBILITY / 2 + 0.1
"""Seconds of a run that is so long that there may be a copy of its message which nobody has seen yet."""

TIMEOUT = 600

app = Celery("redelivery", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
# The workers do not look for messages to be delivered again: the test has them delivered.
app.conf.broker_transport_options = options_for_redis(visibility_timeout=VISIBILITY, unacked_restore_limit=0)


def next_number(what: str) -> int:
    """Count up, for all processes."""
    with redis.Redis.from_url(os.environ[URL]) as client:
        return int(client.incr(f"number:{what}"))


def die_after_the_first(event: Any) -> None:
    """Be killed in the moment after the key is released, and before the result is stored."""
    gate = event.key.removeprefix(PREFIX)
    if isinstance(event, Released) and event.name == lost.name and next_number(f"released:{gate}") == 1:
        note("killed", gate)
        os.kill(os.getpid(), signal.SIGKILL)


def receive(request: Any, **_: Any) -> None:
    """Write down what a worker is given."""
    note("received", request.args[0])


if URL in os.environ:  # in a worker
    app.conf.result_backend = os.environ[RESULTS]
    use_broker(app)
    configure(redis=os.environ[URL], prefix=PREFIX)
    subscribe(die_after_the_first)
    task_received.connect(receive)


class Trouble(Exception):
    """Raised by a run."""


@app.task(bind=True, max_retries=3)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def cleans_up(self: Any, gate: str) -> str:
    """Is retried, and cleans up after it has said so, until its gate is opened."""
    attempt = self.request.retries
    note("begin", gate, attempt)
    try:
        if not attempt:
            raise self.retry(countdown=0)
        return f"attempt {attempt}"
    finally:
        if not attempt:
            wait_at(gate)
        note("end", gate)


def work(task: Any, gate: str, how: str) -> str:
    """Wait at the gate in the first run, and end as is said."""
    number = next_number(gate)
    note("begin", gate, task.request.retries)
    if number == 1:
        time.sleep(LONG)
        wait_at(gate)
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
def late(self: Any, gate: str, how: str) -> str:
    """Its message is acknowledged when it has ended, and when its process is killed."""
    return work(self, gate, how)


@app.task(bind=True, acks_late=True, backend=DisabledBackend(app))  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def without_results(self: Any, gate: str, how: str) -> str:
    """The same, and there is no result backend."""
    return work(self, gate, how)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def lost(self: Any, gate: str) -> str:
    """Its process is killed before its first result is stored."""
    return work(self, gate, "return")


@app.task  # type: ignore[untyped-decorator]
def follow(before: str) -> str:
    """What comes after it in a chain."""
    return f"{before}, followed"
