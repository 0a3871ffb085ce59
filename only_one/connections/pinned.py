"""Pinned connections: kept between commands, which makes each cheaper, and dropped when a command is interrupted."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from weakref import WeakSet, finalize

import redis
from redis.exceptions import ConnectionError, ResponseError  # noqa: A004 - redis-py's are meant

from .interruptions import guarded_pool

_MOST_KEPT = 16
"""Connections that are kept; the pool has the others, and gives them to the user's own commands, too."""

_clients: WeakSet[PinnedClient] = WeakSet()
_inherited: list[Any] = []


class _BrokenError(Exception):
    """The connection is broken; no error of redis-py's, which would wait for a while and try again by itself."""


class _Pinned:
    """One connection. It is dropped also where nobody has come to that, as when an exception comes between two lines.

    Attributes:
        connection: the connection.
        drop: closes it, and leaves it to the pool only then: a reply may be yet to come on it.
    """

    def __init__(self, pool: Any) -> None:
        """Take a connection from the pool."""
        self._pool = pool
        client: Any = redis.Redis(connection_pool=pool, single_connection_client=True)
        self.connection, client.connection = client.connection, None
        self._client = client
        # No `__del__`: what a signal's handler raises there, where nothing was connected to either, would be lost.
        self.drop = finalize(self, _drop, pool, self.connection)
        self.drop.atexit = False

    def send(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Send a command, after a time-out again as often as the user's client says."""
        connection = self.connection
        return connection.retry.call_with_retry(lambda: self._try(args, options), lambda _: connection.disconnect())

    def _try(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            self.connection.send_command(*args, **options)
            return self._client.parse_response(self.connection, args[0], **options)
        except ConnectionError as error:
            raise _BrokenError from error

    def give_back(self) -> None:
        """Leave the connection to the pool as it is."""
        self.drop.detach()
        self._pool.release(self.connection)


def _drop(pool: Any, connection: Any) -> None:
    try:
        connection.disconnect()
    finally:  # where that is interrupted, too, the guarded pool closes it
        pool.release(connection)


class PinnedClient(redis.Redis):
    """Sends each command on a connection that it keeps, past the pool.

    redis-py's pool looks at every connection before it lends it, in case the server has closed it meanwhile. That
    costs three system calls. Here it is done when a command has failed: the second attempt is the pool's. So a command
    may be sent twice, as with redis-py's own retries. All commands of a lock must bear that anyhow.
    """

    def __init__(self, client: Any) -> None:
        """See `covers` for the clients for which it can stand."""
        super().__init__(connection_pool=guarded_pool(client.connection_pool))
        self._client = client  # whoever closes it, or drops it, closes its pool
        self._kept: list[_Pinned] = []
        _clients.add(self)

    @staticmethod
    def covers(client: Any) -> bool:
        """Whether `client` is a plain one: not another class, nor altered, nor short of connections, nor cached."""
        if type(client) is not redis.Redis or "execute_command" in vars(client) or client.connection is not None:
            return False
        pool = client.connection_pool
        is_plain = type(pool) is redis.ConnectionPool and getattr(pool, "cache", None) is None
        # Tokens that are renewed get to a connection when it goes back to the pool.
        is_plain = is_plain and not hasattr(pool.connection_kwargs.get("credential_provider"), "on_next")
        return is_plain and pool.max_connections >= redis.ConnectionPool().max_connections

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis-py."""
        try:
            pinned = self._kept.pop()
        except IndexError:
            pinned = _Pinned(self.connection_pool)
        try:
            reply = pinned.send(args, options)
        except ResponseError:
            self._keep(pinned)
            raise
        except _BrokenError:
            pinned.drop()
            parent: Any = super()
            return parent.execute_command(*args, **options)
        except BaseException:
            # A reply may be on its way still, which the next command there would take for its own.
            pinned.drop()
            raise
        self._keep(pinned)
        return reply

    def _keep(self, pinned: _Pinned) -> None:
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(pinned)
        else:
            pinned.give_back()

    def forget_connections(self) -> None:
        """Use the connections no more: they are the parent's, and not even to be closed here."""
        _inherited.append(self._kept)
        self._kept = []


def _begin_anew_in_child() -> None:
    for client in list(_clients):
        client.forget_connections()


with suppress(AttributeError):  # where nothing forks
    os.register_at_fork(after_in_child=_begin_anew_in_child)
