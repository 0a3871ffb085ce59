"""Pools and Sentinels of our own, which connect as a user's client does, and their time-outs."""

import copy
from collections import ChainMap
from contextlib import suppress
from typing import Any

import redis
from redis import backoff, retry

NO_NOTICES: dict[str, Any] = {}
"""The option that switches maintenance notifications off, from redis-py 7 on.

Such a notification lengthens the time-outs, and makes the user's own client look for nodes in our thread.
A client made here would listen to them by default, even if the user's client does not.
"""

with suppress(ImportError):
    from redis.maint_notifications import MaintNotificationsConfig

    NO_NOTICES["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)

OUR_TIMEOUTS: dict[str, Any] = {"socket_timeout": 0.9, "socket_connect_timeout": 0.5}
"""Seconds that our own client waits for a reply and a connection; with one retry, it knows in 2 s of a dead server."""

SHORT_TIMEOUTS: dict[str, float] = {"socket_timeout": 0.5, "socket_connect_timeout": 0.25}
"""The most seconds for which the renewing thread waits for one node, because other nodes have keys to renew, too."""

NO_LIMIT = 2**31
"""The number of connections of a pool that makes as many as its commands ask for."""


def own_pool(pool: Any, longest: dict[str, float]) -> Any:
    """A pool that connects as ``pool`` does, but without retries: whoever sends the commands repeats them.

    Args:
        pool: the pool of a sync client of redis-py, of any class.
        longest: the longest time-outs, by the names of redis-py's options; empty for those of ``pool``. Whoever gives
            some waits for one Sentinel at a time, too.
    """
    given = pool.connection_kwargs
    made: Any = redis.ConnectionPool(max_connections=NO_LIMIT, **NO_NOTICES)
    if isinstance(pool, redis.SentinelConnectionPool):
        own = [own_pool(each.connection_pool, longest) for each in pool.sentinel_manager.sentinels]
        asks = SentinelsInTurn if longest else Sentinels
        sentinels = asks(pool.sentinel_manager, [redis.Redis(connection_pool=each) for each in own])
        kind: Any = redis.SentinelConnectionPool
        made = kind(pool.service_name, sentinels, **NO_NOTICES)
    ours = {**made.connection_kwargs, **NO_NOTICES, "retry": retry.Retry(backoff.NoBackoff(), 0)}
    ours.update((name, min(given.get(name) or seconds, seconds)) for name, seconds in longest.items())
    made.connection_kwargs = ChainMap(ours, given)  # the user may change an option later, such as the password
    made.connection_class = pool.connection_class
    return made


class Sentinels:
    """Sentinels that several commands can ask at once, for redis-py's pools, sync and async.

    Attributes:
        sentinels: a client of each; first the one that has answered last.
    """

    def __init__(self, manager: Any, sentinels: list[Any]) -> None:
        """Ask ``sentinels`` in the way in which ``manager``, redis-py's, asks its own."""
        self._manager, self.sentinels = manager, sentinels

    def discover_master(self, service_name: str) -> Any:
        """The address of the master; in asyncio, to be awaited.

        Each command has a list of its own, because redis-py swaps two Sentinels in the list while it goes through it:
        of two swaps at once, one would lose a Sentinel for good.
        """
        asked = copy.copy(self._manager)
        asked.sentinels = self.sentinels = [*self.sentinels]
        return asked.discover_master(service_name)


class SentinelsInTurn(Sentinels):
    """Those that the renewing thread asks one at a time: one may not answer, and other nodes have keys to renew."""

    def discover_master(self, service_name: str) -> Any:
        """The address of the master, from the first Sentinel; one that does not tell it is asked last from then on."""
        first, *others = self.sentinels
        self.sentinels = [*others, first]
        address = Sentinels(self._manager, [first]).discover_master(service_name)
        self.sentinels = [first, *others]
        return address
