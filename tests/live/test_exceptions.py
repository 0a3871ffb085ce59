"""The errors of only_one come out of `result.get()` as they were raised in the worker, whatever the serializer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from only_one import AlreadyRunning, LockLost, LockUnavailable
from only_one.holder import Holder
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


@pytest.fixture(autouse=True)
def spoilt(scene: Scene) -> None:
    """Has a key that a serializer could spoil."""
    scene.key = f'gâteau"{scene.key}"\\'


def raised_by(answer: Any, kind: type[Exception]) -> Any:
    with pytest.raises(kind) as raised:
        answer.get(timeout=LIMIT)
    assert type(raised.value) is kind
    assert answer.state == "FAILURE"
    assert str(raised.value)
    return raised.value


@pytest.mark.parametrize("task", [live.OF_POLICY["fail"], live.gives_up], ids=["fail", "retry at its limit"])
def test_already_running(scene: Scene, task: Any) -> None:
    running = live.plain.delay(scene.key, "gate", "done")
    scene.begun()
    error = raised_by(task.delay(scene.key), AlreadyRunning)
    assert (error.key, error.task_id) == (PREFIX + scene.key, running.id)
    assert isinstance(error.holder, Holder)
    assert error.holder == scene.holder()
    assert running.id in str(error)
    scene.open()
    assert running.get(timeout=LIMIT) == "done"


@pytest.mark.parametrize("value", ["somebody else", b"\xff\xfe\x00", "[1, 2]", ""])
def test_already_running_where_the_value_is_not_a_holder(scene: Scene, value: Any) -> None:
    scene.take(value)
    error = raised_by(live.OF_POLICY["fail"].delay(scene.key), AlreadyRunning)
    assert (error.key, error.holder, error.task_id) == (PREFIX + scene.key, None, None)
    scene.free()


@pytest.mark.parametrize("is_taken", [False, True], ids=["deleted", "taken"])
@pytest.mark.parametrize(
    ("task", "orders"),
    [(live.lost, ["lose the key"]), (live.carries_on, ["lose the key", "make sure of it"])],
    ids=["when_lost=fail", "ensure_held"],
)
def test_lock_lost(scene: Scene, task: Any, orders: list[str], *, is_taken: bool) -> None:
    other = Scene(scene.place)
    running = live.plain.delay(other.key, "gate")
    other.begun()
    answer = task.delay(scene.key, "gate", *orders)
    scene.begun()
    if is_taken:
        scene.take(scene.place.client.get(PREFIX + other.key))
    else:
        scene.free()
    scene.open()
    error = raised_by(answer, LockLost)
    assert (error.key, error.reason) == (PREFIX + scene.key, "taken" if is_taken else "deleted")
    assert error.holder == (other.holder() if is_taken else None)
    other.open()
    assert running.get(timeout=LIMIT)
    scene.place.client.delete(PREFIX + scene.key)


def test_lock_unavailable(scene: Scene) -> None:
    error = raised_by(live.down.delay(scene.key), LockUnavailable)
    assert error.key == PREFIX + scene.key
    assert "ConnectionError" in error.problem
    assert "Connection refused" in str(error)
