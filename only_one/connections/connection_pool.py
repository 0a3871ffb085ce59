"""Pinned connections, which a client keeps between commands, and guarded pools: both close interrupted connections.

A connection on which a command was interrupted must not be used again: the next command would take the reply of the
interrupted one for its own, or go to another database.
redis-py closes a connection if an exception is raised while it sends or reads.
It keeps the connection if a signal handler, such as that of Celery's soft time limit, raises an exception in between,
or between two of the commands with which a connection begins.
So ``PinnedClient``, which replaces plain clients, closes such a connection itself. All other clients are ``guarded``:
their pools close it when it is returned.
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

from only_one.driver import RAW, Command, as_trouble, note_unanswered
from only_one.forks import in_each_child
from only_one.signatures import signature

_MOST_KEPT = 16
"""The most connections that one client keeps. It returns the others to the pool, which lends them to the user, too."""

_command_name = signature(redis.ConnectionPool.get_connection).parameters.get("command_name")
# The arguments of `get_connection`: redis-py 5.2 needs the name of a command, and later releases warn of one.
_NO_COMMAND = ("_",) if _command_name and _command_name.default is _command_name.empty else ()

OF_ALL_CONNECTIONS = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
"""The errors after which a client uses none of its kept connections again.

The server may have closed all of them, or the network may have forgotten them. Or the server is a replica now, and its
host name may lead to the new master.
"""

_clients: WeakSet["PinnedClient"] = WeakSet()
_inherited: list[Any] = []
"""The parent's connections, in a forked child: they stay referenced, because their collection would close them."""


class _Pinned:
    """One connection that a client has borrowed from its pool.

    Attributes:
        connection: redis-py's connection.
        drop: closes the connection, on which a reply may be yet to come. It is also called when this object is
            collected, as after an exception between two lines. The next connection that is borrowed returns the
            dropped one to its pool.
    """

    def __init__(self, pool: Any) -> None:
        """Borrow a connection from the pool; before that, return all dropped connections to their pools."""
        with suppress(IndexError):  # none is left; another thread may return the last one, so nobody looks before
            while True:
                _return(*_dropped.pop())
        self.connection = pool.get_connection(*_NO_COMMAND)
        # No `__del__`: it would also run where there is no connection to drop, and an exception that a signal handler
        # raises in it is lost.
        self.drop = finalize(self, _drop, pool, self.connection)
        self.drop.atexit = False


_dropped: list[tuple[Any, Any]] = []
"""The dropped connections that must be returned, each with its pool: ``(pool, connection)``."""


def _drop(pool: Any, connection: Any) -> None:
    # The pool is not asked here: garbage collection may call this in a thread that has acquired the pool's lock.
    _dropped.append((pool, connection))
    connection.disconnect()


def _return(pool: Any, connection: Any) -> None:
    """Return a dropped connection to its pool, and close it again: the first closing may have been interrupted."""
    # `release` closes a connection if an exception is handled whose id is not `lent_during`. The exception that is
    # handled here has interrupted nothing. The id of the lending is out of date: another exception may have it by now.
    connection.lent_during = id(sys.exc_info()[1])
    try:
        connection.disconnect()
    finally:  # if this closing is interrupted, too, the guarded pool closes the connection
        pool.release(connection)


