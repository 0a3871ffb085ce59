"""Keys that are lost while a run goes on: what `when_lost` is told, when, and by whom."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from only_one import LockLost, current_lock, fail, only_one
from tests.faults.programs import SLACK, Running, RunningAsync
from tests.waiting import LIMIT, eventually

LEASE = 0.4
HAND = b"by hand"

Damage = Callable[[Any, str], object]


def delete(client: Any, key: str) -> None:
    client.delete(key)


def overwrite(client: Any, key: str) -> None:
    client.set(key, HAND)


damaged = pytest.mark.parametrize(
    ("damage", "reason"), [(delete, "deleted"), (overwrite, "taken")], ids=["deleted", "overwritten"]
)
both = pytest.mark.parametrize("kind", [Running, RunningAsync], ids=["sync", "async"])


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}k"


class Told:
    """A callable for `when_lost` that notes each call.

    Attributes:
        losses: what it was told.
        threads: in which threads.
        times: when, by the monotonic clock.
    """

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.losses: list[LockLost] = []
        self.threads: list[str] = []
        self.times: list[float] = []
        self._then = then

    def __call__(self, lost: LockLost) -> None:
        self.times.append(time.monotonic())
        self.threads.append(threading.current_thread().name)
        self.losses.append(lost)
        self._then()


# A callable


@both
@damaged
def test_a_callable_is_told_once_and_soon(
    redis: Any, key: str, kind: type[Running], damage: Damage, reason: str
) -> None:
    told = Told()
    with kind(lease=LEASE, when_lost=told) as run:
        damage(redis, key)
        begun = time.monotonic()
        assert eventually(lambda: told.losses)
        assert told.times[0] - begun < LEASE + SLACK
        assert not eventually(lambda: len(told.losses) > 1, 2 * LEASE)
        assert not run.lock.is_held
    assert run.result == "done"
    (lost,) = told.losses
    assert (lost.key, lost.reason, lost.value) == (key, reason, HAND.decode() if reason == "taken" else "")
    assert "only_one-leases" not in told.threads
    assert redis.get(key) == (HAND if reason == "taken" else None)


@both
@pytest.mark.parametrize("options", [{"timeout": 0.6}, {"timeout": 0.6, "lease": 0.3}], ids=["plain", "renewed"])
@pytest.mark.usefixtures("redis")
def test_a_callable_is_told_of_an_overrun_on_time(kind: type[Running], options: dict[str, Any]) -> None:
    told = Told()
    begun = time.monotonic()
    with kind(when_lost=told, **options) as run:
        taken = time.monotonic()
        assert eventually(lambda: told.losses)
        assert run.result is None  # it is still under way
    assert begun + 0.6 - 0.01 <= told.times[0] <= taken + 0.6 + SLACK
    assert [lost.reason for lost in told.losses] == ["overrun"]
    assert "only_one-leases" not in told.threads
    assert run.result == "done"


@pytest.mark.usefixtures("redis")
def test_a_timeout_that_was_lengthened_is_overrun_later() -> None:
    told = Told()
    begun = time.monotonic()
    with Running(when_lost=told, timeout=0.5) as run:
        run.lock.extend(0.7)
        assert eventually(lambda: told.losses)
    assert told.times[0] >= begun + 1.2 - 0.01
    assert [lost.reason for lost in told.losses] == ["overrun"]


@both
def test_a_callable_that_raises_harms_nobody(
    redis: Any, key: str, kind: type[Running], caplog: pytest.LogCaptureFixture
) -> None:
    def explode() -> None:
        msg = "when_lost's own trouble"
        raise ZeroDivisionError(msg)

    told = Told(explode)
    with kind(lease=LEASE, when_lost=told) as run, Running("other", lease=LEASE) as other:
        with caplog.at_level(logging.ERROR, "only_one"):
            redis.delete(key)
            assert eventually(lambda: caplog.records)
        assert not eventually(lambda: not other.lock.is_held or len(told.losses) > 1, 2 * LEASE)
    assert run.result == other.result == "done"
    assert len(told.losses) == 1
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_callable_that_takes_its_time_costs_no_other_its_lease(redis: Any, key: str) -> None:
    goes_on = threading.Event()
    told = Told(lambda: goes_on.wait(LIMIT))
    with Running(lease=LEASE, when_lost=told), Running("other", lease=LEASE) as other:
        redis.delete(key)
        assert eventually(lambda: told.losses)
        assert not eventually(lambda: not other.lock.is_held, 4 * LEASE)
        goes_on.set()
    assert other.result == "done"


@both
@pytest.mark.usefixtures("redis")
def test_a_callable_is_not_told_of_a_run_that_ends_in_time(kind: type[Running]) -> None:
    told = Told()
    with kind(timeout=LEASE, when_lost=told):
        pass
    assert not eventually(lambda: told.losses, 2 * LEASE)


def test_a_callable_is_told_of_what_only_the_release_finds(redis: Any, key: str) -> None:
    told = Told()
    with Running(lease=60, when_lost=told) as run:
        overwrite(redis, key)
    assert run.result == "done"
    assert [lost.reason for lost in told.losses] == ["taken"]
    assert redis.get(key) == HAND


# fail


@damaged
def test_a_sync_run_fails_when_it_returns(redis: Any, key: str, damage: Damage, reason: str) -> None:
    with Running(lease=LEASE, when_lost=fail) as run:
        damage(redis, key)
        assert eventually(lambda: not run.lock.is_held)
        assert run.result is None
    assert isinstance(run.result, LockLost)
    assert (run.result.key, run.result.reason) == (key, reason)
    assert redis.get(key) == (HAND if reason == "taken" else None)


def test_a_sync_run_fails_by_what_only_the_release_finds(redis: Any, key: str) -> None:
    with Running(lease=60, when_lost=fail) as run:
        overwrite(redis, key)
    assert isinstance(run.result, LockLost)
    assert run.result.reason == "taken"


@both
def test_an_exception_of_the_run_is_never_replaced(redis: Any, key: str, kind: type[Running]) -> None:
    def explode() -> None:
        msg = "the run's own"
        raise KeyError(msg)

    with kind(lease=60, when_lost=fail, ends=explode) as run:
        overwrite(redis, key)
    assert isinstance(run.result, KeyError)


@pytest.mark.usefixtures("redis")
def test_a_sync_run_that_overruns_fails() -> None:
    with Running(timeout=0.2, when_lost=fail) as run:
        assert eventually(lambda: not run.lock.is_held)
    assert isinstance(run.result, LockLost)
    assert run.result.reason == "overrun"


def cancelling() -> int:
    """How many cancellations this task has been asked for and has not been relieved of."""
    task: Any = asyncio.current_task()
    return int(task.cancelling()) if sys.version_info >= (3, 11) else 0


@damaged
def test_an_async_run_is_cancelled_at_once(redis: Any, key: str, damage: Damage, reason: str) -> None:
    seen: list[object] = []

    @only_one("k", lease=LEASE, when_lost=fail)
    async def run() -> None:
        damage(redis, key)
        seen.append(time.monotonic())
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(time.monotonic())
            raise

    async def main() -> tuple[LockLost, int]:
        with pytest.raises(LockLost) as caught:
            await run()
        left = cancelling()
        await asyncio.sleep(0)  # nothing is left to be cancelled
        return caught.value, left

    lost, left = asyncio.run(main())
    begun, cancelled = seen
    assert isinstance(begun, float)
    assert isinstance(cancelled, float)
    assert cancelled - begun < LEASE + SLACK
    assert (lost.key, lost.reason, left) == (key, reason, 0)
    assert redis.get(key) == (HAND if reason == "taken" else None)


@pytest.mark.usefixtures("redis")
def test_an_async_run_that_overruns_is_cancelled() -> None:
    @only_one("k", timeout=0.3, when_lost=fail)
    async def run() -> None:
        await asyncio.sleep(60)

    with pytest.raises(LockLost, match="overrun"):
        asyncio.run(run())


def test_only_the_run_that_lost_its_key_is_cancelled(redis: Any, prefix: str) -> None:
    async def work(number: int) -> int:
        await asyncio.sleep(3 * LEASE)
        assert current_lock().is_held
        return number

    run = only_one("{number}", lease=LEASE, when_lost=fail)(work)

    async def main() -> list[Any]:
        runs = [asyncio.ensure_future(run(number)) for number in range(5)]
        assert await asyncio.to_thread(eventually, lambda: redis.exists(f"{prefix}3"))
        redis.delete(f"{prefix}3")
        return await asyncio.gather(*runs, return_exceptions=True)

    results = asyncio.run(main())
    assert isinstance(results.pop(3), LockLost)
    assert results == [0, 1, 2, 4]


@pytest.mark.parametrize("lost", [False, True], ids=["held", "lost too"])
def test_a_cancellation_from_outside_stays_one(redis: Any, key: str, lost: Any) -> None:
    if lost and sys.version_info < (3, 11):
        pytest.skip("cancellations are counted from Python 3.11")
    cleaning = asyncio.Event()

    @only_one("k", lease=LEASE, when_lost=fail)
    async def run() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaning.set()
            await asyncio.sleep(0.05)

    async def main() -> None:
        task = asyncio.ensure_future(run())
        assert await asyncio.to_thread(eventually, lambda: redis.exists(key))
        if lost:
            redis.delete(key)
            await asyncio.wait_for(cleaning.wait(), LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert not redis.exists(key)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="cancellations are counted from Python 3.11")
@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_a_run_that_does_not_heed_its_cancellation_leaves_none_behind(redis: Any, key: str, ends: str) -> None:
    """Else a `timeout()` or `TaskGroup` around the call would think that it was cancelled from outside."""

    @only_one("k", lease=LEASE, when_lost=fail)
    async def run() -> str:
        redis.delete(key)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if ends == "raises":
                msg = "the run's own"
                raise KeyError(msg) from None
        return "done"

    async def main() -> int:
        with pytest.raises(LockLost if ends == "returns" else KeyError):
            await run()
        return cancelling()

    assert asyncio.run(main()) == 0
