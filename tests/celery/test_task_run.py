"""Runs of a task's message as a worker's process sees to them: see `deliveries`."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.exceptions import Retry
from redis import Redis

from only_one import carry_on, configure, current_lock, retry
from only_one.celery import delivery
from only_one.celery.delivery import Delivery
from only_one.celery.requeue import Header
from only_one.holder import Holder
from tests.celery.deliveries import CLOSED, Awaits, Queue, a_task, cover, done, done_async, hash_of, token_of
from tests.proxy import Proxy


@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_retry_is_put_back_behind_the_attempt_before_it(
    app: Celery, queue: Queue, redis: Redis, prefix: str, how: str
) -> None:
    """Nothing waits in a worker."""
    task = a_task(app, done if how == "def" else done_async, celery={"base": Awaits})
    answer = task.apply_async(retries=1)
    redis.set(f"{prefix}k", token_of(answer.id), ex=600)
    queue.deliver(queue.take())
    assert len(queue) == 1
    assert answer.state == "PENDING"
    redis.delete(f"{prefix}k")
    queue.deliver(queue.take())
    assert answer.get() == "done"


def test_a_call_from_inside_of_its_own_run_is_no_copy_of_it(app: Celery, queue: Queue) -> None:
    """Both have one task id, and one attempt."""
    deeper: list[Any] = []

    def work() -> str:
        if not deeper:
            deeper.append("begun")
            deeper.append(task.run())
        return "done"

    task = a_task(app, work)
    task.delay()
    assert queue.deliver(queue.take()) == "done"
    assert deeper == ["begun", None]
    assert len(queue) == 0


def test_a_call_from_inside_of_the_run_of_a_bound_task_has_a_key_without_the_task(
    app: Celery, queue: Queue, prefix: str
) -> None:
    def work(self: Any, value: str) -> list[str]:  # noqa: ARG001 - the task
        return [current_lock().key, *(task.run("inner") if value == "outer" else ())]

    covered = cover(work, key=lambda value: f"k-{value}", timeout=600)
    task = app.task(covered, name=f"task-{uuid4()}", shared=False, bind=True)
    answer = task.delay("outer")
    queue.deliver(queue.take())
    assert answer.get() == [f"{prefix}k-outer", f"{prefix}k-inner"]


@pytest.mark.parametrize(
    ("state", "attempt", "retries", "outcome"),
    [
        ("kept", 1, 1, "dropped"),
        ("kept", 2, 1, "dropped"),
        ("kept", 0, 1, "put back"),
        ("running", 2, 1, "dropped"),
        ("queued", 2, 1, "dropped"),
        ("running", 1, 1, "put back"),
        ("queued", 0, 0, "run"),
        ("queued", None, 0, "run"),
        ("queued by another", 2, 1, "run"),
        ("running", None, 1, "put back"),  # by whomever: a retry is not skipped
    ],
)
def test_a_message_whose_key_is_its_own_tasks(
    app: Celery,
    queue: Queue,
    redis: Redis,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    state: str,
    attempt: int | None,
    retries: int,
    outcome: str,
) -> None:
    """What is out of date is dropped, and what is to be done is not skipped behind itself."""
    caplog.set_level(logging.INFO)
    runs = []

    def work() -> None:
        runs.append("begin")

    answer = a_task(app, work).apply_async(retries=retries)
    whose = "another" if state == "queued by another" else answer.id
    redis.set(f"{prefix}k", token_of(whose, state=state.split(maxsplit=1)[0], attempt=attempt), ex=600)
    queue.deliver(queue.take())
    assert (len(runs), len(queue)) == {"dropped": (0, 0), "put back": (0, 1), "run": (1, 0)}[outcome]
    assert answer.state == ("SUCCESS" if outcome == "run" else "PENDING")
    dropped = [vars(record)["only_one_key"] for record in caplog.records if "it is out of date" in record.getMessage()]
    assert dropped == [f"{prefix}k"] * (outcome == "dropped")


@pytest.mark.parametrize("how", ["not raised", "swallowed"])
def test_a_retry_waits_for_the_key_that_its_previous_attempt_keeps(
    app: Celery, queue: Queue, redis: Redis, prefix: str, how: str
) -> None:
    def work(self: Any) -> str:
        if not self.request.retries:
            with suppress(Retry):
                self.retry(countdown=0, throw=how == "swallowed")
        return f"attempt {self.request.retries}"

    answer = a_task(app, work, at_least=600, celery={"bind": True}).delay()
    for _ in range(2):
        queue.deliver(queue.take())
        assert len(queue) == 1
    redis.delete(f"{prefix}k")
    assert queue.deliver(queue.take()) == "attempt 1"
    assert answer.state == "SUCCESS"


def two_decorators(app: Celery, function: Any, inner_key: Any, *, is_above: bool, **options: Any) -> Any:
    """A task with a lock of its own, key "k", and another around it."""
    said = {"name": f"task-{uuid4()}", "shared": False, "acks_late": True}
    inner = cover(function, key=inner_key, timeout=600, **options)
    if is_above:
        return cover(app.task(inner, **said), key="outer", timeout=600)
    return app.task(cover(inner, key="outer", timeout=600, **options), **said)


@pytest.mark.parametrize("is_above", [False, True], ids=["both below", "above and below"])
@pytest.mark.parametrize(
    ("how", "outcome"),
    [("retry()", "put back"), ("a retry", "put back"), ("chain", "failed"), ("plain", "skipped")],
)
def test_of_two_decorators_the_inner_one_waits_as_one_does(
    app: Celery, queue: Queue, redis: Redis, prefix: str, how: str, outcome: str, *, is_above: bool
) -> None:
    options = {"when_busy": retry()} if how == "retry()" else {}
    task = two_decorators(app, done, "k", is_above=is_above, **options)
    chained = {"chain": [dict(task.si().set(task_id=str(uuid4())))]}
    redis.set(f"{prefix}k", "somebody else", ex=600)
    answer = task.apply_async(retries=int(how == "a retry"), **chained if how == "chain" else {})
    message = queue.take()
    queue.deliver(message)
    assert answer.state == {"skipped": "SUCCESS", "put back": "PENDING", "failed": "FAILURE"}[outcome]
    assert len(queue) == (outcome == "put back")
    assert redis.exists(f"{prefix}outer") == (is_above and outcome == "put back"), "unique while it waits"
    redis.delete(f"{prefix}k")
    if outcome == "put back":
        queue.deliver(message, redelivered=True)
        queue.deliver(queue.take())
        assert (answer.state, answer.result) == ("SUCCESS", "done")
        assert len(queue) == 0
    assert not redis.exists(f"{prefix}outer")


@pytest.mark.parametrize("is_above", [False, True], ids=["both below", "above and below"])
def test_of_two_decorators_each_tells_redeliveries_of_the_end(
    app: Celery, queue: Queue, redis: Redis, prefix: str, elsewhere: Any, *, is_above: bool
) -> None:
    def work() -> None:
        runs.append("begin")
        elsewhere(lambda: queue.deliver(message, redelivered=True))
        redis.hset(f"{{{prefix}k}}:copy:{answer.id}:0", "asked", 1)

    runs: list[str] = []
    answer = two_decorators(app, work, "k", is_above=is_above).delay()
    message = queue.take()
    queue.deliver(message)
    assert [redis.hget(f"{{{prefix}{key}}}:copy:{answer.id}:0", "stored") for key in ("k", "outer")] == [b"1", b"1"]
    queue.deliver(queue.take())
    assert runs == ["begin"]
    assert len(queue) == 0


def test_a_second_call_after_its_own_run_has_ended_waits_as_the_first(
    app: Celery, queue: Queue, redis: Redis, prefix: str
) -> None:
    class Twice(Task):  # type: ignore[misc]  # Celery has no types
        abstract = True

        def __call__(self) -> None:
            self.run()
            redis.set(f"{prefix}k", "somebody else", ex=600)
            self.run()

    a_task(app, done, when_busy=retry(), celery={"base": Twice}).delay()
    queue.deliver(queue.take())
    assert len(queue) == 1


def test_of_two_decorators_with_one_key_the_inner_one_is_busy_like_any_other(app: Celery, queue: Queue) -> None:
    """The message does not wait for ever for a key that it holds itself."""
    answer = two_decorators(app, done, lambda: "outer", is_above=False).apply_async(retries=1)
    queue.deliver(queue.take())
    assert (answer.state, answer.result) == ("SUCCESS", None)
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("plain", "skipped"),
        ("redelivered", "put back"),
        ("redelivered, and has waited", "put back"),
        ("new, and has waited", "skipped"),
        ("chain", "failed"),
        ("chord", "failed"),
    ],
)
def test_behind_another_without_a_policy(
    app: Celery, queue: Queue, redis: Redis, prefix: str, how: str, outcome: str
) -> None:
    task = a_task(app, done)
    redis.set(f"{prefix}k", "somebody else", ex=600)
    after = {"chain": [dict(task.si().set(task_id=str(uuid4())))], "chord": dict(task.si())}
    answer = task.apply_async(**{how: after[how]} if how in after else {})
    message = queue.take()
    if "has waited" in how:
        header = Header(answer.id, 0, times=1, lineage=None if "redelivered" in how else "of its first message")
        message["headers"] |= header.as_headers()
    queue.deliver(message, redelivered=how == "redelivered")
    assert answer.state == {"skipped": "SUCCESS", "put back": "PENDING", "failed": "FAILURE"}[outcome]
    assert len(queue) == (outcome == "put back")


def test_what_stays_under_the_key_for_a_retry(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent again as it is, for as long as it is waited for."""

    def stays(
        said: Any = None, ended_by: Any = None, when: Any = None, *, seconds: float = 0.5,
        is_unique_in_queue: bool = True, **request: Any,
    ) -> Any:  # fmt: skip
        told = {"id": "the-id", "retries": 4, "args": ["a"], "kwargs": {"b": 1}, "expires": None, "delivery_info": None}
        of_task: Any = SimpleNamespace(headers=None, **{**told, **request})
        decoration: Any = SimpleNamespace(task=task if is_unique_in_queue else None)
        delivered = Delivery(task, of_task, bound=False, decoration=decoration)
        sig = task.s("a", b=1) if said is None else said
        plan: Any = SimpleNamespace(queue_timeout=seconds)
        stored = delivered.retained_value(plan, "k", ended_by or Retry(when=when, sig=sig))
        return stored and (stored[0], stored[1] - 1000)

    monkeypatch.setattr(delivery, "now", lambda: 1000)
    task = app.task(done, name=f"task-{uuid4()}", shared=False)
    token, left = stays()
    holder = Holder.parse(token)
    assert holder is not None
    assert (holder.name, holder.task_id, holder.attempt, holder.state) == (task.name, "the-id", 5, "queued")
    assert json.loads(token)["limit"] == 500
    assert left == 0.5
    assert stays(seconds=0) is None
    assert stays(when=3)[1] == 3.5
    assert stays(expires=-1) is None
    assert stays(expires=7)[1] == 7
    assert stays(is_unique_in_queue=False) is None
    for other in (task.s("b", b=1), task.s("a", b=2), task.s("a")):
        assert stays(other) is None
    for error in (KeyboardInterrupt(), ValueError(), Retry()):  # of which a task that raises the last has sent nothing
        assert stays(ended_by=error) is None


