"""The errors of only_one come out of `result.get()` as they were raised in the worker, whatever the serializer.

What each error carries over a trip is in `tests/test_errors.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from only_one import AlreadyRunning, LockLost
from rigs.waiting import LIMIT
from tests.live import app as live
from tests.live.workers import PREFIX, Scene, World


@pytest.fixture(scope="module", params=["json", "pickle"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"result_serializer": request.param, "accept_content": ["json", "pickle"]}


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    # A container's tests may run as root; all that is unpickled here is sent by this test on its own server.
    with place.worker(C_FORCE_ROOT="1"):
        yield


def test_a_busy_key_and_a_lost_one(scene: Scene) -> None:
    scene.key = f'gâteau"{scene.key}"\\'  # which a serializer could spoil
    other = Scene(scene.place)
    running, loses = live.plain.delay(scene.key, "gate", "done"), live.lost.delay(other.key, "gate", "lose the key")
    for each in (scene, other):
        each.begun()
    holder = scene.holder()
    with pytest.raises(AlreadyRunning, match=running.id) as busy:
        live.OF_POLICY["fail"].delay(scene.key).get(timeout=LIMIT)
    assert (busy.value.key, busy.value.holder, busy.value.task_id) == (PREFIX + scene.key, holder, running.id)
    other.take(scene.place.client.get(PREFIX + scene.key))
    other.open()
    with pytest.raises(LockLost) as lost:
        loses.get(timeout=LIMIT)
    assert (lost.value.key, lost.value.holder, lost.value.reason) == (PREFIX + other.key, holder, "taken")
    other.free()
    scene.open()
    assert running.get(timeout=LIMIT) == "done"