class PinnedClient(redis.Redis):
    """A client that sends the commands of drivers on connections that it keeps, and not through the pool.

    redis-py's pool checks each connection before it lends it, because the server may have closed it. The check costs
    three system calls. This client does not check: if the server has closed the kept connection, the command fails,
    and is sent again through the pool. So the server may get a command twice, as it may by redis-py's own retries. All
    commands of a lock are safe to repeat.

    Attributes:
        kept: the connections that no command uses.
        sends_again: whether the drivers send a command again that got no answer, because redis-py does not.
    """

    sends_again = False

    def __init__(self, client: Any) -> None:
        """Replace a client for which ``fits`` is true."""
        super().__init__(connection_pool=guarded_pool(client.connection_pool))
        self.kept: list[_Pinned] = []
        _clients.add(self)

    @staticmethod
    def fits(client: Any) -> bool:
        """Whether ``client`` can be replaced: a plain client of redis-py, with a plain pool of enough connections.

        Its connections must send and read as this class expects, which a later redis-py may change.
        Its credentials must be final: redis-py hands renewed tokens to a connection when the pool gets it back.
        """
        if type(client) is not redis.Redis or type(client.connection_pool) is not redis.ConnectionPool:
            return False
        if "execute_command" in vars(client) or client.connection is not None:
            return False
        pool: Any = client.connection_pool
        is_known = pool.cache is None and _sends_and_reads_as_known(pool.connection_class)
        has_enough = pool.max_connections >= redis.ConnectionPool().max_connections
        renews_credentials = hasattr(pool.connection_kwargs.get("credential_provider"), "on_next")
        return is_known and has_enough and not renews_credentials

    def send_raw(self, command: Command) -> Any:
        """Send a command of a driver on a kept connection, and return its reply, in bytes."""
        try:
            pinned: _Pinned | None = self.kept.pop()
        except IndexError:
            pinned = None
        # Not in the `except`: the IndexError would be the context of an error while connecting.
        pinned = pinned or _Pinned(self.connection_pool)
        connection = pinned.connection
        try:
            try:
                reply = _exchange(connection, command)
            except redis.RedisError as error:
                reply = _exchange_again(connection, command, error)
        except BaseException as error:
            self._end(pinned, error)
            if self.sends_again or not isinstance(error, redis.ConnectionError):
                raise
            note_unanswered()  # the connection was closed, and the command is sent again below
        else:
            self._keep(pinned)
            return reply
        untyped: Any = super()
        return untyped.execute_command(*command, **RAW)

    def _end(self, pinned: _Pinned, error: BaseException) -> None:
        """Keep or drop a connection whose command has raised an error."""
        if leaves_usable(error):
            self._keep(pinned)
        else:
            pinned.drop()
        if isinstance(error, OF_ALL_CONNECTIONS):
            self.kept = []

    def _keep(self, pinned: _Pinned) -> None:
        """Keep a connection whose reply has been read; if there are enough, return it to the pool."""
        if len(self.kept) < _MOST_KEPT:
            self.kept.append(pinned)
        elif pinned.drop.detach():
            redis.ConnectionPool.release(self.connection_pool, pinned.connection)  # past the guard, as it is usable


def _exchange(connection: Any, command: Command) -> Any:
    connection.send_packed_command((packed(command),))
    return connection.read_response(disable_decoding=True)


def _exchange_again(connection: Any, command: Command, failed: Exception) -> Any:
    """After a time-out, send the command again, as often as the user's client says; else raise the error.

    redis-py's ``retry`` is called only now, because around each command it would cost a microsecond.
    So its first attempt raises the error of the attempt that has failed already.
    """
    errors = [failed]

    def attempt() -> Any:
        if errors:
            raise errors.pop()
        return _exchange(connection, command)

    def before_another(error: Exception) -> None:
        connection.disconnect()
        if isinstance(error, redis.ConnectionError):
            raise error

    return connection.retry.call_with_retry(attempt, before_another)


def leaves_usable(error: BaseException) -> bool:
    """Whether a connection can be used again after the error of its command: the server, a master, has refused it.

    After any other error the reply may be yet to come.
    """
    return isinstance(error, redis.ResponseError) and not isinstance(error, redis.ReadOnlyError)


def _sends_and_reads_as_known(kind: Any) -> bool:
    """Whether a class of connections sends and reads by redis-py's own methods, with the parameters used here."""
    names = ("send_command", "send_packed_command", "read_response")
    are_own = all(getattr(kind, name, None) is getattr(redis.Connection, name, kind) for name in names)
    return are_own and "disable_decoding" in signature(kind.read_response).parameters


@cache
def _form(parts: int) -> bytes:
    """The format of a packed command of so many parts; each part needs its length and its bytes."""
    return b"*%d\r\n" % parts + b"$%d\r\n%b\r\n" * parts


def _packed(command: Command) -> bytes:
    """A command as the server reads it, in UTF-8. redis-py's own packing takes three times as long."""
    values: list[int | bytes] = []
    for each in command:
        encoded = each if type(each) is bytes else str(each).encode()
        values.append(len(encoded))
        values.append(encoded)
    return _form(len(command)) % tuple(values)


packed: Callable[[Command], bytes] = _packed
with suppress(ImportError, AttributeError):  # hiredis takes half the time
    packed = import_module("hiredis").pack_command


