"""Requeue: how many messages it makes, what they carry, and when it comes to an end.

The key is held by somebody else until the test frees it.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from celery import chain, chord

from only_one import AlreadyRunning
from only_one.testing import redis_server
from rigs.waiting import LIMIT, eventually
from tests.documented import BROKERS, documented
from tests.live import app as live
from tests.live.brokers import KIND, options_for_redis
from tests.live.workers import LOCKS, PREFIX, SETTINGS, Scene, World

VISIBILITY = 3.0
"""Seconds after which the broker delivers again, where that is measured."""
LONGEST = VISIBILITY / 3
"""Seconds for which a message waits after a requeue at the most."""

OTHER = "other"
"""A queue beside the usual one."""

WINDOW, WINDOWS = 10.0, 6
WAITING = 20
CONTENDERS = 100
REDELIVERIES = 5
TIMES = 4

DELAY = r"^[01.]*"
"""What is before the routing key where RabbitMQ itself sees to the delay."""

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    options = options_for_redis(visibility_timeout=0.9, unacked_restore_limit=0)
    return {"broker_transport_options": options, "accept_content": ["json", "pickle"]}


@pytest.fixture(scope="module")
def locks(place: World) -> Iterator[Any]:
    """A client of the server of the locks, which is another than the broker."""
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        place.environment[LOCKS] = server.url
        yield client


@pytest.fixture(scope="module")
def worker(place: World, locks: Any) -> Iterator[None]:  # noqa: ARG001 - which it is told of
    # Celery does not begin as root where it accepts pickle, unless it is told to.
    with place.worker("-c", "4", "-Q", f"celery,{OTHER},{live.DIRECT}", C_FORCE_ROOT="1", **{live.DIRECT: "yes"}):
        yield


@pytest.fixture
def held(scene: Scene, locks: Any) -> Callable[[], AbstractContextManager[None]]:
    """`with held():` has somebody else hold the scene's key."""

    @contextmanager
    def hold() -> Iterator[None]:
        locks.set(PREFIX + scene.key, "somebody else")
        yield
        assert locks.delete(PREFIX + scene.key)

    return hold


@pytest.fixture
def waits(scene: Scene, worker: None, held: Any) -> Callable[..., Any]:  # noqa: ARG001 - there is one
    """Sends a task that finds its key held, and frees the key when it was requeued so many times."""

    def send(task: Any = live.requeued, *orders: Any, times: int = 2, **options: Any) -> Any:
        with held():
            answer = task.apply_async((scene.key, *orders), **options)
            assert eventually(lambda: scene.place.received(answer.id) > times)
            assert not scene.place.notes("begin", scene.key)
        return answer

    return send


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


def test_a_requeued_message_carries_all_that_it_came_with(scene: Scene, waits: Any) -> None:
    plain = Scene(scene.place)
    assert live.requeued.apply_async((plain.key, "note the request", 1), **OPTIONS).get(timeout=LIMIT) == 1
    answer = waits(live.requeued, "note the request", 1, **OPTIONS)
    assert answer.get(timeout=LIMIT) == 1
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
def test_a_requeued_message_keeps_its_serializer_and_compression(
    scene: Scene, waits: Any, compression: str | None
) -> None:
    """JSON would make another value of this one."""
    value = {1: (2, b"x")}
    options: Any = {"serializer": "pickle", "compression": compression, "ignore_result": True}
    waits(live.requeued, "note the request", value, **options)
    request = request_of(scene)
    assert f"{value}" in request["repr"]
    assert request.get("compression") == (compression and "application/x-gzip")


def test_a_requeued_task_returns_to_the_queue_that_it_came_from(scene: Scene, waits: Any) -> None:
    """Again and again, though it goes in a circle."""
    answer = waits(live.requeued, "note the request", 1, times=TIMES, queue=OTHER)
    assert answer.get(timeout=LIMIT) == 1
    came_by = request_of(scene)["delivery_info"]["routing_key"]
    assert re.sub(DELAY, "", came_by) == OTHER
    delayed_by = "its worker" if came_by == OTHER else "the broker, in whole seconds"
    assert delayed_by in documented("the delay of a requeue is kept by", BROKERS[KIND])


def test_a_requeued_task_returns_by_the_direct_exchange_that_it_came_by(scene: Scene, waits: Any) -> None:
    """RabbitMQ does not delay what goes through one."""
    options = {"exchange": f"{live.DIRECT}s", "routing_key": live.DIRECT}
    assert waits(live.requeued, "note the request", 1, times=TIMES, **options).get(timeout=LIMIT) == 1
    came_by = request_of(scene)["delivery_info"]
    assert {name: came_by[name] for name in options} == options


