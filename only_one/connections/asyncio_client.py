"""The asyncio client: made from a sync one; its commands wait for one another, and know together of a dead server."""

import asyncio
from collections.abc import Callable
from typing import Any

import redis

from only_one.clock import now
from only_one.driver import Command, ServerTimeout, is_of_signal_handler

from .asyncio_connections import ClusterConnections, KeptConnections
from .own_pools import NO_LIMIT
from .slots import Slots

_MOST_CONNECTIONS = 32
"""The most connections of one client: each event loop has a client for each server.

To open many more at once takes longer than a connection may take.
"""


class AsyncClient:
    """An asyncio client whose commands wait for one another if there are more of them than connections.

    redis-py's pools refuse such commands, or can lose a connection for good when a task is cancelled.

    If a command times out, and no other was answered meanwhile, the server is taken for down: all commands that wait
    give up, because each would wait for as long.

    After an exception of a signal handler a new client is made. The exception may have left a connection with a reply
    yet to come; and a turn, or a lock, that an ``async with`` had just acquired may stay acquired.
    And a new client is made when Sentinels have replaced the master.

    Attributes:
        sends_again: the drivers send a command again that got no answer, because redis-py does not.
        client: our own kept connections, to one server or to the nodes of a cluster.
        to_be_closed: the earlier clients. The next command closes their connections: the command that left such a
            client may be collected where no event loop runs, and cannot close them.
    """

    sends_again = True

    def __init__(self, make: Callable[[], Any], most: int, of_calls: Any) -> None:
        """Make the client.

        Args:
            make: makes the client.
            most: the most connections that the client may have.
            of_calls: the connections of sync calls to the same server, which know when a master was replaced.
        """
        self._make, self._of_calls = make, of_calls
        self._most = min(most, _MOST_CONNECTIONS)
        self._answered_at = self._down_at = 0.0  # by `now()`; 0 for never
        self.to_be_closed: set[Any] = set()
        self._begin()

    def _begin(self) -> None:
        self._masters_left = self._of_calls.masters_left
        self.client, self._turns = self._make(), asyncio.Semaphore(self._most)

    async def send_raw(self, command: Command) -> Any:
        """Send a command, and return its reply as bytes."""
        if self.to_be_closed or self._masters_left != self._of_calls.masters_left:
            await self.close_what_is_left()
        asked = now()
        client, turns = self.client, self._turns
        try:
            async with turns:
                client = self.client  # a new one may have been made meanwhile
                if self._down_at > asked:
                    msg = "Timeout waiting for a connection: the server did not answer on any"
                    raise ServerTimeout(msg)  # noqa: TRY301 - a time-out like any other
                sent = now()
                try:
                    reply = await client.send_raw(command)
                except redis.TimeoutError:
                    if self._answered_at < sent:
                        self._down_at = now()
                    raise
                self._answered_at = now()
                return reply
        except (redis.RedisError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            # Else the user's code that connects has raised it, such as a provider of credentials.
            if isinstance(error, Exception) and not is_of_signal_handler(error):
                raise
            if client is self.client:  # else another command has made a new client already
                self._begin()
            turns.release()  # the interruption may have lost a turn, for which a command waits
            raise
        finally:
            if client is not self.client:
                self.to_be_closed.add(client)

    async def close_what_is_left(self) -> None:
        """Close the connections of the earlier clients, also of one whose master was replaced."""
        if self._masters_left != self._of_calls.masters_left:
            self.to_be_closed.add(self.client)
            self._begin()
        while self.to_be_closed:
            client = self.to_be_closed.pop()  # now, because a command that ends while it is closed adds it again
            try:
                await client.close_connections()
            except BaseException:
                self.to_be_closed.add(client)
                raise

    async def aclose(self) -> None:
        """Close all connections."""
        self.to_be_closed.add(self.client)
        await self.close_what_is_left()


def make_async_client(client: Any, of_calls: Any) -> AsyncClient:
    """Make the asyncio client of the server of a sync one.

    Args:
        client: a sync client of redis-py, of one server or of a master behind Sentinels; or the slots of a cluster.
        of_calls: see ``AsyncClient``.

    Raises:
        ConfigurationError: if redis-py has no asyncio class for the way in which the client connects.
    """
    if isinstance(client, Slots):
        most = client.options.get("max_connections") or NO_LIMIT
        return AsyncClient(lambda: ClusterConnections(client), most, of_calls)
    pool = client.connection_pool
    return AsyncClient(lambda: KeptConnections(pool), pool.max_connections, of_calls)
