"""A unique task that a worker has received and has not begun: its key names the worker, and is free when that dies.

The worker has one process, which a run keeps busy until its gate is opened; what comes after it waits.
What it does at each of Celery's signals is in `tests/celery/test_received_tasks.py`.
"""

from __future__ import annotations

import os
import signal

import pytest
from celery.exceptions import NotRegistered

from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import Scene, World, kill_tree

HOUR = 3600
A_LEASE = 30

unique = live.unique


def keep_busy(place: World) -> Scene:
    """Have the worker's one process run something until its gate is opened."""
    first = Scene(place)
    unique.delay(first.key, "gate")
    first.begun()
    return first


def is_received(scene: Scene, pid: int, attempt: int = 0) -> bool:
    """Whether the key comes to be that of a task which this worker has received."""

    def is_its() -> bool:
        holder = scene.holder()
        return holder is not None and (holder.state, holder.pid, holder.attempt) == ("received", pid, attempt)

    return eventually(is_its)


def test_it_is_free_at_once_when_its_worker_is_killed(scene: Scene) -> None:
    """Also one that waits for its time, until then: with a countdown, or as a retry."""
    counts_down, retry = Scene(scene.place), Scene(scene.place)
    with scene.place.worker("-c", "1") as worker:
        waits = {retry: unique.delay(retry.key, "retry in an hour")}
        assert is_received(retry, worker.pid, attempt=1)
        keep_busy(scene.place)
        waits[scene] = unique.delay(scene.key)
        waits[counts_down] = unique.apply_async((counts_down.key,), countdown=HOUR)
        for each in (scene, counts_down):
            assert is_received(each, worker.pid)
        for each, its in waits.items():
            assert unique.delay(each.key) == its
        kill_tree(worker)
    for each, its in waits.items():
        again = unique.delay(each.key)
        assert again != its
        assert each.state() == ("queued", again.id)
    scene.place.client.flushdb()


@pytest.mark.parametrize("how", ["return", "replace"])
def test_a_redelivery_for_which_no_process_is_free_until_its_run_has_ended_is_dropped(scene: Scene, how: str) -> None:
    """As after a connection to Redis that was lost for a moment: the worker has received it while the run lasted."""
    with scene.place.worker("-c", "1"):
        answer = live.redelivered.delay(scene.key, how)
        scene.begun()
        before = scene.place.received(answer.id)
        scene.place.broker.deliver_again(scene.place.broker.copy_of(answer.id))
        assert eventually(lambda: scene.place.received(answer.id) > before)
        scene.open()
        assert eventually(lambda: f"[{answer.id}] dropped: its run has ended" in scene.place.log())
        assert answer.get(timeout=LIMIT)
    assert scene.runs() == ["0"] * (1 + (how == "replace"))


@pytest.mark.parametrize("shutdown", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
def test_it_is_queued_again_when_its_worker_ends(scene: Scene, shutdown: signal.Signals) -> None:
    waiting = [Scene(scene.place) for _ in range(3)]
    with scene.place.worker("-c", "1") as worker:
        first = keep_busy(scene.place)
        waits = {each: unique.delay(each.key) for each in waiting}
        assert is_received(waiting[-1], worker.pid)
        os.kill(worker.pid, shutdown)
        if shutdown is signal.SIGTERM:
            first.open()
        worker.wait(LIMIT)
    unrun = {each: its for each, its in waits.items() if not scene.place.notes("begin", each.key)}
    assert unrun
    for each, its in unrun.items():
        assert each.state() == ("queued", its.id)
        assert each.expires_in() > A_LEASE
        assert unique.delay(each.key) == its
    scene.place.client.flushdb()


def test_it_is_free_when_its_worker_does_not_know_the_task(scene: Scene) -> None:
    """As in a deployment; Celery drops its message."""
    unknown = live.above("in another version")
    with scene.place.worker("-c", "1"):
        for _ in range(2):
            answer = unknown.delay(scene.key)
            assert not answer.is_duplicate
            with pytest.raises(NotRegistered):
                answer.get(timeout=LIMIT)
            assert scene.is_free()
