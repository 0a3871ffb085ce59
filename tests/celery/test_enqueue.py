"""The decorator above a task, where there is no worker: what is published, what is not, and what becomes of the key."""

from __future__ import annotations

import base64
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, chain, chord, group, shared_task
from celery.beat import ScheduleEntry, Scheduler
from celery.result import AsyncResult, EagerResult, GroupResult, result_from_tuple
from celery.schedules import schedule
from celery.signals import before_task_publish
from kombu.exceptions import EncodeError, OperationalError
from pydantic import BaseModel
from redis import Redis

from only_one import (
    AlreadyRunning,
    Busy,
    LockUnavailable,
    UnkeyableArgument,
    buffer_one,
    carry_on,
    configure,
    current_lock,
    fail,
    retry,
    settings,
    skip,
    subscribe,
)
from only_one.celery.broker import waits_for
from only_one.celery.requeue import Header, header_of
from only_one.holder import Holder
from only_one.lock import renewal
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests.celery.enqueueing import (
    CLOSED,
    QUEUE_TIMEOUT,
    SLACK,
    KeyIsBusy,
    a_task,
    cover,
    lives_for,
    messages,
    other,
    work,
)
from tests.lock.test_leases import no_more_threads
from tests.proxy import Proxy

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("redis", "finalizers")


def fails() -> float:
    return 1 / 0


# --- the first and its duplicates --------------------------------------------------------------------------------


@pytest.mark.parametrize("finalized", [False, True], ids=["lazy", "finalized"])
def test_a_duplicate_is_not_published_and_gets_the_result_of_the_one_that_is_there(
    app: Celery,
    queued: Any,
    held: Any,
    finalized: bool,  # noqa: FBT001
) -> None:
    if finalized:
        app.finalize()
    task = a_task(app, "k-{value}")
    first = task.delay(1)
    assert isinstance(first, AsyncResult)
    assert queued() == 1
    assert (held("k-1").state, held("k-1").task_id, held("k-1").name) == ("queued", first.id, task.name)
    assert held("k-1").attempt == 0
    second = task.delay(1)
    assert isinstance(second, AsyncResult)
    assert second == first
    assert second.id == first.id == held("k-1").task_id
    assert second.app is first.app
    assert second.backend is first.backend
    assert second.state == "PENDING"
    assert task.apply_async((1,), countdown=5) == first
    assert task.apply_async(kwargs={"value": 1}) == first
    assert queued() == 1
    assert task.delay(2) != first
    assert queued() == 2


def test_a_task_is_queued_where_no_thread_can_be_started(
    app: Celery, queued: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its producer renews nothing."""
    monkeypatch.setattr(renewal, "_renewer", renewal._Renewer())
    task = a_task(app, "k")
    with no_more_threads():
        first = task.delay()
        assert task.delay() == first
    assert queued() == 1


def test_whether_a_call_has_started_something_can_be_seen(app: Celery, queued: Any) -> None:
    task = a_task(app, "k-{value}")
    first, second = task.delay(1), task.delay(1)
    assert (first.is_duplicate, first.holder) == (False, None)
    assert (second.is_duplicate, second.holder.task_id, second.holder.state) == (True, first.id, "queued")
    assert second == first
    assert hash(second) == hash(first)
    assert result_from_tuple(second.as_tuple(), app=app) == first
    assert len({*GroupResult("both", [first, second]).results}) == 1
    brought = task.apply_async((1,), task_id="its-own")
    assert (brought.id, brought.is_duplicate) == ("its-own", False)
    other = a_task(app, "k-{value}", when_busy=lambda error: app.AsyncResult(error.task_id)).delay(1)
    assert (other.is_duplicate, other.holder.task_id) == (True, first.id)
    with configure(active=False):
        assert not task.delay(1).is_duplicate
    assert a_task(app, "k-{value}", when_busy=skip).delay(1) is None
    assert queued() == 3


def test_who_calls_a_duplicate_is_told_once_that_its_result_cannot_be_had(
    new_app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the backend gives a result only to the process that has queued the task."""
    for backend, times in [("rpc://", 1), ("cache+memory://", 0)]:
        task = a_task(new_app(broker_url="memory://", result_backend=backend), f"{backend}-{{value}}")
        caplog.clear()
        first, *others = [task.delay(value) for value in (1, 1, 1)]
        warned = [each for each in caplog.messages if "may wait for ever" in each]
        assert len(warned) == times
        assert all(first.id in each for each in warned)
        assert others == [first, first]
        for value in (2, 3):
            task.delay(value)
        assert len([each for each in caplog.messages if "may wait for ever" in each]) == times


def test_without_a_result_backend_a_duplicate_says_that_there_is_no_result(new_app: Any) -> None:
    task = a_task(new_app(broker_url="memory://", result_backend="disabled://"), "no-backend-{value}")
    first, duplicate = task.delay(1), task.delay(1)
    assert duplicate == first
    with pytest.raises(NotImplementedError, match="No result backend"):
        duplicate.get(timeout=1)


def test_whether_a_call_has_started_something_can_be_seen_with_buffer_one(app: Celery, busy: KeyIsBusy) -> None:
    task = a_task(app, "k", when_busy=buffer_one())
    with busy("k"):
        answers = [task.delay(1) for _ in range(2)]
    assert [(answer.is_duplicate, answer.holder) for answer in answers] == [(False, None), (True, None)]


def test_whether_a_call_has_started_something_can_be_seen_where_a_function_holds_its_key(
    app: Celery, busy: KeyIsBusy
) -> None:
    with busy("k"):
        answer = a_task(app, "k").delay(1)
    assert (answer.is_duplicate, answer.holder) == (False, None)


def test_whether_a_call_has_started_something_can_be_seen_of_a_shared_task(new_app: Any) -> None:
    name = f"task-{uuid4()}"
    cover("k")(shared_task(name=name)(work))
    task = new_app().tasks[name]
    assert [task.delay(1).is_duplicate for _ in range(2)] == [False, True]


@pytest.mark.parametrize("options", [(), None], ids=["called", "bare"])
def test_the_default_key_is_of_all_arguments(app: Celery, queued: Any, options: Any) -> None:
    task = app.task(work, name=f"task-{uuid4()}", shared=False)
    task = cover(task) if options is None else cover()(task)
    first = task.delay({"b": 1, "a": [2]})
    assert task.delay({"a": [2], "b": 1}) == first
    assert task.delay({"a": [3], "b": 1}) != first
    assert queued() == 2


def test_calls_that_mean_the_same_are_one(app: Celery, queued: Any) -> None:
    task = a_task(app)
    first = task.delay(1)
    for args, kwargs in [((1, "more"), {}), ((), {"more": "more", "value": 1})]:
        assert task.delay(*args, **kwargs) == task.apply_async(args, kwargs) == first
        assert task.s(*args, **kwargs).delay() == task.si(*args, **kwargs).apply_async() == first
    assert queued() == 1
    assert task.delay(1, "others") != first
    assert queued() == 2


def test_a_bound_task_and_one_with_a_callable_key(app: Celery, queued: Any, held: Any) -> None:
    def bound(self: Any, value: int) -> Any:
        return self, value

    task = a_task(app, "k-{value}", function=bound, celery={"bind": True})
    other = a_task(app, key=lambda *, value: f"c-{value}", function=bound, celery={"bind": True})
    assert task.delay(1) == task.delay(value=1)
    assert other.delay(1) == other.delay(value=1)
    assert queued() == 2
    assert held("k-1").name == task.name
    assert held("c-1").name == other.name


def test_of_many_threads_one_publishes(app: Celery, queued: Any) -> None:
    task = a_task(app, "k")
    app.finalize()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: task.delay(), range(32)))
    assert len({answer.id for answer in answers}) == 1
    assert queued() == 1


