"""Deliveries of a task's message as a worker's process sees to them, in this process and in an order that is certain.

What is published stays in the queue until the test delivers it, whatever its countdown says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.exceptions import Retry
from redis import Redis

from only_one import buffer_one, carry_on, configure, current_lock, fail, leases, only_one, retry
from only_one.clock import now
from only_one.holder import Holder, Identity
from only_one.lock import drive
from only_one.servers import Server, find_server
from only_one.tasks import buffer, delivery, put_back, running
from only_one.tasks.delivery import Delivery
from only_one.tasks.notes import (
    Copies,
    ask_of_copy,
    look_for_copies,
    number_copy,
    tell_copies_of_result,
)
from only_one.tasks.put_back import Header, header_of
from tests.proxy import Proxy
from tests.waiting import eventually

REMEMBERED = 7200
"""Seconds for which word of copies is kept, for a broker that delivers again after an hour."""

CLOSED = "redis://127.0.0.1:1/0"

cover: Any = only_one
buffered: Any = buffer


class Queue:
    """A queue, and a worker's process that is given what is in it by hand."""

    def __init__(self, app: Celery, client: Redis) -> None:
        self.app = app
        self._client: Any = client
        self._name = app.conf.task_default_queue

    def __len__(self) -> int:
        return int(self._client.llen(self._name))

    def take(self) -> Any:
        """The message that was published first."""
        return json.loads(self._client.rpop(self._name))

    def deliver(self, message: Any, *, redelivered: bool = False) -> Any:
        """See to a message from its begin to its end; returns the result, or the exception that has ended it."""
        headers = message["headers"]
        args, kwargs, embedded = json.loads(b64decode(message["body"]))
        told = {"delivery_info": {"redelivered": redelivered}, "is_eager": False, "args": args, "kwargs": kwargs}
        task: Any = self.app.tasks[headers["task"]]
        trace = build_tracer(task.name, task, app=self.app)
        return trace(headers["id"], args, kwargs, {**headers, **embedded, **told})[0]


@pytest.fixture
def app(redis: Redis, redis_url: str, prefix: str) -> Iterator[Celery]:
    changes = {"broker_url": redis_url, "result_backend": "cache+memory://", "task_default_queue": f"{prefix}queue"}
    app = Celery(f"app-{uuid4()}", set_as_current=False, changes=changes)
    redis.ping()
    yield app
    app.close()


@pytest.fixture
def queue(app: Celery, redis: Redis) -> Queue:
    return Queue(app, redis)


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Calls something in another thread, where no run is under way, and gives its result."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(call).result()


def a_task(app: Celery, function: Any, *, celery: Any = None, **options: Any) -> Any:
    """A task whose function is covered, and whose message is acknowledged at the end."""
    said = {"name": f"task-{uuid4()}", "shared": False, "acks_late": True, **(celery or {})}
    return app.task(cover(function, key="k", timeout=600, **options), **said)


def done() -> str:
    return "done"


async def done_async() -> str:
    return "done"


def hash_of(redis: Redis, prefix: str, task_id: str, attempt: int = 0) -> Any:
    """What copies of a message have left."""
    return redis.hgetall(f"{{{prefix}k}}:copy:{task_id}:{attempt}")


# --- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["def", "async def"])
def test_copies_of_a_run(app: Celery, queue: Queue, redis: Redis, prefix: str, elsewhere: Any, how: str) -> None:
    """One comes while it runs, and is put back; afterwards none has anything to do."""
    runs = []

    def work() -> None:
        runs.append("begin")
        elsewhere(lambda: queue.deliver(message, redelivered=True))
        (note,) = redis.keys(f"{{{prefix}k}}:copy:*")
        assert redis.hget(note, "asked") == b"1"
        assert REMEMBERED - 60 < redis.ttl(note) <= REMEMBERED
        assert redis.hget(note, "ended") is None

    async def work_async() -> None:
        work()

    function, celery = (work, {}) if how == "def" else (work_async, {"base": Awaits})
    task = a_task(app, function, when_busy=fail, celery=celery)  # which is not for copies
    answer = task.delay()
    message = queue.take()
    queue.deliver(message)
    assert answer.state == "SUCCESS", answer.result
    assert runs == ["begin"]
    found = hash_of(redis, prefix, answer.id)
    assert (found[b"number"], found[b"ended"], found[b"stored"]) == (b"1", b"", b"1")
    assert len(queue) == 1
    later = queue.take()
    assert (later["headers"]["only_one"]["times"], later["headers"]["only_one"]["number"]) == (1, 1)
    queue.deliver(message, redelivered=True)
    queue.deliver(later)
    assert runs == ["begin"]
    assert len(queue) == 0


