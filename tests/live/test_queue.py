"""Covered from queued to finished, by a real worker of several processes: what runs, and when the key is free.

Keys have a `timeout` of ten minutes and a `queue_timeout` of an hour, so no expiry explains that one is free.
What is to stay queued is sent to a queue that the worker does not know, and moved to the one that it does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from only_one import AlreadyRunning, configure, only_one
from only_one.holder import Holder
from rigs.waiting import LIMIT, eventually
from tests.documented import BROKERS, documented
from tests.live import queue_app as live
from tests.live.brokers import KIND, consumed
from tests.live.workers import PREFIX, World, answered, world

END = Callable[["Scene"], Any]


class Scene:
    """A gate of a test's own, which is its key too, and a queue of its own."""

    def __init__(self, place: World) -> None:
        self.place = place
        self.gate = f"gate-{uuid4().hex}"
        self.queue = f"queue-{self.gate}"

    def queued(self, queue: str = "celery") -> int:
        """How many messages are in a queue."""
        return self.place.broker.queued(queue)

    def consume(self) -> None:
        """Have the worker take what is in this test's queue now, and not what comes back there from a run of it."""
        for _ in range(self.queued(self.queue)):
            self.place.broker.move(self.queue, "celery")

    def go_on_consuming(self) -> None:
        """The same, and what is put back there, too; it takes the worker up to a second to begin."""
        self.place.broker.let_return(self.queue)
        live.app.control.add_consumer(self.queue, **consumed())

    def waits_for_a_retry(self, answer: Any) -> bool:
        """Whether it comes to wait: in this test's queue again, where it was the first time, if the broker is Redis."""
        return eventually(lambda: answer.state == "RETRY" and (KIND != "redis" or self.queued(self.queue) == 1))

    def open(self) -> None:
        """Let a run pass."""
        self.place.client.rpush(f"gate:{self.gate}", 1)

    def holder(self) -> Holder | None:
        """Who has the key."""
        value = self.place.client.get(PREFIX + self.gate)
        return None if value is None else Holder.parse(value)

    def keys(self) -> list[str]:
        """What is left of this test: its keys, and what stands beside them and does not expire."""
        names = [name.decode() for name in self.place.client.scan_iter(f"*{PREFIX}{self.gate}*")]
        return [name for name in names if name.startswith(PREFIX) or self.place.client.ttl(name) == -1]

    def is_free(self) -> bool:
        """Whether the key is free, or comes to be."""
        return eventually(lambda: not self.place.is_held(self.gate))

    def begun(self, times: int = 1) -> None:
        self.place.wait_for("begin", self.gate, times)

    def runs(self) -> list[str]:
        """What has run, none beside another."""
        begins, ends = self.place.notes("begin", self.gate), self.place.notes("end", self.gate)
        assert len(begins) == len(ends)
        assert all(end.at <= begin.at for end, begin in zip(ends, begins[1:], strict=False)), "beside each other"
        return [each.rest[0] for each in begins]

    def gaps(self) -> int:
        """How often the key was free, as the server tells it."""
        self.place.catch_up()
        return len([each for each in self.place.events(self.gate) if each.what in {"del", "expired"}])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        world(live.app, "tests.live.queue_app", tmp_path_factory.mktemp("queue")) as found,
        configure(redis=found.server.url, prefix=PREFIX),
        found.worker("-c", "4", QUEUE_TEMPLATE="new-{gate}"),
    ):
        yield found


@pytest.fixture
def scene(place: World) -> Iterator[Scene]:
    with configure(redis=place.server.url, prefix=PREFIX):
        found = Scene(place)
        yield found
        assert eventually(lambda: not found.keys()), found.keys()


# --- queued, running, finished -----------------------------------------------------------------------------------


def test_queued_then_running_then_free(scene: Scene) -> None:
    answer = live.gated.apply_async((scene.gate,), queue=scene.queue)
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id, holder.pid) == ("queued", answer.id, os.getpid())
    assert live.gated.delay(scene.gate) == answer
    assert scene.queued(scene.queue) == 1
    scene.consume()
    scene.begun()
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id, holder.attempt) == ("running", answer.id, 0)
    assert holder.pid == scene.place.notes("begin", scene.gate)[0].pid
    assert holder.name == live.gated.name
    assert 0 < scene.place.client.pttl(PREFIX + scene.gate) <= live.TIMEOUT * 1000
    duplicate = live.gated.delay(scene.gate)
    assert duplicate == answer
    assert scene.queued() == scene.queued(scene.queue) == 0
    scene.open()
    assert duplicate.get(timeout=LIMIT) == "done"
    assert scene.is_free()
    assert scene.runs() == ["done"]
    assert scene.gaps() == 1  # at its end, and not between queued and running
    again = live.gated.delay(scene.gate)
    assert again != answer
    scene.open()
    assert again.get(timeout=LIMIT) == "done"


