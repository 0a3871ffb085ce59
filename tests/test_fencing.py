"""Fencing tokens: a number that a store can tell a late writer by."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from only_one import current_lock
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, both, decorated

DAY = 24 * 3600 * 1000


@pytest.fixture
def counter(key: str) -> str:
    """The key of the last fencing token; the hash tag puts it into the slot of the lock's key."""
    return f"{{{key}}}:fence"


def fence() -> int:
    return current_lock().fence


def rises(fences: list[int]) -> bool:
    return fences == sorted(set(fences))


@both
def test_it_is_the_same_within_a_run_and_rises_from_run_to_run(redis: Any, counter: str, decorate: Decorate) -> None:
    assert decorate(lambda: "ran")() == "ran"
    assert not redis.exists(counter)  # it is made on first use
    fences = []
    for _ in range(3):
        first, again = decorate(lambda: [fence(), fence()])()
        assert first == again == int(redis.get(counter))
        assert type(first) is int
        assert first == pytest.approx(redis.time()[0] * 1_000_000, abs=LIMIT * 1_000_000)
        assert DAY - LIMIT * 1000 < redis.pttl(counter) <= DAY
        fences.append(first)
        redis.pexpire(counter, 5_000)
        redis.script_flush()
    for _ in range(2):
        redis.delete(counter)  # as when nobody has asked for a day
        fences.append(decorate(fence)())
    assert rises(fences)


@pytest.mark.usefixtures("redis")
def test_it_is_the_same_in_all_threads_of_a_run() -> None:
    """Or a store would refuse what the run itself has written with a lower one."""
    together = threading.Barrier(8)

    def run() -> set[int]:
        lease = current_lock()

        def asks(_number: int) -> int:
            together.wait(LIMIT)
            return lease.fence

        with ThreadPoolExecutor(8) as pool:
            return set(pool.map(asks, range(8)))

    for _ in range(20):
        assert len(decorated(run)()) == 1


def test_it_rises_over_an_expiry(redis: Any, key: str) -> None:
    def outlive() -> tuple[int, int, int]:
        mine = fence()
        redis.pexpire(key, 1)
        assert eventually(lambda: not redis.exists(key))
        return mine, decorated(fence)(), fence()

    mine, later, again = decorated(outlive, timeout=60)()
    assert mine < later
    assert again == mine  # a token stays what it is: it is for the store to refuse it


def test_it_rises_though_the_clock_of_the_server_is_behind(redis: Any, counter: str) -> None:
    """As after a failover to a server whose clock is."""
    call = decorated(fence)
    ahead = call() + 10**12
    redis.set(counter, ahead)
    assert [call(), call(), call()] == [ahead + 1, ahead + 2, ahead + 3]
    assert int(redis.get(counter)) == ahead + 3  # to the last digit, though Lua counts in floats
    assert decorated(fence, "other")() < ahead  # each key counts by itself


def test_it_rises_over_a_restart_without_persistence(server: RedisServer) -> None:
    call = decorated(fence)
    fences = [call()]
    for _ in range(2):
        server.crash()
        fences.append(call())
    assert rises(fences)
