"""Connections that are kept between commands, past redis-py's client and pool, for calls and for the renewing thread.

A connection on which a command was interrupted must not be used again: the next command would take the reply of the
interrupted one for its own, or go to another database.
redis-py's client keeps such a connection if a signal handler, such as that of Celery's soft time limit, raises an
exception between sending and reading, or between two of the commands with which a connection begins.
And redis-py's pool checks each connection before it lends it, which costs three system calls.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

import redis

from only_one.driver import Command
from only_one.forks import in_each_child

from .own_pools import own_pool

OF_ALL_CONNECTIONS = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
"""The errors after which a client uses none of its kept connections again.

The server may have closed all of them, or the network may have forgotten them. Or the server is a replica now, and its
host name may lead to the new master.
"""

_all: WeakSet["KeptConnections"] = WeakSet()
_inherited: list[Any] = []
"""The parent's, in a forked child: they stay referenced, because their collection would close connections."""


class KeptConnections:
    """Sends commands on connections that it keeps: as many as there were commands at the same time.

    If the server has closed a kept connection, the command fails, and the driver sends it again. All commands of a lock
    are safe to repeat.

    Attributes:
        connection_pool: makes the connections, and does not hold them.
        idle: the connections that no command uses; a new list once a master is left.
        masters_left: how many masters they have left because Sentinels had replaced them.
        sends_again: the drivers send a command again that got no answer, because redis-py does not.
    """

    sends_again = True

    def __init__(self, pool: Any, longest: dict[str, float]) -> None:
        """Connect as a user's client does; see ``own_pool`` for the parameters."""
        self._make_pool = partial(own_pool, pool, longest)
        self.connection_pool = self._make_pool()
        self.idle: list[Any] = []
        self.masters_left = 0
        _all.add(self)

    def begin_anew(self) -> None:
        """In a forked child: neither use nor close what is the parent's, nor wait for a lock in it."""
        _inherited.extend([self.connection_pool, self.idle])
        self.idle, self.connection_pool = [], self._make_pool()

    def send_raw(self, command: Command) -> Any:
        """Send a command, and return its reply, as bytes."""
        idle, connection = self.idle, self._take()
        try:
            # redis-py's check of the connection would wait for a reply: a broken connection fails anyhow.
            connection.send_packed_command((packed(command),), check_health=False)
            reply = connection.read_response(disable_decoding=True)
        except BaseException as error:
            self._put_back(idle, connection, error)
            raise
        idle.append(connection)
        return reply

    def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one trip, and return the reply to each, as bytes, or the server's error.

        Raises:
            RedisError: if one got no answer, or the server is a replica.
        """
        idle, connection = self.idle, self._take()
        try:
            connection.send_packed_command((b"".join(map(packed, commands)),), check_health=False)
            replies = [_reply_on(connection) for _ in commands]
        except BaseException as error:
            self._put_back(idle, connection, error)
            raise
        idle.append(connection)
        return replies

    def _take(self) -> Any:
        try:
            return self.idle.pop()
        except IndexError:
            pass
        return self._connect()  # not in the `except`: the IndexError would be the context of an error while connecting

    def _put_back(self, idle: list[Any], connection: Any, error: BaseException) -> None:
        """After an error of its command keep a connection that can be used again, or close it.

        The idle ones are closed only after some errors: a time limit of the user's says nothing of them.
        """
        if leaves_usable(error):
            idle.append(connection)
        else:
            connection.disconnect()
        if isinstance(error, OF_ALL_CONNECTIONS):
            self.close_idle()

    def _connect(self) -> Any:
        """A new connection. If none can be made, the others are good: the server may have as many as it takes."""
        connection = self.connection_pool.make_connection()
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            manager = getattr(self.connection_pool, "sentinel_manager", None)
            for each in getattr(manager, "sentinels", ()):  # a question may have been interrupted
                each.connection_pool.disconnect(inuse_connections=False)
            raise
        return connection

    def close_idle(self) -> None:
        """Close the connections that no command uses."""
        _close(self.idle)

    def leave_master(self) -> None:
        """Use no connection to the master any more, also none of the commands under way: another has replaced it."""
        self.masters_left += 1
        left, self.idle = self.idle, []
        _close(left)


def _close(connections: list[Any]) -> None:
    with suppress(IndexError):  # none is left; another thread may take the last one, so nobody looks before
        while True:
            connections.pop().disconnect()


def _reply_on(connection: Any) -> Any:
    try:
        return connection.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        if leaves_usable(error):
            return error
        raise


def leaves_usable(error: BaseException) -> bool:
    """Whether a connection can be used again after the error of its command: the server, a master, has refused it.

    After any other error the reply may be yet to come.
    """
    return isinstance(error, redis.ResponseError) and not isinstance(error, redis.ReadOnlyError)


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
    for each in list(_all):
        each.begin_anew()


in_each_child(_begin_anew_in_child)
