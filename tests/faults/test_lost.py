"""Keys that are lost while a run goes on: what `when_lost` is told, when, and by whom.

A loss is noticed when it is the turn of a lease, which here comes when the test says so. So nothing depends on how
fast the machine is; when it is the turn of a lease is in `lock/test_renewal.py`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from only_one import ConfigurationError, LockLost, Lost, current_lock, fail, only_one, subscribe
from only_one.clock import now
from rigs.waiting import LIMIT, eventually
from tests.decorated import decorated_async
from tests.faults.programs import Running
from tests.interruptions import raises
from tests.renewal import is_renewed, renew_now

LONG = 3600.0
"""Seconds that no test takes, so that no key expires by itself."""

HAND = b"by hand \xff"

counted = pytest.mark.skipif(sys.version_info < (3, 11), reason="cancellations are counted from Python 3.11")


class Told:
    """A callable for `when_lost` that notes each call.

    Attributes:
        losses: what it was told.
        threads: in which threads, and whether the process ends without waiting for these.
    """

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.losses: list[LockLost] = []
        self.threads: list[tuple[str, bool]] = []
        self._then = then

    def __call__(self, lost: LockLost) -> object:
        thread = threading.current_thread()
        self.threads.append((thread.name, thread.daemon))
        self.losses.append(lost)
        return self._then()


# A callable; that it is told once of a key that is taken away is in `test_paused.py`, at the end of its timeout in
# `test_wall_clock.py`


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, ConfigurationError])
def test_a_callable_that_takes_its_time_and_raises_harms_nobody(
    redis: Any,
    key: str,
    kind: type[Running],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    error: type[BaseException],
) -> None:
    """And it is told, though a hook that was told before it has raised. It may not return a coroutine."""
    goes_on = threading.Event()

    def explode() -> object:
        goes_on.wait()
        if error is ConfigurationError:
            return asyncio.sleep(0)
        raise error

    request.addfinalizer(subscribe(lambda event: isinstance(event, Lost) and raises(error)()))
    told = Told(explode)
    with kind(lease=LONG, when_lost=told) as run, Running("other", lease=LONG) as other:
        redis.delete(key)
        renew_now(run.lock)
        assert eventually(lambda: told.losses)
        assert is_renewed(other.lock)
        assert [each.exc_info and each.exc_info[0] for each in caplog.records] == [None, error]
        caplog.clear()
        goes_on.set()
        assert eventually(lambda: caplog.records)
    assert len(told.losses) == 1
    (record,) = caplog.records
    assert record.getMessage() == f"when_lost of {kind.__module__}.{kind.__name__}._decorated.<locals>.work failed"
    assert record.exc_info is not None
    assert record.exc_info[0] is error


def test_a_callable_is_told_of_what_only_the_release_finds(
    redis: Any, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By a thread of its own, too, for which the call waits; and it is logged once, with what is stored there."""
    ended: list[bool] = []
    told = Told(lambda: ended.append(threading.Event().wait(0.2)))
    with Running(lease=LONG, when_lost=told):
        redis.set(key, HAND)
    assert ended == [False]
    assert [(lost.key, lost.reason, lost.value) for lost in told.losses] == [(key, "taken", "by hand \\xff")]
    assert told.threads == [("only_one-lost", False)]
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert redis.get(key) == HAND


@pytest.mark.parametrize("reason", ["taken", "overrun"])
def test_a_callable_that_is_told_at_the_end_does_not_hold_up_the_event_loop(redis: Any, key: str, reason: str) -> None:
    goes_on, was_woken = threading.Event(), []
    told = Told(lambda: was_woken.append(goes_on.wait(LIMIT)))

    @only_one("k", timeout=LONG, when_lost=told)
    async def work() -> str:
        if reason == "taken":
            redis.set(key, HAND)
        else:  # and the thread that renews has not seen it yet
            current_lock().expires_at = current_lock().ends_at = now()
        return "done"

    assert asyncio.run(work()) == "done"
    assert eventually(lambda: told.threads == [("only_one-lost", False)])  # so a process that ends waits for it
    goes_on.set()
    assert eventually(lambda: was_woken == [True])
    assert [lost.reason for lost in told.losses] == [reason]


