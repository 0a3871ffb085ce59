"""Pools and Sentinels of our own, which connect as a user's client does, and their time-outs."""

from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import redis
from redis import backoff

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


def own_pool(
    pool: Any,
    longest: dict[str, float],
    library: Any = redis,
    class_of: Callable[[Any], Any] = attrgetter("connection_class"),
) -> Any:
    """A pool that connects as ``pool`` does, but without retries: whoever sends the commands repeats them.

    Args:
        pool: the pool of a sync client of redis-py, of any class.
        longest: the longest time-outs, by the names of redis-py's options; empty for those of ``pool``.
        library: ``redis``, or ``redis.asyncio`` for a pool of an event loop.
        class_of: gives the class of the connections, by a sync pool.
    """
    given = pool.connection_kwargs
    made: Any = library.ConnectionPool(max_connections=NO_LIMIT, **NO_NOTICES)
    if isinstance(pool, redis.SentinelConnectionPool):
        manager = pool.sentinel_manager
        own = [own_pool(each.connection_pool, longest, library, class_of) for each in manager.sentinels]
        clients = [library.Redis(connection_pool=each) for each in own]
        asks = SentinelsInTurn if longest is SHORT_TIMEOUTS else Sentinels
        sentinels = asks(manager, type(manager) if library is redis else library.Sentinel, clients)
        made = library.SentinelConnectionPool(pool.service_name, sentinels, **NO_NOTICES)
    ours = {**made.connection_kwargs, **NO_NOTICES, "retry": library.retry.Retry(backoff.NoBackoff(), 0)}
    ours.update((name, min(given.get(name) or seconds, seconds)) for name, seconds in longest.items())
    made.connection_kwargs = ChainMap(ours, given)  # the user may change an option later, such as the password
    made.connection_class = class_of(pool)
    return made


class Sentinels:
    """Sentinels that several commands can ask at once, for redis-py's pools, sync and async.

    Attributes:
        sentinels: a client of each; first the one that has answered last.
    """

    def __init__(self, manager: Any, kind: Any, sentinels: list[Any]) -> None:
        """Ask ``sentinels`` as ``manager``, redis-py's, asks its own, by the method of a class like the manager's."""
        self._manager, self._kind, self.sentinels = manager, kind, sentinels

    def discover_master(self, service_name: str) -> Any:
        """The address of the master; in asyncio, to be awaited.

        Each command has a list of its own, because redis-py swaps two Sentinels in the list while it goes through it:
        of two swaps at once, one would lose a Sentinel for good.
        """
        self.sentinels = [*self.sentinels]
        asked = object.__new__(self._kind)
        # By attributes and not by parameters, which depend on the version of redis-py.
        asked.__dict__ = {**vars(self._manager), "sentinels": self.sentinels}
        return asked.discover_master(service_name)


class SentinelsInTurn(Sentinels):
    """Those that the renewing thread asks one at a time: one may not answer, and other nodes have keys to renew."""

    def discover_master(self, service_name: str) -> Any:
        """The address of the master, from the first Sentinel; one that does not tell it is asked last from then on."""
        first, *others = self.sentinels
        self.sentinels = [*others, first]
        address = Sentinels(self._manager, self._kind, [first]).discover_master(service_name)
        self.sentinels = [first, *others]
        return address
