"""Holders that stand still for longer than they may hold their keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.programs import Holder, Running
from tests.waiting import eventually


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}k"


TIMES = [{"lease": 0.8}, {"timeout": 0.8}]


@pytest.mark.parametrize("options", TIMES, ids=["lease", "timeout"])
def test_a_paused_holder_is_told_that_it_has_lost(
    redis: Any, redis_url: str, prefix: str, key: str, options: dict[str, Any]
) -> None:
    """Once, in another thread than the one that renews; and what it gives back is not the next one's."""
    with Holder(redis_url, prefix, when_lost="say", **options) as holder:
        holder.stop()
        assert eventually(lambda: not redis.exists(key))
        with Running(lease=60) as other:
            holder.resume()
            told = holder.rest()
            assert redis.get(key) == other.lock.token
            assert redis.pttl(key) > 30_000
            assert other.lock.is_held
        assert other.result == "done"
    assert sorted(each[0] for each in told) == ["returned", "when_lost"]
    ((_, reason, thread),) = [each for each in told if each[0] == "when_lost"]
    assert reason in ({"overrun"} if "timeout" in options else {"expired", "taken"})
    assert thread != "only_one-leases"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("options", TIMES, ids=["lease", "timeout"])
def test_a_paused_holder_fails(
    redis: Any, redis_url: str, prefix: str, key: str, is_async: Any, options: dict[str, Any]
) -> None:
    with Holder(redis_url, prefix, when_lost="fail", is_async=is_async, **options) as holder:
        holder.stop()
        assert eventually(lambda: not redis.exists(key))
        redis.set(key, "the next one")
        holder.resume()
        ((what, reason),) = holder.rest()
        assert what == "raised"
        assert reason in ({"overrun"} if "timeout" in options else {"expired", "taken"})
    assert redis.get(key) == b"the next one"


def test_a_paused_holder_does_not_take_back_what_nobody_has_taken(
    redis: Any, redis_url: str, prefix: str, key: str
) -> None:
    with Holder(redis_url, prefix, when_lost="say", lease=0.8) as holder:
        holder.stop()
        assert eventually(lambda: not redis.exists(key))
        holder.resume()
        told = holder.rest()
    assert sorted(each[0] for each in told) == ["returned", "when_lost"]
    assert not redis.exists(key)


def test_a_holder_that_is_paused_for_less_than_its_lease_keeps_its_key(
    redis: Any, redis_url: str, prefix: str, key: str
) -> None:
    with Holder(redis_url, prefix, when_lost="say", lease=3, seconds=2) as holder:
        holder.stop()
        assert eventually(lambda: redis.pttl(key) < 1800)  # a renewal is overdue
        holder.resume()
        assert eventually(lambda: redis.pttl(key) > 2000 or not redis.exists(key))
        assert holder.rest() == [["returned", "done"]]
    assert not redis.exists(key)
