"""Keys that stay for some time after their runs; `later` is when some of that has gone by."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import redis as redis_py

from only_one import ConfigurationError, Lost, Released, current_lock
from only_one.holder import Holder as Value
from rigs.proxy import Proxy
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, both, call_both, decorated, events
from tests.faults.programs import Holder, Running
from tests.interruptions import handled, raises, raises_at_first
from tests.renewal import later, wait_for_another_attempt

parsed: Any = Value.parse


def test_it_is_kept_from_when_it_was_acquired(redis: Any, key: str, kind: type[Running]) -> None:
    with events(Released) as releases, kind(at_least=6000) as run, later(1000):
        running = parsed(redis.get(key))
        run.__exit__()
    assert run.result == "done"
    assert [event.outcome for event in releases] == ["kept"]
    left, value = redis.pttl(key), redis.get(key)
    assert 4_000_000 < left <= 5_000_000
    kept = parsed(value)
    assert (running.state, kept.state) == ("running", "kept")
    assert (kept.id, kept.pid, kept.since, kept.name) == (running.id, running.pid, running.since, running.name)
    assert kept.deadline == pytest.approx(running.since + 6000, abs=0.01)

    assert call_both() == [None, None]  # it is busy, and its time goes by
    assert redis.get(key) == value
    assert eventually(lambda: 0 < redis.pttl(key) < left)
    with pytest.raises(ConfigurationError):
        current_lock()

    redis.pexpire(key, 1)
    assert eventually(lambda: decorated(lambda: "again")() == "again")
    assert not redis.exists(key)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        *((SystemExit(code), "kept") for code in (None, 0)),  # a program that exits without an error has succeeded
        *((SystemExit(code), "held") for code in (1, "trouble", "")),
        *((error(), "held") for error in (KeyError, KeyboardInterrupt, asyncio.CancelledError)),
    ],
    ids=repr,
)
def test_it_is_free_at_once_after_an_exception(
    redis: Any, key: str, kind: type[Running], error: BaseException, outcome: str
) -> None:
    with events(Released) as releases, kind(at_least=6000, ends=raises(error)) as run:
        assert redis.exists(key)
    assert isinstance(run.result, type(error))
    assert redis.exists(key) == (outcome == "kept")
    assert [event.outcome for event in releases] == [outcome]


@both
@pytest.mark.parametrize("handler", [raises, raises_at_first])
def test_it_is_free_at_once_after_a_signal_handler_that_exits(
    redis: Any, key: str, decorate: Decorate, handler: Any
) -> None:
    call = decorate(lambda: signal.raise_signal(signal.SIGUSR1), at_least=6000)
    with handled(handler(SystemExit(0)), signal.SIGUSR1), pytest.raises(SystemExit):
        call()
    assert not redis.exists(key)


def test_a_run_that_took_longer_than_that_frees_its_key_at_once(redis: Any, key: str, kind: type[Running]) -> None:
    with events(Released) as releases, kind(at_least=100, lease=6000) as run, later(1000):
        run.__exit__()
    assert [event.outcome for event in releases] == ["held"]
    assert not redis.exists(key)


@both
@pytest.mark.parametrize("meanwhile", ["it stays", "it expires", "its time is over", "so is its timeout"])
def test_it_is_kept_as_soon_as_a_server_that_was_away_at_the_end_of_the_run_is_back(
    redis: Any, redis_url: str, key: str, meanwhile: str, decorate: Decorate
) -> None:
    is_over, is_extended = meanwhile in ("its time is over", "so is its timeout"), meanwhile == "so is its timeout"
    times = {"timeout": 6000} if is_extended else {"lease": 60_000}
    with Proxy(redis_url) as proxy, ExitStack() as away, redis_py.Redis.from_url(proxy.url) as client:

        def work() -> str:
            if is_extended:
                current_lock().extend(60_000)
            away.enter_context(proxy.refused())
            return "done"

        assert decorate(work, at_least=6000, redis=client, **times)() == "done"
        assert decorated(lambda: "again")() is None  # though no run of this process has the key any more
        if meanwhile == "it expires":
            redis.delete(key)
        with later(6000 if is_over else 1000):
            for _ in range(4):  # until no command is on its way that was made before
                wait_for_another_attempt(key)
            away.close()
            if is_over:
                assert eventually(lambda: not redis.exists(key))
                return
            assert eventually(lambda: b'"state":"kept"' in (redis.get(key) or b""))
        assert 4_000_000 < redis.pttl(key) <= 5_000_000
    assert call_both() == [None, None]


def test_a_run_that_is_killed_is_not_kept(redis: Any, redis_url: str, prefix: str, key: str) -> None:
    with Holder(redis_url, prefix, at_least=6000, lease=6000) as holder:
        holder.kill()
    assert decorated(lambda: "again", at_least=6000)() == "again"
    assert parsed(redis.get(key)).state == "kept"


def test_a_key_that_expires_while_it_is_released_is_not_lost(redis: Any, key: str, proxy: Proxy) -> None:
    """It was the run's until it ended."""
    with redis_py.Redis.from_url(proxy.url) as client, ThreadPoolExecutor() as pool, events() as seen:
        release = proxy.hold_up("DELIFEQ")
        run = pool.submit(decorated(lambda: "done", lease=6000, redis=client))
        assert release.met.wait(LIMIT)
        redis.delete(key)
        with later(7000):
            release.let_go()
            assert run.result() == "done"
    assert not [each for each in seen if isinstance(each, Lost)]
