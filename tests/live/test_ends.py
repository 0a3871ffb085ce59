"""Every end of a run, on real workers with several processes: what becomes of its key.

The table of docs/celery.md is made of what is checked here: `python -m tests.live.test_ends` prints it.
Keys have a `timeout` of twenty minutes, so no expiry explains that one is free: the server tells when it was deleted.
All runs end at the same time; how soon each key is free is measured by `make soak`, one after the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import uuid4

import pytest

from only_one import configure, only_one
from only_one.holder import Holder
from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually, is_gone
from tests.live import ends_app as ends
from tests.live.brokers import consumed
from tests.live.workers import PREFIX, ROOT, World, answered, kill_tree, world
from tests.lock.test_holder import CONTAINER

PAGE = ROOT / "docs/celery.md"
HEAD = "| end of a run | state of the key |\n|---|---|\n"

TIME_LIMIT = 8
"""Seconds: a run has begun by then, and others start workers meanwhile."""

SLACK = 0.05
"""Seconds: what is written and what is seen by another process comes in this order only roughly."""


class State(Enum):
    """What becomes of a key, in the words of the page."""

    FREE = "released at once"
    KEPT = "kept for the rest of `at_least`"
    RETRIED = "released at once; the next attempt acquires it again"
    REDELIVERED = "released at once, or taken over by the run of the redelivered message"
    LIMITED = "released as soon as its process is killed, which is just after the result is stored"
    TOLD = "released by the worker's main process as soon as it notices, within 5 s"
    LEFT = (
        "taken over at once by the next call on this machine; elsewhere free within `lease`, or `timeout` without one"
    )
    NEVER = "never acquired"


AT_ONCE = 2.0
SECONDS = {
    State.FREE: AT_ONCE,
    State.RETRIED: AT_ONCE,
    State.LIMITED: AT_ONCE,
    State.REDELIVERED: 5 + AT_ONCE,
    State.TOLD: 5 + AT_ONCE,
}
"""Within which a key is free, where nothing else computes."""


class Place:
    """A server with a worker, and more workers that are told to end."""

    def __init__(self, broker: World, stack: ExitStack) -> None:
        self.broker = broker
        self._stack = stack
        self._workers: dict[str, Guarded] = {}

    def worker(self, queue: str) -> Guarded:
        """The worker that takes from a queue; it is started when it is first asked for."""
        if queue not in self._workers:
            arguments = ["-c", "3", "-Q", queue]
            environment = {"ENDS_SOFT": "1"} if queue == "soft" else {}
            self._workers[queue] = self._stack.enter_context(self.broker.worker(*arguments, **environment))
        return self._workers[queue]

    def take_from(self, queue: str) -> None:
        """Have the first worker take from this queue, too."""
        assert answered(ends.app.control.add_consumer, queue, **consumed())


@dataclass
class Scene:
    """One run that is about to end."""

    place: Place
    gate: str
    queue: str
    answer: Any

    @property
    def broker(self) -> World:
        return self.place.broker

    def begun(self) -> float:
        """Wait until the run has begun; returns when it did."""
        return self.broker.wait_for("begin", self.gate).at

    def ended(self) -> float:
        """Wait until the run ends by itself; returns when it did."""
        return self.broker.wait_for("end", self.gate).at

    def events(self) -> list[str]:
        """What has happened to the key until now."""
        self.broker.catch_up()
        return [event.what for event in self.broker.events(self.gate) if event.what != "expire"]

    def child(self) -> int:
        """The process that runs."""
        holder = Holder.parse(self.broker.client.get(PREFIX + self.gate) or b"")
        assert holder is not None
        assert holder.pid == self.broker.notes("begin", self.gate)[0].pid
        return holder.pid


def by_itself(scene: Scene) -> float:
    return scene.ended()


def by_hard_limit(scene: Scene) -> float:
    return scene.begun() + TIME_LIMIT


def by_revoke(scene: Scene) -> float:
    """While it waits in its queue; the worker drops it."""
    assert answered(ends.app.control.revoke, scene.answer.id)
    scene.place.take_from(scene.queue)
    assert eventually(lambda: scene.answer.state == "REVOKED")
    return time.monotonic()


def by_terminate(name: str) -> Callable[[Scene], float]:
    def strike(scene: Scene) -> float:
        scene.begun()
        began = time.monotonic()
        ends.app.control.revoke(scene.answer.id, terminate=True, signal=name)
        return began

    return strike


def by_kill(scene: Scene) -> float:
    scene.begun()
    child, began = scene.child(), time.monotonic()
    os.kill(child, signal.SIGKILL)
    return began


def by_worker_kill(scene: Scene) -> float:
    began = time.monotonic()
    kill_tree(scene.place.worker(scene.queue))
    return began


def by_warm_shutdown(scene: Scene) -> float:
    worker = scene.place.worker(scene.queue)
    worker.send_signal(signal.SIGTERM)
    assert eventually(lambda: "Warm shutdown" in scene.broker.log())
    assert scene.broker.is_held(scene.gate)
    scene.broker.client.rpush(f"{scene.gate}:gate", 1)
    worker.wait(LIMIT)
    return scene.ended()


def by_cold_shutdown(scene: Scene) -> float:
    worker, began = scene.place.worker(scene.queue), time.monotonic()
    worker.send_signal(signal.SIGQUIT)
    worker.wait(LIMIT)
    is_soft = scene.queue == "soft"
    assert "Soft Shutdown" in scene.broker.log() or not is_soft
    return began + is_soft


@dataclass(frozen=True)
class End:
    """One line of the page.

    Attributes:
        strike: what ends it, when all have begun; returns when it did.
        queue: that of a worker of its own.
    """

    name: str
    state: State
    how: str = "sleep"
    strike: Callable[[Scene], float] = by_itself
    task: Any = ends.early
    queue: str = "celery"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def stores_its_result(self) -> bool:
        """Whether it is the run's own process that stores a result."""
        return self.state is State.FREE and (self.how in {"return", "exception"} or "soft_time_limit" in self.options)


