"""What happened is told to whoever listens, and to the log if nobody does."""

# ruff: noqa: ARG001 - fixtures that configure something are asked for by name

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from only_one import (
    Acquired,
    Busy,
    Down,
    LockLost,
    Lost,
    Reclaimed,
    Released,
    carry_on,
    configure,
    current_lock,
    fail,
    only_one,
    skip,
    subscribe,
)
from only_one.call import locked_call
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Running
from tests.renewal import later, renew_now

KeyIsBusy = Callable[..., AbstractContextManager[None]]
CLOSED = "redis://127.0.0.1:1/0"


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """What has happened since the test began."""
    seen: list[Any] = []
    unsubscribe = subscribe(seen.append)
    yield seen
    unsubscribe()


def kinds(events: list[Any]) -> list[type]:
    """The classes of events."""
    return [type(event) for event in events]


def wait_until_lost() -> str:
    """Inside a run: wait until it knows that its key is not its own any more; the reason."""
    lock = current_lock()
    assert eventually(lambda: lock.reason), "it never learnt of the loss"
    with pytest.raises(LockLost) as raised:
        lock.ensure_held()
    assert raised.value.key == lock.key
    return raised.value.reason


def overrun() -> str:
    """Inside a run whose `timeout` is less than a thousand seconds: wait until they are over."""
    with later(1000):
        return wait_until_lost()


# --- what is told ------------------------------------------------------------------------------------------------


def test_a_run(redis: Redis, prefix: str, events: list[Any]) -> None:
    @only_one("k")
    def work() -> None:
        assert kinds(events) == [Acquired]
        time.sleep(0.02)
        raise LookupError

    with pytest.raises(LookupError):
        work()
    acquired, released = events
    name = f"{__name__}.{work.__qualname__}"
    assert (type(acquired), acquired.key, acquired.name) == (Acquired, f"{prefix}k", name)
    assert acquired.holder.pid == os.getpid()
    assert acquired.holder.name == name
    assert (type(released), released.key, released.name, released.outcome) == (Released, f"{prefix}k", name, "held")
    assert 0.02 <= released.seconds < LIMIT


def test_an_async_run(redis: Redis, prefix: str, events: list[Any]) -> None:
    @only_one("k")
    async def work(deeper: int) -> None:
        if deeper:
            await work(deeper - 1)

    asyncio.run(work(1))
    assert kinds(events) == [Acquired, Busy, Released]
    assert {event.key for event in events} == {f"{prefix}k"}
    assert {event.name for event in events} == {f"{__name__}.{work.__qualname__}"}


def test_a_skip(redis: Redis, prefix: str, busy: KeyIsBusy, events: list[Any]) -> None:
    def work() -> None: ...

    with busy("k"):
        events.clear()
        only_one("k")(work)()
        assert kinds(events) == [Busy]
    event: Any = events[0]
    assert event.key == f"{prefix}k"
    assert event.name == f"{__name__}.{work.__qualname__}"
    assert event.holder.pid == os.getpid()
    assert event.holder.name.endswith("hold_it")