def test_a_lease_is_renewed_from_the_start_of_the_run(scene: Scene) -> None:
    answer = live.leased.delay(scene.gate)
    scene.begun()
    key = PREFIX + scene.gate
    assert 0 < scene.place.client.pttl(key) <= live.LEASE * 1000
    scene.place.client.pexpire(key, live.LEASE * 500)
    scene.open()
    assert scene.place.wait_for("renewed", scene.gate).rest == ["True"]
    assert scene.place.client.pttl(key) > live.LEASE * 500
    assert live.leased.delay(scene.gate) == answer
    scene.open()
    assert answer.get(timeout=LIMIT) == [key, "running", live.leased.name, answer.id, True, True]
    assert scene.is_free()


def test_the_default_key(scene: Scene) -> None:
    first = live.default.apply_async((scene.gate,), queue=scene.queue)
    assert live.default.delay(gate=scene.gate, number=1) == first
    second = live.default.apply_async((scene.gate, 2), queue=scene.queue)
    assert scene.queued(scene.queue) == 2
    scene.consume()
    for number, answer in enumerate([first, second], 1):
        found, key, state, name, task_id, *_ = answer.get(timeout=LIMIT)
        assert (found, state, name, task_id) == (number, "running", live.default.name, answer.id)
        assert key.startswith(f"{PREFIX}{live.default.name}:")


@pytest.mark.parametrize("kind", ["single", "based", "modelled"])
def test_a_task_of_another_kind(scene: Scene, kind: str) -> None:
    task = getattr(live, kind)
    argument = {"gate": scene.gate} if kind == "modelled" else scene.gate
    answer = task.apply_async((argument,), queue=scene.queue)
    assert task.delay(argument) == answer
    scene.consume()
    found = answer.get(timeout=LIMIT)
    found = found["whose"] if kind == "modelled" else found
    assert found == [PREFIX + scene.gate, "running", task.name, answer.id, True, True]
    assert scene.is_free()
    assert scene.gaps() == 1
    assert kind != "based" or len(scene.place.notes("call", scene.gate)) == 1


def test_fail_while_it_runs(scene: Scene) -> None:
    answer = live.failing.delay(scene.gate)
    scene.begun()
    with pytest.raises(AlreadyRunning) as raised:
        live.failing.delay(scene.gate)
    assert raised.value.task_id == answer.id
    assert raised.value.holder is not None
    assert raised.value.holder.state == "running"
    scene.open()
    assert answer.get(timeout=LIMIT) == "done"


def test_at_least_keeps_it_after_a_success(scene: Scene) -> None:
    answer = live.cooling.delay(scene.gate)
    assert answer.get(timeout=LIMIT) == "done"
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id) == ("kept", answer.id)
    assert live.cooling.delay(scene.gate) == answer
    assert not scene.queued()
    assert 0 < scene.place.client.pttl(PREFIX + scene.gate) <= live.AT_LEAST * 1000
    scene.place.client.pexpire(PREFIX + scene.gate, 1)
    assert scene.is_free()
    assert live.cooling.delay(scene.gate).get(timeout=LIMIT) == "done"
    assert scene.runs() == ["done", "done"]
    scene.place.client.delete(PREFIX + scene.gate)


# --- buffer_one --------------------------------------------------------------------------------------------------


def test_buffer_one_is_one_running_and_one_queued_and_the_newest_is_last(scene: Scene) -> None:
    first = live.buffered.delay(scene.gate, 1)
    scene.begun()
    others = [live.buffered.delay(scene.gate, number) for number in range(2, 7)]
    scene.open()
    assert first.get(timeout=LIMIT) == 1
    scene.place.wait_for("end", scene.gate, 2)
    values = [None if each is None else each.get(timeout=LIMIT) for each in others]
    assert scene.is_free()
    print(values)
    assert values[-1] == 6
    assert scene.runs() == ["1", "6"]


