"""What is put back: how many messages that makes, what they carry, and when it comes to an end.

The broker delivers again after 3 s, and the key is held by another, as it is for an hour in real life.
`LIVE_MINUTE=1` has the number of messages counted over a minute, and not for some seconds only.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import chain, chord

from only_one import AlreadyRunning, ConfigurationError, configure, only_one
from only_one.testing import redis_server
from tests.live import put_back_app as live
from tests.live.workers import PREFIX, World, world
from tests.waiting import LIMIT, eventually

LONGEST = live.VISIBILITY / 3
"""Seconds for which a message is put back at the most."""

WINDOW, WINDOWS = (10.0, 6) if os.environ.get("LIVE_MINUTE") else (5.0, 3)
WAITING = 20
CONTENDERS = 100

Held = Callable[[], AbstractContextManager[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        world(live.app, "tests.live.put_back_app", tmp_path_factory.mktemp("put_back")) as found,
        found.worker("-c", "4"),
    ):
        yield found


@pytest.fixture
def held(place: World) -> Held:
    """`with held() as key:` has another hold a key."""

    @contextmanager
    def hold() -> Iterator[str]:
        key, begun, end = f"key-{uuid4().hex}", threading.Event(), threading.Event()

        def run() -> bool:
            begun.set()
            return end.wait(10 * LIMIT)

        with configure(redis=place.server.url, prefix=PREFIX), ThreadPoolExecutor(1) as pool:
            run_ = pool.submit(only_one(run, key=key))
            try:
                assert begun.wait(LIMIT)
                yield key
            finally:
                end.set()
            assert run_.result()

    return hold


def put_back_times(place: World, queue: str, since: float, until: float) -> int:
    """How many messages were put into a queue, by whomever."""
    return len([each for each in place.events(f"/{queue}", since) if "push" in each.what and each.at < until])


def messages_of(place: World, key: str) -> Counter[str]:
    """The ids of all messages that are somewhere, and how many there are of each."""
    queued = place.client.lrange(f"{key}-waits", 0, -1)
    unacked = [json.loads(each)[0] for each in place.client.hvals("unacked")]
    headers = [each["headers"] for each in [*map(json.loads, queued), *unacked]]
    return Counter(each["id"] for each in headers if key in each["argsrepr"] and each["task"] != live.fills.name)


CASES = {
    "few slots, acks early": (live.waits, 0.0),
    "few slots, acks late": (live.waits_late, 0.0),
    "slots taken, acks early": (live.waits, 1.0),
    "slots taken, acks late": (live.waits_late, 1.0),
}
"""The task that waits, and for how long others take the worker's places, again and again."""


@pytest.mark.timeout(300)
def test_what_waits_makes_a_steady_number_of_messages(place: World, held: Held) -> None:
    with ExitStack() as stack, ExitStack() as holders:
        keys = {name: holders.enter_context(held()) for name in CASES}
        for key in keys.values():
            stack.enter_context(place.worker("-c", "2", "-Q", f"{key}-waits,{key}-fills"))
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
                most[name] = max(most[name], messages_of(place, key), key=lambda each: each.total())
            time.sleep(0.2)  # what is there now and then
        for name, key in keys.items():
            moments = [began + number * WINDOW for number in range(WINDOWS)]
            windows = [put_back_times(place, f"{key}-waits", at, at + WINDOW) for at in moments]
            count = f"at most {most[name].total()} at a time, of {len(most[name])} tasks"
            print(f"{name:24} messages per {WINDOW:g} s: {windows}, {count}")
            assert len(place.notes("ran", key)) == 0
            # One that waits is put back for half of the longest time, or longer.
            assert max(windows) <= WAITING * (1 + WINDOW / (LONGEST / 2))
            assert windows[-1] <= 1.5 * windows[-2] + WAITING
            assert most[name].total() <= 1.5 * WAITING
            assert min(windows[1:]) > 0
        holders.close()
        for name, key in keys.items():
            place.client.set(f"{key}-until", 1)
            assert [answer.get(timeout=LIMIT) for answer in answers[name]] == list(range(WAITING))
        for key in keys.values():
            assert eventually(lambda key=key: not messages_of(place, key), LIMIT)  # type: ignore[misc]
            assert Counter(each.rest[0] for each in place.notes("ran", key)) == Counter(map(str, range(WAITING)))


