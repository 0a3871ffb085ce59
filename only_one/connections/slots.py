"""The slots of a cluster: which node stores each, and the way of a command from node to node."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import redis
from redis import cluster, exceptions

from only_one.clock import now
from only_one.driver import Command

from .kept_connections import OF_ALL_CONNECTIONS

Address = tuple[str, int]

_MOST_REFUSALS = 16
"""How often a cluster may redirect a command, or refuse it because its slot is moving or has no node."""

_REFUSAL_PAUSE = 0.02
"""Seconds by which the pauses grow: more than two in all, for which a node that was restarted says CLUSTERDOWN."""


class Trip(NamedTuple):
    """One command on its way to one node.

    Attributes:
        address: the address of the node.
        command: the command.
        is_asking: whether another node named this one by ASK.
        pause: seconds to wait before.
    """

    address: Address
    command: Command
    is_asking: bool = False
    pause: float = 0.0


class Sender(NamedTuple):
    """What a driver needs of a client: the function that makes a trip, and returns the reply."""

    send_raw: Callable[[Trip], Any]


class Slots:
    """Which node of a cluster stores each slot: as the user's client knew, and as the nodes have said since.

    Attributes:
        options: the options of the user's connections.
        connect: makes a client of the node at an address, by options.
        owners: by slot, the address of the node that stores it.
        failed: the address of the node at which a command has failed last.
    """

    def __init__(self, client: redis.RedisCluster) -> None:
        """Begin with the nodes and slots that the user's client knows."""
        self._client: Any = client
        self._manager: Any = self._client.nodes_manager
        self.options: dict[str, Any] = self._manager.connection_kwargs
        self.connect: Any = self._manager.create_redis_node
        known = {**self._manager.slots_cache}.items()  # a copy, because another thread may use the client
        same: dict[Address, Address] = {}  # one tuple for all slots of a node
        self.owners: dict[Any, Any] = {
            slot: same.setdefault(address := (owner.host, owner.port), address) for slot, (owner, *_) in known
        }
        self.failed = ("", 0)
        # When the last look began, by `now()`, and whether all nodes have timed out at it.
        self._looked_at, self._are_silent = 0.0, False

    def address_of(self, key: str | bytes) -> Address:
        """The address of the node that stores ``key``, as far as is known; else of any node, which will know."""
        address: Address = self.owners.get(self._client.keyslot(key)) or self.addresses()[0]
        return address

    def addresses(self) -> list[Address]:
        """The addresses of all known nodes.

        The user's client may have learnt of new ones. And the host names that it was given may lead to others by now.
        """
        nodes = *self._manager.nodes_cache.values(), *getattr(self._client, "startup_nodes", ())
        return [*dict.fromkeys([*self.owners.values(), *((str(each.host), int(each.port)) for each in nodes)])]

    def redirected(self, error: exceptions.AskError, by: Address) -> Address:
        """The address of the node that a redirection names: by MOVED the slot's new node, by ASK that which gets it."""
        address: Address = self._manager.remap_host_port(error.host or by[0], error.port)
        if isinstance(error, exceptions.MovedError):
            self.owners[error.slot_id] = address
        return address

    def route(self, command: Command) -> Generator[Any, Any, Any]:
        """Bring a command to the node that stores its key, and on to the node to which that one redirects it.

        It is made for a driver, as a command generator. It sends a command again only if the cluster has refused it.

        Returns:
            The reply.
        """
        key: Any = command[3] if command[0] == "EVAL" else command[1]
        trip, began = Trip(self.address_of(key), command), now()
        refusal = redis.ResponseError()
        for number in range(_MOST_REFUSALS):
            try:
                return (yield trip)
            except exceptions.AskError as error:  # the base class of MovedError
                refusal, is_asking = error, not isinstance(error, exceptions.MovedError)
                trip = Trip(self.redirected(error, trip.address), command, is_asking)
            except exceptions.TryAgainError as error:
                refusal, trip = error, trip._replace(pause=_REFUSAL_PAUSE * number)
            except exceptions.ClusterDownError as error:  # the node may have left the cluster, or be cut off from it
                refusal, self.failed = error, trip.address
                yield from self.look(began)
                trip = Trip(self.address_of(key), command, pause=_REFUSAL_PAUSE * number)
            except OF_ALL_CONNECTIONS:
                self.failed = trip.address
                raise
        raise refusal

    def look(self, since: float) -> Generator[Any, Any, bool]:
        """Ask the nodes, the one that has failed last after the others, until one says which node stores which slot.

        Args:
            since: the time, by ``now()``; if a look has begun later already, nothing is asked.

        Returns:
            Whether all nodes have timed out at the last look.
        """
        if self._looked_at > since:
            return self._are_silent
        began, are_silent = now(), True
        for address in sorted(self.addresses(), key=self.failed.__eq__):
            try:
                reply = yield Trip(address, ("CLUSTER", "SLOTS"))
            except redis.RedisError as error:
                # Another error may only say that the node has closed the kept connection.
                are_silent = are_silent and isinstance(error, redis.TimeoutError)
            else:
                are_silent = False
                ranges: dict[Any, Any] = cluster.parse_cluster_slots(reply, current_host=address[0])
                for (first_slot, last_slot), owners in ranges.items():
                    owner = self._manager.remap_host_port(*owners["primary"])
                    self.owners.update(dict.fromkeys(range(first_slot, last_slot + 1), owner))
                if ranges:  # a node that has left the cluster knows of none
                    break
        self._looked_at, self._are_silent = began, are_silent
        return are_silent
