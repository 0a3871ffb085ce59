"""Time-outs: those of our own client, and clients with shorter ones for the renewing thread, also for Sentinels."""

import copy
from contextlib import suppress
from typing import Any
from weakref import finalize

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

OUR_TIMEOUTS: dict[str, Any] = {"socket_timeout": 0.9, "socket_connect_timeout": 0.5, **NO_NOTICES}
"""Seconds that our own client waits for a reply and a connection; with one retry, it knows in 2 s of a dead server."""


def with_short_timeouts(client: Any) -> Any:
    """A client of the same server with short time-outs; ``client`` itself if none can be made."""
    pool: Any = getattr(client, "connection_pool", None)
    if type(pool) not in (redis.ConnectionPool, redis.BlockingConnectionPool, redis.SentinelConnectionPool):
        return client
    options = short_timeouts({"retry": None, **pool.connection_kwargs, "connection_class": pool.connection_class})
    if type(pool) is not redis.SentinelConnectionPool:
        return closed_when_collected(redis.Redis(connection_pool=redis.ConnectionPool(**options)))
    manager = copy.copy(pool.sentinel_manager)
    manager.sentinels = [with_short_timeouts(each) for each in manager.sentinels]
    options.update(is_master=pool.is_master, check_connection=pool.check_connection)
    kind: Any = redis.SentinelConnectionPool
    return closed_when_collected(redis.Redis(connection_pool=kind(pool.service_name, manager, **options)))


def closed_when_collected(client: Any) -> Any:
    """The same client, whose connections are closed when it is collected: an open socket would warn then."""
    finalize(client, client.connection_pool.disconnect).atexit = False
    return client


def short_timeouts(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a connection, with short time-outs and without retries."""
    options = {**given, **NO_NOTICES}
    options.pop("connection_pool", None)  # the user's own, in the options of a Sentinel's connection
    # The most seconds for which the renewing thread waits for one node, because other nodes have keys to renew, too.
    for name, longest in {"socket_timeout": 0.5, "socket_connect_timeout": 0.25}.items():
        options[name] = min(options.get(name) or longest, longest)
    if "retry" in options:
        options["retry"] = retry.Retry(backoff.NoBackoff(), 0)
    return options
