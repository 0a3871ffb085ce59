"""Every end of a task, on real workers with several processes: what becomes of its key.

The table of docs/celery.md is made of what is checked here: `python -m tests.live.test_ends` prints it.
Keys have a `timeout` of twenty minutes, so no expiry explains that one is free: the server tells when it was deleted.
All runs end at the same time; how soon each key is free is measured by `make soak`, one after the other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError

from only_one import configure, only_one
from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually, is_gone
from tests.documented import BROKERS, documented
from tests.live import app as live
from tests.live.brokers import KIND, consumed, options_for_redis
from tests.live.workers import PREFIX, ROOT, Scene, World, answered, kill_tree

PAGE = ROOT / "docs/celery.md"
HEAD = "| a run ends by | its key is |\n|---|---|\n"

TIME_LIMIT = 8
"""Seconds: a run has begun by then, and others start workers meanwhile."""

SLACK = 0.05
"""Seconds: what is written and what is seen by another process comes in this order only roughly."""

DROPPED = "DROPPED"
"""What RabbitMQ does with a message in a queue that has expired: nobody hears of it."""


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


AT_ONCE = 2.0
SECONDS = {
    State.FREE: AT_ONCE,
    State.RETRIED: AT_ONCE,
    State.REJECTED: AT_ONCE,
    State.LIMITED: AT_ONCE,
    State.REDELIVERED: 5 + AT_ONCE,
    State.TOLD: 5 + AT_ONCE,
}
"""Within which a key is free, where nothing else computes."""


class Workers:
    """A worker, and more workers that are told to end, each with a queue of its own."""

    def __init__(self, place: World, stack: ExitStack) -> None:
        self.place = place
        self._stack = stack
        self._workers: dict[str, Guarded] = {}
        self._ended: list[Guarded] = []

    def of(self, queue: str) -> Guarded:
        """The worker that takes from a queue; it is started when it is first asked for."""
        if queue not in self._workers:
            settings = '{"worker_soft_shutdown_timeout": 1}' if queue == "soft" else "{}"
            worker = self.place.worker("-c", "4", "-Q", queue, LIVE_SETTINGS=settings)
            self._workers[queue] = self._stack.enter_context(worker)
        return self._workers[queue]

    def end(self, queue: str, how: Callable[[Guarded], None]) -> float:
        """End a worker, unless that was done for another of its runs; returns when it began."""
        began = time.monotonic()
        worker = self._workers[queue]
        if worker not in self._ended:
            self._ended.append(worker)
            how(worker)
        return began


@dataclass
class Run:
    """One run that is about to end."""

    workers: Workers
    scene: Scene
    queue: str
    answer: Any

    def ended(self) -> float:
        """Wait until the run ends by itself; returns when it did."""
        return self.scene.place.wait_for("end", self.scene.key).at


def by_itself(run: Run) -> float:
    return run.ended()


def by_hard_limit(run: Run) -> float:
    return run.scene.begun().at + TIME_LIMIT


def take_from(queue: str) -> None:
    """Have the first worker take from this queue, too."""
    assert answered(live.app.control.add_consumer, queue, **consumed())


def by_revoke(run: Run) -> float:
    """While it waits in its queue; the worker drops it."""
    assert answered(live.app.control.revoke, run.answer.id)
    take_from(run.queue)
    return time.monotonic()


def by_expiry(run: Run) -> float:
    """The same."""
    until = datetime.now(timezone.utc) + timedelta(seconds=0.6)
    assert eventually(lambda: datetime.now(timezone.utc) > until)
    take_from(run.queue)
    return time.monotonic()


def by_terminate(name: str) -> Callable[[Run], float]:
    def strike(run: Run) -> float:
        began = time.monotonic()
        live.app.control.revoke(run.answer.id, terminate=True, signal=name)
        return began

    return strike


def by_kill(run: Run) -> float:
    child, holder, began = run.scene.begun().pid, run.scene.holder(), time.monotonic()
    assert holder is not None
    assert holder.pid == child
    os.kill(child, signal.SIGKILL)
    return began


def by_worker_kill(run: Run) -> float:
    return run.workers.end(run.queue, kill_tree)


def by_warm_shutdown(run: Run) -> float:
    run.workers.end(run.queue, lambda worker: worker.send_signal(signal.SIGTERM))
    assert eventually(lambda: "Warm shutdown" in run.scene.place.log())
    assert run.scene.is_held()
    run.scene.open()
    return run.ended()


def by_cold_shutdown(run: Run) -> float:
    def end(worker: Guarded) -> None:
        worker.send_signal(signal.SIGQUIT)
        worker.wait(LIMIT)

    began, is_soft = run.workers.end(run.queue, end), run.queue == "soft"
    assert "Soft Shutdown" in run.scene.place.log() or not is_soft
    return began + is_soft


@dataclass(frozen=True)
class End:
    """One line of the page.

    Attributes:
        how: what the run is ordered to do, for the first time.
        strike: what ends it, when all have begun; returns when it did.
        result: the state in which Celery stores a task that is unique from queued to finished; None if that of an
            earlier attempt may be stored later, or none is.
        task: the name of the task's variant.
        queue: that of a worker of its own, or of none until it is ended.
        attempts: how many there are.
    """

    name: str
    state: State
    how: str = "sleep"
    strike: Callable[[Run], float] = by_itself
    result: str | None = None
    task: str = "plain"
    queue: str = "celery"
    attempts: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def stores_its_result(self) -> bool:
        """Whether it is the run's own process that stores a result."""
        return self.state is State.FREE and (self.how in {"return", "exception"} or "soft_time_limit" in self.options)

    @property
    def waits(self) -> bool:
        return self.state is State.NEVER


