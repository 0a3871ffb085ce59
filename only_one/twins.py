"""The asyncio twin of a client: the same server, credentials, encryption and time-outs, for event loops."""

from __future__ import annotations

import asyncio
import inspect
from math import inf
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

from .clock import now
from .errors import ConfigurationError
from .interruptions import call_trouble, is_interrupted, note_lending

_sentinel: Any = redis.asyncio.sentinel  # which has no types

RETRIES = 1
"""How often a client made here sends a command again, and after what."""
RETRIED: list[type[Exception]] = [ConnectionError, TimeoutError]  # redis-py 5 wants them named


_NO_LIMIT = 2**31
_OF_SYNC_CLIENTS = {"retry", "retry_on_error", "redis_connect_func", "event_dispatcher", "parser_class"}
"""Options of a connection that mean something else to asyncio."""


class _InTurn:
    """Has commands wait for one another where there are more of them than connections, which redis-py refuses.

    Nobody waits for longer than it takes to know that a server is down: what one command finds out, all know that wait.
    (A pool of redis-py's that waits can lose a connection for good when a task is cancelled.)
    """

    _turns: asyncio.Semaphore
    _answered_at = -inf
    _timed_out_at = -inf

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        asked = now()
        async with self._turns:
            if self._timed_out_at > asked:
                msg = "Timeout waiting for a connection: the server did not answer on any"
                raise TimeoutError(msg)
            sent = now()
            try:
                reply = await parent.execute_command(*args, **options)
            except TimeoutError:
                if self._answered_at < sent:
                    self._timed_out_at = now()
                raise
            self._answered_at = now()
            return reply


class _Guarded:
    """A pool as `interruptions` has it."""

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        try:
            return note_lending(await parent.get_connection(*args, **options))
        except Exception as error:
            call_trouble(error)
            raise

    async def release(self, connection: Any) -> None:
        if is_interrupted(connection):
            await connection.disconnect(nowait=True)
        parent: Any = super()
        await parent.release(connection)


class _GuardedCluster(redis.asyncio.RedisCluster):
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


def _subclass(*bases: Any) -> Any:
    return type(f"_{bases[1].__name__}", bases, {})


_Pool = _subclass(_Guarded, redis.asyncio.ConnectionPool)
_SentinelPool = _subclass(_Guarded, _sentinel.SentinelConnectionPool)
_Client = _subclass(_InTurn, redis.asyncio.Redis)
_Cluster = _subclass(_InTurn, _GuardedCluster)


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
    known = _parameters(kind) - _OF_SYNC_CLIENTS
    options = {name: value for name, value in pool.connection_kwargs.items() if name in known}
    options.update(retry=redis.asyncio.retry.Retry(NoBackoff(), RETRIES), retry_on_error=RETRIED)
    options.update(connection_class=kind, max_connections=_NO_LIMIT)
    is_watched = isinstance(pool, SentinelConnectionPool)
    twin: Any = _Client.from_pool(_sentinel_pool(pool, options) if is_watched else _Pool(**options))
    twin._turns = asyncio.Semaphore(pool.max_connections)  # noqa: SLF001 - as a connection is for one command
    return twin


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
    options["max_connections"] = _NO_LIMIT
    twin: Any = _Cluster(startup_nodes=nodes, **options)
    most: int = given.get("max_connections") or redis.ConnectionPool().max_connections
    twin._turns = asyncio.Semaphore(most)  # noqa: SLF001 - see above
    return twin


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
