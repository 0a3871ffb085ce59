"""Pinned connections: kept between commands, which makes each cheaper, and dropped when a command is interrupted.

redis-py closes a connection when an exception is raised while it sends or while it reads.
It keeps the connection when a signal handler's exception, such as Celery's soft time limit, is raised in between,
or between two of the commands with which a connection begins.
The next command on it would take the reply for its own, or go to another database.
So ``PinnedClient`` drops such a connection, and the pools of all other clients are ``guarded``.
"""

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from queue import Full, SimpleQueue
from typing import Any
from weakref import WeakSet, finalize

import redis
from redis.cluster import ClusterNode

from only_one.driver import RAW, Command, is_of_signal_handler, note_unanswered, raised_by_signal_handler
from only_one.forks import in_each_child
from only_one.signatures import signature

_MOST_KEPT = 16
"""The most connections that are kept. The pool has the others, and lends them to the user's own commands, too."""

_named = signature(redis.ConnectionPool.get_connection).parameters.get("command_name")
_FOR_NO_COMMAND = ("_",) if _named and _named.default is _named.empty else ()  # until redis-py 5.2; later ones warn

OF_ALL_CONNECTIONS = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
"""The errors after which no other kept connection is used again either.

The server may have closed the others, too, or the network between may have forgotten them. Or their server is a
replica now, and its name may lead to another server.
"""

_clients: WeakSet["PinnedClient"] = WeakSet()
_inherited: list[Any] = []


class _Pinned:
    """One connection. It is also dropped when it is forgotten, as by an exception between two lines.

    Attributes:
        connection: redis-py's connection.
        drop: closes it, because a reply may be yet to come on it. The next one that is borrowed returns it to the pool.
    """

    def __init__(self, pool: Any) -> None:
        """Borrow a connection from the pool, once those that were dropped are back in theirs."""
        while _dropped:
            with suppress(IndexError):  # another thread may return the last
                _return(*_dropped.pop())
        self.connection = pool.get_connection(*_FOR_NO_COMMAND)
        # Whatever was handled then is over when it is dropped, and a later exception may have the same id.
        del self.connection.lent_during
        # No `__del__`: a signal handler's exception in it would be lost, even where nothing was connected.
        self.drop = finalize(self, _drop, pool, self.connection)
        self.drop.atexit = False


_dropped: list[tuple[Any, Any]] = []
"""The connections that were dropped, each after its pool."""


def _drop(pool: Any, connection: Any) -> None:
    # It may be called where garbage is collected, and in a thread that has acquired the pool's lock.
    _dropped.append((pool, connection))
    connection.disconnect()


def _return(pool: Any, connection: Any) -> None:
    try:
        connection.disconnect()
    finally:  # where that is interrupted, too, the guarded pool closes it
        pool.release(connection)


