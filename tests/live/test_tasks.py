"""A decorated task on a real worker with several processes, one of which is killed; more of them is in `test_pools`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rigs.waiting import LIMIT
from tests.live import app as live
from tests.live.workers import Scene, World


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-c", "4"):
        yield


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
