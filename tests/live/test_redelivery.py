"""Redelivery: a message that is delivered again does its work, if it is still to be done, and never beside its run.

All messages are sent at once, and the broker delivers them again when the test says so: while the runs wait at their
gates, or when they have ended.
"""

from __future__ import annotations

import re
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
    *[Case(how) for how in ("return", "exception", "retry", "reject", "kill")],
    *[Case(how, "nowhere") for how in ("return", "retry", "kill")],
    Case("return", "ignored"),
    *[Case(how, is_late=True) for how in ("return", "retry")],
]

EXPECTED: dict[str, tuple[list[str], str]] = {
    "return": (["0"], "SUCCESS"),
    "exception": (["0"], "FAILURE"),
    "retry": (["0", "1"], "SUCCESS"),
    "reject": (["0", "0"], "SUCCESS"),
    "kill": (["0", "0"], "SUCCESS"),
}
"""The attempts that are run, and what comes of them."""

HAS_ENDED, OUT_OF_DATE = "its run has ended", "it is out of date"
IS_DROPPED = {
    "return": {HAS_ENDED},
    "exception": {HAS_ENDED},
    "retry": {HAS_ENDED, OUT_OF_DATE},  # the second where the retry is running when the redelivery comes
}
"""Why the redelivery is dropped, where it has nothing to do any more."""


@dataclass
class Sent:
    """A message that was sent."""

    scene: Scene
    answer: Any


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """The workers do not look for messages to be delivered again: the test has them delivered."""
    return {"broker_transport_options": options_for_redis(visibility_timeout=VISIBILITY, unacked_restore_limit=0)}


@pytest.fixture(scope="module", params=["redis", "unmarked"] if KIND == "redis" else [KIND])
def broker_kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-c", str(len(CASES) + 7)):
        yield


def send(place: World, case: Case) -> Sent:
    scene = Scene(place)
    task = live.redelivered_without_results if case.results == "nowhere" else live.redelivered
    return Sent(scene, task.apply_async((scene.key, case.how), ignore_result=case.results == "ignored"))


@pytest.fixture(scope="module")
def redelivered(place: World) -> dict[Case, Sent]:
    """All that was sent and delivered again, and has ended."""
    sent = {case: send(place, case) for case in CASES}
    for each in sent.values():
        each.scene.begun()
    copies = {case: place.broker.copy_of(each.answer.id) for case, each in sent.items()}
    soon = [case for case in CASES if not case.is_late]
    for case in soon:
        place.broker.deliver_again(copies[case])
    for case in soon:
        place.wait_for("received", sent[case].scene.key, 3)  # the redelivery has been requeued, and comes again
    for each in sent.values():
        each.scene.open()
    for case in copies.keys() - soon:
        succeeded = f"[{sent[case].answer.id}] succeeded"
        assert eventually(lambda succeeded=succeeded: succeeded in place.log())  # type: ignore[misc]
        place.broker.deliver_again(copies[case])
    return sent


def why_dropped(sent: Sent) -> set[str]:
    pattern = rf"redelivery of [\w. ]+\[{sent.answer.id}\] dropped: (.*)"
    return set(re.findall(pattern, sent.scene.place.log()))


def stored(sent: Sent) -> int:
    """How often a result was stored."""
    sent.scene.place.catch_up()
    return len([each for each in sent.scene.place.events(f"/celery-task-meta-{sent.answer.id}") if each.what == "set"])


def test_the_page_says_when_one_that_nobody_was_free_for_is_dropped() -> None:
    """The runs of those that are late are so long, as Redis has it; for RabbitMQ they are short."""
    is_long = visibility_timeout(live.app) / 2 < live.PAUSE
    said = documented("a redelivery for which no process was free until its run had ended", BROKERS[KIND])
    received = ", if a worker had received it before that, or after a run of at least half of the visibility timeout"
    assert said == "is dropped" + received * is_long


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_redelivery_is_never_beside_the_run(redelivered: dict[Case, Sent], case: Case) -> None:
    sent = redelivered[case]
    attempts, state = EXPECTED[case.how]
    if case.how in IS_DROPPED:
        assert eventually(lambda: why_dropped(sent))
        assert why_dropped(sent) <= IS_DROPPED[case.how]
    sent.scene.place.wait_for("end", sent.scene.key, len(attempts))
    if case.how in {"reject", "retry"}:
        # Celery stores the state of the first run, too, and may do so when the second one has succeeded: it looks for
        # a success, and then stores, in two commands.
        assert eventually(lambda: f"[{sent.answer.id}] succeeded in " in sent.scene.place.log())
    elif case.results == "stored":
        # Another one each time: it keeps the failure that Celery has stored of a first run that was killed.
        assert eventually(lambda: live.app.AsyncResult(sent.answer.id).state == state)
    if case.how in {"return", "exception"}:
        assert stored(sent) == (case.results == "stored")
    assert sent.scene.runs() == attempts


def test_a_retry_waits_for_the_previous_attempt_to_clean_up(scene: Scene) -> None:
    """In the queue, and when that takes longer, in the queue again."""
    answer = live.plain.delay(scene.key, "once", "retry and clean up")
    scene.place.wait_for("received", scene.key, 3)
    scene.open()
    assert answer.get(timeout=LIMIT)["attempt"] == 1
    assert scene.runs() == ["0", "1"]


@pytest.mark.usefixtures("redelivered")
def test_nothing_is_left(place: World) -> None:
    assert eventually(lambda: place.broker.messages() == 0)
    assert place.no_key_is_left()
