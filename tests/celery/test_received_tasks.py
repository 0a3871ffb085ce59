"""What a worker says of a task that it receives and has not begun, without a worker: its signals, and the key."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4
from weakref import ref

import pytest
from celery.app.task import Context
from celery.exceptions import WorkerLostError
from celery.signals import task_failure, task_received, worker_shutdown
from redis import Redis

from only_one import buffer_one, configure, events
from only_one.celery import received_tasks
from only_one.celery.requeue import Header
from only_one.clock import now
from only_one.lock import renewal
from only_one.lock.token import TokenFactory
from rigs.proxy import Proxy
from rigs.waiting import eventually
from tests.celery.deliveries import HOUR, Keys, Queue, a_task, decorated, unique
from tests.renewal import fails_to_renew, is_renewed, later

LEASE = 30
RESTS = 10
ACKNOWLEDGED = {"message": SimpleNamespace(acknowledged=True)}
QUEUED, RECEIVED = ("queued", 0), ("received", 0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time as the worker sees it, which stands still; and nothing has been received."""
    moment = [now()]
    monkeypatch.setattr(received_tasks, "now", lambda: moment[0])
    monkeypatch.setattr(received_tasks, "_waiting", {})
    monkeypatch.setattr(received_tasks, "_backs_off_until", 0.0)
    monkeypatch.setattr(events, "_warned_of", set())
    return moment


def work(key: str) -> str:
    return key


class Worker:
    """What a worker's consumer has of its own.

    Attributes:
        app: the app.
        task: a unique task of its, which is received unless another is named.
        requests: the tasks that it has received.
    """

    def __init__(self, queue: Queue) -> None:
        self.app = queue.app
        self.task = unique(queue.app, "{key}", function=work)
        self.requests: list[Context] = []
        self._queue = queue

    def receive(self, header: Header | None = None, *, task: Any = None, **changes: Any) -> None:
        """Receive the message that was published last."""
        task = task or self.task
        message = self._queue.messages()[-1]
        headers = message["headers"] | {"properties": message["properties"]}
        if header is not None:
            headers.update(header.as_headers(), id=header.id, retries=header.attempt)
        request = {"content_type": message["content-type"], "time_start": None, **changes}
        request = {"delivery_info": {"redelivered": False}, "message": SimpleNamespace(acknowledged=False), **request}
        headers["delivery_info"] = request["delivery_info"]
        request |= {"task": task.app.tasks[task.name], "app": task.app, "name": task.name, "request_dict": headers}
        self.requests.append(Context({"id": headers["id"], **request}))
        task_received.send(sender=self, request=self.requests[-1])

    def lease(self, key: str = "k", *, task: Any = None, **changes: Any) -> Any:
        """Publish a task and receive it; returns the lease of its key, or the last one if it has none."""
        (task or self.task).delay(key)
        self.receive(task=task, **changes)
        return [None, *received_tasks._waiting.values()][-1]


@pytest.fixture
def worker(queue: Queue) -> Worker:
    return Worker(queue)


def end_worker() -> None:
    """End the worker, whose process ends then."""
    worker_shutdown.send(sender=None)
    renewal.finish_pending_releases()


def test_the_key_lives_with_its_worker_and_the_run_has_its_token(worker: Worker, keys: Keys, way: Proxy) -> None:
    """And it does so again when another run has had it."""
    lease = worker.lease()
    assert way.commands.count("EVAL") == 2, "one is the caller's, and one is the worker's"
    assert lease.ttl == LEASE
    assert keys.state() == RECEIVED
    assert keys.holder().deadline is None
    assert keys.lives_for(LEASE)
    assert worker.requests[-1].request_dict["only_one"]["token"].encode() == keys["k"]
    assert decorated(lambda: fails_to_renew(lease), key="k")()
    assert keys.state() == RECEIVED
    keys.redis.persist(f"{keys.prefix}k")
    assert is_renewed(lease)
    assert keys.lives_for(LEASE)


