"""Fencing tokens: a number that a store can tell a late writer by. And runs that ask for more time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis as redis_py
from redis.exceptions import ResponseError

from only_one import ConfigurationError, LockLost, configure, current_lock, only_one, subscribe
from only_one.events import Event, Lost
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Running
from tests.renewal import is_renewed, later

NAME = "k"
DAY = 24 * 3600 * 1000

Call = Callable[[], Any]
Cover = Callable[..., Call]


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


@pytest.fixture
def counter(key: str) -> str:
    """Where the last fencing token of the key is remembered; the hash tag puts it into the key's slot."""
    return f"{{{key}}}:fence"


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
def cover(request: pytest.FixtureRequest) -> Cover:
    """Both kinds of functions in turn."""
    kind: Cover = request.param
    return kind


def fence() -> int:
    return current_lock().fence


def fences() -> list[int]:
    """What a run is given when it asks several times."""
    return [current_lock().fence for _ in range(3)]


# Fencing tokens


def test_it_is_the_same_within_a_run(redis: Any, counter: str, cover: Cover) -> None:
    found = cover(fences)()
    assert len(set(found)) == 1
    assert type(found[0]) is int
    assert int(redis.get(counter)) == found[0]
    assert found[0] == pytest.approx(redis.time()[0] * 1_000_000, abs=LIMIT * 1_000_000)


def test_it_is_minted_on_first_use(redis: Any, counter: str) -> None:
    assert covered(lambda: "done")() == "done"
    assert not redis.exists(counter)


def test_it_rises_from_run_to_run(redis: Any, counter: str, cover: Cover) -> None:
    call = cover(fence)
    found = [call() for _ in range(5)]
    assert found == sorted(set(found))
    redis.delete(counter)  # as when nobody has asked for a day
    found.append(call())
    redis.delete(counter)
    found.append(call())
    assert found == sorted(set(found))


def test_it_rises_over_an_expiry(redis: Any, key: str) -> None:
    def outlive() -> tuple[int, int, int]:
        mine = current_lock().fence
        redis.pexpire(key, 1)
        assert eventually(lambda: not redis.exists(key))
        following = covered(fence)()
        return mine, following, current_lock().fence

    mine, later, again = covered(outlive, timeout=60)()
    assert mine < later
    assert again == mine  # what has been minted stays: it is for the store to refuse it


def test_it_rises_though_the_clock_of_the_server_is_behind(redis: Any, counter: str) -> None:
    """As after a failover to a server whose clock is."""
    ahead = covered(fence)() + 10**12
    redis.set(counter, ahead)
    call = covered(fence)
    assert [call(), call(), call()] == [ahead + 1, ahead + 2, ahead + 3]
    assert int(redis.get(counter)) == ahead + 3  # to the last digit, though Lua counts in floats


def test_it_rises_over_a_restart_without_persistence(server: RedisServer) -> None:
    call = covered(fence)
    found = [call()]
    for _ in range(2):
        server.kill()
        server.start()
        found.append(call())
    assert found == sorted(set(found))


def test_what_is_remembered_expires(redis: Any, counter: str) -> None:
    call = covered(fence)
    call()
    assert DAY - LIMIT * 1000 < redis.pttl(counter) <= DAY
    redis.pexpire(counter, 5_000)
    call()
    assert DAY - LIMIT * 1000 < redis.pttl(counter) <= DAY


def test_other_keys_count_by_themselves(redis: Any, prefix: str) -> None:
    ahead = 4 * 10**15
    redis.set(f"{{{prefix}a}}:fence", ahead)
    assert only_one(fence, key="a")() == ahead + 1
    assert (only_one(fence, key="b")() or ahead) < ahead


@pytest.mark.parametrize(("value", "reason"), [(None, "deleted"), (b"somebody else", "taken")])
def test_a_run_that_has_lost_its_key_gets_none(
    redis: Any, key: str, counter: str, value: bytes | None, reason: str
) -> None:
    def work() -> str:
        redis.delete(key)
        if value:
            redis.set(key, value)
        lock = current_lock()
        assert lock.is_held  # it does not know yet
        for _ in range(2):
            with pytest.raises(LockLost) as caught:
                _ = lock.fence
            assert (caught.value.key, caught.value.reason) == (key, reason)
        assert not lock.is_held
        return "done"

    losses: list[Lost] = []

    def note(event: Event) -> None:
        if isinstance(event, Lost):
            losses.append(event)

    unsubscribe = subscribe(note)
    try:
        assert covered(work)() == "done"
    finally:
        unsubscribe()
    assert not redis.exists(counter)
    assert redis.get(key) == value
    assert [lost.reason for lost in losses] == [reason]


