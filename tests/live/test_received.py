"""A unique task that a worker has received and has not begun: its key names the worker, and is free when that dies.

One of `buffer_one` has its number from then on.

The worker has one process, which a run keeps busy until its gate is opened; what comes after it waits.
What it does at each of Celery's signals is in `tests/celery/test_received_tasks.py`.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import PREFIX, Scene

A_LEASE = 30

unique = live.unique


def is_received(scene: Scene, answer: Any, pid: int) -> bool:
    """Whether the key comes to be that of the task, and of the worker that has received it."""

    def is_its() -> bool:
        holder = scene.holder()
        return holder is not None and (holder.state, holder.task_id, holder.pid) == ("received", answer.id, pid)

    return eventually(is_its)


ENDS: dict[str, tuple[signal.Signals, dict[str, Any]]] = {
    "killed": (signal.SIGKILL, {}),
    "warm": (signal.SIGTERM, {}),
    "cold": (signal.SIGQUIT, {}),
    "cold, before its eta": (signal.SIGQUIT, {"countdown": 600}),  # Celery forgets such a task only at its exit
}


@pytest.mark.parametrize(("end", "options"), ENDS.values(), ids=ENDS)
def test_it_is_queued_again_when_its_worker_ends_and_free_if_that_is_killed(
    scene: Scene, end: signal.Signals, options: dict[str, Any]
) -> None:
    first, second = Scene(scene.place), Scene(scene.place)  # the worker's process may yet be given the second
    with scene.place.worker("-c", "1") as worker:
        unique.delay(first.key, "gate")
        first.begun()
        _, answer = unique.delay(second.key), unique.apply_async((scene.key,), **options)
        assert is_received(scene, answer, worker.pid)
        assert unique.delay(scene.key) == answer
        if end is signal.SIGKILL:
            worker.kill_all()
        else:
            worker.send_signal(end)
        if end is signal.SIGTERM:
            first.open()
        worker.wait(LIMIT)
    assert not scene.place.notes("begin", scene.key)
    assert end is signal.SIGKILL or (scene.state() == ("queued", answer.id) and scene.expires_in() > A_LEASE)
    assert (unique.delay(scene.key) == answer) == (end is not signal.SIGKILL)
    scene.place.client.flushdb()


def test_of_buffer_one_a_task_that_waits_in_a_worker_gives_way_to_a_newer_that_has_run(scene: Scene) -> None:
    newest, other = live.OF_POLICY["buffer_one()"], Scene(scene.place)
    with scene.place.worker("-c", "1", "--prefetch-multiplier", "1"):
        unique.delay(other.key, "gate")
        other.begun()
        waits = newest.delay(scene.key)
        assert eventually(lambda: scene.place.client.exists(f"{{{PREFIX}{scene.key}}}:triggers"))
        with scene.place.worker("-c", "1"):  # the first has no place for another message
            assert newest.delay(scene.key).get(timeout=LIMIT)
            other.open()
            assert waits.get(timeout=LIMIT) is None
    assert len(scene.runs()) == 1
