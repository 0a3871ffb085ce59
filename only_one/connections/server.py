"""The server that stores the keys: found by URL, client or callable; its clients, features and eviction policy."""

import asyncio
import inspect
import os
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from logging import INFO
from typing import Any, Union
from weakref import WeakKeyDictionary, WeakValueDictionary

import redis
from redis.client import Pipeline

from only_one.driver import TROUBLE
from only_one.errors import ConfigurationError
from only_one.events import log
from only_one.option_values import check_callable
from only_one.threads import start_native_thread

from .asyncio_client import AsyncClient, make_async_client
from .kept_connections import KeptConnections
from .nodes import ClusterNodes, Node, nodes_of
from .own_pools import OUR_TIMEOUTS
from .server_features import Features
from .slots import Slots

Source = Union[str, Any, Callable[[], Any]]
"""A URL, a client, or a callable that returns a client or a URL."""

_ADVICE = {
    "WRONG_VERSION|record layer|Timeout connecting.*SSL": "if the port has no TLS, write redis:// in place of rediss://",
    "(?i)authentica|username-password": "write the server's user and password: redis://user:password@host:6379/0",
    "local issuer|self.signed|No such file.*SSL": "name who signs its certificate: rediss://…?ssl_ca_certs=/path/ca.pem",
    "unknown command .(GET|SCAN|SELECT|SET)": "for a Sentinel, write redis=Sentinel([...]).master_for(...)",
    "^(MovedError|ResponseError MOVED).*Connection": "for a cluster's node, write redis=redis.RedisCluster(...)",
    "WRONGTYPE": "another program stores something else at this key: write another key, or another prefix=",
    "connecting to localhost:6379": "start a Redis there, or name yours: ONLY_ONE_REDIS_URL, or configure(redis=...)",
    "^InvalidResponse": "no Redis answers at this port: write the host and the port of one",
    "DB index": "write the number of a database that the server has, such as redis://host:6379/0",
    "^RuntimeError": "nothing could renew the key: write timeout= without lease=, or call before the main thread ends",
}
"""What to write instead: by a pattern that is found in an error's type and text, and the connection's class."""

_INSTEAD = "give a URL such as redis://host:6379/0, a client, or a callable that returns one"


class _NoClient:
    """Stands in for the client that a callable could not make, as of a cluster that is down: it connects when made."""

    def __init__(self, error: Exception, source: Source = "") -> None:
        self._error, self._source = error, source
        self._is_asking = False
        self._server: Server | None = None

    def send(self, _command: object) -> Any:
        raise self._error

    send_raw = send

    @property
    def nodes(self) -> ClusterNodes | Node:
        """The nodes of the server once the callable has made a client; until then one whose every command fails.

        The callable is called again in a thread of its own, because it is the user's code and may take long.
        """
        if self._server is not None and self._server.is_known:
            return self._server.nodes
        if not self._is_asking:
            start_native_thread("only_one-client", self._ask_again)
        return Node(self)

    def _ask_again(self) -> None:
        self._is_asking = True
        with suppress(Exception):  # the next call of the decorated function raises it
            self._server = find_server(self._source)
        self._is_asking = False