def test_a_producer_that_is_gone_and_a_run_that_is_dead(
    app: Celery, redis_url: str, prefix: str, queued: Any, held: Any
) -> None:
    """They have named a process of this machine that is no more: what is queued stays so, what has run is over.

    So is what a worker has received and has not begun.
    """
    program = f"""
import os, redis, signal
from celery import Celery
from only_one import configure, only_one
from only_one.lock.token import TokenFactory
configure(redis={redis_url!r}, prefix={prefix!r})
app = Celery("producer", broker={redis_url!r}, backend={redis_url!r})
app.conf.task_default_queue = {prefix!r} + "queue"
@only_one("k")
@app.task(name="produced")
def produced(): ...
print(produced.delay().id, flush=True)
received = TokenFactory("produced", "another", 0, "received").token(600)
redis.Redis.from_url({redis_url!r}).set({prefix!r} + "received", received, ex=600)
only_one(lambda: os.kill(os.getpid(), signal.SIGKILL), key="dead", timeout=600)()
"""
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    task = a_task(app, "k", celery={"name": "produced"})
    assert held("k").state == "queued"
    assert task.delay().id == printed.stdout.strip() == held("k").task_id
    assert queued() == 1
    a_task(app, "dead", takeover=False).delay()
    assert held("dead").state == "running"
    assert a_task(app, "received", takeover=False).delay().id == held("received").task_id == "another"
    assert queued() == 2
    for key in ("dead", "received"):
        answer = a_task(app, key).delay()
        assert (held(key).state, held(key).task_id) == ("queued", answer.id)
    assert queued() == 4


# --- policies ----------------------------------------------------------------------------------------------------


def test_a_policy_is_told_the_id_of_the_one_that_is_there(app: Celery, queued: Any, prefix: str) -> None:
    task = a_task(app, "k", when_busy=fail)
    first = task.delay()
    with pytest.raises(AlreadyRunning) as raised:
        task.delay()
    assert raised.value.task_id == first.id
    assert raised.value.key == f"{prefix}k"
    assert raised.value.holder is not None
    assert raised.value.holder.state == "queued"
    assert a_task(app, "k", when_busy=skip).delay() is None
    assert a_task(app, "k", when_busy=lambda error: ["busy", error.task_id]).delay() == ["busy", first.id]
    assert queued() == 1


def test_the_policy_may_be_configured_or_the_apps(new_app: Any, queued: Any) -> None:
    app = new_app(only_one_when_busy="only_one.fail")
    task = a_task(app, "k")
    task.delay()
    with pytest.raises(AlreadyRunning):
        task.delay()
    with configure(when_busy=skip):
        assert task.delay() is None
    assert queued() == 1


