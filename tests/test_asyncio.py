"""Covered coroutines: cancelled at every place where they wait, in one event loop after the other, and many at once."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Coroutine, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from only_one import LockLost, current_lock, fail, leases, only_one
from tests.waiting import LIMIT, eventually

NAME = "k"
LEASE = 0.4
SOON = 2.0
"""Seconds within which a key is free that would expire in 600 s."""

MOST = 500
"""Places where a call waits; there are some twenty."""


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


class CancelledAt:
    """Awaits something, and has its task cancelled the n-th time that this waits.

    Attributes:
        waited: how often it has waited.
    """

    def __init__(self, number: int, work: Coroutine[Any, Any, Any], *, when_done: bool) -> None:
        self._number = number
        self._work = work
        self._when_done = when_done
        self.waited = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        steps = self._work.__await__()
        sent: Any = None
        error: BaseException | None = None
        while True:
            try:
                future = steps.send(sent) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            self.waited += 1
            if self.waited == self._number:
                if self._when_done and future is not None:
                    # Before the task is told: it is cancelled when what it waits for is there already.
                    future.add_done_callback(lambda _: task.cancel())
                else:
                    task.cancel()
            sent, error = None, None
            try:
                sent = yield future
            except BaseException as raised:  # noqa: BLE001 - it is for what is awaited
                error = raised


async def drive(steps: CancelledAt) -> Any:
    return await steps


def held() -> list[Any]:
    """What is renewed."""
    return leases._renewer.held()


TIMES = {"lease": {"lease": LEASE}, "timeout": {"timeout": 600}, "kept": {"timeout": 600, "at_least": 1}}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("when_done", [False, True], ids=["while it waits", "when it has waited"])
def test_a_call_that_is_cancelled_wherever_it_waits(
    redis: Any, redis_url: str, key: str, times: Any, *, when_done: bool
) -> None:
    async def work() -> str:
        await asyncio.sleep(0.001)
        return "done"

    def is_free() -> bool:
        value = redis.get(key)
        return value is None or (b'"kept"' in value and redis.pttl(key) <= 1000)

    cancelled = 0
    for number in range(1, MOST):
        with redis_py.Redis.from_url(redis_url) as client:  # a fresh one: to connect is to wait, too
            call: Any = only_one(work, key=NAME, redis=client, **times)
            steps = CancelledAt(number, call(), when_done=when_done)
            try:
                assert asyncio.run(drive(steps)) == "done"
            except asyncio.CancelledError:
                cancelled += 1
            assert not held()
            began = time.monotonic()
            assert eventually(is_free, SOON), f"cancelled at {number}: {redis.pttl(key)} ms {redis.get(key)}"
            assert time.monotonic() - began < SOON
            redis.delete(key)
            assert asyncio.run(call()) == "done"
            redis.delete(key)
        if steps.waited < number:
            break
    print(f"{steps.waited} places, {cancelled} times cancelled")
    assert steps.waited > 4
    # redis-py's wait_for loses one that meets the reply, and tasks do not count theirs before Python 3.11.
    assert cancelled >= (steps.waited / 2 if sys.version_info >= (3, 11) else 3)


def test_a_call_that_is_cancelled_while_busy(redis: Any, redis_url: str, key: str) -> None:
    redis.set(key, "somebody else")
    call: Any
    for number in range(1, MOST):
        with redis_py.Redis.from_url(redis_url) as client:

            async def work() -> str:
                return "done"

            call = only_one(work, key=NAME, redis=client, timeout=600)
            steps = CancelledAt(number, call(), when_done=False)
            with suppress(asyncio.CancelledError):
                assert asyncio.run(drive(steps)) is None
        assert redis.get(key) == b"somebody else"
        if steps.waited < number:
            break
    assert steps.waited > 1
    redis.delete(key)


def test_cancelled_twice(redis: Any, key: str) -> None:
    """The second time while the key is given back."""

    @only_one(NAME, timeout=600)
    async def work() -> None:
        await asyncio.sleep(60)

    async def cancel(twice: int) -> None:
        task = asyncio.ensure_future(work())
        assert await asyncio.to_thread(eventually, lambda: redis.exists(key))
        task.cancel()
        for _ in range(twice):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(eventually, lambda: not redis.exists(key), SOON)

    for twice in range(4):
        asyncio.run(cancel(twice))
        assert not held()


def open_files() -> int:
    """How many files and sockets this process has open."""
    return len(list(Path("/dev/fd").iterdir()))


def loops() -> int:
    """How many event loops are alive."""
    gc.collect()
    # Not by isinstance, which would ask those that weak proxies stand for, and that are gone.
    return sum(issubclass(type(each), asyncio.AbstractEventLoop) for each in gc.get_objects())


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="open files cannot be counted")
def test_one_event_loop_after_the_other(redis: Any, key: str) -> None:
    begun = threading.Event()

    @only_one(NAME)
    async def work() -> str:
        return "done"

    @only_one(NAME)
    async def never() -> None:
        begun.set()
        await asyncio.sleep(60)

    async def cancelled() -> str:
        begun.clear()
        task = asyncio.ensure_future(never())
        # Not by the key alone: a cancellation that comes with the reply may be lost by redis-py.
        assert await asyncio.to_thread(eventually, lambda: redis.exists(key) and begun.is_set())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await work() or ""

    def both() -> None:
        assert asyncio.run(work()) == "done"
        assert asyncio.run(cancelled()) == "done"

    for _ in range(3):
        both()
    before = open_files(), loops(), len(redis.client_list())
    for _ in range(20):
        both()
    assert eventually(lambda: (open_files(), loops(), len(redis.client_list())) <= before), before
    assert open_files() <= before[0]
    assert loops() <= before[1]
    assert eventually(lambda: len(redis.client_list()) <= before[2])
    assert not redis.exists(key)


def test_two_event_loops_at_a_time(redis: Any, prefix: str) -> None:
    @only_one("{number}", lease=LEASE)
    async def work(number: int) -> int:
        await asyncio.sleep(3 * LEASE)
        assert current_lock().is_held
        return number

    async def some(first: int) -> list[int | None]:
        return list(await asyncio.gather(*[work(first + each) for each in range(5)]))

    results: list[list[int | None]] = []
    threads = [threading.Thread(target=lambda n=n: results.append(asyncio.run(some(n)))) for n in (0, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(results, key=str) == [list(range(5)), list(range(5, 10))]
    assert not list(redis.scan_iter(f"{prefix}*"))


def renewing_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "only_one-leases"]


def test_many_runs_share_one_thread(redis: Any, prefix: str) -> None:
    many, lease = 200, 1.0
    keys = [f"{prefix}{number}" for number in range(many)]

    @only_one("{number}", lease=lease)
    async def work(number: int, enough: asyncio.Event) -> bool:
        await enough.wait()
        return number in range(many) and current_lock().is_held

    async def all_of_them() -> list[bool | None]:
        enough = asyncio.Event()
        runs = [asyncio.ensure_future(work(number, enough)) for number in range(many)]
        assert await asyncio.to_thread(eventually, lambda: redis.exists(*keys) == many)
        until = time.monotonic() + 3 * lease
        while time.monotonic() < until:
            assert await asyncio.to_thread(redis.exists, *keys) == many
            assert len(held()) == many
            await asyncio.sleep(0.02)
        assert len(renewing_threads()) == 1
        enough.set()
        return list(await asyncio.gather(*runs))

    assert asyncio.run(all_of_them()) == [True] * many
    assert redis.exists(*keys) == 0
    assert not held()


@pytest.mark.parametrize(("value", "reason"), [(None, "deleted"), (b"somebody else", "taken")])
def test_a_run_that_fails_when_it_has_lost_its_key_is_cancelled(
    redis: Any, key: str, value: bytes | None, reason: str
) -> None:
    seen: list[str] = []

    @only_one(NAME, lease=LEASE, when_lost=fail)
    async def work() -> None:
        try:
            redis.set(key, value) if value else redis.delete(key)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> str:
        began = time.monotonic()
        with pytest.raises(LockLost, match=reason):
            await work()
        assert time.monotonic() - began < LEASE + 1
        await asyncio.sleep(0)  # nothing of the cancellation is left
        return "went on"

    assert asyncio.run(main()) == "went on"
    assert seen == ["cancelled"]
    assert redis.get(key) == value
    redis.delete(key)


def test_a_run_that_is_cancelled_by_others_is_cancelled(redis: Any, key: str) -> None:
    """Though it would fail when it has lost its key, and has lost it as well."""

    @only_one(NAME, lease=LEASE, when_lost=fail)
    async def work() -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.ensure_future(work())
        assert await asyncio.to_thread(eventually, lambda: redis.exists(key))
        redis.delete(key)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks do not count their cancellations before Python 3.11")
def test_a_cancellation_that_comes_with_the_reply_is_not_lost(redis: Any, key: str) -> None:
    """redis-py loses one that meets its reply: a run that was cancelled while it took its key would go on."""

    @only_one(key=lambda: "k", lease=30)
    async def run() -> str:
        await asyncio.sleep(5)
        return "done"

    async def cancelled_after(steps: int) -> None:
        task = asyncio.ensure_future(run())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(eventually, lambda: not redis.exists(key))

    async def main() -> None:
        for steps in range(10):
            await cancelled_after(steps)

    asyncio.run(main())
