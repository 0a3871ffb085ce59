"""The servers that the renewing thread asks: one server, a master behind Sentinels, a cluster, which calls ask, too."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import redis
from redis import exceptions

from only_one.clock import now
from only_one.driver import TROUBLE, Command, ServerTimeout, drive, is_of_signal_handler

from .kept_connections import OF_ALL_CONNECTIONS, KeptConnections
from .own_pools import SHORT_TIMEOUTS
from .slots import Address, Sender, Slots, Trip

_FIRST_PAUSE = 0.05

MOST_IN_A_TRIP = 500
"""The most commands in one trip, so that no trip takes long."""

LONG_TURN = 0.1
"""Seconds after which the renewing thread breaks off what it does, to renew the keys that have become due."""

_OF_REPLACED = redis.ReadOnlyError, exceptions.ClusterDownError
"""The refusals of a node that has become a replica, or has left its cluster."""

_by_reach = attrgetter("backs_off_until")
"""The order in which nodes are asked: last the unreachable ones, so that the wait for them costs no other its lease."""


class Node:
    """One server, or one node of a cluster.

    Attributes:
        client: the connections to it, with short time-outs if it is for the renewing thread.
        backs_off_until: until when it is left alone because it could not be reached, by ``clock.now()``.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.backs_off_until = 0.0
        self._pause = _FIRST_PAUSE

    def node_of(self, _key: object) -> "Node":
        """The node itself, which stores every key that it is asked for."""
        return self

    def all(self) -> list["Node"]:
        """The node itself, the only one."""
        return [self]

    def send(self, commands: Sequence[Command], pause: float | None = None) -> list[Any]:
        """Send commands in one trip.

        Args:
            commands: the commands.
            pause: seconds for which the node is left alone if it cannot be reached; None for twice the last pause.

        Returns:
            The reply to each command, as bytes, or its error.
        """
        try:
            replies: list[Any] = self.client.send(commands)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            self.fail(pause)
            return [error] * len(commands)
        self._pause = _FIRST_PAUSE
        return replies

    def fail(self, pause: float | None = None) -> None:
        """Note that the node could not be reached; see ``send`` for ``pause``."""
        self.backs_off_until = now() + (self._pause if pause is None else pause)
        self._pause = min(self._pause * 2, 1.0)


class MasterNode(Node):
    """A master behind Sentinels. Its clients leave it when it was replaced, which it may not know itself for 10 s.

    A Sentinel is asked for it in a tenth of the time at most: it may not answer, and other nodes have keys to renew.
    """

    def __init__(self, client: KeptConnections, of_calls: KeptConnections) -> None:
        """See ``Node``; ``of_calls`` are the connections of calls to the same master, which must leave it, too."""
        super().__init__(client)
        self._clients = client, of_calls
        self._asks_from = 0.0  # by `now()`

    def send(self, commands: Sequence[Command], pause: float | None = None) -> list[Any]:
        """See ``Node``; before that, find the master if it is time to."""
        if now() >= self._asks_from:
            self._find_master()
        return super().send(commands, pause)

    def _find_master(self) -> None:
        """Ask a Sentinel; if the master was replaced, have both clients leave it."""
        began = now()
        pool = self.client.connection_pool
        with suppress(*TROUBLE):
            if pool.master_address not in (None, pool.sentinel_manager.discover_master(pool.service_name)):
                for each in self._clients:
                    each.leave_master()
        self._asks_from = now() + 9 * (now() - began)


