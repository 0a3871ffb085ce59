"""How a message is requeued, and what it carries: see `deliveries`."""

from __future__ import annotations

import json
import pickle
import zlib
from base64 import b64decode
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from celery import Task, current_task
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError

from only_one import retry
from only_one.celery import delivery, requeue
from only_one.celery.requeue import Header, header_of
from only_one.lock import renewal
from rigs.proxy import Proxy
from tests.celery.deliveries import Keys, Queue, a_task, above_and_below, done, unique, work
from tests.interruptions import raises

# RabbitMQ counts by queue how often a message died, and drops one that seems to go round in a circle.
COUNTED = {"x-death": [{"count": 1}], "x-first-death-queue": "q", "x-last-death-queue": "q", "x-delivery-count": 2}


OPTIONS: dict[str, Any] = {
    "args": [1],
    "headers": {"x-mine": 1},
    "expires": datetime.now(timezone.utc) + timedelta(hours=1),
    "shadow": "a shadow",
    "time_limit": 1000,
    "soft_time_limit": 900,
    "reply_to": "somebody",
    "argsrepr": "hidden",
    "kwargsrepr": "hidden, too",
    "root_id": "a root",
    "parent_id": "a parent",
}


@pytest.mark.parametrize("ignores", [None, False, True])
def test_what_a_requeued_message_carries(queue: Queue, keys: Keys, *, ignores: bool | None) -> None:
    """What it came with, whether the message or else the task ignores its result; and no claim to a key any more.

    A token that is not the key's would be compared in vain, by the worker that receives it and by the run: a trip each.
    """
    task = a_task(queue.app, work, when_busy=retry(), celery={"ignore_result": True})
    others = {"link": task.s(), "link_error": task.si(), "chain": [dict(task.si())]}
    answer = task.apply_async(**OPTIONS, **others, **({} if ignores is None else {"ignore_result": ignores}))
    message = queue.take()
    headers = message["headers"]
    headers["compression"] = "application/x-gzip"  # of which only the requeued one is
    came_with = {**headers, "eta": None, "ignore_result": ignores is not False}
    if ignores is None:
        del headers["ignore_result"]
    headers |= COUNTED | Header(answer.id, 0, key=f"{keys.prefix}k", token="t").as_headers()  # noqa: S106
    asked = SimpleNamespace(request_dict=message, content_type="application/x-python-serialize")
    requeue.keep_content_type(asked)
    with keys.busy():
        queue.deliver(message)
    requeued = queue.take()
    assert requeued["content-type"] == asked.content_type
    args, *more = pickle.loads(zlib.decompress(b64decode(requeued["body"])))  # noqa: S301
    assert [[*args], *more] == json.loads(b64decode(message["body"]))
    ours = requeued["headers"].pop("only_one")
    assert (ours["key"], ours["times"], ours.get("token")) == (f"{keys.prefix}k", 1, None)
    assert {**requeued["headers"], "eta": None} == came_with
    before, after = message["properties"], requeued["properties"]
    for name in ("correlation_id", "reply_to", "delivery_mode", "body_encoding"):
        assert after[name] == before[name]
    assert int(after["expiration"]) <= int(before["expiration"])
    assert after["message_id"] == "only_one:1"


def test_how_long_a_requeued_message_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second that doubles to ten, of which half is left to chance."""
    for bound in (min, max):
        monkeypatch.setattr(requeue, "_random", SimpleNamespace(uniform=bound))
        part = bound(0.5, 1)
        delays = [requeue._delay(times, 1000) for times in (0, 1, 2, 3, 4, 5000)]
        assert delays == [each * part for each in (1, 2, 4, 8, 10, 10)]
        assert requeue._delay(5, 3) == 3 * part


@pytest.mark.parametrize(("way_back", "countdown"), [("", 0.2), ("declare", 0.2), ("queue", 1)])
def test_the_wait_is_whole_seconds_only_where_rabbitmq_may_keep_it(
    queue: Queue, keys: Keys, monkeypatch: pytest.MonkeyPatch, way_back: str, countdown: float
) -> None:
    """Celery puts them into a routing key of RabbitMQ's; a message for a topic exchange of Redis waits in a worker."""
    task = a_task(queue.app, done, when_busy=retry(0.2))
    task.delay()
    published = Mock(wraps=task.signature_from_request)
    monkeypatch.setattr(task, "signature_from_request", published)
    ways = {"": {}, "declare": {"declare": []}, "queue": {"queue": queue.app.conf.task_default_queue}}
    monkeypatch.setattr(requeue, "way_back", lambda _, came_by: ways[way_back] if came_by else {})
    with keys.busy():
        queue.deliver()
    given = published.call_args.kwargs
    assert given == {**given, **ways[way_back], "countdown": countdown}


