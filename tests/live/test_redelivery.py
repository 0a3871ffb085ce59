"""Redelivery: a message that is delivered again does its work, if it is still to be done, and never beside its run.

All messages are sent at once, and the broker delivers them again when the test says so: while the runs wait at their
gates, or when they have ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from only_one.celery.broker import visibility_timeout
from rigs.waiting import eventually
from tests.documented import BROKERS, documented
from tests.live import app as live
from tests.live.brokers import KIND
from tests.live.workers import Scene, World

VISIBILITY = 0.9
"""Seconds: what is requeued waits for a third of it at the longest."""

HAS_ENDED, OUT_OF_DATE = "its run has ended", "it is out of date"
CASES: dict[str, tuple[list[str], str, set[str]]] = {
    "return": (["0"], "SUCCESS", {HAS_ENDED}),
    "return, late": (["0"], "SUCCESS", {HAS_ENDED}),
    "exception": (["0"], "FAILURE", {HAS_ENDED}),
    # It is out of date where the next run is under way when the redelivery comes.
    "retry": (["0", "1"], "SUCCESS", {HAS_ENDED, OUT_OF_DATE}),
    "replace": (["0", "0"], "SUCCESS", {HAS_ENDED, OUT_OF_DATE}),
    "reject": (["0", "0"], "SUCCESS", set()),
    "kill": (["0", "0"], "SUCCESS", set()),
}
"""By how the first run ends: the attempts that are run, what comes of them, and why the redelivery may be dropped.

It is late if it comes when the run has ended, as there was no free place in a worker before.
"""


@pytest.fixture(scope="module")
def redelivered(place: World) -> Iterator[dict[str, tuple[Scene, str]]]:
    """The ids of all that was sent and delivered again, and has ended."""
    sent, copies = {}, {}
    with place.worker("-c", str(len(CASES) + 2)):
        for case in CASES:
            scene = Scene(place)
            sent[case] = scene, live.redelivered.delay(scene.key, case.partition(",")[0]).id
        for case, (scene, task_id) in sent.items():
            scene.begun()
            copies[case] = place.broker.copy_of(task_id)
        late = copies.pop("return, late")
        for copy in copies.values():
            place.broker.deliver_again(copy)
        for case in copies:
            place.wait_for("received", sent[case][0].key, 3)  # the redelivery has been requeued, and comes again
        for scene, _ in sent.values():
            scene.open()
        assert has_succeeded(*sent["return, late"])
        place.broker.deliver_again(late)
        yield sent
        assert eventually(lambda: place.broker.messages() == 0)
        assert place.no_key_is_left()


def has_succeeded(scene: Scene, task_id: str) -> bool:
    """Whether a run of the task comes to succeed."""
    return eventually(lambda: f"[{task_id}] succeeded in " in scene.place.log())


@pytest.mark.usefixtures("place")
def test_the_page_says_when_one_that_nobody_was_free_for_is_dropped() -> None:
    """The runs are so long, as Redis has it; for RabbitMQ they are short."""
    is_long = visibility_timeout(live.app) / 2 < live.PAUSE
    said = documented("a redelivery for which no process was free until its run had ended", BROKERS[KIND])
    received = ", if a worker had received it before that, or after a run of at least half of the visibility timeout"
    assert said == "is dropped" + received * is_long


@pytest.mark.parametrize("case", CASES)
def test_a_redelivery_is_never_beside_the_run(redelivered: dict[str, tuple[Scene, str]], case: str) -> None:
    (scene, task_id), (attempts, state, reasons) = redelivered[case], CASES[case]
    place = scene.place

    def why_dropped() -> set[str]:
        return set(re.findall(rf"redelivery of [\w. ]+\[{task_id}\] dropped: (.*)", place.log()))

    assert not reasons or eventually(why_dropped)
    assert why_dropped() <= reasons
    place.wait_for("end", scene.key, len(attempts))
    if case in {"kill", "reject", "retry"}:
        # Celery stores the state of the first run, too, and may do so when the second one has succeeded: it looks for
        # a success, and then stores, in two commands.
        assert has_succeeded(scene, task_id)
    else:
        assert eventually(lambda: live.app.AsyncResult(task_id).state == state)
    if len(attempts) == 1:
        place.catch_up()
        assert place.events(f"/celery-task-meta-{task_id}").count("set") == 1
    assert scene.runs() == attempts
