"""Fencing tokens: a number that a store can tell a late writer by. And runs that ask for more time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis as redis_py
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, ResponseError

from only_one import ConfigurationError, LockLost, configure, current_lock, only_one, subscribe
from only_one.events import Event, Lost
from only_one.testing import RedisServer, redis_server
from tests.waiting import LIMIT, eventually

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


def test_it_is_minted_on_first_use(redis: Any, counter: str, cover: Cover) -> None:
    assert cover(lambda: "done")() == "done"
    assert not redis.exists(counter)


def test_it_rises_from_run_to_run(redis: Any, counter: str, cover: Cover) -> None:
    call = cover(fence)
    found = [call() for _ in range(50)]
    assert found == sorted(set(found))
    redis.delete(counter)  # as when nobody has asked for a day
    found.append(call())
    redis.delete(counter)
    found.append(call())
    assert found == sorted(set(found))


def test_it_rises_over_an_expiry(redis: Any, key: str, cover: Cover) -> None:
    def outlive() -> tuple[int, int, int]:
        mine = current_lock().fence
        assert eventually(lambda: not redis.exists(key))
        later = covered(fence)()
        return mine, later, current_lock().fence

    mine, later, again = cover(outlive, timeout=0.1)()
    assert mine < later
    assert again == mine  # what has been minted stays: it is for the store to refuse it


def test_it_rises_though_the_clock_of_the_server_is_behind(redis: Any, counter: str, cover: Cover) -> None:
    """As after a failover to a server whose clock is."""
    ahead = cover(fence)() + 10**12
    redis.set(counter, ahead)
    call = cover(fence)
    assert [call(), call(), call()] == [ahead + 1, ahead + 2, ahead + 3]
    assert int(redis.get(counter)) == ahead + 3  # to the last digit, though Lua counts in floats


def test_it_rises_over_a_restart_without_persistence(server: RedisServer, cover: Cover) -> None:
    call = cover(fence)
    found = [call()]
    for _ in range(3):
        server.kill()
        server.start()
        found.append(call())
    assert found == sorted(set(found))


def test_what_is_remembered_expires(redis: Any, counter: str, cover: Cover) -> None:
    call = cover(fence)
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


MANY = """
import sys, time
import redis
import only_one
url, prefix, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
only_one.configure(redis=url, prefix=prefix)
client = redis.Redis.from_url(url)

@only_one.only_one("k")
def run():
    client.rpush(prefix + "order", only_one.current_lock().fence)
    return True

print("ready", flush=True)
sys.stdin.readline()
while times:
    times -= run() is True
    time.sleep(0)
