"""The tasks that the live tests send to a real worker.

A run writes down its begin and its end in a file that is opened to append, which is the tests' witness: it does not use
the lock. Then it waits until its gate is opened, so that nothing here depends on how long anything takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery, Task, shared_task

from only_one import configure, current_lock, only_one
from tests.live.workers import note, use_broker, wait_at

LEASE = 60
"""Seconds that a key outlives a worker that is killed."""

app = Celery("live", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True

if "LIVE_URL" in os.environ:  # in the worker
    app.conf.result_backend = os.environ["LIVE_URL"]
    use_broker(app)
    configure(redis=os.environ["LIVE_URL"], prefix=os.environ["LIVE_PREFIX"])


@contextmanager
def witnessed(gate: str) -> Iterator[None]:
    """A run, from begin to end, which waits at its gate."""
    note("begin", gate, os.getpid())
    try:
        wait_at(gate)
        yield
    finally:
        note("end", gate, os.getpid())


def whose_lock_it_is() -> dict[str, Any]:
    """What others see of the run that calls this."""
    lock = current_lock()
    holder = lock.holder
    assert holder is not None
    return {"key": lock.key, "name": holder.name, "id": holder.task_id, "attempt": holder.attempt, "held": lock.is_held}


@app.task  # type: ignore[untyped-decorator]
@only_one("{name}:{gate}", lease=LEASE)
def plain(gate: str, extra: int = 0) -> dict[str, Any]:
    with witnessed(gate):
        return {"extra": extra, **whose_lock_it_is()}


@app.task(bind=True)  # type: ignore[untyped-decorator]
@only_one
def bound(self: Any, gate: str, extra: int = 0) -> dict[str, Any]:
    with witnessed(gate):
        return {"extra": extra, "own id": self.request.id, **whose_lock_it_is()}


@shared_task  # type: ignore[untyped-decorator]
@only_one("{name}:{gate}")
def shared(gate: str) -> dict[str, Any]:
    with witnessed(gate):
        return whose_lock_it_is()


@shared_task(bind=True, name="a shared name")  # type: ignore[untyped-decorator]
@only_one("{name}:{gate}", timeout=60)
def bound_and_shared(self: Any, gate: str) -> dict[str, Any]:
    assert isinstance(self, Task)
    with witnessed(gate):
        return whose_lock_it_is()


@app.task(name="a name of its own")  # type: ignore[untyped-decorator]
@only_one("{name}:{gate}", timeout=60)
def named(gate: str) -> dict[str, Any]:
    with witnessed(gate):
        return whose_lock_it_is()


@app.task(ignore_result=True)  # type: ignore[untyped-decorator]
@only_one("{name}:{gate}")
def silent(gate: str) -> str:
    with witnessed(gate):
        return "nobody hears this"


@app.task(shared=False)  # type: ignore[untyped-decorator]
@only_one
async def awaited_by_nobody() -> None:
    """Celery would not run it."""


class SingleTask(Task):  # type: ignore[misc]  # Celery has no types
    """The recipe of 2010."""

    name = "SingleTask"

    @only_one(key="SingleTask", timeout=60 * 5)
    def run(self, gate: str) -> dict[str, Any]:
        assert isinstance(self, SingleTask)
        with witnessed(gate):
            return whose_lock_it_is()


class NamedTask(Task):  # type: ignore[misc]  # Celery has no types
    """The same with the task's name and arguments in the key."""

    name = "another name"

    @only_one("{name}:{gate}:{extra}")
    def run(self, gate: str, extra: int = 0) -> dict[str, Any]:
        with witnessed(gate):
            return {"extra": extra, **whose_lock_it_is()}


single_task = app.register_task(SingleTask())
named_task = app.register_task(NamedTask())


class Trouble(Exception):
    """Raised by a run."""


@app.task  # type: ignore[untyped-decorator]
@only_one("{name}:{gate}")
def failing(gate: str) -> None:
    with witnessed(gate):
        raise Trouble(gate)


@app.task(bind=True, autoretry_for=(Trouble,), max_retries=3, default_retry_delay=0)  # type: ignore[untyped-decorator]
@only_one("{name}:{gate}")
def retried(self: Any, gate: str) -> list[int | None]:
    """Fails twice."""
    with witnessed(gate):
        attempt = whose_lock_it_is()["attempt"]
        note("attempt", gate, attempt)
        if self.request.retries < 2:
            raise Trouble(gate)
        return [attempt, self.request.retries]


@app.task  # type: ignore[untyped-decorator]
def outer(gate: str, how: str) -> Any:
    """Calls a covered task as a function."""
    return (named if how == "the task" else named.run)(gate)


@only_one("{name}:{gate}")
def function(gate: str) -> dict[str, Any]:
    with witnessed(gate):
        return whose_lock_it_is()


@app.task  # type: ignore[untyped-decorator]
def around_a_function(gate: str) -> dict[str, Any] | None:
    """Calls a covered function, and is not covered itself."""
    return function(gate)


@app.task  # type: ignore[untyped-decorator]
@only_one("{name}:{gate}")
def nested(gate: str) -> list[Any]:
    """Calls a covered function, and is covered itself."""
    before = whose_lock_it_is()
    inner = function(gate)
    return [before, inner, whose_lock_it_is()]
