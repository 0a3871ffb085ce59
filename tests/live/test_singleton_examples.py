"""What celery-singleton's README promises of its examples, kept by those of examples/singleton on real workers.

A run takes until its test lets it go on, so that nothing depends on how long anything takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from examples.singleton import configured, tasks
from only_one import AlreadyRunning, KeyTemplateError, only_one
from only_one.lock.holder import Holder
from rigs.waiting import LIMIT, eventually, is_gone
from tests.live.workers import RESULTS, URL, World, kill_tree, sender, world

PREFIX = "only_one:"
MISSPELT = "'user_id' is not a parameter, write one of {name}, {md5}, {username}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("singleton")
    with (
        world(tasks.app, "tests.live.singleton_app", folder) as found,
        found.worker("-c", "3", SINGLETON_URL=found.server.url),
    ):
        yield found


@pytest.fixture(autouse=True)
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """That of the examples' apps, instead of one that is configured for the test."""
    for variable in ("ONLY_ONE_REDIS_URL", "ONLY_ONE_ACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    return PREFIX


@pytest.fixture(autouse=True)
def nothing_is_left(place: World) -> Iterator[None]:
    """After each test all keys are free, but those that are kept by `at_least`."""
    yield
    assert eventually(lambda: not [key for key in keys(place) if b"remind" not in key]), keys(place)


@pytest.fixture
def name() -> str:
    """An argument that no other test gives."""
    return uuid4().hex


def keys(place: World, prefix: str = PREFIX) -> list[bytes]:
    return list(place.client.scan_iter(f"{prefix}*"))


def holder(place: World, key: str) -> Holder | None:
    value = place.client.get(key)
    return None if value is None else Holder.parse(value)


def is_running(place: World, answer: Any) -> bool:
    return len(place.notes("begin", answer.id)) > len(place.notes("end", answer.id))


def let_go(place: World, answer: Any) -> Any:
    """Let a run go on, and wait for its result."""
    place.client.rpush(answer.id, "go on")
    found = answer.get(timeout=LIMIT)
    assert [len(place.notes(word, answer.id)) for word in ("begin", "end")] == [1, 1]
    return found


# Quick start; How does it work?


def test_the_same_arguments_give_the_task_that_is_there(place: World, name: str) -> None:
    began = time.monotonic()
    first = tasks.render.delay(1, 2, 3, paper=name)
    at_once = tasks.render.delay(1, 2, 3, paper=name)
    place.wait_for("begin", first.id)
    later = tasks.render.apply_async((1, 2, 3), {"paper": name})
    assert first == at_once == later
    assert type(later) is type(first)
    assert later.state == "PENDING"
    expected = f"3 pages, { ({'paper': name}) }"
    assert let_go(place, first) == at_once.get(timeout=LIMIT) == later.get(timeout=LIMIT) == expected
    place.catch_up()
    assert len([event for event in place.events("/celery", began) if event.what == "lpush"]) == 1, "queued once"


def test_other_arguments_are_another_task(place: World, name: str) -> None:
    every = [tasks.render.delay(1, paper=name), tasks.render.delay(4, paper=name), tasks.render.delay(1, cover=name)]
    assert len({each.id for each in every}) == 3
    for each in every:
        place.wait_for("begin", each.id)
    assert [let_go(place, each)[:7] for each in every] == ["1 pages"] * 3


def test_after_it_has_finished_the_next_is_another_task(place: World, name: str) -> None:
    first = tasks.render.delay(paper=name)
    let_go(place, first)
    second = tasks.render.delay(paper=name)
    assert second != first
    let_go(place, second)


def test_a_run_that_fails_frees_its_key(place: World) -> None:
    first = tasks.rebuild.delay("")
    assert tasks.rebuild.delay("") == first
    with pytest.raises(ValueError, match="which index"):
        let_go(place, first)
    second = tasks.rebuild.delay("")
    assert second != first
    with pytest.raises(ValueError, match="which index"):
        let_go(place, second)


# Handling deadlocks


def test_a_run_whose_process_is_killed_frees_its_key(place: World, name: str) -> None:
    first = tasks.rebuild.delay(name)
    os.kill(place.wait_for("begin", first.id).pid, signal.SIGKILL)
    with pytest.raises(Exception, match="SIGKILL"):
        first.get(timeout=LIMIT)
    assert eventually(lambda: not keys(place)), keys(place)
    second = tasks.rebuild.delay(name)
    assert second != first
    assert let_go(place, second) == f"index of {name}"


def test_a_worker_that_is_killed_and_one_that_begins_leave_the_keys_of_others(place: World, name: str) -> None:
    """Nothing is cleared when a worker is ready, neither too little nor too much."""
    living = tasks.rebuild.delay(f"{name} of the living")
    place.wait_for("begin", living.id)
    with place.worker("-c", "1", "-Q", "doomed", SINGLETON_URL=place.server.url) as doomed:
        dead = tasks.rebuild.apply_async((name,), queue="doomed")
        child = place.wait_for("begin", dead.id).pid
        assert len(keys(place)) == 2
        kill_tree(doomed)
        assert eventually(lambda: is_gone(child))
    again = tasks.rebuild.delay(name)
    assert again != dead
    assert tasks.rebuild.delay(f"{name} of the living") == living
    assert let_go(place, again) == f"index of {name}"
    let_go(place, living)


# unique_on


def test_only_what_is_in_the_key_counts(place: World, name: str) -> None:
    first = tasks.send_digest.delay(user=name, reason=99)
    assert tasks.send_digest.delay(user=name, reason=100) == first
    place.wait_for("begin", first.id)
    for same in [((name,), {}), ((name, 1), {}), ((), {"user": name})]:  # there, a KeyError where one is left out
        assert tasks.send_digest.apply_async(*same) == first
    other = tasks.send_digest.delay(f"not {name}")
    assert other != first
    assert let_go(place, first) == f"digest for {name}, because of 99"
    assert let_go(place, other) == f"digest for not {name}, because of None"


def test_what_is_no_parameter_is_refused_when_decorating() -> None:
    """As `unique_on=["user_id"]` of a task that takes a `username` is there, which fails at each call."""

    def do_something(username: str, otherarg: object = None) -> object:
        return username, otherarg

    with pytest.raises(KeyTemplateError, match=r"user_id.*username"):
        only_one("{name}:{user_id}")(tasks.app.task(do_something))


# raise_on_duplicate


def test_a_duplicate_raises_and_says_whose_it_is(place: World, name: str) -> None:
    first = tasks.export.delay(name)
    place.wait_for("begin", first.id)
    with pytest.raises(AlreadyRunning, match=first.id) as caught:
        tasks.export.delay(name)
    assert caught.value.task_id == first.id
    assert caught.value.holder is not None
    assert caught.value.holder.state == "running"
    assert let_go(place, first) == f"data of {name}"


# lock_expiry


def test_a_run_that_outlives_its_timeout_keeps_nobody_out_and_leaves_the_key_to_the_next(place: World) -> None:
    """There, the first would delete it."""
    first = tasks.poll.delay()
    place.wait_for("begin", first.id)
    assert eventually(lambda: not keys(place))
    second = tasks.poll.delay()
    assert second != first
    place.wait_for("begin", second.id)
    assert is_running(place, first)
    assert eventually(lambda: not keys(place))
    # In a queue where nobody takes it, it waits for longer than it may run, and is there when those before it end.
    third = tasks.poll.apply_async(queue="later")
    (key,) = keys(place)
    for each in (second, first):
        assert let_go(place, each) == "polled"
    found = holder(place, key.decode())
    assert found is not None
    assert found.task_id == third.id
    assert tasks.poll.delay() == third
    place.client.lmove("later", "celery", "RIGHT", "LEFT")
    assert let_go(place, third) == "polled"


def test_one_in_a_given_time_however_short_it_is(place: World, name: str) -> None:
    first = tasks.remind.delay(name)
    assert first.get(timeout=LIMIT) == f"{name} was reminded"
    found = holder(place, f"{PREFIX}{tasks.remind.name}:{name}")
    assert found is not None
    assert (found.state, found.task_id) == ("kept", first.id)
    again = tasks.remind.delay(name)
    assert again == first
    assert again.get(timeout=LIMIT) == f"{name} was reminded"
    assert tasks.remind.delay(f"not {name}") != first


# App configuration


def test_an_app_s_configuration_holds_for_its_tasks(place: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = place.server.url
    with sender(configured.app, url, only_one_redis=url):
        first = configured.count_stock.delay(name)
        with pytest.raises(AlreadyRunning) as caught:
            configured.count_stock.delay(name)
        assert caught.value.key == f"mine:{configured.count_stock.name}:{name}"
        assert caught.value.task_id == first.id
        assert 600_000 < place.client.pttl(caught.value.key) <= 900_000  # only_one_queue_timeout

        order = configured.order_more.delay(name)
        assert configured.order_more.delay(name) == order  # the decorator wins

        monkeypatch.setattr(place, "_module", "tests.live.singleton_app:strict")
        with place.worker("-c", "2", SINGLETON_URL=url):
            for each in (first, order):
                place.wait_for("begin", each.id)
            assert 60_000 < place.client.pttl(caught.value.key) <= 600_000  # only_one_timeout
            assert 0 < place.client.pttl(f"mine:{configured.order_more.name}:{name}") <= 60_000
            assert let_go(place, first) == f"stock of {name}"
            assert let_go(place, order) == f"order of {name}"
        assert not keys(place, "mine:")


def test_the_examples_as_they_are_shown() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {URL, RESULTS}}
    command = [sys.executable, "-m", "examples.singleton"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the same arguments: one task",
        "other arguments: two tasks",
        "the same user, another reason: one task",
        "another user: two tasks",
        "refused, and told of the first: one task",
        f"refused when decorating: key template '{{name}}:{{user_id}}': {MISSPELT}",
        "the first is done: 3 pages, {'paper': 'A4'}",
        "the same arguments, after that: two tasks",
        "a reminder within a minute of the last: one task",
        "while it may run: one task",
        "when it has run for longer than that: two tasks",
    ]
