"""The connections of an event loop: kept between commands, to one server, a master behind Sentinels, or a cluster."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import redis
from redis import asyncio as redis_asyncio
from redis.asyncio import cluster, connection, sentinel

from only_one.clock import now
from only_one.driver import Command, ServerTimeout, drive_async
from only_one.errors import ConfigurationError
from only_one.signatures import signature

from .kept_connections import OF_ALL_CONNECTIONS, leaves_usable, packed
from .own_pools import NO_LIMIT, own_pool
from .slots import Address, Sender, Slots, Trip

_PARSER = {"parser_class": parser} if (parser := getattr(cluster, "ClusterParser", None)) else {}
"""redis-py 5 has another parser for a cluster's errors. Without a cluster there are none."""


class KeptConnections:
    """Sends each command on a connection that it keeps, and not through redis-py's asyncio client and pool.

    These cost as much as the command itself. If the server has closed a kept connection, the command fails, and the
    driver sends it again.

    Attributes:
        connection_pool: makes the connections, and does not hold them.
        most: the most connections that the user's client may have.
    """

    def __init__(self, pool: Any) -> None:
        """Connect by the options of ``pool``, a sync one."""
        self.most: int = pool.max_connections
        self._broken: list[Any] = []
        # Also those to Sentinels, and those that an exception between two lines has lost.
        self._all: set[Any] = set()
        self._make_pool = partial(own_pool, pool, {}, redis_asyncio, partial(_async_class, self._all))
        self.leave()

    async def send_raw(self, command: Command, *, is_asking: bool = False) -> Any:
        """Send a command, and return its reply as bytes; ``is_asking`` says that the server was named by an ASK."""
        await self.close_broken()
        idle, pool = self._idle, self.connection_pool  # which a Sentinel's connection does not keep while it connects
        connection = idle.pop() if idle else pool.make_connection()
        reply: Any = None
        is_kept = connection.is_connected
        try:
            if not is_kept:
                await connection.connect()  # sending does not connect a Sentinel's connection
            # The answer to ASKING is read first, because a refusal of it would leave another reply yet to come.
            # No time limit for the sending, for which redis-py would start a task: one short command does not wait.
            # And no check of the connection, which would then wait without a limit: a broken one fails anyhow.
            for each in (("ASKING",), command) if is_asking else (command,):
                timeout, connection.socket_timeout = connection.socket_timeout, None
                await connection.send_packed_command((packed(each),), check_health=False)
                connection.socket_timeout = timeout
                reply = await connection.read_response(disable_decoding=True)
        except BaseException as error:
            (idle if leaves_usable(error) else self._broken).append(connection)
            # Beside a new one, the others are good: they have just worked, and the server may have as many as it takes.
            if is_kept and isinstance(error, OF_ALL_CONNECTIONS):
                self._broken += idle
                idle.clear()
            if isinstance(error.__context__, GeneratorExit):  # in its place redis-py raises that no loop is running
                raise error.__context__ from None
            raise
        idle.append(connection)
        return reply

    def leave(self) -> None:
        """Use no connection any more, also none of the commands under way. The next command closes them."""
        self._broken += self._all
        self._idle: list[Any] = []
        self.connection_pool = self._make_pool()  # a question to a Sentinel may have left a lock acquired

    async def close_idle(self) -> None:
        """Close the connections that no command uses."""
        self._broken += self._idle
        self._idle.clear()
        await self.close_broken()

    async def close_broken(self) -> None:
        """Close the connections that no command is to use any more."""
        while self._broken:
            broken = self._broken.pop()
            broken.redis_connect_func = _refuse  # else redis-py would connect it anew for a command under way
            await broken.disconnect(nowait=True)
            self._all.discard(broken)

    async def close_connections(self) -> None:
        """Close all connections."""
        closing = [each.disconnect() for each in {*self._all, *self._broken}]
        await asyncio.gather(*closing, return_exceptions=True)


class ClusterConnections:
    """Sends each command to the node that stores its key, and on to the node to which that one redirects it.

    All nodes are asked by kept connections, and not through redis-py's asyncio client of a cluster.

    Attributes:
        most: see ``KeptConnections``.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.most: int = slots.options.get("max_connections") or NO_LIMIT
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
                await self._nodes[address].close_idle()  # it may have been replaced, or may be getting its first slot
            pool = self._slots.connect(*trip.address, **self._options).connection_pool
            self._nodes[trip.address] = KeptConnections(pool)
        return await self._nodes[trip.address].send_raw(trip.command, is_asking=trip.is_asking)

    def leave(self) -> None:
        """See ``KeptConnections``."""
        self._looking = asyncio.Lock()  # an interrupted command may have left the other acquired
        for each in self._nodes.values():
            each.leave()

    async def close_connections(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(each.close_connections() for each in self._nodes.values()))


def _refuse(_: object) -> None:
    msg = "the connection was closed for another command"
    raise redis.ConnectionError(msg)


def _async_class(made: set[Any], pool: Any) -> Callable[..., Any]:
    """What makes asyncio connections by the options of a sync pool, and adds them to ``made``.

    Raises:
        ConfigurationError: if redis-py has no asyncio class for the way in which the pool connects, or the class does
            not know an option about TLS. Without it, the asyncio client could trust a server that the sync client does
            not trust, or OpenSSL would ask for a password in the terminal.
    """
    name = pool.connection_class.__name__
    kind = getattr(connection, name, None) or getattr(sentinel, name, None)
    # A function of the user's that connects cannot be left out: it may choose the database.
    connects_by = pool.connection_kwargs.get("redis_connect_func") or pool.connection_class
    if kind is None or connects_by is not pool.connection_class:
        msg = f"no asyncio client can be made from one that connects by {connects_by!r}: give redis= as a URL"
        raise ConfigurationError(msg)
    known = {name for base in kind.__mro__ for name in signature(base).parameters}
    known.discard("parser_class")  # another class for asyncio
    known.add("connection_pool")  # the one that asks the Sentinels
    about_tls = [name for name, value in pool.connection_kwargs.items() if name.startswith("ssl_") and value]
    if missing := [name for name in about_tls if name not in known]:
        msg = f"redis-py has no asyncio client with {' and '.join(missing)}: give redis= without"
        raise ConfigurationError(msg)

    def connect(**options: Any) -> Any:
        one = kind(**{name: value for name, value in options.items() if name in known}, **_PARSER)
        made.add(one)
        return one

    return connect
