"""Keys that are lost while a run goes on: what `when_lost` is told, when, and by whom.

A loss is noticed when it is the turn of a lease, which here comes when the test says so; `later` is when a timeout is
over. So nothing depends on how fast the machine is; how soon a loss is told is measured by the tests marked `soak`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from only_one import LockLost, carry_on, current_lock, fail, only_one
from only_one.clock import now
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Program, Running, RunningAsync
from tests.renewal import is_awaited, is_renewed, later, renew_now

LONG = 3600.0
"""Seconds that no test takes, so that no key expires by itself."""

HAND = b"by hand \xff"
SHOWN = "by hand \\xff"
"""The same in an error, whose text it becomes."""

KINDS = (Running, RunningAsync)

both = pytest.mark.parametrize("kind", KINDS, ids=["sync", "async"])


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


def test_a_callable_is_told_once(redis: Any, prefix: str) -> None:
    """Of a key that was deleted, and of one that was overwritten; while the run goes on, and not by what renews."""
    told = {f"{kind.__name__} {reason}": Told() for kind in KINDS for reason in ("deleted", "taken")}
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(
                (RunningAsync if "Async" in name else Running)(name, lease=LONG, when_lost=told[name])
            )
            for name in told
        }
        for name in told:
            redis.delete(prefix + name)
            if "taken" in name:
                redis.set(prefix + name, HAND)
        locks = [run.lock for run in runs.values()]
        renew_now(*locks)
        assert eventually(lambda: all(each.losses for each in told.values()))
        assert not any(lock.is_held for lock in locks)
        with Running("another", lease=LONG) as another:
            renew_now(*locks)
            assert is_renewed(another.lock)  # after which they would have been told again
        assert not any(run.result for run in runs.values())
    for name, each in told.items():
        assert runs[name].result == "done"
        (lost,) = each.losses
        value = SHOWN if "taken" in name else ""
        assert (lost.key, lost.reason, lost.value) == (prefix + name, name.split()[1], value)
        assert each.threads == ["only_one-lost"]
        assert redis.get(prefix + name) == (HAND if value else None)


TIMES: dict[str, dict[str, Any]] = {"plain": {"timeout": 600}, "renewed": {"timeout": 600, "lease": 400}}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.usefixtures("redis")
def test_a_callable_is_told_of_an_overrun(times: dict[str, Any]) -> None:
    """When the timeout is over and not before, later if it was lengthened, and not if the run has ended by then."""
    told = [Told() for _ in range(4)]
    with (
        Running("lengthened", when_lost=told[2], **times) as lengthened,
        Running("another", lease=LONG) as another,
        Running("sync", when_lost=told[0], **times) as run,
        RunningAsync("async", when_lost=told[1], **times) as run_async,
    ):
        with Running("in time", when_lost=told[3], **times):
            pass
        lengthened.lock.extend(1000)
        assert is_awaited(run.lock)
        assert is_awaited(run_async.lock)
        with later(350):
            for each in (run, run_async):  # renewed until the timeout is over, and no longer
                assert eventually(lambda lock=each.lock: lock.expires_at > lock.ends_at - 0.01)  # type: ignore[misc]
        with later(590):
            assert is_renewed(another.lock)
            assert not any(each.losses for each in told)
        with later(600):
            assert eventually(lambda: told[0].losses and told[1].losses)
            assert not run.lock.is_held
            assert run.result is run_async.result is None  # they are still under way
            assert is_renewed(another.lock)
            assert lengthened.lock.is_held
        assert [len(each.losses) for each in told] == [1, 1, 0, 0]
        with later(1600):
            assert eventually(lambda: told[2].losses)
    assert [lost.reason for each in told for lost in each.losses] == ["overrun"] * 3
    assert {thread for each in told for thread in each.threads} == {"only_one-lost"}
    assert run.result == run_async.result == lengthened.result == "done"


@both
def test_a_callable_that_raises_harms_nobody(
    redis: Any, key: str, kind: type[Running], caplog: pytest.LogCaptureFixture
) -> None:
    def explode() -> None:
        msg = "when_lost's own trouble"
        raise ZeroDivisionError(msg)

    told = Told(explode)
    with kind(lease=LONG, when_lost=told) as run, Running("other", lease=LONG) as other:
        with caplog.at_level(logging.ERROR, "only_one"):
            redis.delete(key)
            renew_now(run.lock)
            assert eventually(lambda: caplog.records)
        assert is_renewed(other.lock)
    assert run.result == other.result == "done"
    assert len(told.losses) == 1
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_callable_that_takes_its_time_costs_no_other_its_lease(redis: Any, key: str) -> None:
    goes_on = threading.Event()
    told = Told(goes_on.wait)
    with Running(lease=LONG, when_lost=told) as run, Running("other", lease=LONG) as other:
        redis.delete(key)
        renew_now(run.lock)
        assert eventually(lambda: told.losses)
        assert is_renewed(other.lock)
        goes_on.set()
    assert other.result == "done"


def test_a_callable_is_told_of_what_only_the_release_finds(redis: Any, key: str) -> None:
    """By a thread of its own, too, for which the call waits."""
    ended: list[bool] = []

    def take_some_time() -> None:
        time.sleep(0.2)
        ended.append(True)

    told = Told(take_some_time)
    with Running(lease=LONG, when_lost=told) as run:
        redis.set(key, HAND)
    assert ended
    assert run.result == "done"
    assert [(lost.reason, lost.value) for lost in told.losses] == [("taken", SHOWN)]
    assert told.threads == ["only_one-lost"]
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
    assert eventually(lambda: told.threads == ["only_one-lost"])
    goes_on.set()
    assert eventually(lambda: was_woken == [True])
    assert [lost.reason for lost in told.losses] == [reason]


ENDS = """
import asyncio, sys, time
import only_one

