"""One server, or one node of a cluster, and the trips of the renewing thread's commands to it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import redis

from only_one.clock import now
from only_one.driver import RAW, Command

_FIRST_PAUSE = 0.05

MOST_IN_A_TRIP = 500
"""The most commands in one trip, so that no trip takes long."""

LONG_TURN = 0.1
"""Seconds after which the renewing thread breaks off what it does, to renew the keys that have become due."""

by_reach = attrgetter("backs_off_until")
"""The order in which nodes are asked: last the unreachable ones, so that the wait for them costs no other its lease."""


class Node:
    """One server, or one node of a cluster.

    Attributes:
        client: a client of it with short time-outs.
        host: its host, if it is a cluster's.
        backs_off_until: until when it is left alone because it could not be reached, by ``clock.now()``.
    """

    host = ""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.backs_off_until = 0.0
        self._pause = _FIRST_PAUSE

    def node_of(self, _key: object) -> "Node":
        """The node itself, which stores every key that it is asked for."""
        return self

    def nodes(self) -> list["Node"]:
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


def trips(due: Iterable[Any]) -> list[tuple[Node, list[Any]]]:
    """Group leases or pending releases, which have a ``server`` and a ``key``, into trips to one node each."""
    nodes: defaultdict[Node, list[Any]] = defaultdict(list)
    for each in due:
        nodes[each.server.node_of(each.key)].append(each)
    return [
        (node, nodes[node][start : start + MOST_IN_A_TRIP])
        for node in sorted(nodes, key=by_reach)
        for start in range(0, len(nodes[node]), MOST_IN_A_TRIP)
    ]
