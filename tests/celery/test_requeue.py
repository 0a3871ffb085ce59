"""What is put back, and how: see `deliveries`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, current_task
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError
from redis import Redis

from only_one import configure, only_one, retry
from only_one.celery import requeue
from only_one.celery.requeue import Header, header_of
from only_one.lock import renewal
from tests.celery.deliveries import Queue, a_task, cover, done
from tests.proxy import Proxy


def raises(error: Exception) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_what_is_put_back_has_no_claim_to_a_key_any_more(app: Celery, queue: Queue, redis: Redis, prefix: str) -> None:
    """A token that is not the key's is compared in vain, by the worker that receives it and by the run: a trip each."""
    task = a_task(app, done, when_busy=retry())
    redis.set(f"{prefix}k", "somebody else's")
    answer = task.delay()
    message = queue.take()
    message["headers"].update(Header(answer.id, 0, key=f"{prefix}k", token="t").as_headers())  # noqa: S106
    queue.deliver(message)
    again = queue.take()["headers"]["only_one"]
    assert (again["key"], again["times"], again.get("token")) == (f"{prefix}k", 1, None)


def test_what_is_put_back_has_the_users_headers_and_none_in_which_the_broker_counts(
    app: Celery, queue: Queue, redis: Redis, prefix: str
) -> None:
    """RabbitMQ counts by queue how often a message died, and drops one that seems to go round in a circle."""
    a_task(app, done, when_busy=retry()).delay()
    redis.set(f"{prefix}k", "somebody else", ex=600)
    message = queue.take()
    counted = {"x-death": [{"count": 1}], "x-first-death-queue": "q", "x-last-death-queue": "q", "x-delivery-count": 2}
    message["headers"]["headers"] = {"x-mine": 1, **counted}
    queue.deliver(message)
    again = queue.take()["headers"]
    assert again["x-mine"] == 1
    assert not counted.keys() & again.keys()


