"""Unique from queued to finished, by a real worker of several processes: what runs, and when the key is free.

What is to stay queued is sent to a queue that the worker does not know, and moved to the one that it does.
How such a task may end is in `test_ends`, and what a worker does with one that it has received in `test_received`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError

from only_one import AlreadyRunning, only_one
from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.brokers import KIND, consumed
from tests.live.workers import PREFIX, Scene, World, answered

unique, buffered = live.unique, live.ABOVE["buffered"]


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-c", "4", **{live.TEMPLATE: "new-{key}"}):
        yield


# --- queued, running, finished -----------------------------------------------------------------------------------


def test_queued_then_running_then_free(scene: Scene) -> None:
    answer = unique.apply_async((scene.key, "gate", "done"), queue=scene.queue)
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id, holder.pid) == ("queued", answer.id, os.getpid())
    assert unique.delay(scene.key) == answer
    assert scene.queued(scene.queue) == 1
    scene.consume()
    begun = scene.begun()
    holder = scene.holder()
    assert holder is not None
    assert (holder.state, holder.task_id, holder.attempt) == ("running", answer.id, 0)
    assert (holder.pid, holder.name) == (begun.pid, unique.name)
    assert 0 < scene.expires_in() <= live.TIMEOUT
    duplicate = unique.delay(scene.key)
    assert duplicate == answer
    assert scene.queued() == scene.queued(scene.queue) == 0
    scene.open()
    assert duplicate.get(timeout=LIMIT) == "done"
    assert scene.is_free()
    assert scene.gaps() == 1  # at its end, and not between queued and running
    again = unique.delay(scene.key, "again")
    assert again != answer
    assert again.get(timeout=LIMIT) == "again"


def test_a_lease_is_renewed_from_the_start_of_the_run(scene: Scene) -> None:
    task = live.ABOVE["leased"]
    answer = task.delay(scene.key, "gate", "see it renewed", "gate")
    scene.begun()
    assert 0 < scene.expires_in() <= live.LEASE
    scene.place.client.pexpire(PREFIX + scene.key, round(live.LEASE * 500))
    scene.open()
    assert scene.place.wait_for("renewed", scene.key).rest == ["True"]
    assert scene.expires_in() > live.LEASE / 2
    assert task.delay(scene.key) == answer
    scene.open()
    assert answer.get(timeout=LIMIT)["held"]
    assert scene.is_free()


@pytest.mark.parametrize("kind", ["unique_task", "unique_based", "unique_modelled"])
def test_a_task_of_another_kind(scene: Scene, kind: str) -> None:
    task = getattr(live, kind)
    argument: Any = {"key": scene.key} if kind == "unique_modelled" else scene.key
    answer = task.apply_async((argument,), queue=scene.queue)
    assert task.delay(argument) == answer
    scene.consume()
    found = answer.get(timeout=LIMIT)
    found = found["whose"] if kind == "unique_modelled" else found
    assert (found["key"], found["state"], found["held"]) == (PREFIX + scene.key, "running", True)
    assert (found["name"], found["id"], found["is here"]) == (task.name, answer.id, True)
    assert scene.is_free()
    assert scene.gaps() == 1
    assert len(scene.place.notes("around", scene.key)) == (kind == "unique_based")


# --- buffer_one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("later", "ran"), [([2, 3, 4, 5, 6], ["1", "6"]), ([1, 1], ["1", "1"])])
def test_buffer_one_is_one_running_and_one_queued_and_the_newest_is_last(
    scene: Scene, later: list[int], ran: list[str]
) -> None:
    """The second of two that are the same came during the run of the first, and is not lost."""
    first = buffered.delay(scene.key, "gate", 1)
    scene.begun()
    answers = [buffered.delay(scene.key, "gate", number) for number in later]
    scene.open(2)
    assert first.get(timeout=LIMIT) == 1
    assert answers[-1].get(timeout=LIMIT) == later[-1]
    assert all(answer.get(timeout=LIMIT) in {later[-1], None} for answer in answers)
    assert scene.is_free()
    assert scene.results() == ran


def test_buffer_one_of_what_is_queued(scene: Scene) -> None:
    """None runs yet; whatever is published, the newest is the last one that runs."""
    answers = [buffered.apply_async((scene.key, number), queue=scene.queue) for number in range(2, 7)]
    scene.place.broker.let_return(scene.queue)
    live.app.control.add_consumer(scene.queue, **consumed())
    for each in answers:
        each.get(timeout=LIMIT)
    results = scene.results()
    assert results[-1] == "6"
    assert len(results) <= 2
    assert results == sorted(results)


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_buffer_one_whose_waiting_task_is_dropped_waits_for_the_next(scene: Scene, how: str) -> None:
    """What will never run is not given to who comes next."""
    first = buffered.delay(scene.key, "gate", 1)
    scene.begun()
    if how == "revoked":
        dropped = buffered.apply_async((scene.key, 2), queue=scene.queue)
        assert answered(live.app.control.revoke, dropped.id)
        scene.consume()
    else:
        dropped = buffered.apply_async((scene.key, 2), expires=-1)
    assert eventually(lambda: dropped.state == "REVOKED")
    answers = [dropped]

    def is_another() -> bool:
        answers.append(buffered.delay(scene.key, 2))
        return bool(answers[-1] != dropped)

    assert eventually(is_another)  # Celery stores the state first, and tells it then
    scene.open()
    assert first.get(timeout=LIMIT) == 1
    assert answers[-1].get(timeout=LIMIT) == 2
    assert scene.results() == ["1", "2"]


# --- retries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_by", ["its run", "revoke"])
def test_a_retry_keeps_the_key_through_its_wait(scene: Scene, ends_by: str) -> None:
    answer = unique.apply_async((scene.key, "once", "retry later"), queue=scene.queue)
    scene.consume()
    assert waits_for_a_retry(scene, answer)
    assert unique.delay(scene.key) == answer
    if ends_by == "revoke":
        assert answered(live.app.control.revoke, answer.id)
        assert scene.is_held()
    scene.consume()
    assert eventually(lambda: answer.state == ("REVOKED" if ends_by == "revoke" else "SUCCESS"))
    assert scene.is_free()
    assert scene.runs() == (["0"] if ends_by == "revoke" else ["0", "1"])
    assert scene.gaps() == 1


def test_a_retry_that_ends_before_its_run(scene: Scene) -> None:
    task = live.ends_before_a_retry
    answer = task.apply_async((scene.key, "retry later"), queue=scene.queue)
    scene.consume()
    assert waits_for_a_retry(scene, answer)
    assert task.delay(scene.key) == answer
    scene.consume()
    with pytest.raises(live.Trouble):
        answer.get(timeout=LIMIT)
    assert scene.is_free()


def waits_for_a_retry(scene: Scene, answer: Any) -> bool:
    """Whether it comes to wait: in this test's queue again, where it was the first time, if the broker is Redis."""
    return eventually(lambda: answer.state == "RETRY" and (KIND != "redis" or scene.queued(scene.queue) == 1))


