"""Redelivery: a message that is delivered again does its work, if it is still to be done, and never beside its run.

All messages are sent at once, and the broker delivers them again when the test says so: while the runs wait at their
gates, or when they have ended.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from only_one.celery.broker import visibility_timeout
from rigs.waiting import LIMIT, eventually
from tests.documented import BROKERS, documented
from tests.live import app as live
from tests.live.brokers import KIND, options_for_redis
from tests.live.workers import Scene, World

VISIBILITY = 0.9
"""Seconds: what is requeued waits for a third of it at the longest."""


@dataclass(frozen=True)
class Case:
    """A message that is delivered again.

    Attributes:
        how: its first run ends.
        results: where they are stored, if they are.
        is_late: it is delivered again when the run has ended, as there was no free place in a worker before.
    """

    how: str
    results: str = "stored"
    is_late: bool = False

    def __str__(self) -> str:
        return f"{self.how}, results {self.results}{', late' * self.is_late}"


CASES = [
    *[Case(how) for how in ("return", "exception", "retry", "replace", "reject", "kill")],
    *[Case(how, "nowhere") for how in ("return", "retry", "kill")],
    Case("return", "ignored"),
    *[Case(how, is_late=True) for how in ("return", "retry")],
]

EXPECTED: dict[str, tuple[list[str], str]] = {
    "return": (["0"], "SUCCESS"),
    "exception": (["0"], "FAILURE"),
    "retry": (["0", "1"], "SUCCESS"),
    "replace": (["0", "0"], "SUCCESS"),
    "reject": (["0", "0"], "SUCCESS"),
    "kill": (["0", "0"], "SUCCESS"),
}
"""The attempts that are run, and what comes of them."""

HAS_ENDED, OUT_OF_DATE = "its run has ended", "it is out of date"
IS_DROPPED = {
    "return": {HAS_ENDED},
    "exception": {HAS_ENDED},
    # The second where the next run is under way when the redelivery comes.
    "retry": {HAS_ENDED, OUT_OF_DATE},
    "replace": {HAS_ENDED, OUT_OF_DATE},
}
"""Why the redelivery is dropped, where it has nothing to do any more."""


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """The workers do not look for messages to be delivered again: the test has them delivered."""
    return {"broker_transport_options": options_for_redis(visibility_timeout=VISIBILITY, unacked_restore_limit=0)}


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-c", str(len(CASES) + 7)):
        yield


@pytest.fixture(scope="module")
def redelivered(place: World) -> dict[Case, tuple[Scene, str]]:
    """The ids of all that was sent and delivered again, and has ended."""
    sent = {}
    for case in CASES:
        scene = Scene(place)
        task = live.redelivered_without_results if case.results == "nowhere" else live.redelivered
        answer = task.apply_async((scene.key, case.how), ignore_result=case.results == "ignored")
        sent[case] = scene, answer.id
    for scene, _ in sent.values():
        scene.begun()
    copies = {case: place.broker.copy_of(task_id) for case, (_, task_id) in sent.items()}
    soon = [case for case in CASES if not case.is_late]
    for case in soon:
        place.broker.deliver_again(copies[case])
    for case in soon:
        place.wait_for("received", sent[case][0].key, 3)  # the redelivery has been requeued, and comes again
    for scene, _ in sent.values():
        scene.open()
    for case in copies.keys() - soon:
        assert has_succeeded(*sent[case])
        place.broker.deliver_again(copies[case])
    return sent


def has_succeeded(scene: Scene, task_id: str) -> bool:
    """Whether a run of the task comes to succeed."""
    return eventually(lambda: f"[{task_id}] succeeded in " in scene.place.log())


def test_the_page_says_when_one_that_nobody_was_free_for_is_dropped() -> None:
    """The runs of those that are late are so long, as Redis has it; for RabbitMQ they are short."""
    is_long = visibility_timeout(live.app) / 2 < live.PAUSE
    said = documented("a redelivery for which no process was free until its run had ended", BROKERS[KIND])
    received = ", if a worker had received it before that, or after a run of at least half of the visibility timeout"
    assert said == "is dropped" + received * is_long


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_redelivery_is_never_beside_the_run(redelivered: dict[Case, tuple[Scene, str]], case: Case) -> None:
    scene, task_id = redelivered[case]
    place = scene.place
    attempts, state = EXPECTED[case.how]

    def why_dropped() -> set[str]:
        return set(re.findall(rf"redelivery of [\w. ]+\[{task_id}\] dropped: (.*)", place.log()))

    if case.how in IS_DROPPED:
        assert eventually(why_dropped)
        assert why_dropped() <= IS_DROPPED[case.how]
    place.wait_for("end", scene.key, len(attempts))
    if case.how in {"reject", "retry"}:
        # Celery stores the state of the first run, too, and may do so when the second one has succeeded: it looks for
        # a success, and then stores, in two commands.
        assert has_succeeded(scene, task_id)
    elif case.results == "stored":
        # Another one each time: it keeps the failure that Celery has stored of a first run that was killed.
        assert eventually(lambda: live.app.AsyncResult(task_id).state == state)
    if case.how in {"return", "exception"}:
        place.catch_up()
        stored = [event.what for event in place.events(f"/celery-task-meta-{task_id}") if event.what == "set"]
        assert len(stored) == (case.results == "stored")
    assert scene.runs() == attempts


@pytest.mark.parametrize("task", [live.BELOW["buffered"], live.ABOVE["buffered"]], ids=["below", "above"])
def test_a_killed_task_of_buffer_one_is_dropped_for_a_newer_one_that_waits(scene: Scene, task: Any) -> None:
    task.delay(scene.key, 1, "gate")
    pid = scene.begun().pid
    newer = task.delay(scene.key, 2)
    scene.place.wait_for("seen", scene.key)
    os.kill(pid, signal.SIGKILL)
    assert newer.get(timeout=LIMIT) == 2
    assert eventually(lambda: scene.place.broker.messages() == 0)
    assert scene.place.witness.lines("end", scene.key) == [["2"]]


@pytest.mark.usefixtures("redelivered")
def test_nothing_is_left(place: World) -> None:
    assert eventually(lambda: place.broker.messages() == 0)
    assert place.no_key_is_left()
