"""The servers as the renewing thread asks them: one server, a master behind Sentinels, and the nodes of a cluster."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import redis
from redis import cluster, exceptions

from only_one.clock import now
from only_one.driver import RAW, TROUBLE, Command

from .timeouts import closed_when_collected, short_timeouts, with_short_timeouts

Address = tuple[str, int]

_FIRST_PAUSE = 0.05

MOST_IN_A_TRIP = 500
"""The most commands in one trip, so that no trip takes long."""

LONG_TURN = 0.1
"""Seconds after which the renewing thread breaks off what it does, to renew the keys that have become due."""

_by_reach = attrgetter("backs_off_until")
"""The order in which nodes are asked: last the unreachable ones, so that the wait for them costs no other its lease."""


class Node:
    """One server, or one node of a cluster.

    Attributes:
        client: a client of it with short time-outs.
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
            pipeline = self.client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command, **RAW)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001 - the thread has other keys to see to
            self.fail(pause)
            return [error] * len(commands)
        self._pause = _FIRST_PAUSE
        if any(isinstance(each, redis.ReadOnlyError) for each in replies):  # see `OF_ALL_CONNECTIONS`
            self.client.connection_pool.disconnect(inuse_connections=False)
        return replies

    def fail(self, pause: float | None = None) -> None:
        """Note that the node could not be reached; see ``send`` for ``pause``."""
        self.backs_off_until = now() + (self._pause if pause is None else pause)
        self._pause = min(self._pause * 2, 1.0)


class MasterNode(Node):
    """A master behind Sentinels. Its clients leave it when it was replaced, which it may not know itself for 10 s.

    One Sentinel is asked at a time, and in a tenth of the time at most: it may not answer, and other nodes have keys
    to renew.
    """

    def __init__(self, client: Any, given: Any) -> None:
        """See ``Node``; ``given`` is the user's client of the same master, which must leave it, too."""
        super().__init__(client)
        self._pools = client.connection_pool, given.connection_pool
        self._asks_from = 0.0  # by `now()`

    def send(self, commands: Sequence[Command], pause: float | None = None) -> list[Any]:
        """See ``Node``; before that, find the master if it is time to."""
        if now() >= self._asks_from:
            self._find_master()
        return super().send(commands, pause)

    def _find_master(self) -> None:
        """Ask the first Sentinel; if the master was replaced, close the idle connections of both clients."""
        began = now()
        pool = self._pools[0]
        sentinels = pool.sentinel_manager.sentinels
        manager = copy.copy(pool.sentinel_manager)
        manager.sentinels = sentinels[:1]
        try:
            if pool.master_address not in (None, manager.discover_master(pool.service_name)):
                for each in self._pools:
                    each.disconnect(inuse_connections=False)
        except TROUBLE:
            sentinels.append(sentinels.pop(0))  # so that the next time another Sentinel is asked
        self._asks_from = now() + 9 * (now() - began)


class Slots:
    """Which node of a cluster stores each slot: as the user's client knows, and as the nodes have said since.

    Attributes:
        options: the options of the user's connections.
        connect: makes a client of the node at an address, by options.
        owners: by slot, the address of the node that stores it.
    """

    def __init__(self, client: Any) -> None:
        """Begin with the nodes and slots that a ``RedisCluster`` knows."""
        self._client = client
        self._manager: Any = client.nodes_manager
        self.options: dict[str, Any] = self._manager.connection_kwargs
        self.connect: Any = self._manager.create_redis_node
        known = {**self._manager.slots_cache}.items()  # a copy, because another thread may use the client
        same: dict[Address, Address] = {}  # one tuple for all slots of a node, because each event loop has a table
        self.owners: dict[Any, Any] = {
            slot: same.setdefault(address := (owner.host, owner.port), address) for slot, (owner, *_) in known
        }

    def address_of(self, key: str | bytes) -> Address | None:
        """The address of the node that stores ``key``, as far as is known."""
        return self.owners.get(self._client.keyslot(key))

    def addresses(self) -> set[Address]:
        """The addresses of all known nodes.

        The user's client may have learnt of new ones. And the host names that it was given may lead to others by now.
        """
        nodes = *self._manager.nodes_cache.values(), *getattr(self._client, "startup_nodes", ())
        return {*self.owners.values(), *((str(each.host), int(each.port)) for each in nodes)}

    def redirected(self, error: exceptions.AskError, by: Address) -> Address:
        """The address of the node that a redirection names: by MOVED the slot's new node, by ASK that which gets it."""
        address: Address = self._manager.remap_host_port(error.host or by[0], error.port)
        if isinstance(error, exceptions.MovedError):
            self.owners[error.slot_id] = address
        return address

    def learn(self, reply: Any, by: Address) -> bool:
        """Learn of the node of each slot from a node's reply to CLUSTER SLOTS.

        Returns:
            Whether the node knows of any: one that has left the cluster knows none.
        """
        ranges: dict[Any, Any] = cluster.parse_cluster_slots(reply, current_host=by[0])
        for (first_slot, last_slot), owners in ranges.items():
            address: Address = self._manager.remap_host_port(*owners["primary"])
            self.owners.update(dict.fromkeys(range(first_slot, last_slot + 1), address))
        return bool(ranges)


