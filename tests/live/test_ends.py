"""Every end of a run, on a real worker with several processes: what becomes of its key, and when.

The table of docs/celery.md is made of what is checked here: `python -m tests.live.test_ends` prints it.
Keys have a `timeout` of ten minutes, so no expiry explains that one is free: the server tells when it was deleted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import uuid4

import pytest

from only_one.holder import Holder
from only_one.testing import Guarded
from tests.live import ends_app as ends
from tests.live.workers import PREFIX, ROOT, World, kill_tree, world
from tests.test_holder import CONTAINER
from tests.waiting import LIMIT, eventually

AT_ONCE = 2.0
"""Seconds within which something happens at once, on a machine that has other things to do too."""

CELERY_LOOKS_EVERY = 5.0
"""Seconds after which a worker notices that a child is gone, at the latest."""

PAGE = ROOT / "docs/celery.md"
SLACK = 0.05
"""Seconds: what is written and what is seen by another process comes in this order only roughly."""

HEAD = "| end of a run | state of the key |\n|---|---|\n"


class State(Enum):
    """What becomes of a key, in the words of the page."""

    FREE = "released at once"
    KEPT = "kept for the rest of `at_least`"
    RETRIED = "released at once; the next attempt takes it anew"
    REDELIVERED = "released at once, or taken over by the run of the redelivered message"
    TOLD = "released by the worker's main process as soon as it notices, within 5 s"
    LEFT = (
        "taken over at once by the next call on this machine; elsewhere free within `lease`, or `timeout` without one"
    )
    NEVER = "never taken"


class Scene:
    """One run that is about to end."""

    def __init__(self, world: World, gate: str, stack: ExitStack) -> None:
        self.world, self.gate = world, gate
        self._stack = stack

    def begin(self, task: Any, how: str, **options: Any) -> Any:
        """Have a run begin."""
        answer = task.apply_async((self.gate, how), **options)
        self.world.wait_for("begin", self.gate)
        return answer

    def end(self, task: Any, how: str, **options: Any) -> float:
        """Have a run end by itself; returns when it did."""
        self.begin(task, how, **options)
        return self.world.wait_for("end", self.gate).at

    def child(self) -> int:
        """The process that runs."""
        value = self.world.client.get(PREFIX + self.gate)
        holder = Holder.parse(value or b"")
        assert holder is not None
        assert holder.pid == self.world.notes("begin", self.gate)[0].pid
        return holder.pid

    def worker(self, **environment: Any) -> Guarded:
        """A worker of its own, which takes from a queue of its own."""
        return self._stack.enter_context(self.world.worker("-c", "1", "-Q", self.gate, **environment))

    def begin_there(self, task: Any, how: str, **environment: Any) -> Guarded:
        """Have a run begin in a worker of its own."""
        worker = self.worker(**environment)
        self.begin(task, how, queue=self.gate)
        return worker


Go = Callable[[Scene], float]


def by_itself(task: Any, how: str, **options: Any) -> Go:
    return lambda scene: scene.end(task, how, **options)


def by_hard_limit(how: str) -> Go:
    def go(scene: Scene) -> float:
        scene.begin(ends.early, how, time_limit=1)
        return scene.world.notes("begin", scene.gate)[0].at + 1

    return go


def by_revoke(scene: Scene) -> float:
    """While it waits: what waits for its time is in the worker already, and is dropped there."""
    answer = ends.early.apply_async((scene.gate, "return"), countdown=1)
    ends.app.control.revoke(answer.id, reply=True, timeout=LIMIT, limit=1)
    began = time.monotonic()
    assert eventually(lambda: answer.state == "REVOKED", LIMIT)
    return began


def by_terminate(name: str) -> Go:
    def go(scene: Scene) -> float:
        answer = scene.begin(ends.early, "sleep")
        began = time.monotonic()
        ends.app.control.revoke(answer.id, terminate=True, signal=name)
        return began

    return go


def by_kill(task: Any) -> Go:
    def go(scene: Scene) -> float:
        scene.begin(task, "sleep")
        child = scene.child()
        began = time.monotonic()
        os.kill(child, signal.SIGKILL)
        return began

    return go


def by_worker_kill(scene: Scene) -> float:
    worker = scene.begin_there(ends.early, "sleep")
    began = time.monotonic()
    kill_tree(worker)
    return began


def by_warm_shutdown(scene: Scene) -> float:
    worker = scene.begin_there(ends.early, "gate")
    worker.signal(signal.SIGTERM)
    assert eventually(lambda: "Warm shutdown" in scene.world.log(), LIMIT)
    scene.world.client.rpush(f"{scene.gate}:gate", 1)
    worker.wait(LIMIT)
    assert eventually(lambda: scene.world.notes("end", scene.gate))
    return scene.world.wait_for("end", scene.gate).at


def by_cold_shutdown(soft: str) -> Go:
    def go(scene: Scene) -> float:
        worker = scene.begin_there(ends.early, "sleep", ENDS_SOFT=soft)
        began = time.monotonic()
        worker.signal(signal.SIGQUIT)
        worker.wait(LIMIT)
        assert "Soft Shutdown" in scene.world.log() or soft == "0"
        return began + float(soft)

    return go


@dataclass(frozen=True)
class End:
    """One line of the page."""

    name: str
    state: State
    go: Go


ENDS = [
    End("return", State.FREE, by_itself(ends.early, "return")),
    End("return, with `at_least`", State.KEPT, by_itself(ends.cooling, "return")),
    End("exception", State.FREE, by_itself(ends.early, "exception")),
    End("`SystemExit`", State.FREE, by_itself(ends.early, "exit")),
    End("`Ignore`", State.FREE, by_itself(ends.early, "ignore")),
    End("`Reject`", State.FREE, by_itself(ends.late, "reject")),
    End("`Reject(requeue=True)`", State.REDELIVERED, by_itself(ends.late, "reject and requeue")),
    End("`self.retry()`", State.RETRIED, by_itself(ends.early, "retry")),
    End("`autoretry_for`", State.RETRIED, by_itself(ends.again, "exception")),
    End("soft time limit", State.FREE, by_itself(ends.early, "sleep", soft_time_limit=1)),
    End("hard time limit", State.FREE, by_hard_limit("sleep")),
    End("hard time limit inside one C call", State.FREE, by_hard_limit("C call")),
    End("`revoke` of a task that waits", State.NEVER, by_revoke),
    End("`revoke(terminate=True)`", State.FREE, by_terminate("SIGTERM")),
    End("`revoke(terminate=True, signal='SIGKILL')`", State.FREE, by_terminate("SIGKILL")),
    End("`kill -9` of the child", State.TOLD, by_kill(ends.early)),
    End("`kill -9` of the child, `reject_on_worker_lost`", State.REDELIVERED, by_kill(ends.late)),
    End("`kill -9` of the whole worker", State.LEFT, by_worker_kill),
    End("warm shutdown", State.FREE, by_warm_shutdown),
    End("soft shutdown, not done in time", State.FREE, by_cold_shutdown("1")),
    End("cold shutdown", State.FREE, by_cold_shutdown("0")),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(ends.app, "tests.live.ends_app", tmp_path_factory.mktemp("ends")) as found, found.worker("-c", "2"):
        yield found


@pytest.fixture
def scene(place: World) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(place, f"end-{uuid4().hex}", stack)
    assert place.keys() == []


def test_the_table_of_the_page_is_what_is_checked_here() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def table() -> str:
    return HEAD + "".join(f"| {each.name} | {each.state.value} |\n" for each in ENDS)


def is_free_in_time(scene: Scene, began: float, limit: float) -> float:
    """Wait until the server says that the key was deleted, by nobody's call but the worker's own."""
    seconds = scene.world.wait_for_event(scene.gate, "del", since=began - SLACK).at - began
    assert seconds < limit
    return seconds


def check_free(scene: Scene, began: float) -> float:
    return is_free_in_time(scene, began, AT_ONCE)


def check_told(scene: Scene, began: float) -> float:
    return is_free_in_time(scene, began, CELERY_LOOKS_EVERY + AT_ONCE)


def check_kept(scene: Scene, began: float) -> float:
    value = scene.world.client.get(PREFIX + scene.gate)
    (taken,) = [event.at for event in scene.world.events(scene.gate) if event.what == "set"][:1]
    assert eventually(lambda: not scene.world.is_held(scene.gate))
    free = time.monotonic()
    assert value is not None
    assert ends.AT_LEAST - 0.1 < free - taken < ends.AT_LEAST + AT_ONCE
    return free - began


def check_retried(scene: Scene, began: float) -> float:
    seconds = is_free_in_time(scene, began, AT_ONCE)
    again = scene.world.wait_for("again", scene.gate)
    between = [event.what for event in scene.world.events(scene.gate) if began + seconds <= event.at < again.at - SLACK]
    assert between == ["del"]
    assert again.at - began > ends.WAIT - SLACK
    is_free_in_time(scene, again.at, AT_ONCE)
    return seconds


def check_redelivered(scene: Scene, began: float) -> float:
    seconds = scene.world.wait_for("again", scene.gate).at - began
    assert seconds < CELERY_LOOKS_EVERY + AT_ONCE
    is_free_in_time(scene, began + seconds, AT_ONCE)
    return seconds


def check_never(scene: Scene, _began: float) -> float:
    assert scene.world.events(scene.gate) == []
    assert scene.world.notes("begin", scene.gate) == []
    return 0.0


def check_left(scene: Scene, _began: float) -> float:
    if CONTAINER:
        assert call(scene, CONTAINER) == "None"
    # What is dead is gone only when somebody has waited for it; for orphans that is init, which may take its time.
    child = scene.child()
    assert eventually(lambda: is_gone(child), LIMIT)
    assert call(scene, []) == "done"
    (taken,) = [event.at for event in scene.world.events(scene.gate) if event.what == "set"][1:]
    seconds = taken - scene.world.notes("calls", scene.gate)[-1].at
    assert 0 < seconds < AT_ONCE
    return seconds


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


CALL = f"""
import sys
from only_one import configure, only_one
from tests.live.workers import note
configure(redis=sys.argv[1], prefix="{PREFIX}")
note("calls", sys.argv[2])
print(only_one(lambda: "done", key=sys.argv[2], timeout=600)())
"""


def call(scene: Scene, inside: list[str]) -> str:
    """Call something with the same key, from this machine or another; returns what it gave."""
    command = [*inside, sys.executable, "-c", CALL, scene.world.server.url, scene.gate]
    env = {**os.environ, **scene.world.environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.strip()


CHECKS = {
    State.FREE: check_free,
    State.KEPT: check_kept,
    State.RETRIED: check_retried,
    State.REDELIVERED: check_redelivered,
    State.TOLD: check_told,
    State.LEFT: check_left,
    State.NEVER: check_never,
}


@pytest.mark.parametrize("end", ENDS, ids=[each.name.replace("`", "") for each in ENDS])
def test_the_key_after(scene: Scene, end: End) -> None:
    began = end.go(scene)
    seconds = CHECKS[end.state](scene, began)
    print(f"{end.name:60} {end.state.name:12} {seconds:6.3f} s")


def test_the_key_of_a_worker_that_was_killed_outlives_it_by_its_lease(scene: Scene) -> None:
    """As nobody asks for it, it is free as it is for those on other machines."""
    worker = scene.begin_there(ends.leased, "sleep")
    began = time.monotonic()
    kill_tree(worker)
    assert scene.world.is_held(scene.gate)
    assert eventually(lambda: not scene.world.is_held(scene.gate))
    seconds = time.monotonic() - began
    assert seconds < ends.AT_LEAST + AT_ONCE
    print(f"free after {seconds:.3f} s of a lease of {ends.AT_LEAST} s")


if __name__ == "__main__":
    print(table(), end="")