class Server:
    """One server as seen from this process.

    Attributes:
        client: what a driver sends commands by: it closes the connection on which a command is interrupted.
        features: which commands the server knows.
        is_known: whether there is a client. If the callable could make none, each command raises its error.
        looked_at_from: from this time on, by ``now()``, an acquire has the renewing thread ask for the eviction policy.
    """

    def __init__(self, client: Any) -> None:
        self._given: Any = client
        self.features = Features()
        self.is_known = not isinstance(client, _NoClient)
        if hasattr(client, "nodes_manager"):  # a cluster's, or what stands before one
            self._given = slots = Slots(client)
            self.client: Any = ClusterNodes(slots, {}, pause=0.0)
        else:
            self.client = KeptConnections(client.connection_pool, {}) if self.is_known else client
        self.looked_at_from = 0.0
        self._nodes: ClusterNodes | Node | None = None

    @property
    def nodes(self) -> ClusterNodes | Node:
        """The nodes that store the keys, for the renewing thread: with connections of its own, and short time-outs.

        Neither a pool without free connections nor a server that does not answer may keep the thread from others.
        """
        if isinstance(self._given, _NoClient):
            return self._given.nodes
        if self._nodes is None:
            self._nodes = nodes_of(self._given, self.client)
        return self._nodes

    def node_of(self, key: str | bytes) -> Node:
        """The one of these nodes that stores ``key``."""
        return self.nodes.node_of(key)

    @property
    def database(self) -> str:
        """What keys are looked for in, for messages: an empty list does not say that another database has them."""
        pool = getattr(self._given, "connection_pool", None)
        return f"database {pool.connection_kwargs.get('db') or 0} of {_address(pool)}" if pool else "the cluster"

    def describe(self, problem: Exception) -> str:
        """The type and the text of an error, with the server's address, and what to write instead if that is known."""
        kind, pool = type(problem).__name__, getattr(self._given, "connection_pool", None)
        address = _address(pool) if pool else "the cluster" if self.is_known else "the server"
        text = f"{kind} {problem} {getattr(getattr(pool, 'connection_class', None), '__name__', '')}"
        advice = next((f" ({instead})" for pattern, instead in _ADVICE.items() if re.search(pattern, text)), "")
        return f"{kind} of {address}: {problem}{advice}"

    async def async_client(self) -> AsyncClient:
        """The asyncio client of the same server for the running event loop."""
        client: AsyncClient = self.client
        if not self.is_known:
            return client
        # An attribute of the loop has its clients, which so live no longer than the loop, even if nobody closes it.
        # The process is in the name: a forked child that goes on with its parent's loop must neither use nor close the
        # parent's clients.
        attributes, name = vars(asyncio.get_running_loop()), f"only_one_clients_{os.getpid()}"
        if name not in attributes:
            attributes[name] = WeakKeyDictionary()
        clients: WeakKeyDictionary[Server, tuple[AsyncClient, object]] = attributes[name]
        if self not in clients:
            # An async generator, because the loop closes its generators at shutdown: the only hook to close the client.
            generator = _open_async_client(self._given, self.client)
            clients[self] = await anext(generator), generator
        return clients[self][0]


async def _open_async_client(given: Any, of_calls: Any) -> AsyncGenerator[AsyncClient, None]:
    async with aclosing(make_async_client(given, of_calls)) as client:
        yield client


_from_urls: dict[str, Server] = {}
_from_clients: WeakValueDictionary[int, Server] = WeakValueDictionary()
_from_callables: WeakKeyDictionary[Callable[[], Any], Server] = WeakKeyDictionary()


def check_source(name: str, source: Source) -> Source:
    """Check what a user gave as a server, and return it; nothing is sent to the server.

    Args:
        name: the option or variable, for the error message.
        source: the value.

    Raises:
        ConfigurationError: for another value; the message says what to write instead.
    """
    problem = _url_problem(source) if isinstance(source, str) else _client_problem(source)
    if problem:
        msg = f"{name}={problem}"
        raise ConfigurationError(msg)
    if not isinstance(source, str) and not _is_client(source):
        check_callable(name, source, 0, _INSTEAD)
    return source


def _url_problem(url: str) -> str | None:
    """What is wrong with a URL, and what to write instead, without its password; None for a URL that can work."""
    quoting = ", and in the password %2F for /, %3F for ? and %23 for #" if "@" in url else ""
    of_sentinels = "; or a client, Sentinel([...]).master_for(name)" if url.startswith("sentinel") else ""
    if not re.fullmatch(r"rediss?://[^/]*(/\d*/?)?(\?.*)?|unix://[^?]*/[^?]+(\?.*)?", url):
        instead = f"write redis://host:6379/0, rediss://… or unix:///path{quoting}{of_sentinels}"
        return f"{masked(url)!r} is not a URL of Redis: {instead}"
    try:
        client = redis.Redis.from_url(url)
        client.connection_pool.make_connection()  # which checks the options, and does not connect
    except (AttributeError, TypeError, ValueError, redis.RedisError):  # its text may hold the password
        with_options = "redis://[user:password@]host:6379/0[?option=value], with options of redis-py"
        return f"{masked(url)!r} cannot be read: write {with_options}{quoting}"
    return _client_problem(client)