def test_a_received_task_keeps_its_key_for_longer_than_queue_timeout(
    worker: Worker, keys: Keys, redis_url: str
) -> None:
    with Redis.from_url(redis_url, decode_responses=True) as client, configure(queue_timeout=2 * LEASE, redis=client):
        lease = worker.lease()
        for seconds in range(LEASE // 2, 4 * LEASE, LEASE // 2):
            before = lease.expires_at
            with later(seconds):
                assert eventually(lambda before=before: lease.expires_at > before or lease.reason)  # type: ignore[misc]
        assert lease.reason is None
        end_worker()
    assert keys.state() == QUEUED
    assert keys.lives_for(2 * LEASE)


def test_a_task_that_expires_soon_has_its_key_until_then(worker: Worker, keys: Keys) -> None:
    for expires in (-1, 0):
        assert worker.lease(expires=expires) is None
        assert keys.state() == QUEUED
    assert worker.lease("last second", expires=1)
    lease = worker.lease("later", expires=LEASE - 1)
    assert not lease.renews
    assert lease.ttl == LEASE - 1
    assert 0 < keys.left("later") <= LEASE - 1
    holder = keys.holder("later")
    assert LEASE - 2 < holder.deadline - holder.since <= LEASE - 1


def test_a_key_is_not_renewed_before_its_task_may_begin(worker: Worker, keys: Keys, clock: list[float]) -> None:
    lease = worker.lease(eta=datetime.now(timezone.utc) + timedelta(seconds=HOUR))
    assert keys.lives_for(HOUR + LEASE)
    assert HOUR + LEASE - 25 < lease.expires_at - clock[0] <= HOUR + LEASE
    assert HOUR + LEASE / 3 - 25 < lease.renew_at - clock[0] <= HOUR + LEASE / 3


@pytest.mark.sees_mutmut
def test_a_key_is_not_renewed_once_its_task_has_ended(worker: Worker, keys: Keys, clock: list[float]) -> None:
    """The key may name it again: by a command that was sent twice, and arrives late; or its run has another key."""
    lease = worker.lease()
    assert lease.renew_at < lease.ends_at
    lease.message.acknowledged = True
    lease.note_expiry(clock[0], LEASE)
    assert lease.renew_at == lease.ends_at
    assert lease.expires_at == clock[0] + LEASE
    task_id, lease, kept = worker.requests.pop().id, None, ref(lease)
    left = [each.id for each in gc.get_objects() if type(each) is Context]
    assert task_id not in left, "its arguments are not kept"
    assert eventually(lambda: kept() is None), "the thread that renews may look at it just now"
    assert keys.state() == RECEIVED, "it was not queued again"


@pytest.mark.parametrize("is_revoked", [False, True])
def test_a_task_of_a_lost_connection_waits(worker: Worker, keys: Keys, *, is_revoked: bool) -> None:
    """Celery forgets it then, and may take it again much later; it is not told of that."""
    lease = worker.lease()
    if is_revoked:
        keys.withdraw(worker.requests[-1].id)
    lost_at = time.time() - 0.001  # a value has whole milliseconds
    worker.requests.clear()
    assert eventually(lambda: keys.state() == (None if is_revoked else QUEUED))
    assert is_revoked or is_queued_since(lost_at, keys)
    assert eventually(lambda: lease.token not in renewal._renewer.pending_releases), "it is done once"
    worker.receive()
    assert keys.state() == (None if is_revoked else RECEIVED)


def is_queued_since(moment: float, keys: Keys, key: str = "k") -> bool:
    """Whether the value at a key says so, and that it is free when the key expires."""
    holder = keys.holder(key)
    is_told = holder.since >= moment and holder.deadline - holder.since == pytest.approx(HOUR, abs=1)
    return holder.state == "queued" and is_told and keys.lives_for(HOUR, key)


@pytest.mark.parametrize("is_received", [True, False])
def test_a_task_queued_again_has_its_key(worker: Worker, queue: Queue, keys: Keys, *, is_received: bool) -> None:
    """Its message has the value by which it was queued at first."""
    waits = worker.task.delay("k")
    worker.receive()
    end_worker()
    assert worker.task.delay("k") == waits
    if is_received:
        worker.receive()
        assert worker.requests[-1].request_dict["only_one"]["token"].encode() == keys["k"]
        assert keys.state() == RECEIVED
    assert queue.deliver() == "k"
    assert "k" not in keys


def test_tasks_that_have_not_begun_are_queued_again_when_the_worker_ends(worker: Worker, keys: Keys) -> None:
    tokens = []
    soon = datetime.now(timezone.utc) + timedelta(seconds=0.5)
    # The lost one's message was acknowledged as it was given to the child, which was killed before it had its key.
    changes: Any = {"runs": {}, "waits": {}, "lost": ACKNOWLEDGED, "expired": {"expires": soon}, "late": {}}
    changes["another's"] = ACKNOWLEDGED  # it was requeued by its child, and another run has the key
    changes |= {"gone": {}, "begun": {}}
    for key, its in changes.items():
        worker.task.delay(key)
        tokens.append(keys[key])
        lease = worker.lease(key, **its)
        if key == "runs":
            lease.lose("taken", lease.token)
    # The producer's command was sent twice: the second arrives now.
    keys.redis.set(f"{keys.prefix}late", tokens[-2], ex=LEASE)
    keys["another's"] = TokenFactory("another").token(HOUR)
    keys["begun"] = TokenFactory(worker.task.name, worker.requests[-1].id, 0).token(HOUR)
    del keys["gone"]
    assert eventually(lambda: datetime.now(timezone.utc) > soon)
    ended_at = time.time() - 0.001  # a value has whole milliseconds
    end_worker()
    expected = {"runs": RECEIVED, "waits": QUEUED, "lost": None, "late": QUEUED, "gone": None, "begun": ("running", 0)}
    assert {key: keys.state(key) for key in expected} == expected
    assert is_queued_since(ended_at, keys, "waits")
    assert keys.left("late") <= LEASE
    assert not keys.redis.keys(f"*{keys.prefix}another's*withdrawn*")


@pytest.mark.parametrize("how", ["its worker ends", "it is revoked, and its worker ends", "its child is killed"])
def test_a_task_whose_key_another_run_has_is_queued_again_by_that_run(worker: Worker, keys: Keys, how: str) -> None:
    """Its own value names the worker, which is dead then, so another call would take it over."""
    is_over = how != "its worker ends"
    worker.lease(time_start=now() if "child" in how else None)
    task_id = worker.requests[-1].id
    if "revoked" in how:
        keys.withdraw(task_id)
    ended_at = time.time() - 0.001  # a value has whole milliseconds

    def end() -> None:
        if "worker" in how:
            end_worker()
            return
        task_failure.send(sender=worker.task, task_id=task_id, exception=WorkerLostError(), args=("k",), kwargs={})
        assert keys.come_to_be_withdrawn(task_id)

    decorated("k")(end)()
    assert "k" not in keys if is_over else is_queued_since(ended_at, keys)
    assert worker.task.delay("k").is_duplicate != is_over


VALUES: list[Any] = [
    "somebody else",
    TokenFactory("another", "another", 0, "queued").token(HOUR),
    TokenFactory("a function").token(HOUR),
    TokenFactory("no attempt", "own").token(HOUR),
    TokenFactory("runs", "own", 1).token(HOUR),
    TokenFactory("a later attempt", "own", 2).token(HOUR),
    TokenFactory("a later attempt", "own", 2, "queued").token(HOUR),
    None,
]


@pytest.mark.parametrize("value", VALUES)
def test_a_key_that_is_not_the_tasks_is_left_alone(worker: Worker, keys: Keys, value: Any) -> None:
    worker.task.delay("k")
    del keys["k"]
    if value is not None:
        keys["k"] = value
    before = keys["k"]
    worker.receive(Header("own", 1, key=f"{keys.prefix}k"))
    worker.receive()
    assert keys["k"] == before
    assert not [lease for lease in received_tasks._waiting.values() if lease.renewer], "none is renewed"
    is_of_other_work = value in VALUES[:3]  # whose run may store the task's value again, unless it is told of its end
    assert any(b"own" in lease.token for lease in received_tasks._waiting.values()) == is_of_other_work
    assert worker.lease("next"), "nothing has gone wrong"


def test_a_message_without_a_key_of_its_own_gets_none(queue: Queue, worker: Worker, keys: Keys) -> None:
    plain = queue.app.task(work, name="plain", shared=False)
    worker.task.delay("k")
    worker.receive(task=plain)  # of a program that has decorated it
    with configure(active=False):
        worker.receive()
    worker.receive(Header(f"{uuid4()}", 0))
    worker.receive(Header(f"{uuid4()}", 1))
    worker.receive(Header(f"{uuid4()}", 0, key=f"{keys.prefix}k"))  # a trigger, or one that was requeued
    assert keys.state() == QUEUED
    assert worker.lease("newest", task=unique(queue.app, "{key}", function=work, when_busy=buffer_one())) is None
    assert keys.state("newest") is None
    assert worker.lease("next"), "nothing has gone wrong"


def test_a_server_that_does_not_answer_is_logged_once_and_not_asked_for_a_while(
    worker: Worker, keys: Keys, way: Proxy, clock: list[float], redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that refuses a key is asked again at once."""
    worker.lease("of another server", task=unique(worker.app, "{key}", function=work, redis=redis_url))
    worker.task.delay("refused")
    del keys["refused"]
    keys.redis.rpush(f"{keys.prefix}refused", "no string")
    worker.receive()
    worker.task.delay("k")
    with way.refused():
        worker.receive()
    clock[0] += RESTS - 1
    worker.receive()
    assert keys.state() == QUEUED
    clock[0] += 1
    worker.receive()
    worker.lease("another")
    with way.refused():
        worker_shutdown.send(sender=None)
        assert eventually(lambda: keys.state("of another server") == QUEUED)
        assert keys.state() == RECEIVED
    assert eventually(lambda: {keys.state(), keys.state("another")} == {QUEUED})
    text = f"the key or number of {worker.task.name}, which was received, could not be stored"
    told = [(each.levelname, bool(each.exc_info), each.getMessage()) for each in caplog.records]
    assert told == [("WARNING", True, text)] * 2, "one of each kind"


RECEIVED_BEFORE: dict[str, tuple[Any, list[int]]] = {
    "it waits for a process": (None, [1]),
    "its worker loses it": (None, [1]),
    "it is sent for later": ("2100-01-01T00:00:00+00:00", [1, 0]),
    "it begins before the other": (None, [0, 1]),
}


@pytest.mark.parametrize("how", RECEIVED_BEFORE)
def test_a_task_that_was_received_before_another_has_run_is_older(queue: Queue, worker: Worker, how: str) -> None:
    def run(key: str, number: int) -> None:  # noqa: ARG001 - it is in the key
        ran.append(number)

    (eta, expected), is_lost = RECEIVED_BEFORE[how], "loses" in how
    ran: list[int] = []
    task = a_task(queue.app, run, key="{key}", when_busy=buffer_one())
    messages = []
    for number in range(2):
        task.delay("k", number)
        worker.receive(task=task, args=["k", number], kwargs={}, eta=None if number else eta)
        messages.append(queue.take())
        if number or not is_lost:  # else the broker delivers what was published
            messages[-1]["headers"].update(worker.requests[-1].request_dict)
    older, newer = messages
    for message in messages if "before" in how else (newer, older):
        queue.deliver(message, redelivered=is_lost and message is older)
    assert ran == expected


def test_a_task_that_has_a_number_is_not_numbered_when_it_is_received(
    queue: Queue, worker: Worker, keys: Keys, way: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    task = a_task(queue.app, work, key="{key}", when_busy=buffer_one())
    task.delay("k")
    with keys.busy():
        queue.deliver()
    way.forget_commands()
    worker.receive(task=task, args=["k"], kwargs={})
    a_task(queue.app, work, key="{key}").delay("k")
    worker.receive(task=task, args=[], kwargs={})  # the run says that an argument is missing
    assert not way.commands
    assert not caplog.records


@pytest.mark.parametrize("is_redelivered", [False, True])
def test_a_worker_makes_no_key_for_a_message_that_it_only_hands_on(worker: Worker, *, is_redelivered: bool) -> None:
    """A callable is the user's code, and may take long; the worker receives other messages meanwhile."""
    made: list[str] = []

    def make_key(key: str) -> str:
        made.append(key)
        return key

    task = a_task(worker.app, work, key=make_key)
    task.delay("k")
    worker.receive(task=task, delivery_info={"redelivered": is_redelivered}, args=["k"], kwargs={})
    assert made == (["k"] if is_redelivered else [])


def handed_on(task: Any, key: str) -> Any:
    """A ``__call__`` as that of Flask's tasks; Sentry's SDK has a function in between instead."""
    return task.run(key)


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "autoretry": {"celery": {"autoretry_for": (ValueError,)}},
    "handed on": {"celery": {"__call__": handed_on}},
    "not acks_late": {"celery": {"acks_late": False}},
    "its key cannot be made": {"key": "{key.missing}"},
    "a callable cannot make its key": {"key": lambda key: key.missing},
    "its message has its key": {"celery": {"acks_late": True}},
}


@pytest.mark.parametrize("how", HOW)
def test_a_run_is_told_of_a_redelivery(worker: Worker, keys: Keys, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """And another's, after a task whose key cannot be made: the run says so."""
    for each in (how, "plain"):
        has_its_key = each == "its message has its key"
        make: Any = unique if has_its_key else a_task
        task = make(worker.app, function=work, **{"key": "{key}", **HOW[each]})
        answer = task.delay(key="k")
        given: Any = [([], {}), ([], {"key": "k"}), (["k"], {})]
        for args, kwargs in given[: 1 if has_its_key else 3]:
            worker.receive(task=task, delivery_info={"redelivered": True}, args=args, kwargs=kwargs)
        is_told = has_its_key or each in {"plain", "autoretry", "handed on"}
        assert keys.marked(answer.id) == ({b"asked": b"1"} if is_told else {})
        assert not keys.redis.keys(f"{{None}}*{answer.id}*")
    assert not caplog.records


def test_of_the_attempts_of_a_task_the_last_that_has_begun_is_known_by_its_id(worker: Worker, keys: Keys) -> None:
    """Celery remembers an earlier one, and a later one waits."""
    worker.task.delay("k")
    for attempt, begun in ((1, 1.0), (2, 2.0), (3, None)):
        worker.receive(Header("own", attempt, key=f"{keys.prefix}k"), time_start=begun)
    found = received_tasks.begun_request("own")
    assert found is not None
    assert found.retries == 2
    assert received_tasks.begun_request("another") is None


PROGRAMS = {
    "Celery is imported first": """
import sys, celery
from only_one import only_one
only_one(lambda: None, key="k")  # which no worker calls: that is for its children to do
assert "only_one.celery.ended_tasks" in sys.modules
""",
    "a function is decorated first": """
import sys
from only_one import only_one
only_one("k")(lambda: None)
assert "celery" not in sys.modules
from celery import Celery, signals
Celery("app", broker="memory://").worker_main(["worker", "--help"])
assert signals.task_received.receivers
""",
}


@pytest.mark.sees_mutmut
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_worker_of_a_program_that_has_decorated_only_functions_heeds_celery_s_signals(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)
