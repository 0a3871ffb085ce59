"""Clients with short time-outs for the renewing thread: of one server, or of a master behind Sentinels."""

import copy
from typing import Any
from weakref import finalize

import redis
from redis import backoff, retry

NOTICES = "maint_notifications_config"
"""redis-py's option to listen to news of maintenance: it is for the user's own client only."""

_LEFT_OUT = ("oss_cluster_", "orig_", "maint_notifications_pool_handler", "connection_pool")
"""The beginnings of the names of connection options that concern the user's own client only.

The pool is a Sentinel's. The others listen to news of maintenance: that lengthens the time-outs, and makes the
user's own client look around in our thread.
"""


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
    options = {name: value for name, value in given.items() if not name.startswith(_LEFT_OUT)}
    if options.get(NOTICES) is not None:
        options[NOTICES] = type(options[NOTICES])(enabled=False)
    # The seconds that the renewing thread waits for a reply and a connection: other nodes have keys to renew, too.
    for name, longest in {"socket_timeout": 0.5, "socket_connect_timeout": 0.25}.items():
        options[name] = min(options.get(name) or longest, longest)
    if "retry" in options:
        options["retry"] = retry.Retry(backoff.NoBackoff(), 0)
    return options
