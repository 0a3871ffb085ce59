"""A holder whose wall clock is set back and forth: nothing depends on it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from only_one import only_one
from rigs.waiting import eventually
from tests.faults.programs import Holder, Running
from tests.renewal import is_renewed, later

DAY = 86_400


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at this process's wall clock finds it a day ahead or a year behind.

    To set the machine's would harm all that runs beside the test.
    """
    real, real_ns = time.time, time.time_ns
    offsets = itertools.cycle([DAY, -365 * DAY])
    monkeypatch.setattr(time, "time", lambda: real() + next(offsets))
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + next(offsets) * 10**9)


@pytest.mark.usefixtures("jumps")
def test_nothing_depends_on_it(redis: Any, redis_url: str, prefix: str) -> None:
    with Running("lease", lease=900) as leased, Running("timeout", timeout=600) as timed:
        for _ in range(20):
            assert is_renewed(leased.lock)
            assert 0 < leased.lock.expires_in <= 900
            assert 0 < timed.lock.expires_in <= 600
        assert leased.told == timed.told == []
        with later(600):
            assert eventually(lambda: timed.told)
    assert (leased.told, timed.told) == ([], ["overrun"])
    # A key is retained for as long as it must be.
    call = only_one(lambda: "done", key="at_least", timeout=600, at_least=600)
    assert [call(), call()] == ["done", None]
    assert 300_000 < redis.pttl(f"{prefix}at_least") <= 600_000
    # A dead holder is known, and so is one that lives.
    call = only_one(lambda: "done", key="k", timeout=600)
    with Holder(redis_url, prefix, timeout=600) as holder:
        assert call() is None
        holder.kill()
        assert call() == "done"
    assert not redis.exists(*(f"{prefix}{key}" for key in ("lease", "timeout", "k")))
