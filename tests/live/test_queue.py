"""Unique from queued to finished, by a real worker of several processes: what runs, and when the key is free.

What is to stay queued is sent to a queue that the worker does not know, and moved to the one that it does.
How such a task may end is in `test_ends`, what a worker does with one that it has received in `test_received`, and what
others in a canvas get in `test_canvas`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import ChordError

from only_one import AlreadyRunning
from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.brokers import KIND
from tests.live.workers import Scene, World, answered

unique = live.unique


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-c", "4"):
        yield


def test_queued_then_running_then_free(scene: Scene) -> None:
    answer = unique.apply_async((scene.key, "gate", "done"), queue=scene.queue)
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id, holder.pid) == ("queued", answer.id, os.getpid())
    assert unique.delay(scene.key) == answer
    assert scene.queued(scene.queue) == 1
    scene.consume()
    begun = scene.begun()
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id, holder.attempt) == ("running", answer.id, 0)
    assert (holder.pid, holder.name) == (begun.pid, unique.name)
    assert 0 < scene.expires_in() <= live.TIMEOUT
    duplicate = unique.delay(scene.key)
    assert duplicate == answer
    assert scene.queued() == scene.queued(scene.queue) == 0
    scene.open()
    assert duplicate.get(timeout=LIMIT) == "done"
    assert scene.is_free()
    assert scene.gaps() == 1  # at its end, and not between queued and running
    again = unique.delay(scene.key, "again")
    assert again != answer
    assert again.get(timeout=LIMIT) == "again"


@pytest.mark.parametrize("ends_by", ["its run", "revoke"])
def test_a_retry_keeps_the_key_through_its_wait(scene: Scene, ends_by: str) -> None:
    answer = unique.apply_async((scene.key, "once", "retry later"), queue=scene.queue)
    scene.consume()
    # In this test's queue again, where it was the first time, if the broker is Redis.
    assert eventually(lambda: answer.state == "RETRY" and (KIND != "redis" or scene.queued(scene.queue) == 1))
    assert unique.delay(scene.key) == answer
    if ends_by == "revoke":
        assert answered(live.app.control.revoke, answer.id)
        assert scene.is_held()
    scene.consume()
    assert eventually(lambda: answer.state == ("REVOKED" if ends_by == "revoke" else "SUCCESS"))
    assert scene.is_free()
    assert scene.runs() == (["0"] if ends_by == "revoke" else ["0", "1"])
    assert scene.gaps() == 1


def test_a_run_takes_over_a_key_that_is_merely_queued_and_leaves_it_to_the_one_that_waits(scene: Scene) -> None:
    """By name, a task goes past the decorator, and its run is decorated."""
    queued = unique.apply_async((scene.key, "queued"), queue=scene.queue)
    running = live.app.send_task(unique.name, (scene.key, "gate", "running"))
    scene.begun()
    assert scene.state() == ("running", running.id)
    assert unique.delay(scene.key) == running != queued
    assert live.app.send_task(unique.name, (scene.key,)).get(timeout=LIMIT) is None
    scene.open()
    assert running.get(timeout=LIMIT) == "running"
    assert unique.delay(scene.key) == queued  # which has its key again
    scene.consume()
    assert queued.get(timeout=LIMIT) == "queued"
    assert scene.is_free()
    assert scene.runs() == ["0", "0"]
    assert scene.gaps() == 1


def test_the_runs_of_starmap_and_chunks_are_decorated(scene: Scene) -> None:
    held = unique.delay(scene.key, "gate", "done")
    scene.begun()
    items = [(scene.key, "done"), (f"{scene.key}-free", "done")]
    assert unique.starmap(items).apply_async().get(timeout=LIMIT) == [None, "done"]
    assert unique.chunks(items, 1).apply_async().get(timeout=LIMIT) == [[None], ["done"]]
    scene.open()
    assert held.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["0"]


CANVAS: dict[str, Callable[[Any], Any]] = {
    "chain": lambda work: chain(work(), work()),
    "chord of chains": lambda work: chord(
        [chain(work(), live.after.s()), chain(live.other.si(), work())], live.after.s()
    ),
}


@pytest.mark.parametrize("is_behind", [False, True], ids=["of itself", "of one that is queued"])
@pytest.mark.parametrize("canvas", CANVAS)
def test_a_canvas_of_duplicates_ends(scene: Scene, canvas: str, *, is_behind: bool) -> None:
    """Its runs take over what is merely queued, which runs, too, when it comes."""
    queued = unique.apply_async((scene.key, "done"), queue=scene.queue) if is_behind else None
    answer = CANVAS[canvas](lambda: unique.si(scene.key, "done")).apply_async()
    with suppress(AlreadyRunning, ChordError):
        answer.get(timeout=LIMIT)
    scene.place.wait_for("end", scene.key)
    if queued is not None:
        scene.consume()
        assert queued.get(timeout=LIMIT) in {"done", None}
    assert scene.is_free()
    assert set(scene.runs()) == {"0"}
