"""Decorated Celery tasks on a real worker with several processes, and a real broker and result backend."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import PREFIX, Scene, World

DUPLICATES = 6


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-c", "4"):
        yield


def test_duplicates_of_a_task_that_runs_are_skipped(scene: Scene) -> None:
    task = live.plain
    answers = [task.delay(scene.key, "gate") for _ in range(DUPLICATES)]
    answers.append(task.apply_async(kwargs={"key": scene.key}))
    begun = scene.begun()
    scene.place.wait_for("seen", scene.key, DUPLICATES - 1)
    assert eventually(lambda: scene.place.log().count(f"{scene.key} is taken by") == DUPLICATES)
    holder = scene.holder()
    assert holder is not None
    assert (holder.name, holder.attempt, holder.pid) == (task.name, 0, begun.pid)
    (running,) = [answer for answer in answers if answer.id == holder.task_id]
    scene.open()
    assert scene.is_free()
    assert scene.runs() == ["0"]
    found = running.get(timeout=LIMIT)
    assert (found["key"], found["name"], found["id"]) == (PREFIX + scene.key, task.name, running.id)
    assert found["held"]
    assert [answer.get(timeout=LIMIT) for answer in answers if answer != running] == [None] * DUPLICATES
    assert [answer.state for answer in answers] == ["SUCCESS"] * len(answers)


def test_a_worker_process_that_is_killed_frees_its_key_within_the_lease(scene: Scene) -> None:
    task = live.BELOW["leased"]
    killed = task.delay(scene.key, "gate")
    pid = scene.begun().pid
    assert task.delay(scene.key).get(timeout=LIMIT) is None
    os.kill(pid, signal.SIGKILL)
    assert scene.is_free()
    assert scene.place.notes("end", scene.key) == []
    answer = task.delay(scene.key)
    assert answer.get(timeout=LIMIT)["id"] == answer.id
    with pytest.raises(Exception, match="SIGKILL"):
        killed.get(timeout=LIMIT)
