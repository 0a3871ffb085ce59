"""The asyncio twin of a client: the same server, credentials, encryption and time-outs, for event loops."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.connection
import redis.asyncio.retry
import redis.asyncio.sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError, TimeoutError  # noqa: A004 - redis-py's are meant
from redis.sentinel import SentinelConnectionPool

from .errors import ConfigurationError
from .interruptions import is_interrupted, note_lending

_sentinel: Any = redis.asyncio.sentinel  # which has no types

RETRIES = 1
"""How often a client made here sends a command again, and after what."""
RETRIED: list[type[Exception]] = [ConnectionError, TimeoutError]  # redis-py 5 wants them named


class _Guarded:
    """A pool as `interruptions` has it."""

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        return note_lending(await parent.get_connection(*args, **options))

    async def release(self, connection: Any) -> None:
        if is_interrupted(connection):
            await connection.disconnect(nowait=True)
        parent: Any = super()
        await parent.release(connection)


class _Pool(_Guarded, redis.asyncio.ConnectionPool):
    pass


class _PoolThatWaits(_Guarded, redis.asyncio.BlockingConnectionPool):
    pass


class _SentinelPool(_Guarded, _sentinel.SentinelConnectionPool):  # type: ignore[misc]
    pass


class _Cluster(redis.asyncio.RedisCluster):
    """The same for a cluster, whose nodes have no pools."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        try:
            return await parent.execute_command(*args, **options)
        except (RedisError, asyncio.CancelledError):  # after which redis-py itself closes the connection
            raise
        except BaseException:
            # It is among these, and nobody else in this thread has had a turn since.
            nodes: list[Any] = self.get_nodes()
            for connection in [each for node in nodes for each in node._free]:  # noqa: SLF001 - no other way to get at them
                await connection.disconnect(nowait=True)
            raise


def async_twin(client: Any) -> Any:
    """The asyncio client that does what a sync one does.

    Args:
        client: a client of redis-py, of one server, of what a Sentinel watches, or of a cluster.

    Raises:
        ConfigurationError: if it connects in a way for which asyncio has none.
    """
    if isinstance(client, redis.RedisCluster):
        return _cluster_twin(client)
    pool = client.connection_pool
    name = pool.connection_class.__name__
    kind = getattr(redis.asyncio.connection, name, None) or getattr(_sentinel, name, None)
    if kind is None:
        msg = f"no asyncio client can be made from one that connects by {pool.connection_class!r}: give redis= as a URL"
        raise ConfigurationError(msg)
    known = _parameters(kind) - {"retry", "retry_on_error", "redis_connect_func", "event_dispatcher"}
    options = {name: value for name, value in pool.connection_kwargs.items() if name in known}
    options.update(retry=redis.asyncio.retry.Retry(NoBackoff(), RETRIES), retry_on_error=RETRIED)
    options.update(connection_class=kind, max_connections=pool.max_connections)
    if isinstance(pool, SentinelConnectionPool):
        return redis.asyncio.Redis.from_pool(_sentinel_pool(pool, options))
    waits = isinstance(pool, redis.BlockingConnectionPool)
    pools: Any = _PoolThatWaits if waits else _Pool
    return redis.asyncio.Redis.from_pool(pools(**options))


def _sentinel_pool(pool: Any, options: dict[str, Any]) -> Any:
    sync = pool.sentinel_manager
    manager = _sentinel.Sentinel([])
    # All that it was told, whatever this version of redis-py can be told.
    vars(manager).update(vars(sync), sentinels=[async_twin(each) for each in sync.sentinels])
    return _SentinelPool(
        pool.service_name, manager, is_master=pool.is_master, check_connection=pool.check_connection, **options
    )


def _cluster_twin(client: Any) -> Any:
    known = set(inspect.signature(redis.asyncio.RedisCluster.__init__).parameters) - {"self", "host", "port", "retry"}
    given: dict[str, Any] = client.nodes_manager.connection_kwargs
    options = {name: value for name, value in given.items() if name in known and value is not None}
    if issubclass(given.get("connection_class", redis.Connection), redis.SSLConnection):
        options["ssl"] = True  # as a URL says it
    options["address_remap"] = client.nodes_manager.address_remap
    nodes = [redis.asyncio.cluster.ClusterNode(str(node.host), int(node.port)) for node in client.get_nodes()]
    return _Cluster(startup_nodes=nodes, **options)


def _parameters(kind: type) -> set[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in base.__dict__:
            found.update(inspect.signature(base.__dict__["__init__"]).parameters)
    return found - {"self", "args", "kwargs"}


async def close_twin(twin: Any) -> None:
    """Close the connections of a twin, those to Sentinels among them."""
    pool = getattr(twin, "connection_pool", None)
    manager = getattr(pool, "sentinel_manager", None)
    for client in (twin, *(manager.sentinels if manager is not None else ())):
        await client.aclose()
