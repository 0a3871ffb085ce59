"""Requeue: by which way a message returns. The key is held by somebody else until the test frees it.

What the message carries is in `tests/celery/test_requeue.py`, and what others in a canvas get in `test_canvas`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kombu.entity import Exchange

from rigs.waiting import LIMIT, eventually
from tests.documented import BROKERS, documented
from tests.live import app as live
from tests.live.brokers import KIND
from tests.live.workers import Scene, World

OTHER = "other"
"""A queue beside the usual one."""

TIMES = 4

DELAY = r"^[01.]*"
"""What is before the routing key where RabbitMQ itself sees to the delay."""


VISIBILITY = 0.9


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    queues = ",".join(["celery", OTHER, *live.EXCHANGES])
    with place.worker("-c", "4", "-Q", queues):
        yield


VALUE = {1: (2, b"x")}
"""Of which JSON would make another value."""
WAYS: dict[str, tuple[str, str]] = {
    "queue": ("", OTHER),
    "direct": ("directs", "direct"),
    "topic": ("topics", "topic.new"),
}


@pytest.mark.parametrize("kind", WAYS)
def test_a_requeued_task_returns_by_the_way_that_it_came(scene: Scene, kind: str) -> None:
    """Again and again, though it goes in a circle.

    RabbitMQ delays what goes through a topic exchange only; with Redis a child has to be told which one that is.
    """
    exchange, key = WAYS[kind]
    options: dict[str, Any] = {"serializer": "pickle", "priority": 7}
    if exchange:
        declare = [Exchange(exchange, type=kind)]  # type: ignore[no-untyped-call]
        options |= {"exchange": exchange, "routing_key": key, "declare": declare}
    else:
        options["queue"] = key
    scene.take()
    answer = live.requeued.apply_async((scene.key, "note the request", VALUE, 1), **options)
    assert eventually(lambda: scene.place.received(answer.id) > TIMES)
    assert not scene.place.notes("begin", scene.key)
    scene.free()
    assert answer.get(timeout=LIMIT) == 1
    request = json.loads(" ".join(scene.place.wait_for("request", scene.key).rest))
    came_by = request["delivery_info"]
    assert request["repr"] == repr((scene.key, "note the request", VALUE, 1))
    assert (re.sub(DELAY, "", came_by["routing_key"]), came_by["priority"]) == (key, 7)
    if exchange:
        assert came_by["exchange"] == exchange or came_by["exchange"].startswith("celery_delayed_")
    else:
        delayed_by = "its worker" if came_by["routing_key"] == key else "the broker, in whole seconds"
        assert delayed_by in documented("the delay of a requeue is kept by", BROKERS[KIND])


def test_a_broadcast_is_not_requeued(scene: Scene) -> None:
    """One worker runs it, and the other says why it does not: all would get it once more with each requeue."""
    workers = 2
    with ExitStack() as stack:
        for _ in range(workers):
            stack.enter_context(scene.place.worker("-Q", scene.key, BROADCAST=scene.key))
        if KIND == "redis":  # where a worker subscribes after it has said that it is ready
            channel = f"/0.{scene.key}/celery"
            assert eventually(lambda: scene.place.client.publish(channel, "no message of Celery's") == workers)
        declare = [Exchange(scene.key, type="fanout")]  # type: ignore[no-untyped-call]
        options = {"exchange": scene.key, "routing_key": "celery", "declare": declare}
        live.plain.apply_async((scene.key, "gate"), **options)
        assert "ConfigurationError" in documented("a `Broadcast` task that would be requeued", BROKERS[KIND])
        assert eventually(lambda: "cannot be requeued" in scene.place.log())
        scene.open(1)
        scene.place.wait_for("end", scene.key, 1)
        assert eventually(lambda: not (scene.place.broker.messages() or scene.keys()))  # before the workers are killed
        assert scene.runs() == ["0"]
