"""Servers that may evict keys: a warning, once, that costs no run anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from only_one import leases, only_one
from only_one.testing import RedisServer, redis_server
from tests.faults.programs import Running, RunningAsync
from tests.proxy import Proxy
from tests.waiting import eventually

both = pytest.mark.parametrize("kind", [Running, RunningAsync], ids=["sync", "async"])


@pytest.fixture
def evicting(prefix: str) -> Iterator[RedisServer]:
    assert prefix
    with redis_server("--maxmemory", "100mb", "--maxmemory-policy", "volatile-ttl") as server:
        yield server


@pytest.fixture
def proxy(evicting: RedisServer) -> Iterator[Proxy]:
    with Proxy(evicting.url) as proxy:
        yield proxy


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """A callable that gives the warnings of eviction that there have been."""

    def found() -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if (record.name, record.levelname) == ("only_one", "WARNING") and "maxmemory" in record.getMessage()
        ]

    with caplog.at_level(logging.WARNING, "only_one"):
        yield found


def run(url: str, key: str = "k", **options: Any) -> Any:
    """A short run with a plain timeout, which is never renewed."""
    return only_one(lambda: "done", key=key, timeout=60, redis=url, **options)()


@both
@pytest.mark.parametrize("options", [{"timeout": 60}, {"lease": 60}], ids=["plain", "renewed"])
def test_a_server_that_may_evict_keys_is_warned_of_once(
    proxy: Proxy, warnings: Any, kind: type[Running], options: dict[str, Any]
) -> None:
    with kind(redis=proxy.url, **options):
        assert eventually(warnings)
    with redis_py.Redis.from_url(proxy.url) as client:
        for source in (proxy.url, proxy.url.replace("/0", "/1"), client):
            assert run(source) == "done"
    assert not eventually(lambda: len(warnings()) > 1, 0.3)
    (warning,) = warnings()
    assert f"127.0.0.1:{proxy.port}" in warning
    assert "maxmemory-policy volatile-ttl" in warning
    assert "write maxmemory-policy noeviction" in warning
    assert proxy.commands.count("INFO") == 1


@pytest.mark.parametrize(
    ("memory", "policy", "warns"),
    [("100mb", "allkeys-lru", True), ("100mb", "noeviction", False), ("0", "allkeys-lru", False)],
)
def test_what_is_warned_of(prefix: str, warnings: Any, memory: str, policy: str, warns: Any) -> None:
    assert prefix
    with (
        redis_server("--maxmemory", memory, "--maxmemory-policy", policy) as server,
        Proxy(server.url) as proxy,
        Running(timeout=60, redis=proxy.url),
    ):
        assert eventually(lambda: "INFO" in proxy.commands)
        assert eventually(warnings, 10 if warns else 0.3) == warns


@both
def test_no_run_waits_for_it(proxy: Proxy, warnings: Any, kind: type[Running]) -> None:
    held = proxy.hold_up("INFO")
    with kind(timeout=60, redis=proxy.url) as first:
        assert held.met.wait(10)
    assert first.result == "done"
    assert run(proxy.url) == "done"
    assert warnings() == []
    with redis_py.Redis.from_url(proxy.url) as client:
        assert client.info("commandstats").get("cmdstat_info") is None  # not carried out so far
    held.let_go()


def test_a_user_who_may_not_ask(evicting: RedisServer, proxy: Proxy, warnings: Any) -> None:
    with redis_py.Redis.from_url(evicting.url) as client:
        client.acl_setuser("limited", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-info"])
    url = proxy.url.replace("redis://", "redis://limited:secret@")
    with Running(lease=60, redis=url) as lasting:
        assert eventually(lambda: "INFO" in proxy.commands)
    assert lasting.result == "done"
    assert run(url) == "done"
    assert not eventually(warnings, 0.3)
    assert proxy.commands.count("INFO") == 1


def test_a_server_that_cannot_be_asked_is_asked_later(
    proxy: Proxy, warnings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "_LOOKED_AT_AGAIN_AFTER", 0.2)
    lost = proxy.lose_request("INFO")
    assert run(proxy.url) == "done"
    assert lost.met.wait(10)
    assert warnings() == []
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert eventually(lambda: run(proxy.url) == "done" and bool(warnings()))
    assert proxy.commands.count("INFO") == 2