class ClusterNodes:
    """The nodes of a cluster, and the slots of each, as the renewing thread knows them.

    The user's client sends nothing for it: it would wait for a frozen node for as long as the user's time-outs say.
    """

    def __init__(self, client: Any) -> None:
        self._slots = Slots(client)
        self._options = short_timeouts(self._slots.options)
        self._nodes: dict[Address, _ClusterNode] = {}
        for address in set(self._slots.owners.values()):
            self._at(address)

    def node_of(self, key: str) -> Node:
        """The node that stores ``key``, as far as is known."""
        address = self._slots.address_of(key)
        return self._at(address) if address else min(self._nodes.values(), key=_by_reach)

    def all(self) -> list[Node]:
        """All nodes that store keys. One is asked for them first, because some may be new."""
        self._refresh()
        return [self._at(address) for address in set(self._slots.owners.values())]

    def _at(self, address: Address) -> "_ClusterNode":
        """The node at an address."""
        if address not in self._nodes:
            client = closed_when_collected(self._slots.connect(*address, **self._options))
            self._nodes[address] = _ClusterNode(client, address, self)
        return self._nodes[address]

    def follow(self, node: "_ClusterNode", commands: Sequence[Command], replies: list[Any]) -> None:
        """Follow the redirections in the replies: MOVED names a slot's new node, ASK the node that is getting the slot.

        A command with the reply ASK is sent on, and gets the reply of that node.
        A command with the reply MOVED keeps its error, and goes to the right node when it is due again.
        """
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        # A node that cannot be reached, or has become a replica, may have been replaced by another.
        if any(isinstance(each, redis.ReadOnlyError) or not isinstance(each, redis.ResponseError) for each in errors):
            self._refresh(node)
        for number, reply in enumerate(replies):
            if isinstance(reply, exceptions.AskError):  # the base class of MovedError
                target = self._at(self._slots.redirected(reply, node.address))
                if not isinstance(reply, exceptions.MovedError) and target.backs_off_until <= now():
                    replies[number] = target.send_here([("ASKING",), commands[number]])[1]

    def _refresh(self, but: Node | None = None) -> None:
        """Ask the node that has been reachable for the longest time, and is not ``but``, for the slots of all nodes.

        If it knows of none, the next is asked. If it cannot be reached either, the next time is soon enough.
        """
        for address in self._slots.addresses():
            self._at(address)
        for node in sorted((each for each in self._nodes.values() if each is not but), key=_by_reach):
            if node.backs_off_until > now():
                return
            (reply,) = node.send_here([("CLUSTER SLOTS",)])
            if isinstance(reply, Exception) or self._slots.learn(reply, node.address):
                return


class _ClusterNode(Node):
    """One node of a cluster."""

    send_here = Node.send

    def __init__(self, client: Any, address: Address, nodes: ClusterNodes) -> None:
        super().__init__(client)
        self.address = address
        self._nodes = nodes

    def send(self, commands: Sequence[Command], pause: float | None = None) -> list[Any]:
        """See ``Node``; a command with the reply ASK is sent on, and one with the reply MOVED keeps its error."""
        replies = self.send_here(commands, pause)
        self._nodes.follow(self, commands, replies)
        return replies


def nodes_of(client: Any) -> ClusterNodes | Node:
    """The nodes of the server of a client: an object with ``node_of``, for the node of a key, and ``all``."""
    if isinstance(client, redis.RedisCluster):
        return ClusterNodes(client)
    made = with_short_timeouts(client)
    pool = getattr(made, "connection_pool", None)
    return MasterNode(made, client) if type(pool) is redis.SentinelConnectionPool else Node(made)


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