@pytest.mark.parametrize("ignored", [False, True])
def test_a_requeued_message_says_whether_its_result_is_ignored(scene: Scene, waits: Any, *, ignored: bool) -> None:
    answer = waits(live.requeued, "note the request", 1, ignore_result=ignored)
    assert eventually(lambda: f"[{answer.id}] succeeded" in scene.place.log())
    assert request_of(scene)["ignore_result"] is ignored
    assert bool(scene.place.client.exists(f"celery-task-meta-{answer.id}")) is not ignored


CANVAS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], int]] = {
    "a chain": (
        lambda waits: chain(waits(1), live.add.s(10), waits(5), live.add.s(100)),
        lambda answer: answer.parent.parent.parent,
        105,
    ),
    "a chord's header": (
        lambda waits: chord([waits(1), waits(2), live.add.si(3, 4)], live.add.s(100)),
        lambda answer: answer.parent.results[0],
        110,
    ),
    "a chord's body": (
        lambda waits: chord([live.add.si(1, 2), live.add.si(3, 4)], waits(5)),
        lambda answer: answer,
        5,
    ),
}
"""A canvas, its task that is requeued first, and its result."""


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("canvas", CANVAS)
def test_others_in_a_canvas_get_the_results_of_requeued_tasks(scene: Scene, held: Any, canvas: str) -> None:
    make, first, result = CANVAS[canvas]
    with held():
        answer = make(lambda number: live.requeued.si(scene.key, number)).apply_async()
        assert eventually(lambda: scene.place.received(first(answer).id) > 2)
        assert not answer.ready()
    assert answer.get(timeout=LIMIT) == result


@pytest.mark.usefixtures("worker")
def test_a_replacement_of_a_requeued_task_waits_like_any_other(scene: Scene, held: Any) -> None:
    """In a chord, whose body would never run without it."""
    with held():
        answer = chord([live.requeued.si(scene.key, 1, "once", "replace and clean up"), live.add.si(3, 4)])(
            live.after.s()
        )
        replaced = answer.parent.results[0].id
        assert eventually(lambda: scene.place.received(replaced) > 2)
    scene.begun()
    received = scene.place.received(replaced)
    assert eventually(lambda: scene.place.received(replaced) > received + 1)  # the replacement was requeued
    scene.open()
    replacement, beside = answer.get(timeout=LIMIT)
    assert (replacement["id"], beside) == (replaced, 7)
    assert scene.runs() == ["0", "0"]


@pytest.mark.parametrize("order", [1, "exception"])
def test_links_of_a_requeued_task_are_called_once(scene: Scene, waits: Any, order: Any) -> None:
    links = {"link": live.hear.s(scene.key), "link_error": live.hear_of_trouble.s(scene.key)}
    answer = waits(live.requeued, order, **links)
    assert eventually(answer.ready)
    scene.place.wait_for("trouble" if order == "exception" else "heard", scene.key)
    heard = [each.rest for word in ("heard", "trouble") for each in scene.place.notes(word, scene.key)]
    assert heard == [["Trouble" if order == "exception" else "1"]]


@pytest.mark.usefixtures("worker")
def test_at_the_limit_of_requeues_it_raises(scene: Scene, locks: Any, held: Any) -> None:
    with held():
        before = commands(locks)
        answer = live.gives_up.delay(scene.key)
        with pytest.raises(AlreadyRunning, match=scene.key):
            answer.get(timeout=LIMIT)
        sent = commands(locks) - before
    deliveries = scene.place.received(answer.id)
    assert deliveries == 1 + 3
    assert sent <= 10 * deliveries
    assert not scene.place.notes("begin", scene.key)


def commands(locks: Any) -> int:
    """How many commands the server of the locks has been sent."""
    return int(locks.info("stats")["total_commands_processed"])


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("task", [live.requeued, live.requeued_late], ids=["acks early", "acks late"])
def test_redeliveries_of_a_requeued_message_make_no_messages(scene: Scene, held: Any, task: Any) -> None:
    """Those that a broker makes of a message while it waits in a worker: each would be requeued for ever."""
    place = scene.place
    with held():
        answer = task.delay(scene.key, 1)
        copy = place.broker.copy_of(answer.id)
        received = place.received(answer.id)
        assert eventually(lambda: place.received(answer.id) > received + 2)  # it was requeued, so a later one waits
        for _ in range(REDELIVERIES):
            place.broker.deliver_again(copy)
        assert eventually(lambda: place.log().count(f"[{answer.id}] dropped: a later message waits") == REDELIVERIES)
        assert not place.notes("begin", scene.key)
    assert answer.get(timeout=LIMIT) == 1
    assert scene.runs() == ["0"]


