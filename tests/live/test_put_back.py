"""What is put back: how many messages that makes, what they carry, and when it comes to an end.

The key is held by somebody else until the test lets go of it.
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
from uuid import uuid4

import pytest
import redis
from celery import chain, chord

from only_one import AlreadyRunning
from only_one.testing import Guarded, redis_server
from rigs.waiting import LIMIT, eventually
from tests.documented import BROKERS, documented
from tests.live import put_back_app as live
from tests.live.brokers import KIND
from tests.live.workers import PREFIX, World, world

VISIBILITY = 3.0
"""Seconds after which the broker delivers again, where that is measured."""

SOON = {live.VISIBLE_AFTER: str(VISIBILITY)}
LONGEST = VISIBILITY / 3
"""Seconds for which a message is put back at the most."""

WINDOW, WINDOWS = 10.0, 6
WAITING = 20
CONTENDERS = 100
COPIES = 5
TIMES = 4

DELAY = r"^[01.]*"
"""What is before the routing key where RabbitMQ itself sees to the delay."""

Held = Callable[[], AbstractContextManager[str]]
Record = Callable[[str, object], None]


class Place:
    """A broker with workers, and another server for their locks."""

    def __init__(self, broker: World, locks: Any, url: str) -> None:
        self.broker, self.locks = broker, locks
        self._url = url

    def worker(self, *arguments: str, **environment: str) -> AbstractContextManager[Guarded]:
        """One more worker."""
        return self.broker.worker(*arguments, **{live.LOCKS: self._url}, **environment)

    def commands(self) -> int:
        """How many commands the server of the locks has been sent."""
        return int(self.locks.info("stats")["total_commands_processed"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        redis_server() as locks,
        redis.Redis.from_url(locks.url) as client,
        world(live.app, "tests.live.put_back_app", tmp_path_factory.mktemp("put_back")) as broker,
    ):
        yield Place(broker, client, locks.url)


@pytest.fixture(scope="module")
def broker(place: Place) -> Iterator[World]:
    """With a worker."""
    # Celery does not begin as root where it accepts pickle, unless it is told to.
    with place.worker("-c", "4", "-Q", f"celery,{live.OTHER},{live.DIRECT}", C_FORCE_ROOT="1"):
        yield place.broker


@pytest.fixture
def held(place: Place) -> Held:
    """`with held() as key:` has somebody else hold a key."""

    @contextmanager
    def hold() -> Iterator[str]:
        key = f"key-{uuid4().hex}"
        place.locks.set(PREFIX + key, "somebody else")
        yield key
        assert place.locks.delete(PREFIX + key)

    return hold


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


def requests(broker: World, key: str) -> list[dict[str, Any]]:
    """What runs were told of their messages."""
    return [json.loads(each.rest[1]) for each in broker.notes("ran", key)]


def test_what_is_put_back_carries_all_that_it_came_with(broker: World, held: Held) -> None:
    free = f"key-{uuid4().hex}"
    plain = live.waits.apply_async((free, 1), **OPTIONS)
    assert plain.get(timeout=LIMIT) == 1
    with held() as key:
        answer = live.waits.apply_async((key, 1), **OPTIONS)
        assert eventually(lambda: len(copies(broker, answer.id)) > 2)
    assert answer.get(timeout=LIMIT) == 1
    ((before,), (after,)) = requests(broker, free), requests(broker, key)
    assert after["id"] == after["correlation_id"] == answer.id
    of_the_broker = {name for name in after if name.startswith("x-")}
    assert before.keys() - OWN == after.keys() - OWN - {"only_one"} - of_the_broker
    assert {name: after[name] for name in before.keys() - OWN} == {name: before[name] for name in before.keys() - OWN}
    for name in ("reply_to", "priority", "delivery_mode", "body_encoding"):
        assert after["properties"].get(name) == before["properties"].get(name)
    # RabbitMQ takes it away from what it delays; the worker looks at `expires`.
    assert int(after["properties"].get("expiration", 0)) < int(before["properties"]["expiration"])
    assert re.fullmatch(r"only_one:\d+", after["properties"]["message_id"])  # the broker keeps it
    assert after["args"] == [key, 1]
    assert after["headers"]["custom"] == before["headers"]["custom"] == "yes"
    assert before["delivery_info"]["priority"] == after["delivery_info"]["priority"] == 7
    assert re.sub(DELAY, "", after["delivery_info"]["routing_key"]) == before["delivery_info"]["routing_key"]
    assert after["expires"] == before["expires"] is not None


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_what_is_put_back_keeps_its_serializer_and_compression(
    broker: World, held: Held, compression: str | None
) -> None:
    """JSON would make another value of this one."""
    value = {1: (2, b"x")}
    with held() as key:
        options: Any = {"serializer": "pickle", "compression": compression, "ignore_result": True}
        answer = live.waits.apply_async((key, value), **options)
        assert eventually(lambda: len(copies(broker, answer.id)) > 2)
    told = " ".join(broker.wait_for("ran", key).rest)
    assert told.startswith(f"{value} ")
    assert ('"compression":"application/x-gzip"' in told) is (compression is not None)


def test_it_goes_back_to_the_queue_that_it_came_from(broker: World, held: Held) -> None:
    """Again and again, though it goes in a circle."""
    with held() as key:
        answer = live.waits.apply_async((key, 1), queue=live.OTHER)
        assert eventually(lambda: len(copies(broker, answer.id)) > TIMES)
    assert answer.get(timeout=LIMIT) == 1
    (request,) = requests(broker, key)
    came_by = request["delivery_info"]["routing_key"]
    assert re.sub(DELAY, "", came_by) == live.OTHER
    delayed_by = "its worker" if came_by == live.OTHER else "the broker, in whole seconds"
    assert documented("the delay until it returns is kept by", BROKERS[KIND]) == delayed_by


def test_it_goes_back_by_the_direct_exchange_that_it_came_by(broker: World, held: Held) -> None:
    """RabbitMQ does not delay what goes through one."""
    with held() as key:
        answer = live.waits.apply_async((key, 1), exchange=f"{live.DIRECT}s", routing_key=live.DIRECT)
        assert eventually(lambda: len(copies(broker, answer.id)) > TIMES)
    assert answer.get(timeout=LIMIT) == 1
    (request,) = requests(broker, key)
    came_by = request["delivery_info"]
    assert (came_by["exchange"], came_by["routing_key"]) == (f"{live.DIRECT}s", live.DIRECT)


@pytest.mark.parametrize("ignored", [False, True])
def test_what_is_put_back_says_whether_its_result_is_ignored(broker: World, held: Held, ignored: bool) -> None:  # noqa: FBT001
    with held() as key:
        answer = live.waits.apply_async((key, 1), ignore_result=ignored)
        assert eventually(lambda: len(copies(broker, answer.id)) > 2)
    assert eventually(lambda: f"[{answer.id}] succeeded" in broker.log())
    (request,) = requests(broker, key)
    assert request["ignore_result"] is ignored
    assert bool(broker.client.exists(f"celery-task-meta-{answer.id}")) is not ignored


def copies(broker: World, task_id: str) -> list[str]:
    """What the log says of the deliveries of a task."""
    return [line for line in broker.log().splitlines() if f"[{task_id}] received" in line]


def test_a_chain_goes_on(broker: World, held: Held) -> None:
    with held() as key:
        found = chain(live.waits.si(key, 1), live.add.s(10), live.waits.si(key, 5), live.add.s(100)).apply_async()
        first = found.parent.parent.parent
        assert eventually(lambda: len(copies(broker, first.id)) > 2)
        assert not broker.notes("ran", key)
    assert found.get(timeout=LIMIT) == 105
    assert (first.result, found.parent.parent.result) == (1, 11)


def test_a_chord_gets_the_real_results(broker: World, held: Held) -> None:
    with held() as key:
        header = [live.waits.si(key, 1), live.waits.si(key, 2), live.add.si(3, 4)]
        found = chord(header)(live.add.s(100))
        waiting = found.parent.results[0].id
        assert eventually(lambda: len(copies(broker, waiting)) > 2)
        assert not found.ready()
    assert found.get(timeout=LIMIT) == 110


def test_a_replacement_of_a_requeued_task_waits_like_any_other(broker: World, held: Held) -> None:
    """In a chord, whose body would never run without it."""
    with held() as key:
        found = chord([live.polls.si(key), live.add.si(3, 4)])(live.add.s(100))
        polls = found.parent.results[0].id
        assert eventually(lambda: len(copies(broker, polls)) > 2)
    broker.wait_for("replaced", key)
    seen = len(copies(broker, polls))
    assert eventually(lambda: len(copies(broker, polls)) > seen + 1)  # the replacement was requeued
    broker.client.rpush(key, "open")
    assert found.get(timeout=LIMIT) == 108


def test_a_chords_body_that_waits(broker: World, held: Held) -> None:
    with held() as key:
        found = chord([live.add.si(1, 2), live.add.si(3, 4)])(live.waits.si(key, 5))
        assert eventually(lambda: len(copies(broker, found.id)) > 2)
    assert found.get(timeout=LIMIT) == 5


@pytest.mark.parametrize("fails", [False, True])
def test_links(broker: World, held: Held, *, fails: bool) -> None:
    with held() as key:
        answer = live.waits.apply_async(
            (key, 1), {"fails": fails}, link=live.hear.s(key), link_error=live.hear_of_trouble.s(key)
        )
        assert eventually(lambda: len(copies(broker, answer.id)) > 2)
        assert not broker.notes("heard", key)
        assert not broker.notes("trouble", key)
    word = "trouble" if fails else "heard"
    broker.wait_for(word, key)
    assert eventually(answer.ready)
    assert answer.state == ("FAILURE" if fails else "SUCCESS")
    assert [each.rest for each in broker.notes(word, key)] == [[answer.id, "Trouble"] if fails else ["1"]]
    assert not broker.notes("heard" if fails else "trouble", key)


def test_at_the_limit_it_raises(place: Place, broker: World, held: Held) -> None:
    with held() as key:
        before = place.commands()
        answer = live.gives_up.delay(key)
        with pytest.raises(AlreadyRunning, match=key):
            answer.get(timeout=LIMIT)
        commands = place.commands() - before
    deliveries = len(copies(broker, answer.id))
    assert deliveries == 1 + 3
    assert commands <= 10 * deliveries
    assert not broker.notes("ran", key)


@pytest.mark.parametrize("task", [live.waits, live.waits_late], ids=["acks early", "acks late"])
def test_copies_of_what_waits_make_no_messages(broker: World, held: Held, task: Any) -> None:
    """Those that a broker makes of a message while it waits in a worker: each would be put back for ever."""
    with held() as key:
        answer = task.delay(key, 1)
        copy = broker.broker.copy_of(answer.id)
        seen = len(copies(broker, answer.id))
        assert eventually(lambda: len(copies(broker, answer.id)) > seen + 2)  # it was put back, so a later one waits
        for _ in range(COPIES):
            broker.broker.deliver_again(copy)
        assert eventually(lambda: dropped(broker, answer.id) == COPIES)
        assert not broker.notes("ran", key)
    assert answer.get(timeout=LIMIT) == 1
    assert len(broker.notes("ran", key)) == 1


def dropped(broker: World, task_id: str) -> int:
    """How many copies of a message were dropped, as another one waits."""
    return broker.log().count(f"[{task_id}] dropped: a later message waits")


def put_back_times(broker: World, queue: str, since: float, until: float) -> int:
    """How many messages were put into a queue, by whomever."""
    return len([each for each in broker.events(f"/{queue}", since) if "push" in each.what and each.at < until])


def messages_of(broker: World, key: str) -> Counter[str]:
    """The ids of all messages that are somewhere, and how many there are of each."""
    queued = broker.client.lrange(f"{key}-waits", 0, -1)
    unacked = [json.loads(each)[0] for each in broker.client.hvals("unacked")]
    headers = [each["headers"] for each in [*map(json.loads, queued), *unacked]]
    return Counter(each["id"] for each in headers if key in each["argsrepr"] and each["task"] != live.fills.name)


CASES = {
    "few slots, acks early": (live.waits, 0.0),
    "few slots, acks late": (live.waits_late, 0.0),
    "slots taken, acks early": (live.waits, 1.0),
    "slots taken, acks late": (live.waits_late, 1.0),
}
"""The task that waits, and for how long others take the worker's places, again and again."""


