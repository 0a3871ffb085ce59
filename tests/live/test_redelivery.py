"""Nothing is skipped behind itself: a message that is delivered again does its work, if it is still to be done.

A run is never beside another of its key, by a file that is opened to append and knows nothing of the lock.
All messages are sent at once, and the broker delivers them again when the test says so: while the runs wait at their
gates, or when they have ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from celery import chain

from only_one.celery.broker import visibility_timeout
from rigs.waiting import LIMIT, eventually
from tests.documented import BROKERS, documented
from tests.live import redelivery_app as live
from tests.live.brokers import KIND
from tests.live.workers import World, world


@dataclass(frozen=True)
class Case:
    """A message of which there is a copy.

    Attributes:
        how: its first run ends.
        results: where they are stored, if they are.
        is_late: the copy is delivered when the run has ended, as there was no free place in a worker before.
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

EXPECTED: dict[str, tuple[list[str], str, str | None]] = {
    "return": (["0"], "SUCCESS", "run 1"),
    "exception": (["0"], "FAILURE", None),
    "retry": (["0", "1"], "SUCCESS", "run 2"),
    "reject": (["0", "0"], "SUCCESS", "run 2"),
    "kill": (["0", "0"], "SUCCESS", "run 2"),
}
"""The attempts that are run, and what comes of them."""

HAS_ENDED, OUT_OF_DATE = "its run has ended", "it is out of date"
IS_DROPPED = {
    "return": {HAS_ENDED},
    "exception": {HAS_ENDED},
    "retry": {HAS_ENDED, OUT_OF_DATE},  # the second where the retry is running when the copy comes
}
"""Why the copy is dropped, where it has nothing to do any more."""


@dataclass
class Sent:
    """A message that was sent."""

    gate: str
    answer: Any


@dataclass
class Everything:
    """All that was sent, and has ended."""

    copied: dict[Case, Sent]
    lost: Sent
    cleans_up: dict[str, Sent]


@pytest.fixture(scope="module", params=["redis", "unmarked"] if KIND == "redis" else [KIND])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("redelivery")
    with (
        world(live.app, "tests.live.redelivery_app", folder, kind=request.param) as found,
        found.worker("-c", str(len(CASES) + 7)),
    ):
        yield found


def send(case: Case) -> Sent:
    gate = f"gate-{uuid4().hex}"
    task = live.without_results if case.results == "nowhere" else live.late
    return Sent(gate, task.apply_async((gate, case.how), ignore_result=case.results == "ignored"))


@pytest.fixture(scope="module")
def everything(place: World) -> Everything:
    copied = {case: send(case) for case in CASES}
    gates = [f"gate-{uuid4().hex}" for _ in range(3)]
    followed = chain(live.lost.s(gates[0]), live.follow.s()).apply_async()
    cleans_up = {
        where: Sent(gate, live.cleans_up.delay(gate))
        for where, gate in zip(["worker", "queue"], gates[1:], strict=True)
    }
    found = Everything(copied, Sent(gates[0], followed), cleans_up)

    place.wait_for("received", cleans_up["worker"].gate, 2)
    place.client.rpush(cleans_up["worker"].gate, 1)

    ids = {sent.gate: sent.answer.id for sent in copied.values()} | {gates[0]: followed.parent.id}
    late = {sent.gate for case, sent in copied.items() if case.is_late}
    for gate in ids:
        place.wait_for("begin", gate)
    copies = {gate: place.broker.copy_of(task_id) for gate, task_id in ids.items()}
    for gate in ids.keys() - late:
        place.broker.deliver_again(copies[gate])
    for gate in ids.keys() - late:
        place.wait_for("received", gate, 3)  # the copy has been put back, and comes again
    for gate in ids:
        place.client.rpush(gate, 1)
    for gate in late:
        assert eventually(lambda gate=gate: f"[{ids[gate]}] succeeded" in place.log())  # type: ignore[misc]
        place.broker.deliver_again(copies[gate])

    place.wait_for("received", cleans_up["queue"].gate, 3)
    place.client.rpush(cleans_up["queue"].gate, 1)
    return found


def why_dropped(place: World, sent: Sent) -> set[str]:
    return set(re.findall(rf"redelivery of [\w.]+\[{sent.answer.id}\] dropped: (.*)", place.log()))


def runs(place: World, gate: str) -> list[str]:
    """The attempts that have run, none of them beside another."""
    begins, ends = place.notes("begin", gate), place.notes("end", gate)
    assert len(begins) == len(ends)
    assert all(end.at < begin.at for end, begin in zip(ends, begins[1:], strict=False)), "beside each other"
    return [each.rest[0] for each in begins]


def stored(place: World, sent: Sent) -> int:
    """How often a result was stored."""
    place.catch_up()
    return len([event for event in place.events(f"/celery-task-meta-{sent.answer.id}") if event.what == "set"])


def test_the_page_says_when_one_that_nobody_was_free_for_is_dropped() -> None:
    """The runs of those that are late are so long, as Redis has it; for RabbitMQ they are short."""
    is_long = visibility_timeout(live.app) / 2 < live.LONG
    said = documented("a redelivery for which no worker was free until its run had ended", BROKERS[KIND])
    assert said == "is dropped" + ", after a run of at least half of the visibility timeout" * is_long


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_copy_is_never_beside_the_run(place: World, everything: Everything, case: Case) -> None:
    sent = everything.copied[case]
    attempts, state, result = EXPECTED[case.how]
    if case.how in IS_DROPPED:
        assert eventually(lambda: why_dropped(place, sent))
        assert why_dropped(place, sent) <= IS_DROPPED[case.how]
    place.wait_for("end", sent.gate, len(attempts))
    if case.how in {"reject", "retry"}:
        # Celery stores the state of the first run, too, and may do so when the second one has succeeded: it looks for
        # a success, and then stores, in two commands.
        assert eventually(lambda: re.search(rf"\[{sent.answer.id}\] succeeded in .*: '{result}'", place.log()))
    elif case.results == "stored":
        # Another one each time: it keeps the failure that Celery has stored of a first run that was killed.
        assert eventually(lambda: live.app.AsyncResult(sent.answer.id).state == state)
        assert result in (live.app.AsyncResult(sent.answer.id).result, None)
    if case.how in {"return", "exception"}:
        assert stored(place, sent) == (case.results == "stored")
    assert runs(place, sent.gate) == attempts


def test_a_run_that_is_killed_between_its_release_and_its_result_is_done_again(
    place: World, everything: Everything
) -> None:
    """A copy had asked before the run ended: it is not dropped before there is a result, and what comes after it."""
    sent = everything.lost
    assert sent.answer.get(timeout=LIMIT) == "run 2, followed"
    assert sent.answer.parent.get(timeout=LIMIT) == "run 2"
    assert len(place.notes("killed", sent.gate)) == 1
    assert runs(place, sent.gate) == ["0", "0"]


@pytest.mark.parametrize("where", ["worker", "queue"])
def test_a_retry_waits_for_the_attempt_before_it_to_clean_up(place: World, everything: Everything, where: str) -> None:
    """In the queue, and when that takes longer, in the queue again."""
    sent = everything.cleans_up[where]
    assert sent.answer.get(timeout=LIMIT) == "attempt 1"
    assert runs(place, sent.gate) == ["0", "1"]


def test_nothing_is_left(place: World, everything: Everything) -> None:  # noqa: ARG001 - it has ended
    assert eventually(lambda: place.broker.messages() == 0)
    assert eventually(lambda: not place.keys_of_runs())
