"""Redeliveries of a task's message as a worker's process sees to them: see `deliveries`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import chain, group
from celery.exceptions import Ignore, Reject

from only_one import buffer_one, carry_on, current_lock, fail, retry, skip
from only_one.celery import delivery, redelivery
from only_one.celery.redelivery import REQUEUED
from only_one.clock import now
from only_one.connections.server import Server
from only_one.driver import drive
from only_one.lock.commands import evaluate
from rigs.proxy import Proxy
from rigs.waiting import eventually
from tests.celery.deliveries import (
    OUTCOMES,
    REMEMBERED,
    Awaits,
    Keys,
    Queue,
    a_task,
    done,
    lambda_of,
    token_of,
)
from tests.interruptions import raises


@pytest.mark.parametrize("loses_its_key", [True, False])
@pytest.mark.parametrize("results", ["cache+memory://", "disabled://"])
def test_a_redelivery_is_requeued_while_its_run_lasts_and_dropped_afterwards(
    queue: Queue, keys: Keys, kind: Any, results: str, *, loses_its_key: bool
) -> None:
    """No result backend is asked."""
    queue.app.conf.result_backend = results

    def work() -> None:
        runs.append("run")
        queue.deliver_elsewhere(message, redelivered=True)
        seen.append((keys.marked(answer.id), keys.redis.ttl(keys.marker(answer.id))))
        if loses_its_key:
            del keys["k"]

    runs: list[str] = []
    seen: list[tuple[Any, int]] = []
    # The policy is not for redeliveries.
    answer = a_task(queue.app, kind(work), when_busy=fail, celery={"base": Awaits}).apply_async(expires=600)
    message = queue.take()
    queue.deliver(message)
    ((marked, seconds),) = seen
    assert marked == {b"asked": b"1", b"number": b"1"}, "it has not ended"
    assert REMEMBERED - 60 < seconds <= REMEMBERED
    marked = keys.marked(answer.id)
    assert (marked[b"number"], marked[b"ended"], marked[b"stored"]) == (b"1", b"", b"1")
    (later,) = queue.messages()
    assert later["headers"]["only_one"]["times"] == 1
    assert later["headers"]["expires"] is None, "it has begun in time"
    queue.deliver(message, redelivered=True)
    queue.deliver_all()
    assert runs == ["run"]


ENDS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "returns": (lambda _: "done", True),
    "fails": (raises(ValueError()), True),
    "is retried": (lambda task: task.retry(countdown=0), True),
    "is replaced": (lambda task: task.replace(task.s()), True),
    "is ignored": (raises(Ignore()), False),
    "is rejected": (raises(Reject(requeue=True)), False),
}
"""How a run ends, and whether that is the end of its work."""


@pytest.mark.parametrize("comes_back", [None, "acks_on_failure_or_timeout", "acks_on_failure"])
@pytest.mark.parametrize("end", ENDS)
def test_a_redelivery_is_dropped_after_an_end_of_the_work(queue: Queue, end: str, comes_back: str | None) -> None:
    """A message that is rejected on failure may come back by a dead-letter queue, and must do its work then.

    So must the next attempt, or the replacement, if it was killed.
    """
    if comes_back and comes_back not in {name for name, _ in queue.app.Task.from_config}:
        pytest.skip("Celery knows it since 5.7")
    waits: list[Any] = []
    ends, is_end = ENDS[end]

    def work(self: Any) -> Any:
        if waits:
            return "run again"
        queue.deliver_elsewhere(message, redelivered=True)
        waits.append(queue.take())
        return ends(self)

    a_task(queue.app, work, celery={"bind": True, **({comes_back: False} if comes_back else {})}).delay()
    message = queue.take()
    queue.deliver(message)
    work_is_done, before = is_end and (comes_back is None or end != "fails"), len(queue)
    assert (queue.deliver(waits[0]) == "run again") is not work_is_done
    assert len(queue) == before, "it waits no more"
    while len(queue):
        assert queue.deliver(redelivered=True) == "run again"


@pytest.mark.parametrize("policy", [fail, skip, carry_on])
def test_a_redelivery_waits_for_the_server_unless_it_may_carry_on(
    queue: Queue, way: Proxy, monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    """Its run may be under way, so a failure, or None, would be stored over the result of that run."""
    runs: list[str] = []
    answer = a_task(queue.app, lambda_of(lambda: runs.append("run")), when_down=policy).delay()
    with way.refused():
        queue.deliver(redelivered=True)
        if policy is not carry_on:
            with monkeypatch.context() as patched:
                patched.setattr(redelivery, "read_marker", raises(AssertionError("it takes as long again")))
                queue.deliver()
    if policy is not carry_on:
        assert (answer.state, runs) == ("PENDING", [])
        queue.deliver()
    assert (answer.state, runs) == ("SUCCESS", ["run"])
    assert len(queue) == 0


@pytest.mark.parametrize("retries", [0, 1])
def test_a_replacement_waits_as_any_other(queue: Queue, keys: Keys, retries: int) -> None:
    """Also after a task that was requeued, and while a retry that it replaces holds the key; its value says so."""

    def work(self: Any) -> Any:
        if self.request.replaced_task_nesting:
            return getattr(current_lock().holder, "replacement", None)
        raise self.replace(self.s())

    answer = a_task(queue.app, work, when_busy=retry(), celery={"bind": True}).apply_async(retries=retries)
    for holder in (b"somebody else", token_of(answer.id, attempt=retries)):
        with keys.busy(holder):
            queue.deliver()
            assert len(queue) == 1
        queue.deliver()
    assert (answer.state, answer.result) == ("SUCCESS", 1)


@pytest.mark.parametrize("by", [chain, group])
@pytest.mark.parametrize("policy", [skip, fail])
def test_the_first_task_of_what_replaces_a_task_waits_for_its_run(queue: Queue, by: Any, policy: Any) -> None:
    """It has an id of its own."""
    times: list[int] = []

    def work(self: Any) -> str:
        if self.request.replaced_task_nesting:
            return "done"
        try:
            raise self.replace(by(self.si(), self.si()))
        finally:
            queue.deliver_elsewhere(queue.take())
            times.extend(each["headers"].get("only_one", {"times": 0})["times"] for each in queue.messages())

    a_task(queue.app, work, when_busy=policy, celery={"bind": True}).delay()
    queue.deliver()
    assert 1 in times  # it was requeued, and is the last of those that wait
    assert [queue.deliver() for _ in times] == ["done"] * len(times)


@pytest.mark.parametrize("acks_late", [True, False])
@pytest.mark.parametrize("policy", [retry(), buffer_one()], ids=["retry", "buffer_one"])
def test_new_work_with_the_id_of_earlier_work_runs(queue: Queue, keys: Keys, policy: Any, *, acks_late: bool) -> None:
    """It comes while the earlier runs, and after it, and also if it was killed; a redelivery does nothing after it.

    The earlier work has told a redelivery of its own that it has ended.
    """

    def work(number: int) -> None:
        runs.append(number)
        if number == 1:
            queue.deliver_elsewhere(second)
            if acks_late:
                queue.deliver_elsewhere(waits, redelivered=True)

    runs: list[int] = []
    task = a_task(queue.app, work, when_busy=policy, celery={"acks_late": acks_late})
    for number in (1, 2, 3):
        task.apply_async((number,), task_id="used again")
    first, second, third = (queue.take() for _ in range(3))
    for message in (first, third):
        with keys.busy():
            queue.deliver(message)
        waits = queue.take()
        queue.deliver(waits, redelivered=True)
        queue.deliver_all()
        queue.deliver(message, redelivered=True)
    assert runs == [1, 2, 3]


def test_without_redeliveries_the_marker_costs_no_command(queue: Queue, keys: Keys, way: Proxy) -> None:
    def lose() -> None:
        keys.redis.delete(current_lock().key)

    def commands(function: Any, **options: Any) -> list[str]:
        task = a_task(queue.app, function, **options)
        way.forget_commands()
        task.delay()
        queue.deliver()
        return [name for name in way.commands if name != "INFO"]  # which is asked for in the background

    early = {"acks_late": False}
    commands(done)  # the server may not know the script, or a command
    commands(done, celery=early)
    assert commands(done) == ["SET", "EVAL"]
    # Acknowledged early it has no redeliveries: what has become of its key costs as much as a release.
    released = commands(done, celery=early)
    assert commands(lose, celery=early) in (released, [*released, "GET"])
    with keys.busy():
        for _ in range(2):
            requeued = commands(done, when_busy=retry())
            queue.take()
    assert requeued == ["SET", "EVAL"]


@pytest.mark.parametrize("minutes", [30, 31])
def test_a_long_run_sets_the_marker(queue: Queue, keys: Keys, monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    """One of more than half of the time after which the broker redelivers."""
    monkeypatch.setattr(delivery, "now", lambda: 1000.0)
    later = lambda_of(lambda: monkeypatch.setattr(delivery, "now", lambda: 1000.0 + 60 * minutes))
    answer = a_task(queue.app, later).delay()
    queue.deliver()
    assert keys.marked(answer.id).get(b"stored") == (b"1" if minutes > 30 else None)
    assert keys.redis.ttl(keys.marker(answer.id)) <= REMEMBERED


ENDED: dict[str, tuple[Any, str]] = {
    "stored": ({"stored": 1, "ended_at": 20}, "dropped"),
    "not stored yet": ({"stored": 0, "ended_at": 20}, "requeued"),
    "not stored in time": ({"stored": 0, "ended_at": 30}, "run again"),
    "not stored by a dead process": ({"stored": 0, "ended_at": 20, "is_dead": True}, "run again"),
    "not released": ({"stored": 1, "ended_at": 20, "holds": True}, "dropped"),  # it does not wait for the expiry
    "not stored, and the key is kept": ({"stored": 0, "ended_at": 40, "kept": True}, "requeued"),
    "stored, and another has the key": ({"stored": 1, "ended_at": 20, "when_busy": fail}, "dropped"),
    "the same, and None would be its result": ({"stored": 1, "ended_at": 20, "when_busy": skip}, "dropped"),
    "the same, and it may not wait": ({"stored": 1, "ended_at": 20, "when_busy": retry(max_retries=0)}, "dropped"),
    "not stored yet, and another has the key": ({"stored": 0, "ended_at": 20, "when_busy": skip}, "requeued"),
    "not ended, and another has the key": ({"asked": 1, "ended_at": None, "when_busy": retry()}, "requeued"),
    # A redelivery may come between the release of a key that was lost, and the result.
    "only stored": ({"stored": 1, "ended_at": None}, "dropped"),
    "only asked": ({"asked": 1, "ended_at": None}, "run"),
}


@pytest.mark.parametrize(("marker", "outcome"), ENDED.values(), ids=ENDED)
def test_a_redelivery_after_the_end_of_its_run(
    queue: Queue, keys: Keys, caplog: pytest.LogCaptureFixture, marker: Any, outcome: str
) -> None:
    """Its run is done for nothing without a result, which it has 30 s to store if it is not known to be dead."""
    caplog.set_level(logging.INFO)
    runs: list[str] = []
    policy = {name: marker[name] for name in ("when_busy",) if name in marker}
    task = a_task(queue.app, lambda_of(lambda: runs.append("run")), **policy)
    answer = task.delay()
    seconds_ago, is_dead = marker["ended_at"], marker.get("is_dead", False)
    fields = {name: marker[name] for name in ("stored", "asked") if name in marker}
    token = token_of(answer.id, is_dead=is_dead)
    if seconds_ago is not None:
        fields |= {"ended": token, "ended_at": keys.redis.time()[0] - seconds_ago}
    has_key = bool(policy) or "holds" in marker or "kept" in marker
    if has_key:
        keys["k"] = "another's" if policy else token.replace(b"running", b"kept") if "kept" in marker else token
    keys.redis.hset(keys.marker(answer.id), mapping=fields)
    queue.deliver(redelivered=True)
    assert (len(runs), len(queue)) == OUTCOMES[outcome]
    assert answer.state == ("SUCCESS" if runs else "PENDING")
    assert ("k" in keys) == has_key
    # What has run again has ended anew.
    assert (keys.marked(answer.id).get(b"ended") == fields.get("ended")) == (not runs)
    assert (b"asked" in keys.marked(answer.id)) == ("asked" in marker or "holds" in marker)
    assert (0 < keys.redis.ttl(keys.marker(answer.id)) <= REMEMBERED) == (outcome == "requeued" or "holds" in marker)
    name = f"{task.name}[{answer.id}]"
    texts = {
        "run again": f"{name} is run again: its run has ended, but stored no result",
        "dropped": f"redelivery of {name} dropped: its run has ended",
    }
    assert [text in caplog.messages for text in texts.values()] == [outcome == each for each in texts]
    if outcome == "requeued":
        keys.redis.hset(keys.marker(answer.id), "stored", 1)
        queue.deliver()
        assert (len(runs), len(queue)) == OUTCOMES["dropped"], "it knows the marker of its run"


def test_a_redelivery_of_a_kept_key_is_dropped_also_if_the_server_refuses_its_marker(queue: Queue, keys: Keys) -> None:
    """Else it would wait for the end of ``at_least``, and do the work again."""
    answer = a_task(queue.app, done, at_least=60).delay()
    queue.deliver(message := queue.take())
    keys.redis.set(keys.marker(answer.id), "no hash")
    queue.deliver(message, redelivered=True)
    assert len(queue) == 0


class Exits:
    """A result at which its process is told to exit, as by SIGTERM, before it is stored."""

    def __json__(self) -> None:
        raise SystemExit


@pytest.mark.filterwarnings("ignore:Exception raised outside body")
@pytest.mark.parametrize("acks", [True, False])
@pytest.mark.parametrize(
    "result", [object(), "done", Exits()], ids=["it cannot be serialized", "the backend is away", "its process exits"]
)
def test_a_run_whose_result_is_not_stored(new_app: Any, keys: Keys, tmp_path: Path, result: Any, *, acks: bool) -> None:
    """Celery takes such a run for a failed one, whose message may come back by a dead-letter queue.

    Exception: the message of a process that exits comes back in any case.
    """
    is_over = acks and not isinstance(result, Exits)
    runs: list[str] = []
    (results := tmp_path / "results").mkdir()

    def work() -> Any:
        runs.append("run")
        if result == "done" and len(runs) == 1:
            results.rmdir()
        return result

    queue = Queue(new_app(result_backend=f"file://{results}"), keys.redis)
    answer = a_task(queue.app, work, celery={"acks_on_failure_or_timeout": acks}).delay()
    message = queue.take()
    keys.redis.hset(keys.marker(answer.id), "asked", 1)
    for redelivered in (False, True):
        with suppress(FileNotFoundError, SystemExit):  # the former by Celery, if the failure cannot be stored either
            queue.deliver(message, redelivered=redelivered)
        assert keys.marked(answer.id)[b"stored"] == b"%d" % is_over
        # So that it is not waited for, for half a minute.
        keys.redis.hset(keys.marker(answer.id), "ended", token_of(answer.id, is_dead=True))
    assert len(runs) == (1 if is_over else 2)


def test_a_task_runs_though_its_marker_cannot_be_read_or_set(
    queue: Queue, keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no hash, by whomever: the message waits, runs and ends all the same."""
    caplog.set_level("DEBUG", "only_one")

    def spoil(*_: Any) -> None:
        keys.redis.set(marker, "not ours")

    def work() -> str:
        monkeypatch.setattr(delivery, "now", lambda: now() + 3600)
        return "done"

    task = a_task(queue.app, work, celery={"after_return": spoil})
    answer = task.delay()
    marker = keys.marker(answer.id)
    keys.redis.set(marker, "not ours")
    with keys.busy(token_of(answer.id)):
        queue.deliver()
    assert answer.state == "PENDING"
    queue.deliver()
    assert answer.get() == "done"
    assert eventually(lambda: "k" not in keys)

    answer = task.delay()
    marker = keys.marker(answer.id)
    keys.redis.hset(marker, "asked", 1)
    queue.deliver()
    assert answer.get() == "done"
    assert keys.redis.get(marker) == b"not ours"
    told = f"the completion marker or number of {answer.id} cannot be read or written: WRONGTYPE"
    assert caplog.messages[-1].startswith(told)


def test_the_marker_has_the_number_of_the_latest_message(server: Server, keys: Keys) -> None:
    for number, latest in ((9, b"9"), (10, b"10"), (9, b"10")):
        drive(server.client, evaluate(REQUEUED, f"{keys.prefix}k", number, 1000, beside=(keys.marker("a task"),)))
        assert keys.marked("a task") == {b"number": latest}
