"""The key of a queued task that another run has taken over: what the task has when that run is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, current_task
from celery.exceptions import Ignore
from celery.signals import task_revoked
from redis import Redis

from only_one import AlreadyRunning, fail
from only_one.clock import now
from only_one.connections.connection_pool import PinnedClient
from only_one.lock import commands
from rigs.waiting import eventually
from tests.celery.deliveries import Queue
from tests.celery.enqueueing import QUEUE_TIMEOUT, a_task, cover, lives_for

pytestmark = pytest.mark.usefixtures("redis", "finalizers")

LEFT = QUEUE_TIMEOUT / 2


class Tasks:
    """A task that waits in its queue, and a message with an id of its own, which comes first.

    Attributes:
        meanwhile: what the run of that message calls.
    """

    def __init__(self, app: Celery, queue: Queue, redis: Redis, key: str, **options: Any) -> None:
        self.meanwhile: Callable[[], Any] = lambda: None

        def run() -> None:
            self.meanwhile()

        self.task = a_task(app, "k", function=run, **options)
        app.finalize()
        self._queue, self._redis, self._key = queue, redis, key
        self.task.apply_async(task_id=f"{uuid4()}")
        self._other = queue.take()
        self.waits = self.task.delay()
        self._value = redis.get(key)
        redis.pexpire(key, round(LEFT * 1000))

    def run_other(self) -> Any:
        return self._queue.deliver(self._other)

    def are_as_before(self) -> bool:
        return self._redis.get(self._key) == self._value and self.task.delay() == self.waits


@pytest.fixture
def tasks(app: Celery, queue: Queue, redis: Redis, prefix: str) -> Callable[..., Tasks]:
    return lambda **options: Tasks(app, queue, redis, f"{prefix}k", **options)


def raises(error: BaseException) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def retry() -> None:
    task: Any = current_task
    raise task.retry(countdown=60)


async def work() -> str:
    return "done"


@pytest.mark.parametrize(
    "how", ["returns", "raises", "is ignored", "is retried", "of a function", "of an async function"]
)
def test_a_task_that_waits_has_its_key_again_after_another_run(tasks: Any, left: Any, how: str) -> None:
    two = tasks()
    ends: dict[str, Any] = {"raises": raises(ValueError()), "is ignored": raises(Ignore()), "is retried": retry}
    two.meanwhile = ends.get(how, two.meanwhile)
    if how == "of a function":
        assert cover(key="k")(lambda: "done")() == "done"
    elif how == "of an async function":
        assert asyncio.run(cover(key="k")(work)()) == "done"
    else:
        two.run_other()
    assert two.are_as_before()
    assert lives_for(LEFT, left("k"))


def test_a_task_that_a_worker_receives_at_that_moment_keeps_no_other_run_out(
    tasks: Any, redis: Redis, redis_url: str, prefix: str
) -> None:
    class Client(Redis):
        """Of which the first command is answered, and then a worker receives the task."""

        def execute_command(self, *args: Any, **options: Any) -> Any:
            reply = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
            if args[0] == "SET":
                redis.set(f"{prefix}k", received, keepttl=True)
            return reply

    tasks()
    queued: Any = redis.get(f"{prefix}k")
    received = queued.replace(b'"queued"', b'"received"')
    assert received != queued
    with Client.from_url(redis_url) as client:
        assert cover(key="k", redis=client)(lambda: "done")() == "done"
    assert redis.get(f"{prefix}k") == received


def test_a_dropped_redelivery_leaves_the_key_to_the_task_that_was_queued_meanwhile(
    app: Celery, queue: Queue, held: Any, left: Any, elsewhere: Any
) -> None:
    def deliver_again() -> None:
        runs.append("run")
        elsewhere(lambda: queue.deliver(message, redelivered=True))  # it waits for the run, and is published again

    runs: list[str] = []
    task = a_task(app, "k", function=deliver_again, celery={"acks_late": True})
    app.finalize()
    task.delay()
    message = queue.take()
    queue.deliver(message)
    redelivery = queue.take()
    waits = task.delay()
    queue.deliver(redelivery)
    assert runs == ["run"]
    assert held("k").task_id == waits.id
    assert task.delay() == waits
    assert lives_for(QUEUE_TIMEOUT, left("k"))


def test_at_the_end_of_its_time_the_key_is_free(tasks: Any, left: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    two = tasks()
    two.meanwhile = lambda: monkeypatch.setattr(commands, "now", lambda: now() + LEFT)
    two.run_other()
    assert left("k") == -2
    assert two.task.delay() != two.waits


def test_a_run_that_keeps_its_key_keeps_it(tasks: Any, held: Any) -> None:
    two = tasks(at_least=600)
    two.run_other()
    assert held("k").state == "kept"


@pytest.mark.parametrize("how", ["skipped", "failed", "revoked"])
def test_a_task_that_has_ended_meanwhile_has_no_key(
    tasks: Any, queue: Queue, redis: Redis, left: Any, elsewhere: Any, how: str
) -> None:
    two = tasks(when_busy=fail) if how == "failed" else tasks()
    message = queue.take()

    def revoke() -> None:
        headers = message["headers"]
        request = SimpleNamespace(**headers, headers=None, args=(), kwargs={})
        task_revoked.send(sender=two.task, request=request, terminated=False)
        assert eventually(lambda: redis.keys(f"*withdrawn:{headers['id']}:*"))

    def end() -> None:
        result = elsewhere(lambda: queue.deliver(message))
        assert isinstance(result, AlreadyRunning) if how == "failed" else result is None

    two.meanwhile = revoke if how == "revoked" else end
    two.run_other()
    assert left("k") == -2
    assert two.task.delay() != two.waits


def test_a_task_that_has_ended_and_could_not_say_so_has_no_key_soon(
    tasks: Any, queue: Queue, left: Any, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_while_cut_off() -> None:
        with monkeypatch.context() as cut:
            cut.setattr(PinnedClient, "execute_command", raises(ConnectionError()))
            elsewhere(lambda: queue.deliver(message))

    two, message = tasks(), queue.take()
    two.meanwhile = end_while_cut_off
    two.run_other()
    assert eventually(lambda: left("k") == -2)
    assert two.task.delay() != two.waits


def test_a_dropped_redelivery_does_not_withdraw_the_message_that_waits(
    tasks: Any, queue: Queue, redis: Redis, elsewhere: Any
) -> None:
    two, message = tasks(), queue.take()

    def deliver_twice() -> None:
        for _ in range(2):  # the first is published again, and waits
            elsewhere(lambda: queue.deliver(message, redelivered=True))

    two.meanwhile = deliver_twice
    two.run_other()
    assert len(queue) == 1
    assert not redis.keys("*withdrawn:*")