def _client_problem(client: Any) -> str | None:
    """What is wrong with a client or callable, and what to write instead; None for one that can work."""
    if any(each.__module__.startswith("valkey.") for each in inspect.getmro(type(client))):
        return " a client of valkey-py, and only redis-py's can be used: write the server's URL, redis://host:6379/0"
    if key_prefix := getattr(client, "global_keyprefix", None):  # kombu's, which prefixes keys in few commands only
        return f" a client that prefixes some of the keys: write a URL, and prefix='{key_prefix}only_one:'"
    if inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
        return " an asyncio client: give a sync one or a URL, the asyncio client is made from it"
    return None if _is_client(client) or callable(client) else f" an object of type {type(client).__name__}: {_INSTEAD}"


def find_server(source: Source) -> Server:
    """The server of a URL, a client or a callable; equal URLs, one client and one callable have the same server.

    Raises:
        ConfigurationError: if a callable returns something else than a client or a URL.
    """
    if isinstance(source, str):
        if source not in _from_urls:
            check_source("redis", source)
            made = Server(redis.Redis.from_url(source, **OUR_TIMEOUTS))
            if _from_urls.setdefault(source, made) is made:
                log(INFO, "locks are kept in %s", masked(source), extra={"only_one_server": masked(source)})
        return _from_urls[source]
    check_source("redis", source)
    if _is_client(source):
        return _from_clients.setdefault(id(source), Server(source))
    with suppress(TypeError, KeyError):
        return _from_callables[source]
    try:
        given = source()
    except TROUBLE as error:  # the server is not remembered, so the next call calls the callable again
        return Server(_NoClient(error, source))
    if not isinstance(given, str) and not _is_client(given):
        msg = f"the callable given as redis= returned a {type(given).__name__}: return a client of redis-py"
        raise ConfigurationError(msg)
    server = find_server(given)
    with suppress(TypeError):  # the callable has no hash, or no weak references
        return _from_callables.setdefault(source, server)
    return server


def _is_client(source: object) -> bool:
    connects = hasattr(source, "connection_pool") or hasattr(source, "nodes_manager")
    is_pub_sub = not hasattr(source, "register_script")
    return connects and not is_pub_sub and not isinstance(source, (type, Pipeline))


def masked(url: str) -> str:
    """A URL without user and password, in the address or in the query."""
    return re.sub(r"(?i)(?<=password=)[^&]*", "***", re.sub(r"(?s)^(\w+://)?.*@", r"\1***@", url))


def _address(pool: Any) -> str:
    """The address of a server, or the name of a master and the addresses of its Sentinels; without credentials."""
    if isinstance(pool, redis.SentinelConnectionPool):
        sentinels = sorted(_address(each.connection_pool) for each in pool.sentinel_manager.sentinels)
        return f"{pool.service_name} of Sentinel {', '.join(sentinels)}"
    options = pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


# Servers that may evict the keys of runs that are under way

_asked: set[str] = set()  # the addresses of the servers that have replied


def eviction_warning(client: KeptConnections) -> str | None:
    """Ask a server whether it evicts keys when its memory is full: one round trip, not repeated once it has replied.

    The ``volatile-`` policies evict our keys, too, because these expire.

    Args:
        client: the connections to one node.

    Returns:
        The text of a warning; None if there is nothing to warn of, or the server does not tell.

    Raises:
        RedisError: if the server cannot be asked.
    """
    server = _address(client.connection_pool)
    if server in _asked:
        return None
    (reply,) = client.send([("INFO", "memory")])
    _asked.add(server)
    if isinstance(reply, Exception):  # the user lacks the right
        return None
    memory = dict(re.findall(r"(?m)^(maxmemory|maxmemory_policy):(\S+)", reply.decode()))
    policy = memory.get("maxmemory_policy", "")
    if not policy.startswith(("allkeys-", "volatile-")) or memory.get("maxmemory") == "0":
        return None
    problem = f"{server} evicts keys when its memory is full (maxmemory-policy {policy}), and a run may lose its key so"
    return f"{problem}: write maxmemory-policy noeviction in its configuration, or give redis= a server that has it"
