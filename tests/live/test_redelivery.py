"""Nothing is skipped behind itself: a message that is delivered again does its work, if it is still to be done.

A run is never beside another of its key, by a file that is opened to append and knows nothing of the lock.
The messages of a group of tests are sent together, as most of the time they wait for a broker.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any
from uuid import uuid4

import pytest
from celery import VERSION

from tests.live import redelivery_app as live
from tests.live.workers import World, kill_tree, world
from tests.test_holder import CONTAINER
from tests.waiting import LIMIT, eventually

PATIENCE = 5.0
"""Seconds for which a retry waits in its worker for the attempt before it."""

BARE = "bare"
"""The queue of the worker that stores no results."""

FULL = "full"
"""The queue of a worker that runs one task for each of its processes, and has no room for copies."""

ENDED = ["return", "exception", "retry"]
HOW = ["return", "exception", "retry", "reject", "kill"]
RESULTS = ["result backend", "no result backend", "ignore_result", "no room"]
CASES = [each for each in product(HOW, RESULTS) if each[0] in ENDED or each[1] != "no room"]


@dataclass
class Sent:
    """A message that was sent."""

    gate: str
    answer: Any


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        world(live.app, "tests.live.redelivery_app", tmp_path_factory.mktemp("redelivery")) as found,
        found.worker("-c", "14"),
        found.worker("-c", "7", "-Q", BARE, LIVE_RESULTS="disabled://"),
        found.worker("-c", "3", "-Q", FULL),
    ):
        yield found


def send(task: Any, *args: object, **options: Any) -> Sent:
    gate = f"gate-{uuid4().hex}"
    return Sent(gate, task.apply_async((gate, *args), **options))


def is_drained(place: World) -> bool:
    """Whether no message is left, neither in a queue nor in a worker."""
    return not place.client.exists("celery", BARE, FULL, "unacked")


def runs(place: World, gate: str) -> list[str]:
    """The attempts that have run, none of them beside another."""
    begins, ends = place.notes("begin", gate), place.notes("end", gate)
    assert len(begins) == len(ends)
    assert all(end.at < begin.at for end, begin in zip(ends, begins[1:], strict=False)), "beside each other"
    return [each.rest[0] for each in begins]


def stored(place: World, sent: Sent) -> int:
    """How often a result was stored."""
    return len([event for event in place.events(f"/celery-task-meta-{sent.answer.id}") if event.what == "set"])


@pytest.fixture(scope="module")
def copied(place: World) -> dict[tuple[str, str], Sent]:
    """Tasks whose messages are delivered again while they run, and what became of them."""
    began = time.monotonic()
    options: dict[str, dict[str, Any]] = {
        "result backend": {},
        "no result backend": {"queue": BARE},
        "ignore_result": {"ignore_result": True},
        "no room": {"queue": FULL},
    }
    found = {(how, results): send(live.late, live.LONG, how, **options[results]) for how in HOW for results in RESULTS}
    for each in found.values():
        place.wait_for("end", each.gate)
    assert eventually(lambda: is_drained(place), LIMIT)
    assert eventually(lambda: not place.keys_of_runs())
    print(f"{len(found)} messages, drained after {time.monotonic() - began:.1f} s")
    return found


EXPECTED = {
    "return": (["0"], "SUCCESS", "run 1"),
    "exception": (["0"], "FAILURE", None),
    "retry": (["0", "1"], "SUCCESS", "run 2"),
    "reject": (["0", "0"], "SUCCESS", "run 2"),
    "kill": (["0", "0"], "SUCCESS", "run 2"),
}

STORED_ALL_THE_SAME = {
    "exception": VERSION < (5, 6, 3),
    "retry": (VERSION < (5, 6, 3)) + (VERSION < (5, 7)),
    "kill": VERSION < (5, 6, 3),
}
"""How often Celery stores a result that the call said to ignore: it heeds that in failures and retries since 5.6.3,
and has the attempts after a retry heed it since 5.7."""


@pytest.mark.parametrize(("how", "results"), CASES)
def test_a_copy_is_never_beside_the_run(
    place: World, copied: dict[tuple[str, str], Sent], how: str, results: str
) -> None:
    sent = copied[how, results]
    attempts, state, result = EXPECTED[how]
    received = len(place.notes("received", sent.gate))
    print(f"{how}, {results}: received {received} times, run {len(runs(place, sent.gate))} times")
    assert received > len(attempts), "no copy has come"
    assert runs(place, sent.gate) == attempts
    if results in {"result backend", "no room"}:
        assert sent.answer.state == state
        assert result in (sent.answer.result, None)
        if how in {"return", "exception"}:
            assert stored(place, sent) == 1
    else:
        assert stored(place, sent) == (STORED_ALL_THE_SAME.get(how, 0) if results == "ignore_result" else 0)


@pytest.mark.parametrize("results", RESULTS[:3])
def test_a_message_that_is_delivered_again_after_a_crash(place: World, results: str) -> None:
    options: dict[str, Any] = {"queue": BARE} if results == "no result backend" else {}
    sent = send(live.safe, 0, "kill", ignore_result=results == "ignore_result", **options)
    place.wait_for("end", sent.gate, 2)
    assert eventually(lambda: is_drained(place), LIMIT)
    assert runs(place, sent.gate) == ["0", "0"]
    if results == "result backend":
        assert (sent.answer.state, sent.answer.result) == ("SUCCESS", "run 2")


def test_a_retry_waits_for_the_attempt_before_it_to_clean_up(place: World) -> None:
    """In its worker, and when that takes too long, in the queue."""
    every = {seconds: send(live.cleans_up, seconds) for seconds in (0.0, 1.5, PATIENCE + 1)}
    for seconds, sent in every.items():
        assert sent.answer.get(timeout=LIMIT) == "attempt 1"
        assert runs(place, sent.gate) == ["0", "1"]
        (end, _), (_, begin) = place.notes("end", sent.gate), place.notes("begin", sent.gate)
        print(f"clean-up of {seconds} s: the retry begins {begin.at - end.at:.3f} s after it")
        assert (len(place.notes("received", sent.gate)) > 2) == (seconds > PATIENCE)


def test_a_message_whose_worker_is_lost(place: World) -> None:
    """A worker of this machine, one of another, and one that is shut down at once: another does the work once more."""
    cases = {"this machine": live.safe, "another machine": live.leased, "cold shutdown": live.safe}
    sent, ended = {}, {}
    with ExitStack() as stack:
        for name, task in cases.items():
            worker = stack.enter_context(place.worker("-c", "1", "-Q", name))
            sent[name] = send(task, LIMIT, queue=name)
            place.wait_for("begin", sent[name].gate)
            if name == "cold shutdown":
                worker.signal(signal.SIGQUIT)
                worker.wait(LIMIT)
            else:
                kill_tree(worker)
            ended[name] = time.monotonic()
        for name in cases:
            inside = (CONTAINER or []) if name == "another machine" else []
            stack.enter_context(place.worker("-c", "1", "-Q", name, inside=inside))
        for name in cases:
            begin = place.wait_for("begin", sent[name].gate, 2)
            print(f"{name}: done again {begin.at - ended[name]:.1f} s after it")
            assert sent[name].answer.get(timeout=LIMIT) == "run 2"
        assert eventually(lambda: is_drained(place) and not place.client.exists(*cases), LIMIT)
        assert [len(place.notes("begin", each.gate)) for each in sent.values()] == [2] * len(cases)
        assert [len(place.notes("end", each.gate)) for each in sent.values()] == [1] * len(cases)