@pytest.mark.soak
def test_what_waits_makes_a_steady_number_of_messages(place: Place, held: Held, record_property: Record) -> None:
    broker = place.broker
    with ExitStack() as stack, ExitStack() as holders:
        keys = {name: holders.enter_context(held()) for name in CASES}
        for key in keys.values():
            stack.enter_context(place.worker("-c", "2", "-Q", f"{key}-waits,{key}-fills", **SOON))
        began, answers = time.monotonic(), {}
        for name, (task, seconds) in CASES.items():
            for _ in range(4 if seconds else 0):
                live.fills.apply_async((f"{keys[name]}-until", seconds), queue=f"{keys[name]}-fills")
            answers[name] = [
                task.apply_async((keys[name], number), queue=f"{keys[name]}-waits") for number in range(WAITING)
            ]
        most: dict[str, Counter[str]] = {name: Counter() for name in CASES}
        while time.monotonic() < began + WINDOWS * WINDOW:
            for name, key in keys.items():
                most[name] = max(most[name], messages_of(broker, key), key=lambda each: each.total())
            time.sleep(0.2)  # what is there now and then
        for name, key in keys.items():
            moments = [began + number * WINDOW for number in range(WINDOWS)]
            windows = [put_back_times(broker, f"{key}-waits", at, at + WINDOW) for at in moments]
            count = f"at most {most[name].total()} at a time, of {len(most[name])} tasks"
            record_property(name, f"messages per {WINDOW:g} s: {windows}, {count}")
            assert len(broker.notes("ran", key)) == 0
            # One that waits is put back for half of the longest time, or longer.
            assert max(windows) <= WAITING * (1 + WINDOW / (LONGEST / 2))
            assert windows[-1] <= 1.5 * windows[-2] + WAITING
            assert most[name].total() <= 1.5 * WAITING
            assert min(windows[1:]) > 0
        holders.close()
        for name, key in keys.items():
            broker.client.set(f"{key}-until", 1)
            assert [answer.get(timeout=LIMIT) for answer in answers[name]] == list(range(WAITING))
        for key in keys.values():
            assert eventually(lambda key=key: not messages_of(broker, key), LIMIT)  # type: ignore[misc]
            assert Counter(each.rest[0] for each in broker.notes("ran", key)) == Counter(map(str, range(WAITING)))


