"""The tasks of `buffer_one`, of which the latest wins: see `deliveries`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain

from only_one import Acquired, buffer_one, retry, subscribe
from only_one.call.effective_options import Call
from only_one.celery import coalescing
from only_one.connections.server import Server
from rigs.proxy import Proxy
from tests.celery.deliveries import REMEMBERED, Awaits, Keys, Queue, a_task, decorated, done, unique, withdraw


def above(app: Celery, function: Any, **options: Any) -> Any:
    """As `a_task`, but unique from queued to finished."""
    return unique(app, "k", function=function, **options)


@pytest.fixture
def note(app: Celery, server: Server, prefix: str) -> Callable[..., Any]:
    """Notes what happens to a task, and gives its number, or the id of its equal that waits."""

    options: Any = None  # they do not count
    where = (Call(options, server, f"{prefix}k"), app)

    def call(what: str, task_id: str, number: int | None = None, *digest: Any) -> Any:
        if what == "pending":
            coalescing.note_published(*where, number or 0, 600, 570, is_requeued=True)
            return None
        if what == "anew":
            reply: Any = coalescing.queue_anew(*where, task_id, *digest)
            return reply if isinstance(reply, int) else reply.decode()
        given = (*where, task_id, number, digest[0] if digest else "", "a token")
        return coalescing.arrive(*given, begins=what == "begin")

    return call


def test_a_task_that_a_newer_one_has_superseded_is_dropped_unless_that_waits_no_more(
    note: Any, server: Server, keys: Keys
) -> None:
    first, second = note("arrive", "first"), note("arrive", "second")
    assert note("arrive", "first") == first < second  # it has come before
    for newest in (second, first):  # the second of which changes nothing
        note("pending", "", newest)
        assert note("arrive", "first", first) == note("begin", "first") == 0
    withdraw(server, f"{keys.prefix}k", second)
    assert note("arrive", "first", first) == first
    assert note("begin", "second", second) == note("begin", "second", second) == second  # delivered twice
    assert note("arrive", "first", first) == note("begin", "first", first) == 0
    assert note("begin", "third") > second
    assert note("begin", "second", second) == 0


def test_numbers_rise_where_the_clock_steps_back_and_what_is_of_long_ago_is_forgotten(note: Any, keys: Keys) -> None:
    redis, triggers = keys.redis, f"{{{keys.prefix}k}}:triggers"
    ahead = redis.time()[0] * 1_000_000 + 60_000_000
    redis.zadd(triggers, {"last": ahead, "id:old": ahead - 7320e6, "id:young": ahead - 7140e6})
    assert note("arrive", "first") == ahead + 2
    redis.persist(triggers)
    assert note("anew", "second", 0, "") == ahead + 4
    assert REMEMBERED - 60 < redis.ttl(triggers) <= REMEMBERED
    assert note("begin", "third") == ahead + 6
    assert redis.zscore(triggers, "last") == redis.zscore(triggers, "begun") == ahead + 6
    assert [redis.zscore(triggers, f"id:{each}") is not None for each in ("old", "young")] == [False, True]
    assert redis.zscore(triggers, "sent:") is None  # only new work is known by its command
    assert note("arrive", "old", ahead + 10) == ahead + 10  # which the message has not forgotten


def test_a_call_is_a_duplicate_of_an_equal_one_that_is_the_newest_and_waits(note: Any) -> None:
    def queue(task_id: str, digest: str = "equal") -> Any:
        reply = note("anew", task_id, 0, digest)
        if isinstance(reply, int):
            note("pending", "", reply)
        return reply

    first = queue("first")
    assert queue("a duplicate") == "first"
    assert note("begin", "first", first) == first
    second = queue("second")
    assert first < second < queue("other", "unlike") < queue("third")
    assert queue("a duplicate") == "third"
    other = note("anew", "third", 0, "")  # sent once more under its id, which has the other number from now on
    assert other < queue("fourth")
    assert queue("none", "") < queue("none", "")  # which is like no other


def test_of_equal_tasks_of_which_one_may_be_lost_one_runs(note: Any, keys: Keys) -> None:
    triggers = f"{{{keys.prefix}k}}:triggers"
    first = note("anew", "first", 0, "equal")
    note("pending", "", first)
    keys.redis.zadd(triggers, {"until:equal": 1})  # so long ago was it seen
    assert note("anew", "second", 0, "equal") == first
    note("pending", "", first)
    assert note("anew", "a duplicate", 0, "equal") == "second"
    assert note("arrive", "first", first) == note("arrive", "second", first) == first, "either may wait"
    assert note("begin", "first", first) == first
    assert note("begin", "second", first) == note("arrive", "second", first) == 0
    assert note("begin", "first", first) == first, "its message is delivered again"
    assert note("anew", "new", 0, "equal") > first


def test_a_begin_that_arrives_twice_does_not_supersede_what_was_sent_in_between(note: Any) -> None:
    begin = ("begin", "first", coalescing.NEWEST, "one command")
    began = note(*begin)
    newer = note("arrive", "second", coalescing.NEWEST, "another")
    assert note(*begin) == began < newer
    assert note("begin", "second", newer, "a third") == newer


def test_a_task_that_meets_a_run_before_that_has_its_number_is_newer(queue: Queue, keys: Keys) -> None:
    """It waits, and runs in its turn; and the run, which has its key, is not dropped for it, nor is a later one."""
    ran: list[int] = []
    task = a_task(queue.app, ran.append, when_busy=buffer_one())
    for number in range(3):
        task.delay(number)
    message, *others = (queue.take() for _ in range(3))

    def meet(event: Any) -> None:
        while isinstance(event, Acquired) and others:
            queue.deliver_elsewhere(others.pop(0))

    unsubscribe = subscribe(meet)
    queue.deliver(message)
    unsubscribe()
    begun = keys.redis.zscore(f"{{{keys.prefix}k}}:triggers", "begun")
    assert begun < min(message["headers"]["only_one"]["trigger"] for message in queue.messages())
    queue.deliver_all()
    task.delay(3)
    queue.deliver()
    assert ran == [0, 2, 3]


def test_of_tasks_that_are_requeued_the_newest_stays(queue: Queue, keys: Keys, kind: Any) -> None:
    ran: list[int] = []
    task = a_task(queue.app, kind(ran.append), when_busy=buffer_one(), celery={"base": Awaits})
    answers = [task.delay(number) for number in range(3)]
    first, second, third = (queue.take() for _ in range(3))
    with keys.busy():
        for message in (first, third, second):
            queue.deliver(message)
        assert [answer.state for answer in answers] == ["PENDING"] * 3
        first, third, second = (queue.take() for _ in range(3))
        queue.deliver(first)
        assert (answers[0].state, answers[0].result) == ("SUCCESS", None)
        assert len(queue) == 0
    queue.deliver(third)
    assert not ran
    queue.deliver(second)
    assert ran == [1]


def test_the_newest_task_runs_under_an_id_that_was_used_before(queue: Queue, keys: Keys) -> None:
    ran: list[int] = []
    task = a_task(queue.app, ran.append, when_busy=buffer_one())
    for number, task_id in enumerate(("rebuild", "other", "rebuild", "other", "rebuild")):
        task.apply_async((number,), task_id=task_id)
        if number > 2:
            with keys.busy():
                queue.deliver()
        queue.deliver()
    assert ran == [0, 1, 2, 3, 4]


def is_retried(self: Any) -> None:
    self.delay(1)
    raise self.retry(countdown=0)


def is_replaced(self: Any) -> None:
    self.delay(1)
    raise self.replace(self.s(0))


def is_replaced_by_a_chain(self: Any) -> None:
    raise self.replace(chain(self.si(1), self.si(2)))


def is_replaced_by_a_chain_of_new_work(self: Any) -> None:
    try:
        raise self.replace(chain(self.si(1), self.app.tasks["tail"].si()))
    finally:
        self.delay(9)


def queues_new_work_with_its_id(self: Any) -> None:
    self.delay(9)
    self.apply_async((1,), task_id=self.request.id)


@pytest.mark.parametrize(
    ("place", "act", "expected"),
    [
        *[(place, act, [0, 1]) for place in (a_task, above) for act in (is_retried, is_replaced)],
        *[(place, is_replaced_by_a_chain, [0, 1, 2]) for place in (a_task, above)],
        (above, is_replaced_by_a_chain_of_new_work, [0, 9]),
        (above, queues_new_work_with_its_id, [0, 1]),
    ],
)
def test_how_old_is_what_a_run_queues(queue: Queue, place: Any, act: Any, expected: list[int]) -> None:
    """A retry and a replacement are as old as their task; each task of a chain is newer than those before it.

    New work is as old as its message, where that is numbered when it is queued.
    """

    def work(self: Any, number: int) -> None:
        ran.append(number)
        if ran == [0]:
            act(self)

    ran: list[int] = []
    queue.app.task(done, name="tail", shared=False)
    place(queue.app, work, when_busy=buffer_one(), celery={"bind": True}).delay(0)
    queue.deliver_all()
    assert ran == expected


@pytest.mark.parametrize("was_requeued", [False, True])
def test_all_decorators_of_a_task_use_one_number(queue: Queue, keys: Keys, way: Proxy, *, was_requeued: bool) -> None:
    """Else a task that is queued in between would be newer for the first of them, and older for the second."""
    inner = a_task(queue.app, done, key="inner", when_busy=buffer_one())
    task = decorated(inner, key="outer", when_busy=buffer_one(), when_down=retry())
    queue.app.send_task(task.name)
    if was_requeued:
        with way.refused():
            queue.deliver()
    queue.deliver()
    numbers = [keys.redis.zscore(f"{{{keys.prefix}{key}}}:triggers", "begun") for key in ("outer", "inner")]
    assert numbers[0] == numbers[1] is not None
