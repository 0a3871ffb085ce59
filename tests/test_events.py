"""Events: hooks get them, and the log has them if there are no hooks."""

# ruff: noqa: ARG001 - fixtures that configure something are asked for by name

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from redis import Redis

from only_one import carry_on, fail, skip, subscribe
from only_one import events as only_one_events
from only_one.errors import AlreadyRunning, LockUnavailable
from only_one.events import Acquired, Busy, Lost, Released
from only_one.keys.digest import digest
from only_one.lock.token import TokenFactory
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.decorated import CLOSED, Decorate, both, decorated, events
from tests.decorated import Busy as KeyIsBusy
from tests.interruptions import handled, raises

Log = pytest.LogCaptureFixture


def work(deeper: int = 0) -> None:
    """Something to decorate."""


NAME = f"{__name__}.work"
OTHER = int(f"1{os.getpid()}")
"""Of a process that there is not."""


def kinds(seen: list[Any]) -> list[str]:
    return [type(event).__name__ for event in seen]


def the(kind: type, seen: list[Any]) -> Any:
    """The one event of its kind; a loss is emitted by a thread of its own."""
    assert eventually(lambda: any(type(event) is kind for event in seen))
    (event,) = (event for event in seen if type(event) is kind)
    return event


# --- which events there are --------------------------------------------------------------------------------------


@both
def test_a_run_a_skip_and_a_server_that_is_down(redis: Redis, prefix: str, caplog: Log, decorate: Decorate) -> None:
    """The log has them, too: a skip with the holder, the rest for debugging, and no argument."""

    def work(a: str) -> None:
        assert kinds(seen) == ["Acquired"]
        time.sleep(0.02)
        assert decorated(work, "{a:md5}")(a) is None
        raise LookupError

    caplog.set_level(logging.DEBUG)
    with events() as seen:
        with pytest.raises(LookupError):
            decorate(work, "{a:md5}")("hunter2")
        decorate(work, "{a:md5}", redis=CLOSED, when_down=skip)("hunter2")
    acquired, busy, released, down = seen
    key, name = prefix + digest("hunter2"), f"{__name__}.{work.__qualname__}"
    assert kinds(seen) == ["Acquired", "Busy", "Released", "Down"]
    assert acquired.holder.name == busy.holder.name == name
    assert acquired.holder.pid == busy.holder.pid == os.getpid()
    assert released.outcome == "held"
    assert 0.02 <= released.seconds < LIMIT
    assert isinstance(down.error, LockUnavailable)
    for event in seen:
        record = logged(caplog, type(event).__name__)
        assert record.levelno == (logging.INFO if event is busy else logging.DEBUG)
        assert key in record.getMessage()
        assert vars(record)["only_one_key"] == event.key == key
        assert vars(record)["only_one_name"] == event.name == name
    assert logged(caplog, "Acquired").getMessage() == f"{name} holds {key}"
    assert f"is taken by {name}, pid {os.getpid()} on " in logged(caplog, "Busy").getMessage()
    assert "hunter2" not in caplog.text


@both
@pytest.mark.parametrize(
    ("change", "reason", "outcome", "pid"),
    [
        (lambda redis, key, _: redis.delete(key), "deleted", "gone", None),
        (lambda redis, key, _: redis.delete(key) and redis.rpush(key, "a list"), "taken", "taken", None),
        (lambda redis, key, token: redis.set(key, token.replace(b'"pid":', b'"pid":1')), "taken", "taken", OTHER),
    ],
    ids=["it is deleted", "another type", "another run"],
)
def test_a_loss(
    redis: Redis, prefix: str, caplog: Log, decorate: Decorate, change: Any, reason: str, outcome: str, pid: Any
) -> None:
    """Of which the run learns at its end; what a renewal finds is in `lock/test_leases.py`."""

    def work() -> None:
        change(redis, f"{prefix}k", seen[0].token)

    with events() as seen:
        decorate(work, timeout=600)()
        lost = the(Lost, seen)
    assert sorted(kinds(seen)) == ["Acquired", "Lost", "Released"]
    assert (lost.key, lost.name, lost.reason) == (f"{prefix}k", f"{__name__}.{work.__qualname__}", reason)
    assert (lost.holder and lost.holder.pid) == pid
    assert the(Released, seen).outcome == outcome
    record = logged(caplog, "Lost")
    assert record.levelno == logging.WARNING
    assert all(part in record.getMessage() for part in (lost.key, lost.name, f"({reason})"))
    assert vars(record)["only_one_key"] == lost.key


