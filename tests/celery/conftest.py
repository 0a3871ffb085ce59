"""What the tests of Celery have in common: apps, and what is in their queues and at their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from redis import Redis

from only_one import configure
from only_one.connections.server import Server, find_server
from rigs.proxy import Proxy
from tests.celery.deliveries import Keys, Queue
from tests.decorated import as_async


@pytest.fixture(autouse=True)
def no_signal_handler_raises(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Celery would only log it."""
    yield
    assert not [each for each in caplog.get_records("call") if each.getMessage().startswith("Signal handler")]


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
def broker() -> str:
    """The kind that the app has, where a test says nothing else."""
    return "redis"


@pytest.fixture
def app(new_app: Callable[..., Celery], redis_url: str, broker: str) -> Celery:
    """An app that is not finalized yet, so its tasks are lazy."""
    return new_app(broker_url=redis_url.replace("redis", broker, 1))


@pytest.fixture
def keys(redis: Redis, prefix: str) -> Keys:
    return Keys(redis, prefix)


@pytest.fixture
def queue(app: Celery, redis: Redis) -> Queue:
    return Queue(app, redis)


@pytest.fixture
def way(keys: Keys, proxy: Proxy) -> Iterator[Proxy]:
    """The way of tasks to the server, which breaks when it is told to; `keys` and `queue` have another."""
    with configure(redis=proxy.url, prefix=keys.prefix):
        yield proxy


@pytest.fixture
def server(redis_url: str) -> Server:
    """The server that the tests share, as the product sees it."""
    return find_server(redis_url)


@pytest.fixture(params=["def", "async def"])
def kind(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes a function one of this kind."""
    return as_async if request.param == "async def" else lambda function: function
