"""Redeliveries of a task's message as a worker's process sees to them: see `deliveries`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery, Task
from redis import Redis

from only_one import buffer_one, carry_on, configure, current_lock, fail, retry, skip
from only_one.celery import delivery
from only_one.celery.redelivery import REQUEUED, STORED, CompletionMarker, read_marker
from only_one.clock import now
from only_one.connections.server import Server, find_server
from only_one.driver import drive
from only_one.lock.commands import evaluate
from rigs.waiting import eventually
from tests.celery.deliveries import CLOSED, REMEMBERED, Awaits, Queue, a_task, done, hash_of, token_of
from tests.live import brokers as brokers  # which names the transport "unmarked"
from tests.proxy import Proxy


@pytest.fixture
def server(redis_url: str) -> Server:
    return find_server(redis_url)


@pytest.mark.parametrize("how", ["def", "async def"])
@pytest.mark.parametrize("is_marked", [True, False], ids=["redelivered", "published twice"])
def test_copies_of_a_run(
    app: Celery, queue: Queue, redis: Redis, prefix: str, elsewhere: Any, how: str, *, is_marked: bool
) -> None:
    """One comes while it runs, and is put back; afterwards none has anything to do."""
    runs = []

    def work() -> None:
        runs.append("begin")
        elsewhere(lambda: queue.deliver(message, redelivered=is_marked))
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


@pytest.mark.parametrize("policy", [fail, skip, carry_on])
def test_a_redelivery_that_finds_the_server_away_waits_unless_it_may_run_without_its_key(
    app: Celery, queue: Queue, redis_url: str, policy: Any
) -> None:
    """Its run may be under way, so a failure, or None, would be stored over the result of that run."""
    runs: list[str] = []

    def work() -> None:
        runs.append("run")

    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        task = a_task(app, work, when_down=policy)
        answer = task.delay()
        with proxy.refused():
            queue.deliver(queue.take(), redelivered=True)
        if policy is not carry_on:
            assert (answer.state, runs) == ("PENDING", [])
            queue.deliver(queue.take())
    assert (answer.state, runs) == ("SUCCESS", ["run"])
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


@pytest.mark.parametrize("broker", ["redis", "unmarked"])  # the second does not mark redeliveries, like SQS
@pytest.mark.parametrize("retries", [0, 1])
def test_a_replacement_waits_like_any_other(
    new_app: Any, redis_url: str, redis: Redis, prefix: str, broker: str, retries: int
) -> None:
    """Also after a task that was requeued, and while a retry that it replaces holds the key."""

    def work(self: Any) -> str:
        if self.request.replaced_task_nesting:
            return "done"
        raise self.replace(self.s())

    app = new_app(broker_url=redis_url.replace("redis", broker, 1))
    queue = Queue(app, redis)
    answer = a_task(app, work, when_busy=retry(), celery={"bind": True}).apply_async(retries=retries)
    for holder in (b"somebody else", token_of(answer.id, attempt=retries)):
        redis.set(f"{prefix}k", holder, ex=600)
        queue.deliver(queue.take())
        assert len(queue) == 1
        redis.delete(f"{prefix}k")
        queue.deliver(queue.take())
    assert (answer.state, answer.result) == ("SUCCESS", "done")


@pytest.mark.parametrize("acks_late", [True, False])
@pytest.mark.parametrize("policy", [retry(), buffer_one()], ids=["retry", "buffer_one"])
def test_new_work_with_the_id_of_earlier_work_runs(
    app: Celery, queue: Queue, redis: Redis, prefix: str, elsewhere: Any, policy: Any, *, acks_late: bool
) -> None:
    """It comes while the earlier runs, and after it; and a redelivery of its message still does nothing."""

    def work(number: int) -> None:
        runs.append(number)
        if number == 1:
            elsewhere(lambda: queue.deliver(second))

    runs: list[int] = []
    task = a_task(app, work, when_busy=policy, celery={"acks_late": acks_late})
    for number in (1, 2, 3):
        task.apply_async((number,), task_id="used again")
    first, second, third = (queue.take() for _ in range(3))
    for message in (first, third):
        redis.set(f"{prefix}k", "somebody else", ex=600)
        queue.deliver(message)
        redis.delete(f"{prefix}k")
        while queue:
            queue.deliver(queue.take())
        queue.deliver(message, redelivered=True)
    assert runs == [1, 2, 3]


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
        assert commands(done) == ["SET", "EVAL"]
        # Acknowledged early it has no copies: what has become of its key costs as much as where it is released.
        early = commands(done, celery={"acks_late": False})
        assert commands(lose, celery={"acks_late": False}) in (early, [*early, "GET"])
        redis_of_the_broker.set(f"{prefix}k", "somebody else", ex=600)
        for _ in range(2):
            put_back = commands(done, when_busy=retry())
            queue.take()
        assert put_back == ["SET", "EVAL"]


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


def test_what_is_remembered_of_copies(server: Server, redis: Redis, prefix: str) -> None:
    key, note = f"{prefix}k", f"{{{prefix}k}}:copy"

    def ask(steps: Any) -> Any:
        return drive(server.client, steps)

    found = ask(read_marker(key, note))
    assert found == CompletionMarker(0, b"", is_stored=False, age=found.age)
    assert found.age > 1e9
    ask(evaluate(STORED, key, beside=(note,)))
    assert not redis.exists(note)
    for number, latest in ((9, 9), (10, 10), (9, 10)):
        ask(evaluate(REQUEUED, key, number, 600_000, beside=(note,)))
        assert ask(read_marker(key, note)).number == latest
    redis.expire(note, 60)
    ask(evaluate(REQUEUED, key, 10, 600_000, beside=(note,)))  # as often as an earlier message with the same id
    assert 540 < redis.ttl(note) <= 600
    redis.hset(note, mapping={"ended": "token", "stored": 1, "ended_at": redis.time()[0] - 1000})
    found = ask(read_marker(key, note, 1200))
    assert found == CompletionMarker(10, b"token", is_stored=True, age=found.age)
    assert 1000 <= found.age < 1060
    assert 1140 < redis.ttl(note) <= 1200
    assert redis.hget(note, "asked") == b"1"
    redis.hset(note, "stored", 0)
    ask(evaluate(STORED, key, beside=(note,)))
    found = ask(read_marker(key, note))
    assert found == CompletionMarker(10, b"", is_stored=True, age=found.age)
