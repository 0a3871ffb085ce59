"""Runs of a task's message as a worker's process sees to them: see `deliveries`."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

import celery
import pytest
from celery import Celery, Task
from celery.exceptions import Ignore, Retry

from only_one import AlreadyRunning, KeyTemplateError, Lost, configure, current_lock
from only_one.celery import delivery
from only_one.celery.requeue import Header
from only_one.option_values import LONGEST
from only_one.policies import buffer_one, carry_on, fail, retry
from rigs.proxy import Proxy
from tests.celery.deliveries import (
    OUTCOMES,
    QUEUE_TIMEOUT,
    Awaits,
    Calls,
    CallsAgain,
    Keys,
    Queue,
    a_task,
    above_and_below,
    decorated,
    done,
    lambda_of,
    token_of,
    unique,
    whose,
)
from tests.decorated import CLOSED, as_async, events
from tests.wrapped_task import Wrapped

HELD: list[tuple[str, int | None, int, str]] = [
    ("kept", 1, 1, "dropped"),
    ("kept", 2, 1, "dropped"),
    ("kept", 0, 1, "requeued"),
    ("kept", 0, 0, "dropped"),
    ("running", 0, 1, "requeued"),  # behind its previous attempt: nothing waits in a worker
    ("running", 2, 1, "dropped"),
    ("running", 2, 0, "dropped"),
    ("queued", 2, 1, "dropped"),
    ("running", 1, 1, "requeued"),
    ("queued", 0, 0, "run"),
    ("queued", None, 0, "run"),
    ("queued by another", 2, 1, "run"),
    ("running", None, 1, "requeued"),  # by whomever: a retry is not skipped
]


@pytest.mark.parametrize("redelivered", [True, False])
@pytest.mark.parametrize(("state", "attempt", "retries", "outcome"), HELD)
def test_a_task_is_never_skipped_because_of_its_own_lock(
    queue: Queue, keys: Keys, kind: Any, caplog: pytest.LogCaptureFixture,
    state: str, attempt: int | None, retries: int, outcome: str, *, redelivered: bool,
) -> None:  # fmt: skip
    """Whatever the policy says; and a redelivery that is out of date is dropped. A new message has a used id."""
    if outcome == "dropped" and not redelivered:
        outcome = "requeued"
    caplog.set_level(logging.INFO)
    runs: list[str] = []
    policy = {} if attempt is None else {"when_busy": fail}
    task = a_task(queue.app, kind(lambda_of(lambda: runs.append("run"))), celery={"base": Awaits}, **policy)
    answer = task.apply_async(retries=retries)
    message = queue.take()
    whose = "another" if state == "queued by another" else answer.id
    keys["k"] = token_of(whose, state=state.split(maxsplit=1)[0], attempt=attempt)
    queue.deliver(message, redelivered=redelivered)
    assert (len(runs), len(queue)) == OUTCOMES[outcome]
    assert answer.state == ("SUCCESS" if outcome == "run" else "PENDING")
    text = f"redelivery of {task.name}[{answer.id}] dropped: it is out of date"
    dropped = [vars(record)["only_one_key"] for record in caplog.records if record.getMessage() == text]
    assert dropped == [f"{keys.prefix}k"] * (outcome == "dropped")
    if outcome == "requeued":
        del keys["k"]
        queue.deliver(message, redelivered=True)
        assert not runs
        assert text.replace("it is out of date", "a later message waits") in caplog.messages
        queue.deliver()
        assert answer.state == "SUCCESS"
        assert len(runs) == 1


# Calls from inside


@pytest.mark.parametrize("key", ["k", "k-{depth}"])
def test_a_call_from_inside_its_own_run_is_no_redelivery_of_it(queue: Queue, keys: Keys, key: str) -> None:
    """Both have one task id, and one attempt; and it does not requeue a retry, if another key is busy."""

    def work(depth: int) -> list[Any]:
        return ["begun", task.run(depth - 1) if depth else "inside"]

    task = a_task(queue.app, work, key=key)
    keys["k-0"] = "somebody else"
    answer = task.apply_async((1,), retries=1)
    queue.deliver()
    assert len(queue) == 0
    assert answer.get() == ["begun", None]


def test_a_bound_task_called_by_hand_is_a_function(queue: Queue, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(self: Any, value: str) -> Any:  # noqa: ARG001 - the task
        return current_lock().key, *whose()

    key: Any = lambda value: f"k-{value}"  # noqa: E731
    task = a_task(queue.app, work, key=key, celery={"bind": True})
    for call in (task, task.run):
        assert call("by hand") == (f"{keys.prefix}k-by hand", f"{__name__}.{work.__qualname__}", None, None)
        with monkeypatch.context() as of_a_web_process:  # which does not ask Celery for a task
            of_a_web_process.delitem(sys.modules, "celery.app.trace")
            of_a_web_process.delattr(celery._state, "get_current_task")
            assert call("by hand")[0] == f"{keys.prefix}k-by hand"
    assert task.apply(("eager",), task_id="mine").get() == (f"{keys.prefix}k-eager", task.name, "mine", 0)
    answer = task.delay("queued")
    assert queue.deliver() == (f"{keys.prefix}k-queued", task.name, answer.id, 0)
    with pytest.raises(KeyTemplateError, match="self"):  # of a plain function, of which it could not be known before
        decorated(work, key=key)(None, "no task")


def holds(_: str) -> Any:
    """Says what it holds, and what a call gives then that knows of no run, as a task of an event loop may not."""
    key, holder = current_lock().key, current_lock().holder
    assert holder is not None
    return key, holder.task_id, holder.attempt, holder.queue, contextvars.Context().run(celery.current_task.run, "x")


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("call", ["map", "starmap"])
def test_each_run_in_a_list_of_calls_has_its_task_s_key(queue: Queue, keys: Keys, call: str, *, bind: bool) -> None:
    """So it does not run beside another run of the task, whatever name the task has."""

    def bound(self: Any, value: str) -> Any:  # noqa: ARG001 - the task
        return holds(value)

    task = a_task(queue.app, bound if bind else holds, key="{name}-{md5}", celery={"name": call, "bind": bind})
    answer = getattr(task, call)(["x"]).apply_async()
    ((key, *others),) = queue.deliver()
    assert key.startswith(f"{keys.prefix}{call}-")
    assert others == [answer.id, 0, "celery.map", None]
    assert task("x")[0] != key

    def outer(_: str) -> Any:
        return task("x")

    calls_it: Any = queue.app.task(outer, name=f"outer-{task.name}", shared=False)
    getattr(calls_it, call)(["x"]).apply_async()
    assert queue.deliver() == [task("x")], "another task that an item calls is called directly"


LISTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda _: {},
    "redelivered": lambda _: {},
    "chain": lambda after: {"chain": [after]},
    "chord": lambda after: {"chord": after},
}


@pytest.mark.parametrize("how", LISTS)
def test_an_item_whose_key_is_busy_is_skipped_unless_that_would_do_harm(queue: Queue, keys: Keys, how: str) -> None:
    """An item may have been killed, and has no message that could wait; or others would receive its None.

    So does a task, see ``tests/live/test_canvas.py``.
    """
    task = a_task(queue.app, lambda_of(done))
    after = task.s()
    after.freeze()  # as Celery does before it sends a chain
    answer = task.starmap([[]]).apply_async(**LISTS[how](after))
    message = queue.take()
    for holder in ("another list", *([answer.id] if how == "redelivered" else [])):
        keys["k"] = token_of(holder, queue="celery.map")
        queue.deliver(message, redelivered=how == "redelivered")
        assert answer.result == [None] if how == "plain" else isinstance(answer.result, AlreadyRunning)
    if how == "redelivered":  # it waits for its run in the first delivery, if that may be over soon
        keys.redis.pexpire(f"{keys.prefix}k", 200)
        assert queue.deliver(message, redelivered=True) == ["done"]


class Locked(Task):  # type: ignore[misc]  # Celery has no types
    """Has a call that is decorated, and says whose lock it holds."""

    abstract = True

    @decorated("{name}")  # type: ignore[untyped-decorator]
    def __call__(self) -> Any:
        return [super().__call__()]


class AwaitsInAThread(Task):  # type: ignore[misc]  # Celery has no types
    """Runs what is to be awaited as asgiref's ``async_to_sync`` does."""

    abstract = True

    def __call__(self) -> Any:
        self.map([]).apply()  # the other task begins and ends within this one
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(contextvars.copy_context().run, asyncio.run, self.run()).result()


