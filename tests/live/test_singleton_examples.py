"""What celery-singleton's README promises of its examples, kept by those of examples/singleton.py on real workers.

A run takes until its test lets it go on, so that nothing depends on how long anything takes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from examples import singleton
from only_one import AlreadyRunning, KeyTemplateError, only_one
from only_one.lock.holder import Holder
from rigs.waiting import LIMIT, eventually, is_gone
from tests.live.workers import World, kill_tree, sender, world

PREFIX = "only_one:"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("singleton")
    with (
        world(singleton.app, "tests.live.singleton_app", folder) as found,
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


def holder(place: World, key: str) -> Holder:
    found = Holder.parse(place.client.get(key) or b"")
    assert found is not None
    return found


def let_go(place: World, answer: Any) -> Any:
    """Let a run go on, and wait for its result."""
    place.client.rpush(answer.id, "go on")
    found = answer.get(timeout=LIMIT)
    assert [len(place.notes(word, answer.id)) for word in ("begin", "end")] == [1, 1]
    return found


def test_the_same_arguments_give_the_task_that_is_there_until_it_has_finished(place: World, name: str) -> None:
    first = singleton.render.delay(1, 2, 3, paper=name)
    other = singleton.render.delay(4, paper=name)
    place.wait_for("begin", first.id)
    later = singleton.render.apply_async((1, 2, 3), {"paper": name})
    assert later == first != other
    assert type(later) is type(first)
    assert let_go(place, first) == later.get(timeout=LIMIT) == f"3 pages, { ({'paper': name}) }"
    again = singleton.render.delay(1, 2, 3, paper=name)
    assert again != first
    for each in (other, again):
        let_go(place, each)


def test_a_run_that_fails_frees_its_key(place: World) -> None:
    first = singleton.rebuild.delay("")
    assert singleton.rebuild.delay("") == first
    with pytest.raises(ValueError, match="which index"):
        let_go(place, first)
    assert eventually(lambda: not keys(place))


def test_a_worker_that_is_killed_and_one_that_begins_leave_the_keys_of_others(place: World, name: str) -> None:
    """Nothing is cleared when a worker is ready, neither too little nor too much."""
    living = singleton.rebuild.delay(f"{name} of the living")
    place.wait_for("begin", living.id)
    with place.worker("-c", "1", "-Q", "doomed", SINGLETON_URL=place.server.url) as doomed:
        dead = singleton.rebuild.apply_async((name,), queue="doomed")
        child = place.wait_for("begin", dead.id).pid
        assert len(keys(place)) == 2
        kill_tree(doomed)
        assert eventually(lambda: is_gone(child))
    again = singleton.rebuild.delay(name)
    assert again != dead
    assert singleton.rebuild.delay(f"{name} of the living") == living
    os.kill(place.wait_for("begin", living.id).pid, signal.SIGKILL)  # one process of it
    with pytest.raises(Exception, match="SIGKILL"):
        living.get(timeout=LIMIT)
    assert let_go(place, again) == f"index of {name}"


def test_only_what_is_in_the_key_counts(place: World, name: str) -> None:
    first = singleton.send_digest.delay(user=name, reason=99)
    for same in [((name,), {"reason": 100}), ((name, 1), {}), ((), {"user": name})]:
        assert singleton.send_digest.apply_async(*same) == first
    assert let_go(place, first) == f"digest for {name}, because of 99"


def test_what_is_no_parameter_is_refused_when_decorating() -> None:
    """As `unique_on=["user_id"]` of a task that takes a `username` is there, which fails at each call."""
    with pytest.raises(KeyTemplateError, match=r"user_id.*username"):
        only_one("{name}:{user_id}")(singleton.app.task(lambda username: username, name="misspelt"))


def test_a_duplicate_raises_and_says_whose_it_is(place: World, name: str) -> None:
    first = singleton.export.delay(name)
    place.wait_for("begin", first.id)
    with pytest.raises(AlreadyRunning, match=first.id) as caught:
        singleton.export.delay(name)
    assert caught.value.task_id == first.id
    assert let_go(place, first) == f"data of {name}"


def test_a_run_that_outlives_its_timeout_keeps_nobody_out_and_leaves_the_key_to_the_next(place: World) -> None:
    """There, the first would delete it."""
    first = singleton.poll.delay()
    place.wait_for("begin", first.id)
    assert eventually(lambda: not keys(place))
    # In a queue where nobody takes it, it waits for longer than it may run, and is there when the first ends.
    second = singleton.poll.apply_async(queue="later")
    (key,) = keys(place)
    assert let_go(place, first) == "polled"
    assert holder(place, key.decode()).task_id == second.id
    assert singleton.poll.delay() == second != first
    place.client.lmove("later", "celery", "RIGHT", "LEFT")
    assert let_go(place, second) == "polled"


def test_one_in_a_given_time_however_short_it_is(place: World, name: str) -> None:
    first = singleton.remind.delay(name)
    assert first.get(timeout=LIMIT) == f"{name} was reminded"
    kept = holder(place, f"{PREFIX}{singleton.remind.name}:{name}")
    assert (kept.state, kept.task_id) == ("kept", first.id)
    assert singleton.remind.delay(name) == first


def test_an_app_s_configuration_holds_for_its_tasks(place: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = place.server.url
    with sender(singleton.configured, url, only_one_redis=url):
        first = singleton.count_stock.delay(name)
        with pytest.raises(AlreadyRunning) as caught:
            singleton.count_stock.delay(name)
        assert caught.value.key == f"mine:{singleton.count_stock.name}:{name}"
        assert 600_000 < place.client.pttl(caught.value.key) <= 900_000  # only_one_queue_timeout
        order = singleton.order_more.delay(name)
        assert singleton.order_more.delay(name) == order  # the decorator wins

        monkeypatch.setattr(place, "_module", "tests.live.singleton_app:strict")
        with place.worker("-c", "2", SINGLETON_URL=url):
            for each in (first, order):
                place.wait_for("begin", each.id)
            assert 60_000 < place.client.pttl(caught.value.key) <= 600_000  # only_one_timeout
            assert 0 < place.client.pttl(f"mine:{singleton.order_more.name}:{name}") <= 60_000
            assert let_go(place, first) == f"stock of {name}"
            assert let_go(place, order) == f"order of {name}"
        assert not keys(place, "mine:")