class PinnedClient(redis.Redis):
    """Sends each command on a connection that it keeps, past the pool.

    redis-py's pool checks every connection before it lends it, in case the server has closed it. That check costs
    three system calls. Here it is done after a command has failed: the second attempt is the pool's. So a command
    may be sent twice, as with redis-py's own retries. All commands of a lock must bear that anyhow.

    Attributes:
        kept: the connections that no command uses.
        sends_again: whether the drivers send a command again that got no answer, because redis-py does not.
    """

    sends_again = False

    def __init__(self, client: Any) -> None:
        """See ``fits`` for the clients that it can replace."""
        super().__init__(connection_pool=guarded_pool(client.connection_pool))
        self.kept: list[_Pinned] = []
        _clients.add(self)

    @staticmethod
    def fits(client: Any) -> bool:
        """Whether ``client`` is a plain one: not of another class, altered, short of connections, or cached.

        And whether its commands are packed, sent and read as here: a later redis-py may do that in another way.
        """
        if type(client) is not redis.Redis:
            return False
        if "execute_command" in vars(client) or client.connection is not None:
            return False
        pool: Any = client.connection_pool
        is_plain = type(pool) is redis.ConnectionPool and pool.cache is None
        as_here = _is_known(pool.connection_class)
        # Tokens that are renewed get to a connection when it goes back to the pool.
        renews = hasattr(pool.connection_kwargs.get("credential_provider"), "on_next")
        return is_plain and as_here and not renews and pool.max_connections >= redis.ConnectionPool().max_connections

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis-py. Only commands with ``RAW``, whose replies need no parsing, are sent on a kept connection."""
        untyped: Any = super()
        if options != RAW:
            return untyped.execute_command(*args, **options)
        try:
            pinned: _Pinned | None = self.kept.pop()
        except IndexError:  # which is over when we connect, and so not in the traceback of an error there
            pinned = None
        pinned = pinned or _Pinned(self.connection_pool)
        connection, handled = pinned.connection, sys.exc_info()[1]

        try:
            try:
                reply = _exchange(connection, args)
            except redis.RedisError as error:
                reply = _exchange_again(connection, args, error, handled)
        except BaseException as error:
            self._end(pinned, error)
            is_closed = isinstance(error, redis.ConnectionError) and not raised_by_signal_handler(error, handled)
            if self.sends_again or not is_closed:
                raise
            note_unanswered()
        else:
            self._keep(pinned)
            return reply
        return untyped.execute_command(*args, **options)

    def _end(self, pinned: _Pinned, error: BaseException) -> None:
        if leaves_usable(error):
            self._keep(pinned)
        else:  # a reply may be on its way still, which the next command there would take for its own
            pinned.drop()
        if isinstance(error, OF_ALL_CONNECTIONS):
            self.kept = []

    def _keep(self, pinned: _Pinned) -> None:
        if len(self.kept) < _MOST_KEPT:
            self.kept.append(pinned)
        elif pinned.drop.detach():
            redis.ConnectionPool.release(self.connection_pool, pinned.connection)  # past the guard


def _exchange(connection: Any, command: Command) -> Any:
    connection.send_packed_command((packed(command),))
    return connection.read_response(disable_decoding=True)


def _exchange_again(connection: Any, command: Command, failed: Exception, handled: BaseException | None) -> Any:
    """After a time-out, send the command again, as often as the user's client says; else raise the error.

    redis-py's retry begins with the attempt that has failed: around each command it would cost a microsecond.
    """
    errors = [failed]

    def attempt() -> Any:
        if errors:
            raise errors.pop()
        return _exchange(connection, command)

    def before_another(error: Exception) -> None:
        connection.disconnect()
        if isinstance(error, redis.ConnectionError) or raised_by_signal_handler(error, handled):
            raise error

    return connection.retry.call_with_retry(attempt, before_another)


def leaves_usable(error: BaseException) -> bool:
    """Whether the connection of a command that has failed can be kept: the server has refused it, and is a master."""
    return isinstance(error, redis.ResponseError) and not isinstance(error, redis.ReadOnlyError)


def _is_known(kind: Any) -> bool:
    """Whether connections of a class send and read by redis-py's own methods, and these are as we know them."""
    names = ("send_command", "send_packed_command", "read_response")
    are_own = all(getattr(kind, name, None) is getattr(redis.Connection, name, kind) for name in names)
    return are_own and "disable_decoding" in signature(kind.read_response).parameters


@cache
def _form(parts: int) -> bytes:
    return b"*%d\r\n" % parts + b"$%d\r\n%b\r\n" * parts


def _packed(command: Command) -> bytes:
    """A command as the server reads it, in UTF-8; redis-py's own way takes three times as long."""
    values: list[int | bytes] = []
    for each in command:
        encoded = each if type(each) is bytes else str(each).encode()
        values.append(len(encoded))
        values.append(encoded)
    return _form(len(command)) % tuple(values)


packed: Callable[[Command], bytes] = _packed
with suppress(ImportError, AttributeError):  # it takes half of that
    packed = import_module("hiredis").pack_command


def _begin_anew_in_child() -> None:
    """Use the connections no more: they are the parent's, and must not even be closed here."""
    for client in list(_clients):
        _inherited.append(client.kept)
        client.kept = []


in_each_child(_begin_anew_in_child)


def guarded(client: Any) -> Any:
    """A client on the connections of ``client`` that closes the connection on which a command is interrupted.

    Args:
        client: a sync client of redis-py; a client without a pool is returned as it is. Of an object that stands before
            a client, as Flask-Redis's, the pool counts, by which its keys are renewed, too.
    """
    if isinstance(client, redis.RedisCluster):  # where each node has a pool
        return _alias(client, _GuardedCluster)
    if hasattr(client, "connection_pool"):
        # The client's own connection never returns to the pool, and so is never checked. The user closes it.
        changed = {"connection": None, "auto_close_connection_pool": False}
        changed["connection_pool"] = guarded_pool(client.connection_pool)
        is_client = issubclass(type(client), redis.Redis)  # an object before one says so, too, and may have no copy
        client = copy.copy(client) if is_client else redis.Redis(connection_pool=client.connection_pool)
        vars(client).update(changed)
        client._single_connection_client = False  # noqa: SLF001 - or it waits for the user's commands, which may block
    return client


def guarded_pool(pool: Any) -> Any:
    """The same pool, but it closes a connection that returns interrupted; for some pools, another like it."""
    waits = isinstance(pool, redis.BlockingConnectionPool)
    if waits or getattr(pool, "cache", None) is not None:
        kept = vars(pool)  # or a cluster's client would connect for each command
        pool = kept.get("only_one_own") or kept.setdefault("only_one_own", _another_like(pool, waits=waits))
    return _alias(pool, _GuardedPool)


