"""The asyncio client: made from a sync one; its commands wait for one another, and know together of a dead server."""

import asyncio
from typing import Any

import redis

from only_one.clock import now
from only_one.driver import Command, ServerTimeout, is_of_signal_handler

from .asyncio_connections import ClusterConnections, KeptConnections
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

    After an exception of a signal handler all connections are left. The exception may have left one with a reply yet to
    come; and a turn, or a lock, that an ``async with`` had just acquired may stay acquired.
    And they are left when Sentinels have replaced the master.

    Attributes:
        sends_again: the drivers send a command again that got no answer, because redis-py does not.
        connections: our own kept connections, to one server or to the nodes of a cluster.
    """

    sends_again = True

    def __init__(self, connections: Any, of_calls: Any) -> None:
        """Make the client.

        Args:
            connections: see ``AsyncClient``.
            of_calls: the connections of sync calls to the same server; ``idle`` is another list once the master was
                replaced.
        """
        self.connections, self._of_calls = connections, of_calls
        self._idle_of_calls = of_calls.idle
        self._answered_at = self._down_at = 0.0  # by `now()`; 0 for never
        self._turns = self._all_turns()

    def _all_turns(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(min(self.connections.most, _MOST_CONNECTIONS))

    async def send_raw(self, command: Command) -> Any:
        """Send a command, and return its reply as bytes."""
        if self._idle_of_calls is not self._of_calls.idle:
            self._idle_of_calls = self._of_calls.idle
            self._leave()
        asked = now()
        turns = self._turns
        try:
            async with turns:
                if self._down_at > asked:
                    msg = "Timeout waiting for a connection: the server did not answer on any"
                    raise ServerTimeout(msg)  # noqa: TRY301 - a time-out like any other
                sent = now()
                try:
                    reply = await self.connections.send_raw(command)
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
            if turns is self._turns:  # else another command has left them already
                self._leave()
            turns.release()  # the interruption may have lost a turn, for which a command waits
            raise

    def _leave(self) -> None:
        self.connections.leave()
        self._turns = self._all_turns()  # commands that wait for the old master may have all others

    async def aclose(self) -> None:
        """Close all connections."""
        await self.connections.close_connections()


def make_async_client(client: Any, of_calls: Any) -> AsyncClient:
    """Make the asyncio client of the server of a sync one.

    Args:
        client: a sync client of redis-py, of one server or of a master behind Sentinels; or the slots of a cluster.
        of_calls: see ``AsyncClient``.

    Raises:
        ConfigurationError: if redis-py has no asyncio class for the way in which the client connects.
    """
    connections = ClusterConnections(client) if isinstance(client, Slots) else KeptConnections(client.connection_pool)
    return AsyncClient(connections, of_calls)