OPTIONS: dict[str, Any] = {
    "headers": {"custom": "yes"},
    "priority": 7,
    "expires": 600,
    "shadow": "a shadow",
    "time_limit": 50,
    "soft_time_limit": 40,
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
    "expires",
    "headers",
    "hostname",
    "delivery_info",
    "properties",
}
"""What differs from one message to the next; of some of these it is looked at below what must not."""


def requests(place: World, key: str) -> list[dict[str, Any]]:
    """What runs were told of their messages."""
    return [json.loads(each.rest[1]) for each in place.notes("ran", key)]


def test_what_is_put_back_carries_all_that_it_came_with(place: World, held: Held) -> None:
    free = f"key-{uuid4().hex}"
    plain = live.waits.apply_async((free, 1), **OPTIONS)
    assert plain.get(timeout=LIMIT) == 1
    with held() as key:
        answer = live.waits.apply_async((key, 1), **OPTIONS)
        assert eventually(lambda: len(copies(place, answer.id)) > 2, LIMIT)
    assert answer.get(timeout=LIMIT) == 1
    ((before,), (after,)) = requests(place, free), requests(place, key)
    assert after["id"] == after["correlation_id"] == answer.id
    assert before.keys() - OWN == after.keys() - OWN - {"only_one"}
    assert {name: after[name] for name in before.keys() - OWN} == {name: before[name] for name in before.keys() - OWN}
    for name in ("reply_to", "priority", "delivery_mode", "body_encoding"):
        assert after["properties"][name] == before["properties"][name]
    assert int(after["properties"]["expiration"]) < int(before["properties"]["expiration"]) == 600_000
    assert after["args"] == [key, 1]
    assert after["headers"]["custom"] == before["headers"]["custom"] == "yes"
    assert before["delivery_info"]["priority"] == after["delivery_info"]["priority"] == 7
    assert after["delivery_info"]["routing_key"] == before["delivery_info"]["routing_key"]
    assert after["expires"] is not None


@pytest.mark.parametrize("ignored", [False, True])
def test_what_is_put_back_says_whether_its_result_is_ignored(place: World, held: Held, ignored: bool) -> None:  # noqa: FBT001
    with held() as key:
        answer = live.waits.apply_async((key, 1), ignore_result=ignored)
        assert eventually(lambda: len(copies(place, answer.id)) > 2, LIMIT)
    place.wait_for("ran", key)
    (request,) = requests(place, key)
    assert request["ignore_result"] is ignored
    assert eventually(lambda: f"[{answer.id}] succeeded" in place.log(), LIMIT)
    assert len(place.events(f"/celery-task-meta-{answer.id}")) > 0 or ignored
    assert not (ignored and place.client.exists(f"celery-task-meta-{answer.id}"))


def copies(place: World, task_id: str) -> list[str]:
    """What the log says of the deliveries of a task."""
    return [line for line in place.log().splitlines() if f"[{task_id}] received" in line]


def test_a_chain_goes_on(place: World, held: Held) -> None:
    with held() as key:
        found = chain(live.waits.si(key, 1), live.add.s(10), live.waits.si(key, 5), live.add.s(100)).apply_async()
        first = found.parent.parent.parent
        assert eventually(lambda: len(copies(place, first.id)) > 2, LIMIT)
        assert not place.notes("ran", key)
    assert found.get(timeout=LIMIT) == 105
    assert (first.result, found.parent.parent.result) == (1, 11)


def test_a_chord_gets_the_real_results(place: World, held: Held) -> None:
    with held() as key:
        header = [live.waits.si(key, 1), live.waits.si(key, 2), live.add.si(3, 4)]
        found = chord(header)(live.add.s(100))
        waiting = found.parent.results[0].id
        assert eventually(lambda: len(copies(place, waiting)) > 2, LIMIT)
        assert not found.ready()
    assert found.get(timeout=LIMIT) == 110


