"""Requeue: how many messages it makes, and what they carry.

The key is held by somebody else until the test frees it. What others in a canvas get is in `test_canvas`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
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


def requeue(scene: Scene, *orders: Any, times: int = 2, **options: Any) -> Any:
    """Send a task that finds its key held, and free the key when it was requeued so many times."""
    scene.take()
    answer = live.requeued.apply_async((scene.key, *orders), **options)
    assert eventually(lambda: scene.place.received(answer.id) > times)
    assert not scene.place.notes("begin", scene.key)
    scene.free()
    return answer


VALUE = {1: (2, b"x")}
"""Of which JSON would make another value."""
OPTIONS: dict[str, Any] = {
    "serializer": "pickle",
    "compression": "gzip",
    "headers": {"custom": "yes"},
    "priority": 7,
    "expires": datetime.now(timezone.utc) + timedelta(seconds=10 * LIMIT),
    "shadow": "a shadow",
    "time_limit": 1000,
    "soft_time_limit": 900,
    "reply_to": "somebody",
    "argsrepr": "hidden",
    "kwargsrepr": "hidden",
    "root_id": "a root",
    "parent_id": "a parent",
    "link": live.hear.s("linked"),
    "link_error": live.hear_of_trouble.s("linked"),
}
OWN = {"id", "correlation_id", "args", "repr", "eta", "hostname"}
"""What differs from one message to the next, or from one run to the next."""
LOOKED_INTO = {"headers", "delivery_info", "properties"}
"""Of these a part does."""


def request_of(scene: Scene) -> dict[str, Any]:
    """What a run was told of its message."""
    found: dict[str, Any] = json.loads(" ".join(scene.place.wait_for("request", scene.key).rest))
    return found


def kept_in(request: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in a message that is requeued."""
    names = {name for name in request.keys() - OWN - LOOKED_INTO if not name.startswith(("x-", "only_one"))}
    properties, came_by = request["properties"], request["delivery_info"]
    kept = {name: request[name] for name in names} | {"custom": request["headers"]["custom"]}
    kept |= {name: properties.get(name) for name in ("reply_to", "priority", "delivery_mode", "body_encoding")}
    return kept | {"by": re.sub(DELAY, "", came_by["routing_key"]), "before others": came_by["priority"]}


def test_a_requeued_message_carries_all_that_it_came_with(scene: Scene) -> None:
    plain = Scene(scene.place)
    assert live.requeued.apply_async((plain.key, "note the request", VALUE, 1), **OPTIONS).get(timeout=LIMIT) == 1
    answer = requeue(scene, "note the request", VALUE, 1, **OPTIONS)
    assert answer.get(timeout=LIMIT) == 1
    assert eventually(lambda: scene.place.witness.lines("heard", "linked") == [["1"], ["1"]])  # once each
    before, after = request_of(plain), request_of(scene)
    assert kept_in(after) == kept_in(before)
    assert before["expires"] is not None
    assert after["id"] == after["correlation_id"] == answer.id
    # RabbitMQ takes it away from what it delays; the worker looks at `expires`.
    assert int(after["properties"].get("expiration", 0)) < int(before["properties"]["expiration"])
    assert re.fullmatch(r"only_one:\d+", after["properties"]["message_id"])  # the broker keeps it
    assert after["repr"] == repr((scene.key, "note the request", VALUE, 1))


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
    options: dict[str, Any] = {"queue": key}
    if exchange:
        declare = [Exchange(exchange, type=kind)]  # type: ignore[no-untyped-call]
        options = {"exchange": exchange, "routing_key": key, "declare": declare}
    assert requeue(scene, "note the request", 1, times=TIMES, **options).get(timeout=LIMIT) == 1
    came_by = request_of(scene)["delivery_info"]
    assert re.sub(DELAY, "", came_by["routing_key"]) == key
    if exchange:
        assert came_by["exchange"] == exchange or came_by["exchange"].startswith("celery_delayed_")
    else:
        delayed_by = "its worker" if came_by["routing_key"] == key else "the broker, in whole seconds"
        assert delayed_by in documented("the delay of a requeue is kept by", BROKERS[KIND])


@pytest.mark.skipif(KIND == "redis", reason="a worker's own queue of a fanout exchange is no list there")
def test_a_requeued_broadcast_goes_to_the_worker_that_has_requeued_it(scene: Scene) -> None:
    """Each worker runs it once, one after the other: all would get it once more with each requeue, for ever."""
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(scene.place.worker("-Q", scene.key, BROADCAST=scene.key))
        answer = live.plain.apply_async((scene.key, "gate"), exchange=scene.key, routing_key="any")
        assert eventually(lambda: scene.place.received(answer.id) > 2)
        scene.open(2)
        scene.place.wait_for("end", scene.key, 2)
        assert eventually(lambda: not scene.place.broker.messages())
        assert scene.runs() == ["0", "0"]