def test_buffer_one_of_what_is_queued(scene: Scene) -> None:
    """None runs yet; whatever is published, the newest is the last one that runs."""
    answers = [live.buffered.apply_async((scene.gate, number), queue=scene.queue) for number in range(2, 7)]
    scene.go_on_consuming()
    scene.place.wait_for("end", scene.gate)
    for each in answers:
        each.get(timeout=LIMIT)
    runs = scene.runs()
    assert runs[-1] == "6"
    assert len(runs) <= 2
    assert runs == sorted(runs)


def test_buffer_one_of_two_that_are_the_same(scene: Scene) -> None:
    first = live.buffered.delay(scene.gate, 1)
    scene.begun()
    second = live.buffered.delay(scene.gate, 1)
    third = live.buffered.delay(scene.gate, 1)
    scene.open()
    assert first.get(timeout=LIMIT) == 1
    scene.begun(2)  # the trigger that came during the run is not lost
    scene.open()
    assert third.get(timeout=LIMIT) == 1
    assert second.get(timeout=LIMIT) in (1, None)
    assert scene.runs() == ["1", "1"]


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_buffer_one_whose_pending_one_is_dropped_waits_for_the_next(scene: Scene, how: str) -> None:
    """What will never run is not given to who comes next."""
    first = live.buffered.delay(scene.gate, 1)
    scene.begun()
    if how == "revoked":
        dropped = live.buffered.apply_async((scene.gate, 2), queue=scene.queue)
        assert answered(live.app.control.revoke, dropped.id)
        scene.consume()
    else:
        dropped = live.buffered.apply_async((scene.gate, 2), expires=-1)
    assert eventually(lambda: dropped.state == "REVOKED")
    answers = [dropped]

    def is_another() -> bool:
        answers.append(live.buffered.delay(scene.gate, 2))
        return bool(answers[-1] != dropped)

    assert eventually(is_another)  # Celery stores the state first, and tells it then
    scene.open()
    assert first.get(timeout=LIMIT) == 1
    assert answers[-1].get(timeout=LIMIT) == 2
    assert scene.runs() == ["1", "2"]


# --- retries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["retry", "autoretry"])
def test_a_retry_keeps_the_key_through_its_wait(scene: Scene, how: str) -> None:
    task, args = (live.ends, (scene.gate, "retry")) if how == "retry" else (live.again, (scene.gate, 1))
    answer = task.apply_async(args, queue=scene.queue)
    scene.consume()
    assert scene.waits_for_a_retry(answer)
    holder = scene.holder()
    assert holder is not None
    assert holder.task_id == answer.id
    duplicate = task.delay(*args)
    assert duplicate == answer
    scene.consume()
    assert duplicate.get(timeout=LIMIT) == ("last" if how == "retry" else 1)
    assert scene.is_free()
    assert [each.rest[0] for each in scene.place.notes("begin", scene.gate)] == ["0", "1"]
    assert scene.gaps() == 1


def test_a_retry_that_gives_up(scene: Scene) -> None:
    answer = live.again.delay(scene.gate, 5)
    with pytest.raises(live.Trouble):
        answer.get(timeout=LIMIT)
    assert scene.is_free()
    assert len(scene.place.notes("begin", scene.gate)) == 3
    assert scene.gaps() == 1


def test_a_retry_that_waits_and_is_revoked(scene: Scene) -> None:
    answer = live.ends.apply_async((scene.gate, "retry"), queue=scene.queue)
    scene.consume()
    assert scene.waits_for_a_retry(answer)
    assert answered(live.app.control.revoke, answer.id)
    assert scene.place.is_held(scene.gate)
    scene.consume()
    assert eventually(lambda: answer.state == "REVOKED")
    assert scene.is_free()


def test_a_retry_with_other_arguments_has_their_key(scene: Scene) -> None:
    other = f"{scene.gate}-other"
    key, state, *_, held = live.goes_elsewhere.delay(scene.gate, other).get(timeout=LIMIT)
    assert (key, state, held) == (PREFIX + other, "running", True)
    assert scene.is_free()


def test_one_that_says_that_it_is_retried_and_is_not(scene: Scene) -> None:
    live.retried_by_hand.delay(scene.gate)
    assert scene.is_free()


