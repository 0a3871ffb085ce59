"""The renewing thread without its thread: each step is taken by the test itself, by a clock that stands still."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

import redis as redis_py

from only_one.connections import nodes
from only_one.connections.kept_connections import KeptConnections
from only_one.connections.own_pools import SHORT_TIMEOUTS
from only_one.connections.server import Server
from only_one.lock import pending_releases, renewal
from only_one.lock.lease import Lease
from tests.renewal import MOMENT, Clock

LONG = 4096.0
TTL = 1024.0
SOON = TTL * 0.02
DOWN = "redis://127.0.0.1:1"

Trip = list[tuple[str, str]]


class Watched(nodes.Node):
    """A node that notes what it is sent, and on which a trip takes as long as the test says.

    Attributes:
        trips: of each trip, the command and the key of all that was sent.
        takes: seconds that a trip takes.
    """

    def __init__(self, client: Any, clock: Clock) -> None:
        super().__init__(client)
        self.trips: list[Trip] = []
        self.takes = 0.0
        self._clock = clock

    def send(self, commands: Sequence[Any], pause: float | None = None) -> list[Any]:
        self.trips.append([(command[0], command[3] if command[0] == "EVAL" else command[1]) for command in commands])
        self._clock.moment += self.takes
        return super().send(commands, pause)


class Watch:
    """A renewer without a thread, and the servers that it asks."""

    def __init__(self, clock: Clock, prefix: str, redis: Any) -> None:
        self.renewer = renewal._Renewer()
        self.renewer.vacancy.clear()
        self.clock = clock
        self.redis = redis
        self._prefix = prefix
        self._clients: list[Any] = []
        self._leases: list[Lease] = []

    def server(self, url: str) -> Any:
        """A server with a node that is watched."""
        client = redis_py.Redis.from_url(url)
        server: Any = Server(client)
        server._nodes = Watched(KeptConnections(client.connection_pool, SHORT_TIMEOUTS), self.clock)
        self._clients.append(client)
        return server

    def key(self, name: str = "k") -> str:
        """A key that is held, for longer than any lease."""
        self.redis.set(self._prefix + name, "token", px=3_600_000)
        return self._prefix + name

    def lease(self, server: Any, name: str = "k", limit: float = math.inf, ttl: float = TTL) -> Lease:
        """A lease in its care."""
        made = Lease(server, self.key(name), b"token", self.clock.moment, ttl, limit)
        made.renewer = self.renewer
        self.renewer.leases[name.encode()] = ref(made)
        self._leases.append(made)
        return made

    def pending(self, server: Any, name: str = "k", *, no_write_in_flight: bool = True) -> Any:
        """A pending release in its care."""
        key = self.key(name)
        made = pending_releases.PendingRelease(
            server, key, b"token", MOMENT + LONG, no_write_in_flight=no_write_in_flight
        )
        self.renewer.pending_releases[name.encode()] = made
        made.token = name.encode()  # so that each has its own place
        return made

    def close(self) -> None:
        for client in self._clients:
            client.close()


def node(server: Any) -> Watched:
    watched: Watched = server.node_of("")
    return watched


def keys(trips: list[Trip]) -> list[list[str]]:
    """The last part of the keys of each trip."""
    return [[key.rpartition(":")[2] for _, key in trip] for trip in trips]
