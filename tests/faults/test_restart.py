"""Servers that crash while runs hold keys in them, and come back with or without what they knew."""

from __future__ import annotations

import redis as redis_py

from only_one import only_one
from rigs.servers import RedisServer, redis_server
from rigs.waiting import eventually
from tests.faults.programs import Running, RunningAsync
from tests.renewal import is_renewed, renew_now


def test_without_persistence_the_holder_learns_that_it_has_lost(server: RedisServer) -> None:
    with Running(lease=60) as run:
        server.crash()
        renew_now(run.lock)
        assert eventually(lambda: run.told)
        # Renewal of later locks goes on, with the same connections.
        with Running("later", lease=60) as later, RunningAsync("too", lease=60) as too:
            assert is_renewed(later.lock)
            assert is_renewed(too.lock)
    assert run.told == ["deleted"]


def test_with_an_append_only_file_keys_are_there_again() -> None:
    """They go on falling, are renewed and released by their runs."""
    with (
        redis_server("--appendonly", "yes", "--appendfsync", "always") as server,
        redis_py.Redis.from_url(server.url) as client,
        Running(lease=60, redis=server.url) as run,
    ):
        client.pexpire(run.lock.key, 50_000)
        server.crash()
        assert client.get(run.lock.key) == run.lock.token
        assert 0 < client.pttl(run.lock.key) < 50_000
        assert only_one(lambda: "done", key="k", redis=server.url)() is None
        assert is_renewed(run.lock)
        assert client.pttl(run.lock.key) > 50_000
        run.__exit__()
        assert not client.exists(run.lock.key)
        assert run.told == []