def test_a_run_that_has_overrun_gets_none(redis: Any, counter: str) -> None:
    def work() -> None:
        with later(60), pytest.raises(LockLost, match="overrun"):
            fence()

    covered(work, timeout=60)()
    assert not redis.exists(counter)


def test_a_run_of_another_that_was_given_the_key_meanwhile_is_named(redis: Any, key: str) -> None:
    def work() -> None:
        redis.delete(key)
        inside: list[tuple[Any, Any]] = []

        def later() -> None:
            with pytest.raises(LockLost, match="taken") as caught:
                _ = mine.fence
            inside.append((caught.value.holder, current_lock().holder))

        mine = current_lock()
        covered(later)()
        assert inside
        assert inside[0][0] == inside[0][1]

    covered(work)()


@pytest.mark.parametrize("protocol", [2, 3])
def test_clients_that_decode(redis_url: str, prefix: str, protocol: int) -> None:
    assert prefix
    with redis_py.Redis.from_url(redis_url, decode_responses=True, protocol=protocol) as client:
        call = covered(fence, redis=client)
        found = [call(), call()]
        assert found == sorted(set(found))

        def lose() -> str:
            client.set(current_lock().key, "somebody else", px=60_000)
            with pytest.raises(LockLost, match="taken") as caught:
                fence()
            client.delete(current_lock().key)
            return caught.value.value

        assert covered(lose, redis=client)() == "somebody else"


def test_scripts_that_are_flushed(redis: Any) -> None:
    call = covered(fence)
    found = []
    for _ in range(3):
        redis.script_flush()
        found.append(call())
    assert found == sorted(set(found))


def test_what_is_remembered_and_no_number(redis: Any, counter: str) -> None:
    """Anybody can write anything; whatever comes of it, the key is given back."""
    redis.rpush(counter, "a list")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        covered(fence)()
    redis.delete(counter)
    assert covered(fence)()


def test_where_the_locking_is_off() -> None:
    with configure(active=False):
        found = covered(fences)()
    assert len(set(found)) == 1


def test_outside_of_a_run() -> None:
    with pytest.raises(ConfigurationError, match="outside"):
        current_lock()


# More time; in a cluster, see `faults/test_cluster`


def test_a_run_that_asks_for_more_time(redis: Any, key: str, cover: Cover) -> None:
    def work() -> str:
        lock = current_lock()
        lock.extend(300)
        lock.extend(timedelta(seconds=300))
        assert 900 < lock.expires_in <= 1200
        assert 900_000 < redis.pttl(key) <= 1_200_000
        with later(900):  # longer than it was taken for
            assert covered(lambda: "ran beside it")() is None
            with Running("renewed", lease=3600) as other:
                assert is_renewed(other.lock)  # and the thread that renews has had a look at both
            lock.ensure_held()
        assert losses == []
        with later(1200):
            assert eventually(lambda: losses)
            with pytest.raises(LockLost, match="overrun"):
                lock.extend(60)
        return "done"

    losses: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Lost):
            losses.append(event.reason)

    unsubscribe = subscribe(note)
    try:
        assert cover(work, timeout=600)() == "done"
    finally:
        unsubscribe()
    assert losses == ["overrun"]
    assert not redis.exists(key)


def test_a_run_that_is_renewed_for_longer(redis: Any, key: str, cover: Cover) -> None:
    def work() -> None:
        lock = current_lock()
        lock.extend(6000)
        assert 0 < redis.pttl(key) <= 600_000  # no longer than a lease at a time
        with later(400):  # there are 300 left of what it was taken for
            assert is_renewed(lock)
            assert 400_000 < redis.pttl(key) <= 600_000
            lock.ensure_held()

    cover(work, timeout=700, lease=600)()
    assert not redis.exists(key)


@pytest.mark.usefixtures("redis")
def test_a_run_without_limit_has_all_the_time() -> None:
    def work() -> bool:
        before = current_lock().expires_in
        current_lock().extend(60)
        return current_lock().expires_in <= before

    assert covered(work)()


@pytest.mark.parametrize(("value", "reason"), [(None, "deleted"), (b"somebody else", "taken")])
def test_a_run_that_has_lost_its_key_gets_no_more_time(redis: Any, key: str, value: bytes | None, reason: str) -> None:
    def work() -> str:
        redis.delete(key)
        if value:
            redis.set(key, value)
        with pytest.raises(LockLost, match=reason):
            current_lock().extend(60)
        assert not current_lock().is_held
        return "done"

    assert covered(work, timeout=60)() == "done"
    assert redis.get(key) == value
    assert redis.ttl(key) == (-1 if value else -2)