def messages_of(scene: Scene) -> Counter[str]:
    """The ids of all messages that are somewhere, and how many there are of each."""
    queued = scene.place.client.lrange(f"{scene.key}-waits", 0, -1)
    unacked = [json.loads(each)[0] for each in scene.place.client.hvals("unacked")]
    headers = [each["headers"] for each in [*map(json.loads, queued), *unacked]]
    return Counter(each["id"] for each in headers if scene.key in each["argsrepr"] and each["task"] != live.fills.name)


CASES = {
    "few slots, acks early": (live.requeued, 0.0),
    "few slots, acks late": (live.requeued_late, 0.0),
    "slots taken, acks early": (live.requeued, 1.0),
    "slots taken, acks late": (live.requeued_late, 1.0),
}
"""The task that waits, and for how long others take the worker's places, again and again."""

SOON = {SETTINGS: json.dumps({"broker_transport_options": live.soon(VISIBILITY)})}
"""For workers whose broker delivers again by itself."""


@pytest.mark.soak
def test_what_waits_makes_a_steady_number_of_messages(place: World, locks: Any, record_property: Record) -> None:
    scenes = {name: Scene(place) for name in CASES}
    with ExitStack() as stack:
        for scene in scenes.values():
            locks.set(PREFIX + scene.key, "somebody else")
            stack.enter_context(place.worker("-c", "2", "-Q", f"{scene.key}-waits,{scene.key}-fills", **SOON))
        began, answers = time.monotonic(), {}
        for name, (task, seconds) in CASES.items():
            key = scenes[name].key
            for _ in range(4 if seconds else 0):
                live.fills.apply_async((f"{key}-until", seconds), queue=f"{key}-fills")
            answers[name] = [task.apply_async((key, number), queue=f"{key}-waits") for number in range(WAITING)]
        most: dict[str, Counter[str]] = {name: Counter() for name in CASES}
        while time.monotonic() < began + WINDOWS * WINDOW:
            for name, scene in scenes.items():
                most[name] = max(most[name], messages_of(scene), key=lambda each: each.total())
            time.sleep(0.2)  # what is there now and then
        for name, scene in scenes.items():
            pushed = [each.at for each in place.events(f"/{scene.key}-waits") if "push" in each.what]
            windows = [Counter(int((at - began) / WINDOW) for at in pushed)[number] for number in range(WINDOWS)]
            count = f"at most {most[name].total()} at a time, of {len(most[name])} tasks"
            record_property(name, f"messages per {WINDOW:g} s: {windows}, {count}")
            assert len(place.notes("begin", scene.key)) == 0
            # One that waits is requeued for half of the longest time, or longer.
            assert max(windows) <= WAITING * (1 + WINDOW / (LONGEST / 2))
            assert windows[-1] <= 1.5 * windows[-2] + WAITING
            assert most[name].total() <= 1.5 * WAITING
            assert min(windows[1:]) > 0
        for name, scene in scenes.items():
            assert locks.delete(PREFIX + scene.key)
            place.client.set(f"{scene.key}-until", 1)
            assert [answer.get(timeout=LIMIT) for answer in answers[name]] == list(range(WAITING))
        for scene in scenes.values():
            assert eventually(lambda scene=scene: not messages_of(scene))  # type: ignore[misc]
            assert Counter(scene.results()) == Counter(map(str, range(WAITING)))


@pytest.mark.soak
def test_many_contenders_for_one_key(scene: Scene, locks: Any, record_property: Record) -> None:
    """They come at different times, do not crowd, and the lock's server has little to do with each."""
    place = scene.place
    with place.worker("-c", "8", "-Q", scene.queue, **SOON):
        sent, began = commands(locks), time.monotonic()
        for _ in range(CONTENDERS):
            live.requeued.apply_async((scene.key, "short pause"), queue=scene.queue)
        place.wait_for("end", scene.key, CONTENDERS)
        seconds = time.monotonic() - began
        sent = commands(locks) - sent
    assert len(scene.runs()) == CONTENDERS
    pushes = [each.at - began for each in place.events(f"/{scene.queue}") if "push" in each.what]
    crowd = max(Counter(int(at / 0.1) for at in pushes if at > 1).values(), default=0)
    record_property("seconds", seconds)
    record_property("commands of the lock's server for each", sent / CONTENDERS)
    record_property("messages for each", len(pushes) / CONTENDERS)
    record_property("most of them in 0.1 s", crowd)
    # Each asks a few times per delivery, and is delivered once or twice per second.
    assert len(pushes) <= CONTENDERS * (2 + 2 * seconds)
    assert sent <= 10 * len(pushes)
    assert crowd <= CONTENDERS / 2