def test_a_retry_that_ends_before_its_run(scene: Scene) -> None:
    answer = live.not_again.apply_async((scene.gate,), queue=scene.queue)
    scene.consume()
    assert scene.waits_for_a_retry(answer)
    assert live.not_again.delay(scene.gate) == answer
    scene.consume()
    with pytest.raises(live.Trouble):
        answer.get(timeout=LIMIT)
    assert scene.is_free()


def test_a_retry_with_other_arguments_leaves_no_key(scene: Scene) -> None:
    answer = live.ends.delay(scene.gate, "retry with other arguments")
    assert answer.get(timeout=LIMIT) == "last"
    assert eventually(lambda: not scene.keys())


# --- ends --------------------------------------------------------------------------------------------------------


def ends_by(how: str, **options: Any) -> END:
    return lambda scene: live.ends.apply_async((scene.gate, how), **options)


def ends_late(how: str) -> END:
    return lambda scene: live.late.delay(scene.gate, how)


def terminated(name: str) -> END:
    def go(scene: Scene) -> Any:
        answer = live.ends.delay(scene.gate, "sleep")
        scene.begun()
        live.app.control.revoke(answer.id, terminate=True, signal=name)
        return answer

    return go


def killed(scene: Scene) -> Any:
    answer = live.ends.delay(scene.gate, "sleep")
    scene.begun()
    holder = scene.holder()
    assert holder is not None
    assert holder.pid == scene.place.notes("begin", scene.gate)[0].pid
    os.kill(holder.pid, signal.SIGKILL)
    return answer


def expired_in_the_queue(scene: Scene) -> Any:
    answer = live.plain.apply_async((scene.gate,), queue=scene.queue, expires=0.5)
    until = datetime.now(timezone.utc) + timedelta(seconds=0.6)
    assert eventually(lambda: datetime.now(timezone.utc) > until)
    scene.consume()
    return answer


def revoked_in_the_queue(scene: Scene) -> Any:
    answer = live.plain.apply_async((scene.gate,), queue=scene.queue)
    assert answered(live.app.control.revoke, answer.id)
    assert scene.place.is_held(scene.gate)
    scene.consume()
    return answer


DROPPED = "DROPPED"
"""What RabbitMQ does with a message in a queue that has expired: nobody hears of it."""

ENDS: dict[str, tuple[END, str]] = {
    "return": (ends_by("return"), "SUCCESS"),
    "exception": (ends_by("exception"), "FAILURE"),
    "Ignore": (ends_by("ignore"), "PENDING"),
    "Reject": (ends_by("reject"), "PENDING"),
    "Reject, acks_late": (ends_late("reject"), "PENDING"),
    "Reject and requeue, acks_late": (ends_late("reject and requeue"), "SUCCESS"),
    "replace": (ends_by("replace"), "SUCCESS"),
    "soft time limit": (ends_by("sleep", soft_time_limit=1), "FAILURE"),
    "hard time limit": (ends_by("sleep", time_limit=1), "FAILURE"),
    "hard time limit where no signal is seen to": (ends_by("deaf", time_limit=1), "FAILURE"),
    "revoke with terminate": (terminated("SIGTERM"), "REVOKED"),
    "revoke with SIGKILL": (terminated("SIGKILL"), "REVOKED"),
    "kill -9 of the child": (killed, "FAILURE"),
    "kill -9 of the child, reject_on_worker_lost": (ends_late("kill"), "SUCCESS"),
    "expired in the queue": (expired_in_the_queue, "REVOKED" if KIND == "redis" else DROPPED),
    "expired before it was published": (lambda scene: live.plain.apply_async((scene.gate,), expires=-5), "REVOKED"),
    "revoked in the queue": (revoked_in_the_queue, "REVOKED"),
}


@pytest.fixture(scope="module")
def ended(place: World) -> dict[str, tuple[Scene, Any]]:
    """All of them at once, as what some of them take is time."""
    scenes = {end: Scene(place) for end in ENDS}
    return {end: (scene, ENDS[end][0](scene)) for end, scene in scenes.items()}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.usefixtures("scene")