def test_a_skip_behind_a_stranger(
    redis: Redis, prefix: str, events: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    redis.set(f"{prefix}k", b"\xffsomebody")
    assert only_one("k")(lambda: "ran")() is None
    (event,) = events
    assert type(event) is Busy
    assert event.holder is None
    assert f"{prefix}k" in told(caplog, "Busy").getMessage()


@pytest.mark.parametrize("when_down", [skip, carry_on])
def test_a_server_that_is_down(prefix: str, events: list[Any], when_down: Any) -> None:
    def work() -> None: ...

    only_one(work, key="k", redis=CLOSED, when_down=when_down)()
    (event,) = events
    assert type(event) is Down
    assert event.key == f"{prefix}k"
    assert event.name == f"{__name__}.{work.__qualname__}"
    assert event.error.key == f"{prefix}k"
    assert isinstance(event.error.__cause__, RedisError)


@pytest.mark.parametrize(
    ("options", "value", "reason", "outcome"),
    [
        ({"timeout": 600}, None, "overrun", "gone"),
        ({"timeout": 600, "lease": 60}, None, "overrun", "gone"),
        ({"lease": 600}, None, "deleted", "gone"),
        ({"lease": 600}, b"somebody else's", "taken", "taken"),
    ],
    ids=["overrun", "overrun though renewed", "deleted", "taken"],
)
def test_a_loss(
    redis: Redis, prefix: str, events: list[Any], options: Any, value: bytes | None, reason: str, outcome: str
) -> None:
    def work() -> str:
        if reason == "overrun":
            with later(1000):
                told = wait_until_lost()
        redis.delete(f"{prefix}k")
        if value:
            redis.set(f"{prefix}k", value)
        if reason != "overrun":
            renew_now(current_lock())
            told = wait_until_lost()
        return told

    assert only_one(work, key="k", **options)() == reason
    assert eventually(lambda: Lost in kinds(events))  # which is told by a thread of its own
    assert sorted(event.__name__ for event in kinds(events)) == ["Acquired", "Lost", "Released"]
    lost = next(event for event in events if isinstance(event, Lost))
    assert (lost.key, lost.reason, lost.holder) == (f"{prefix}k", reason, None)
    assert lost.name == f"{__name__}.{work.__qualname__}"
    assert next(event for event in events if isinstance(event, Released)).outcome == outcome


def test_a_loss_to_another_run_names_it(redis: Redis, prefix: str, events: list[Any]) -> None:
    def work() -> str:
        token = next(event for event in events if isinstance(event, Acquired)).token
        redis.set(current_lock().key, token.replace(b'"pid":', b'"pid":1'))
        renew_now(current_lock())
        return wait_until_lost()

    assert only_one("k", lease=600)(work)() == "taken"
    assert eventually(lambda: Lost in kinds(events))
    lost = next(event for event in events if isinstance(event, Lost))
    assert lost.holder is not None
    assert lost.holder.pid == int(f"1{os.getpid()}")


def test_a_server_that_goes_away_during_a_run(server: RedisServer, prefix: str, events: list[Any]) -> None:
    def work() -> str:
        server.kill()
        return "ran"

    assert only_one("k", timeout=60)(work)() == "ran"
    assert kinds(events) == [Acquired, Released]
    assert events[1].outcome == "unknown"


def test_a_run_whose_server_goes_away_learns_of_it(server: RedisServer, events: list[Any]) -> None:
    def work() -> str:
        server.kill()
        with later(100):
            return wait_until_lost()

    assert only_one("k", lease=60)(work)() == "expired"
    assert eventually(lambda: Lost in kinds(events))  # which is told by a thread of its own


def test_nothing_happens_when_switched_off(events: list[Any]) -> None:
    with configure(active=False):
        assert only_one("k")(lambda: "ran")() == "ran"
        lock: Any = only_one("k")(current_lock)()
        assert lock.token == b""
    assert Busy not in kinds(events)
    assert Down not in kinds(events)


def test_what_nobody_would_see_is_not_even_built(
    redis: Redis, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> str:
        redis.set(f"{prefix}k", "somebody else's")
        assert only_one("k", when_busy=lambda _: "busy")(lambda: "ran")() == "busy"
        return "ran"

    monkeypatch.setattr(locked_call, "emit", pytest.fail)
    caplog.set_level(logging.CRITICAL, "only_one")
    assert only_one("k", when_lost=fail)(lambda: "ran")() == "ran"
    with pytest.raises(LockLost):
        only_one("k", when_lost=fail)(work)()
    assert only_one(work, key="k", redis=CLOSED, when_down=lambda _: "down")() == "down"


# --- events and hooks --------------------------------------------------------------------------------------------


def test_events_are_frozen(redis: Redis, events: list[Any]) -> None:
    def work(deeper: int) -> None:
        covered(deeper - 1)

    covered = only_one("k")(work)
    covered(1)
    only_one(work, key="k", redis=CLOSED, when_down=skip)(1)
    assert kinds(events) == [Acquired, Busy, Released, Down]
    for event in [*events, Lost("k", "work", "deleted", ""), Reclaimed("k", "work", b"")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.key = "another"
        assert event.key in repr(event)


def test_hooks_are_called_in_the_thread_of_the_run(redis: Redis) -> None:
    def work() -> None: ...

    threads: list[int] = []
    unsubscribe = subscribe(lambda _: threads.append(threading.get_ident()))
    try:
        covered: Callable[[], None] = only_one("k")(work)
        run = threading.Thread(target=covered)
        run.start()
        run.join()
    finally:
        unsubscribe()
    assert threads == [run.ident] * 2


def test_subscribe_gives_what_unsubscribes(redis: Redis) -> None:
    first: list[Any] = []
    second: list[Any] = []
    end_first, end_second = subscribe(first.append), subscribe(second.append)
    covered = only_one("k")(lambda: None)
    covered()
    end_first()
    covered()
    end_second()
    end_second()
    covered()
    assert kinds(first) == [Acquired, Released]
    assert kinds(second) == [Acquired, Released] * 2


def test_the_same_hook_twice_is_ended_one_by_one(redis: Redis) -> None:
    seen: list[Any] = []
    hook = seen.append
    ends = [subscribe(hook), subscribe(hook)]
    ends[0]()
    ends[0]()
    only_one("k")(lambda: None)()
    ends[1]()
    assert kinds(seen) == [Acquired, Released]


def test_a_hook_may_unsubscribe_and_subscribe_while_it_is_called(redis: Redis, events: list[Any]) -> None:
    seen: list[Any] = []
    ends: list[Callable[[], None]] = []

    def hook(event: Any) -> None:
        ends.pop()()
        ends.append(subscribe(seen.append))

    ends.append(subscribe(hook))
    only_one("k")(lambda: None)()
    ends.pop()()
    assert kinds(events) == [Acquired, Released]
    assert kinds(seen)[-1] is Released


def test_a_hook_that_raises_is_logged_and_never_fatal(
    redis: Redis, busy: KeyIsBusy, events: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def bad(event: Any) -> None:
        raise LookupError(type(event).__name__)

    unsubscribe = subscribe(bad)
    told_later: list[Any] = []
    unsubscribe_later = subscribe(told_later.append)
    try:
        with busy("k"):
            assert only_one("k", when_busy=lambda _: "busy")(lambda: "ran")() == "busy"
        assert only_one("k")(lambda: "ran")() == "ran"
        assert only_one(lambda: "ran", key="k", redis=CLOSED, when_down=carry_on)() == "ran"
        assert only_one(overrun, key="k", timeout=600)() == "overrun"
        assert eventually(lambda: Lost in kinds(told_later))
    finally:
        unsubscribe()
        unsubscribe_later()
    assert kinds(told_later) == kinds(events)
    assert set(kinds(told_later)) == {Acquired, Busy, Released, Down, Lost}
    told = [record for record in caplog.records if record.exc_info and record.exc_info[0] is LookupError]
    assert len(told) == len(told_later)
    assert all(record.levelno >= logging.WARNING for record in told)
    assert all(record.name.startswith("only_one") for record in told)
    assert "bad" in told[0].getMessage()


# --- the log -----------------------------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture, event: str) -> logging.LogRecord:
    """The one record of this kind of event."""
    (record,) = (record for record in caplog.records if getattr(record, "only_one_event", None) == event)
    assert record.name == "only_one"
    return record


def test_a_skip_is_logged_with_the_holder_and_for_how_long(
    redis: Redis, prefix: str, busy: KeyIsBusy, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None: ...

    caplog.set_level(logging.INFO)
    with busy("k", timeout=1000):
        time.sleep(0.25)
        only_one("k")(work)()
    record = told(caplog, "Busy")
    message = record.getMessage()
    assert record.levelno == logging.INFO
    assert f"{__name__}.{work.__qualname__}" in message
    assert f"{prefix}k" in message
    assert "hold_it" in message
    assert str(os.getpid()) in message
    running, free = map(float, re.findall(r"(\d+\.\d+) s", message))
    assert running >= 0.2
    assert 1000 - LIMIT < free <= 1000
    assert re.search(r"free in [\d.]+ s at the latest", message)
    assert vars(record)["only_one_key"] == f"{prefix}k"
    assert vars(record)["only_one_name"] == f"{__name__}.{work.__qualname__}"


@pytest.mark.parametrize(
    ("ago", "free"), [(0, "at the latest, unless it is extended"), (1000, "free when its key expires")]
)
def test_a_skip_behind_a_run_that_is_extended_says_nothing_untrue(
    redis: Redis, caplog: pytest.LogCaptureFixture, ago: int, free: str
) -> None:
    """Its deadline, in the value that is stored at the key, stays what it was."""
    began = time.time_ns() - ago * 10**9
    caplog.set_level(logging.INFO)
    patch = pytest.MonkeyPatch()
    patch.setattr(time, "time_ns", lambda: began)
    with Running(timeout=600) as run:
        patch.undo()
        run.lock.extend(1000)
        only_one("k")(lambda: None)()
    assert told(caplog, "Busy").getMessage().endswith(free)


def test_a_skip_behind_a_run_without_an_end(redis: Redis, busy: KeyIsBusy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with busy("k", lease=600):
        only_one("k")(lambda: None)()
    message = told(caplog, "Busy").getMessage()
    assert "running for" in message
    assert "free when it ends" in message


def test_a_loss_is_logged_as_a_warning(
    redis: Redis, prefix: str, events: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    only_one("k", timeout=600)(overrun)()
    assert eventually(lambda: Lost in kinds(events))
    record = told(caplog, "Lost")
    assert record.levelno == logging.WARNING
    for part in (f"{prefix}k", f"{__name__}.overrun", "(overrun)"):
        assert part in record.getMessage()
    assert vars(record)["only_one_key"] == f"{prefix}k"


def test_the_rest_is_logged_for_debugging(redis: Redis, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None: ...

    caplog.set_level(logging.DEBUG)
    only_one("k")(work)()
    only_one(work, key="k", redis=CLOSED, when_down=skip)()
    for event in ("Acquired", "Released", "Down"):
        record = told(caplog, event)
        assert record.levelno == logging.DEBUG
        assert f"{prefix}k" in record.getMessage()
        assert vars(record)["only_one_key"] == f"{prefix}k"
        assert vars(record)["only_one_name"] == f"{__name__}.{work.__qualname__}"
    assert told(caplog, "Acquired").getMessage() == f"{__name__}.{work.__qualname__} holds {prefix}k"


def test_no_argument_is_logged(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    @only_one("{a:md5}")
    def work(a: str, *, deeper: bool = True) -> None:
        if deeper:
            work(a, deeper=False)

    work("hunter2")
    assert "work" in told(caplog, "Busy").getMessage()
    assert "hunter2" not in caplog.text