def test_a_retry_with_other_arguments_has_their_key(scene: Scene) -> None:
    other = f"{scene.key}-other"
    found = unique.delay(scene.key, "retry elsewhere").get(timeout=LIMIT)
    assert (found["key"], found["state"], found["held"]) == (PREFIX + other, "running", True)
    assert scene.is_free()


# --- past the decorator ------------------------------------------------------------------------------------------


def test_by_name_its_run_is_decorated(scene: Scene) -> None:
    answer = live.app.send_task(unique.name, (scene.key, "gate", "done"))
    scene.begun()
    assert scene.state() == ("running", answer.id)
    assert unique.delay(scene.key) == answer
    assert live.app.send_task(unique.name, (scene.key,)).get(timeout=LIMIT) is None
    scene.open()
    assert answer.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["0"]


@pytest.mark.parametrize("how", ["by name", "with an id"])
def test_a_run_takes_over_a_key_that_is_merely_queued_and_leaves_it_to_the_one_that_waits(
    scene: Scene, how: str
) -> None:
    queued = unique.apply_async((scene.key, "queued"), queue=scene.queue)
    orders = (scene.key, "gate", "running")
    if how == "by name":
        running = live.app.send_task(unique.name, orders)
    else:
        running = unique.apply_async(orders, task_id=str(uuid4()))
    scene.begun()
    assert scene.state() == ("running", running.id)
    assert running != queued
    scene.open()
    assert running.get(timeout=LIMIT) == "running"
    assert unique.delay(scene.key) == queued  # which has its key again
    scene.consume()
    assert queued.get(timeout=LIMIT) == "queued"
    assert scene.is_free()
    assert scene.runs() == ["0", "0"]
    assert scene.gaps() == 1