def test_a_server_that_goes_away_during_a_run(server: RedisServer) -> None:
    def work() -> str:
        server.kill()
        return "result"

    with events() as seen:
        assert decorated(work, timeout=60)() == "result"
    assert kinds(seen) == ["Acquired", "Released"]
    assert seen[1].outcome == "unknown"


# --- events and hooks --------------------------------------------------------------------------------------------


def test_hooks_are_called_in_the_thread_of_the_run(redis: Redis) -> None:
    threads: list[int] = []
    unsubscribe = subscribe(lambda _: threads.append(threading.get_ident()))
    with ThreadPoolExecutor(1, initializer=lambda: threads.append(threading.get_ident())) as pool:
        pool.submit(decorated(work)).result(LIMIT)
    unsubscribe()
    assert threads == threads[:1] * 3


def test_each_subscription_is_ended_by_itself(redis: Redis) -> None:
    first: list[Any] = []
    second: list[Any] = []
    hook = first.append
    ends: list[Callable[[], None]] = []
    ends.append(subscribe(lambda _: ends[0]()))  # it may end while it is called
    end_first, end_again, end_second = subscribe(hook), subscribe(hook), subscribe(second.append)
    for end in (list, end_first, end_first, end_again, end_second):
        end()
        decorated(work)()
    assert kinds(first) == ["Acquired", "Acquired", "Released", "Released"] + ["Acquired", "Released"] * 2
    assert kinds(second) == ["Acquired", "Released"] * 4


class Only(Enum):
    """Has a metaclass that can be called, as have Python's own names of signal handlers."""

    ONE = 1


def test_a_hook_that_raises_is_logged_and_never_fatal(redis: Redis, prefix: str, busy: KeyIsBusy, caplog: Log) -> None:
    def bad(event: Any) -> None:
        Only(2)

    with events() as before:
        unsubscribe = subscribe(bad)
        with events() as after:
            with busy("k"):
                assert decorated(lambda: "ran", when_busy=lambda _: "busy")() == "busy"
            assert decorated(lambda: "ran")() == "ran"
            assert decorated(lambda: "ran", redis=CLOSED, when_down=carry_on)() == "ran"
            decorated(lambda: redis.delete(f"{prefix}k"), timeout=600)()
            the(Lost, after)
        unsubscribe()
    assert kinds(after) == kinds(before)
    assert set(kinds(after)) == {"Acquired", "Busy", "Released", "Down", "Lost"}
    records = [record for record in caplog.records if record.exc_info and record.exc_info[0] is ValueError]
    assert len(records) == len(after)
    assert all(record.levelno >= logging.WARNING for record in records)
    assert all(record.name.startswith("only_one") for record in records)
    assert [record.getMessage() for record in records] == [f"a hook failed on {kind}: {bad}" for kind in kinds(after)]


@pytest.mark.parametrize("told_by", ["subscribe", "the log"])
def test_what_gets_events_and_makes_a_call_does_not_get_the_events_of_that(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: Log, told_by: str
) -> None:
    """It would call itself without end; others get them."""
    told: list[Any] = []

    def tell(event: Any) -> bool:
        told.append(event)
        if len(told) < 10:
            decorated(work, "of the hook")()
        return True

    caplog.set_level(logging.DEBUG, "only_one")
    if told_by == "the log":
        monkeypatch.setattr(only_one_events.logger, "filters", [tell])
    unsubscribe = subscribe(tell if told_by == "subscribe" else str)
    with events() as seen:
        decorated(work)()
    unsubscribe()
    assert len(told) == 2
    assert kinds(seen) == ["Acquired", "Released", "Acquired", "Acquired", "Released", "Released"]


@pytest.mark.parametrize(
    ("ends", "error"),
    [(lambda: signal.raise_signal(signal.SIGUSR1), SoftTimeLimitExceeded), (sys.exit, SystemExit)],
    ids=["signal", "exit"],
)
def test_what_ends_a_run_or_the_process_in_a_hook_reaches_the_caller_and_the_key_is_freed(
    redis: Redis, prefix: str, ends: Callable[[], None], error: type[BaseException]
) -> None:
    """A hook has not failed."""

    def hook(event: Any) -> None:
        if isinstance(event, Acquired):
            ends()

    unsubscribe = subscribe(hook)
    with handled(raises(SoftTimeLimitExceeded), signal.SIGUSR1), pytest.raises(error):
        decorated(lambda: "ran")()
    unsubscribe()
    assert eventually(lambda: not redis.exists(f"{prefix}k"))


