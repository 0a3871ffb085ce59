"""Servers that crash while runs hold keys in them, and come back with or without what they knew."""

from __future__ import annotations

import pytest
import redis as redis_py

from only_one import LockLost, fail, only_one
from only_one.testing import RedisServer, redis_server
from tests.faults.programs import Holder, Running, RunningAsync
from tests.waiting import eventually

both = pytest.mark.parametrize("kind", [Running, RunningAsync], ids=["sync", "async"])


@both
def test_without_persistence_the_holder_learns_that_it_has_lost(server: RedisServer, kind: type[Running]) -> None:
    told: list[str] = []
    with (
        kind(lease=2, when_lost=lambda lost: told.append(lost.reason)) as run,
        kind("failing", lease=2, when_lost=fail) as failing,
        Running("timed", timeout=600) as timed,
    ):
        server.kill()
        server.start()
        assert eventually(lambda: told)
        assert eventually(lambda: not failing.lock.is_held)
        # Renewal of later locks goes on, with the same connections.
        with kind("later", lease=0.4) as later:
            assert not eventually(lambda: not later.lock.is_held, 1.5)
        assert later.result == "done"
    assert told == ["deleted"]
    assert (run.result, timed.result) == ("done", "done")
    assert isinstance(failing.result, LockLost)
    assert failing.result.reason == "deleted"


def test_with_an_append_only_file_a_plain_timeout_goes_on_falling(prefix: str) -> None:
    told: list[object] = []
    with redis_server("--appendonly", "yes") as server, redis_py.Redis.from_url(server.url) as client:
        key = f"{prefix}k"
        with Running(timeout=600, when_lost=told.append, redis=server.url) as run:
            token, before = client.get(key), client.pttl(key)
            server.kill()
            server.start()
            assert client.get(key) == token
            after = client.pttl(key)
            assert 500_000 < after < before
            assert eventually(lambda: client.pttl(key) < after)
            assert only_one(lambda: "done", key="k", redis=server.url)() is None
            assert run.lock.is_held
            run.lock.ensure_held()
        assert run.result == "done"
        assert not client.exists(key)
    assert told == []


def test_with_an_append_only_file_a_lease_is_renewed_and_released(prefix: str) -> None:
    told: list[object] = []
    with redis_server("--appendonly", "yes") as server, redis_py.Redis.from_url(server.url) as client:
        key = f"{prefix}k"
        with Running(lease=6, when_lost=told.append, redis=server.url) as run:
            token = client.get(key)
            server.kill()
            server.start()
            assert client.get(key) == token
            before = client.pttl(key)
            assert 0 < before <= 6000
            assert eventually(lambda: client.pttl(key) > before)
            assert run.lock.is_held
        assert run.result == "done"
        assert not client.exists(key)
    assert told == []


def test_a_dead_holder_that_an_append_only_file_brings_back_does_not_block(prefix: str) -> None:
    with redis_server("--appendonly", "yes") as server, redis_py.Redis.from_url(server.url) as client:
        with Holder(server.url, prefix, timeout=600) as holder:
            holder.kill()
        server.kill()
        server.start()
        assert client.get(f"{prefix}k") == holder.token
        assert only_one(lambda: "done", key="k", timeout=600, redis=server.url)() == "done"


def test_a_run_that_ends_while_the_server_is_down_returns_what_it_has(server: RedisServer) -> None:
    with Running(lease=60) as run:
        server.kill()
    assert run.result == "done"
    server.start()
    assert eventually(lambda: only_one(lambda: "next", key="k")() == "next")