def of_this() -> list[Any]:
    return [whose()]


def locked(app: Celery) -> Any:
    return app.task(lambda_of(whose), base=Locked, name="locked", shared=False)


def in_a_thread(app: Celery) -> Any:
    return a_task(app, as_async(of_this), celery={"base": AwaitsInAThread})


OF_ANOTHER: list[Any] = [f"{Calls.__module__}.Base.run", None, None]
HARD_TO_SEE: dict[str, tuple[Callable[[Celery], Any], str, list[Any]]] = {
    "of its base, by super()": (lambda app: app.register_task(Calls()), "k-changed", [OF_ANOTHER]),
    "of its base's call": (locked, "locked", []),
    "in a thread to which the context is copied": (in_a_thread, "k", []),
    "of a task that an agent wraps": (lambda app: a_task(app, of_this), "k", []),
}
"""How a task is made, its key, and whose the other locks are that are held meanwhile."""


@pytest.mark.parametrize("way", HARD_TO_SEE)
def test_a_run_that_is_hard_to_see_is_its_tasks(queue: Queue, keys: Keys, way: str) -> None:
    """It is not skipped behind its previous attempt; and the run of another task that it calls is none of its own."""
    make, key, others = HARD_TO_SEE[way]
    if "agent" in way:
        queue.as_run = Wrapped
    task = make(queue.app)
    answer = task.apply_async(["k"] if others else [], retries=1)
    keys[key] = token_of(answer.id)
    queue.deliver()
    assert len(queue) == 1
    del keys[key]
    queue.deliver()
    assert answer.get() == [[task.name, answer.id, 1], *others]
    assert delivery.current_task() is None


