"""Clients as users have them: of one server, of what a Sentinel watches, and of a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis as redis_py
from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from only_one.testing import Guarded, _find_binary
from rigs.servers import RedisServer, free_ports, redis_server
from rigs.waiting import LIMIT, eventually

WATCHED = "sentinel monitor watched 127.0.0.1 {port} 1\n"


BY_A_SENTINEL = 2
"""Connections to the server that it watches, for commands and for messages."""


KINDS = ["plain", "Sentinel", "cluster"]


class Clients:
    """A server of its own for a kind of client.

    Attributes:
        kind: one of `KINDS`.
        witness: a client that asks the server directly.
        sentinel_port: the port of the Sentinel that watches the server, if there is one.
    """

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.kind = kind
        self._stack = stack
        options = ("--cluster-enabled", "yes") if kind == "cluster" else ()
        self.server = stack.enter_context(redis_server(*options))
        self.witness: Any = stack.enter_context(redis_py.Redis.from_url(self.server.url))
        if kind == "cluster":
            self.witness.execute_command("CLUSTER ADDSLOTS", *range(16384))
            assert eventually(lambda: self.witness.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        elif kind == "Sentinel":
            self.sentinel_port = _start_sentinel(self.server, stack)
            assert eventually(lambda: sum(map(_is_a_sentinels, self.witness.client_list())) == BY_A_SENTINEL)

    def break_connections(self) -> None:
        """Close them at the server, but for the witness's and the Sentinel's, which would connect again."""
        for each in self.witness.client_list():
            if int(each["id"]) != self.witness.client_id() and not _is_a_sentinels(each):
                self.witness.client_kill_filter(_id=each["id"])

    @contextmanager
    def connected(self, **options: Any) -> Iterator[Any]:
        """Another client of the kind, until the end of the block; nobody else closes a pool that it was given."""
        with self.connect(**options) as client:
            yield client
        pool = getattr(client, "connection_pool", None)
        manager = getattr(pool, "sentinel_manager", None)
        for each in (pool, *(sentinel.connection_pool for sentinel in getattr(manager, "sentinels", ()))):
            if each is not None:
                each.disconnect()

    def connect(self, **options: Any) -> Any:
        """Another client of the kind."""
        if self.kind == "cluster":
            # redis-py closes the connections of such a client when a copy of it is collected; not if it is from a URL.
            return redis_py.RedisCluster("127.0.0.1", self.server.port, **options)
        if self.kind == "Sentinel":
            manager: Any = Sentinel([("127.0.0.1", self.sentinel_port)])  # type: ignore[no-untyped-call]
            return manager.master_for("watched", **options)
        return redis_py.Redis.from_url(self.server.url, **options)


@contextmanager
def clients(kind: str) -> Iterator[Clients]:
    """A server, and a Sentinel if need be, for a kind of client of `KINDS`."""
    with ExitStack() as stack:
        yield Clients(kind, stack)


def _is_a_sentinels(connection: dict[str, str]) -> bool:
    return connection["name"].startswith("sentinel-")


def _start_sentinel(server: RedisServer, stack: ExitStack) -> int:
    directory = stack.enter_context(TemporaryDirectory())
    (port,) = free_ports(1)
    file = Path(directory, "sentinel.conf")
    file.write_text(f"bind 127.0.0.1\nport {port}\ndir {directory}\n{WATCHED.format(port=server.port)}")
    stack.enter_context(Guarded([_find_binary(), str(file), "--sentinel"], stdout=subprocess.DEVNULL))

    def is_up() -> bool:
        with suppress(RedisError), redis_py.Redis(port=port, socket_timeout=LIMIT) as client:
            return bool(client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", "watched"))
        return False

    assert eventually(is_up)
    return port