def test_a_chords_body_that_waits(place: World, held: Held) -> None:
    with held() as key:
        found = chord([live.add.si(1, 2), live.add.si(3, 4)])(live.waits.si(key, 5))
        assert eventually(lambda: len(copies(place, found.id)) > 2, LIMIT)
    assert found.get(timeout=LIMIT) == 5


@pytest.mark.parametrize("fails", [False, True])
def test_links(place: World, held: Held, *, fails: bool) -> None:
    with held() as key:
        answer = live.waits.apply_async(
            (key, 1), {"fails": fails}, link=live.hear.s(key), link_error=live.hear_of_trouble.s(key)
        )
        assert eventually(lambda: len(copies(place, answer.id)) > 2, LIMIT)
        assert not place.notes("heard", key)
        assert not place.notes("trouble", key)
    word = "trouble" if fails else "heard"
    place.wait_for(word, key)
    assert answer.state == ("FAILURE" if fails else "SUCCESS")
    assert [each.rest for each in place.notes(word, key)] == [[answer.id, "Trouble"] if fails else ["1"]]
    assert not place.notes("heard" if fails else "trouble", key)


def test_what_expires_while_it_waits_does_not_run(place: World, held: Held) -> None:
    with held() as key:
        began = time.monotonic()
        answer = live.waits.apply_async((key, 1), expires=2)
        assert eventually(lambda: answer.state == "REVOKED", LIMIT)
        seconds = time.monotonic() - began
        assert len(copies(place, answer.id)) > 1
    assert 2 - LONGEST < seconds < 2 + 2 * LONGEST
    print(f"revoked after {seconds:.2f} s of 2 s, delivered {len(copies(place, answer.id))} times")
    assert not place.notes("ran", key)


def test_at_the_limit_it_raises(place: World, held: Held) -> None:
    with held() as key:
        answer = live.gives_up.delay(key)
        with pytest.raises(AlreadyRunning, match=key):
            answer.get(timeout=LIMIT)
    assert len(copies(place, answer.id)) == 1 + 3
    assert not place.notes("ran", key)


def test_a_countdown_for_which_the_broker_would_deliver_copies(place: World) -> None:
    answer = live.waits_too_long.delay("anything")
    with pytest.raises(ConfigurationError, match=r"write at most 1 seconds"):
        answer.get(timeout=LIMIT)
    assert not place.notes("ran", "anything")


def test_many_contenders_for_one_key(place: World) -> None:
    """They come at different times, do not crowd, and the lock's server has little to do with each."""
    key = f"key-{uuid4().hex}"
    with (
        redis_server() as locks,
        redis.Redis.from_url(locks.url) as client,
        place.worker("-c", "8", "-Q", key, **{live.LOCKS: locks.url}),
    ):
        commands = client.info("stats")["total_commands_processed"]
        began = time.monotonic()
        for _ in range(CONTENDERS):
            live.contends.apply_async((key, 0.02), queue=key)
        place.wait_for("end", key, CONTENDERS)
        seconds = time.monotonic() - began
        commands = client.info("stats")["total_commands_processed"] - commands
    begins, ends = place.notes("begin", key), place.notes("end", key)
    assert len(begins) == len(ends) == CONTENDERS
    assert all(end.at <= begin.at for end, begin in zip(ends, begins[1:], strict=False))
    pushes = [each.at - began for each in place.events(f"/{key}") if "push" in each.what]
    crowd = Counter(int(at / 0.1) for at in pushes if at > 1)
    print(
        f"{CONTENDERS} contenders, done after {seconds:.1f} s: {commands / CONTENDERS:.1f} commands of the lock's"
        f" server and {len(pushes) / CONTENDERS:.1f} messages each, at most {max(crowd.values(), default=0)} in 0.1 s"
    )
    # Each asks a few times per delivery, and is delivered once or twice per second.
    assert len(pushes) <= CONTENDERS * (2 + 2 * seconds)
    assert commands <= 10 * len(pushes)
    assert max(crowd.values(), default=0) <= CONTENDERS / 2
