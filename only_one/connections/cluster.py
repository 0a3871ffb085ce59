"""The nodes that keep the keys, as the thread that renews asks them: on connections of its own, and never for long."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import finalize

import redis
from redis.backoff import NoBackoff
from redis.cluster import parse_cluster_slots
from redis.exceptions import AskError, ConnectionError, MovedError, ReadOnlyError, ResponseError  # noqa: A004 - redis-py's
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from only_one.clock import now
from only_one.protocol import Command

_PATIENCE = {"socket_timeout": 0.5, "socket_connect_timeout": 0.25}
"""Seconds that it waits for a reply and a connection: it tries again, and has keys in other nodes to see to."""

_FIRST_REST = 0.05
_LONGEST_REST = 1.0
_MOST_HOPS = 3
"""Nodes that a command may be sent on to: where a slot is said to be, and from there while it moves on."""

_Address = tuple[str, int]


class Node:
    """One server, or one node of a cluster.

    Attributes:
        client: an impatient client of it.
        rests_until: when it is asked again, by `clock.now()`, after it could not be reached.
    """

    __slots__ = ("__weakref__", "_rest", "client", "rests_until")

    def __init__(self, client: Any) -> None:
        self.client = client
        self.rests_until = 0.0
        self._rest = _FIRST_REST

    def send(self, commands: Sequence[Command], options: dict[str, Any], rest: float | None = None) -> list[Any]:
        """Send commands in one trip.

        Args:
            commands: what to send.
            options: redis-py's, for each of them.
            rest: seconds for which the node is left alone if it cannot be reached; None for longer each time.

        Returns:
            The reply to each command, or its error.
        """
        try:
            pipeline = self.client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command, **options)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001 - whatever a client raises, the thread has other keys to see to
            self.fail(rest)
            return [error] * len(commands)
        self._rest = _FIRST_REST
        return replies

    def connect(self) -> None:
        """Connect, so that the first renewal takes no longer than the others."""
        pool = getattr(self.client, "connection_pool", None)
        if pool is not None:
            redis.Redis(connection_pool=pool, single_connection_client=True).close()

    def fail(self, rest: float | None = None) -> None:
        """Note that it could not be reached."""
        self.rests_until = now() + (self._rest if rest is None else rest)
        self._rest = min(self._rest * 2, _LONGEST_REST)


class _ClusterNode(Node):
    """One node of a cluster, which may send a command on to another."""

    __slots__ = ("_cluster",)

    def __init__(self, client: Any, cluster: ClusterNodes) -> None:
        super().__init__(client)
        self._cluster = cluster

    def send(self, commands: Sequence[Command], options: dict[str, Any], rest: float | None = None) -> list[Any]:
        """See `Node`; a reply that says where a slot has moved to is followed."""
        return self._cluster.send(self, commands, options, rest)


class ClusterNodes:
    """The nodes of a cluster, and which one has which slot.

    It is not asked of the user's client, which would wait for a node that is frozen for as long as the user lets it.
    """

    def __init__(self, client: Any) -> None:
        """Begin with what a `RedisCluster` knows of its cluster."""
        self._client = client
        self._manager: Any = client.nodes_manager
        self._options = _in_haste(self._manager.connection_kwargs)
        if getattr(self._manager, "maint_notifications_config", None) is not None:
            self._options["maint_notifications_config"] = _without_notices(self._manager.maint_notifications_config)
        self._nodes: dict[_Address, Node] = {}
        self._suspects: set[Node] = set()
        slots: dict[Any, Any] = self._manager.slots_cache
        self._owners: dict[int, _Address] = {slot: (nodes[0].host, nodes[0].port) for slot, nodes in slots.items()}
        for address in set(self._owners.values()):
            self._at(address)

    def of(self, key: str) -> Node:
        """The node that has `key`, as far as is known."""
        address = self._owners.get(self._client.keyslot(key))
        return self._at(address) if address else next(iter(self._by_reach()))

    def _at(self, address: _Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            client = _closing(self._manager.create_redis_node(*address, **self._options))
            node = self._nodes[address] = _ClusterNode(client, self)
        return node

    def _by_reach(self) -> Iterable[Node]:
        """All nodes; those that could not be reached come last."""
        return sorted(self._nodes.values(), key=lambda node: node.rests_until)

    def send(
        self, node: Node, commands: Sequence[Command], options: dict[str, Any], rest: float | None, hops: int = 0
    ) -> list[Any]:
        """Send commands to a node, and those that it sends on to where it says."""
        if node in self._suspects:
            # A turn of its own, as the one that is asked may not answer either, and others are not to wait for two.
            self._suspects.discard(node)
            self._refresh(node)
            return [ConnectionError("it is being looked for where the slot is")] * len(commands)
        replies = Node.send(node, commands, options, rest)
        # A node that cannot be reached, or has become a replica, may have been replaced by another.
        if any(isinstance(reply, Exception) and _says_nothing_of_the_key(reply) for reply in replies):
            self._suspects.add(node)
        elsewhere: defaultdict[tuple[_Address, bool], list[int]] = defaultdict(list)
        for number, reply in enumerate(replies):
            if isinstance(reply, AskError):  # of which MovedError is one
                address = self._manager.remap_host_port(reply.host or _host(node), reply.port)
                has_moved = isinstance(reply, MovedError)
                elsewhere[address, has_moved].append(number)
                if has_moved:
                    self._owners[reply.slot_id] = address
        for (address, has_moved), numbers in elsewhere.items():
            target = self._at(address)
            if hops == _MOST_HOPS or target.rests_until > now():
                continue  # the error stands, and what it is about is tried again
            theirs = [commands[number] for number in numbers]
            if has_moved:
                answers = self.send(target, theirs, options, rest, hops + 1)
                self._refresh(node, target)
            else:
                asked = [each for command in theirs for each in (("ASKING",), command)]
                answers = Node.send(target, asked, options, rest)[1::2]
            for number, answer in zip(numbers, answers, strict=True):
                replies[number] = answer
        return replies

    def _refresh(self, but: Node, first: Node | None = None) -> None:
        """Ask one node which has which slot; if that one cannot be reached either, the next time is soon enough.

        Args:
            but: the node that is not to be asked.
            first: the one to be asked, else the one that could be reached for the longest time.
        """
        node = first or next((each for each in self._by_reach() if each is not but), None)
        if node is None or node.rests_until > now():
            return
        (reply,) = Node.send(node, [("CLUSTER SLOTS",)], {})
        if isinstance(reply, Exception):
            return
        found: dict[Any, Any] = parse_cluster_slots(reply, current_host=_host(node))
        for (begin, end), those in found.items():
            address: _Address = self._manager.remap_host_port(*those["primary"])
            self._owners.update(dict.fromkeys(range(begin, end + 1), address))
            self._at(address)


def _says_nothing_of_the_key(error: Exception) -> bool:
    return isinstance(error, ReadOnlyError) or not isinstance(error, ResponseError)


def _host(node: Node) -> str:
    host: str = node.client.connection_pool.connection_kwargs["host"]
    return host


def impatient(client: Any) -> Any:
    """A client of the same server that soon gives up; the same one where none can be made."""
    pool: Any = getattr(client, "connection_pool", None)
    options = _in_haste(getattr(pool, "connection_kwargs", {}))
    options["retry"] = Retry(NoBackoff(), 0)
    if type(pool) in (redis.ConnectionPool, redis.BlockingConnectionPool):
        return _closing(
            redis.Redis(connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **options))
        )
    if type(pool) is SentinelConnectionPool:
        manager = copy.copy(pool.sentinel_manager)
        manager.sentinels = [impatient(each) for each in manager.sentinels]
        options.update(is_master=pool.is_master, check_connection=pool.check_connection)
        options.update(connection_class=pool.connection_class)
        kind: Any = SentinelConnectionPool
        return _closing(redis.Redis(connection_pool=kind(pool.service_name, manager, **options)))
    return client


def _closing(client: Any) -> Any:
    """A client of ours that closes its connections when it is collected, and not the garbage collector them."""
    finalize(client, client.connection_pool.disconnect).atexit = False
    return client


def _in_haste(given: dict[str, Any]) -> dict[str, Any]:
    """Options of a connection, with which nobody waits for long."""
    # What tells of maintenance lengthens the time-outs, and has the user's own client look around in our thread.
    options = {name: value for name, value in given.items() if not name.startswith(("oss_cluster_", "orig_"))}
    options.pop("maint_notifications_pool_handler", None)
    options.pop("connection_pool", None)  # a Sentinel's, which is another one here
    if options.get("maint_notifications_config") is not None:
        options["maint_notifications_config"] = _without_notices(options["maint_notifications_config"])
    for name, longest in _PATIENCE.items():
        options[name] = min(options.get(name) or longest, longest)
    if "retry" in options:
        options["retry"] = Retry(NoBackoff(), 0)
    return options


def _without_notices(config: Any) -> Any:
    return type(config)(enabled=False)