def test_the_key_is_free_after(ended: dict[str, tuple[Scene, Any]], end: str) -> None:
    scene, answer = ended[end]
    state = ENDS[end][1]
    if state == "PENDING":  # it never ends, so what is seen is that it has begun
        scene.begun()
    elif state != DROPPED:
        assert eventually(lambda: answer.state == state), answer.state
    assert scene.is_free()
    if end == "expired in the queue":
        said = documented("the state of a task that expires in its queue", BROKERS[KIND])
        assert said.startswith(f"`{answer.state}`")
    if state == "REVOKED":
        with pytest.raises(TaskRevokedError):
            answer.get(timeout=LIMIT)
    # And the next one is published, and runs.
    assert live.plain.delay(scene.gate).get(timeout=LIMIT) == "done"
    assert eventually(lambda: not scene.keys()), scene.keys()


# --- past the decorator ------------------------------------------------------------------------------------------


def test_by_name_it_is_covered_when_it_runs(scene: Scene) -> None:
    answer = live.app.send_task(live.gated.name, (scene.gate,))
    scene.begun()
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id) == ("running", answer.id)
    assert live.gated.delay(scene.gate) == answer
    assert live.app.send_task(live.gated.name, (scene.gate,)).get(timeout=LIMIT) is None
    scene.open()
    assert answer.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["done"]


@pytest.mark.parametrize("how", ["by name", "with an id"])
def test_a_run_takes_over_a_key_that_is_merely_queued_and_leaves_it_to_the_one_that_waits(
    scene: Scene, how: str
) -> None:
    queued = live.gated.apply_async((scene.gate,), queue=scene.queue)
    if how == "by name":
        running = live.app.send_task(live.gated.name, (scene.gate,))
    else:
        running = live.gated.apply_async((scene.gate,), task_id=str(uuid4()))
    scene.begun()
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id) == ("running", running.id)
    assert running != queued
    scene.open()
    assert running.get(timeout=LIMIT) == "done"
    assert live.gated.delay(scene.gate) == queued  # which has its key again
    scene.consume()
    scene.begun(2)
    scene.open()
    assert queued.get(timeout=LIMIT) == "done"
    assert scene.is_free()
    assert scene.runs() == ["done", "done"]
    assert scene.gaps() == 1


def test_one_whose_queued_key_is_taken_by_a_run_is_not_beside_it(scene: Scene) -> None:
    queued = live.gated.apply_async((scene.gate,), queue=scene.queue)
    running = live.app.send_task(live.gated.name, (scene.gate,))
    scene.begun()
    scene.consume()
    answer = queued.get(timeout=LIMIT)
    assert answer is None  # as any that finds its key busy
    scene.open()
    assert running.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["done"]


def test_starmap_and_chunks_are_covered_when_they_run(scene: Scene) -> None:
    free = f"{scene.gate}-free"
    held = live.gated.delay(scene.gate)
    scene.begun()
    items = [(scene.gate,), (free,)]
    assert live.plain.starmap(items).apply_async().get(timeout=LIMIT) == [None, "done"]
    assert live.plain.map([scene.gate, free]).apply_async().get(timeout=LIMIT) == [None, "done"]
    assert live.plain.chunks(items, 1).apply_async().get(timeout=LIMIT) == [[None], ["done"]]
    scene.open()
    assert held.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["done"]


def test_a_template_that_has_changed_in_between(scene: Scene) -> None:
    """The worker has another one; the key that was taken when it was queued travels with the message."""
    answer = live.moved.apply_async((scene.gate,), queue=scene.queue)
    scene.consume()
    scene.begun()
    assert not scene.place.is_held(f"new-{scene.gate}")
    assert live.moved.delay(scene.gate) == answer
    scene.open()
    assert answer.get(timeout=LIMIT)[:2] == [PREFIX + scene.gate, "running"]
    assert scene.is_free()
    # What is sent past the decorator brings no key, so the worker's own template is used.
    by_name = live.app.send_task(live.moved.name, (scene.gate,))
    scene.begun(2)
    scene.open()
    assert by_name.get(timeout=LIMIT)[0] == f"{PREFIX}new-{scene.gate}"


def test_a_holder_that_is_no_task(scene: Scene) -> None:
    """It is published, and the worker decides."""
    begun, end = threading.Event(), threading.Event()

    @only_one(live.CONSTANT, timeout=live.TIMEOUT)
    def script() -> bool:
        begun.set()
        return end.wait(LIMIT)

    thread = threading.Thread(target=script)
    thread.start()
    try:
        assert begun.wait(LIMIT)
        answer = live.constant.delay(scene.gate)
        assert answer.get(timeout=LIMIT) is None
        queued = live.constant.apply_async((scene.gate,), queue=scene.queue)
    finally:
        end.set()
        thread.join(LIMIT)
    scene.consume()
    assert queued.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["done"]