@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_key_from_queued_to_finished_over_a_retry(
    app: Celery, queue: Queue, redis: Redis, redis_url: str, prefix: str, elsewhere: Any, how: str
) -> None:
    """And a copy of the first attempt's message, which is told of its end."""

    def holder() -> Any:
        return Holder.parse(redis.get(f"{prefix}k") or b"")

    def work(self: Any) -> str:
        states.append(holder().state)
        if self.request.retries:
            return "done"
        elsewhere(lambda: queue.deliver(message, redelivered=True))
        raise self.retry(countdown=0)

    async def work_async(self: Any) -> str:
        return work(self)

    states: list[str] = []
    options: Any = {"name": f"task-{uuid4()}", "shared": False, "acks_late": True, "bind": True}
    made = app.task(work, **options) if how == "def" else app.task(work_async, base=Awaits, **options)
    task = cover(made, key="k", timeout=600)
    answer = task.delay()
    assert (holder().task_id, holder().state) == (answer.id, "queued")
    message = queue.take()
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        queue.deliver(message)
        assert proxy.commands[0] == "EVAL"  # it knows by what value it was queued
    assert (holder().task_id, holder().attempt, holder().state) == (answer.id, 1, "queued")
    assert b"ended" in hash_of(redis, prefix, answer.id)
    copy, again = queue.take(), queue.take()
    queue.deliver(again)
    assert answer.get() == "done"
    assert not redis.exists(f"{prefix}k")
    queue.deliver(copy)
    assert states == ["running", "running"]
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("state", "attempt", "is_its_own", "retries", "key"),
    [
        ("queued", 1, True, 1, "k-1"),
        ("queued", 1, False, 1, "k-1"),
        ("running", 0, True, 1, "k-1"),
        ("queued", 0, True, 0, "kept"),
        ("queued", 0, False, 0, "kept"),
    ],
)
def test_a_first_attempt_has_the_key_that_came_with_its_message(
    app: Celery,
    queue: Queue,
    redis: Redis,
    prefix: str,
    state: str,
    attempt: int,
    is_its_own: bool,  # noqa: FBT001 - a parameter of the test
    retries: int,
    key: str,
) -> None:
    """A retry has that of its arguments, which may be others by now."""

    def work(value: int) -> tuple[int, str]:
        return value, current_lock().key

    task = cover("k-{value}")(app.task(work, name=f"task-{uuid4()}", shared=False))
    answer = task.delay(1)
    redis.delete(f"{prefix}k-1")
    message = queue.take()
    value = token_of(answer.id if is_its_own else "another", state=state, attempt=attempt)
    message["headers"]["retries"] = retries
    message["headers"]["only_one"].update(key=f"{prefix}kept", attempt=retries, token=value.decode())
    redis.set(f"{prefix}kept", value, ex=600)
    queue.deliver(message)
    assert answer.get() == [1, f"{prefix}{key}"]
    assert redis.exists(f"{prefix}kept") == (key != "kept")