ENDS = [
    End("return", State.FREE, "return"),
    End("return, with `at_least`", State.KEPT, "return", task=ends.cooling),
    End("exception", State.FREE, "exception"),
    End("`SystemExit`", State.FREE, "exit"),
    End("`Ignore`", State.FREE, "ignore"),
    End("`Reject`", State.FREE, "reject", task=ends.late),
    End("`Reject(requeue=True)`", State.REDELIVERED, "reject and requeue", task=ends.late),
    End("`self.retry()`", State.RETRIED, "retry"),
    End("`autoretry_for`", State.RETRIED, "exception", task=ends.again),
    End("soft time limit", State.FREE, options={"soft_time_limit": TIME_LIMIT}),
    End("hard time limit", State.LIMITED, "sleep", by_hard_limit, options={"time_limit": TIME_LIMIT}),
    End(
        "hard time limit inside one C call", State.LIMITED, "C call", by_hard_limit, options={"time_limit": TIME_LIMIT}
    ),
    End("`revoke` of a task that waits", State.NEVER, "return", by_revoke, queue="revoked"),
    End("`revoke(terminate=True)`", State.FREE, strike=by_terminate("SIGTERM")),
    End("`revoke(terminate=True, signal='SIGKILL')`", State.FREE, strike=by_terminate("SIGKILL")),
    End("`kill -9` of the child", State.TOLD, strike=by_kill),
    End("`kill -9` of the child, `reject_on_worker_lost`", State.REDELIVERED, strike=by_kill, task=ends.late),
    End("`kill -9` of the whole worker", State.LEFT, strike=by_worker_kill, queue="killed"),
    End("warm shutdown", State.FREE, "gate", by_warm_shutdown, queue="warm"),
    End("soft shutdown, not done in time", State.FREE, strike=by_cold_shutdown, queue="soft"),
    End("cold shutdown", State.FREE, strike=by_cold_shutdown, queue="cold"),
]
LOST = [
    End("this machine", State.REDELIVERED, task=ends.late, queue="killed"),
    End("another machine", State.REDELIVERED, task=ends.elsewhere, queue="killed"),
    End("cold shutdown", State.REDELIVERED, task=ends.late, queue="cold"),
]
"""Runs whose messages are lost with their workers."""

each_end = pytest.mark.parametrize("end", ENDS, ids=[each.name.replace("`", "") for each in ENDS])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        world(ends.app, "tests.live.ends_app", tmp_path_factory.mktemp("ends")) as broker,
        broker.worker("-c", "10"),
        ExitStack() as stack,
    ):
        yield Place(broker, stack)
        assert eventually(lambda: not broker.keys_of_runs())


def begin(place: Place, end: End) -> Scene:
    if end.queue not in {"celery", "revoked"}:
        place.worker(end.queue)
    gate = f"end-{uuid4().hex}"
    return Scene(place, gate, end.queue, end.task.apply_async((gate, end.how), queue=end.queue, **end.options))


@pytest.fixture(scope="module")
def scenes(place: Place) -> dict[str, Scene]:
    """All runs, which have been struck."""
    found = {end.name: begin(place, end) for end in ENDS}
    lost = {end.name: begin(place, end) for end in LOST}
    for each in [*found.values(), *lost.values()]:
        if each.queue != "revoked":
            each.begun()
    for end in ENDS:
        end.strike(found[end.name])
    return found | {f"lost: {name}": scene for name, scene in lost.items()}


def test_the_table_of_the_page_is_what_is_checked_here() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def table() -> str:
    return HEAD + "".join(f"| {each.name} | {each.state.value} |\n" for each in ENDS)


def check_free(scene: Scene) -> None:
    """By nobody's call but the worker's own."""
    scene.broker.wait_for_event(scene.gate, "del", since=0)
    assert scene.events() == ["set", "del"]


def check_limited(scene: Scene) -> None:
    """Not before its process is dead, which Celery sees to last of all."""
    check_free(scene)
    stored = scene.broker.wait_for_event(f"/celery-task-meta-{scene.answer.id}", "set", since=0)
    assert stored.at <= scene.broker.events(scene.gate)[-1].at, "released before the result was stored"