def test_a_foreign_value(scene: Scene) -> None:
    scene.place.client.set(PREFIX + scene.gate, "somebody else")
    answer = live.plain.delay(scene.gate)
    assert answer.get(timeout=LIMIT) is None
    assert scene.place.client.get(PREFIX + scene.gate) == b"somebody else"
    scene.place.client.delete(PREFIX + scene.gate)
    assert live.plain.delay(scene.gate).get(timeout=LIMIT) == "done"


# --- canvas: nothing hangs ---------------------------------------------------------------------------------------


CANVAS: dict[str, Callable[[Any], Any]] = {
    "group": lambda f: group(f(), live.other.si(), f(), f()),
    "chain whose last is a duplicate": lambda f: chain(live.other.si(), f()),
    "chain of two": lambda f: chain(f(), f()),
    "chain with others after it": lambda f: chain(f(), live.after.s()),
    "chord": lambda f: chord([live.other.si(), f(), f()], live.after.s()),
    "chord's body": lambda f: chord([live.other.si(), live.other.si()], f()),
    "chord of chains": lambda f: chord([chain(f(), live.after.s()), chain(live.other.si(), f())], live.after.s()),
}


@pytest.mark.parametrize("canvas", CANVAS)
def test_a_canvas_of_duplicates_ends(scene: Scene, canvas: str) -> None:
    answer = CANVAS[canvas](lambda: live.plain.si(scene.gate)).apply_async()
    try:
        found = answer.get(timeout=LIMIT)
    except (AlreadyRunning, ChordError) as error:
        found = error
    print(found)
    assert eventually(lambda: len(scene.place.notes("end", scene.gate)) >= 1)
    assert scene.is_free()
    assert "done" in scene.runs()


BEHIND: dict[str, tuple[Any, int]] = {
    "group": ([None, "other", None, None], 3),
    "chain whose last is a duplicate": (None, 1),
    "chain of two": (AlreadyRunning, 1),
    "chain with others after it": (AlreadyRunning, 1),
    "chord": ((ChordError, AlreadyRunning), 2),
    "chord's body": (None, 1),
    "chord of chains": ((ChordError, AlreadyRunning), 2),
}
"""What comes of a canvas whose key is taken, and how many of it come to a worker."""


@pytest.mark.parametrize("canvas", CANVAS)
def test_a_canvas_behind_one_that_runs_ends(scene: Scene, canvas: str) -> None:
    """As below `@app.task`: None, except where others would go on with it."""
    running = live.gated.delay(scene.gate)
    scene.begun()
    answer = CANVAS[canvas](lambda: live.plain.si(scene.gate)).apply_async()
    expected, times = BEHIND[canvas]
    if isinstance(expected, list | None):
        assert answer.get(timeout=LIMIT) == expected
    else:
        with pytest.raises(expected):
            answer.get(timeout=LIMIT)
    assert live.plain.delay(scene.gate) == running
    # A chord has failed with the first of its header, and the others may be still to come.
    scene.place.wait_for("seen", scene.gate, times)
    scene.open()
    assert running.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["done"]


@pytest.mark.parametrize("canvas", CANVAS)
def test_a_canvas_behind_one_that_is_queued_ends(scene: Scene, canvas: str) -> None:
    """Its runs take over what is merely queued, which runs, too, when it comes."""
    queued = live.plain.apply_async((scene.gate,), queue=scene.queue)
    answer = CANVAS[canvas](lambda: live.plain.si(scene.gate)).apply_async()
    try:
        print(answer.get(timeout=LIMIT))
    except (AlreadyRunning, ChordError) as error:
        print(error)
    scene.place.wait_for("end", scene.gate)
    scene.consume()
    assert queued.get(timeout=LIMIT) in {"done", None}
    assert scene.is_free()
    assert set(scene.runs()) == {"done"}


def test_a_link_on_a_duplicate_is_called(scene: Scene) -> None:
    running = live.gated.delay(scene.gate)
    scene.begun()
    answer = live.gated.apply_async((scene.gate,), link=live.plain.si(f"{scene.gate}-link"))
    assert answer != running
    assert answer.get(timeout=LIMIT) is None  # as below `@app.task`
    scene.place.wait_for("end", f"{scene.gate}-link")
    scene.open()
    assert running.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["done"]
