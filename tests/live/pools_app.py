"""Tasks of every kind, for a worker of any pool."""

# ruff: noqa: ARG001 - keys are made of arguments that the runs do not need

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery, Task
from pydantic import BaseModel

from only_one import current_lock, only_one, retry
from rigs.waiting import LIMIT
from tests.live.workers import evaluated, note, use_broker, wait_at
from tests.renewal import is_renewed

LEASE = 60

app = Celery("pools", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True


def around(call: Callable[..., Any]) -> Callable[..., Any]:
    """What an annotation may put around a task."""

    def annotated(*args: Any, **kwargs: Any) -> Any:
        note("annotation")
        return call(*args, **kwargs)

    return annotated


app.conf.task_annotations = {
    "tests.live.pools_app.annotated": {"max_retries": 7, "default_retry_delay": 0, "@__call__": around}
}

if "LIVE_URL" in os.environ:  # in a worker
    app.conf.result_backend = os.environ["LIVE_URL"]
    use_broker(app)
    app.conf.only_one_prefix = os.environ["LIVE_PREFIX"]
    app.conf.update(json.loads(os.environ["LIVE_SETTINGS"]))


def whose() -> list[Any]:
    """What others see of the run that calls this."""
    lock = current_lock()
    holder = lock.holder
    assert holder is not None
    return [holder.name, holder.task_id, holder.attempt, lock.is_held]


@app.task  # type: ignore[untyped-decorator]
@only_one("{key}")
def plain(key: str) -> list[Any]:
    """Runs at once."""
    return whose()


@app.task  # type: ignore[untyped-decorator]
@only_one("{key}", timeout=10 * LIMIT)
def gated(key: str) -> list[Any]:
    """Runs until its gate is opened."""
    note("begin", key)
    wait_at(f"gate-{key}")
    note("end", key)
    return whose()


@app.task  # type: ignore[untyped-decorator]
@only_one("{key}", lease=LEASE)
def renewed(key: str) -> int:
    """When its gate is opened it is its lease's turn; returns for how many milliseconds the key is there then."""
    note("begin", key)
    wait_at(f"gate-{key}")
    assert is_renewed(current_lock())
    with redis.Redis.from_url(os.environ["LIVE_URL"]) as client:
        return int(client.pttl(f"live:{key}"))


@app.task(name="a name in every pool")  # type: ignore[untyped-decorator]
@only_one("{key}")
def named(key: str) -> list[Any]:
    return whose()


@app.task(bind=True)  # type: ignore[untyped-decorator]
@only_one("{key}")
def annotated(self: Any, key: str) -> list[Any]:
    assert self.max_retries == 7
    return whose()


class Base(Task):  # type: ignore[misc]  # Celery has no types
    """Does something around each run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note("call")
        return super().__call__(*args, **kwargs)


@app.task(base=Base)  # type: ignore[untyped-decorator]
@only_one("{key}")
def based(key: str) -> list[Any]:
    return whose()


class Feed(BaseModel):
    """An argument that is a model."""

    key: str
    pages: int = 1


class Found(BaseModel):
    """A result that is one."""

    whose: list[Any]


@app.task(pydantic=True)  # type: ignore[untyped-decorator]
@only_one("{feed.key}")
@evaluated
def modelled(feed: Feed) -> Found:
    assert isinstance(feed, Feed)
    return Found(whose=whose())


@app.task(bind=True, max_retries=3)  # type: ignore[untyped-decorator]
@only_one("{key}")
def again(self: Any, key: str) -> list[Any]:
    """Runs three times."""
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return whose()


@app.task(bind=True, autoretry_for=(ZeroDivisionError,), default_retry_delay=0)  # type: ignore[untyped-decorator]
@only_one("{key}")
def failing(self: Any, key: str) -> list[Any]:
    """Fails twice."""
    return whose() if self.request.retries == 2 else [1 / 0]


@app.task  # type: ignore[untyped-decorator]
@only_one("{key}", when_busy=retry(countdown=0.2))
def patient(key: str) -> list[Any]:
    return whose()


@app.task(time_limit=5)  # type: ignore[untyped-decorator]
@only_one("{key}", timeout=10 * LIMIT)
def limited(key: str) -> str:
    note("begin", key)
    time.sleep(LIMIT)
    return "went on"
