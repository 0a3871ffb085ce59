"""A server of the tests' own is killed, paused, and started again on its port."""

from __future__ import annotations

import signal

import pytest
from redis.exceptions import RedisError

from rigs.servers import redis_server
from tests.test_testing import client, is_running, refuses


def test_a_server_that_is_killed_starts_again_on_its_port_and_knows_nothing() -> None:
    with redis_server() as server, client(server) as redis:
        redis.set("key", "value")
        port, pid = server.port, server.pid
        server.kill()
        assert server.process.poll() == -signal.SIGKILL
        assert refuses(server)
        server.start()
        assert (server.port, is_running(pid)) == (port, False)
        assert client(server).get("key") is None


def test_a_server_with_a_log_of_its_own_knows_more_after_a_restart() -> None:
    with redis_server("--appendonly", "yes", "--appendfsync", "always") as server:
        client(server).set("key", "value")
        server.kill()
        server.start()
        assert client(server).get("key") == b"value"


def test_a_paused_server_does_not_answer_until_it_is_resumed() -> None:
    with redis_server() as server:
        server.pause()
        with pytest.raises(RedisError):
            client(server, timeout=0.2).ping()
        server.resume()
        assert client(server).ping()


def test_a_paused_server_ends_at_once() -> None:
    with redis_server() as server:
        server.pause()
        server.stop()
        assert not is_running(server.pid)
        assert server.process.poll() == 0  # in its own way, and not by SIGKILL after the grace period


def test_stopping_twice_is_stopping() -> None:
    with redis_server() as server:
        server.stop()
        server.stop()