def called_until_it_is_not_ignored(task: Any) -> Any:
    """As a base's ``__call__`` does that tries again after any exception."""
    with suppress(Ignore):
        Task.__call__(task)
    return Task.__call__(task)


WAITS, IS_DROPPED, BUSY_AFTERWARDS = (0, 1, None), (0, 0, b"1"), (1, 1, b"0")
SECOND_CALLS: list[tuple[str, Any, Any, tuple[int, int, bytes | None]]] = [
    *[("is requeued", None, again, WAITS) for again in (None, Task.__call__, Task.retry)],
    *[("is requeued", "its key is free", again, WAITS) for again in (None, Task.__call__, Task.retry)],
    *[("is dropped", None, again, IS_DROPPED) for again in (None, Task.retry)],
    ("runs", None, None, (2, 0, b"1")),  # though the first has marked its end
    *[("runs", "busy", again, BUSY_AFTERWARDS) for again in (None, Task.__call__, called_until_it_is_not_ignored)],
    # The delivery ends without a result: the other message would be dropped for it, and the work be lost.
    ("runs", "a later message waits", None, (1, 0, b"0")),
    ("runs", {"attempt": 0}, None, (1, 1, b"0")),
    ("runs", {"attempt": 1, "state": "queued"}, None, (1, 0, b"0")),
]
"""The first call, what happens then, and the second; how many runs and messages are left, and is the end stored?"""


@pytest.mark.parametrize(("first", "between", "again", "expected"), SECOND_CALLS)
def test_a_second_call_in_a_delivery(
    queue: Queue, keys: Keys, first: str, between: Any, again: Any, expected: tuple[int, int, bytes | None]
) -> None:
    """By what tries again after any exception, so after the one that ends the delivery, too."""

    def meanwhile(task: Any) -> None:
        if between == "its key is free":
            del keys["k"]
        elif between:
            keys["k"] = token_of(task.request.id, **between) if isinstance(between, dict) else "somebody else"
        if between == "a later message waits":
            keys.redis.hset(keys.marker(task.request.id), "number", 1)

    runs: list[str] = []
    base = {"base": CallsAgain, "errors": [Exception], "meanwhile": meanwhile, **({"again": again} if again else {})}
    answer = a_task(queue.app, lambda_of(lambda: runs.append("run")), when_busy=retry(), celery=base).delay()
    if first == "is requeued":
        keys["k"] = "somebody else"
    else:
        keys.redis.hset(keys.marker(answer.id), mapping={"asked": 1, "stored": int(first == "is dropped")})
    queue.deliver(redelivered=first != "is requeued")
    assert (len(runs), len(queue), keys.marked(answer.id).get(b"stored")) == expected
    for message in queue.messages():
        assert [name for name in message["headers"] if name.startswith("only_one")] == ["only_one"]
        assert "key" not in message["headers"]["only_one"], "it is not unique while it waits"


# A busy key, and one decorator or two


def both_below(app: Celery, function: Any, key: Any = "k", **options: Any) -> Any:
    return a_task(app, decorated(function, key=key, timeout=600, **options), **{**options, "key": "outer"})


def unique_with_newest(app: Celery, function: Any) -> Any:
    return unique(app, "k", timeout=600, function=function, when_busy=buffer_one())


