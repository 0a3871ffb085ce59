"""Connections that break while runs hold their keys, of threads and of event loops; for clients see `test_leases`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from only_one import LockLost, fail
from rigs.waiting import eventually
from tests.faults.programs import SLACK, Running, RunningAsync
from tests.proxy import Proxy
from tests.renewal import fails_to_renew, is_renewed, later


@pytest.mark.parametrize("way", ["cut", "black_hole"])
def test_a_connection_that_is_gone_for_less_than_the_lease_or_for_more(
    redis: Any, redis_url: str, prefix: str, way: str
) -> None:
    """In between the key is kept, and then it is lost by the holder's own clock, though nobody can be asked."""
    told: list[tuple[str, str]] = []

    def tell(lost: LockLost) -> None:
        told.append((lost.key.removeprefix(prefix), lost.reason))

    with (
        Proxy(redis_url) as proxy,
        Running("thread", lease=60, redis=proxy.url, when_lost=tell) as thread,
        RunningAsync("loop", lease=60, redis=proxy.url, when_lost=tell) as loop,
        Running("failing", lease=60, redis=proxy.url, when_lost=fail) as failing,
        RunningAsync("cancelled", lease=60, redis=proxy.url, when_lost=fail) as cancelled,
    ):
        runs = {"thread": thread, "loop": loop, "failing": failing, "cancelled": cancelled}
        with getattr(proxy, way)():
            assert all(fails_to_renew(run.lock) for run in runs.values())
        for key, run in runs.items():
            assert is_renewed(run.lock)
            assert redis.get(f"{prefix}{key}") == run.lock.token
        assert told == []
        with getattr(proxy, way)(), later(60):
            assert eventually(lambda: len(told) == 2)
            assert isinstance(cancelled.join(), LockLost)  # at once: nobody has told it to finish
            assert eventually(lambda: failing.lock.reason)
            assert failing.result is None
    assert thread.result == loop.result == "done"
    for each in (failing, cancelled):
        assert isinstance(each.result, LockLost)
        assert each.result.reason == "expired"
    assert sorted(told) == [("loop", "expired"), ("thread", "expired")]  # once, though the end found it out, too


@pytest.mark.soak
@pytest.mark.parametrize("way", ["cut", "black_hole"])
@pytest.mark.usefixtures("redis")
def test_a_loss_is_told_on_time(redis_url: str, way: str, record_property: Callable[[str, object], None]) -> None:
    lease = 0.6
    told: list[float] = []
    with Proxy(redis_url) as proxy:
        run = Running(lease=lease, redis=proxy.url, when_lost=lambda _: told.append(time.monotonic()))
        with run, getattr(proxy, way)():
            expires_at = time.monotonic() + run.lock.expires_in
            assert eventually(lambda: told)
        assert run.result == "done"
    (moment,) = told
    record_property(f"seconds after the end of the lease, {way}", round(moment - expires_at, 3))
    assert expires_at - 0.05 <= moment <= expires_at + lease + SLACK
