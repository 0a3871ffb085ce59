"""The key of a queued task that another run has taken over: what the task has when that run is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, current_task
from celery.app.task import Context
from celery.exceptions import Ignore
from celery.signals import task_revoked

from only_one import Acquired, AlreadyRunning, Reclaimed, Released, fail
from only_one.clock import now
from only_one.connections.kept_connections import KeptConnections
from only_one.events import Event
from only_one.lock import commands
from only_one.settings import DEFAULT_LEASE
from rigs.waiting import eventually
from tests.celery.deliveries import QUEUE_TIMEOUT, Keys, Queue, decorated, done, token_of, unique
from tests.decorated import as_async
from tests.interruptions import Interruption, raises

pytestmark = pytest.mark.usefixtures("redis")

LEFT = QUEUE_TIMEOUT / 2


class Tasks:
    """A task that waits in its queue, and a message with an id of its own, which comes first.

    Attributes:
        meanwhile: what the run of that message calls.
    """

    def __init__(self, app: Celery, queue: Queue, keys: Keys, **options: Any) -> None:

        def run() -> None:
            self.meanwhile()

        self.task = unique(app, "k", function=run, **options)
        app.finalize()
        self.task.apply_async(task_id=f"{uuid4()}")
        self.waits = self.task.delay()
        self.value = keys["k"]
        keys.redis.pexpire(f"{keys.prefix}k", round(LEFT * 1000))
        self._queue, self._other = queue, queue.take()
        self.meanwhile: Callable[[], Any] = done

    def run_other(self, meanwhile: Callable[[], Any] = done) -> None:
        self.meanwhile = meanwhile
        self._queue.deliver(self._other)


@pytest.fixture
def tasks(app: Celery, queue: Queue, keys: Keys) -> Callable[..., Tasks]:
    return lambda **options: Tasks(app, queue, keys, **options)


def retry() -> None:
    task: Any = current_task
    raise task.retry(countdown=60)


def interrupted(_: Tasks) -> None:
    """When it has taken the key over, and does not know it yet."""
    send = KeptConnections.send_raw

    def send_and_raise(client: KeptConnections, command: Any) -> Any:
        reply = send(client, command)
        if command[0] == "EVAL":
            patched.undo()
            raise Interruption
        return reply

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KeptConnections, "send_raw", send_and_raise)
        with pytest.raises(Interruption):
            decorated(key="k")(done)()


RUNS: dict[str, Callable[[Tasks], object]] = {
    "it is interrupted": interrupted,
    "it returns": lambda two: two.run_other(),
    "it raises": lambda two: two.run_other(raises(ValueError())),
    "it is ignored": lambda two: two.run_other(raises(Ignore())),
    "it is retried": lambda two: two.run_other(retry),
    "of a function": lambda _: decorated(key="k")(done)(),
    "of an async function": lambda _: asyncio.run(decorated(key="k")(as_async(done))()),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_task_that_waits_has_its_key_again_after_another_run(tasks: Any, keys: Keys, run: Any) -> None:
    two = tasks()
    run(two)
    assert eventually(lambda: keys["k"] == two.value)
    assert two.task.delay() == two.waits
    assert keys.lives_for(LEFT)


@pytest.mark.parametrize(("options", "lives_for"), [({}, DEFAULT_LEASE), ({"celery": {"expires": 10}}, 10)])
def test_a_task_whose_key_is_taken_over_while_it_is_published_has_its_key_until_a_worker_receives_it(
    tasks: Any, keys: Keys, options: dict[str, Any], lives_for: float
) -> None:
    """It is lengthened only then; and a run may take longer than it lives until then."""
    two = tasks(**options)
    keys.redis.expire(f"{keys.prefix}k", 2)
    two.run_other()
    assert keys["k"] == two.value
    assert keys.lives_for(lives_for)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_task_that_is_received_or_runs_at_that_moment_keeps_no_other_run_out(
    tasks: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch, *, has_run: bool
) -> None:
    """When another run asks for its key."""
    send, received = KeptConnections.send_raw, tasks().value.replace(b'"queued"', b'"received"')

    def send_and_receive(client: KeptConnections, command: Any) -> Any:
        """The first command is answered, and then a worker receives the task, or has run it."""
        reply = send(client, command)
        if command[0] == "SET" and reply:
            keys.redis.set(f"{keys.prefix}k", received, px=1 if has_run else round(DEFAULT_LEASE * 500))
            assert eventually(lambda: has_run == ("k" not in keys))
        return reply

    with monkeypatch.context() as while_it_asks:
        while_it_asks.setattr(KeptConnections, "send_raw", send_and_receive)
        assert decorated(key="k")(keys.left)() > DEFAULT_LEASE / 2
    if has_run:
        assert "k" not in keys
        return
    assert keys.holder().state == "received"
    assert DEFAULT_LEASE / 2 < keys.left() <= DEFAULT_LEASE, "the worker could not renew it meanwhile"


def test_a_holder_is_told_to_be_killed_only_if_it_was(redis_url: str, keys: Keys, happened: list[Event]) -> None:
    for state, kinds in {"queued": [Acquired, Released], "running": [Reclaimed, Acquired, Released]}.items():
        happened.clear()
        keys["k"] = token_of("another", state=state, is_dead=True)
        assert decorated(key="k", redis=redis_url)(done)() == "done"
        assert [type(event) for event in happened] == kinds
        assert ("k" in keys) == (state == "queued"), "nothing is owed to a task whose run was killed"


def test_a_task_whose_time_has_ended_has_no_key(tasks: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    two = tasks()
    two.run_other(lambda: monkeypatch.setattr(commands, "now", lambda: now() + LEFT))
    assert "k" not in keys
    assert two.task.delay() != two.waits


def test_a_run_that_keeps_its_key_keeps_it(tasks: Any, keys: Keys) -> None:
    tasks(at_least=600).run_other()
    assert keys.holder().state == "kept"


@pytest.mark.parametrize("how", ["skipped", "failed", "revoked", "cut off"])
def test_a_task_that_has_ended_meanwhile_has_no_key(
    tasks: Any, queue: Queue, keys: Keys, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    two = tasks(when_busy=fail) if how == "failed" else tasks()
    message = queue.take()

    def end() -> None:
        if how == "revoked":
            task_revoked.send(sender=two.task, request=Context(message["headers"]), terminated=False)
            assert keys.come_to_be_withdrawn(two.waits.id)
            return
        with monkeypatch.context() as cut:
            if how == "cut off":  # it cannot say that it has ended
                cut.setattr(KeptConnections, "send_raw", raises(ConnectionError()))
            result = queue.deliver_elsewhere(message)
        assert how == "cut off" or isinstance(result, AlreadyRunning if how == "failed" else type(None))

    two.run_other(end)
    assert eventually(lambda: "k" not in keys)
    assert two.task.delay() != two.waits


@pytest.mark.parametrize(("options", "lasts"), [({}, 1), ({"celery": {"expires": 4 * QUEUE_TIMEOUT}}, 4)])
def test_a_dropped_redelivery_does_not_withdraw_the_message_that_waits(
    tasks: Any, queue: Queue, keys: Keys, options: dict[str, Any], lasts: int
) -> None:
    def deliver_twice() -> None:
        for _ in range(2):  # the first is published again, and waits
            queue.deliver_elsewhere(message, redelivered=True)

    two, message = tasks(**options), queue.take()
    two.run_other(deliver_twice)
    assert len(queue) == 1
    assert not keys.redis.keys(f"*{keys.prefix}*withdrawn:*")
    keys.redis.hset(keys.marker(two.waits.id), "stored", 1)
    queue.deliver(message, redelivered=True)
    notes = f"*{keys.prefix}*withdrawn:{two.waits.id}:*"
    assert eventually(lambda: keys.redis.keys(notes))  # its run has ended, and none waits
    (note,) = keys.redis.keys(notes)
    left = keys.redis.ttl(note) / QUEUE_TIMEOUT
    assert lasts / 2 < left <= lasts, "for as long as its value might have lived"