def check_kept(scene: Scene) -> None:
    def state() -> str | None:
        holder = Holder.parse(scene.broker.client.get(PREFIX + scene.gate) or b"")
        return holder.state if holder else None

    assert eventually(lambda: state() == "kept")
    assert 0 < scene.broker.client.pttl(PREFIX + scene.gate) <= ends.AT_LEAST * 1000
    scene.broker.client.delete(PREFIX + scene.gate)


def check_again(scene: Scene) -> None:
    scene.broker.wait_for("again", scene.gate)
    assert eventually(lambda: not scene.broker.is_held(scene.gate))


def check_retried(scene: Scene) -> None:
    check_again(scene)
    assert scene.events() == ["set", "del", "set", "del"]


def check_never(scene: Scene) -> None:
    assert scene.events() == []
    assert scene.broker.notes("begin", scene.gate) == []


def check_left(scene: Scene) -> None:
    if CONTAINER:
        assert call_from_another_machine(scene) == "None"
    # What is dead is gone only when somebody has waited for it; for orphans that is init, which may take its time.
    child = scene.child()
    assert eventually(lambda: is_gone(child))
    assert scene.events() == ["set"]
    with configure(redis=scene.broker.server.url, prefix=PREFIX):
        assert only_one(lambda: "done", key=scene.gate, timeout=600)() == "done"


CALL = f"""
import sys
from only_one import configure, only_one
configure(redis=sys.argv[1], prefix="{PREFIX}")
print(only_one(lambda: "done", key=sys.argv[2], timeout=600)())
"""


def call_from_another_machine(scene: Scene) -> str:
    """Call something with the same key; returns what it gave."""
    command = [*(CONTAINER or []), sys.executable, "-c", CALL, scene.broker.server.url, scene.gate]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


CHECKS = {
    State.FREE: check_free,
    State.KEPT: check_kept,
    State.RETRIED: check_retried,
    State.REDELIVERED: check_again,
    State.LIMITED: check_limited,
    State.TOLD: check_free,
    State.LEFT: check_left,
    State.NEVER: check_never,
}


@each_end
def test_the_key_after(scenes: dict[str, Scene], end: End) -> None:
    scene = scenes[end.name]
    CHECKS[end.state](scene)
    if end.stores_its_result:
        stored = scene.broker.wait_for_event(f"/celery-task-meta-{scene.answer.id}", "set", since=0)
        assert scene.broker.events(scene.gate)[-1].at <= stored.at, "released after the result was stored"


@pytest.mark.parametrize("name", ["renamed", "modelled"])
def test_the_key_of_a_killed_run_whose_arguments_were_changed(place: Place, name: str) -> None:
    """By its base class or by pydantic, in its own process; the main process has only the message."""
    gate = f"end-{uuid4().hex}"
    answer = getattr(ends, name).apply_async((gate, "sleep"))
    scene = Scene(place, f"{gate}-{name}", "celery", answer)
    by_kill(scene)
    check_free(scene)


@pytest.mark.parametrize("end", LOST, ids=[each.name for each in LOST])
def test_a_message_whose_worker_is_lost(place: Place, scenes: dict[str, Scene], end: End) -> None:
    """Another worker does the work once more: at once, or when the key has expired."""
    scene = scenes[f"lost: {end.name}"]
    if end.queue == "killed":
        place.broker.broker.deliver_again(place.broker.broker.copy_of(scene.answer.id))
    place.take_from(end.queue)
    assert scene.answer.get(timeout=LIMIT) == "again"
    assert len(place.broker.notes("begin", scene.gate)) == 2
    assert place.broker.notes("end", scene.gate) == []
    assert ("expired" in scene.events()) == (end.name == "another machine")


@pytest.mark.parametrize("end", ["recycled", "stopped"])
def test_a_release_that_has_failed_is_finished_when_its_process_ends(place: Place, end: str) -> None:
    """No `atexit` is called then."""
    key, arguments = f"{PREFIX}{uuid4()}", ["--max-tasks-per-child", "1"] if end == "recycled" else []
    with place.broker.worker("-c", "1", "-Q", end, *arguments) as worker:
        ends.leave_a_release.apply_async((key,), queue=end).get(timeout=LIMIT)
        if end == "stopped":
            assert place.broker.client.exists(key)
            worker.send_signal(signal.SIGTERM)
        assert eventually(lambda: not place.broker.client.exists(key))


@pytest.mark.soak
@each_end
def test_how_soon_a_key_is_free(place: Place, end: End, record_property: Callable[[str, object], None]) -> None:
    if end.state not in SECONDS:
        pytest.skip("it is not released")
    scene = begin(place, end)
    scene.begun()
    began = end.strike(scene)
    if end.state is State.REDELIVERED:
        scene.broker.wait_for("again", scene.gate)
    seconds = scene.broker.wait_for_event(scene.gate, "del", since=began - SLACK).at - began
    record_property("seconds", seconds)
    print(f"{end.name:60} {end.state.name:12} {seconds:6.3f} s")
    assert seconds < SECONDS[end.state]
    CHECKS[end.state](scene)


if __name__ == "__main__":
    print(table(), end="")
