"""The proxy breaks what it is told to break, and nothing else: the tests of lost replies rest on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rigs.proxy import Proxy, Then

BINARY = bytes(range(256)) + b"\r\n$5\r\n"


@pytest.fixture
def direct(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Any]:
    """A client that does not try twice."""
    with connect(proxy) as client:
        yield client


def connect(proxy: Proxy, **options: Any) -> Any:
    """A client that does not try twice."""
    return redis.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0), socket_timeout=2.0, **options)


def lost(send: Callable[[], object]) -> bool:
    """Whether a command ends without a reply."""
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        send()
    return True


@pytest.mark.parametrize("protocol", [2, 3])
def test_replies_of_all_kinds_come_through(proxy: Proxy, key: str, protocol: int) -> None:
    with connect(proxy, protocol=protocol) as client:
        client.set(key, BINARY)

        assert client.get(key) == BINARY
        assert client.get(key + "none") is None
        assert client.hset(key + "hash", mapping={"a": 1, "b": BINARY}) == 2
        assert client.hgetall(key + "hash") == {b"a": b"1", b"b": BINARY}
        assert client.eval("return {1, {'a', false, {}}, 'b'}", 0) == [1, [b"a", None, []], b"b"]
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.get(key + "hash")
    assert proxy.commands == ["SET", "GET", "GET", "HSET", "HGETALL", "EVAL", "GET"]


@pytest.mark.parametrize("then", ["close", "hang"])
@pytest.mark.parametrize("carried_out", [True, False], ids=["reply", "request"])
def test_what_is_lost_of_a_named_command(
    proxy: Proxy, client: Any, direct: Any, key: str, then: Then, *, carried_out: bool
) -> None:
    """A lost reply is that of a command that was carried out, and a lost request is never carried out."""
    lose = proxy.lose_reply if carried_out else proxy.lose_request
    fault = lose("RPUSH", "LPUSH", times=2, then=then)
    assert client.ping()
    assert not fault.met.is_set()

    assert lost(lambda: client.rpush(key, "a"))
    assert fault.met.is_set()
    assert direct.llen(key) == carried_out
    assert lost(lambda: client.lpush(key, "b"))
    assert direct.llen(key) == 2 * carried_out
    assert client.rpush(key, "c") == 2 * carried_out + 1


def test_no_thread_no_open_port_and_no_command_is_left(redis_url: str, direct: Any, key: str) -> None:
    before = set(threading.enumerate())
    with Proxy(redis_url) as proxy, connect(proxy) as client, connect(proxy) as other:
        proxy.hold_up("SET")
        assert lost(lambda: client.set(key, "a"))
        proxy.lose_reply("RPUSH", then="hang")
        assert lost(lambda: client.rpush(f"{key}list", "a"))
        other.delete(f"{key}list")
    assert set(threading.enumerate()) <= before
    assert lost(connect(proxy).ping)
    assert direct.get(key) is None