# --- the log -----------------------------------------------------------------------------------------------------


def logged(caplog: Log, event: str) -> logging.LogRecord:
    """The one record of this kind of event."""
    (record,) = (record for record in caplog.records if getattr(record, "only_one_event", None) == event)
    assert record.name == "only_one"
    return record


@pytest.mark.parametrize(
    ("state", "limit", "waited", "free"),
    [
        ("running", 600, 100, "free in 500.0 s at the latest, unless it is extended"),
        ("queued", 600, 100, "free in 500.0 s at the latest"),
        ("running", 600, 1000, "free when its key expires"),
        ("running", None, 100, "free when it ends"),
        ("running", None, -100, "free when it ends"),  # on a machine whose clock is ahead
    ],
)
def test_a_skip_says_when_the_key_will_be_free(
    monkeypatch: pytest.MonkeyPatch, state: str, limit: float | None, waited: int, free: str
) -> None:
    began = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: began)
    monkeypatch.setattr(time, "time", lambda: began / 10**9 + waited)
    busy = Busy("k", "f", TokenFactory("g", state=state).token(limit))
    assert str(busy).endswith(f", {state} for {max(0, waited)}.0 s, {free}")


@pytest.fixture
def first_skip(redis: Redis, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call is the first of this process that finds its key busy."""
    monkeypatch.setattr(only_one_events, "_warned_of", set())
    redis.set(f"{prefix}k", "a stranger")


@pytest.mark.parametrize(
    ("level", "of_handler", "propagates", "is_told"),
    [
        (logging.WARNING, logging.NOTSET, True, True),
        (logging.INFO, logging.WARNING, False, True),
        (logging.INFO, logging.INFO, False, False),
        (logging.DEBUG, logging.WARNING, True, False),  # the one above shows it
    ],
)
def test_the_first_skip_of_a_process_that_would_not_show_it_is_a_warning(
    first_skip: None, prefix: str, caplog: Log, monkeypatch: pytest.MonkeyPatch, level: int, of_handler: int, *,
    propagates: bool, is_told: bool,
) -> None:  # fmt: skip
    seen: list[logging.LogRecord] = []
    handler = logging.Handler(of_handler)
    handler.handle = lambda record: bool(seen.append(record))  # type: ignore[func-returns-value,method-assign]
    monkeypatch.setattr(only_one_events.logger, "propagate", propagates)
    monkeypatch.setattr(only_one_events.logger, "handlers", [handler])
    caplog.set_level(level, "only_one")
    with pytest.raises(AlreadyRunning):
        decorated(work, when_busy=fail)()  # which is seen
    before = len(seen)
    assert [decorated(work)() for _ in range(3)] == [None] * 3
    told = [record for record in seen[before:] if "(only this first skip" in record.getMessage()]
    assert len(told) == is_told
    for record in told:
        assert record.getMessage().startswith(f"{NAME} did not run: {prefix}k is taken by")
        assert record.getMessage().endswith(": set the level of the log to INFO to see all of them)")
        assert vars(record)["only_one_event"] == "Busy"


@both
def test_a_filter_that_fails_does_not_fail_a_call_nor_replace_its_result(
    first_skip: None, redis: Redis, prefix: str, redis_url: str, caplog: Log, monkeypatch: Any, decorate: Decorate
) -> None:
    """A first skip, and a call of a server that is new to the process, with another's list at the key at its end."""

    def work() -> str:
        redis.delete(f"{prefix}k")
        redis.rpush(f"{prefix}k", "another's")
        return "done"

    def fails(record: logging.LogRecord) -> bool:
        """As one outside of its web request."""
        asked.append(record.getMessage())
        raise ValueError

    asked: list[str] = []
    monkeypatch.setattr(only_one_events.logger, "filters", [fails])
    assert decorate(work)() is None
    redis.delete(f"{prefix}k")
    caplog.set_level(logging.DEBUG, "only_one")
    assert decorate(work, redis=f"{redis_url}?client_name={uuid4().hex}")() == "done"
    for words in ("only this first skip", "locks are kept in", f"{prefix}k could not be released: WRONGTYPE"):
        assert any(words in text for text in asked)


def test_an_exception_of_a_signal_handler_in_the_log_of_the_first_skip_reaches_the_caller(
    first_skip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(only_one_events.logger, "filters", [lambda _record: signal.raise_signal(signal.SIGUSR1)])
    with handled(raises(SoftTimeLimitExceeded), signal.SIGUSR1), pytest.raises(SoftTimeLimitExceeded):
        decorated(work)()