def tell(lost):
    time.sleep(0.5)
    print(lost.reason, flush=True)

@only_one.only_one("k", when_lost=tell)
async def work():
    lock = only_one.current_lock()
    lock.server.client.set(lock.key, "by hand")

only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])
asyncio.run(work())
"""


def test_a_process_that_ends_waits_for_a_callable_that_is_told_at_the_end(redis_url: str, prefix: str) -> None:
    with Program(ENDS, redis_url, prefix) as program:
        assert program.line() == "taken"


# fail


@pytest.mark.parametrize("policy", [carry_on, fail])
def test_a_loss_about_which_nothing_is_to_be_done_is_no_error(
    redis: Any, key: str, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    with Running(lease=LONG, when_lost=policy):
        redis.set(key, HAND)
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


@pytest.mark.usefixtures("redis")
def test_a_run_that_has_lost_its_key_fails_when_it_returns(redis: Any, key: str, prefix: str) -> None:
    with Running(lease=LONG, when_lost=fail) as run, Running("overruns", timeout=600, when_lost=fail) as overruns:
        redis.delete(key)
        renew_now(run.lock)
        assert eventually(lambda: not run.lock.is_held)
        assert run.result is None
        with later(600):
            overruns.__exit__()
    for each, name, reason in ((run, "k", "deleted"), (overruns, "overruns", "overrun")):
        assert isinstance(each.result, LockLost)
        assert (each.result.key, each.result.reason) == (prefix + name, reason)


def test_a_sync_run_fails_by_what_only_the_release_finds(redis: Any, key: str) -> None:
    with Running(lease=LONG, when_lost=fail) as run:
        redis.set(key, HAND)
    assert isinstance(run.result, LockLost)
    assert run.result.reason == "taken"


@both
def test_an_exception_of_the_run_is_never_replaced(redis: Any, key: str, kind: type[Running]) -> None:
    def explode() -> None:
        msg = "the run's own"
        raise KeyError(msg)

    with kind(lease=LONG, when_lost=fail, ends=explode) as run:
        redis.set(key, HAND)
    assert isinstance(run.result, KeyError)


def cancelling() -> int:
    """How many cancellations this task has been asked for and has not been relieved of."""
    task: Any = asyncio.current_task()
    return int(task.cancelling()) if sys.version_info >= (3, 11) else 0


def lose(redis: Any, key: str) -> None:
    """Take the key of the run that calls this away, and have it learn of that."""
    redis.delete(key)
    renew_now(current_lock())


@pytest.mark.parametrize("learns", ["at its end", "just before its end"])
def test_a_run_that_has_ended_is_not_cancelled_any_more(redis: Any, key: str, learns: str) -> None:
    """Or its caller would be, while the key is given back or afterwards."""

    def are_telling() -> bool:
        return any(each.name == "only_one-lost" for each in threading.enumerate())

    @only_one("k", lease=LONG, when_lost=fail)
    async def run() -> None:
        if learns == "at its end":
            current_lock().expires_at = now()
        else:  # and it does not let the loop cancel it
            lose(redis, key)
            assert eventually(lambda: not current_lock().on_loss and not are_telling())

    async def main() -> int:
        with pytest.raises(LockLost):
            await run()
        assert await asyncio.to_thread(eventually, lambda: not are_telling())
        await asyncio.sleep(0)
        return cancelling()

    assert asyncio.run(main()) == 0


def test_an_async_run_is_cancelled(redis: Any, key: str) -> None:
    seen: list[object] = []

    @only_one("k", lease=LONG, when_lost=fail)
    async def run() -> None:
        lose(redis, key)
        try:
            await asyncio.sleep(LIMIT)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> tuple[LockLost, int]:
        with pytest.raises(LockLost) as caught:
            await run()
        left = cancelling()
        await asyncio.sleep(0)  # nothing is left to be cancelled
        return caught.value, left

    lost, left = asyncio.run(main())
    assert seen == ["cancelled"]
    assert (lost.key, lost.reason, left) == (key, "deleted", 0)


@pytest.mark.usefixtures("redis")
def test_an_async_run_that_overruns_is_cancelled() -> None:
    with RunningAsync(timeout=600, when_lost=fail) as run, later(600):
        assert isinstance(run.join(), LockLost)
    assert run.result.reason == "overrun"


def test_only_the_run_that_lost_its_key_is_cancelled(redis: Any, prefix: str) -> None:
    goes_on = asyncio.Event()

    @only_one("{number}", lease=LONG, when_lost=fail)
    async def run(number: int) -> int:
        if number == 3:
            lose(redis, f"{prefix}3")
        try:
            await asyncio.wait_for(goes_on.wait(), LIMIT)
        finally:
            goes_on.set()
        assert current_lock().is_held
        return number

    async def main() -> list[Any]:
        return list(await asyncio.gather(*map(run, range(5)), return_exceptions=True))

    results = asyncio.run(main())
    assert isinstance(results.pop(3), LockLost)
    assert results == [0, 1, 2, 4]


@pytest.mark.parametrize("lost", [False, True], ids=["held", "lost too"])
def test_a_cancellation_from_outside_stays_one(redis: Any, key: str, lost: Any) -> None:
    if lost and sys.version_info < (3, 11):
        pytest.skip("cancellations are counted from Python 3.11")

    async def main() -> None:
        begun, cleaning = asyncio.Event(), asyncio.Event()

        @only_one("k", lease=LONG, when_lost=fail)
        async def run() -> None:
            begun.set()
            if lost:
                lose(redis, key)
            try:
                await asyncio.sleep(LIMIT)
            finally:
                cleaning.set()
                await asyncio.sleep(LIMIT if lost else 0)

        task = asyncio.ensure_future(run())
        await asyncio.wait_for((cleaning if lost else begun).wait(), LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        if sys.version_info >= (3, 11):
            assert task.cancelling() == 1  # ours is taken back, and no other

    asyncio.run(main())
    assert not redis.exists(key)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="cancellations are counted from Python 3.11")
@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_a_run_that_does_not_heed_its_cancellation_leaves_none_behind(redis: Any, key: str, ends: str) -> None:
    """Else a `timeout()` or `TaskGroup` around the call would think that it was cancelled from outside."""

    @only_one("k", lease=LONG, when_lost=fail)
    async def run() -> str:
        lose(redis, key)
        try:
            await asyncio.sleep(LIMIT)
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


# How soon


@pytest.mark.soak
@both
def test_how_soon_a_loss_is_told(
    redis: Any, key: str, kind: type[Running], record_property: Callable[[str, object], None]
) -> None:
    """Within a third of the lease of a key that is taken away, and when the timeout is over of an overrun."""
    slack, lease, timeout = 0.2, 0.6, 0.6
    told = Told()
    for _ in range(10):
        with kind(lease=lease, when_lost=told) as run:
            redis.delete(key)
            deleted = time.monotonic()
            assert eventually(lambda: told.losses)
        record_property("seconds from a deletion", round(told.times[0] - deleted, 3))
        assert told.times[0] - deleted < lease / 3 + slack
        told.times.clear()
        told.losses.clear()
        begun = time.monotonic()
        with kind(timeout=timeout, when_lost=told) as run:
            taken = time.monotonic()
            assert eventually(lambda: told.losses)
            assert run.result is None
        record_property("seconds from an overrun", round(told.times[0] - begun - timeout, 3))
        assert begun + timeout - 0.01 <= told.times[0] <= taken + timeout + slack
        told.times.clear()
        told.losses.clear()
