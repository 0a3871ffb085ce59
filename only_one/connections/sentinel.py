"""A master behind Sentinels."""

import copy
from collections.abc import Sequence
from typing import Any

from only_one.clock import now
from only_one.driver import TROUBLE, Command

from .node import Node


class MasterNode(Node):
    """A master behind Sentinels: its clients leave it when it was replaced, which they may not know for ten seconds.

    Only one Sentinel is asked, in a tenth of the time at the most: it may not answer, and other nodes have keys to
    renew.
    """

    def __init__(self, client: Any, given: Any) -> None:
        """Ask for ``client``, which the renewing thread has made, and for the user's, of which it was made."""
        super().__init__(client)
        self._pools = client.connection_pool, given.connection_pool
        self._asks_from = 0.0  # by `now()`

    def send(self, commands: Sequence[Command], pause: float | None = None) -> list[Any]:
        """See ``Node``; before it, ask where the master is, if it is time to."""
        if now() >= self._asks_from:
            self._find_master()
        return super().send(commands, pause)

    def _find_master(self) -> None:
        began, (pool, _) = now(), self._pools
        sentinels, manager = pool.sentinel_manager.sentinels, copy.copy(pool.sentinel_manager)
        manager.sentinels = sentinels[:1]
        try:
            if pool.master_address not in (None, manager.discover_master(pool.service_name)):
                for each in self._pools:
                    each.disconnect(inuse_connections=False)
        except TROUBLE:
            sentinels.append(sentinels.pop(0))  # the next time another
        self._asks_from = now() + 9 * (now() - began)