def _another_like(pool: Any, *, waits: bool) -> Any:
    """A pool with the same options, without redis-py's cache: who asks for a key must not be told what it was."""
    another = copy.copy(pool)
    another.cache = None
    if waits:
        # Its queue is Python's, whose lock stays acquired if a signal handler raises just after acquiring it.
        del another._connections  # noqa: SLF001 - they are the other's
        another.queue_class = _Idle
    another.reset()
    return another


def _alias(original: Any, guard: Any) -> Any:
    """The same object in all but its class, by whose methods redis-py's own code goes, too."""
    alias: Any = object.__new__(_guarded_kind(guard, original.__class__))
    alias.__dict__ = vars(original)
    return alias


@cache
def _guarded_kind(guard: Any, kind: Any) -> Any:
    return type(kind.__name__, (guard, kind), {"__module__": kind.__module__})


class _GuardedCluster:
    """The methods in which a guarded cluster's client differs from its class."""

    nodes_manager = property(lambda self: _alias(vars(self)["nodes_manager"], _GuardedNodes))

    def get_node(self, *address: Any, node_name: str = "") -> Any:
        """The node that redis-py knows; or what an ASK has named, which has no slot yet, so that it knows none."""
        nodes: Any = self.nodes_manager
        kind: Any = ClusterNode
        if not node_name:
            return nodes.get_node(*address)
        host, _, port = node_name.rpartition(":")
        return nodes.nodes_cache.setdefault(node_name, kind(host, int(port)))  # or each command would connect anew

    def get_redis_connection(self, node: Any) -> Any:
        return guarded(super().get_redis_connection(node))  # type: ignore[misc]

    def pipeline(self, **_options: Any) -> Any:  # none is a transaction in a cluster
        made: Any = super().pipeline()  # type: ignore[misc]
        own = {"get_node": self.get_node, "get_redis_connection": self.get_redis_connection}
        vars(made).update(own, read_from_replicas=False, load_balancing_strategy=None)
        return made

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] not in ("GET", "PTTL"):
            return super().execute_command(*args, **options)  # type: ignore[misc]
        # A replica may lag. Where the client itself reads from them, its copies do so, too.
        alone = self.pipeline()
        alone.execute_command(*args, **options)
        return alone.execute()[0]

    def close(self) -> None:
        """Leave the nodes open, which are the original's."""


class _GuardedNodes:
    """The method in which a guarded cluster's table of nodes differs from its class."""

    def initialize(self, *args: Any, **options: Any) -> None:
        try:
            super().initialize(*args, **options)  # type: ignore[misc]
        finally:
            # It drops what a signal handler raises, and keeps the connection on which a reply may be yet to come.
            nodes: Any = self
            for node in list(nodes.startup_nodes.values()):
                if node.redis_connection is not None:
                    node.redis_connection.connection_pool.disconnect(inuse_connections=False)


class _GuardedPool:
    """The methods in which a guarded pool differs from its class."""

    def __del__(self) -> None:
        """Count nothing as gone: the original does."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        try:
            connection = super().get_connection(*args, **options)  # type: ignore[misc]
        except Exception as error:
            raise_as_connection_error(error)
            raise
        # The exception that is handled already; by its id, or it would live for as long as the connection.
        connection.lent_during = id(sys.exc_info()[1])
        # redis-py connects a lent connection anew to send a command again.
        connection.register_connect_callback(self.note_sent_again)
        return connection

    def note_sent_again(self, _connection: Any) -> None:
        note_unanswered()

    def release(self, connection: Any) -> None:
        connection.deregister_connect_callback(self.note_sent_again)
        error = sys.exc_info()[1]
        lent_during = vars(connection).pop("lent_during", None)
        is_new = error is not None and id(error) != lent_during
        if is_new and not isinstance(error, redis.ResponseError):
            note_unanswered()  # a cluster's client sends the command again on another connection
            connection.disconnect()
            # It may have been asking where the master is, by clients that are the user's own.
            for sentinel in getattr(getattr(self, "sentinel_manager", None), "sentinels", ()):
                sentinel.connection_pool.disconnect(inuse_connections=False)
        super().release(connection)  # type: ignore[misc]


class _Idle:
    """The queue of a pool that waits: last in, first out, and it leaves no lock acquired.

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

    def get(self, block: bool, timeout: float | None) -> Any:  # noqa: FBT001 - as in `LifoQueue`
        self._turns.get(block, timeout)
        return self.queue.pop()


def raise_as_connection_error(error: Exception) -> None:
    """Raise redis-py's ``ConnectionError`` in place of an exception of a client's own code while it connected.

    The exception of a signal handler stays as it is, because it has another cause.

    Raises:
        ConnectionError: unless ``error`` is redis-py's, the system's or a signal handler's.
    """
    if not isinstance(error, (redis.RedisError, OSError)) and not is_of_signal_handler(error):
        msg = f"{type(error).__name__}: {error}"
        raise redis.ConnectionError(msg) from error
