"""Decorated Celery tasks on a real worker with several processes, and a real broker and result backend."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import PREFIX, Scene, World

DUPLICATES = 6


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-c", "4"):
        yield


@pytest.mark.parametrize("task", [live.plain, live.ignored], ids=["with a result", "whose result is ignored"])
def test_duplicates_of_a_task_that_runs_are_skipped(scene: Scene, task: Any) -> None:
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
    if task is live.ignored:
        assert not scene.place.client.exists(*[f"celery-task-meta-{answer.id}" for answer in answers])
        return
    found = running.get(timeout=LIMIT)
    assert (found["key"], found["name"], found["id"], found["held"]) == (
        PREFIX + scene.key,
        task.name,
        running.id,
        True,
    )
    assert [answer.get(timeout=LIMIT) for answer in answers if answer != running] == [None] * DUPLICATES
    assert [answer.state for answer in answers] == ["SUCCESS"] * len(answers)


@pytest.mark.parametrize(
    ("what", "name"),
    [("a task", "shared"), ("its run", "shared"), ("a function", "function")],
)
def test_what_a_run_calls_is_a_plain_function(scene: Scene, what: str, name: str) -> None:
    found = live.calls.delay(scene.key, what).get(timeout=LIMIT)
    assert (found["name"], found["id"], found["attempt"]) == (f"tests.live.app.{name}", None, None)


def test_a_decorated_function_in_a_decorated_task_is_a_plain_function(scene: Scene) -> None:
    answer = live.nests.delay(scene.key)
    before, inner, after = answer.get(timeout=LIMIT)
    assert before == after
    assert (before["name"], before["id"]) == (live.nests.name, answer.id)
    assert (inner["name"], inner["id"]) == ("tests.live.app.function", None)
    assert inner["key"] == f"{PREFIX}tests.live.app.function:{scene.key}"


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
