"""Time-outs: of our own client, and clients with shorter ones for the renewing thread, also behind Sentinels."""

import copy
from contextlib import suppress
from typing import Any
from weakref import finalize

import redis
from redis import backoff, retry

PATIENCE: dict[str, Any] = {"socket_timeout": 0.9, "socket_connect_timeout": 0.5}
"""Seconds that our own client waits for a reply and a connection; with one retry, a dead server is known in 2 s."""

NO_NOTICES: dict[str, Any] = {}
"""The option not to listen to news of maintenance, from redis-py 7 on.

These lengthen the time-outs, and make the user's own client look around in our thread.
redis-py would listen also where the user's client does not.
"""

with suppress(ImportError):
    from redis.maint_notifications import MaintNotificationsConfig

    NO_NOTICES["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)


def with_short_timeouts(client: Any) -> Any:
    """A client of the same server with short time-outs; ``client`` itself if none can be made."""
    pool: Any = getattr(client, "connection_pool", None)
    if type(pool) not in (redis.ConnectionPool, redis.BlockingConnectionPool, redis.SentinelConnectionPool):
        return client
    options = short_timeouts({"retry": None, **pool.connection_kwargs, "connection_class": pool.connection_class})
    if type(pool) is not redis.SentinelConnectionPool:
        return closing(redis.Redis(connection_pool=redis.ConnectionPool(**options)))
    manager = copy.copy(pool.sentinel_manager)
    manager.sentinels = [with_short_timeouts(each) for each in manager.sentinels]
    options.update(is_master=pool.is_master, check_connection=pool.check_connection)
    kind: Any = redis.SentinelConnectionPool
    return closing(redis.Redis(connection_pool=kind(pool.service_name, manager, **options)))


def closing(client: Any) -> Any:
    """Have the client close its connections when it is collected, because a socket that is collected open warns."""
    finalize(client, client.connection_pool.disconnect).atexit = False
    return client


def short_timeouts(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a connection, with short time-outs and without retries."""
    options = {**given, **NO_NOTICES}
    options.pop("connection_pool", None)  # a Sentinel's: the user's own
    # The seconds that the renewing thread waits for a reply and a connection: other nodes have keys to renew, too.
    for name, longest in {"socket_timeout": 0.5, "socket_connect_timeout": 0.25}.items():
        options[name] = min(options.get(name) or longest, longest)
    if "retry" in options:
        options["retry"] = retry.Retry(backoff.NoBackoff(), 0)
    return options