BUSY: dict[str, str] = {
    "plain": "skipped",
    "retry()": "requeued",
    "a retry": "requeued",
    "a retry in a chain": "requeued",
    "redelivered": "requeued",
    "redelivered, and has waited": "requeued",
    "rejected, and back from a dead-letter queue": "requeued",
    "delivery_limit, and back from a dead-letter queue": "requeued",
    "expired, and back from a dead-letter queue": "skipped",
    "new, and has waited": "skipped",
    "new, and has waited, and redelivered": "requeued",
    "chain": "failed",
    "chord": "failed",
}


@pytest.mark.parametrize("make", [a_task, both_below, above_and_below])
@pytest.mark.parametrize("how", BUSY)
def test_a_busy_task_waits_if_a_skip_would_do_harm(
    queue: Queue, keys: Keys, how: str, make: Callable[..., Any]
) -> None:
    """The holder is the task that has called it, which it does not replace."""
    outcome = BUSY[how]
    task = make(queue.app, done, **({"when_busy": retry()} if how == "retry()" else {}))
    after = {"chain": [dict(task.si().set(task_id=str(uuid4())))], "chord": dict(task.si())}
    others = {name: value for name, value in after.items() if name in how}
    keys["k"] = token_of("its caller")
    answer = task.apply_async(retries=int("a retry" in how), parent_id="its caller", **others)
    message = queue.take()
    if "has waited" in how:
        header = Header(answer.id, 0, times=1, lineage="of its first message" if "new" in how else None)
        message["headers"] |= header.as_headers()
    if "dead-letter" in how:
        message["headers"]["x-death"] = [{"reason": how.partition(",")[0]}]
    queue.deliver(message, redelivered=how.endswith("redelivered"))
    if outcome == "requeued":
        queue.deliver()  # and it waits on, for as long as the key is busy
    assert answer.state == {"skipped": "SUCCESS", "requeued": "PENDING", "failed": "FAILURE"}[outcome]
    assert len(queue) == (outcome == "requeued")
    assert ("outer" in keys) == (make is above_and_below and outcome == "requeued"), "unique while it waits"
    del keys["k"]
    if outcome == "requeued":
        queue.deliver(message, redelivered=True)
        queue.deliver()
        assert (answer.state, answer.result) == ("SUCCESS", "done")
        assert len(queue) == len(others)  # the task after it
    assert "outer" not in keys


def test_of_two_decorators_with_one_key_the_inner_one_is_busy_like_any_other(queue: Queue) -> None:
    """The message does not wait for ever for a key that it holds itself."""
    answer = both_below(queue.app, done, lambda: "outer").apply_async(retries=1)
    queue.deliver()
    assert (answer.state, answer.result) == ("SUCCESS", None)
    assert len(queue) == 0


def test_a_task_that_ends_its_process_has_not_succeeded(queue: Queue, keys: Keys) -> None:
    def ends() -> None:
        sys.exit(0)

    a_task(queue.app, ends, at_least=600).delay()
    with pytest.raises(SystemExit):
        queue.deliver()
    assert "k" not in keys


# Unique from queued to finished


class Colour(str, enum.Enum):
    """What JSON makes a plain str of."""

    RED = "red"


NEVER = datetime.max.replace(tzinfo=timezone.utc)
RETRIES: list[tuple[str, Any, Any, Any, bool, float]] = [
    ("{md5}", "A", {}, {}, True, QUEUE_TIMEOUT),
    ("{md5}", "A", {"task_id": "its own"}, {}, True, QUEUE_TIMEOUT),
    ("{value.value}", Colour.RED, {}, {}, True, QUEUE_TIMEOUT),
    ("{value}", "A", {}, {"args": ("B",)}, False, 0),
    ("{value}", "A", {"task_id": "its own"}, {"args": ("B",)}, False, 0),
    ("{value.value}", Colour.RED, {}, {"args": ("red",)}, True, QUEUE_TIMEOUT),
    ("{value}", "A", {}, {"args": (), "kwargs": {"value": "A"}}, True, QUEUE_TIMEOUT),
    ("{value}", "A", {"args": (), "kwargs": {"value": "A"}}, {"args": ("A",), "kwargs": {}}, True, QUEUE_TIMEOUT),
    ("{value.value}", Colour.RED, {"args": (), "kwargs": {"value": Colour.RED}}, {}, True, QUEUE_TIMEOUT),
    ("k", "A", {}, {"args": ("B",)}, True, QUEUE_TIMEOUT),
    ("k", "A", {}, {"countdown": 1000}, True, QUEUE_TIMEOUT + 1000),
    ("k", "A", {}, {"countdown": None, "eta": NEVER}, True, LONGEST),
    ("k", "A", {"expires": 900}, {}, True, 900),
    ("k", "A", {"expires": 900}, {"expires": 500}, True, 500),
    ("k", "A", {}, {"expires": -1}, True, 0),
]
"""A retry with these options: has it the key of its task, and for how many seconds, while it waits?"""