"""


def test_many_processes_get_rising_numbers(redis: Any, redis_url: str, prefix: str) -> None:
    command = [sys.executable, "-c", MANY, redis_url, prefix, "25"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes: list[subprocess.Popen[str]] = [subprocess.Popen(command, text=True, **pipes) for _ in range(6)]  # type: ignore[call-overload]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.communicate("go\n", timeout=30)
        assert [process.returncode for process in processes] == [0] * 6
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    found = [int(each) for each in redis.lrange(f"{prefix}order", 0, -1)]
    assert len(found) == 6 * 25
    assert found == sorted(set(found))


@pytest.mark.parametrize(("value", "reason"), [(None, "deleted"), (b"somebody else", "taken")])
def test_a_run_that_has_lost_its_key_gets_none(
    redis: Any, key: str, counter: str, cover: Cover, value: bytes | None, reason: str
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
        assert cover(work)() == "done"
    finally:
        unsubscribe()
    assert not redis.exists(counter)
    assert redis.get(key) == value
    assert [lost.reason for lost in losses] == [reason]


def test_a_run_that_has_overrun_gets_none(redis: Any, counter: str, cover: Cover) -> None:
    def work() -> None:
        assert eventually(lambda: not current_lock().is_held)
        with pytest.raises(LockLost, match="overrun"):
            fence()

    cover(work, timeout=0.05)()
    assert not redis.exists(counter)


def test_a_run_of_another_that_was_given_the_key_meanwhile_is_named(redis: Any, key: str, cover: Cover) -> None:
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

    cover(work)()


@pytest.mark.parametrize("protocol", [2, 3])
def test_clients_that_decode(redis_url: str, prefix: str, protocol: int, cover: Cover) -> None:
    assert prefix
    with redis_py.Redis.from_url(redis_url, decode_responses=True, protocol=protocol) as client:
        call = cover(fence, redis=client)
        found = [call(), call()]
        assert found == sorted(set(found))

        def lose() -> str:
            client.set(current_lock().key, "somebody else", px=60_000)
            with pytest.raises(LockLost, match="taken") as caught:
                fence()
            client.delete(current_lock().key)
            return caught.value.value

        assert cover(lose, redis=client)() == "somebody else"


def test_scripts_that_are_flushed(redis: Any, cover: Cover) -> None:
    call = cover(fence)
    found = []
    for _ in range(3):
        redis.script_flush()
        found.append(call())
    assert found == sorted(set(found))


def test_what_is_remembered_and_no_number(redis: Any, counter: str, cover: Cover) -> None:
    """Anybody can write anything; whatever comes of it, the key is given back."""
    redis.rpush(counter, "a list")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        cover(fence)()
    redis.delete(counter)
    assert cover(fence)()


def test_where_the_locking_is_off(cover: Cover) -> None:
    with configure(active=False):
        found = cover(fences)()
    assert len(set(found)) == 1


def test_outside_of_a_run() -> None:
    with pytest.raises(ConfigurationError, match="outside"):
        current_lock()


# Clusters


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    """A cluster of one node."""
    with redis_server("--cluster-enabled", "yes") as server:
        with redis_py.Redis.from_url(server.url) as node:
            node.execute_command("CLUSTER ADDSLOTS", *range(16384))
            assert eventually(lambda: node.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        yield server.url


@pytest.fixture
def cluster(cluster_url: str, prefix: str) -> Iterator[Any]:
    assert prefix
    found = []

    def connect() -> bool:
        with suppress(RedisClusterException, RedisConnectionError, ResponseError):
            found.append(redis_py.RedisCluster.from_url(cluster_url))
        return bool(found)

    assert eventually(connect)
    with configure(redis=found[0]):
        yield found[0]
    found[0].close()


def test_a_run_in_a_cluster(cluster: Any, key: str, counter: str, cover: Cover) -> None:
    def work() -> tuple[int, bytes]:
        assert covered(fence)() is None
        return current_lock().fence, cluster.get(key)

    call = cover(work)
    first, token = call()
    assert b'"running"' in token
    assert not cluster.exists(key)
    second, other = call()
    assert first < second
    assert token != other
    assert cluster.keyslot(key) == cluster.keyslot(counter)
    assert int(cluster.get(counter)) == second
    cluster.script_flush()
    assert call()[0] > second
    assert not cluster.exists(key)


def test_a_run_in_a_cluster_that_is_renewed(cluster: Any, key: str, cover: Cover) -> None:
    def work() -> bool:
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            assert 0 < cluster.pttl(key) <= 1000
            time.sleep(0.02)
        return current_lock().is_held

    assert cover(work, lease=1)()  # less is at the mercy of a machine that has other things to do
    assert not cluster.exists(key)


def test_a_run_in_a_cluster_that_has_lost_its_key(cluster: Any, key: str, cover: Cover) -> None:
    def work() -> None:
        cluster.set(key, "somebody else")
        with pytest.raises(LockLost, match="taken"):
            fence()

    cover(work)()
    assert cluster.get(key) == b"somebody else"
    cluster.delete(key)


def test_a_key_that_is_kept_in_a_cluster(cluster: Any, key: str, cover: Cover) -> None:
    assert cover(lambda: "done", at_least=60)() == "done"
    assert 50_000 < cluster.pttl(key) <= 60_000
    assert b'"kept"' in cluster.get(key)
    cluster.delete(key)


def test_more_time_in_a_cluster(cluster: Any, key: str, cover: Cover) -> None:
    def work() -> int:
        current_lock().extend(60)
        left: int = cluster.pttl(key)
        return left

    assert 60_000 < cover(work, timeout=10)() <= 70_000


# More time


def test_a_run_that_asks_for_more_time(redis: Any, key: str, cover: Cover) -> None:
    def work() -> str:
        lock = current_lock()
        lock.extend(60)
        assert 50 < lock.expires_in <= 60.3
        assert 50_000 < redis.pttl(key) <= 60_300
        time.sleep(0.4)  # longer than it was taken for
        lock.ensure_held()
        assert covered(lambda: "ran beside it")() is None
        return "done"

    losses: list[Event] = []
    unsubscribe = subscribe(losses.append)
    try:
        assert cover(work, timeout=0.3)() == "done"
    finally:
        unsubscribe()
    assert not [event for event in losses if isinstance(event, Lost)]
    assert not redis.exists(key)


def test_a_run_that_is_renewed_for_longer(redis: Any, key: str, cover: Cover) -> None:
    def work() -> str:
        lock = current_lock()
        lock.extend(60)
        assert 0 < redis.pttl(key) <= 400  # no longer than a lease at a time
        until = time.monotonic() + 1.6
        while time.monotonic() < until:
            lock.ensure_held()
            assert redis.pttl(key) > 0
            time.sleep(0.02)
        return "done"

    assert cover(work, timeout=0.8, lease=0.4)() == "done"
    assert not redis.exists(key)


def test_it_ends_all_the_same(redis: Any, key: str, cover: Cover) -> None:
    def work() -> None:
        lock = current_lock()
        began = time.monotonic()
        lock.extend(0.3)
        lock.extend(0.3)
        assert eventually(lambda: not lock.is_held)
        assert 0.5 < time.monotonic() - began < 5
        with pytest.raises(LockLost, match="overrun"):
            lock.extend(60)
        assert eventually(lambda: not redis.exists(key))

    cover(work, timeout=0.2)()


def test_a_run_without_limit_has_all_the_time(redis: Any, cover: Cover) -> None:
    def work() -> bool:
        before = current_lock().expires_in
        current_lock().extend(60)
        return current_lock().expires_in <= before

    assert cover(work)()
    assert redis.ping()


@pytest.mark.parametrize(("value", "reason"), [(None, "deleted"), (b"somebody else", "taken")])
def test_a_run_that_has_lost_its_key_gets_no_more_time(
    redis: Any, key: str, cover: Cover, value: bytes | None, reason: str
) -> None:
    def work() -> str:
        redis.delete(key)
        if value:
            redis.set(key, value)
        with pytest.raises(LockLost, match=reason):
            current_lock().extend(60)
        assert not current_lock().is_held
        return "done"

    assert cover(work, timeout=10)() == "done"
    assert redis.get(key) == value
    assert redis.ttl(key) == (-1 if value else -2)
