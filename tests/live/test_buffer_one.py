"""`buffer_one` on real workers: one runs, one waits, and the newest task runs last, also when the first is killed.

Histories in which tasks run, retry and are killed at random are searched in `tests/simulation`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import Scene, World

COUNT = 6


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-Ofair"):
        yield


@pytest.mark.parametrize("first_ends", ["by a return", "by a kill"])
@pytest.mark.parametrize("task", [live.BELOW["buffered"], live.ABOVE["buffered"]], ids=["below", "above"])
def test_of_those_that_wait_the_newest_stays(scene: Scene, task: Any, first_ends: str) -> None:
    place, answers = scene.place, []
    for number in range(COUNT):
        answers.append(task.delay(scene.key, number, "gate"))
        # It runs, or a delivery of it has been seen to: what is sent after that is newer.
        place.wait_for("seen" if number else "begin", scene.key)
        seen = {str(each) for each in range(1, number + 1)}
        assert eventually(lambda: {line[0] for line in place.witness.lines("seen", scene.key)} >= seen)  # noqa: B023
    first, *dropped, newest = answers
    assert [answer.get(timeout=LIMIT) for answer in dropped] == [None] * (COUNT - 2)
    assert not first.ready()
    assert not newest.ready()
    assert eventually(lambda: place.broker.messages() <= 2)  # one runs, one waits
    if task is live.ABOVE["buffered"]:
        assert task.delay(scene.key, COUNT - 1, "gate") == newest

    if first_ends == "by a kill":
        os.kill(scene.begun().pid, signal.SIGKILL)
    scene.open(2)
    assert newest.get(timeout=LIMIT) == COUNT - 1
    assert eventually(lambda: place.broker.messages() == 0)
    ends = place.witness.lines("end", scene.key)
    if first_ends == "by a kill":  # its redelivery is older than the newest, and is dropped
        assert ends == [[str(COUNT - 1)]]
        scene.place.client.delete(f"gate:{scene.key}")
    else:
        assert ends == [["0"], [str(COUNT - 1)]]
        assert scene.runs() == ["0", "0"]
