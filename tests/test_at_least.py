"""Keys that are kept for some time after a run that has succeeded; `later` is when some of that has gone by."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import redis as redis_py

from only_one import ConfigurationError, current_lock, only_one, subscribe
from only_one.call import locked_call
from only_one.call.locked_call import LockedCall
from only_one.events import Event, Released
from only_one.holder import Holder as Value
from only_one.lock import renewal
from only_one.lock.commands import Retained
from only_one.lock.token import kept
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Holder, Running, RunningAsync
from tests.proxy import Proxy
from tests.renewal import later

NAME = "k"

both = pytest.mark.parametrize("kind", [Running, RunningAsync], ids=["sync", "async"])


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


@pytest.fixture
def outcomes() -> Iterator[list[str]]:
    """What became of keys at the end of their runs, as it was told."""
    found: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Released):
            found.append(event.outcome)

    unsubscribe = subscribe(note)
    yield found
    unsubscribe()


def call_again(**options: Any) -> Any:
    """What a call with the same key gives."""
    return only_one(lambda: "again", key=NAME, **options)()


def call_again_async(**options: Any) -> Any:
    """The same in an event loop."""

    async def again() -> str:
        return "again"

    call: Any = only_one(again, key=NAME, **options)
    return asyncio.run(call())


@both
def test_it_is_kept_from_when_it_was_taken(redis: Any, key: str, kind: type[Running], outcomes: list[str]) -> None:
    with kind(at_least=6000) as run, later(1000):
        token = redis.get(key)
        run.__exit__()
    assert run.result == "done"
    assert outcomes == ["kept"]
    left = redis.pttl(key)
    assert 4_000_000 < left <= 5_000_000
    value = redis.get(key)
    kept, running = Value.parse(value), Value.parse(token)
    assert kept is not None
    assert running is not None
    assert (running.state, kept.state) == ("running", "kept")
    assert (kept.id, kept.pid, kept.since, kept.name) == (running.id, running.pid, running.since, running.name)
    assert kept.deadline == pytest.approx(running.since + 6000, abs=0.01)

    assert [call_again(), call_again_async()] == [None, None]  # busy, and it falls on
    assert redis.get(key) == value
    assert eventually(lambda: 0 < redis.pttl(key) < left)
    with pytest.raises(ConfigurationError):
        current_lock()

    redis.pexpire(key, 1)
    assert eventually(lambda: call_again() == "again")
    assert not redis.exists(key)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@both
def test_it_is_free_at_once_after_an_exception(
    redis: Any, key: str, kind: type[Running], error: type[BaseException], outcomes: list[str]
) -> None:
    def explode() -> None:
        assert redis.exists(key)
        raise error

    with kind(at_least=6000, ends=explode) as run:
        pass
    assert isinstance(run.result, error)
    assert not redis.exists(key)
    assert outcomes == ["held"]


def test_it_is_free_at_once_after_a_cancellation(redis: Any, key: str) -> None:
    async def cancel() -> None:
        begun = asyncio.Event()

        @only_one(NAME, at_least=6000)
        async def work() -> None:
            begun.set()
            await asyncio.sleep(LIMIT)

        task = asyncio.ensure_future(work())
        await asyncio.wait_for(begun.wait(), LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not redis.exists(key)


@both
def test_it_is_free_at_once_after_a_longer_run(redis: Any, key: str, kind: type[Running], outcomes: list[str]) -> None:
    with kind(at_least=600, lease=6000) as run, later(600):
        run.__exit__()
    assert run.result == "done"
    assert not redis.exists(key)
    assert outcomes == ["held"]


@both
@pytest.mark.parametrize("value", [None, b"somebody else"])
def test_a_key_that_was_lost_is_not_kept(redis: Any, key: str, kind: type[Running], value: bytes | None) -> None:
    with kind(at_least=6000) as run:
        redis.delete(key)
        if value:
            redis.set(key, value)
    assert run.result == "done"
    assert redis.get(key) == value
    assert redis.ttl(key) == (-1 if value else -2)


def test_it_is_kept_beyond_its_process(redis: Any, redis_url: str, prefix: str, key: str) -> None:
    with Holder(redis_url, prefix, at_least=6000, seconds=0) as holder:
        assert holder.rest() == [["returned", "done"]]
        assert holder.process.wait(LIMIT) == 0
    value = redis.get(key)
    assert [call_again(), call_again_async()] == [None, None]
    assert redis.get(key) == value
    kept = Value.parse(value)
    assert kept is not None
    assert kept.state == "kept"


def wait_for_another_attempt(key: str) -> None:
    """To release the key in the background, which fails, or is put off while the server is known to be away."""
    pending = next(each for each in renewal._renewer.pending_releases.values() if each.key == key)
    before = pending.try_at
    assert eventually(lambda: pending.try_at != before)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("meanwhile", ["it stays", "it expires", "its time is over"])
def test_it_is_kept_as_soon_as_a_server_that_was_away_at_the_end_of_the_run_is_back(
    redis: Any, redis_url: str, key: str, meanwhile: str, *, is_async: bool
) -> None:
    with Proxy(redis_url) as proxy, ExitStack() as away, redis_py.Redis.from_url(proxy.url) as client:

        def work() -> str:
            away.enter_context(proxy.refused())
            return "done"

        async def work_async() -> str:
            return work()

        decorate: Any = only_one(NAME, at_least=6000, lease=60_000, redis=client)
        assert (asyncio.run(decorate(work_async)()) if is_async else decorate(work)()) == "done"
        assert call_again() is None  # though no run of this process has the key any more
        if meanwhile == "it expires":
            redis.delete(key)
        with later(6000 if meanwhile == "its time is over" else 1000):
            for _ in range(4):  # until no command is on its way that was made before
                wait_for_another_attempt(key)
            away.close()
            if meanwhile == "its time is over":
                assert eventually(lambda: not redis.exists(key))
                return
            assert eventually(lambda: b'"state":"kept"' in (redis.get(key) or b""))
        assert 4_000_000 < redis.pttl(key) <= 5_000_000
    assert [call_again(), call_again_async()] == [None, None]


def test_a_run_that_is_killed_is_not_kept(redis: Any, redis_url: str, prefix: str, key: str) -> None:
    with Holder(redis_url, prefix, at_least=6000, lease=6000) as holder:
        assert call_again() is None
        holder.kill()
    assert redis.get(key) == holder.token
    assert call_again(at_least=6000) == "again"
    kept = Value.parse(redis.get(key))
    assert kept is not None
    assert kept.state == "kept"


@pytest.mark.usefixtures("redis")
def test_it_is_not_kept_for_no_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server refuses to keep a key for none."""
    cover: Any = only_one(lambda: None, key=NAME, at_least=10).__only_one__  # type: ignore[attr-defined]
    plan = cover.options_for(cover.plain)
    monkeypatch.setattr(locked_call, "now", lambda: 1000)
    run = LockedCall(plan, plan.server, plan.server.client, cover.plain, key)
    stays = []
    for moment in (1009.999, 1010, 1011):
        monkeypatch.setattr(locked_call, "now", lambda moment=moment: moment)
        stays.append(run._kept())
    assert stays == [Retained(kept(run.token, 10), 1010), None, None]


# What else is no time is refused as it is for `timeout`; only none at all is no mistake here, and False is not none.
@pytest.mark.parametrize("at_least", [False, None, -1, 10.5, timedelta(minutes=1)], ids=repr)
def test_what_could_not_work_is_refused(at_least: Any) -> None:
    with pytest.raises(ConfigurationError, match="at_least="):
        only_one(NAME, timeout=10, at_least=at_least)


@pytest.mark.parametrize("at_least", [0, timedelta(0), 10, timedelta(seconds=10)], ids=repr)
def test_what_could_work_is_accepted(at_least: Any) -> None:
    assert callable(only_one(NAME, timeout=10, at_least=at_least))
    assert callable(only_one(NAME, at_least=at_least, lease=0.001))
