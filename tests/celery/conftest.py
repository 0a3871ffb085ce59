"""What the tests of Celery have in common: apps, and what is in their queues and at their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, _state
from redis import Redis

from only_one.celery import lazy_tasks as lazy_tasks  # which listens to all apps from now on
from only_one.holder import Holder
from tests.celery.deliveries import Queue


@pytest.fixture
def finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test has done in every app is undone at its end."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))


@pytest.fixture
def new_app(redis_url: str, prefix: str) -> Iterator[Callable[..., Celery]]:
    """Makes apps that publish to a queue of this test, or of their own."""
    apps = []

    def made(queue: str = "queue", **settings: Any) -> Celery:
        changes = {
            "broker_url": redis_url,
            "result_backend": "cache+memory://",
            "task_default_queue": f"{prefix}{queue}",
            "task_publish_retry": False,
            **settings,
        }
        app = Celery(f"app-{uuid4()}", set_as_current=False, changes=changes)
        apps.append(app)
        return app

    yield made
    for app in apps:
        app.close()


@pytest.fixture
def app(new_app: Callable[..., Celery]) -> Celery:
    """An app that is not finalized yet, so its tasks are promises."""
    return new_app()


@pytest.fixture
def queued(redis: Redis, prefix: str) -> Callable[..., Any]:
    """Tells how many messages are in a queue."""
    return lambda queue="queue": redis.llen(f"{prefix}{queue}")


@pytest.fixture
def held(redis: Redis, prefix: str) -> Callable[..., Holder | None]:
    """Tells who holds a key."""

    def read(key: str) -> Holder | None:
        value: Any = redis.get(f"{prefix}{key}")
        return None if value is None else Holder.parse(value)

    return read


@pytest.fixture
def left(redis: Redis, prefix: str) -> Callable[..., float]:
    """Tells for how many seconds a key is there: -2 if it is not, -0.001 if it does not expire."""

    def read(key: str) -> float:
        milliseconds: Any = redis.pttl(f"{prefix}{key}")
        return -2.0 if milliseconds == -2 else milliseconds / 1000

    return read


@pytest.fixture
def queue(app: Celery, redis: Redis) -> Queue:
    return Queue(app, redis)


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Calls something in another thread, where no run is under way, and gives its result."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(call).result()