LIMITED = {"time_limit": TIME_LIMIT}
ENDS = [
    End("return", State.FREE, "return", result="SUCCESS"),
    End("return with `at_least`", State.KEPT, "return", result="SUCCESS", task="cooling"),
    End("exception", State.FREE, "exception", result="FAILURE"),
    End("`SystemExit`", State.FREE, "exit"),
    End("`Ignore`", State.FREE, "ignore"),
    End("`Reject`", State.FREE, "reject", task="late"),
    End("`Reject(requeue=True)`", State.REJECTED, "reject and requeue", result="SUCCESS", task="late"),
    End("`self.retry()`", State.RETRIED, "retry", attempts=2),
    End("`autoretry_for`", State.RETRIED, "exception", task="again", attempts=2),
    End("soft time limit", State.FREE, result="FAILURE", options={"soft_time_limit": TIME_LIMIT}),
    End("hard time limit", State.LIMITED, strike=by_hard_limit, result="FAILURE", options=LIMITED),
    End("hard time limit inside one C call", State.LIMITED, "C call", by_hard_limit, "FAILURE", options=LIMITED),
    End("`revoke` of a task that waits", State.NEVER, "return", by_revoke, "REVOKED", queue="revoked"),
    End("`revoke(terminate=True)`", State.FREE, strike=by_terminate("SIGTERM"), result="REVOKED"),
    End("`revoke(terminate=True, signal='SIGKILL')`", State.FREE, strike=by_terminate("SIGKILL"), result="REVOKED"),
    End("`kill -9` of the child", State.TOLD, strike=by_kill, result="FAILURE"),
    End("`kill -9` of the child with `reject_on_worker_lost`", State.REDELIVERED, "sleep", by_kill, "SUCCESS", "late"),
    End("`kill -9` of the whole worker", State.LEFT, strike=by_worker_kill, queue="killed"),
    End("warm shutdown", State.FREE, "gate", by_warm_shutdown, "SUCCESS", queue="warm"),
    End("soft shutdown that is not done in time", State.FREE, strike=by_cold_shutdown, queue="soft"),
    End("cold shutdown", State.FREE, strike=by_cold_shutdown, queue="cold"),
]
EXPIRED = "REVOKED" if KIND == "redis" else DROPPED
OF_UNIQUE = [
    End("expired in its queue", State.NEVER, "return", by_expiry, EXPIRED, queue="expired", options={"expires": 0.5}),
    End("expired before it was published", State.NEVER, "return", result="REVOKED", options={"expires": -5}),
    End("replaced", State.FREE, "replace", result="SUCCESS"),
    End("a retry that gives up", State.FREE, "exception", task="again", attempts=3),
    End("a retry that ends before its run", State.FREE, "retry", task="ends before a retry"),
    End("a retry that is none", State.FREE, "say that it is retried"),
]
"""Ends that are of interest where a task is unique from queued to finished."""
LOST = [
    End("this machine", State.REDELIVERED, task="late", queue="killed"),
    End("another machine", State.REDELIVERED, task="elsewhere", queue="killed"),
    End("cold shutdown", State.REDELIVERED, task="late", queue="cold"),
]
"""Runs whose messages are lost with their workers."""


