"""A unique task that a worker has received and has not begun: its key names the worker, and is free when that dies.

The worker has one process, which a run keeps busy until its gate is opened; what comes after it waits.
"""

from __future__ import annotations

import os
import signal

import pytest

from only_one.__main__ import main
from only_one.inspection import held
from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import PREFIX, Scene, World, answered, kill_tree

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


def test_it_is_free_at_once_when_its_worker_is_killed(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = Scene(scene.place, f"{scene.key}-by-hand")
    with scene.place.worker("-c", "1") as worker:
        first = keep_busy(scene.place)
        waits = unique.delay(scene.key)
        unique.delay(by_hand.key)
        assert is_received(scene, worker.pid)
        assert is_received(by_hand, worker.pid)
        assert unique.delay(scene.key) == waits
        assert scene.expires_in() <= A_LEASE
        kill_tree(worker)
    assert {each.key: each.process for each in held(f"*{scene.key}*")} == dict.fromkeys(
        [PREFIX + scene.key, PREFIX + by_hand.key], "dead"
    )
    again = unique.delay(scene.key)
    assert again != waits
    assert scene.state() == ("queued", again.id)
    main(["release", "--dead", "--match", f"{scene.key}*"])
    assert by_hand.key in capsys.readouterr().out
    assert not by_hand.is_held()
    for each in (first, scene):
        each.free()
    scene.place.client.delete("celery")


@pytest.mark.parametrize("how", ["begins", "is revoked"])
def test_its_key_is_free_after_it(scene: Scene, how: str) -> None:
    with scene.place.worker("-c", "1") as worker:
        first = keep_busy(scene.place)
        waits = unique.delay(scene.key, "gate", "done")
        assert is_received(scene, worker.pid)
        assert how == "begins" or answered(live.app.control.revoke, waits.id)
        first.open()
        if how == "begins":
            scene.begun()
            assert scene.state() == ("running", waits.id)
            scene.open()
            assert waits.get(timeout=LIMIT) == "done"
        assert scene.is_free()


def test_the_next_worker_takes_it_over(scene: Scene) -> None:
    with scene.place.worker("-c", "1") as worker:
        keep_busy(scene.place).free()
        waits = unique.delay(scene.key, "done")
        assert is_received(scene, worker.pid)
        copy = scene.place.broker.copy_of(waits.id)
        kill_tree(worker)
    with scene.place.worker("-c", "1") as worker:
        first = keep_busy(scene.place)
        scene.place.broker.deliver_again(copy)
        assert is_received(scene, worker.pid)
        assert unique.delay(scene.key) == waits
        first.open()
        assert waits.get(timeout=LIMIT) == "done"
        assert scene.is_free()


@pytest.mark.parametrize("how", ["warm", "cold", "cold by a second Ctrl-C"])
def test_it_is_queued_again_when_its_worker_ends(scene: Scene, how: str) -> None:
    signals = {"warm": [signal.SIGTERM], "cold": [signal.SIGQUIT]}.get(how, [signal.SIGINT, signal.SIGINT])
    waiting = [Scene(scene.place) for _ in range(3)]
    said = scene.place.log()
    with scene.place.worker("-c", "1") as worker:
        first = keep_busy(scene.place)
        waits = [unique.delay(each.key) for each in waiting]
        assert is_received(waiting[-1], worker.pid)
        for number, sent in enumerate(signals):
            assert not number or eventually(lambda: "Warm shutdown" in scene.place.log()[len(said) :])
            os.kill(worker.pid, sent)
        if how == "warm":
            first.open()
        worker.wait(LIMIT)
    unrun = [(each, its) for each, its in zip(waiting, waits, strict=True) if not scene.place.notes("begin", each.key)]
    assert unrun
    for each, its in unrun:
        assert each.state() == ("queued", its.id)
        assert each.expires_in() > A_LEASE
        assert unique.delay(each.key) == its
    scene.place.client.flushdb()


@pytest.mark.parametrize("attempt", [0, 1])
def test_what_waits_for_its_time_is_kept_for_it(scene: Scene, attempt: int) -> None:
    """A task with a countdown, and a retry."""
    with scene.place.worker("-c", "1") as worker:
        if attempt:
            waits = unique.delay(scene.key, "retry in an hour")
        else:
            waits = unique.apply_async((scene.key,), countdown=HOUR)
        assert is_received(scene, worker.pid, attempt)
        assert HOUR < scene.expires_in() <= HOUR + A_LEASE
        assert unique.delay(scene.key) == waits
        kill_tree(worker)
    assert unique.delay(scene.key) != waits
    scene.place.client.flushdb()
