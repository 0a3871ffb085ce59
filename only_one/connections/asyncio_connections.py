"""The connections of an event loop: kept between commands, to one server, a master behind Sentinels, or a cluster."""

import asyncio
from collections import ChainMap
from typing import Any

import redis
from redis import backoff
from redis.asyncio import ConnectionPool, Redis, cluster, connection, retry, sentinel

from only_one.clock import now
from only_one.driver import Command, ServerTimeout, drive_async
from only_one.errors import ConfigurationError
from only_one.signatures import signature

from .kept_connections import OF_ALL_CONNECTIONS, leaves_usable, packed
from .own_pools import NO_LIMIT, NO_NOTICES, Sentinels
from .slots import Address, Sender, Slots, Trip

_PARSER = {"parser_class": parser} if (parser := getattr(cluster, "ClusterParser", None)) else {}
"""redis-py 5 has another parser for a cluster's errors. Without a cluster there are none."""

_sentinel: Any = sentinel  # a module without types


class KeptConnections:
    """Sends each command on a connection that it keeps, and not through redis-py's asyncio client and pool.

    These cost as much as the command itself. If the server has closed a kept connection, the command fails, and the
    driver sends it again.

    Attributes:
        connection_pool: makes the connections, and does not hold them.
    """

    def __init__(self, pool: Any) -> None:
        """Connect by the options of ``pool``, a sync one."""
        self.connection_pool = _async_pool(pool)
        self._read_timeout: float | None = self.connection_pool.make_connection().socket_timeout  # not connected
        self._idle: list[Any] = []
        self._broken: list[Any] = []
        self._all: set[Any] = set()  # a connection that an exception between two lines has lost is in this set only

    async def send_raw(self, command: Command, *, is_asking: bool = False) -> Any:
        """Send a command, and return its reply as bytes; ``is_asking`` says that the server was named by an ASK."""
        await self._close_broken()
        connection = self._idle.pop() if self._idle else self.connection_pool.make_connection()
        self._all.add(connection)
        reply: Any = None
        has_connected = connection.is_connected
        try:
            if not has_connected:
                await connection.connect()  # sending does not connect a Sentinel's connection
                has_connected = True
            # The answer to ASKING is read first, because a refusal of it would leave another reply yet to come.
            # No time limit for the sending, for which redis-py would start a task: one short command does not wait.
            # And no check of the connection, which would then wait without a limit: a broken one fails anyhow.
            for each in (("ASKING",), command) if is_asking else (command,):
                connection.socket_timeout = None
                await connection.send_packed_command((packed(each),), check_health=False)
                connection.socket_timeout = self._read_timeout
                reply = await connection.read_response(disable_decoding=True)
        except BaseException as error:
            if leaves_usable(error):
                self._idle.append(connection)
            else:
                self._broken.append(connection)
            # If none can be made, the others are good: the server may have as many as it takes.
            if has_connected and isinstance(error, OF_ALL_CONNECTIONS):
                self._broken += self._idle
                self._idle = []
            if isinstance(error.__context__, GeneratorExit):  # in its place redis-py raises that no loop is running
                raise error.__context__ from None
            raise
        self._idle.append(connection)
        return reply

    async def _close_broken(self) -> None:
        while self._broken:
            broken = self._broken.pop()
            self._all.discard(broken)
            await broken.disconnect(nowait=True)

    async def close_idle(self) -> None:
        """Close the connections that no command uses."""
        self._broken += self._idle
        self._idle = []
        await self._close_broken()

    async def close_connections(self) -> None:
        """Close all connections, also those that an exception has lost, and those to the Sentinels."""
        sentinels = getattr(getattr(self.connection_pool, "sentinel_manager", None), "sentinels", ())
        closing = [each.disconnect() for each in self._all] + [each.aclose() for each in sentinels]
        await asyncio.gather(*closing, return_exceptions=True)


