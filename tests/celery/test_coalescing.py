"""The triggers of `buffer_one`, of which the latest wins: see `deliveries`."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from redis import Redis

from only_one import buffer_one
from only_one.celery import coalescing
from only_one.connections.server import Server, find_server
from tests.celery.deliveries import REMEMBERED, Awaits, Queue, a_task
from tests.celery.enqueueing import withdraw


class Noted:
    """What is noted of a task, by what becomes of it."""

    def arrive(self, server: Server, key: str, app: Celery, task_id: str, number: int | None) -> Any:
        return coalescing.arrive(server, key, app, task_id, number, "") or None

    def arrive_anew(self, server: Server, key: str, app: Celery, task_id: str, digest: str, seconds: int) -> Any:
        reply = coalescing.queue_anew(server, key, app, task_id, digest, seconds)
        return reply if isinstance(reply, int) else reply.decode()

    def begin(self, server: Server, key: str, app: Celery, task_id: str, number: int | None) -> bool:
        return bool(coalescing.begin(server, key, app, task_id, number, ""))

    def published(self, server: Server, key: str, app: Celery, number: int) -> None:
        coalescing.note_published(server, key, app, number)

    def withdraw(self, server: Server, key: str, _app: Celery, number: int) -> None:
        withdraw(server, key, number)


buffered: Any = Noted()


@pytest.fixture
def server(redis_url: str) -> Server:
    return find_server(redis_url)


def microseconds(redis: Redis) -> int:
    """The server's time."""
    seconds, rest = redis.time()
    return int(seconds) * 1_000_000 + int(rest)


def test_triggers_are_numbered_as_they_arrive(app: Celery, server: Server, redis: Redis, prefix: str) -> None:
    where = (server, f"{prefix}k", app)
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
    where = (server, f"{prefix}k", app)
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


def test_the_newest_runs_under_an_id_that_was_used_before(app: Celery, queue: Queue, redis: Redis, prefix: str) -> None:
    ran: list[int] = []
    task = a_task(app, ran.append, when_busy=buffer_one())
    for number, task_id in enumerate(("rebuild", "other", "rebuild", "other", "rebuild")):
        task.apply_async((number,), task_id=task_id)
        if number > 2:
            redis.set(f"{prefix}k", "somebody else", ex=600)
            queue.deliver(queue.take())
            redis.delete(f"{prefix}k")
        queue.deliver(queue.take())
    assert ran == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", ["retry", "replace"])
def test_a_retry_and_a_replacement_are_as_old_as_their_task(app: Celery, queue: Queue, how: str) -> None:
    ran: list[int] = []

    def work(self: Any, number: int) -> None:
        ran.append(number)
        if number == 0:
            raise self.retry(countdown=0) if how == "retry" else self.replace(self.s(number))

    task = a_task(app, work, when_busy=buffer_one(), celery={"bind": True})
    task.delay(0)
    queue.deliver(queue.take())
    task.delay(1)
    older, newer = queue.take(), queue.take()
    for message in (newer, older):
        queue.deliver(message)
    assert ran == [0, 1]


def test_a_begin_that_arrives_twice_does_not_supersede_what_was_triggered_in_between(
    app: Celery, server: Server, prefix: str
) -> None:
    where = (server, f"{prefix}k", app)
    first = (*where, "first", coalescing.NEWEST, "one command")
    began = coalescing.begin(*first)
    newer = coalescing.arrive(*where, "second", coalescing.NEWEST, "another")
    assert coalescing.begin(*first) == began < newer
    assert coalescing.begin(*where, "second", newer, "a third") == newer