# fail


def test_a_loss_that_is_told_when_the_event_loop_is_closed_is_no_error(redis: Any, key: str) -> None:
    is_closed = threading.Event()
    unsubscribe = subscribe(lambda event: isinstance(event, Lost) and is_closed.wait(LIMIT))

    with pytest.raises(LockLost):
        decorated_async(lambda: redis.set(key, HAND), lease=LONG, when_lost=fail)()
    is_closed.set()
    assert eventually(lambda: not are_telling())
    unsubscribe()


@pytest.mark.parametrize(("ends", "raised"), [(lambda: "done", LockLost), (raises(KeyError), KeyError)])
def test_a_loss_that_only_the_release_finds_fails_the_run_and_replaces_no_exception(
    redis: Any, key: str, kind: type[Running], ends: Callable[[], object], raised: type[Exception]
) -> None:
    with kind(lease=LONG, when_lost=fail, ends=ends) as run:
        redis.set(key, HAND)
    assert isinstance(run.result, raised)


def lose(redis: Any, key: str) -> None:
    """Take the key of the run that calls this away, and have it learn of that."""
    redis.delete(key)
    renew_now(current_lock())


def are_telling() -> bool:
    """Whether a run is about to be told of a loss, and cancelled."""
    return any(each.name == "only_one-lost" for each in threading.enumerate())


class Own(Exception):
    """What a run raises in place of its cancellation."""


async def is_cancelled_from_outside(_redis: Any = None, _key: str = "") -> None:
    task: Any = asyncio.current_task()
    task.cancel()
    await asyncio.sleep(LIMIT)


async def is_cancelled_from_outside_too(redis: Any, key: str) -> None:
    try:
        await is_cancelled(redis, key)
    finally:
        await is_cancelled_from_outside()


async def learns_at_its_end(_redis: Any, _key: str) -> None:
    current_lock().expires_at = now()


async def learns_just_before_its_end(redis: Any, key: str) -> None:
    lose(redis, key)
    # And it does not let the loop cancel it.
    assert eventually(lambda: not current_lock().on_loss and not are_telling())


async def is_cancelled(redis: Any, key: str) -> None:
    lose(redis, key)
    await asyncio.sleep(LIMIT)


async def raises_another(redis: Any, key: str) -> None:
    try:
        await is_cancelled(redis, key)
    except asyncio.CancelledError:
        raise Own from None


async def returns(redis: Any, key: str) -> None:
    with suppress(asyncio.CancelledError):
        await is_cancelled(redis, key)


@pytest.mark.parametrize(
    ("run", "raised", "left"),
    [
        (learns_at_its_end, LockLost, 0),
        (learns_just_before_its_end, LockLost, 0),
        (is_cancelled, LockLost, 0),
        pytest.param(raises_another, Own, 0, marks=counted),
        pytest.param(returns, LockLost, 0, marks=counted),
        (is_cancelled_from_outside, asyncio.CancelledError, 1),
        pytest.param(is_cancelled_from_outside_too, asyncio.CancelledError, 1, marks=counted),
    ],
)
@pytest.mark.parametrize("suppressed", [0, pytest.param(1, marks=counted)])
def test_a_run_that_has_lost_its_key_leaves_no_cancellation_behind_but_that_from_outside(
    redis: Any, key: str, run: Callable[..., Any], raised: type[BaseException], left: int, suppressed: int
) -> None:
    """Its caller would be cancelled, or a `timeout()` or `TaskGroup` would think that it was cancelled from outside.

    Whether the caller's task has suppressed a cancellation before is no matter, though that is counted still.
    """
    decorated: Any = only_one("k", lease=LONG, when_lost=fail)(run)

    async def main() -> int:
        task: Any = asyncio.current_task()
        for _ in range(suppressed):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        with pytest.raises(raised):
            await decorated(redis, key)
        assert await asyncio.to_thread(eventually, lambda: not are_telling())
        await asyncio.sleep(0)  # nothing is left to be cancelled
        return int(task.cancelling()) if sys.version_info >= (3, 11) else suppressed + left

    assert asyncio.run(main()) == suppressed + left
    assert not redis.exists(key)