class ClusterConnections:
    """Sends each command to the node that stores its key, and on to the node to which that one redirects it.

    All nodes are asked by kept connections, and not through redis-py's asyncio client of a cluster.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        # Without redis-py's function, which has replicas answer.
        self._options = {name: each for name, each in slots.options.items() if name != "redis_connect_func"}
        self._nodes: dict[Address, KeptConnections] = {}
        self._looking = asyncio.Lock()

    async def send_raw(self, command: Command) -> Any:
        """Send a command, and return its reply as bytes. It is sent again only if the cluster has refused it."""
        sender, began = Sender(self._make_trip), now()
        try:
            return await drive_async(sender, self._slots.route(command))
        except OF_ALL_CONNECTIONS as error:
            async with self._looking:  # one look for all commands
                are_silent = await drive_async(sender, self._slots.look(began))
            if are_silent:
                raise ServerTimeout(*error.args) from None
            raise

    async def _make_trip(self, trip: Trip) -> Any:
        if trip.pause:
            await asyncio.sleep(trip.pause)
        if trip.address not in self._nodes:
            for address in self._nodes.keys() - self._slots.owners.values():
                await self._nodes[address].close_idle()  # it may have been replaced
            pool = self._slots.connect(*trip.address, **self._options).connection_pool
            self._nodes[trip.address] = KeptConnections(pool)
        return await self._nodes[trip.address].send_raw(trip.command, is_asking=trip.is_asking)

    async def close_connections(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(each.close_connections() for each in self._nodes.values()))


def _async_pool(pool: Any) -> Any:
    """The asyncio pool with the options of a sync one.

    Raises:
        ConfigurationError: if redis-py has no asyncio class for the way in which the pool connects.
    """
    name = pool.connection_class.__name__
    kind = getattr(connection, name, None) or getattr(_sentinel, name, None)
    # A function of the user's that connects cannot be left out: it may choose the database.
    connects_by = pool.connection_kwargs.get("redis_connect_func") or pool.connection_class
    if kind is None or connects_by is not pool.connection_class:
        msg = f"no asyncio client can be made from one that connects by {connects_by!r}: give redis= as a URL"
        raise ConfigurationError(msg)
    known = {name for base in kind.__mro__ for name in signature(base).parameters}
    known.discard("parser_class")  # another class for asyncio
    known.add("connection_pool")  # the one that asks the Sentinels
    _check_tls(pool.connection_kwargs, known)

    def connect(**options: Any) -> Any:
        return kind(**{name: value for name, value in options.items() if name in known}, **_PARSER)

    made: Any = ConnectionPool(max_connections=NO_LIMIT, **NO_NOTICES)
    if isinstance(pool, redis.SentinelConnectionPool):
        sentinels = [Redis.from_pool(_async_pool(each.connection_pool)) for each in pool.sentinel_manager.sentinels]
        manager = object.__new__(_sentinel.Sentinel)
        # By attributes and not by parameters, which depend on the version of redis-py.
        manager.__dict__ = {**vars(pool.sentinel_manager)}
        made = _sentinel.SentinelConnectionPool(pool.service_name, Sentinels(manager, sentinels), **NO_NOTICES)
    ours = {**made.connection_kwargs, **NO_NOTICES, "retry": retry.Retry(backoff.NoBackoff(), 0)}
    made.connection_kwargs = ChainMap(ours, pool.connection_kwargs)  # the user may change an option later
    made.connection_class = connect
    return made


def _check_tls(given: dict[str, Any], known: set[str]) -> None:
    """Check that an asyncio class knows all options about TLS.

    Raises:
        ConfigurationError: for one that it does not know. Without it, the asyncio client could trust a server that the
            sync client does not trust, or OpenSSL would ask for a password in the terminal.
    """
    about_tls = [name for name, value in given.items() if name.startswith("ssl_") and value]
    if missing := [name for name in about_tls if name not in known]:
        msg = f"redis-py has no asyncio client with {' and '.join(missing)}: give redis= without"
        raise ConfigurationError(msg)
