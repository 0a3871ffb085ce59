"""Keys that are kept for some time after a run that has succeeded."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from only_one import ConfigurationError, current_lock, only_one, subscribe
from only_one.events import Event, Released
from only_one.holder import Holder
from only_one.testing import guarded
from tests.waiting import LIMIT, eventually

NAME = "k"

Call = Callable[[], Any]
Covered = Callable[..., Call]


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


def covered(body: Call, **options: Any) -> Call:
    """`body` as a covered function."""
    return only_one(body, key=NAME, **options)


def covered_async(body: Call, **options: Any) -> Call:
    """`body` as a covered coroutine, in an event loop of its own."""

    async def work() -> Any:
        await asyncio.sleep(0)
        return body()

    call: Any = only_one(work, key=NAME, **options)
    return lambda: asyncio.run(call())


@pytest.fixture(params=[covered, covered_async], ids=["sync", "async"])
def cover(request: pytest.FixtureRequest) -> Covered:
    """Both kinds of functions in turn."""
    kind: Covered = request.param
    return kind


TIMES = {
    "timeout": {"timeout": 600},
    "lease": {"lease": 1},
    "both": {"timeout": 600, "lease": 1},
    "neither": {},
}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_it_is_kept_from_when_it_was_taken(redis: Any, key: str, cover: Covered, times: dict[str, Any]) -> None:
    tokens = []

    def work() -> str:
        tokens.append(redis.get(key))
        time.sleep(0.3)
        return "done"

    call = cover(work, at_least=60, **times)
    assert call() == "done"
    left = redis.pttl(key)
    assert 50_000 < left <= 60_000 - 300
    value = redis.get(key)
    kept, running = Holder.parse(value), Holder.parse(tokens[0])
    assert kept is not None
    assert running is not None
    assert (running.state, kept.state) == ("running", "kept")
    assert (kept.id, kept.pid, kept.since, kept.name) == (running.id, running.pid, running.since, running.name)
    assert kept.deadline == pytest.approx(running.since + 60, abs=0.01)

    assert [call(), call()] == [None, None]  # busy, and it falls on
    assert len(tokens) == 1
    assert redis.get(key) == value
    assert eventually(lambda: 0 < redis.pttl(key) < left)
    with pytest.raises(ConfigurationError):
        current_lock()


def test_it_is_free_when_the_time_is_over(redis: Any, key: str, cover: Covered) -> None:
    starts: list[float] = []

    def work() -> str:
        starts.append(time.monotonic())
        return "done"

    call = cover(work, at_least=0.5)
    assert call() == "done"
    assert eventually(lambda: call() == "done")
    assert starts[1] - starts[0] >= 0.49  # taken a little before the run began, and the run before it as well
    assert redis.pttl(key) <= 500
    assert eventually(lambda: not redis.exists(key))


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_it_is_free_at_once_after_an_exception(redis: Any, key: str, cover: Covered, times: dict[str, Any]) -> None:
    fails = [True]

    def work() -> str:
        assert redis.exists(key)
        if fails.pop():
            raise KeyError(NAME)
        return "done"

    call = cover(work, at_least=60, **times)
    with pytest.raises(KeyError):
        call()
    assert not redis.exists(key)
    fails.append(False)
    assert call() == "done"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_it_is_free_at_once_after_what_is_no_error(redis: Any, key: str, error: type[BaseException]) -> None:
    def work() -> None:
        raise error

    with pytest.raises(error):
        covered(work, at_least=60)()
    assert not redis.exists(key)


def test_it_is_free_at_once_after_a_cancellation(redis: Any, key: str) -> None:
    @only_one(NAME, at_least=60)
    async def work() -> None:
        await asyncio.sleep(60)

    async def cancel() -> None:
        task = asyncio.ensure_future(work())
        assert await asyncio.to_thread(eventually, lambda: redis.exists(key))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not redis.exists(key)


def test_it_is_free_at_once_after_a_longer_run(redis: Any, key: str, cover: Covered) -> None:
    def work() -> str:
        time.sleep(0.2)
        return "done"

    call = cover(work, at_least=0.1)
    assert call() == "done"
    assert not redis.exists(key)
    assert call() == "done"


@pytest.mark.parametrize(("at_least", "told"), [(60, "kept"), (0.001, "held"), (0, "held")])
@pytest.mark.usefixtures("redis")
def test_it_is_told(cover: Covered, at_least: float, told: str) -> None:
    events: list[Event] = []
    unsubscribe = subscribe(events.append)
    try:
        cover(lambda: time.sleep(0.01), at_least=at_least)()
    finally:
        unsubscribe()
    assert [event.outcome for event in events if isinstance(event, Released)] == [told]


@pytest.mark.parametrize("value", [None, b"somebody else"])
def test_a_key_that_was_lost_is_not_kept(redis: Any, key: str, cover: Covered, value: bytes | None) -> None:
    def work() -> str:
        redis.delete(key)
        if value:
            redis.set(key, value)
        return "done"

    assert cover(work, at_least=60)() == "done"
    assert redis.get(key) == value
    assert redis.ttl(key) == (-1 if value else -2)


ENDS = """
import sys, time
import only_one
only_one.configure(redis=sys.argv[1], prefix=sys.argv[2])

@only_one.only_one("k", at_least=60)
def run():
    if sys.argv[3] == "is killed":
        print("begun", flush=True)
        time.sleep(60)

run()
print("done", flush=True)
"""


def test_it_is_kept_beyond_its_process(redis: Any, redis_url: str, prefix: str, key: str, cover: Covered) -> None:
    command = [sys.executable, "-c", ENDS, redis_url, prefix, "ends"]
    subprocess.run(command, check=True, timeout=30, stdout=subprocess.DEVNULL)
    value = redis.get(key)
    call = cover(lambda: "done", at_least=60)
    assert [call(), call()] == [None, None]
    assert redis.get(key) == value
    holder = Holder.parse(value)
    assert holder is not None
    assert holder.state == "kept"
    assert 0 < redis.pttl(key) <= 60_000


def test_a_run_that_is_killed_is_not_kept(redis: Any, redis_url: str, prefix: str, key: str, cover: Covered) -> None:
    command = [sys.executable, "-c", ENDS, redis_url, prefix, "is killed"]
    with guarded(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.guardian.stdout is not None
        assert program.guardian.stdout.readline() == "begun\n"
        assert cover(lambda: "done")() is None
        program.signal(signal.SIGKILL)
        program.wait(LIMIT)
    assert redis.exists(key)
    assert cover(lambda: "done", at_least=60)() == "done"
    holder = Holder.parse(redis.get(key))
    assert holder is not None
    assert holder.state == "kept"


WRONG = [
    True,
    False,
    -1,
    -0.5,
    math.nan,
    math.inf,
    0.0001,
    10.5,
    "1",
    None,
    timedelta(seconds=-1),
    timedelta(minutes=1),
]


@pytest.mark.parametrize("at_least", WRONG, ids=repr)
def test_what_could_not_work_is_refused(at_least: Any) -> None:
    with pytest.raises(ConfigurationError, match="at_least"):
        only_one(NAME, timeout=10, at_least=at_least)


@pytest.mark.parametrize("at_least", [0, 0.0, timedelta(0), 0.001, 1, 10, timedelta(seconds=10)], ids=repr)
def test_what_could_work_is_accepted(at_least: Any) -> None:
    assert callable(only_one(NAME, timeout=10, at_least=at_least))
    assert callable(only_one(NAME, at_least=at_least, lease=0.001))