def name_of(end: End) -> str:
    return end.name.replace("`", "")


each_end = pytest.mark.parametrize("end", ENDS, ids=name_of)


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Messages come again within a second after a requeue, and after a loss when the test says so."""
    return {"broker_transport_options": options_for_redis(visibility_timeout=3, unacked_restore_limit=0)}


@pytest.fixture(scope="module")
def workers(place: World) -> Iterator[Workers]:
    with place.worker("-c", "16"), ExitStack() as stack:
        yield Workers(place, stack)
        assert place.no_key_is_left()


def begin(workers: Workers, end: End, tasks: dict[str, Any]) -> Run:
    """Send the task of which this is the end; each of its attempts fails if it gives up."""
    if not (end.queue == "celery" or end.waits):
        workers.of(end.queue)
    scene = Scene(workers.place)
    queue = f"{end.queue}-{scene.key}" if end.waits and end.queue != "celery" else end.queue
    once = [] if "gives up" in end.name else ["once"]
    task = live.elsewhere if end.task == "elsewhere" else tasks[end.task]
    return Run(workers, scene, queue, task.apply_async((scene.key, *once, end.how), queue=queue, **end.options))


@pytest.fixture(scope="module")
def ended(workers: Workers) -> dict[str, Run]:
    """All runs, which have been ended: those of tasks whose runs are decorated, of unique ones, and of lost ones."""
    kinds = [("below", ENDS, live.BELOW), ("above", ENDS + OF_UNIQUE, live.ABOVE), ("lost", LOST, live.BELOW)]
    runs = [(kind, end, begin(workers, end, tasks)) for kind, ends, tasks in kinds for end in ends]
    for _, end, run in runs:
        if not end.waits:
            run.scene.begun()
    for kind, end, run in runs:
        if kind != "lost" and not (end.waits and end.strike is by_itself):
            end.strike(run)
    return {f"{kind} {end.name}": run for kind, end, run in runs}


def test_the_table_of_the_page_is_what_is_checked_here() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def table() -> str:
    names = {state: ", ".join(each.name for each in ENDS if each.state is state) for state in State}
    return HEAD + "".join(f"| {names[state]} | {state.value} |\n" for state in State)


def check_free(run: Run) -> None:
    """By nobody's call but the worker's own."""
    run.scene.place.wait_for_event(run.scene.key, "del")
    assert run.scene.events() == ["set", "del"]


def result_stored(run: Run) -> float:
    return run.scene.place.wait_for_event(f"/celery-task-meta-{run.answer.id}", "set").at


def check_limited(run: Run) -> None:
    """Not before its process is dead, which Celery sees to last of all."""
    check_free(run)
    assert result_stored(run) <= run.scene.place.events(run.scene.key)[-1].at, "released before the result was stored"


def check_kept(run: Run) -> None:
    assert eventually(lambda: run.scene.state() == ("kept", run.answer.id))
    assert 0 < run.scene.expires_in() <= live.AT_LEAST
    run.scene.free()


def check_again(run: Run) -> None:
    run.scene.begun(2)
    assert run.scene.is_free()


def check_retried(run: Run) -> None:
    check_again(run)
    assert run.scene.events() == ["set", "del", "set", "del"]


def check_never(run: Run) -> None:
    assert eventually(lambda: run.answer.state == "REVOKED")
    assert run.scene.events() == []
    assert run.scene.runs() == []


def check_left(run: Run) -> None:
    """At once on this machine; elsewhere see `tests/test_takeover.py`."""
    wait_for_its_death(run)
    assert run.scene.events() == ["set"]
    with configure(redis=run.scene.place.server.url, prefix=PREFIX):
        assert only_one(lambda: "done", key=run.scene.key, timeout=600)() == "done"


def wait_for_its_death(run: Run) -> None:
    """What is dead is gone only when somebody has waited for it; for orphans that is init, which may take its time."""
    child = run.scene.begun().pid
    assert eventually(lambda: is_gone(child))


CHECKS = {
    State.FREE: check_free,
    State.KEPT: check_kept,
    State.RETRIED: check_retried,
    State.REJECTED: check_retried,
    State.REDELIVERED: check_again,
    State.LIMITED: check_limited,
    State.TOLD: check_free,
    State.LEFT: check_left,
    State.NEVER: check_never,
}


@each_end
def test_the_key_after(ended: dict[str, Run], end: End) -> None:
    run = ended[f"below {end.name}"]
    CHECKS[end.state](run)
    if end.stores_its_result:
        assert run.scene.place.events(run.scene.key)[-1].at <= result_stored(run), "released after it was stored"


@pytest.mark.parametrize("end", ENDS + OF_UNIQUE, ids=name_of)
def test_the_key_of_a_unique_task_after(ended: dict[str, Run], scene: Scene, end: End) -> None:
    """It is free, or taken over by the next call, which is published, and runs."""
    run = ended[f"above {end.name}"]
    scene.key = run.scene.key
    if end.result not in {None, DROPPED}:
        assert eventually(lambda: run.answer.state == end.result), run.answer.state
    if end.state is State.KEPT:
        assert live.ABOVE[end.task].delay(scene.key) == run.answer
        check_kept(run)
    elif end.state is State.LEFT:
        wait_for_its_death(run)
    else:
        assert scene.is_free()
    if not end.waits:
        scene.begun(end.attempts)
    if end.state in {State.FREE, State.RETRIED, State.LIMITED, State.TOLD} and end.how != "replace":
        assert scene.gaps() == 1
    if end.queue == "expired":
        said = documented("a task that expires in its queue", BROKERS[KIND])
        assert said.startswith(f"`{run.answer.state}`")
    if end.result == "REVOKED":
        with pytest.raises(TaskRevokedError):
            run.answer.get(timeout=LIMIT)
    assert live.unique.delay(scene.key, "next").get(timeout=LIMIT) == "next"


@pytest.mark.parametrize("name", ["renamed", "modelled"])
def test_the_key_of_a_killed_run_whose_arguments_were_changed(workers: Workers, scene: Scene, name: str) -> None:
    """By its base class or by pydantic, in its own process; the main process has only the message."""
    if name == "renamed":
        answer = live.renamed.delay(scene.key, "sleep")
        scene.key += "-renamed"
    else:
        answer = live.modelled.delay({"key": scene.key, "orders": ["sleep"]})
    run = Run(workers, scene, "celery", answer)
    by_kill(run)
    check_free(run)


@pytest.mark.usefixtures("workers")
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


@pytest.mark.parametrize("end", LOST, ids=name_of)
def test_a_message_whose_worker_is_lost(workers: Workers, ended: dict[str, Run], end: End) -> None:
    """Another worker does the work once more: at once, or when the key has expired."""
    run, place = ended[f"lost {end.name}"], workers.place
    if end.queue == "killed":
        place.broker.deliver_again(place.broker.copy_of(run.answer.id))
    take_from(end.queue)
    assert run.answer.get(timeout=LIMIT)["held"]
    assert len(place.notes("begin", run.scene.key)) == 2
    assert len(place.notes("end", run.scene.key)) == 1
    assert ("expired" in run.scene.events()) == (end.name == "another machine")


@pytest.mark.parametrize("end", ["recycled", "stopped"])
def test_a_release_that_has_failed_is_finished_when_its_process_ends(place: World, end: str) -> None:
    """No `atexit` is called then."""
    key, arguments = f"{PREFIX}{uuid4()}", ["--max-tasks-per-child", "1"] if end == "recycled" else []
    with place.worker("-c", "1", "-Q", end, *arguments) as worker:
        live.leave_a_release.apply_async((key,), queue=end).get(timeout=LIMIT)
        if end == "stopped":
            assert place.client.exists(key)
            worker.send_signal(signal.SIGTERM)
        assert eventually(lambda: not place.client.exists(key))


@pytest.mark.soak
@each_end
def test_how_soon_a_key_is_free(workers: Workers, end: End, record_property: Callable[[str, object], None]) -> None:
    if end.state not in SECONDS:
        pytest.skip("it is not released")
    run = begin(workers, end, live.BELOW)
    run.scene.begun()
    began = end.strike(run)
    if end.state in {State.REJECTED, State.REDELIVERED}:
        run.scene.begun(2)
    seconds = run.scene.place.wait_for_event(run.scene.key, "del", since=began - SLACK).at - began
    record_property("seconds", seconds)
    print(f"{end.name:60} {end.state.name:12} {seconds:6.3f} s")
    assert seconds < SECONDS[end.state]
    CHECKS[end.state](run)


if __name__ == "__main__":
    print(table(), end="")
