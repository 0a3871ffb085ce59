"""Clients whose connections go back to their pool only when no reply is yet to come on them.

redis-py closes a connection when something is raised while it sends or while it reads.
It keeps the connection when something is raised in between, or between two commands with which a connection begins:
a signal handler's exception, such as Celery's soft time limit.
The next command on it would take the reply for its own, or go to another database.
"""

from __future__ import annotations

import copy
import signal
import sys
import traceback
import types
from functools import cache
from queue import Full, SimpleQueue
from typing import Any

import redis
from redis.exceptions import ConnectionError, RedisError, ResponseError  # noqa: A004 - redis-py's are meant


def guarded(client: Any) -> Any:
    """A client that sends on the same connections as `client`, and closes the one on which a command is interrupted.

    Args:
        client: a sync client of redis-py; one that has no pool comes back as it is.
    """
    if isinstance(client, redis.RedisCluster):
        return _seen_as(_Cluster, client)
    if not hasattr(client, "connection_pool"):
        return client
    found = copy.copy(client)
    found.connection_pool = guarded_pool(client.connection_pool)
    found.connection = None  # one that is never given back is never looked at
    found.auto_close_connection_pool = False  # it is for the user's client to close it
    return found


def guarded_pool(pool: Any) -> Any:
    """The same pool, to which a connection goes back as `guarded` says; for a pool that waits, another one like it."""
    if isinstance(pool, redis.BlockingConnectionPool):
        # Its queue is Python's, whose lock stays taken when a signal handler raises where it has just been acquired.
        pool = copy.copy(pool)
        del pool._connections  # noqa: SLF001 - they are the other's
        pool.queue_class = _Idle
        pool.reset()
    return _seen_as(_Pool, pool)


def call_trouble(error: Exception) -> None:
    """Raise an error of redis-py's in the place of what has come of connecting, whatever a client's own code raised.

    What a signal's handler raises stays what it is, as it is about something else.

    Raises:
        ConnectionError: unless `error` may stay what it is.
    """
    if isinstance(error, (RedisError, OSError)):
        return
    handlers = {getattr(signal.getsignal(each), "__code__", None) for each in signal.valid_signals()}
    if not any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
        msg = f"{type(error).__name__}: {error}"
        raise ConnectionError(msg) from error


class _Alias:
    """The same object in all but its class, as both share their attributes."""

    def __del__(self) -> None:
        """Close nothing: that is for the original to do."""


class _Pool(_Alias):
    """A sync pool."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        try:
            connection = parent.get_connection(*args, **options)
        except Exception as error:
            call_trouble(error)
            raise
        # What is being handled already. Not the exception itself, which would live for as long as the connection.
        connection.lent_during = id(sys.exc_info()[1])
        return connection

    def release(self, connection: Any) -> None:
        error = sys.exc_info()[1]
        lent_during = vars(connection).pop("lent_during", None)
        if error is not None and not isinstance(error, ResponseError) and id(error) != lent_during:
            connection.disconnect()
            # It may have been asking where the master is, by clients that are the user's own.
            for sentinel in getattr(getattr(self, "sentinel_manager", None), "sentinels", ()):
                sentinel.connection_pool.disconnect(inuse_connections=False)
        parent: Any = super()
        parent.release(connection)


class _Idle:
    """The queue of a pool that waits: the last that came is the first to go, and no lock is left taken.

    Attributes:
        queue: the connections that nobody uses.
    """

    def __init__(self, most: int) -> None:
        self.queue: list[Any] = []
        self._most = most
        self._turns: SimpleQueue[None] = SimpleQueue()

    def put_nowait(self, connection: Any) -> None:
        if len(self.queue) == self._most:
            raise Full
        self.queue.append(connection)
        self._turns.put(None)

    def get(self, block: bool, timeout: float | None) -> Any:  # noqa: FBT001 - as `queue.LifoQueue` has it
        self._turns.get(block, timeout)
        return self.queue.pop()


class _ByNode:
    """What sends to the nodes of a cluster, each of which has a pool."""

    def get_redis_connection(self, node: Any) -> Any:
        parent: Any = super()
        return guarded(parent.get_redis_connection(node))


class _Cluster(_Alias, _ByNode):
    """A client of a cluster."""

    def pipeline(self, *args: Any, **options: Any) -> Any:
        parent: Any = super()
        found = parent.pipeline(*args, **options)
        kind: Any = type(found)
        found.__class__ = _kind(_ByNode, kind)
        return found


def _seen_as(mixin: Any, original: Any) -> Any:
    kind: Any = type(original)
    alias: Any = object.__new__(_kind(mixin, kind))
    alias.__dict__ = vars(original)
    return alias


@cache
def _kind(mixin: Any, kind: Any) -> type:
    return types.new_class(kind.__name__, (mixin, kind), exec_body=lambda body: body.update(__module__=kind.__module__))
