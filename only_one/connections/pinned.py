"""A client that keeps its connections between commands, which makes a command a fifth cheaper."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

import redis
from redis.exceptions import ConnectionError, ResponseError  # noqa: A004 - redis-py's are meant

from .interruptions import guarded_pool

_MOST_KEPT = 16
"""Connections that are kept; the pool has the others, and gives them to the user's own commands, too."""

_clients: WeakSet[DirectClient] = WeakSet()
_inherited: list[Any] = []


class _BrokenError(Exception):
    """The connection is gone; no error of redis-py's, which would wait for a while and try again by itself."""


class _Line(redis.Redis):
    """One connection, which never goes back to the pool with a reply that is yet to come.

    It is one of these while it has its connection, so that nothing in here is in the way of collecting what has none:
    a signal's exception that is raised there is lost.
    """

    @classmethod
    def of(cls, pool: Any) -> Any:
        """A connection of a pool."""
        line: Any = redis.Redis(connection_pool=pool, single_connection_client=True)
        line.__class__ = cls
        return line

    def _send_command_parse_response(self, *args: Any, **options: Any) -> Any:
        try:
            parent: Any = super()
            return parent._send_command_parse_response(*args, **options)  # noqa: SLF001 - it is overridden here
        except ConnectionError as error:
            raise _BrokenError from error

    def close(self) -> None:
        """Close the connection, also where nobody has come to it, as by a second interruption."""
        line: Any = self
        line.connection.disconnect()
        line.give_back()

    def give_back(self) -> None:
        """Leave the connection to the pool as it is."""
        line: Any = self
        line.__class__ = redis.Redis
        line.close()


class DirectClient(redis.Redis):
    """Sends each command on a connection that it keeps, past the pool.

    redis-py's pool looks at every connection before it lends it, in case the server has closed it meanwhile. That
    costs three system calls, and is done here when a command has failed: the second attempt is the pool's. So a command
    may be sent twice, as with redis-py's own retries, which all commands of a lock must bear anyhow.
    """

    def __init__(self, client: Any) -> None:
        """See `covers` for the clients for which it can stand."""
        super().__init__(connection_pool=guarded_pool(client.connection_pool))
        self._client = client  # whoever closes it, or drops it, closes its pool
        self._kept: list[Any] = []
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
            line = self._kept.pop()
        except IndexError:
            line = _Line.of(self.connection_pool)
        try:
            reply = line.execute_command(*args, **options)
        except ResponseError:
            self._keep(line)
            raise
        except _BrokenError:
            line.close()
            parent: Any = super()
            return parent.execute_command(*args, **options)
        except BaseException:
            # A reply may be on its way still, which the next command there would take for its own.
            line.close()
            raise
        self._keep(line)
        return reply

    def _keep(self, line: Any) -> None:
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(line)
        else:
            line.give_back()

    def forget_connections(self) -> None:
        """Use the connections no more: they are the parent's, and not even to be closed here."""
        _inherited.append(self._kept)
        self._kept = []


def _begin_anew_in_child() -> None:
    for client in list(_clients):
        client.forget_connections()


_register_at_fork = getattr(os, "register_at_fork", lambda **_: None)  # there is no fork on Windows
_register_at_fork(after_in_child=_begin_anew_in_child)