def test_retry_that_is_inherited_makes_no_decorator_invalid(app: Celery, queued: Any) -> None:
    with configure(when_busy=retry()):
        task = a_task(app, "k")
        assert task.delay() == task.delay()
        assert queued() == 1


def test_buffer_one_publishes_what_has_not_begun(app: Celery, queued: Any, busy: KeyIsBusy) -> None:
    task = a_task(app, "k", when_busy=buffer_one())
    with busy("k"):
        answer = task.delay(1)
    assert isinstance(answer, AsyncResult)
    assert queued() == 1


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_broker_that_is_down_frees_the_key(new_app: Any, held: Any) -> None:
    task = a_task(new_app(broker_url=CLOSED, broker_connection_timeout=0.1), "k")
    with pytest.raises(OperationalError):
        task.delay()
    assert held("k") is None


def test_a_broker_that_is_down_leaves_nothing_pending_of_buffer_one(new_app: Any, queued: Any) -> None:
    name = f"task-{uuid4()}"
    down = new_app(broker_url=CLOSED, broker_connection_timeout=0.1)
    with pytest.raises(OperationalError):
        a_task(down, "k", celery={"name": name}, when_busy=buffer_one()).delay(1)
    up = a_task(new_app(), "k", celery={"name": name}, when_busy=buffer_one())
    first = up.delay(1)
    assert queued() == 1
    assert up.delay(1) == first
    assert queued() == 1


def test_a_message_that_cannot_be_encoded_frees_the_key(app: Celery, left: Any, queued: Any) -> None:
    task = a_task(app, "k")
    with pytest.raises((EncodeError, TypeError)):
        task.delay(object())
    assert left("k") == -2
    assert queued() == 0
    task.delay(1)
    assert queued() == 1


def test_a_handler_that_raises_before_it_is_published_frees_the_key(app: Celery, left: Any) -> None:
    task = a_task(app, "k")
    seen = []

    @before_task_publish.connect(sender=task.name, weak=False)  # type: ignore[untyped-decorator]
    def refuse(**_: Any) -> None:
        seen.append(left("k"))
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            task.delay()
    finally:
        before_task_publish.disconnect(refuse, sender=task.name)
    assert seen[0] > 0
    assert left("k") == -2


def test_a_server_that_is_down_is_not_published_past(app: Celery, queued: Any) -> None:
    for options in ({}, {"when_down": retry()}):
        with pytest.raises(LockUnavailable):
            a_task(app, "k", redis=CLOSED, **options).delay()
    assert a_task(app, "k", redis=CLOSED, when_down=type).delay() is LockUnavailable
    assert queued() == 0
    task = a_task(app, "k", redis=CLOSED, when_down=carry_on)
    assert task.delay() != task.delay()
    assert queued() == 2


def test_arguments_that_do_not_fit_raise_and_leave_no_key(app: Celery, queued: Any, left: Any) -> None:
    for template in ("k", "k-{value}"):
        task = a_task(app, template)
        for args, kwargs in [((1, 2, 3), {}), ((), {"wrong": 1}), ((1,), {"value": 1})]:
            with pytest.raises(TypeError):
                task.delay(*args, **kwargs)
            with pytest.raises(TypeError):
                task.apply_async(args, kwargs)
    with pytest.raises(UnkeyableArgument, match="value"):
        a_task(app).delay(object())
    assert queued() == 0
    assert left("k") == left("k-1") == -2


# --- how long ----------------------------------------------------------------------------------------------------


