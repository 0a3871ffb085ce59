"""A server of the tests' own is killed, paused, and started again on its port."""

from __future__ import annotations

import signal

import pytest
from redis.exceptions import RedisError

from rigs.servers import redis_server
from tests.test_testing import client, is_running, refuses


@pytest.mark.parametrize(
    ("options", "left"), [((), None), (("--appendonly", "yes", "--appendfsync", "always"), b"value")]
)
def test_a_server_that_is_killed_starts_again_on_its_port(options: tuple[str, ...], left: bytes | None) -> None:
    """It knows nothing, if it has no log of its own."""
    with redis_server(*options) as server, client(server) as redis:
        redis.set("key", "value")
        port, pid = server.port, server.pid
        server.kill()
        assert server.process.poll() == -signal.SIGKILL
        assert refuses(server)
        server.start()
        assert (server.port, is_running(pid)) == (port, False)
        assert client(server).get("key") == left


def test_a_paused_server_does_not_answer_until_it_is_resumed_and_ends_at_once() -> None:
    with redis_server() as server:
        server.pause()
        with pytest.raises(RedisError):
            client(server, timeout=0.2).ping()
        server.resume()
        assert client(server).ping()
        server.pause()
        server.stop()
        assert not is_running(server.pid)
        assert server.process.poll() == 0  # in its own way, and not by SIGKILL after the grace period
        server.stop()