class ClusterNodes:
    """The nodes of a cluster, for calls, and with short time-outs for the renewing thread.

    The user's client sends nothing for them: it would keep a connection on which a command was interrupted, and the
    renewing thread would wait for a frozen node for as long as the user's time-outs say.

    Attributes:
        slots: which node stores which slot.
        masters_left: none, because no Sentinel watches them.
        sends_again: the drivers send a command again that got no answer.
    """

    masters_left = 0
    sends_again = True

    def __init__(self, slots: Slots, longest: dict[str, float], pause: float | None = None) -> None:
        """See ``own_pool`` for ``longest``, and ``Node.send`` for ``pause``."""
        self.slots = slots
        self._longest, self._pause = longest, pause
        self._nodes: dict[Address, _ClusterNode] = {}
        self._sender = Sender(self._make_trip)

    def at(self, address: Address) -> "_ClusterNode":
        """The node at an address."""
        if address not in self._nodes:
            pool = self.slots.connect(*address, **self.slots.options).connection_pool
            client = KeptConnections(pool, self._longest)
            self._nodes.setdefault(address, _ClusterNode(client, address, self))  # another thread may be first
        return self._nodes[address]

    def node_of(self, key: str | bytes) -> Node:
        """The node that stores ``key``, as far as is known."""
        return self.at(self.slots.address_of(key))

    def all(self) -> list[Node]:
        """All nodes that store keys. One is asked for them first, because some may be new."""
        self.look(now())
        return [self.at(address) for address in set(self.slots.owners.values())]

    def send_raw(self, command: Command) -> Any:
        """Send a command of a driver to the node that stores its key, and return its reply, in bytes."""
        began = now()
        try:
            return drive(self._sender, self.slots.route(command))
        except OF_ALL_CONNECTIONS as error:
            if self.look(began):
                raise ServerTimeout(*error.args) from None
            raise

    def look(self, since: float) -> bool:
        """See ``Slots.look``."""
        return drive(self._sender, self.slots.look(since))

    def _make_trip(self, trip: Trip) -> Any:
        node, asking = self.at(trip.address), [("ASKING",)] if trip.is_asking else []
        if node.backs_off_until > now():
            msg = "the node could not be reached just now"
            raise redis.ConnectionError(msg)
        time.sleep(trip.pause)
        reply = node.send_here([*asking, trip.command], self._pause)[-1]
        if isinstance(reply, Exception):
            raise reply
        return reply


class _ClusterNode(Node):
    """One node of a cluster."""

    send_here = Node.send

    def __init__(self, client: Any, address: Address, cluster: ClusterNodes) -> None:
        super().__init__(client)
        self._address = address
        self._cluster = cluster

    def send(self, commands: Sequence[Command], pause: float | None = None) -> list[Any]:
        """See ``Node``; a command with the reply ASK, which names the node that is getting the slot, is sent on.

        A command with the reply MOVED keeps its error, and goes to the right node when it is due again.
        """
        replies = self.send_here(commands, pause)
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        # A node that cannot be reached, has become a replica, or has left, may have been replaced by another.
        if any(isinstance(each, _OF_REPLACED) or not isinstance(each, redis.ResponseError) for each in errors):
            self._cluster.slots.failed = self._address
            self._cluster.look(now())
        for number, reply in enumerate(replies):
            if isinstance(reply, exceptions.AskError):  # the base class of MovedError
                target = self._cluster.at(self._cluster.slots.redirected(reply, self._address))
                if not isinstance(reply, exceptions.MovedError) and target.backs_off_until <= now():
                    replies[number] = target.send_here([("ASKING",), commands[number]])[1]
        return replies


def nodes_of(given: Any, of_calls: Any) -> ClusterNodes | Node:
    """The nodes of a server, for the renewing thread: an object with ``node_of``, for the node of a key, and ``all``.

    Args:
        given: the user's client, or a cluster's slots.
        of_calls: the connections of calls to the same server.
    """
    if isinstance(given, Slots):
        return ClusterNodes(given, SHORT_TIMEOUTS)
    made = KeptConnections(given.connection_pool, SHORT_TIMEOUTS)
    is_watched = isinstance(given.connection_pool, redis.SentinelConnectionPool)
    return MasterNode(made, of_calls) if is_watched else Node(made)


def trips(due: Iterable[Any]) -> list[tuple[Node, list[Any]]]:
    """Group leases or pending releases, which have a ``server`` and a ``key``, into trips to one node each."""
    nodes: defaultdict[Node, list[Any]] = defaultdict(list)
    for each in due:
        nodes[each.server.node_of(each.key)].append(each)
    return [
        (node, nodes[node][start : start + MOST_IN_A_TRIP])
        for node in sorted(nodes, key=_by_reach)
        for start in range(0, len(nodes[node]), MOST_IN_A_TRIP)
    ]