def test_how_long_it_waits_when_it_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second that doubles to ten, of which half is left to chance."""
    for bound in (min, max):
        monkeypatch.setattr(requeue, "_random", SimpleNamespace(uniform=bound))
        part = bound(0.5, 1)
        delays = [requeue._delay(times, 1000) for times in (0, 1, 2, 3, 4, 5000)]
        assert delays == [each * part for each in (1, 2, 4, 8, 10, 10)]
        assert requeue._delay(5, 3) == 3 * part


def test_a_task_that_cannot_be_put_back_because_the_broker_is_away_fails(
    app: Celery, queue: Queue, redis: Redis, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = a_task(app, done, when_busy=retry())
    task.delay()
    redis.set(f"{prefix}k", "somebody else", ex=600)
    monkeypatch.setattr(app.amqp, "send_task_message", raises(OperationalError("the broker is away")))
    failure = queue.deliver(queue.take())
    assert isinstance(failure.exception, OperationalError)


def test_a_limit_of_times(app: Celery, queue: Queue, redis: Redis, prefix: str) -> None:
    answer = a_task(app, done, when_busy=retry(1000, max_retries=2)).delay()
    redis.set(f"{prefix}k", "somebody else", ex=600)
    message = first = queue.take()
    for _ in range(2):
        queue.deliver(message)
        message = queue.take()
        eta = datetime.fromisoformat(message["headers"]["eta"])
        assert 940 < (eta - datetime.now(timezone.utc)).total_seconds() <= 1000
        assert len(queue) == 0
        assert answer.state == "PENDING"
        assert "trigger" not in message["headers"]["only_one"]  # none takes the place of another
    queue.deliver(first, redelivered=True)
    assert len(queue) == 0, "a later message waits"
    redis.delete(f"{prefix}k")
    queue.deliver(first, redelivered=True)
    assert answer.state == "PENDING", "a later message waits"
    redis.set(f"{prefix}k", "somebody else", ex=600)
    queue.deliver(message)
    assert len(queue) == 0
    assert answer.state == "FAILURE"


@pytest.mark.parametrize("said", [None, False, True])
def test_whether_its_result_is_ignored_is_what_the_message_says_or_else_the_task(
    app: Celery,
    queue: Queue,
    redis: Redis,
    prefix: str,
    said: bool | None,  # noqa: FBT001 - a parameter of the test
) -> None:
    a_task(app, done, when_busy=retry(), celery={"ignore_result": True}).delay()
    redis.set(f"{prefix}k", "somebody else", ex=600)
    message = queue.take()
    del message["headers"]["ignore_result"]
    if said is not None:
        message["headers"]["ignore_result"] = said
    queue.deliver(message)
    assert queue.take()["headers"]["ignore_result"] is (said is not False)


def test_what_a_header_says_of_another_attempt() -> None:
    fields = {"id": "the-id", "attempt": 0, "replacement": 0, "times": 0, "number": 0}
    assert Header("the-id", 0).as_headers() == {"only_one": fields}
    said = Header("the-id", 0, times=3, key="k", token="t", trigger=7).as_headers()  # noqa: S106
    request = SimpleNamespace(id="the-id", retries=1, headers=said)
    assert header_of(request) == Header("the-id", 1, key="k", trigger=7)
    request.replaced_task_nesting = 1  # it may have other arguments, and so another key
    assert header_of(request) == Header("the-id", 1, replacement=1, trigger=7)
    del request.replaced_task_nesting
    for foreign in (None, {}, {"only_one": {"of": "somebody else"}}):
        request.headers = foreign
        assert header_of(request) == Header("the-id", 1)


def test_a_header_of_another_version_is_read() -> None:
    """Unknown fields are ignored, and those that the first version did not have may be missing."""
    said = {"id": "the-id", "attempt": 0, "times": 3, "number": 3, "of a later version": {"a": 1}}
    request = SimpleNamespace(id="the-id", retries=0, headers={"only_one": said})
    assert header_of(request) == Header("the-id", 0, times=3)


@pytest.mark.parametrize("is_above", [False, True], ids=["below", "above"])
@pytest.mark.parametrize("retries", [0, 1])
def test_a_task_is_not_lost_if_a_signal_handler_hands_on_all_headers(
    app: Celery, queue: Queue, redis: Redis, prefix: str, retries: int, *, is_above: bool
) -> None:
    """As code that traces tasks does: the headers of each delivery come in the place of those that are published."""

    def hand_on(headers: Any, **_: Any) -> None:
        if current_task:
            headers.update(current_task.request.headers or {})

    before_task_publish.connect(hand_on)
    options: Any = {"key": "k", "timeout": 600, "when_busy": retry(max_retries=5)}
    function = only_one(done, **options)
    said = {"name": f"task-{uuid4()}", "shared": False, "acks_late": True}
    task = only_one(app.task(function, **said), key="outer") if is_above else app.task(function, **said)
    sent = Header(str(uuid4()), 0, times=2).as_headers()["only_one"] if retries else None
    answer = task.apply_async(task_id=sent and sent["id"], retries=retries, headers={"only_one": sent} if sent else {})
    redis.set(f"{prefix}k", "somebody else", ex=600)
    first = queue.take()
    for message in (first, *(queue.take for _ in range(3))):
        queue.deliver(message() if callable(message) else message)
        queue.deliver(first, redelivered=True)
        assert len(queue) == 1
    redis.delete(f"{prefix}k")
    queue.deliver(queue.take())
    assert (answer.state, answer.result) == ("SUCCESS", "done")
    before_task_publish.disconnect(hand_on)


def test_what_is_put_back_while_the_server_is_down_keeps_the_key_of_its_place_in_the_queue(
    app: Celery, queue: Queue, redis: Redis, redis_url: str, prefix: str
) -> None:
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        task = cover(app.task(done, name=f"task-{uuid4()}", shared=False), key="k", timeout=600, when_down=retry())
        answer = task.delay()
        token = redis.get(f"{prefix}k")
        with proxy.refused():
            queue.deliver(queue.take())
            assert token not in renewal._renewer.pending_releases
        assert redis.get(f"{prefix}k") == token
        queue.deliver(queue.take())
    assert answer.get() == "done"