@pytest.mark.parametrize("setting", ["acks_on_failure_or_timeout", "acks_on_failure"])
@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_a_failure_is_an_end_only_where_its_message_is_acknowledged(
    app: Celery, queue: Queue, elsewhere: Any, setting: str, *, is_acknowledged: bool
) -> None:
    """Else the message may come back by a dead-letter queue, and is to do its work then."""
    if setting not in {name for name, _ in app.Task.from_config}:
        pytest.skip("Celery knows it since 5.7")

    def work() -> None:
        if len(runs) == 0:
            runs.append("failed")
            elsewhere(lambda: queue.deliver(message, redelivered=True))
            raise ZeroDivisionError
        runs.append("done")

    runs: list[str] = []
    task = a_task(app, work, celery={setting: is_acknowledged})
    answer = task.delay()
    message = queue.take()
    queue.deliver(message)
    assert answer.state == "FAILURE"
    queue.deliver(queue.take())
    assert runs == ["failed", "done"][: 1 if is_acknowledged else 2]


def test_a_copy_is_told_of_a_run_whose_key_was_lost(
    app: Celery, queue: Queue, redis: Redis, prefix: str, elsewhere: Any
) -> None:
    def work() -> None:
        elsewhere(lambda: queue.deliver(message, redelivered=True))
        redis.delete(f"{prefix}k")

    answer = a_task(app, work).delay()
    message = queue.take()
    queue.deliver(message)
    assert answer.state == "SUCCESS", answer.result
    assert hash_of(redis, prefix, answer.id)[b"stored"] == b"1"


def test_where_there_are_no_copies_nobody_is_told(app: Celery, queue: Queue, redis_url: str, prefix: str) -> None:
    def lose() -> None:
        key = current_lock().key
        redis_of_the_broker.delete(key)

    def commands(function: Any, **options: Any) -> list[str]:
        task = a_task(app, function, **options)
        proxy.forget_commands()
        task.delay()
        queue.deliver(queue.take())
        return [name for name in proxy.commands if name != "INFO"]  # which is asked for in the background

    with Proxy(redis_url) as proxy, configure(redis=proxy.url), Redis.from_url(redis_url) as redis_of_the_broker:
        for acks_late in (True, False):  # the server may not know the script, or a command
            commands(done, celery={"acks_late": acks_late})
        assert commands(done) == ["SET", "EVALSHA"]
        # Acknowledged early it has no copies: what has become of its key costs as much as where it is released.
        early = commands(done, celery={"acks_late": False})
        assert commands(lose, celery={"acks_late": False}) in (early, [*early, "GET"])
        redis_of_the_broker.set(f"{prefix}k", "somebody else", ex=600)
        for _ in range(2):
            put_back = commands(done, when_busy=retry())
            queue.take()
        assert put_back == ["SET", "EVALSHA", "EVALSHA"]