@pytest.mark.parametrize(("template", "value", "sent", "retried", "has_its_key", "seconds"), RETRIES)
def test_a_retry_has_the_key_of_its_task_unless_its_arguments_give_another(
    queue: Queue, keys: Keys, way: Proxy, kind: Any, template: str, value: Any, sent: Any, retried: Any,
    *, has_its_key: bool, seconds: float,
) -> None:  # fmt: skip
    def work(value: Any) -> str:
        ran_with.append(current_lock().key)
        if len(ran_with) == 1:
            keys.redis.hset(keys.marker(answer.id, ran_with[0].removeprefix(keys.prefix)), "asked", 1)
            task.retry(**{"countdown": 0, **retried})
        return str(value)

    ran_with: list[str] = []
    task = unique(queue.app, template, function=kind(work), celery={"acks_late": True, "base": Awaits})
    answer = task.apply_async(**{"args": (value,), "headers": {"x-mine": 1}, **sent})
    way.forget_commands()
    queue.deliver()
    assert way.commands[0] == ("SET" if "task_id" in sent else "EVAL"), "it knows by what value it was queued"
    headers, key = queue.messages()[0]["headers"], ran_with[0].removeprefix(keys.prefix)
    assert (headers["x-mine"], "key" in headers["only_one"]) == (1, has_its_key)
    assert b"ended" in keys.marked(answer.id, key), "a redelivery of the first attempt learns of its end"
    assert keys.state(key) == (("queued", 1) if seconds else None)
    assert keys.lives_for(seconds, key) if seconds else key not in keys
    assert task.delay(value).is_duplicate == bool(seconds)
    queue.deliver_all()
    assert answer.state == "SUCCESS"
    assert (ran_with[0] == ran_with[1]) == has_its_key
    assert not keys.redis.keys(f"{keys.prefix}*")


@pytest.mark.parametrize("arguments", [None, ("blue",)], ids=["it sends nothing", "they give no key"])
def test_a_retry_that_has_no_key_keeps_no_other_from_its_queue(queue: Queue, keys: Keys, arguments: Any) -> None:
    def work(value: Any) -> None:  # noqa: ARG001 - it is in the key
        raise task.retry(arguments, countdown=0) if arguments else Retry()

    task = unique(queue.app, "{value.value}", function=work)
    task.delay(Colour.RED)
    assert "red" in keys
    queue.deliver()
    assert (len(queue), "red" in keys) == (bool(arguments), False)


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("stored", ["its own", "another's", "nothing"])
@pytest.mark.parametrize("settings", [{}, {"redis": CLOSED}, {"active": False}])
def test_an_attempt_has_its_message_s_key(queue: Queue, keys: Keys, attempt: int, settings: Any, stored: str) -> None:
    """Also where no server answers, and where its value has expired in the queue."""
    answer = unique(queue.app, "k-{value}", when_down=carry_on).delay(1)
    del keys["k-1"]
    message = queue.take()
    value = token_of("another" if stored == "another's" else answer.id, state="queued", attempt=attempt)
    message["headers"]["retries"] = attempt
    message["headers"]["only_one"].update(key=f"{keys.prefix}kept", attempt=attempt, token=value.decode())
    if stored != "nothing":
        keys["kept"] = value
    with configure(**settings), events(Lost) as losses:
        queue.deliver(message)
    assert answer.get() == [1, "more", f"{keys.prefix}kept"]
    assert losses == []
    assert ("kept" in keys) == (bool(settings) and stored != "nothing")


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="Celery's result backends know it since 5.7")
@pytest.mark.parametrize("make", [a_task, above_and_below, unique_with_newest])
def test_a_task_id_that_is_no_str(queue: Queue, keys: Keys, make: Any) -> None:
    """Celery does without; the worker gets what the broker's JSON makes of it, which is again the UUID."""
    task_id = uuid4()
    answer = make(queue.app, lambda_of(lambda: whose()[1])).apply_async(task_id=task_id)
    keys["k"] = token_of(None)
    for redelivered in (True, False):
        message = queue.take()
        message["headers"]["id"] = task_id
        queue.deliver(message, redelivered=redelivered)
        keys.redis.delete(f"{keys.prefix}k")
    assert answer.get() == str(task_id)
