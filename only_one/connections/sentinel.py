"""A master behind Sentinels."""

import copy
from collections.abc import Sequence
from typing import Any

from only_one.clock import now
from only_one.driver import TROUBLE, Command

from .node import Node


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
