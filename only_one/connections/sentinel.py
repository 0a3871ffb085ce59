"""Sentinel: which server is the master, asked by the renewing thread before each of its trips."""

import copy
from typing import Any

from only_one.clock import now
from only_one.driver import TROUBLE


class MasterFinder:
    """Has the clients of a master leave it when the Sentinels have replaced it, which it may not know for ten seconds.

    Only one Sentinel is asked, in a tenth of the time at the most: it may not answer, and other nodes have keys to
    renew.
    """

    def __init__(self, client: Any, given: Any) -> None:
        """Ask for ``client``, which the renewing thread has made, and for the user's, of which it was made."""
        self._pools = client.connection_pool, given.connection_pool
        self._asks_from = 0.0  # by `now()`

    def __call__(self) -> None:
        """Ask, if it is time to."""
        began, (pool, _) = now(), self._pools
        if began < self._asks_from:
            return
        sentinels, manager = pool.sentinel_manager.sentinels, copy.copy(pool.sentinel_manager)
        manager.sentinels = sentinels[:1]
        try:
            if pool.master_address not in (None, manager.discover_master(pool.service_name)):
                for each in self._pools:
                    each.disconnect(inuse_connections=False)
        except TROUBLE:
            sentinels.append(sentinels.pop(0))  # the next time another
        self._asks_from = now() + 9 * (now() - began)
