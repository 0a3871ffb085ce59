"""Tasks that are covered from the moment they are queued, and a worker for them.

A run writes down its begin and, last of all, its end, in a file that does not use the lock.
"""

# ruff: noqa: ARG001 - keys are made of arguments that the runs do not need

from __future__ import annotations

import os
import signal
import time
from typing import Any

import redis
from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_postrun
from pydantic import BaseModel

from only_one import buffer_one, configure, current_lock, fail, only_one
from rigs.waiting import LIMIT
from tests.live.brokers import KIND
from tests.live.workers import PREFIX, RESULTS, URL, evaluated, note, use_broker
from tests.renewal import is_renewed

TIMEOUT = 600
"""No expiry explains within a test that a key is free."""

LEASE = 60
AT_LEAST = 600
WAIT = 0.1 if KIND == "redis" else 5
"""Seconds between two attempts, in which the second is in a queue that nobody reads, if the broker is Redis."""

TEMPLATE = "QUEUE_TEMPLATE"
"""What tells the worker that a template is another one by now."""

CONSTANT = "constant"

app = Celery("queue", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 4

if URL in os.environ:  # in the worker
    app.conf.result_backend = os.environ[RESULTS]
    use_broker(app)
    configure(redis=os.environ[URL], prefix=PREFIX)

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def seen(args: list[Any], **_: Any) -> None:
        """Write down that a delivery has been seen to, whether it ran or not."""
        note("seen", str(args[0]) if args else "")


class Trouble(Exception):
    """Raised by a run."""


def whose() -> list[Any]:
    """What others see of the run that calls this."""
    lock = current_lock()
    holder = lock.holder
    assert holder is not None
    return [lock.key, holder.state, holder.name, holder.task_id, holder.pid == os.getpid(), lock.is_held]


def wait_at(gate: str) -> None:
    """Wait until somebody lets one run pass."""
    with redis.Redis.from_url(os.environ[URL], socket_timeout=None) as client:
        assert client.blpop([f"gate:{gate}"], timeout=LIMIT)


def run(gate: str, result: Any = "done", *, gated: bool = False) -> Any:
    """Write down what every run does."""
    note("begin", gate, result)
    if gated:
        wait_at(gate)
    else:
        time.sleep(0.05)
    note("end", gate, result)
    return result


@only_one("{gate}", timeout=TIMEOUT)
@app.task  # type: ignore[untyped-decorator]
def plain(gate: str, result: str = "done") -> Any:
    """Runs at once."""
    return run(gate, result)


@only_one("{gate}", timeout=TIMEOUT)
@app.task(bind=True, max_retries=3)  # type: ignore[untyped-decorator]
def goes_elsewhere(self: Any, gate: str, other: str) -> Any:
    """Is retried with other arguments, and so under another key."""
    if not self.request.retries:
        raise self.retry(args=(other, other), countdown=0)
    return whose()


@only_one("{gate}", timeout=TIMEOUT)
@app.task  # type: ignore[untyped-decorator]
def retried_by_hand(gate: str) -> Any:
    """Says that it is retried, and is not."""
    raise Retry(gate, when=LIMIT)


class NotAgain(Task):  # type: ignore[misc]  # Celery has no types
    """Ends before its run when it is retried."""

    abstract = True

    def before_start(self, task_id: str, *_: Any) -> None:
        if self.request.retries:
            raise Trouble(task_id)


@only_one("{gate}", timeout=TIMEOUT)
@app.task(bind=True, base=NotAgain, max_retries=3)  # type: ignore[untyped-decorator]
def not_again(self: Any, gate: str) -> Any:
    """Never comes to run a second time."""
    note("begin", gate)
    raise self.retry(countdown=WAIT)


@only_one("{gate}", timeout=TIMEOUT)
@app.task  # type: ignore[untyped-decorator]
def gated(gate: str) -> Any:
    """Runs until its gate is opened."""
    return run(gate, gated=True)


@only_one("{gate}", lease=LEASE)
@app.task  # type: ignore[untyped-decorator]
def leased(gate: str) -> Any:
    """Its key lives for longer than a lease, if it is renewed: when the gate is opened for the first time."""
    note("begin", gate)
    wait_at(gate)
    note("renewed", gate, is_renewed(current_lock()))
    wait_at(gate)
    return whose()


@only_one
@app.task  # type: ignore[untyped-decorator]
def default(gate: str, number: int = 1) -> Any:
    """Its key is of all its arguments."""
    return [number, *whose()]


@only_one("{gate}", timeout=TIMEOUT, when_busy=buffer_one(countdown=0.2))
@app.task  # type: ignore[untyped-decorator]
def buffered(gate: str, number: int) -> Any:
    """One runs and one waits; its key does not hold all of its arguments."""
    return run(gate, number, gated=number == 1)


@only_one("{gate}", when_busy=fail, timeout=TIMEOUT)
@app.task  # type: ignore[untyped-decorator]
def failing(gate: str) -> Any:
    """A duplicate raises."""
    return run(gate, gated=True)


def end(gate: str, how: str) -> None:
    """End a run as is said, where that needs no task."""
    if how == "exception":
        raise Trouble(gate)
    if how == "ignore":
        raise Ignore
    if how.startswith("reject"):
        raise Reject(how, requeue=how == "reject and requeue")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        time.sleep(LIMIT)
    if how == "deaf":  # as in a call of C, where no signal is seen to
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(LIMIT)


@only_one("{gate}", timeout=TIMEOUT)
@app.task(bind=True, max_retries=3)  # type: ignore[untyped-decorator]
def ends(self: Any, gate: str, how: str) -> str:
    """Ends as is said, at the first time."""
    note("begin", gate, self.request.retries)
    if self.request.retries or self.request.delivery_info.get("redelivered") or "last" in how:
        note("end", gate)
        return "last"
    if how == "retry":
        raise self.retry(countdown=WAIT)
    if how == "retry with other arguments":
        raise self.retry(args=(f"{gate}-other", how), countdown=0)
    if how == "replace":
        raise self.replace(self.s(gate, "last"))
    end(gate, how)
    return how


@only_one("{gate}", timeout=TIMEOUT)
@app.task(bind=True, max_retries=1)  # type: ignore[untyped-decorator]
def waits_long(self: Any, gate: str) -> str:
    """Is retried after an hour."""
    note("begin", gate)
    raise self.retry(countdown=3600)


@only_one("{gate}", timeout=TIMEOUT)
@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
def late(self: Any, gate: str, how: str) -> str:
    """Its message is acknowledged when it has ended, and delivered again when it is lost."""
    note("begin", gate)
    if self.request.delivery_info.get("redelivered"):
        return "again"
    end(gate, how)
    return how


@only_one("{gate}", timeout=TIMEOUT)
@app.task(bind=True, autoretry_for=(Trouble,), default_retry_delay=WAIT, max_retries=2)  # type: ignore[untyped-decorator]
def again(self: Any, gate: str, failures: int) -> int:
    """Celery retries it."""
    note("begin", gate, self.request.retries)
    if self.request.retries < failures:
        raise Trouble(gate)
    return int(self.request.retries)


@only_one("{gate}", timeout=TIMEOUT, at_least=AT_LEAST)
@app.task  # type: ignore[untyped-decorator]
def cooling(gate: str) -> Any:
    """Its key is kept for a while."""
    return run(gate)


@only_one(CONSTANT, timeout=TIMEOUT)
@app.task  # type: ignore[untyped-decorator]
def constant(gate: str) -> Any:
    """Its key is that of all of them, and of others."""
    return run(gate)


@only_one(os.environ.get(TEMPLATE, "{gate}"), timeout=TIMEOUT)
@app.task  # type: ignore[untyped-decorator]
def moved(gate: str) -> Any:
    """Whoever sends it has another template than the worker."""
    note("begin", gate)
    wait_at(gate)
    return whose()


class Single(Task):  # type: ignore[misc]  # Celery has no types
    """A task that is a class."""

    name = "single"

    def run(self, gate: str) -> Any:
        """Run at once."""
        note("begin", gate)
        return whose()


single: Any = only_one("{gate}", timeout=TIMEOUT)(app.register_task(Single()))


class Base(Task):  # type: ignore[misc]  # Celery has no types
    """Does something around each run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note("call", args[0])
        return super().__call__(*args, **kwargs)


@only_one("{gate}", timeout=TIMEOUT)
@app.task(base=Base)  # type: ignore[untyped-decorator]
def based(gate: str) -> Any:
    """Has a base class of its own."""
    return whose()


class Feed(BaseModel):
    """An argument that is a model."""

    gate: str
    pages: int = 1


class Found(BaseModel):
    """A result that is one."""

    whose: list[Any]


def modelled(feed: Feed) -> Found:
    """Is given a model, and gives one."""
    assert isinstance(feed, Feed)
    note("begin", feed.gate)
    return Found(whose=whose())


modelled = only_one("{feed[gate]}", timeout=TIMEOUT)(app.task(pydantic=True)(evaluated(modelled)))


@app.task  # type: ignore[untyped-decorator]
def other(*_: Any) -> str:
    """Stands beside or before a covered task."""
    return "other"


@app.task  # type: ignore[untyped-decorator]
def after(value: Any) -> Any:
    """What comes next, and gives what it was given."""
    return value
