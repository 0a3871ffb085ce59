"""Every end of a task, on real workers with several processes: what becomes of its key.

The table of docs/celery.md is made of what is checked here.
Keys have a `timeout` of twenty minutes, so no expiry explains that one is free: the server tells when it was deleted.
All runs end at the same time.
What a worker does with a unique task that it has received is in `test_received`, and what others in a canvas get in
`test_canvas`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from uuid import uuid4

import pytest

from only_one import only_one
from rigs.programs import Logged
from rigs.waiting import LIMIT, eventually, is_gone
from tests.documented import BROKERS, documented
from tests.live import app as live
from tests.live.brokers import KIND, consumed
from tests.live.workers import PREFIX, ROOT, SETTINGS, Scene, World, answered

PAGE = ROOT / "docs/celery.md"
HEAD = "| a run ends by | its key is |\n|---|---|\n"

VISIBILITY = 3

TIME_LIMIT = 8
"""Seconds: a run has begun by then, and others start workers meanwhile."""

DROPPED = "DROPPED"
"""What RabbitMQ does with a message in a queue that has expired: nobody hears of it."""

unique = live.unique


class State(Enum):
    """What becomes of a key, in the words of the page."""

    FREE = "released at once"
    KEPT = "kept for the rest of `at_least`"
    RETRIED = "released at once; the next attempt acquires it again"
    REJECTED = "released at once; the run of the redelivered message acquires it again"
    REDELIVERED = "taken over by the run of the redelivered message; elsewhere it [expires](time.md#after-a-kill) first"
    LIMITED = "released as soon as its process is killed, which is just after the result is stored"
    TOLD = "released by the worker's main process [as soon as it notices](time.md#after-a-kill)"
    LEFT = "left to be [taken over, or to expire](time.md#after-a-kill)"
    NEVER = "never acquired"


RELEASED = ["set", "del"]
EVENTS = {
    State.FREE: RELEASED,
    State.RETRIED: RELEASED * 2,
    State.REJECTED: RELEASED * 2,
    State.LIMITED: RELEASED,
    State.TOLD: RELEASED,
    State.NEVER: [],
}
"""What happens to the key of a task whose run is decorated, by nobody's call but the workers' own."""


@dataclass
class Run:
    """One run that is about to end."""

    end: End
    scene: Scene
    answer: Any


def nothing(_: Run) -> None:
    """A time limit ends it, or the end of its worker."""


def wait_for_its_end(run: Run) -> None:
    run.scene.place.wait_for("end", run.scene.key)


def open_its_gate(run: Run) -> None:
    assert run.scene.is_held()
    run.scene.open()
    wait_for_its_end(run)


def terminate(name: str) -> Callable[[Run], None]:
    return lambda run: live.app.control.revoke(run.answer.id, terminate=True, signal=name)


def kill(run: Run) -> None:
    os.kill(run.scene.begun().pid, signal.SIGKILL)


def revoke(run: Run) -> None:
    """While it waits in its queue; the worker drops it."""
    assert answered(live.app.control.revoke, run.answer.id)
    run.scene.consume()


def expire(run: Run) -> None:
    """The same."""
    until = time.time() + 0.6
    assert eventually(lambda: time.time() > until)
    run.scene.consume()


def deliver_again(run: Run) -> None:
    """To the first worker, as its own is lost."""
    broker = run.scene.place.broker
    if run.end.queue == "killed":  # which has returned nothing
        broker.deliver_again(broker.copy_of(run.answer.id))
    assert answered(live.app.control.add_consumer, run.end.queue, **consumed())


@dataclass(frozen=True)
class End:
    """One line of the page.

    Attributes:
        how: what the run is ordered to do, for the first time.
        strike: what ends it, when all have begun.
        result: the state in which Celery stores the task; None if that of an earlier attempt may be stored later, or
            none is.
        task: the name of the task's variant.
        queue: that of the first worker, or of one that is ended, or "nobody's".
        attempts: how many there are.
        is_unique: whether the task is unique from queued to finished; else its run is decorated.
    """

    name: str
    state: State
    how: str = "sleep"
    strike: Callable[[Run], Any] = wait_for_its_end
    result: str | None = None
    task: str = "plain"
    queue: str = "celery"
    attempts: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    is_unique: bool = False

    def __str__(self) -> str:
        return self.name.replace("`", "") + ", unique" * self.is_unique


LIMITED = {"time_limit": TIME_LIMIT}
ENDS = [
    End("return", State.FREE, "return", result="SUCCESS"),
    End("return with `at_least`", State.KEPT, "return", result="SUCCESS", task="cooling"),
    End("exception", State.FREE, "exception", result="FAILURE"),
    End("`SystemExit`", State.FREE, "exit"),
    End("`Ignore`", State.FREE, "ignore"),
    End("`Reject`", State.FREE, "reject", task="late"),
    End("`Reject(requeue=True)`", State.REJECTED, "reject and requeue", result="SUCCESS", task="late", attempts=2),
    End("`self.retry()`", State.RETRIED, "retry", attempts=2),
    End("`autoretry_for`", State.RETRIED, "exception", task="again", attempts=2),
    End("soft time limit", State.FREE, result="FAILURE", options={"soft_time_limit": TIME_LIMIT}),
    End("hard time limit", State.LIMITED, "sleep", nothing, "FAILURE", options=LIMITED),
    End("hard time limit inside one C call", State.LIMITED, "C call", nothing, "FAILURE", options=LIMITED),
    End("`revoke` of a task that waits", State.NEVER, "return", revoke, "REVOKED", queue="nobody's"),
    End("`revoke(terminate=True)`", State.FREE, "sleep", terminate("SIGTERM"), "REVOKED"),
    End("`revoke(terminate=True, signal='SIGKILL')`", State.FREE, "sleep", terminate("SIGKILL"), "REVOKED"),
    End("`kill -9` of the child", State.TOLD, "sleep", kill, "FAILURE"),
    End("`kill -9` of the child with `reject_on_worker_lost`", State.REDELIVERED, "sleep", kill, "SUCCESS", "late",
        attempts=2),
    End("`kill -9` of the whole worker", State.LEFT, "sleep", nothing, queue="killed"),
    End("warm shutdown", State.FREE, "gate", open_its_gate, "SUCCESS", queue="warm"),
    End("soft shutdown that is not done in time", State.FREE, "sleep", nothing, queue="soft"),
    End("cold shutdown", State.FREE, "sleep", nothing, queue="cold"),
]  # fmt: skip
EXPIRED = "REVOKED" if KIND == "redis" else DROPPED
OF_UNIQUE = [
    End("expired in its queue", State.NEVER, "return", expire, EXPIRED, queue="nobody's", options={"expires": 0.5}),
    End("replaced", State.REJECTED, "replace", result="SUCCESS", attempts=2),
]
"""Ends that are of interest where a task is unique from queued to finished."""
LOST = [
    End("message lost with its worker on this machine", State.REDELIVERED, task="late", queue="killed"),
    End("message lost with its worker", State.REDELIVERED, task="late", queue="killed", is_unique=True),
    End("message lost with its worker on another machine", State.REDELIVERED, task="elsewhere", queue="killed"),
    End("message returned by a cold shutdown", State.REDELIVERED, task="late", queue="cold"),
]
"""Another worker does the work once more: at once, or when the key has expired."""
ALL = [
    *ENDS,
    *(replace(end, is_unique=True) for end in ENDS + OF_UNIQUE),
    *(replace(end, strike=deliver_again, result="SUCCESS", attempts=2) for end in LOST),
]


@pytest.fixture(scope="module")
def workers(place: World) -> Iterator[dict[str, Logged]]:
    """By their queues: the worker of most runs, and those that are ended."""
    told = {"soft": {SETTINGS: '{"worker_soft_shutdown_timeout": 1}'}}
    with ExitStack() as stack:
        yield {
            queue: stack.enter_context(place.worker("-c", size, "-Q", queue, **told.get(queue, {})))
            for queue, size in {"celery": "16", "killed": "5", "warm": "2", "soft": "2", "cold": "3"}.items()
        }
        assert place.no_key_is_left()


def end_worker(place: World, queue: str, worker: Logged) -> None:
    if queue == "killed":
        worker.kill_all()
    elif queue == "warm":
        worker.send_signal(signal.SIGTERM)
        assert eventually(lambda: "Warm shutdown" in place.log())
    else:
        worker.send_signal(signal.SIGQUIT)
        worker.wait(LIMIT)
        assert "Soft Shutdown" in place.log() or queue != "soft"


def begin(place: World, end: End) -> Run:
    """Send the task of which this is the end."""
    scene, tasks = Scene(place), live.ABOVE if end.is_unique else live.BELOW
    queue = scene.queue if end.queue == "nobody's" else end.queue
    return Run(end, scene, tasks[end.task].apply_async((scene.key, "once", end.how), queue=queue, **end.options))


@pytest.fixture(scope="module")
def ended(place: World, workers: dict[str, Logged]) -> dict[str, Run]:
    """All runs, which have been ended."""
    runs = [begin(place, end) for end in ALL]
    for run in runs:
        if run.end.state is not State.NEVER and run.end.queue != "nobody's":
            run.scene.begun()
    for queue, worker in workers.items():
        if queue != "celery":
            end_worker(place, queue, worker)
    for run in runs:
        run.end.strike(run)
    return {str(run.end): run for run in runs}


def test_the_table_of_the_page_is_what_is_checked_here() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def table() -> str:
    names = {state: ", ".join(each.name for each in ENDS if each.state is state) for state in State}
    return HEAD + "".join(f"| {names[state]} | {state.value} |\n" for state in State)


@pytest.mark.parametrize("end", ALL, ids=str)
def test_the_key_after(ended: dict[str, Run], scene: Scene, end: End) -> None:
    run, place = ended[str(end)], scene.place
    scene.key = run.scene.key
    if end.result not in {None, DROPPED}:
        assert eventually(lambda: run.answer.state == end.result), run.answer.state
    if end.state is State.NEVER:
        assert scene.is_free()
        assert scene.runs() == []
    else:
        scene.begun(end.attempts)
        CHECKS.get(end.state, check_free)(run)
    if end.queue == "nobody's" and "expires" in end.options:
        said = documented("a task that expires in its queue", BROKERS[KIND])
        assert said.startswith(f"`{run.answer.state}`")
    if not end.is_unique:
        assert scene.events() == EVENTS.get(end.state, scene.events())
    if end.state is State.FREE and end.result in {"SUCCESS", "FAILURE"}:  # which the run's own process stores
        assert place.wait_for_event(scene.key, "del") <= result_stored(run), "released after it was stored"
    # It is free, or taken over by the next call, which is published, and runs.
    assert unique.delay(scene.key, "next").get(timeout=LIMIT) == "next"


def result_stored(run: Run) -> float:
    return run.scene.place.wait_for_event(f"/celery-task-meta-{run.answer.id}", "set")


def check_free(run: Run) -> None:
    """A unique task has its key from when it is queued until it has ended, so also between two attempts."""
    assert run.scene.is_free()
    if run.end.is_unique and run.end.state is not State.REJECTED:
        assert run.scene.gaps() == 1


def check_limited(run: Run) -> None:
    """Not before its process is dead, which Celery sees to last of all."""
    check_free(run)
    deleted = run.scene.place.wait_for_event(run.scene.key, "del")
    assert result_stored(run) <= deleted, "released before the result was stored"


def check_kept(run: Run) -> None:
    scene, answer = run.scene, run.answer
    assert eventually(lambda: scene.state() == ("kept", answer.id))
    assert 0 < scene.expires_in() <= live.AT_LEAST
    assert not run.end.is_unique or live.ABOVE[run.end.task].delay(scene.key) == answer
    scene.free()


def check_redelivered(run: Run) -> None:
    assert run.answer.get(timeout=LIMIT)["held"]
    assert run.scene.is_free()
    assert len(run.scene.place.notes("begin", run.scene.key)) == 2
    assert ("expired" in run.scene.events()) == (run.end.task == "elsewhere")


def check_left(run: Run) -> None:
    """For a caller on this machine to take over; elsewhere see `tests/test_takeover.py`."""
    child = run.scene.begun().pid
    # What is dead is gone only when somebody has waited for it; for orphans that is init, which may take its time.
    assert eventually(lambda: is_gone(child))
    assert run.scene.gaps() == 0
    if not run.end.is_unique:
        assert run.scene.events() == ["set"]
        assert only_one(lambda: "done", key=run.scene.key, timeout=600)() == "done"


CHECKS = {
    State.KEPT: check_kept,
    State.REDELIVERED: check_redelivered,
    State.LIMITED: check_limited,
    State.LEFT: check_left,
}


@pytest.mark.usefixtures("workers")
def test_a_worker_process_that_is_killed_frees_its_key_within_the_lease(scene: Scene) -> None:
    task = live.BELOW["leased"]
    killed = task.delay(scene.key, "gate")
    os.kill(scene.begun().pid, signal.SIGKILL)
    assert scene.is_free()
    answer = task.delay(scene.key)
    assert answer.get(timeout=LIMIT)["id"] == answer.id
    with pytest.raises(Exception, match="SIGKILL"):
        killed.get(timeout=LIMIT)


@pytest.mark.soak
@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("tasks", [live.BELOW, live.ABOVE], ids=["below", "above"])
def test_the_key_of_a_killed_child_is_free_within_5_s(scene: Scene, tasks: dict[str, Any]) -> None:
    tasks["plain"].delay(scene.key, "gate")
    os.kill(scene.begun().pid, signal.SIGKILL)
    struck = time.monotonic()
    seconds = scene.place.wait_for_event(scene.key, "del") - struck
    print(f"{seconds:.3f} s")
    assert seconds < 5


@pytest.mark.parametrize("end", ["recycled", "stopped", "restarted"])
def test_a_release_that_has_failed_is_finished_when_its_process_ends(place: World, end: str) -> None:
    """No `atexit` is called then; at a restart, only what was registered after Celery's own."""
    key, arguments = f"{PREFIX}{uuid4()}", ["--max-tasks-per-child", "1"] if end == "recycled" else []
    with place.worker("-c", "1", "-Q", end, *arguments, pool="solo" if end == "restarted" else "prefork") as worker:
        live.leave_a_release.apply_async((key,), queue=end).get(timeout=LIMIT)
        if end != "recycled":
            assert place.client.exists(key)
            worker.send_signal(signal.SIGTERM if end == "stopped" else signal.SIGHUP)
        assert eventually(lambda: not place.client.exists(key))
