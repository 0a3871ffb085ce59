"""The errors of only_one come out of `result.get()` as they were raised in the worker, whatever the serializer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import group

from only_one import AlreadyRunning, LockLost, LockUnavailable
from only_one.holder import Holder
from only_one.testing import redis_server
from rigs.waiting import LIMIT, eventually
from tests.live import errors_app as live
from tests.live.workers import Witness, celery_worker, environment, sender


class Shop:
    """A worker, and its server."""

    def __init__(self, client: Any, witness: Witness, tasks: Any) -> None:
        self.tasks = tasks
        self.client = client
        self.witness = witness

    def delay(self, task: str, key: str) -> Any:
        """The result of a task that is sent."""
        return self.tasks[task].delay(key)

    def begun(self, task: str, key: str) -> Any:
        """The result of a task that has begun to run."""
        before = len(self.witness.lines("begin"))
        answer = self.delay(task, key)
        assert eventually(lambda: len(self.witness.lines("begin")) > before)
        return answer


@pytest.fixture(scope="module", params=["json", "pickle"])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("errors")
    witness = Witness(folder / "witness")
    app = live.APPS[request.param]
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        # A container's tests may run as root; all that is unpickled here is sent by this test on its own server.
        env = environment(server.url, witness.path, LIVE_SERIALIZER=request.param, C_FORCE_ROOT="1")
        with sender(app, server.url), celery_worker("tests.live.errors_app", folder / "log", env):
            yield Shop(client, witness, app.tasks)
            assert not list(client.scan_iter("live:*"))


@pytest.fixture
def key() -> str:
    """One that a serializer could spoil."""
    return f'gâteau "{uuid4()}" \\ \n\u2028'


def raised_by(answer: Any, kind: type[Exception]) -> Any:
    with pytest.raises(kind) as raised:
        answer.get(timeout=LIMIT)
    assert type(raised.value) is kind
    assert answer.state == "FAILURE"
    assert str(raised.value)
    return raised.value


@pytest.mark.parametrize("task", ["busy", "limited"], ids=["fail", "retry at its limit"])
def test_already_running(shop: Shop, key: str, task: str) -> None:
    running = shop.begun("busy", key)
    error = raised_by(shop.delay(task, key), AlreadyRunning)
    assert error.key == f"live:{key}"
    assert error.task_id == running.id
    holder = error.holder
    assert isinstance(holder, Holder)
    assert holder == Holder.parse(shop.client.get(f"live:{key}"))
    assert (holder.name, holder.task_id, holder.attempt, holder.state) == ("busy", running.id, 0, "running")
    assert running.id in str(error)

    shop.client.rpush(f"gate-{key}", "open")
    assert running.get(timeout=LIMIT) == "done"


def test_already_running_in_a_group(shop: Shop, key: str) -> None:
    running = shop.begun("busy", key)
    answers = group([shop.tasks["busy"].s(key)] * 2).delay()
    with pytest.raises(AlreadyRunning) as raised:
        answers.get(timeout=LIMIT)
    assert (raised.value.key, raised.value.task_id) == (f"live:{key}", running.id)
    assert eventually(answers.ready)  # or the other one would find the key free
    shop.client.rpush(f"gate-{key}", "open")
    assert running.get(timeout=LIMIT) == "done"


@pytest.mark.parametrize("value", ["not a holder", b"\xff\x00\xfe", "é" * 1000])
def test_already_running_where_the_value_is_not_a_holder(shop: Shop, key: str, value: Any) -> None:
    shop.client.set(f"live:{key}", value)
    error = raised_by(shop.delay("busy", key), AlreadyRunning)
    assert (error.key, error.holder, error.task_id) == (f"live:{key}", None, None)
    shop.client.delete(f"live:{key}")


@pytest.mark.parametrize("task", ["lost", "ensured"], ids=["when_lost=fail", "ensure_held"])
def test_lock_lost_to_another(shop: Shop, key: str, task: str) -> None:
    other = shop.begun("busy", f"other {key}")
    answer = shop.begun(task, key)
    assert eventually(lambda: shop.client.exists(f"live:{key}"))
    shop.client.set(f"live:{key}", shop.client.get(f"live:other {key}"))
    error = raised_by(answer, LockLost)
    assert (error.key, error.reason) == (f"live:{key}", "taken")
    assert isinstance(error.holder, Holder)
    assert error.holder.task_id == other.id
    shop.client.delete(f"live:{key}")
    shop.client.rpush(f"gate-other {key}", "open")
    assert other.get(timeout=LIMIT) == "done"


@pytest.mark.parametrize("task", ["lost", "ensured"], ids=["when_lost=fail", "ensure_held"])
def test_lock_lost_because_it_was_deleted(shop: Shop, key: str, task: str) -> None:
    answer = shop.begun(task, key)
    assert shop.client.delete(f"live:{key}")
    error = raised_by(answer, LockLost)
    assert (error.key, error.reason, error.holder) == (f"live:{key}", "deleted", None)


def test_lock_unavailable(shop: Shop, key: str) -> None:
    error = raised_by(shop.delay("down", key), LockUnavailable)
    assert error.key == f"live:{key}"
    assert "ConnectionError" in error.problem
    assert "Connection refused" in str(error)