def _begin_anew_in_child() -> None:
    """Keep no connection of the parent's: the child must neither use nor close it."""
    for client in list(_clients):
        _inherited.append(client.kept)
        client.kept = []


in_each_child(_begin_anew_in_child)


def guarded(client: Any) -> Any:
    """A client with the pool of ``client``, guarded: an interrupted connection is closed.

    Args:
        client: a sync client of redis-py, or an object that forwards to one, as Flask-Redis's, of which only the pool
            is used. A client without a pool is returned as it is.
    """
    if not hasattr(client, "connection_pool"):
        return client
    pool = client.connection_pool
    # By the type, because an object that forwards has the client's `__class__`; to copy it may fail.
    is_client = issubclass(type(client), redis.Redis)
    made: Any = copy.copy(client) if is_client else redis.Redis(connection_pool=pool)
    made.connection_pool = guarded_pool(pool)
    made.auto_close_connection_pool = False  # the user closes the pool
    # A client of one connection would send past the pool, unguarded, and wait for the user's commands, which may block.
    made.connection = None
    made._single_connection_client = False  # noqa: SLF001 - see above
    return made


def guarded_pool(pool: Any) -> Any:
    """The same pool, which closes a connection that returns interrupted.

    A pool that waits, or that has redis-py's cache, is replaced by another with the same options.
    """
    waits = isinstance(pool, redis.BlockingConnectionPool)
    if waits or getattr(pool, "cache", None) is not None:
        # One replacement for each pool: a cluster's client asks for a node's guarded pool at each command.
        attributes = vars(pool)
        if "only_one_own" not in attributes:
            attributes.setdefault("only_one_own", _another_like(pool, waits=waits))  # another thread may be first
        pool = attributes["only_one_own"]
    guard: Any = object.__new__(_guarded_kind(pool.__class__))
    guard.__dict__ = vars(pool)
    return guard


def _another_like(pool: Any, *, waits: bool) -> Any:
    """A pool with the same options and no cache: a reply from the cache may be out of date."""
    another = copy.copy(pool)
    another.cache = None
    if waits:
        # redis-py's queue has a lock, which stays acquired if a signal handler raises just after it was acquired.
        another.queue_class = _Idle
        del another._connections  # noqa: SLF001 - the original's, which `reset` would count as closed
    another.reset()
    return another


@cache
def _guarded_kind(kind: Any) -> Any:
    return type(kind.__name__, (_GuardedPool, kind), {"__module__": kind.__module__})


class _GuardedPool:
    """The methods in which a guarded pool differs from its class."""

    def __del__(self) -> None:
        """Do not count the connections as closed, as redis-py does here: the original pool has them still."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        try:
            connection = super().get_connection(*args, **options)  # type: ignore[misc]
        except Exception as error:
            trouble = as_trouble(error)
            if trouble is error:
                raise
            raise trouble from error
        # An exception that is handled already is none of the command's. The connection keeps its id, because a
        # reference would keep the exception alive for as long as the connection.
        connection.lent_during = id(sys.exc_info()[1])
        # redis-py connects a lent connection anew only to send its command again.
        connection.register_connect_callback(self.note_sent_again)
        return connection

    def note_sent_again(self, _connection: Any) -> None:
        note_unanswered()

    def release(self, connection: Any) -> None:
        """Return a connection; it is closed if an exception, of a signal handler too, has interrupted its command."""
        connection.deregister_connect_callback(self.note_sent_again)
        error = sys.exc_info()[1]
        lent_during = vars(connection).pop("lent_during", None)
        is_of_command = error is not None and id(error) != lent_during
        if is_of_command and not isinstance(error, redis.ResponseError):
            note_unanswered()  # a cluster's client sends the command again on another connection
            connection.disconnect()
            # The interrupted command may have been a question for the master. The Sentinels' clients are the user's,
            # and their pools are not guarded.
            for sentinel in getattr(getattr(self, "sentinel_manager", None), "sentinels", ()):
                sentinel.connection_pool.disconnect(inuse_connections=False)
        super().release(connection)  # type: ignore[misc]


class _Idle:
    """The queue of a pool that waits: last in, first out, and without a lock that an interruption leaves acquired.

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