def in_(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def test_it_is_taken_for_30_s_until_it_is_published(app: Celery, left: Any, held: Any) -> None:
    task = a_task(app, "k", timeout=7200)
    seen = []

    @before_task_publish.connect(sender=task.name, weak=False)  # type: ignore[untyped-decorator]
    def look(headers: Any, **_: Any) -> None:
        seen.append((left("k"), held("k").state, held("k").task_id == headers["id"]))

    try:
        task.delay()
    finally:
        before_task_publish.disconnect(look, sender=task.name)
    ((seconds, *others),) = seen
    assert 0 < seconds <= 30
    assert others == ["queued", True]
    assert lives_for(QUEUE_TIMEOUT, left("k"))


def test_while_queued_it_lives_for_an_hour_whatever_a_run_may_take(app: Celery, left: Any) -> None:
    for number, options in enumerate([{}, {"timeout": 5}, {"timeout": 72_000}, {"lease": 5}]):
        a_task(app, f"k-{number}", **options).delay()
        assert lives_for(QUEUE_TIMEOUT, left(f"k-{number}"))


def test_queue_timeout_is_configured_or_the_apps(new_app: Any, left: Any) -> None:
    app = new_app(only_one_queue_timeout=300)
    task = a_task(app, "k-{value}")
    task.delay(1)
    assert lives_for(300, left("k-1"))
    with configure(queue_timeout=600):
        task.delay(2)
    assert lives_for(600, left("k-2"))
    with configure(queue_timeout=timedelta(minutes=20)):
        task.delay(3)
    assert lives_for(1200, left("k-3"))
    with configure(queue_timeout=29):
        task.delay(4)
    assert 0 < left("k-4") <= 29


@pytest.mark.parametrize("how", ["number", "datetime", "naive", "text", "the task's", "less than 30 s"])
def test_while_queued_it_lives_until_the_task_expires(app: Celery, left: Any, how: str) -> None:
    every: dict[str, dict[str, Any]] = {
        "number": {"expires": 9000},
        "datetime": {"expires": in_(600)},
        "naive": {"expires": in_(9000).replace(tzinfo=None)},  # in the app's zone, UTC
        "text": {"expires": in_(9000).isoformat()},
        "the task's": {},
        "less than 30 s": {"expires": 29},
    }
    task = a_task(app, "k", celery={"expires": 9000} if how == "the task's" else {})
    task.apply_async(**every[how])
    if how == "less than 30 s":
        assert left("k") <= 29
    else:
        assert lives_for(600 if how == "datetime" else 9000, left("k"))


def test_one_that_has_expired_already_holds_nothing_up(app: Celery, redis: Redis, prefix: str, queued: Any) -> None:
    task = a_task(app, "k")
    for expires in (-5, in_(-5), 0.0009):
        task.apply_async(expires=expires)
    assert queued() == 3  # the worker says that they were revoked
    assert not any("only_one" in headers for headers in messages(redis, prefix))
    task.apply_async(expires=0.001)
    assert "only_one" in messages(redis, prefix)[-1]


@pytest.mark.parametrize("how", ["countdown", "eta", "naive eta", "eta with a zone", "a date"])
def test_what_waits_for_its_time_is_waited_for(app: Celery, left: Any, how: str) -> None:
    zone = timezone(timedelta(hours=5))
    every: dict[str, dict[str, Any]] = {
        "countdown": {"countdown": 9000},
        "eta": {"eta": in_(9000)},
        "naive eta": {"eta": in_(9000).replace(tzinfo=None)},  # in the app's zone, UTC
        "eta with a zone": {"eta": in_(9000).astimezone(zone)},
        "a date": {"eta": date.today() + timedelta(days=10)},  # noqa: DTZ011
    }
    a_task(app, "k").apply_async(**every[how])
    if how == "a date":
        assert 8 * 86_400 < left("k") < 12 * 86_400
    else:
        assert lives_for(9000 + QUEUE_TIMEOUT, left("k"))


def test_how_long_it_is_waited_for_to_the_second(app: Celery) -> None:
    for expires, until, seconds in ((None, None, 600), (None, 60, 660), (None, -60, 600), (0, 60, 0), (60, None, 60)):
        assert waits_for(app, 600, expires, until) == seconds


def test_one_that_waits_and_expires(app: Celery, left: Any) -> None:
    a_task(app, "k").apply_async(countdown=9000, expires=10_000)
    assert 10_000 - SLACK < left("k") <= 19_001
    a_task(app, "past").apply_async(eta=in_(-9000))
    assert lives_for(QUEUE_TIMEOUT, left("past"))


def test_a_duplicate_does_not_lengthen_it(app: Celery, left: Any, queued: Any) -> None:
    task = a_task(app, "k")
    task.apply_async(expires=100)
    task.apply_async(expires=1000)
    task.delay()
    assert lives_for(100, left("k"))
    assert queued() == 1


# --- what is always published ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["task_id", "link", "link_error", "chain", "chord", "group", "group_id", "last"])
def test_what_others_wait_for_is_always_published(app: Celery, queued: Any, held: Any, how: str) -> None:
    task = a_task(app, "k", when_busy=fail)
    plain = app.task(other, name="other", shared=False)
    first = task.delay()
    before = queued()
    published: dict[str, tuple[int, Callable[[], Any]]] = {
        "task_id": (1, lambda: task.apply_async(task_id=str(uuid4()))),
        "link": (1, lambda: task.apply_async(link=plain.si())),
        "link_error": (1, lambda: task.apply_async(link_error=plain.si())),
        "chain": (1, lambda: chain(task.si(), plain.si()).apply_async()),
        "chord": (2, lambda: chord([task.si(), task.si()], plain.s()).apply_async()),
        "group": (2, lambda: group(task.si(), task.si()).apply_async()),
        "group_id": (1, lambda: task.apply_async(group_id=str(uuid4()))),
        "last": (1, lambda: chain(plain.si(), task.si()).apply_async()),
    }
    number, call = published[how]
    answer = call()
    assert queued() == before + number
    assert answer != first
    assert held("k").task_id == first.id


def test_a_holder_that_is_no_task_is_for_the_worker_to_see(app: Celery, redis: Redis, prefix: str, queued: Any) -> None:
    redis.set(f"{prefix}k", "somebody else")
    assert isinstance(a_task(app, "k").delay(), AsyncResult)
    assert queued() == 1
    assert redis.get(f"{prefix}k") == b"somebody else"
    assert redis.ttl(f"{prefix}k") == -1
    with pytest.raises(AlreadyRunning) as raised:
        a_task(app, "k", when_busy=fail).delay()
    assert raised.value.task_id is None
    assert queued() == 1


def test_one_that_brings_its_id_does_not_keep_others_from_being_published(app: Celery, queued: Any, held: Any) -> None:
    task = a_task(app, "k")
    own = str(uuid4())
    assert task.apply_async(task_id=own).id == own
    answer = task.delay()
    assert held("k").task_id == answer.id != own
    assert task.delay() == answer
    assert queued() == 2


# --- without a queue ---------------------------------------------------------------------------------------------


def test_always_eager(new_app: Any, busy: KeyIsBusy, queued: Any, left: Any, prefix: str) -> None:
    task = a_task(new_app(task_always_eager=True), "k", timeout=60, when_busy=fail)
    answer = task.delay(1)
    assert isinstance(answer, EagerResult)
    assert not answer.is_duplicate
    assert answer.get() == (1, "more", f"{prefix}k")
    assert left("k") == -2
    assert task.apply_async((2,), expires=60).get() == (2, "more", f"{prefix}k")
    with busy("k"):
        for call in (task.delay, task.apply):
            with pytest.raises(AlreadyRunning):
                call().get()
    assert queued() == 0


def test_called_directly_it_is_covered_like_a_function(app: Celery, busy: KeyIsBusy, prefix: str, left: Any) -> None:
    task = a_task(app, "k")
    assert task(1) == task.run(1) == (1, "more", f"{prefix}k")
    assert left("k") == -2
    with busy("k"):
        assert task(1) is None
        with pytest.raises(AlreadyRunning):
            a_task(app, "k", when_busy=fail)(1)
    with pytest.raises(ZeroDivisionError):
        a_task(app, "k", function=fails)()
    assert left("k") == -2
    task.delay()
    assert task(1) == (1, "more", f"{prefix}k")  # what waits in a queue has not begun


def test_called_directly_and_queued_it_has_one_key_on_its_apps_server(new_app: Any) -> None:
    with redis_server() as own, Redis.from_url(own.url) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_overrides", [])  # not even what each test has configured for it
        patch.setattr(settings, "current", {})
        app = new_app(result_backend=own.url, only_one_prefix="own:", only_one_timeout=500)

        def look() -> Any:
            return current_lock().key, client.pttl("own:k")

        task = a_task(app, "k", function=look)
        key, milliseconds = task()
        assert key == "own:k"
        assert lives_for(500, milliseconds / 1000)
        first = task.delay()
        assert Holder.parse(client.get("own:k") or b"").task_id == first.id  # type: ignore[union-attr]
        assert task.delay() == first


def test_switched_off_nothing_is_covered(app: Celery, queued: Any, left: Any) -> None:
    task = a_task(app, "k", when_busy=fail)
    with configure(active=False):
        assert task.delay() != task.delay()
        assert queued() == 2
        assert left("k") == -2
    task.delay()
    with pytest.raises(AlreadyRunning):
        task.delay()
    assert queued() == 3


# --- tasks of every kind -----------------------------------------------------------------------------------------


def test_a_base_class_with_methods_of_its_own(app: Celery, queued: Any, prefix: str) -> None:
    calls = []

    class Base(Task):  # type: ignore[misc]  # Celery has no types
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            calls.append(("apply_async", args))
            return super().apply_async(args, kwargs, **{"headers": {"own": 1}, **options})

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(("call", args))
            return super().__call__(*args, **kwargs)

    task = a_task(app, "k-{value}", celery={"base": Base})
    first = task.delay(1)
    assert ("apply_async", (1,)) in calls
    assert task.delay(1) == first
    assert queued() == 1
    assert task(2) == (2, "more", f"{prefix}k-2")
    assert calls[-1] == ("call", (2,))
    assert task.apply((3,)).get() == (3, "more", f"{prefix}k-3")
    assert calls[-1] == ("call", (3,))


def test_a_task_that_is_a_class(app: Celery, queued: Any, held: Any, prefix: str) -> None:
    class Single(Task):  # type: ignore[misc]  # Celery has no types
        name = "single"

        def run(self, value: int) -> Any:
            return value, current_lock().key

    task = cover("k-{value}")(app.register_task(Single()))
    first = task.delay(1)
    assert task.delay(value=1) == app.tasks["single"].delay(1) == first
    assert held("k-1").name == "single"
    assert queued() == 1
    assert task(2) == (2, f"{prefix}k-2")


class Page(BaseModel):
    number: int


def with_a_page(page: Page) -> Page:
    return page


with_a_page.__annotations__.update(page=Page, **{"return": Page})  # which Celery does not find in text


def test_a_task_with_a_model(new_app: Any, queued: Any, held: Any, prefix: str) -> None:
    class Feed(BaseModel):
        key: str
        pages: int = 1

    def modelled(feed: Feed) -> Feed:
        return Feed(key=current_lock().key, pages=feed.pages)

    modelled.__annotations__.update(feed=Feed, **{"return": Feed})  # which are local to this test
    task = a_task(new_app(), "{feed[key]}", function=modelled, celery={"pydantic": True})
    first = task.delay({"key": "k", "pages": 3})
    assert task.delay({"key": "k", "pages": 4}) == first
    if hasattr(task, "_dump_pydantic_arguments"):  # from Celery 5.7 on; no older one sends a model
        assert task.delay(Feed(key="k")) == first
    assert queued() == 1
    by_attribute = a_task(new_app(), function=modelled, celery={"pydantic": True})
    assert by_attribute.delay({"key": "a"}) == by_attribute.delay({"key": "a"})
    assert queued() == 2
    pickled = a_task(new_app(), "{page.number}", function=with_a_page, celery={"pydantic": True})
    pickled.apply_async((Page(number=7),), serializer="pickle")  # which carries it as it is
    assert held("7").name == pickled.name
    eager = a_task(new_app(task_always_eager=True), "{feed[key]}", function=modelled, celery={"pydantic": True})
    assert eager.delay({"key": "e", "pages": 3}).get() == {"key": f"{prefix}e", "pages": 3}


def test_autoretry_does_not_change_the_key(app: Celery, queued: Any) -> None:
    task = a_task(app, "k-{value}", celery={"autoretry_for": (OSError,), "default_retry_delay": 0})
    assert task.delay(1) == task.delay(value=1)
    with pytest.raises(TypeError):
        task.delay(wrong=1)
    assert queued() == 1


def test_beat_takes_the_key(app: Celery, queued: Any) -> None:
    task = a_task(app, "k", celery={"name": "beaten"})
    app.finalize()
    scheduler = Scheduler(app=app, lazy=True)
    entry = ScheduleEntry(name="each", task="beaten", schedule=schedule(1), args=(), app=app)
    first = scheduler.apply_async(entry, advance=False)
    assert isinstance(first, AsyncResult)
    assert scheduler.apply_async(entry, advance=False) == first == task.delay()
    with configure(when_busy=fail):
        scheduler.apply_entry(entry)  # which logs what is raised
    assert queued() == 1


def test_what_beat_does_not_send_is_one_line_of_its_log(
    app: Celery, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    a_task(app, "k", celery={"name": "beaten"}, when_busy=fail).delay()
    app.finalize()
    scheduler = Scheduler(app=app, lazy=True)
    entry = ScheduleEntry(name="each", task="beaten", schedule=schedule(1), args=(), app=app)
    other = ScheduleEntry(name="other", task="beaten", schedule=schedule(1), args=1, app=app)
    with caplog.at_level("WARNING"):
        scheduler.apply_entry(entry)
        scheduler.apply_entry(other)
    ours, theirs = caplog.records
    assert (ours.name, ours.levelname, ours.exc_info) == ("celery.beat", "ERROR", None)
    assert ours.getMessage().startswith(f"Couldn't apply scheduled task each: {prefix}k is taken by beaten (task ")
    assert len(logging.Formatter().format(ours).splitlines()) == 1
    assert theirs.exc_info  # an error of another kind is logged as it was
    with caplog.at_level("WARNING"):
        logging.getLogger("celery.beat").warning("it is %s", "late")
    assert caplog.messages[-1] == "it is late"


def test_by_name_it_is_published_past_the_decorator(app: Celery, queued: Any) -> None:
    task = a_task(app, "k", celery={"name": "named"})
    first = task.delay()
    assert app.send_task("named") != first
    assert queued() == 2


def test_what_is_sent_again_is_published(app: Celery, queued: Any) -> None:
    """The message is the one that has the key."""
    task = a_task(app, "k")
    first = task.delay()
    task.apply_async(task_id=first.id, headers=Header(first.id, 0, times=1).as_headers())
    task.apply_async(retries=1)
    assert queued() == 3


@pytest.mark.parametrize("carried", [Header("of another task", 0, times=1).as_headers(), {"only_one": "by others"}])
def test_headers_copied_from_another_message_do_not_make_a_call_unique(app: Celery, queued: Any, carried: Any) -> None:
    task = a_task(app, "k")
    answers = [task.apply_async(headers=carried) for _ in range(5)]
    assert len(set(answers)) == queued() == 1


def test_what_is_sent_with_a_connection_or_to_another_queue(app: Celery, queued: Any, prefix: str) -> None:
    task = a_task(app, "k-{value}")
    first = task.apply_async((1,), queue=f"{prefix}elsewhere", headers={"own": 1}, ignore_result=True)
    assert queued("elsewhere") == 1
    with app.connection_for_write() as connection:
        assert task.apply_async((1,), connection=connection) == first
        task.apply_async((2,), connection=connection)
    with app.producer_pool.acquire(block=True) as producer:
        assert task.apply_async((1,), producer=producer) == first
        task.apply_async((3,), producer=producer)
    assert (queued("elsewhere"), queued()) == (1, 2)


def test_a_server_that_stalls_and_comes_back(app: Celery, server: RedisServer, queued: Any) -> None:
    """An acquire of unknown fate leaves no key that belongs to nobody."""
    hasty = a_task(app, "k", redis=f"{server.url}?socket_timeout=0.2")
    patient = a_task(app, "k", redis=f"{server.url}?socket_timeout={LIMIT:g}")
    server.pause()
    try:
        with pytest.raises(LockUnavailable):
            hasty.delay()
    finally:
        server.resume()
    assert queued() == 0
    assert eventually(lambda: patient.delay() and queued())
    assert patient.delay() == patient.delay()
    assert queued() == 1


# --- headers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["headers", "beside"])
def test_a_header_is_found_where_others_put_their_own_headers(where: str) -> None:
    header = Header("the-id", 0, times=3)
    request = SimpleNamespace(id="the-id", retries=0, headers={"sentry-trace": "x"})
    if where == "headers":
        request.headers = header.as_headers()
    else:
        vars(request).update(header.as_headers())
    assert header_of(request) == header


def test_a_copied_header_is_not_that_of_another_task() -> None:
    copied = Header("the-parent", 0, times=3, key="k", token="t", trigger=7).as_headers()  # noqa: S106
    assert header_of(SimpleNamespace(id="the-child", retries=0, headers=copied)) == Header("the-child", 0)


def test_headers_as_a_list_are_kept(app: Any, redis: Redis, prefix: str) -> None:
    task = a_task(app, "k")
    task.apply_async(headers=[("mine", 1)])
    (headers,) = messages(redis, prefix)
    assert headers["mine"] == 1
    token: Any = redis.get(f"{prefix}k")
    expected = Header(headers["id"], 0, key=f"{prefix}k", token=token.decode())
    assert headers["only_one"] == expected.as_headers()["only_one"]


# --- buffer_one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [0, 1])
def test_the_newest_is_numbered_though_it_brings_an_id(app: Any, redis: Redis, prefix: str, replacement: int) -> None:
    task = a_task(app, "k", when_busy=buffer_one())
    task.apply_async((1,), task_id="mine", replaced_task_nesting=replacement)
    task.delay(2)
    first, second = messages(redis, prefix)
    assert first["id"] == "mine"
    assert 0 < first["only_one"]["trigger"] < second["only_one"]["trigger"]
    trigger = first["only_one"]["trigger"]
    expected = Header("mine", 0, key=f"{prefix}k", trigger=trigger, replacement=replacement)
    assert first["only_one"] == expected.as_headers()["only_one"]


def test_one_that_brings_an_id_is_published_though_its_like_waits(app: Any, redis: Redis, prefix: str) -> None:
    task = a_task(app, "k", when_busy=buffer_one())
    task.delay(1)
    task.apply_async((1,), task_id="mine")
    assert len(messages(redis, prefix)) == 2


def test_one_that_has_expired_is_waited_for_no_more(app: Any, redis: Redis, prefix: str) -> None:
    task = a_task(app, "k", when_busy=buffer_one())
    first = task.apply_async(expires=6000)
    assert task.delay() == first
    triggers = f"{{{prefix}k}}:triggers"
    ((until, microseconds),) = redis.zscan_iter(triggers, match="until:*")
    assert lives_for(6000, microseconds / 1e6 - time.time())
    redis.zadd(triggers, {until: microseconds - 6000e6})  # as if it had been queued so much earlier
    assert task.delay() != first
    assert len(messages(redis, prefix)) == 2


# --- a task's own apply_async ------------------------------------------------------------------------------------


class OwnId(Task):  # type: ignore[misc]
    """Sends under an id of its own."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        return parent.apply_async(*args, **{**options, "task_id": f"own-{uuid4()}"})


class Never(Task):  # type: ignore[misc]
    """Sends nothing."""

    abstract = True

    def apply_async(self, *_args: Any, **_options: Any) -> Any:
        return None


def test_the_key_has_the_id_that_was_published(app: Any, held: Any) -> None:
    task = a_task(app, "k-{value}", celery={"base": OwnId})
    for value, expires in ((1, None), (2, 29)):  # less than the 30 s for which it is taken until it is published
        first = task.apply_async((value,), expires=expires)
        assert first.id.startswith("own-")
        holder = held(f"k-{value}")
        assert (holder.task_id, holder.state, holder.attempt) == (first.id, "queued", 0)
        assert task.delay(value) == first


def test_what_was_not_published_is_not_waited_for_an_hour(app: Any, redis: Redis, prefix: str) -> None:
    task = a_task(app, "k", celery={"base": Never})
    assert task.delay() is None
    assert 0 < redis.pttl(f"{prefix}k") <= 30_000


# --- positions of arguments --------------------------------------------------------------------------------


def test_options_that_celery_refuses(app: Any, redis: Redis, prefix: str) -> None:
    task = a_task(app, "k")
    with pytest.raises(TypeError):
        task.apply_async((), {}, *[None] * 6)
    with pytest.raises(TypeError):
        task.apply_async((), {}, None, task_id="x")
    assert not redis.exists(f"{prefix}k")
    task.delay()
    with pytest.raises(TypeError, match="list or tuple"):
        task.apply_async("ab")


def test_options_by_their_position(app: Any, redis: Redis, prefix: str) -> None:
    task = a_task(app, "k-{value}")
    after, instead = (app.task(other, name=name, shared=False) for name in ("after", "instead"))
    with app.producer_pool.acquire(block=True) as producer:
        task.apply_async((1,), {"more": 2}, "mine", producer, after.s(), instead.s(), "shadow")
    (headers,) = messages(redis, prefix)
    assert (headers["id"], headers["shadow"]) == ("mine", "shadow")
    message: Any = json.loads(redis.lindex(f"{prefix}queue", 0) or "")
    args, kwargs, embedded = json.loads(base64.b64decode(message["body"]))
    assert (args, kwargs) == ([1], {"more": 2})
    assert [embedded[name][0]["task"] for name in ("callbacks", "errbacks")] == ["after", "instead"]


# --- trouble in the moment when it begins ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [fail, carry_on])
def test_the_key_of_a_task_that_could_not_ask_for_it_is_free_when_the_server_is_back(
    app: Any, queue: Any, redis: Redis, redis_url: str, prefix: str, policy: Any
) -> None:
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        task = a_task(app, "k", lease=1, when_down=policy)
        app.finalize()
        task.delay()
        with proxy.refused():
            result = queue.deliver(queue.take())
            assert ("LockUnavailable" in str(result)) == (policy is fail)
            assert redis.exists(f"{prefix}k")
        assert eventually(lambda: not redis.exists(f"{prefix}k"))
        assert eventually(lambda: not renewal._renewer.pending_releases)  # it is not looked for again


def test_a_newest_task_that_could_not_ask_for_its_key_is_no_longer_the_one_that_waits(
    app: Any, queue: Any, redis_url: str
) -> None:
    """Else an equal call would be taken for its duplicate, and nothing would run."""
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        task = a_task(app, "k", lease=1, when_busy=buffer_one())
        app.finalize()
        first = task.delay()
        assert task.delay() == first
        with proxy.refused():
            queue.deliver(queue.take())
        assert eventually(lambda: not renewal._renewer.pending_releases)
        assert task.delay() != first


# --- trouble while it is queued ----------------------------------------------------------------------------------


@contextmanager
def about_to_publish(task: Any, do: Callable[[], None]) -> Iterator[None]:
    """Do something between the moment when the key is taken and the one when the message is sent."""

    def heed(**_: Any) -> None:
        do()

    before_task_publish.connect(heed, sender=task.name, weak=False)
    try:
        yield
    finally:
        before_task_publish.disconnect(heed, sender=task.name)


def test_a_key_that_cannot_be_given_back_is_in_the_background(
    app: Any, redis: Redis, redis_url: str, prefix: str
) -> None:
    """No expiry explains within this test that it is free."""
    with Proxy(redis_url) as proxy, configure(redis=proxy.url), ExitStack() as stack:
        task = a_task(app, "k")

        def refuse() -> None:
            assert redis.pexpire(f"{prefix}k", 600_000)
            stack.enter_context(proxy.refused())
            raise KeyboardInterrupt

        with about_to_publish(task, refuse), pytest.raises(KeyboardInterrupt):
            task.delay()
        assert redis.exists(f"{prefix}k")
        stack.close()
        assert eventually(lambda: not redis.exists(f"{prefix}k"))
        assert eventually(lambda: not renewal._renewer.pending_releases)  # it is not looked for any more


def test_a_call_that_is_interrupted_before_it_knows_that_it_has_the_key(
    app: Any, redis: Redis, redis_url: str, prefix: str, queued: Any
) -> None:
    def interrupt() -> None:
        assert eventually(lambda: redis.pexpire(f"{prefix}k", 600_000))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    with Proxy(redis_url) as proxy, configure(redis=f"{proxy.url}?socket_timeout={LIMIT:g}"):
        task = a_task(app, "k")
        proxy.lose_reply("SET", then="hang")
        with ThreadPoolExecutor(1) as pool:
            before = signal.signal(signal.SIGUSR1, signal.default_int_handler)  # SIGINT is ignored by background jobs
            try:
                interrupted = pool.submit(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    task.delay()
                interrupted.result()
            finally:
                signal.signal(signal.SIGUSR1, before)
        assert eventually(lambda: not redis.exists(f"{prefix}k"))
    assert queued() == 0


def test_a_key_that_is_not_lengthened_is_told(
    app: Any, redis: Redis, prefix: str, queued: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the server refuses, and nobody may ever come to know."""
    task = a_task(app, "k")

    def spoil() -> None:
        redis.delete(f"{prefix}k")
        redis.rpush(f"{prefix}k", "no string")

    with about_to_publish(task, spoil), caplog.at_level("WARNING"):
        assert isinstance(task.delay(), AsyncResult)
    assert queued() == 1
    assert f"{prefix}k is queued, and may be queued again in 30 s" in caplog.text


def test_a_key_that_is_not_lengthened_is_not_told_as_wrong_where_the_server_went_away(
    app: Any, redis_url: str, queued: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(redis_url) as proxy, configure(redis=proxy.url), ExitStack() as stack:
        task = a_task(app, "k")
        caplog.set_level("DEBUG", "only_one")
        with about_to_publish(task, lambda: stack.enter_context(proxy.refused())):
            assert isinstance(task.delay(), AsyncResult)
    assert queued() == 1
    (told,) = (record for record in caplog.records if "may be queued again" in record.getMessage())
    assert told.levelname == "DEBUG"


def test_the_newest_is_queued_though_nobody_comes_to_know(app: Any, redis_url: str, queued: Any) -> None:
    with Proxy(redis_url) as proxy, configure(redis=proxy.url), ExitStack() as stack:
        task = a_task(app, "k", when_busy=buffer_one())
        with about_to_publish(task, lambda: stack.enter_context(proxy.refused())):
            assert isinstance(task.delay(1), AsyncResult)
        stack.close()
        assert queued() == 1


def test_the_newest_is_like_no_other_if_it_cannot_be_compared(app: Any, queued: Any) -> None:
    task = a_task(app, "k", when_busy=buffer_one())
    for number in (1, 2):
        task.apply_async((object(),), serializer="pickle")
        assert queued() == number


def test_who_gets_the_newest_is_told_as_busy(app: Any, prefix: str) -> None:
    task = a_task(app, "k", when_busy=buffer_one())
    told: list[Any] = []
    end = subscribe(told.append)
    try:
        task.delay(1)
        assert told == []
        task.delay(1)
    finally:
        end()
    assert told == [Busy(f"{prefix}k", task.name, b"")]
