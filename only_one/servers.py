"""The server that keeps the keys: its clients, and what it has been found to know."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, Union
from weakref import WeakKeyDictionary, WeakValueDictionary

import redis
import redis.asyncio
import redis.asyncio.connection
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.retry import Retry

from .errors import ConfigurationError
from .protocol import Dialect

logger = logging.getLogger("only_one")

Source = Union[str, Any, Callable[[], Any]]
"""A URL, a client, or a callable that returns a client."""

PATIENCE = {"socket_timeout": 0.9, "socket_connect_timeout": 0.5}
"""Seconds that a client made here waits for a reply and a connection; with one retry, a dead server is known in 2 s."""

_RETRIES = 1
_SCHEMES = ("redis://", "rediss://", "unix://")


class Server:
    """One server as seen from this process.

    Attributes:
        client: a sync client of redis-py.
        dialect: which commands the server knows.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.dialect = Dialect()
        self._twins: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[Any, None]] = WeakKeyDictionary()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    async def async_client(self) -> Any:
        """The asyncio client of the same server for the running event loop."""
        loop = asyncio.get_running_loop()
        twin = self._clients.get(loop)
        if twin is None:
            # A generator, as a loop that is shut down closes those which it has begun: nobody else could tell us.
            self._twins[loop] = generator = _open_twin(self.client)
            twin = self._clients[loop] = await anext(generator)
        return twin


async def _open_twin(client: Any) -> AsyncGenerator[Any, None]:
    twin = _twin(client)
    try:
        yield twin
    finally:
        await twin.aclose(close_connection_pool=True)


def _twin(client: Any) -> Any:
    """An asyncio client with the address, credentials, encryption and time-outs of a sync one."""
    pool = client.connection_pool
    kind = getattr(redis.asyncio.connection, pool.connection_class.__name__, None)
    if kind is None:
        msg = f"no asyncio client can be made from one that connects by {pool.connection_class!r}: give redis= as a URL"
        raise ConfigurationError(msg)
    known = _parameters(kind) - {"retry", "retry_on_error", "redis_connect_func", "event_dispatcher"}
    options = {name: value for name, value in pool.connection_kwargs.items() if name in known}
    retry = redis.asyncio.retry.Retry(NoBackoff(), _RETRIES)
    return redis.asyncio.Redis(
        connection_pool=redis.asyncio.ConnectionPool(
            connection_class=kind, max_connections=pool.max_connections, retry=retry, **options
        )
    )


def _parameters(kind: type) -> set[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in base.__dict__:
            found.update(inspect.signature(base.__dict__["__init__"]).parameters)
    return found - {"self", "args", "kwargs"}


# Where the client comes from

_lock = threading.Lock()
_from_urls: dict[str, Server] = {}
_from_clients: WeakValueDictionary[int, Server] = WeakValueDictionary()


def check_source(source: object, name: str = "redis") -> None:
    """Refuse what can be no server, before anything is sent.

    Args:
        source: what was given.
        name: where it was given, to say in an error.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    if isinstance(source, str):
        if not source.startswith(_SCHEMES):
            msg = f"{name}={masked(source)!r} is not a URL of Redis: write redis://host:6379/0, rediss://… or unix:///path"
            raise ConfigurationError(msg)
        try:
            redis.Redis.from_url(source).connection_pool.make_connection()  # which does not connect yet
        except (TypeError, ValueError) as error:
            msg = f"{name}={masked(source)!r} cannot be read ({error}): write redis://[user:password@]host:6379/0"
            raise ConfigurationError(msg) from None
    elif not _is_client(source) and not callable(source):
        msg = f"{name}={source!r}: give a URL such as redis://host:6379/0, a client, or a callable that returns one"
        raise ConfigurationError(msg)
    elif _is_async(source):
        msg = f"{name}={source!r} is an asyncio client: give a sync one or a URL, the asyncio client is made from it"
        raise ConfigurationError(msg)


def find_server(source: Source) -> Server:
    """The server that `source` stands for; the same one for equal URLs, and for one client.

    Raises:
        ConfigurationError: if a callable returns something else than a client or a URL.
    """
    check_source(source)
    if not isinstance(source, str) and not _is_client(source):
        source = source()
        if not isinstance(source, str) and not _is_client(source):
            msg = f"the callable given as redis= returned {source!r}: return a client of redis-py"
            raise ConfigurationError(msg)
        check_source(source)
    with _lock:
        if not isinstance(source, str):
            return _from_clients.setdefault(id(source), Server(source))
        if source not in _from_urls:
            logger.info("locks are kept in %s", masked(source), extra={"only_one_server": masked(source)})
            _from_urls[source] = Server(_open(source))
        return _from_urls[source]


def _open(url: str) -> Any:
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), _RETRIES), **PATIENCE)


def _is_client(source: object) -> bool:
    return hasattr(source, "execute_command")


def _is_async(source: object) -> bool:
    return inspect.iscoroutinefunction(getattr(type(source), "execute_command", None))


def masked(url: str) -> str:
    """A URL without user and password, in the address or in the query."""
    scheme, separator, rest = url.rpartition("://")
    _, credentials, address = rest.rpartition("@")
    shown = f"***@{address}" if credentials else rest
    return scheme + separator + re.sub(r"(?<=password=)[^&]*", "***", shown)