@pytest.mark.soak
def test_many_contenders_for_one_key(place: Place, record_property: Record) -> None:
    """They come at different times, do not crowd, and the lock's server has little to do with each."""
    key, broker = f"key-{uuid4().hex}", place.broker
    with place.worker("-c", "8", "-Q", key, **SOON):
        commands = place.commands()
        began = time.monotonic()
        for _ in range(CONTENDERS):
            live.contends.apply_async((key, 0.02), queue=key)
        broker.wait_for("end", key, CONTENDERS)
        seconds = time.monotonic() - began
        commands = place.commands() - commands
    begins, ends = broker.notes("begin", key), broker.notes("end", key)
    assert len(begins) == len(ends) == CONTENDERS
    assert all(end.at <= begin.at for end, begin in zip(ends, begins[1:], strict=False))
    pushes = [each.at - began for each in broker.events(f"/{key}") if "push" in each.what]
    crowd = max(Counter(int(at / 0.1) for at in pushes if at > 1).values(), default=0)
    record_property("seconds", seconds)
    record_property("commands of the lock's server for each", commands / CONTENDERS)
    record_property("messages for each", len(pushes) / CONTENDERS)
    record_property("most of them in 0.1 s", crowd)
    # Each asks a few times per delivery, and is delivered once or twice per second.
    assert len(pushes) <= CONTENDERS * (2 + 2 * seconds)
    assert commands <= 10 * len(pushes)
    assert crowd <= CONTENDERS / 2
