"""Requeue: how many messages it makes, and what they carry.

The key is held by somebody else until the test frees it. What others in a canvas get is in `test_canvas`.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import chord

from rigs.waiting import LIMIT, eventually
from tests.documented import BROKERS, documented
from tests.live import app as live
from tests.live.brokers import KIND, options_for_redis
from tests.live.workers import SETTINGS, Scene, World

VISIBILITY = 3.0
"""Seconds after which the broker delivers again, where that is measured."""
LONGEST = VISIBILITY / 3
"""Seconds for which a message waits after a requeue at the most."""

OTHER = "other"
"""A queue beside the usual one."""

WINDOW, WINDOWS = 10.0, 6
WAITING = 20
REDELIVERIES = 5
TIMES = 4

DELAY = r"^[01.]*"
"""What is before the routing key where RabbitMQ itself sees to the delay."""


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    options = options_for_redis(visibility_timeout=0.9, unacked_restore_limit=0)
    return {"broker_transport_options": options, "accept_content": ["json", "pickle"]}


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    # Celery does not begin as root where it accepts pickle, unless it is told to.
    with place.worker("-c", "4", "-Q", f"celery,{OTHER},{live.DIRECT}", C_FORCE_ROOT="1", **{live.DIRECT: "yes"}):
        yield


def requeue(scene: Scene, *orders: Any, times: int = 2, **options: Any) -> Any:
    """Send a task that finds its key held, and free the key when it was requeued so many times."""
    scene.take()
    answer = live.requeued.apply_async((scene.key, *orders), **options)
    assert eventually(lambda: scene.place.received(answer.id) > times)
    assert not scene.place.notes("begin", scene.key)
    scene.free()
    return answer


OPTIONS: dict[str, Any] = {
    "headers": {"custom": "yes"},
    "priority": 7,
    "expires": datetime.now(timezone.utc) + timedelta(seconds=10 * LIMIT),
    "shadow": "a shadow",
    "time_limit": 1000,
    "soft_time_limit": 900,
    "reply_to": "somebody",
    "root_id": "a root",
    "parent_id": "a parent",
    "link": live.hear.s("linked"),
    "link_error": live.hear_of_trouble.s("linked"),
}
OWN = {
    "id",
    "correlation_id",
    "args",
    "argsrepr",
    "repr",
    "eta",
    "headers",
    "hostname",
    "delivery_info",
    "properties",
    "only_one_under_way",
}
"""What differs from one message to the next, or from one run to the next; of some of these it is looked at below what
must not.
"""


def request_of(scene: Scene) -> dict[str, Any]:
    """What a run was told of its message."""
    found: dict[str, Any] = json.loads(" ".join(scene.place.wait_for("request", scene.key).rest))
    return found


def test_a_requeued_message_carries_all_that_it_came_with(scene: Scene) -> None:
    plain = Scene(scene.place)
    assert live.requeued.apply_async((plain.key, "note the request", 1), **OPTIONS).get(timeout=LIMIT) == 1
    answer = requeue(scene, "note the request", 1, **OPTIONS)
    assert answer.get(timeout=LIMIT) == 1
    assert eventually(lambda: scene.place.witness.lines("heard", "linked") == [["1"], ["1"]])  # once each
    before, after = request_of(plain), request_of(scene)
    assert after["id"] == after["correlation_id"] == answer.id
    of_the_broker = {name for name in after if name.startswith("x-")}
    assert before.keys() - OWN == after.keys() - OWN - {"only_one"} - of_the_broker
    assert {name: after[name] for name in before.keys() - OWN} == {name: before[name] for name in before.keys() - OWN}
    for name in ("reply_to", "priority", "delivery_mode", "body_encoding"):
        assert after["properties"].get(name) == before["properties"].get(name)
    # RabbitMQ takes it away from what it delays; the worker looks at `expires`.
    assert int(after["properties"].get("expiration", 0)) < int(before["properties"]["expiration"])
    assert re.fullmatch(r"only_one:\d+", after["properties"]["message_id"])  # the broker keeps it
    assert after["args"] == [scene.key, "note the request", 1]
    assert after["headers"]["custom"] == before["headers"]["custom"] == "yes"
    assert before["delivery_info"]["priority"] == after["delivery_info"]["priority"] == 7
    assert re.sub(DELAY, "", after["delivery_info"]["routing_key"]) == before["delivery_info"]["routing_key"]
    assert after["expires"] == before["expires"] is not None


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_requeued_message_keeps_its_serializer_and_compression(scene: Scene, compression: str | None) -> None:
    """JSON would make another value of this one."""
    value = {1: (2, b"x")}
    options: Any = {"serializer": "pickle", "compression": compression, "ignore_result": True}
    requeue(scene, "note the request", value, **options)
    request = request_of(scene)
    assert f"{value}" in request["repr"]
    assert request.get("compression") == (compression and "application/x-gzip")


def test_a_requeued_task_returns_to_the_queue_that_it_came_from(scene: Scene) -> None:
    """Again and again, though it goes in a circle."""
    answer = requeue(scene, "note the request", 1, times=TIMES, queue=OTHER)
    assert answer.get(timeout=LIMIT) == 1
    came_by = request_of(scene)["delivery_info"]["routing_key"]
    assert re.sub(DELAY, "", came_by) == OTHER
    delayed_by = "its worker" if came_by == OTHER else "the broker, in whole seconds"
    assert delayed_by in documented("the delay of a requeue is kept by", BROKERS[KIND])


def test_a_requeued_task_returns_by_the_direct_exchange_that_it_came_by(scene: Scene) -> None:
    """RabbitMQ does not delay what goes through one."""
    options = {"exchange": f"{live.DIRECT}s", "routing_key": live.DIRECT}
    assert requeue(scene, "note the request", 1, times=TIMES, **options).get(timeout=LIMIT) == 1
    came_by = request_of(scene)["delivery_info"]
    assert {name: came_by[name] for name in options} == options


def test_a_replacement_of_a_requeued_task_waits_like_any_other(scene: Scene) -> None:
    """In a chord, whose body would never run without it."""
    scene.take()
    replaces = live.requeued.si(scene.key, 1, "once", "replace and clean up")
    answer = chord([replaces, live.add.si(3, 4)])(live.after.s())
    replaced = answer.parent.results[0].id
    assert eventually(lambda: scene.place.received(replaced) > 2)
    scene.free()
    scene.begun()
    received = scene.place.received(replaced)
    assert eventually(lambda: scene.place.received(replaced) > received + 1)  # the replacement was requeued
    scene.open()
    replacement, beside = answer.get(timeout=LIMIT)
    assert (replacement["id"], beside) == (replaced, 7)
    assert scene.runs() == ["0", "0"]


def test_redeliveries_of_a_requeued_message_make_no_messages(scene: Scene) -> None:
    """Those that a broker makes of a message while it waits in a worker: each would be requeued for ever."""
    place = scene.place
    scene.take()
    answer = live.requeued_late.delay(scene.key, 1)
    copy = place.broker.copy_of(answer.id)
    received = place.received(answer.id)
    assert eventually(lambda: place.received(answer.id) > received + 2)  # it was requeued, so a later one waits
    for _ in range(REDELIVERIES):
        place.broker.deliver_again(copy)
    assert eventually(lambda: place.log().count(f"[{answer.id}] dropped: a later message waits") == REDELIVERIES)
    assert not place.notes("begin", scene.key)
    scene.free()
    assert answer.get(timeout=LIMIT) == 1
    assert scene.runs() == ["0"]


def messages_of(scene: Scene) -> Counter[str]:
    """The ids of all messages that are somewhere, and how many there are of each."""
    queued = scene.place.client.lrange(f"{scene.key}-waits", 0, -1)
    unacked = [json.loads(each)[0] for each in scene.place.client.hvals("unacked")]
    headers = [each["headers"] for each in [*map(json.loads, queued), *unacked]]
    return Counter(each["id"] for each in headers if scene.key in each["argsrepr"] and each["task"] != live.fills.name)


SOON = {SETTINGS: json.dumps({"broker_transport_options": live.soon(VISIBILITY)})}
"""For workers whose broker delivers again by itself."""


@pytest.mark.soak
@pytest.mark.parametrize("task", [live.requeued, live.requeued_late], ids=["acks early", "acks late"])
@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["few slots", "slots taken"])
def test_what_waits_makes_a_steady_number_of_messages(
    scene: Scene, task: Any, seconds: float, record_property: Callable[[str, object], None]
) -> None:
    """In a worker of few places, which others may take again and again for so many seconds."""
    place, until = scene.place, f"{scene.key}-until"
    scene.take()
    with place.worker("-c", "2", "-Q", f"{scene.key}-waits,{scene.key}-fills", **SOON):
        began = time.monotonic()
        for _ in range(4 if seconds else 0):
            live.fills.apply_async((until, seconds), queue=f"{scene.key}-fills")
        answers = [task.apply_async((scene.key, number), queue=f"{scene.key}-waits") for number in range(WAITING)]
        most = 0
        while time.monotonic() < began + WINDOWS * WINDOW:
            most = max(most, messages_of(scene).total())
            time.sleep(0.2)  # what is there now and then
        pushed = [each.at for each in place.events(f"/{scene.key}-waits") if "push" in each.what]
        counts = Counter(int((at - began) / WINDOW) for at in pushed)
        windows = [counts[number] for number in range(WINDOWS)]
        record_property(f"messages per {WINDOW:g} s", f"{windows}, at most {most} at a time")
        assert place.notes("begin", scene.key) == []
        # One that waits is requeued for half of the longest time, or longer.
        assert max(windows) <= WAITING * (1 + WINDOW / (LONGEST / 2))
        assert windows[-1] <= 1.5 * windows[-2] + WAITING
        assert most <= 1.5 * WAITING
        assert min(windows[1:]) > 0
        scene.free()
        place.client.set(until, 1)
        assert [answer.get(timeout=LIMIT) for answer in answers] == list(range(WAITING))
        assert eventually(lambda: not messages_of(scene))
        assert Counter(scene.results()) == Counter(map(str, range(WAITING)))