def test_a_task_fails_if_the_broker_cannot_requeue_it(
    queue: Queue, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is away."""
    a_task(queue.app, done, when_busy=retry()).delay()
    monkeypatch.setattr(queue.app.amqp, "send_task_message", raises(OperationalError("the broker is away")))
    with keys.busy():
        assert isinstance(queue.deliver().exception, OperationalError)


def seconds_until(message: Any) -> float:
    """For how many seconds a message waits."""
    eta = datetime.fromisoformat(message["headers"]["eta"])
    return (eta - datetime.now(timezone.utc)).total_seconds()


class DropsDuplicates(Task):  # type: ignore[misc]
    """Publishes what is new, as celery-once's and celery-singleton's: a task that runs holds a lock of theirs."""

    abstract = True
    is_new = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        is_new, self.is_new = self.is_new, False
        parent: Any = super()
        return parent.apply_async(*args, **options) if is_new else None


def hand_on(headers: Any, **_: Any) -> None:
    """As code that traces tasks does: the headers of each delivery come in the place of those that are published."""
    if current_task:
        headers.update(current_task.request.headers or {})


@pytest.mark.parametrize("make", [a_task, above_and_below])
@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("how", ["plain", "its base drops duplicates", "a signal handler hands on all headers"])
def test_a_message_is_requeued_up_to_a_limit_of_times(
    queue: Queue, keys: Keys, how: str, retries: int, make: Any
) -> None:
    """Whatever others make of it; and its first message is dropped when it is delivered again."""
    base = {"base": DropsDuplicates if "base" in how else Task}
    task = make(queue.app, done, when_busy=retry(1000, max_retries=4), celery=base)
    if "handler" in how:
        before_task_publish.connect(hand_on)
    sent = Header(str(uuid4()), 0, times=2)  # of the previous attempt
    answer = task.apply_async(
        retries=retries, **({"task_id": sent.id, "headers": sent.as_headers()} if retries else {})
    )
    first = message = queue.take()
    with keys.busy():
        for _ in range(4):
            queue.deliver(message)
            queue.deliver(first, redelivered=True)
            (message,) = queue.messages()
            queue.take()
            assert 940 < seconds_until(message) <= 1000
            assert "trigger" not in message["headers"]["only_one"]  # none takes the place of another
    queue.deliver(first, redelivered=True)
    assert answer.state == "PENDING", "a later message waits"
    with keys.busy():
        failed = queue.deliver(message)
    assert (len(queue), answer.state) == (0, "FAILURE")
    assert "During handling" not in failed.traceback, "the error does not show our RequeueRequest"
    before_task_publish.disconnect(hand_on)


# Headers


def request_of(headers: Any, retries: int = 0, **more: Any) -> Any:
    return SimpleNamespace(id="the-id", retries=retries, headers=headers, **more)


OWN = Header("the-id", 0, times=3, key="k", token="t", trigger=7)  # noqa: S106
FULL = OWN.as_headers()
OF_ANOTHER_VERSION = {"only_one": {"id": "the-id", "attempt": 0, "times": 3, "number": 3, "later": {"a": 1}}}
HEADERS: dict[str, tuple[Any, Header]] = {
    "its own": (request_of(FULL), OWN),
    "beside": (request_of({"sentry-trace": "x"}, **FULL), OWN),
    # Or another id was given to it, after its key was acquired.
    "copied from another task": (request_of(OWN._replace(id="another").as_headers()), Header("the-id", 0, token="t")),  # noqa: S106
    "of another version": (request_of(OF_ANOTHER_VERSION), Header("the-id", 0, times=3)),
    "of the previous attempt": (request_of(FULL, 1), Header("the-id", 1, key="k", trigger=7)),
    # A replacement may have other arguments, and so another key.
    "replaced": (request_of(FULL, 1, replaced_task_nesting=1), Header("the-id", 1, replacement=1, trigger=7)),
    "none": (request_of(None), Header("the-id", 0)),
    "of others": (request_of({"only_one": {"of": "somebody else"}}), Header("the-id", 0)),
    "numbered by others": (request_of(None, properties={"message_id": "other:3"}), Header("the-id", 0)),
}


@pytest.mark.parametrize(("request_", "header"), HEADERS.values(), ids=HEADERS)
def test_what_a_header_says_of_a_message(request_: Any, header: Header) -> None:
    assert header_of(request_) == header
    fields = {"id": "the-id", "attempt": 0, "replacement": 0, "times": 0}
    assert Header("the-id", 0).as_headers() == {"only_one": fields}


def test_a_task_that_is_requeued_while_the_server_is_down_keeps_its_key(
    queue: Queue, keys: Keys, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the server is not asked for the marker: that command would wait as long as the one that found it down."""
    answer = unique(queue.app, "k", function=done, timeout=600, when_down=retry(1000)).delay()
    token = keys["k"]
    with way.refused(), monkeypatch.context() as patch:
        patch.setattr(delivery, "drive", asked := Mock())
        queue.deliver()
        assert not asked.called
        assert token not in renewal._renewer.pending_releases
    assert keys["k"] == token
    (message,) = queue.messages()
    assert (message["headers"]["only_one"]["times"], 940 < seconds_until(message) <= 1000) == (1, True)
    queue.deliver()
    assert answer.get() == "done"