def test_one_whose_queued_key_is_taken_by_a_run_is_not_beside_it(scene: Scene) -> None:
    queued = unique.apply_async((scene.key,), queue=scene.queue)
    running = live.app.send_task(unique.name, (scene.key, "gate", "done"))
    scene.begun()
    scene.consume()
    assert queued.get(timeout=LIMIT) is None  # as any that finds its key busy
    scene.open()
    assert running.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["0"]


def test_the_runs_of_starmap_and_chunks_are_decorated(scene: Scene) -> None:
    held = unique.delay(scene.key, "gate", "done")
    scene.begun()
    items = [(scene.key, "done"), (f"{scene.key}-free", "done")]
    assert unique.starmap(items).apply_async().get(timeout=LIMIT) == [None, "done"]
    assert unique.chunks(items, 1).apply_async().get(timeout=LIMIT) == [[None], ["done"]]
    scene.open()
    assert held.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["0"]


def test_a_template_that_has_changed_in_between(scene: Scene) -> None:
    """The worker has another one; the key that was taken when it was queued travels with the message."""
    answer = live.moved.apply_async((scene.key, "gate"), queue=scene.queue)
    scene.consume()
    scene.begun()
    assert live.moved.delay(scene.key) == answer
    scene.open()
    assert answer.get(timeout=LIMIT)["key"] == PREFIX + scene.key
    assert scene.is_free()
    # What is sent past the decorator brings no key, so the worker's own template is used.
    by_name = live.app.send_task(live.moved.name, (scene.key,))
    assert by_name.get(timeout=LIMIT)["key"] == f"{PREFIX}new-{scene.key}"


def test_a_holder_that_is_no_task(scene: Scene) -> None:
    """The task is published, and the worker decides."""
    begun, end = threading.Event(), threading.Event()

    @only_one("constant", timeout=live.TIMEOUT)
    def script() -> bool:
        begun.set()
        return end.wait(LIMIT)

    thread = threading.Thread(target=script)
    thread.start()
    try:
        assert begun.wait(LIMIT)
        assert live.constant.delay(scene.key).get(timeout=LIMIT) is None
        queued = live.constant.apply_async((scene.key, "done"), queue=scene.queue)
    finally:
        end.set()
        thread.join(LIMIT)
    scene.consume()
    assert queued.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["0"]


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


@pytest.mark.parametrize("is_behind", [False, True], ids=["of itself", "of one that is queued"])
@pytest.mark.parametrize("canvas", CANVAS)
def test_a_canvas_of_duplicates_ends(scene: Scene, canvas: str, *, is_behind: bool) -> None:
    """Its runs take over what is merely queued, which runs, too, when it comes; behind a run see `test_canvas`."""
    queued = unique.apply_async((scene.key, "done"), queue=scene.queue) if is_behind else None
    answer = CANVAS[canvas](lambda: unique.si(scene.key, "done")).apply_async()
    with suppress(AlreadyRunning, ChordError):
        answer.get(timeout=LIMIT)
    scene.place.wait_for("end", scene.key)
    if queued is not None:
        scene.consume()
        assert queued.get(timeout=LIMIT) in {"done", None}
    assert scene.is_free()
    assert set(scene.runs()) == {"0"}


def test_a_link_on_a_duplicate_is_called(scene: Scene) -> None:
    running = unique.delay(scene.key, "gate", "done")
    scene.begun()
    answer = unique.apply_async((scene.key,), link=live.hear.s(scene.key))
    assert answer != running
    assert answer.get(timeout=LIMIT) is None  # as below `@app.task`
    assert scene.place.wait_for("heard", scene.key).rest == ["None"]
    scene.open()
    assert running.get(timeout=LIMIT) == "done"
    assert scene.runs() == ["0"]
