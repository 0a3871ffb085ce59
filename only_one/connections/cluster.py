"""Cluster: its nodes, the slots of each, and the redirections that nodes reply, for the renewing thread."""

from collections.abc import Sequence
from typing import Any

import redis
from redis import cluster, exceptions

from only_one.clock import now
from only_one.driver import Command

from .node import Node, by_reach
from .timeouts import closed_when_collected, short_timeouts


class ClusterNodes:
    """The nodes of a cluster, and the slots of each, as the renewing thread knows them.

    The user's client sends nothing for it: it would wait for a frozen node for as long as the user's time-outs say.
    """

    def __init__(self, client: Any) -> None:
        """Begin with the nodes and slots that a ``RedisCluster`` knows."""
        self._client = client
        self._manager: Any = client.nodes_manager
        self._options = short_timeouts(self._manager.connection_kwargs)
        self._nodes: dict[tuple[str, int], _ClusterNode] = {}
        known = self._manager.slots_cache.items()
        self._owners: dict[Any, Any] = {slot: (owner.host, owner.port) for slot, (owner, *_) in known}
        for address in set(self._owners.values()):
            self._at(address)

    def node_of(self, key: str) -> Node:
        """The node that stores ``key``, as far as is known."""
        address = self._owners.get(self._client.keyslot(key))
        return self._at(address) if address else min(self._nodes.values(), key=by_reach)

    def nodes(self) -> list[Node]:
        """All nodes that store keys. One is asked for them first, because some may be new."""
        self._refresh()
        return [self._at(address) for address in set(self._owners.values())]

    def _at(self, address: tuple[str, int]) -> "_ClusterNode":
        """The node at an address."""
        if address not in self._nodes:
            client = closed_when_collected(self._manager.create_redis_node(*address, **self._options))
            self._nodes[address] = _ClusterNode(client, address[0], self)
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
                address = self._manager.remap_host_port(reply.host or node.host, reply.port)
                target = self._at(address)
                if isinstance(reply, exceptions.MovedError):
                    self._owners[reply.slot_id] = address
                elif target.backs_off_until <= now():
                    replies[number] = target.send_here([("ASKING",), commands[number]])[1]

    def _refresh(self, but: Node | None = None) -> None:
        """Ask the node that has been reachable for the longest time, and is not ``but``, for the slots of all nodes.

        If that node cannot be reached either, the next time is soon enough.
        """
        for known in list(self._manager.nodes_cache.values()):  # the user's client may have learnt of new nodes
            self._at((known.host, known.port))
        node = min((each for each in self._nodes.values() if each is not but), key=by_reach, default=None)
        if node is None or node.backs_off_until > now():
            return
        (reply,) = node.send_here([("CLUSTER SLOTS",)])
        if isinstance(reply, Exception):
            return
        ranges: dict[Any, Any] = cluster.parse_cluster_slots(reply, current_host=node.host)
        for (first_slot, last_slot), owners in ranges.items():
            address: Any = self._manager.remap_host_port(*owners["primary"])
            self._owners.update(dict.fromkeys(range(first_slot, last_slot + 1), address))
            self._at(address)


class _ClusterNode(Node):
    """One node of a cluster."""

    send_here = Node.send

    def __init__(self, client: Any, host: str, nodes: ClusterNodes) -> None:
        super().__init__(client)
        self.host = host
        self._nodes = nodes

    def send(self, commands: Sequence[Command], pause: float | None = None) -> list[Any]:
        """See ``Node``; a command with the reply ASK is sent on, and one with the reply MOVED keeps its error."""
        replies = self.send_here(commands, pause)
        self._nodes.follow(self, commands, replies)
        return replies
