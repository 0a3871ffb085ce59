"""Servers that may evict keys: a warning, once, that costs no run anything; and what an evicted key is to its run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import Mock

import pytest
import redis as redis_py
from redis.sentinel import Sentinel

from only_one import only_one
from only_one.connections import nodes
from only_one.connections import server as eviction
from rigs.proxy import Proxy
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Running, RunningAsync
from tests.renewal import is_idle, renew_now


@pytest.fixture
def evicting(own_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server that may evict keys, and of which nobody has asked before: its port may be another's."""
    monkeypatch.setattr(eviction, "_asked", set())
    monkeypatch.setattr(eviction, "_from_urls", {})
    with redis_py.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "volatile-ttl")
        yield client
        client.config_set("maxmemory", 0)
        client.flushall()


@pytest.mark.parametrize(("kind", "times"), [(Running, {"timeout": 60}), (RunningAsync, {"lease": 60})])
def test_a_server_that_may_evict_keys_is_warned_of_once(
    evicting: Any,
    own_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Running],
    times: dict[str, Any],
) -> None:
    """And no run waits for it; the thread that asks waits for as long as the test takes."""
    monkeypatch.setattr(nodes, "SHORT_TIMEOUTS", {})

    def warnings() -> list[str]:
        return [text for _, level, text in caplog.record_tuples if level == logging.WARNING and "maxmemory" in text]

    def run(source: Any) -> Any:
        return only_one(lambda: "done", key="short", timeout=60, redis=source)()

    evicting.config_resetstat()
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(own_server.url))
        url = f"{proxy.url}?socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"
        client = stack.enter_context(redis_py.Redis.from_url(url))
        held = proxy.hold_up("INFO")
        with kind(redis=url, **times):
            assert held.met.wait(LIMIT)
        assert run(url) == "done"
        assert warnings() == []
        assert "cmdstat_info" not in evicting.info("commandstats")  # not carried out so far
        held.let_go()
        assert eventually(warnings)
        for source in (url, url.replace("/0", "/1"), client):
            assert run(source) == "done"
            assert is_idle()  # the thread that looks
        assert proxy.commands.count("INFO") == 1
    (warning,) = warnings()
    assert f"127.0.0.1:{proxy.port}" in warning
    assert "maxmemory-policy volatile-ttl" in warning
    assert "write maxmemory-policy noeviction" in warning
    assert warning.endswith(", or give redis= a server that has it")


@pytest.mark.parametrize(
    ("memory", "policy", "warns"),
    [("100mb", "allkeys-lru", True), ("100mb", "noeviction", False), ("0", "allkeys-lru", False)],
)
def test_what_is_warned_of(evicting: Any, memory: str, policy: str, warns: Any) -> None:
    evicting.config_set("maxmemory", memory)
    evicting.config_set("maxmemory-policy", policy)
    assert bool(eviction.eviction_warning(eviction.Server(evicting).client)) == warns


@pytest.mark.usefixtures("evicting")
def test_each_of_two_deployments_of_sentinels_with_one_service_name_is_asked(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sentinel, "discover_master", Mock(return_value=("127.0.0.1", own_server.port)))
    sentinel: Any = Sentinel  # redis-py has no types for it
    one, other = (sentinel([(host, 26379)]).master_for("m") for host in ("one", "other"))
    warnings = [eviction.eviction_warning(eviction.Server(each).client) for each in (one, other, one)]
    assert [warning is not None for warning in warnings] == [True, True, False]


def test_a_user_who_may_not_ask(evicting: Any, own_server: RedisServer) -> None:
    evicting.acl_setuser("limited", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-info"])
    with Proxy(own_server.url) as proxy:
        url = proxy.url.replace("redis://", "redis://limited:secret@")
        with redis_py.Redis.from_url(url) as client:
            assert [eviction.eviction_warning(eviction.Server(client).client) for _ in range(2)] == [None, None]
        assert proxy.commands == ["INFO"]


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-ttl", "allkeys-lru", "allkeys-random"])
def test_a_key_that_is_evicted(evicting: Any, own_server: RedisServer, prefix: str, policy: str) -> None:
    """Its run is told as of any key that was deleted; for `noeviction` see `test_refused`."""
    with Running(lease=60, redis=own_server.url) as run:
        evicting.config_set("maxmemory-policy", policy)
        evicting.config_set("maxmemory", 1)

        def is_gone() -> bool:
            with suppress(redis_py.ResponseError):  # where nothing is left to evict
                evicting.set("filler", "x")
            return not evicting.exists(f"{prefix}k")

        assert eventually(is_gone)
        renew_now(run.lock)
        assert eventually(lambda: run.told)
        assert not run.lock.is_held
    assert run.told == ["deleted"]
