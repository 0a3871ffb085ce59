"""What a worker says of a task that it receives and has not begun, without a worker: its signals, and the key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.exceptions import WorkerLostError
from celery.signals import task_failure, task_received, worker_shutdown
from kombu.asynchronous.timer import Timer
from redis import Redis

from only_one import buffer_one, configure, only_one
from only_one.celery import received_tasks
from only_one.celery.requeue import Header
from only_one.clock import now
from only_one.connections.connection_pool import PinnedClient
from only_one.holder import Holder
from only_one.lock.token import TokenFactory
from rigs.waiting import eventually
from tests.proxy import Proxy
from tests.renewal import fails_to_renew, is_renewed, later

HOUR = 3600
A_LEASE = 30
RESTS = 10
LOOKS_AGAIN_AFTER = 1
SLACK = 25
"""Seconds that a test may take between two commands."""

cover: Any = only_one


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time as the worker sees it, which stands still; and nothing has been received."""
    found = [now()]
    monkeypatch.setattr(received_tasks, "now", lambda: found[0])
    monkeypatch.setattr(received_tasks, "_waiting", {})
    monkeypatch.setattr(received_tasks, "_swept_at", 0.0)
    monkeypatch.setattr(received_tasks, "_backs_off_until", 0.0)
    return found


@pytest.fixture
def app(redis_url: str, prefix: str) -> Iterator[Celery]:
    changes = {
        "broker_url": redis_url,
        "result_backend": "cache+memory://",
        "task_default_queue": f"{prefix}queue",
        "only_one_queue_timeout": HOUR,
    }
    found = Celery(f"app-{uuid4()}", set_as_current=False, changes=changes)
    yield found
    found.close()


@pytest.fixture
def task(app: Celery) -> Any:
    return a_task(app)


def work(key: str) -> str:
    return key


def a_task(app: Celery, **options: Any) -> Any:
    return cover("{key}", **options)(app.task(work, name=f"task-{uuid4()}", shared=False))


class Request(SimpleNamespace):
    """The request of a task, to which there may be weak references."""


class Worker:
    """What a worker's consumer has of its own.

    Attributes:
        requests: the tasks that it has received.
    """

    def __init__(self, redis: Redis, prefix: str) -> None:
        self.timer: Any = Timer()  # type: ignore[no-untyped-call]
        self.requests: list[Request] = []
        self._redis = redis
        self._prefix = prefix

    def receive(self, task: Any, header: Header | None = None, **changes: Any) -> dict[str, Any]:
        """Receive the message that was published last; returns its headers, as a run will find them."""
        found: Any = self._redis.lindex(f"{self._prefix}queue", 0)
        message = json.loads(found)
        headers = message["headers"] | {"properties": message["properties"]}
        if header is not None:
            headers.update(header.as_headers(), id=header.id, retries=header.attempt)
        request = {"eta": None, "expires": None, "acknowledged": False, "content_type": message["content-type"]}
        request.update(changes)
        request.update(task=task, app=task.app, id=headers["id"], name=task.name, request_dict=headers)
        self.requests.append(Request(**request))
        task_received.send(sender=self, request=self.requests[-1])
        return dict(headers)


@pytest.fixture
def worker(redis: Redis, prefix: str) -> Worker:
    return Worker(redis, prefix)


@pytest.fixture
def state(redis: Redis, prefix: str) -> Callable[[str], tuple[str, int | None] | None]:
    """Tells the state of a key, and its task's attempt."""

    def read(key: str) -> tuple[str, int | None] | None:
        value: Any = redis.get(f"{prefix}{key}")
        holder = Holder.parse(value or b"")
        return (holder.state, holder.attempt) if holder else None

    return read


@pytest.fixture
def left(redis: Redis, prefix: str) -> Callable[[str], float]:
    """Tells for how many seconds a key is there."""
    return lambda key: redis.pttl(f"{prefix}{key}") / 1000


