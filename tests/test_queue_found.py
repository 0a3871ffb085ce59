"""What attacks on the cover of queued tasks have found, where no worker is needed to show it."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task
from redis import Redis

from only_one import LockUnavailable, buffer_one, carry_on, configure, fail, only_one, skip
from only_one.holder import Holder
from only_one.run import run
from only_one.tasks.put_back import Header, header_of
from only_one.tasks.task_call import call_from_outside
from only_one.testing import RedisServer
from tests.proxy import Proxy
from tests.waiting import eventually

cover: Any = only_one


@pytest.fixture
def app(redis: Redis, redis_url: str, prefix: str) -> Iterator[Any]:  # noqa: ARG001 - for its settings
    changes = {"broker_url": redis_url, "task_default_queue": f"{prefix}queue"}
    made = Celery(f"app-{uuid4()}", set_as_current=False, changes=changes)
    yield made
    made.close()


def work(_value: Any = None) -> None:
    """What a task does."""


def a_task(app: Any, **options: Any) -> Any:
    """A task that no other app has."""
    return app.task(work, name="t", shared=False, **options)


def messages(redis: Redis, prefix: str) -> list[dict[str, Any]]:
    """The headers of the messages that wait, the first first."""
    found: Any = redis.lrange(f"{prefix}queue", 0, -1)
    return [json.loads(each)["headers"] for each in reversed(found)]


# --- headers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["headers", "beside"])
def test_a_header_is_found_where_others_put_their_own_headers(where: str) -> None:
    header = Header("the-id", 0, times=3)
    request = SimpleNamespace(id="the-id", retries=0, headers={"sentry-trace": "x"})
    if where == "headers":
        request.headers = header.as_headers()
    else:
        vars(request).update(header.as_headers())
    assert header_of(request) == header


def test_a_copied_header_is_not_that_of_another_task() -> None:
    copied = Header("the-parent", 0, number=3, key="k", token="t", trigger=7).as_headers()  # noqa: S106
    assert header_of(SimpleNamespace(id="the-child", retries=0, headers=copied)) == Header("the-child", 0)


def test_headers_as_a_list_are_kept(app: Any, redis: Redis, prefix: str) -> None:
    task = cover("k")(a_task(app))
    task.apply_async(headers=[("mine", 1)])
    (headers,) = messages(redis, prefix)
    assert headers["mine"] == 1
    assert headers["only_one"]["key"] == f"{prefix}k"


# --- buffer_one --------------------------------------------------------------------------------------------------


def test_the_newest_is_numbered_though_it_brings_an_id(app: Any, redis: Redis, prefix: str) -> None:
    task = cover("k", when_busy=buffer_one())(a_task(app))
    task.apply_async((1,), task_id="mine")
    task.delay(2)
    first, second = messages(redis, prefix)
    assert first["id"] == "mine"
    assert 0 < first["only_one"]["trigger"] < second["only_one"]["trigger"]


def test_one_that_brings_an_id_is_published_though_its_like_waits(app: Any, redis: Redis, prefix: str) -> None:
    task = cover("k", when_busy=buffer_one())(a_task(app))
    task.delay(1)
    task.apply_async((1,), task_id="mine")
    assert len(messages(redis, prefix)) == 2


def test_one_that_has_expired_is_waited_for_no_more(app: Any, redis: Redis, prefix: str) -> None:
    task = cover("k", when_busy=buffer_one())(a_task(app))
    first = task.apply_async(expires=0.3)
    assert task.delay() == first
    limit = time.monotonic() + 10
    while task.delay() == first:
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert len(messages(redis, prefix)) == 2


# --- a task's own apply_async ------------------------------------------------------------------------------------


class OwnId(Task):  # type: ignore[misc]
    """Sends under an id of its own."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        return parent.apply_async(*args, **{**options, "task_id": f"own-{uuid4()}"})


class Never(Task):  # type: ignore[misc]
    """Sends nothing."""

    abstract = True

    def apply_async(self, *_args: Any, **_options: Any) -> Any:
        return None


@pytest.mark.parametrize("expires", [None, 10])
def test_the_key_has_the_id_that_was_published(app: Any, redis: Redis, prefix: str, expires: float | None) -> None:
    task = cover("k")(a_task(app, base=OwnId))
    first = task.apply_async(expires=expires)
    holder = Holder.parse(redis.get(f"{prefix}k") or b"")
    assert holder is not None
    assert first.id.startswith("own-")
    assert (holder.task_id, holder.state) == (first.id, "queued")
    assert task.delay() == first


def test_what_was_not_published_is_not_waited_for_an_hour(app: Any, redis: Redis, prefix: str) -> None:
    task = cover("k")(a_task(app, base=Never))
    assert task.delay() is None
    assert 0 < redis.pttl(f"{prefix}k") <= 30_000


# --- times, positions and modules --------------------------------------------------------------------------------


def test_an_expiry_that_is_shorter_than_can_be_told(app: Any, redis: Redis, prefix: str) -> None:
    cover("k")(a_task(app)).apply_async(expires=0.0001)
    assert len(messages(redis, prefix)) == 1
    assert not redis.exists(f"{prefix}k")


def test_a_date_as_eta(app: Any, redis: Redis, prefix: str) -> None:
    cover("k")(a_task(app)).apply_async(eta=date.today() + timedelta(days=10))  # noqa: DTZ011
    assert 8 * 86_400_000 < redis.pttl(f"{prefix}k") < 12 * 86_400_000


def test_options_that_celery_refuses(app: Any, redis: Redis, prefix: str) -> None:
    task = cover("k")(a_task(app))
    with pytest.raises(TypeError):
        task.apply_async((), {}, *[None] * 6)
    with pytest.raises(TypeError):
        task.apply_async((), {}, None, task_id="x")
    assert not redis.exists(f"{prefix}k")


MODULE = """
from celery import current_app
from only_one import only_one, fail

@only_one("k", when_busy=fail)
@current_app.task(name="loaded twice", shared=False)
def task(): ...
"""


@pytest.mark.parametrize("finalized", [False, True])
@pytest.mark.filterwarnings("ignore:.*already registered:Warning")
def test_a_module_that_is_loaded_twice(app: Any, redis: Redis, prefix: str, tmp_path: Path, finalized: bool) -> None:  # noqa: FBT001
    from celery._state import get_current_app  # noqa: PLC0415 - to be put back

    name = f"loaded_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    before = get_current_app()
    app.set_current()
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module(name)
        if finalized:
            app.finalize()
        again = importlib.reload(module)
        first = again.task.delay()
    finally:
        sys.path.remove(str(tmp_path))
        before.set_current()
    assert len(messages(redis, prefix)) == 1
    assert Holder.parse(redis.get(f"{prefix}k") or b"").task_id == first.id  # type: ignore[union-attr]


# --- trouble in the moment when it begins ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [fail, skip, carry_on])
def test_a_key_does_not_stay_queued_when_its_run_could_not_take_it(
    app: Any, server: RedisServer, prefix: str, policy: Any
) -> None:
    with Proxy(server.url) as proxy, Redis.from_url(server.url) as client, configure(redis=proxy.url):
        task = cover("k", when_down=policy)(a_task(app))
        task.delay()
        value: Any = client.get(f"{prefix}k")
        own = task.run.__only_one__
        call = call_from_outside(task, own)._replace(key=f"{prefix}k", queued=value)
        with proxy.refused():
            with pytest.raises(LockUnavailable) if policy is fail else nullcontext():
                run(own, call, (), {})
            assert client.get(f"{prefix}k") == value

        assert eventually(lambda: not client.exists(f"{prefix}k"))