@pytest.mark.parametrize(
    ("settings", "key"), [({"redis": CLOSED}, "k-1"), ({"active": False}, "k-1")], ids=["down", "switched off"]
)
def test_a_retry_has_the_key_of_its_arguments_where_no_server_answers(
    app: Celery, queue: Queue, prefix: str, settings: Any, key: str
) -> None:
    def work(value: int) -> tuple[int, str]:
        return value, current_lock().key

    task = cover("k-{value}", when_down=carry_on)(app.task(work, name=f"task-{uuid4()}", shared=False))
    answer = task.delay(1)
    message = queue.take()
    message["headers"]["retries"] = 1
    message["headers"]["only_one"].update(key=f"{prefix}kept")
    with configure(**settings):
        queue.deliver(message)
    assert answer.get() == [1, f"{prefix}{key}"]


def test_a_key_in_a_message_is_none_for_a_task_whose_run_is_covered(app: Celery, queue: Queue, prefix: str) -> None:
    """It was covered in its queue when it was sent, and is not any more."""

    def work() -> str:
        return current_lock().key

    task = a_task(app, work)
    sent = Header(str(uuid4()), 0, key=f"{prefix}other", token="queued")  # noqa: S106 - of a lock
    answer = task.apply_async(task_id=sent.id, headers=sent.as_headers())
    queue.deliver(queue.take())
    assert answer.get() == f"{prefix}k"