def is_about(seconds: float, left: float) -> bool:
    return seconds - SLACK < left <= seconds


def test_the_key_lives_with_its_worker_and_the_run_has_its_token(
    task: Any, worker: Worker, state: Any, left: Any, redis: Redis, prefix: str
) -> None:
    task.delay("k")
    headers = worker.receive(task)
    assert state("k") == ("received", 0)
    assert is_about(A_LEASE, left("k"))
    assert headers["only_one"]["token"].encode() == redis.get(f"{prefix}k")
    (lease,) = received_tasks._waiting
    redis.pexpire(f"{prefix}k", HOUR * 1000)
    assert is_renewed(lease)
    assert is_about(A_LEASE, left("k"))
    assert lease.ttl == A_LEASE


def test_it_keeps_its_key_for_longer_than_queue_timeout_while_its_worker_lives(
    task: Any, worker: Worker, state: Any, left: Any
) -> None:
    with configure(queue_timeout=2 * A_LEASE):
        task.delay("k")
        worker.receive(task)
        (lease,) = received_tasks._waiting
        for seconds in range(A_LEASE // 2, 4 * A_LEASE, A_LEASE // 2):
            before = lease.expires_at
            with later(seconds):
                assert eventually(lambda before=before: lease.expires_at > before or lease.reason)  # type: ignore[misc]
        assert lease.reason is None
        worker_shutdown.send(sender=None)
    assert state("k") == ("queued", 0)
    assert is_about(2 * A_LEASE, left("k"))


def test_it_has_its_key_again_after_the_run_of_another(task: Any, worker: Worker, state: Any, left: Any) -> None:
    task.delay("k")
    worker.receive(task)
    (lease,) = received_tasks._waiting
    assert cover(lambda: fails_to_renew(lease), key="k")()
    assert state("k") == ("received", 0)
    assert is_renewed(lease)
    assert is_about(A_LEASE, left("k"))


def test_one_that_is_waited_for_less_long(task: Any, worker: Worker, left: Any) -> None:
    task.delay("k")
    worker.receive(task, expires=A_LEASE - 1)
    (lease,) = received_tasks._waiting
    assert not lease.renews
    assert lease.ttl == A_LEASE - 1
    assert left("k") <= A_LEASE - 1


def test_it_is_not_renewed_before_it_may_begin(task: Any, worker: Worker, left: Any, clock: list[float]) -> None:
    task.delay("k")
    worker.receive(task, eta=datetime.now(timezone.utc) + timedelta(seconds=HOUR))
    (lease,) = received_tasks._waiting
    assert is_about(HOUR + A_LEASE, left("k"))
    assert is_about(HOUR + A_LEASE, lease.expires_at - clock[0])
    assert is_about(HOUR + A_LEASE / 3, lease.renew_at - clock[0])


def test_it_is_queued_again_when_the_worker_ends(
    task: Any, worker: Worker, state: Any, left: Any, redis: Redis, prefix: str
) -> None:
    tokens = []
    for key in ("a", "b", "begun"):
        task.delay(key)
        tokens.append(redis.get(f"{prefix}{key}"))
        worker.receive(task)
    lease = list(received_tasks._waiting)[-1]
    lease.lose("taken", lease.token)
    worker_shutdown.send(sender=None)
    assert [state(key) for key in ("a", "b", "begun")] == [("queued", 0), ("queued", 0), ("received", 0)]
    assert [redis.get(f"{prefix}{key}") for key in ("a", "b")] == tokens[:2]
    assert is_about(HOUR, left("a"))


def test_it_is_not_renewed_once_its_request_is_forgotten(task: Any, worker: Worker, clock: list[float]) -> None:
    """It has ended, though the key may name it again: by a command that was sent twice, and arrives late."""
    task.delay("k")
    worker.receive(task)
    (lease,) = received_tasks._waiting
    assert lease.renew_at < lease.ends_at
    worker.requests.clear()
    lease.lives_on(clock[0], A_LEASE)
    assert lease.renew_at == lease.ends_at
    assert lease.expires_at == clock[0] + A_LEASE


def test_a_queued_value_that_comes_late_is_not_lengthened_when_the_worker_ends(
    task: Any, worker: Worker, left: Any, redis: Redis, prefix: str
) -> None:
    """The producer's command was sent twice: the second arrives when the task has ended."""
    task.delay("k")
    queued: Any = redis.get(f"{prefix}k")
    worker.receive(task)
    redis.set(f"{prefix}k", queued, ex=A_LEASE)
    worker_shutdown.send(sender=None)
    assert left("k") <= A_LEASE


def test_one_that_was_lost_with_its_child_when_the_worker_ends(task: Any, worker: Worker, state: Any) -> None:
    """Its message was acknowledged as it was given to the child, which was killed before it asked for the key."""
    for key, is_acknowledged in (("lost", True), ("waits", False)):
        task.delay(key)
        worker.receive(task, acknowledged=is_acknowledged)
    worker_shutdown.send(sender=None)
    assert [state(key) for key in ("lost", "waits")] == [None, ("queued", 0)]


@pytest.mark.parametrize("meanwhile", ["another run has the key", "the server is away"])
def test_one_whose_child_is_killed_before_it_begins_has_no_key(
    task: Any, worker: Worker, state: Any, redis: Redis, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    waits = task.delay("k")
    worker.receive(task)

    def tell() -> None:
        told: dict[str, Any] = {"exception": WorkerLostError(), "args": ("k",), "kwargs": {}}
        task_failure.send(sender=task, task_id=waits.id, **told)
        assert eventually(lambda: refusals or redis.keys(f"*withdrawn:{waits.id}:*"))

    def refuse(*_: object, **__: object) -> None:
        refusals.append("a command")
        raise ConnectionError

    refusals: list[str] = []
    if meanwhile == "another run has the key":
        cover("k")(tell)()
    else:
        with monkeypatch.context() as cut:
            cut.setattr(PinnedClient, "execute_command", refuse)
            tell()
    assert eventually(lambda: state("k") is None)


def test_one_that_has_expired_meanwhile_keeps_no_other_from_its_queue(task: Any, worker: Worker, state: Any) -> None:
    expires = datetime.now(timezone.utc) + timedelta(seconds=0.5)
    for key, its in (("a", None), ("b", expires)):
        task.delay(key)
        worker.receive(task, expires=its)
    assert eventually(lambda: datetime.now(timezone.utc) > expires)
    worker_shutdown.send(sender=None)
    assert state("a") == ("queued", 0)


def test_a_retry(task: Any, worker: Worker, state: Any, redis: Redis, prefix: str) -> None:
    """Its message carries no token: it was published before the attempt before it gave the key on."""
    retry = Header(task.delay("k").id, 1, key=f"{prefix}k")
    before = time.monotonic()
    worker.receive(task, retry)
    assert state("k") == ("queued", 0)
    (entry,) = worker.timer.queue
    assert before <= entry.eta - LOOKS_AGAIN_AFTER <= time.monotonic()
    redis.set(f"{prefix}k", TokenFactory(task.name, retry.id, 1, "queued").token(HOUR))
    entry.entry()
    assert state("k") == ("received", 1)
    worker_shutdown.send(sender=None)
    assert state("k") == ("queued", 1)
    assert len(worker.timer.queue) == 1


@pytest.mark.parametrize(
    "value",
    [
        b"somebody else",
        TokenFactory("another", "another", 0, "queued").token(HOUR),
        TokenFactory("a function").token(HOUR),
        TokenFactory("no attempt", "own").token(HOUR),
        TokenFactory("runs", "own", 1).token(HOUR),
        TokenFactory("a later attempt", "own", 2).token(HOUR),
        TokenFactory("a later attempt", "own", 2, "queued").token(HOUR),
    ],
)
def test_a_key_that_others_have_is_theirs(
    task: Any, worker: Worker, state: Any, redis: Redis, prefix: str, value: bytes
) -> None:
    task.delay("k")
    redis.set(f"{prefix}k", value)
    worker.receive(task, Header("own", 1, key=f"{prefix}k"))
    assert redis.get(f"{prefix}k") == value
    assert not received_tasks._waiting
    assert not worker.timer.queue
    goes_on(task, worker, state)


def goes_on(task: Any, worker: Worker, state: Any) -> None:
    """The next that is received says so: nothing has gone wrong."""
    task.delay("next")
    worker.receive(task)
    assert state("next") == ("received", 0)


def test_a_key_that_is_gone_stays_so(task: Any, worker: Worker, state: Any, redis: Redis, prefix: str) -> None:
    task.delay("k")
    redis.delete(f"{prefix}k")
    worker.receive(task)
    assert state("k") is None
    assert not received_tasks._waiting
    goes_on(task, worker, state)


def test_what_has_no_key_of_its_own(app: Celery, task: Any, worker: Worker, state: Any, prefix: str) -> None:
    plain = app.task(work, name="plain", shared=False)
    task.delay("k")
    worker.receive(plain)  # of a program that has covered it
    with configure(active=False):
        worker.receive(task)
    worker.receive(task, Header(f"{uuid4()}", 0))
    worker.receive(task, Header(f"{uuid4()}", 1))
    worker.receive(task, Header(f"{uuid4()}", 0, key=f"{prefix}k"))  # a trigger, or one that was put back
    assert state("k") == ("queued", 0)
    newest = a_task(app, when_busy=buffer_one())
    newest.delay("newest")
    worker.receive(newest)
    assert state("newest") is None
    assert not received_tasks._waiting
    goes_on(task, worker, state)


def test_one_that_has_expired(task: Any, worker: Worker, state: Any) -> None:
    task.delay("k")
    for expires in (-1, 0):
        worker.receive(task, expires=expires)
        assert state("k") == ("queued", 0)
    goes_on(task, worker, state)
    task.delay("last second")
    worker.receive(task, expires=1)
    assert len(received_tasks._waiting) == 2


def test_a_server_that_does_not_answer_is_told_once_and_not_asked_for_a_while(
    task: Any, worker: Worker, state: Any, redis_url: str, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    task.delay("k")
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        with proxy.refused():
            worker.receive(task)
        clock[0] += RESTS - 1
        worker.receive(task)
        assert state("k") == ("queued", 0)
        clock[0] += 1
        worker.receive(task)
        assert state("k") == ("received", 0)
        with proxy.refused():
            worker_shutdown.send(sender=None)
    assert state("k") == ("received", 0)
    assert [(each.levelname, bool(each.exc_info)) for each in caplog.records] == [("WARNING", True)] * 2


def test_a_server_that_does_not_answer_is_asked_once_when_the_worker_ends(
    task: Any, worker: Worker, redis_url: str
) -> None:
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        for key in ("a", "b"):
            task.delay(key)
            worker.receive(task)
        with proxy.refused():
            worker_shutdown.send(sender=None)
    assert len(received_tasks._waiting) == 1


def test_what_has_begun_or_ended_is_forgotten_after_a_while(task: Any, worker: Worker, clock: list[float]) -> None:
    def receive(key: str) -> str:
        task.delay(key)
        worker.receive(task)
        return "".join(lease.key[-1] for lease in received_tasks._waiting)

    assert receive("a") == "a"
    (lease,) = received_tasks._waiting
    lease.lose("taken", lease.token)
    assert receive("b") == "ab"
    del worker.requests[-1]  # as where it was skipped: its key was another run's
    clock[0] += A_LEASE - 1
    assert receive("c") == "abc"
    clock[0] += 1
    assert receive("d") == "cd"
