"""Covered tasks that end in every way that there is; none of their keys expires within a test.

A run writes down when it has begun, and last of all that it ends, in a file that does not use the lock.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from pydantic import RootModel

from only_one import configure, only_one
from only_one.clock import now
from only_one.connections.server import find_server
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import release_later
from rigs.waiting import LIMIT
from tests.live.brokers import options_for_redis
from tests.live.workers import PREFIX, RESULTS, URL, evaluated, note, use_broker, wait_at

TIMEOUT = 10 * LIMIT
AT_LEAST = TIMEOUT / 2
LEASE = 3.0

app = Celery("ends", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
# What is put back comes again within a second, and nothing is delivered again before the test says so.
app.conf.broker_transport_options = options_for_redis(visibility_timeout=3, unacked_restore_limit=0)

if URL in os.environ:  # in the worker
    app.conf.result_backend = os.environ[RESULTS]
    use_broker(app)
    app.conf.worker_soft_shutdown_timeout = float(os.environ.get("ENDS_SOFT", "0"))
    configure(redis=os.environ[URL], prefix=PREFIX)


class Trouble(Exception):
    """Raised by a run."""


def is_first(task: Any) -> bool:
    """Whether this is the first run for its message."""
    request = task.request
    return not request.retries and not request.delivery_info.get("redelivered")


def end(task: Any, gate: str, how: str) -> str:
    """Run, and end as is said, at the first time."""
    note("begin", gate, os.getpid())
    if not is_first(task):
        note("again", gate)
        return "again"
    try:
        go_on(gate, how)
    except SoftTimeLimitExceeded:
        note("end", gate)
        raise
    note("end", gate)
    if how == "exception":
        raise Trouble(gate)
    if how == "ignore":
        raise Ignore
    if how.startswith("reject"):
        raise Reject(how, requeue=how == "reject and requeue")
    if how == "retry":
        raise task.retry(countdown=0)
    if how == "exit":
        raise SystemExit(how)
    return how


def deadlock() -> None:
    """Stay in one C call, with Python's lock: no other thread gets a turn, and no signal is heeded."""
    system, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    system.pthread_mutex_init(mutex, None)
    system.pthread_mutex_lock(mutex)
    system.pthread_mutex_lock(mutex)


def go_on(gate: str, how: str) -> None:
    """What a run does until it ends."""
    if how == "C call":
        deadlock()
    elif how == "sleep":
        time.sleep(TIMEOUT)
    elif how == "gate":
        wait_at(f"{gate}:gate")


@app.task  # type: ignore[untyped-decorator]
def leave_a_release(key: str) -> None:
    """Its process has a release to repeat, and takes the server for down."""
    server = find_server(os.environ[URL])
    server.node_of(key).fail(TIMEOUT)
    server.client.set(key, key)
    release_later(PendingRelease(server, key, key.encode(), now() + TIMEOUT, no_write_in_flight=True))


@app.task(bind=True)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def early(self: Any, gate: str, how: str) -> str:
    """Its message is acknowledged when it begins."""
    return end(self, gate, how)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def late(self: Any, gate: str, how: str) -> str:
    """Its message is acknowledged when it has ended, and delivered again when it is lost."""
    return end(self, gate, how)


@app.task(bind=True)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT, at_least=AT_LEAST)
def cooling(self: Any, gate: str, how: str) -> str:
    """Its key is kept for a while."""
    return end(self, gate, how)


@app.task(bind=True, autoretry_for=(Trouble,), default_retry_delay=0)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def again(self: Any, gate: str, how: str) -> str:
    """Celery retries it."""
    return end(self, gate, how)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
@only_one("{gate}", lease=LEASE, takeover=False)
def elsewhere(self: Any, gate: str, how: str) -> str:
    """Its key outlives it by a lease, as it does for other machines."""
    return end(self, gate, how)


class Renames(Task):  # type: ignore[misc]  # Celery has no types
    """Gives its run another argument than its message has."""

    abstract = True

    def __call__(self, gate: str, how: str) -> Any:
        return super().__call__(f"{gate}-renamed", how)


@app.task(bind=True, base=Renames)  # type: ignore[untyped-decorator]
@only_one("{gate}", timeout=TIMEOUT)
def renamed(self: Any, gate: str, how: str) -> str:
    """Its key is not that of its message's arguments."""
    return end(self, gate, how)


class Gate(RootModel[str]):
    """An argument that is a text in the message."""


def modelled(self: Any, gate: Gate, how: str) -> str:
    """Its key cannot be made of its message's arguments."""
    return end(self, f"{gate.root}-modelled", how)


modelled = app.task(bind=True, pydantic=True)(only_one("{gate.root}-modelled", timeout=TIMEOUT)(evaluated(modelled)))
