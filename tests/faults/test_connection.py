"""Connections that break while a run holds its key; that the key is kept or lost is looked at in `test_leases`."""

from __future__ import annotations

import time
from typing import Any

import pytest

from only_one import LockLost, fail
from tests.faults.programs import SLACK, Running, RunningAsync
from tests.proxy import Proxy
from tests.waiting import eventually

both = pytest.mark.parametrize("kind", [Running, RunningAsync], ids=["sync", "async"])


@pytest.mark.parametrize(
    ("way", "kind"), [("cut", Running), ("refused", Running), ("black_hole", Running), ("black_hole", RunningAsync)]
)
@pytest.mark.usefixtures("redis")
def test_a_connection_that_is_gone_for_more_than_the_lease(redis_url: str, kind: type[Running], way: str) -> None:
    """It is told once, when the lease is over by the holder's own clock, though nobody can be asked."""
    lease = 0.6
    told: list[tuple[str, float]] = []
    with Proxy(redis_url) as proxy:
        with kind(
            lease=lease, redis=proxy.url, when_lost=lambda lost: told.append((lost.reason, time.monotonic()))
        ) as run:
            with getattr(proxy, way)():
                expires_at = time.monotonic() + run.lock.expires_in
                assert eventually(lambda: told)
            assert not eventually(lambda: len(told) > 1, 0.3)
        assert run.result == "done"
    ((reason, moment),) = told
    assert reason == "expired"
    assert expires_at - 0.05 <= moment <= expires_at + lease + SLACK


@both
@pytest.mark.usefixtures("redis")
def test_a_connection_that_is_gone_for_more_than_the_lease_fails_the_run(redis_url: str, kind: type[Running]) -> None:
    with Proxy(redis_url) as proxy:
        with kind(lease=0.6, redis=proxy.url, when_lost=fail) as run, proxy.cut():
            assert eventually(lambda: not run.lock.is_held)
            if kind is RunningAsync:
                run.join()
        assert isinstance(run.result, LockLost)
        assert run.result.reason == "expired"


@both
def test_a_connection_that_is_gone_for_less_than_the_lease(
    redis: Any, redis_url: str, prefix: str, kind: type[Running]
) -> None:
    told: list[object] = []
    lease = 2.4
    with Proxy(redis_url) as proxy:
        with kind(lease=lease, redis=proxy.url, when_lost=told.append) as run:
            with proxy.cut():
                assert eventually(lambda: run.lock.expires_in < lease * 0.55)  # a renewal is overdue
            assert eventually(lambda: run.lock.expires_in > lease * 0.7)
            assert redis.get(f"{prefix}k") == run.lock.token
        assert run.result == "done"
    assert told == []
