"""Cluster and Sentinel: the nodes of a server, with short time-outs and own connections for the renewing thread."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any
from weakref import finalize

import redis
from redis import backoff, cluster, exceptions, retry

from only_one.lock.commands import Command, now

_FIRST_PAUSE = 0.05
MOST_IN_A_TRIP = 500
"""Commands in one trip, so that no trip takes long."""

LONG = 0.1
"""Seconds after which other keys may be due: they go before anything else that may take long."""

_NOTICES = "maint_notifications_config"
"""redis-py's option to listen to news of maintenance: it is for the user's own client only."""

_LEFT_OUT = ("oss_cluster_", "orig_", "maint_notifications_pool_handler", "connection_pool")
"""The beginnings of the names of connection options that concern the user's own client only.

The pool is a Sentinel's. The others listen to news of maintenance: that lengthens the time-outs, and makes the
user's own client look around in our thread.
"""

_reach = attrgetter("backs_off_until")
"""The order in which nodes are asked: waiting for an unreachable node must not cost others their leases."""


class Node:
    """One server, or one node of a cluster.

    Attributes:
        client: a client of it with short time-outs.
        host: its host, if it is a cluster's.
        backs_off_until: when it is asked again after it could not be reached, by ``commands.now()``.
    """

    def __init__(self, client: Any, cluster: "ClusterNodes | None" = None, host: str = "") -> None:
        self.client = client
        self.host = host
        self.backs_off_until = 0.0
        self._pause = _FIRST_PAUSE
        self._cluster = cluster

    def send(self, commands: Sequence[Command], options: dict[str, Any], pause: float | None = None) -> list[Any]:
        """Send commands in one trip; in a cluster, a command whose slot has moved is sent on.

        Args:
            commands: the commands.
            options: redis-py's, for each of them.
            pause: seconds for which the node is left alone if it cannot be reached; None for longer each time.

        Returns:
            The reply to each command, or its error.
        """
        replies = self.send_here(commands, options, pause)
        if self._cluster is not None:
            self._cluster.follow(self, commands, options, replies)
        return replies

    def send_here(self, commands: Sequence[Command], options: dict[str, Any], pause: float | None = None) -> list[Any]:
        """Send commands in one trip to this node, and to no other."""
        try:
            pipeline = self.client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command, **options)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001 - the thread has other keys to see to
            self.fail(pause)
            return [error] * len(commands)
        self._pause = _FIRST_PAUSE
        return replies

    def fail(self, pause: float | None = None) -> None:
        """Note that the node could not be reached."""
        self.backs_off_until = now() + (self._pause if pause is None else pause)
        self._pause = min(self._pause * 2, 1.0)


def trips(due: Iterable[Any]) -> list[tuple[Node, list[Any]]]:
    """Group leases or cleanups, which have a ``server`` and a ``key``, into trips to one node each."""
    nodes: defaultdict[Node, list[Any]] = defaultdict(list)
    for each in due:
        nodes[each.server.node_of(each.key)].append(each)
    return [
        (node, nodes[node][start : start + MOST_IN_A_TRIP])
        for node in sorted(nodes, key=_reach)
        for start in range(0, len(nodes[node]), MOST_IN_A_TRIP)
    ]


class ClusterNodes:
    """The nodes of a cluster, and the slots of each.

    The user's client is not asked: it would wait for a frozen node as long as the user's time-outs say.
    """

    def __init__(self, client: Any) -> None:
        """Begin with the nodes and slots that a ``RedisCluster`` knows."""
        self._client = client
        self._manager: Any = client.nodes_manager
        notices = getattr(self._manager, _NOTICES, None)
        given = self._manager.connection_kwargs
        self._options = _short_timeouts(given if notices is None else {**given, _NOTICES: notices})
        self._nodes: dict[tuple[str, int], Node] = {}
        self._owners: dict[Any, Any] = {
            slot: (owner.host, owner.port) for slot, (owner, *_) in self._manager.slots_cache.items()
        }
        for address in set(self._owners.values()):
            self._at(address)

    def of(self, key: str) -> Node:
        """The node that stores ``key``, as far as is known."""
        address = self._owners.get(self._client.keyslot(key))
        return self._at(address) if address else min(self._nodes.values(), key=_reach)

    def _at(self, address: tuple[str, int]) -> Node:
        if address not in self._nodes:
            client = _closing(self._manager.create_redis_node(*address, **self._options))
            self._nodes[address] = Node(client, self, address[0])
        return self._nodes[address]

    def follow(self, node: Node, commands: Sequence[Command], options: dict[str, Any], replies: list[Any]) -> None:
        """Follow redirections: MOVED names the node that has a slot from now on, ASK the node that is getting it.

        A command that was answered by ASK is sent on.
        A command that was answered by MOVED keeps its error, and goes to the right node when it is due again.
        """
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        # A node that cannot be reached, or has become a replica, may have been replaced by another.
        if any(isinstance(each, redis.ReadOnlyError) or not isinstance(each, redis.ResponseError) for each in errors):
            self._refresh(node)
        for number, reply in enumerate(replies):
            if isinstance(reply, exceptions.AskError):  # of which MovedError is one
                address = self._manager.remap_host_port(reply.host or node.host, reply.port)
                target = self._at(address)
                if not isinstance(reply, exceptions.MovedError):
                    if target.backs_off_until <= now():
                        replies[number] = target.send_here([("ASKING",), commands[number]], options)[1]
                elif self._owners.get(reply.slot_id) != address:
                    self._owners[reply.slot_id] = address
                    self._refresh(node, target)

    def _refresh(self, but: Node, first: Node | None = None) -> None:
        """Ask one node for the slots of all. If it cannot be reached either, the next time is soon enough.

        Args:
            but: the node that is not asked.
            first: the node that is asked; None for the node that has been reachable for the longest time.
        """
        node = first or min((each for each in self._nodes.values() if each is not but), key=_reach, default=None)
        if node is None or node.backs_off_until > now():
            return
        (reply,) = node.send_here([("CLUSTER SLOTS",)], {})
        if isinstance(reply, Exception):
            return
        ranges: dict[Any, Any] = cluster.parse_cluster_slots(reply, current_host=node.host)
        for (first_slot, last_slot), owners in ranges.items():
            address: Any = self._manager.remap_host_port(*owners["primary"])
            self._owners.update(dict.fromkeys(range(first_slot, last_slot + 1), address))
            self._at(address)


def with_short_timeouts(client: Any) -> Any:
    """A client of the same server with short time-outs; ``client`` itself if none can be made."""
    pool: Any = getattr(client, "connection_pool", None)
    if type(pool) not in (redis.ConnectionPool, redis.BlockingConnectionPool, redis.SentinelConnectionPool):
        return client
    options = _short_timeouts({"retry": None, **pool.connection_kwargs, "connection_class": pool.connection_class})
    if type(pool) is not redis.SentinelConnectionPool:
        return _closing(redis.Redis(connection_pool=redis.ConnectionPool(**options)))
    manager = copy.copy(pool.sentinel_manager)
    manager.sentinels = [with_short_timeouts(each) for each in manager.sentinels]
    options.update(is_master=pool.is_master, check_connection=pool.check_connection)
    kind: Any = redis.SentinelConnectionPool
    return _closing(redis.Redis(connection_pool=kind(pool.service_name, manager, **options)))


def _closing(client: Any) -> Any:
    """Have the client close its connections when it is collected, because a socket that is collected open warns."""
    finalize(client, client.connection_pool.disconnect).atexit = False
    return client


def _short_timeouts(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a connection, with short time-outs and without retries."""
    options = {name: value for name, value in given.items() if not name.startswith(_LEFT_OUT)}
    if options.get(_NOTICES) is not None:
        options[_NOTICES] = type(options[_NOTICES])(enabled=False)
    # The seconds that the renewing thread waits for a reply and a connection: other nodes have keys to renew, too.
    for name, longest in {"socket_timeout": 0.5, "socket_connect_timeout": 0.25}.items():
        options[name] = min(options.get(name) or longest, longest)
    if "retry" in options:
        options["retry"] = retry.Retry(backoff.NoBackoff(), 0)
    return options
