"""Tasks of every kind in every pool: they run, are skipped, renewed, requeued and ended by limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import TimeLimitExceeded

from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import PREFIX, Scene, World, answered

SIZE = {"prefork": 3, "threads": 3, "gevent": 10, "eventlet": 10, "solo": 1}


@pytest.fixture(scope="module", params=SIZE)
def pool(request: pytest.FixtureRequest, place: World) -> Iterator[str]:
    with place.worker("-c", str(SIZE[request.param]), pool=request.param):
        yield request.param
        assert place.no_key_is_left()


def result(answer: Any) -> Any:
    """What others see of a run, or the result that it was ordered to return."""
    found = answer.get(timeout=LIMIT)
    return [found["name"], found["id"], found["attempt"], found["held"]] if isinstance(found, dict) else found


def test_duplicates_are_skipped(pool: str, scene: Scene) -> None:
    task = live.BELOW["late"]
    running = task.delay(scene.key, "gate")
    scene.begun()
    duplicates = [task.delay(scene.key, "gate") for _ in range(3)]
    duplicates.append(task.apply_async(kwargs={"key": scene.key}))
    if pool == "solo":  # which does nothing else meanwhile: they come after it
        scene.open(4)
        assert [result(each) for each in duplicates] == [[task.name, each.id, 0, True] for each in duplicates]
        return
    assert [result(duplicate) for duplicate in duplicates] == [None] * 4
    assert eventually(lambda: scene.place.log().count(f"{scene.key} is taken by") == 4)
    assert not running.ready()
    scene.open()
    assert result(running) == [task.name, running.id, 0, True]
    assert scene.runs() == ["0"]
    assert scene.is_free()


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("tasks", [live.BELOW, live.ABOVE], ids=["below", "above"])
def test_a_run_renews_its_lease(scene: Scene, tasks: dict[str, Any]) -> None:
    running = tasks["leased late"].delay(scene.key, "gate", "see it renewed", "gate")
    scene.begun()
    scene.place.client.pexpire(PREFIX + scene.key, round(live.LEASE * 500))
    scene.open()
    assert scene.place.wait_for("renewed", scene.key).rest == ["True"]
    assert scene.expires_in() > live.LEASE / 2
    scene.open()
    assert result(running)


@pytest.mark.usefixtures("pool")
def test_a_requeued_task_does_not_occupy_the_worker(scene: Scene) -> None:
    task, other = live.requeued, Scene(scene.place)
    scene.take()
    answer = task.delay(scene.key)
    assert result(live.plain.delay(other.key, 1)) == 1
    assert other.is_free()
    assert eventually(lambda: scene.place.received(answer.id) > 1)
    assert not answer.ready()
    scene.free()
    assert result(answer) == [task.name, answer.id, 0, True]
    assert scene.is_free()


@pytest.mark.parametrize(("way", "pools"), [("revoke", {"gevent", "eventlet"}), ("limit", {"gevent"})])
def test_the_key_after_a_run_that_celery_ends(pool: str, scene: Scene, way: str, pools: set[str]) -> None:
    """Where it can: when the task is revoked, and at its hard time limit; for prefork see `test_ends`."""
    if pool not in pools:
        pytest.skip("Celery ends no run there, or `test_ends` has it")
    running = live.plain.apply_async((scene.key, "gate"), time_limit=2 if way == "limit" else None)
    scene.begun()
    if way == "revoke":
        assert answered(live.app.control.revoke, running.id, terminate=True)
    else:
        with pytest.raises(TimeLimitExceeded):
            result(running)
    assert scene.is_free()
    assert len(scene.place.notes("begin", scene.key)) == 1
    assert scene.place.notes("end", scene.key) == []
    assert result(live.plain.delay(scene.key, 1)) == 1