@pytest.mark.parametrize("minutes", [30, 31])
def test_a_long_run_leaves_word_for_copies_that_could_not_ask(
    app: Celery, queue: Queue, redis: Redis, prefix: str, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """Of more than half of the time after which the broker delivers again."""

    def work() -> None:
        monkeypatch.setattr(delivery, "now", lambda: 1000.0 + 60 * minutes)

    monkeypatch.setattr(delivery, "now", lambda: 1000.0)
    answer = a_task(app, work).delay()
    message = queue.take()
    queue.deliver(message)
    found = hash_of(redis, prefix, answer.id)
    assert found.get(b"stored") == (b"1" if minutes > 30 else None)


def token_of(task_id: str, *, state: str = "running", attempt: int | None = 0, is_dead: bool = False) -> bytes:
    """The value of a run of a task: on another machine, or of a process of this one that is gone."""
    found = json.loads(Identity("a task", task_id, attempt, state).token(600))
    if is_dead:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        found.update(pid=process.pid)
    else:
        found.update(machine="another")
    return json.dumps(found, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("stored", "seconds_ago", "is_dead", "outcome"),
    [
        (1, 20, False, "dropped"),
        (0, 20, False, "put back"),
        (0, 40, False, "run"),
        (0, 20, True, "run"),
    ],
)
def test_a_copy_of_what_has_ended(
    app: Celery,
    queue: Queue,
    redis: Redis,
    prefix: str,
    stored: int,
    seconds_ago: int,
    is_dead: bool,  # noqa: FBT001 - a parameter of the test
    outcome: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its run is done for nothing without a result, which it has 30 s to store if it is not known to be dead."""
    caplog.set_level(logging.INFO)
    runs = []

    def work() -> None:
        runs.append("begin")

    answer = a_task(app, work).delay()
    (seconds, _) = redis.time()
    said: dict[Any, Any] = {
        "ended": token_of(answer.id, is_dead=is_dead),
        "stored": stored,
        "ended_at": seconds - seconds_ago,
    }
    redis.hset(f"{{{prefix}k}}:copy:{answer.id}:0", mapping=said)
    queue.deliver(queue.take(), redelivered=True)
    assert (len(runs), len(queue)) == {"dropped": (0, 0), "put back": (0, 1), "run": (1, 0)}[outcome]
    assert not redis.exists(f"{prefix}k")
    # What has run again has ended anew.
    assert (hash_of(redis, prefix, answer.id)[b"ended"] == said["ended"]) is (outcome != "run")
    assert ("is run again: its run has ended" in caplog.text) is (outcome == "run")


def test_a_copy_of_what_has_ended_and_could_not_be_released(
    app: Celery, queue: Queue, redis: Redis, prefix: str
) -> None:
    """It does not wait for the key to expire."""
    answer = a_task(app, done).delay()
    redis.set(f"{prefix}k", token_of(answer.id), ex=600)
    redis.hset(f"{{{prefix}k}}:copy:{answer.id}:0", mapping={"ended": token_of(answer.id), "stored": 1})
    queue.deliver(queue.take(), redelivered=True)
    assert len(queue) == 0
    assert answer.state == "PENDING"


def test_word_of_copies_that_cannot_be_read_or_left(
    app: Celery,
    queue: Queue,
    redis: Redis,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is no hash, by whomever: the message waits, runs and ends all the same."""

    class Ends(Task):  # type: ignore[misc]  # Celery has no types
        abstract = True

        def after_return(self, *_: Any) -> None:
            redis.set(note, "not ours")

    def work() -> str:
        monkeypatch.setattr(delivery, "now", lambda: now() + 3600)
        return "done"

    def send() -> tuple[Any, str]:
        answer = a_task(app, work, celery={"base": Ends}).delay()
        return answer, f"{{{prefix}k}}:copy:{answer.id}:0"

    answer, note = send()
    redis.set(note, "not ours")
    redis.set(f"{prefix}k", token_of(answer.id), ex=600)
    queue.deliver(queue.take())
    assert answer.state == "PENDING"
    redis.delete(f"{prefix}k")
    queue.deliver(queue.take())
    assert answer.get() == "done"
    assert eventually(lambda: not redis.exists(f"{prefix}k"))

    answer, note = send()
    redis.hset(note, "asked", 1)
    queue.deliver(queue.take())
    assert answer.get() == "done"
    assert redis.get(note) == b"not ours"
    assert "Signal handler" not in caplog.text


@pytest.mark.parametrize(("word", "state"), [("stored", "PENDING"), ("asked", "SUCCESS")])
def test_a_copy_that_came_too_late_to_be_told_of_the_end(
    app: Celery, queue: Queue, redis: Redis, prefix: str, caplog: pytest.LogCaptureFixture, word: str, state: str
) -> None:
    """It may come between the release of a key that was lost, and the result."""
    caplog.set_level(logging.INFO)
    answer = a_task(app, done).delay()
    redis.hset(f"{{{prefix}k}}:copy:{answer.id}:0", word, 1)
    queue.deliver(queue.take(), redelivered=True)
    assert answer.state == state
    assert "is run again" not in caplog.text


# --- the attempt before it ---------------------------------------------------------------------------------------


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which a retry waits in its worker; they take no time."""
    found: list[float] = []

    def sleep(seconds: float) -> None:
        found.append(seconds)
        assert sum(found) < 100, "it waits for ever"

    monkeypatch.setattr(running, "time", SimpleNamespace(sleep=sleep))
    return found


class Awaits(Task):  # type: ignore[misc]  # Celery has no types
    """Runs what is to be awaited."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        return asyncio.run(result) if asyncio.iscoroutine(result) else result


@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_retry_is_put_back_behind_the_attempt_before_it(
    app: Celery, queue: Queue, redis: Redis, prefix: str, pauses: list[float], how: str
) -> None:
    """After 5 s, in which it looks soon and then less often; in an event loop nothing waits."""
    task = a_task(app, done if how == "def" else done_async, celery={"base": Awaits})
    answer = task.apply_async(retries=1)
    redis.set(f"{prefix}k", token_of(answer.id), ex=600)
    queue.deliver(queue.take())
    assert len(queue) == 1
    assert answer.state == "PENDING"
    if how == "def":
        assert pauses[:6] == [0.02, 0.04, 0.08, 0.16, 0.2, 0.2]
        assert 5 <= sum(pauses) < 5.2
    else:
        assert not pauses
    redis.delete(f"{prefix}k")
    queue.deliver(queue.take())
    assert answer.get() == "done"


# --- a call from inside of the run -------------------------------------------------------------------------------


def test_a_call_from_inside_of_its_own_run_is_no_copy_of_it(app: Celery, queue: Queue) -> None:
    """Both have one task id, and one attempt."""
    deeper: list[Any] = []

    def work() -> str:
        if not deeper:
            deeper.append("begun")
            deeper.append(task.run())
        return "done"

    task = a_task(app, work)
    task.delay()
    assert queue.deliver(queue.take()) == "done"
    assert deeper == ["begun", None]
    assert len(queue) == 0


# --- what stands under the key -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "attempt", "retries", "outcome"),
    [
        ("kept", 1, 1, "dropped"),
        ("running", 2, 1, "dropped"),
        ("queued", 2, 1, "dropped"),
        ("running", 1, 1, "put back"),
        ("queued", 0, 0, "run"),
        ("queued", None, 0, "run"),
        ("queued by another", 2, 1, "run"),
        ("running", None, 1, "put back"),  # by whomever: a retry is not skipped
    ],
)
def test_a_message_whose_key_is_its_own_tasks(
    app: Celery,
    queue: Queue,
    redis: Redis,
    prefix: str,
    pauses: list[float],
    caplog: pytest.LogCaptureFixture,
    state: str,
    attempt: int | None,
    retries: int,
    outcome: str,
) -> None:
    """What is out of date is dropped, and what is to be done is not skipped behind itself."""
    caplog.set_level(logging.INFO)
    runs = []

    def work() -> None:
        runs.append("begin")

    answer = a_task(app, work).apply_async(retries=retries)
    whose = "another" if state == "queued by another" else answer.id
    redis.set(f"{prefix}k", token_of(whose, state=state.split(maxsplit=1)[0], attempt=attempt), ex=600)
    queue.deliver(queue.take())
    assert (len(runs), len(queue)) == {"dropped": (0, 0), "put back": (0, 1), "run": (1, 0)}[outcome]
    assert answer.state == ("SUCCESS" if outcome == "run" else "PENDING")
    assert not pauses
    dropped = [vars(record)["only_one_key"] for record in caplog.records if "it is out of date" in record.getMessage()]
    assert dropped == [f"{prefix}k"] * (outcome == "dropped")


@pytest.mark.parametrize(
    ("how", "outcome"),
    [("plain", "skipped"), ("redelivered", "put back"), ("chain", "failed"), ("chord", "failed")],
)
def test_behind_another_without_a_policy(
    app: Celery, queue: Queue, redis: Redis, prefix: str, how: str, outcome: str
) -> None:
    task = a_task(app, done)
    redis.set(f"{prefix}k", "somebody else", ex=600)
    after = {"chain": [dict(task.si().set(task_id=str(uuid4())))], "chord": dict(task.si())}
    answer = task.apply_async(**{how: after[how]} if how in after else {})
    queue.deliver(queue.take(), redelivered=how == "redelivered")
    assert answer.state == {"skipped": "SUCCESS", "put back": "PENDING", "failed": "FAILURE"}[outcome]
    assert len(queue) == (outcome == "put back")


# --- what stays for a retry --------------------------------------------------------------------------------------


def test_what_stays_under_the_key_for_a_retry(app: Celery) -> None:
    """What is sent again as it is, for as long as it is waited for."""

    def stays(
        said: Any = None, ended_by: Any = None, when: Any = None, *, covers_queue: bool = True, seconds: float = 0.5,
        **request: Any,
    ) -> Any:  # fmt: skip
        told = {"id": "the-id", "retries": 4, "args": ["a"], "kwargs": {"b": 1}, "expires": None, "is_eager": False}
        of_task: Any = SimpleNamespace(headers=None, **{**told, **request})
        delivered = Delivery(task, of_task, bound=False, covers_queue=covers_queue)
        sig = task.s("a", b=1) if said is None else said
        plan: Any = SimpleNamespace(queue_timeout=seconds)
        return delivered.stays(plan, ended_by or Retry(when=when, sig=sig))

    task = app.task(done, name=f"task-{uuid4()}", shared=False)
    token, milliseconds = stays()
    holder = Holder.parse(token)
    assert holder is not None
    assert (holder.name, holder.task_id, holder.attempt, holder.state) == (task.name, "the-id", 5, "queued")
    assert json.loads(token)["limit"] == milliseconds == 500
    assert stays(seconds=0) is None
    assert stays(when=3)[1] == 3500
    assert stays(expires=-1) is None
    assert stays(expires=7)[1] == 7000
    assert stays(is_eager=True) is None
    assert stays(covers_queue=False) is None
    for other in (task.s("b", b=1), task.s("a", b=2), task.s("a")):
        assert stays(other) is None
    for error in (KeyboardInterrupt(), ValueError(), Retry()):  # of which a task that raises the last has sent nothing
        assert stays(ended_by=error) is None


@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_key_from_queued_to_finished_over_a_retry(
    app: Celery, queue: Queue, redis: Redis, redis_url: str, prefix: str, elsewhere: Any, how: str
) -> None:
    """And a copy of the first attempt's message, which is told of its end."""

    def holder() -> Any:
        return Holder.parse(redis.get(f"{prefix}k") or b"")

    def work(self: Any) -> str:
        states.append(holder().state)
        if self.request.retries:
            return "done"
        elsewhere(lambda: queue.deliver(message, redelivered=True))
        raise self.retry(countdown=0)

    async def work_async(self: Any) -> str:
        return work(self)

    states: list[str] = []
    options: Any = {"name": f"task-{uuid4()}", "shared": False, "acks_late": True, "bind": True}
    made = app.task(work, **options) if how == "def" else app.task(work_async, base=Awaits, **options)
    task = cover(made, key="k", timeout=600)
    answer = task.delay()
    assert (holder().task_id, holder().state) == (answer.id, "queued")
    message = queue.take()
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        queue.deliver(message)
        assert proxy.commands[0] == "EVALSHA"  # it knows by what value it was queued
    assert (holder().task_id, holder().attempt, holder().state) == (answer.id, 1, "queued")
    assert b"ended" in hash_of(redis, prefix, answer.id)
    copy, again = queue.take(), queue.take()
    queue.deliver(again)
    assert answer.get() == "done"
    assert not redis.exists(f"{prefix}k")
    queue.deliver(copy)
    assert states == ["running", "running"]
    assert len(queue) == 0


# --- how it is put back ------------------------------------------------------------------------------------------


def test_what_is_put_back_has_no_claim_to_a_key_any_more(app: Celery, queue: Queue, redis: Redis, prefix: str) -> None:
    """A token that is not the key's is compared in vain, by the worker that receives it and by the run: a trip each."""
    task = a_task(app, done, when_busy=retry())
    redis.set(f"{prefix}k", "somebody else's")
    answer = task.delay()
    message = queue.take()
    message["headers"].update(Header(answer.id, 0, key=f"{prefix}k", token="t").as_headers())  # noqa: S106
    queue.deliver(message)
    again = queue.take()["headers"]["only_one"]
    assert (again["key"], again["times"], again.get("token")) == (f"{prefix}k", 1, None)


def test_what_is_put_back_has_the_users_headers_and_none_in_which_the_broker_counts(
    app: Celery, queue: Queue, redis: Redis, prefix: str
) -> None:
    """RabbitMQ counts by queue how often a message died, and drops one that seems to go round in a circle."""
    a_task(app, done, when_busy=retry()).delay()
    redis.set(f"{prefix}k", "somebody else", ex=600)
    message = queue.take()
    counted = {"x-death": [{"count": 1}], "x-first-death-queue": "q", "x-last-death-queue": "q", "x-delivery-count": 2}
    message["headers"]["headers"] = {"x-mine": 1, **counted}
    queue.deliver(message)
    again = queue.take()["headers"]
    assert again["x-mine"] == 1
    assert not counted.keys() & again.keys()


def test_how_long_it_waits_when_it_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second that doubles to ten, of which half is left to chance."""
    for bound in (min, max):
        monkeypatch.setattr(put_back, "_random", SimpleNamespace(uniform=bound))
        part = bound(0.5, 1)
        delays = [put_back._delay(times, 1000) for times in (0, 1, 2, 3, 4, 5000)]
        assert delays == [each * part for each in (1, 2, 4, 8, 10, 10)]
        assert put_back._delay(5, 3) == 3 * part


def test_a_limit_of_times(app: Celery, queue: Queue, redis: Redis, prefix: str) -> None:
    answer = a_task(app, done, when_busy=retry(1000, max_retries=2)).delay()
    redis.set(f"{prefix}k", "somebody else", ex=600)
    message = first = queue.take()
    for _ in range(2):
        queue.deliver(message)
        message = queue.take()
        eta = datetime.fromisoformat(message["headers"]["eta"])
        assert 940 < (eta - datetime.now(timezone.utc)).total_seconds() <= 1000
        assert len(queue) == 0
        assert answer.state == "PENDING"
        assert "trigger" not in message["headers"]["only_one"]  # none takes the place of another
    queue.deliver(first, redelivered=True)
    assert len(queue) == 0, "a later copy of it waits"
    redis.delete(f"{prefix}k")
    queue.deliver(first, redelivered=True)
    assert answer.state == "PENDING", "a later copy of it waits"
    redis.set(f"{prefix}k", "somebody else", ex=600)
    queue.deliver(message)
    assert len(queue) == 0
    assert answer.state == "FAILURE"


@pytest.mark.parametrize("said", [None, False, True])
def test_whether_its_result_is_ignored_is_what_the_message_says_or_else_the_task(
    app: Celery,
    queue: Queue,
    redis: Redis,
    prefix: str,
    said: bool | None,  # noqa: FBT001 - a parameter of the test
) -> None:
    a_task(app, done, when_busy=retry(), celery={"ignore_result": True}).delay()
    redis.set(f"{prefix}k", "somebody else", ex=600)
    message = queue.take()
    del message["headers"]["ignore_result"]
    if said is not None:
        message["headers"]["ignore_result"] = said
    queue.deliver(message)
    assert queue.take()["headers"]["ignore_result"] is (said is not False)


def test_what_a_header_says_of_another_attempt() -> None:
    assert Header("the-id", 0).as_headers() == {"only_one": {"id": "the-id", "attempt": 0, "times": 0, "number": 0}}
    said = Header("the-id", 0, times=3, number=3, key="k", token="t", trigger=7).as_headers()  # noqa: S106
    request = SimpleNamespace(id="the-id", retries=1, headers=said)
    assert header_of(request) == Header("the-id", 1, key="k", trigger=7)
    for foreign in (None, {}, {"only_one": {"of": "somebody else"}}):
        request.headers = foreign
        assert header_of(request) == Header("the-id", 1)


# --- what is remembered ------------------------------------------------------------------------------------------


@pytest.fixture
def server(redis_url: str) -> Server:
    return find_server(redis_url)


def test_what_is_remembered_of_copies(server: Server, redis: Redis, prefix: str) -> None:
    key, note = f"{prefix}k", f"{{{prefix}k}}:copy"

    def ask(steps: Any) -> Any:
        return drive(server.client, steps)

    found = ask(look_for_copies(key, note))
    assert found == Copies(0, b"", is_stored=False, age=found.age)
    assert found.age > 1e9
    ask(tell_copies_of_result(key, note))
    assert not redis.exists(note)
    for number, latest in ((9, 9), (10, 10), (9, 10)):
        ask(number_copy(key, note, number, 600))
        assert ask(look_for_copies(key, note)).number == latest
    assert 540 < redis.ttl(note) <= 600
    redis.hset(note, mapping={"ended": "token", "stored": 1, "ended_at": redis.time()[0] - 1000})
    found = ask(ask_of_copy(key, note, 1200))
    assert found == Copies(10, b"token", is_stored=True, age=found.age)
    assert 1000 <= found.age < 1060
    assert 1140 < redis.ttl(note) <= 1200
    assert redis.hget(note, "asked") == b"1"
    redis.hset(note, "stored", 0)
    ask(tell_copies_of_result(key, note))
    found = ask(look_for_copies(key, note))
    assert found == Copies(10, b"", is_stored=True, age=found.age)


def microseconds(redis: Redis) -> int:
    """The server's time."""
    seconds, rest = redis.time()
    return int(seconds) * 1_000_000 + int(rest)


def test_triggers_are_numbered_as_they_arrive(app: Celery, server: Server, redis: Redis, prefix: str) -> None:
    where: Any = (server, f"{prefix}k", app)
    triggers = f"{{{prefix}k}}:triggers"
    before = microseconds(redis)
    first, second = (buffered.arrive(*where, name, None) for name in ("first", "second"))
    assert first is not None
    assert second is not None
    assert before <= first < second <= microseconds(redis)
    assert buffered.arrive(*where, "first", None) == first  # it has come before
    assert REMEMBERED - 60 < redis.ttl(triggers) <= REMEMBERED

    buffered.published(*where, second)
    assert buffered.arrive(*where, "first", first) is None
    assert buffered.begin(*where, "first", None) is False
    buffered.published(*where, first)  # which changes nothing any more
    assert buffered.arrive(*where, "first", first) is None
    buffered.withdraw(*where, first)
    assert buffered.arrive(*where, "first", first) is None
    assert buffered.arrive(*where, "second", second) == second
    buffered.withdraw(*where, second)
    assert buffered.arrive(*where, "first", first) == first

    assert buffered.begin(*where, "second", second) is True
    assert buffered.begin(*where, "second", second) is True  # again, as it was delivered again
    assert buffered.arrive(*where, "first", first) is None
    assert buffered.begin(*where, "first", first) is False
    assert buffered.begin(*where, "third", None) is True
    assert buffered.begin(*where, "second", second) is False

    # Numbers rise where the server's clock steps back, and what is of long ago is forgotten.
    ahead = microseconds(redis) + 60_000_000
    redis.zadd(triggers, {"last": ahead, "id:old": ahead - 7320e6, "id:young": ahead - 7140e6})
    assert buffered.arrive(*where, "fourth", None) == ahead + 1
    redis.persist(triggers)
    assert buffered.arrive_anew(*where, "fifth", "", 600) == ahead + 2
    assert REMEMBERED - 60 < redis.ttl(triggers) <= REMEMBERED
    assert buffered.begin(*where, "sixth", None) is True
    assert redis.zscore(triggers, "last") == redis.zscore(triggers, "begun") == ahead + 3
    assert redis.zscore(triggers, "id:old") is None
    assert redis.zscore(triggers, "id:young") is not None
    assert buffered.arrive(*where, "old", ahead + 10) == ahead + 10  # which the message has not forgotten


def test_a_trigger_is_given_to_one_that_is_like_it(app: Celery, server: Server, prefix: str) -> None:
    """While it waits, and is the newest."""
    where: Any = (server, f"{prefix}k", app)
    numbers = []

    def arrives(task_id: str, digest: str = "like") -> Any:
        found = buffered.arrive_anew(*where, task_id, digest, 600)
        if isinstance(found, int):
            numbers.append(found)
        return found

    assert arrives("first") == numbers[-1]
    assert arrives("second") == numbers[-1]  # the first is not published
    assert numbers[0] < numbers[1]
    buffered.published(*where, numbers[-1])
    assert arrives("third") == "second"
    assert arrives("none", "") == numbers[-1]
    assert arrives("none", "") == numbers[-1]
    assert arrives("third") == "second"
    assert arrives("other", "unlike") == numbers[-1]
    buffered.published(*where, numbers[-1])
    assert arrives("third") == numbers[-1]  # another is the newest
    buffered.published(*where, numbers[-1])
    assert arrives("fourth") == "third"
    assert buffered.begin(*where, "third", numbers[-1])
    assert arrives("fourth") == numbers[-1]  # it does not wait any more
    buffered.published(*where, numbers[-1])
    buffered.withdraw(*where, numbers[-1])
    assert arrives("fifth") == numbers[-1]
    assert buffered.arrive(*where, "fifth", None) == numbers[-1]
    buffered.published(*where, numbers[-1])
    assert arrives("fifth", "") == numbers[-1]  # sent once more under its id, which has the other number by now
    assert arrives("sixth") == numbers[-1]
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("how", ["def", "async def"])
def test_of_triggers_that_are_put_back_the_newest_stays(
    app: Celery, queue: Queue, redis: Redis, prefix: str, how: str
) -> None:
    ran = []

    def work(number: int) -> int:
        ran.append(number)
        return number

    async def work_async(number: int) -> int:
        return work(number)

    function = work if how == "def" else work_async
    task = a_task(app, function, when_busy=buffer_one(), celery={"base": Awaits})
    redis.set(f"{prefix}k", "somebody else", ex=600)
    answers = [task.delay(number) for number in range(3)]
    first, second, third = (queue.take() for _ in range(3))
    for message in (first, third, second):
        queue.deliver(message)
    assert [answer.state for answer in answers] == ["PENDING"] * 3
    first, third, second = (queue.take() for _ in range(3))
    queue.deliver(first)
    assert (answers[0].state, answers[0].result) == ("SUCCESS", None)
    assert len(queue) == 0
    redis.delete(f"{prefix}k")
    queue.deliver(third)
    assert not ran
    queue.deliver(second)
    assert ran == [1]
    assert [answer.result for answer in answers] == [None, 1, None]


@pytest.mark.parametrize(
    ("state", "attempt", "is_its_own", "retries", "key"),
    [
        ("queued", 1, True, 1, "kept"),
        ("queued", 1, False, 1, "k-1"),
        ("running", 0, True, 1, "k-1"),
        ("queued", 0, True, 0, "kept"),
        ("queued", 0, False, 0, "kept"),
    ],
)
def test_a_retry_has_the_key_that_is_kept_for_it(
    app: Celery,
    queue: Queue,
    redis: Redis,
    prefix: str,
    state: str,
    attempt: int,
    is_its_own: bool,  # noqa: FBT001 - a parameter of the test
    retries: int,
    key: str,
) -> None:
    """Else that of its arguments, which may be others by now, as the template may be."""

    def work(value: int) -> tuple[int, str]:
        return value, current_lock().key

    task = cover("k-{value}")(app.task(work, name=f"task-{uuid4()}", shared=False))
    answer = task.delay(1)
    redis.delete(f"{prefix}k-1")
    message = queue.take()
    value = token_of(answer.id if is_its_own else "another", state=state, attempt=attempt)
    message["headers"]["retries"] = retries
    message["headers"]["only_one"].update(key=f"{prefix}kept", attempt=retries, token=value.decode())
    redis.set(f"{prefix}kept", value, ex=600)
    queue.deliver(message)
    assert answer.get() == [1, f"{prefix}{key}"]
    assert redis.exists(f"{prefix}kept") == (key != "kept")


@pytest.mark.parametrize(
    ("settings", "key"), [({"redis": CLOSED}, "k-1"), ({"active": False}, "kept")], ids=["down", "switched off"]
)
def test_a_retry_that_cannot_see_what_is_kept_for_it(
    app: Celery, queue: Queue, prefix: str, settings: Any, key: str
) -> None:
    def work(value: int) -> tuple[int, str]:
        return value, current_lock().key

    task = cover("k-{value}", when_down=carry_on)(app.task(work, name=f"task-{uuid4()}", shared=False))
    answer = task.delay(1)
    message = queue.take()
    message["headers"]["retries"] = 1
    message["headers"]["only_one"].update(key=f"{prefix}kept")
    with configure(**settings):
        queue.deliver(message)
    assert answer.get() == [1, f"{prefix}{key}"]


def test_a_server_that_is_down_is_not_asked_about_copies(
    app: Celery, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these would wait as long as the command did that has found it out."""
    asked = []

    def ask(client: Any, steps: Any) -> Any:
        asked.append(steps)
        return drive(client, steps)

    monkeypatch.setattr(delivery, "drive", ask)
    a_task(app, done, when_down=retry(), redis=CLOSED).delay()
    queue.deliver(queue.take())

    assert queue.take()["headers"]["only_one"]["times"] == 1
    assert not asked


def test_what_is_put_back_while_the_server_is_down_keeps_the_key_of_its_place_in_the_queue(
    app: Celery, queue: Queue, redis: Redis, redis_url: str, prefix: str
) -> None:
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        task = cover(app.task(done, name=f"task-{uuid4()}", shared=False), key="k", timeout=600, when_down=retry())
        answer = task.delay()
        token = redis.get(f"{prefix}k")
        with proxy.refused():
            queue.deliver(queue.take())
            assert token not in leases._renewer.adrift
        assert redis.get(f"{prefix}k") == token
        queue.deliver(queue.take())
    assert answer.get() == "done"


def test_a_key_in_a_message_is_none_for_a_task_whose_run_is_covered(app: Celery, queue: Queue, prefix: str) -> None:
    """It was covered in its queue when it was sent, and is not any more."""

    def work() -> str:
        return current_lock().key

    task = a_task(app, work)
    sent = Header(str(uuid4()), 0, key=f"{prefix}other", token="queued")  # noqa: S106 - of a lock
    answer = task.apply_async(task_id=sent.id, headers=sent.as_headers())
    queue.deliver(queue.take())
    assert answer.get() == f"{prefix}k"
