"""Decorated async functions: in one event loop after the other, and many at a time; also when one is cancelled."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections import defaultdict
from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import redis as redis_py

from only_one import current_lock
from only_one.connections.asyncio_client import AsyncClient
from only_one.connections.server import Server
from rigs.waiting import LIMIT
from tests.clients import Clients
from tests.decorated import decorated

MANY = 1000
"""Calls at a time."""
OTHERS = 4
"""Connections at the most that look around in a cluster, or renew."""


async def work(number: int = 0) -> int:
    assert current_lock().is_held
    await asyncio.sleep(0)
    return number


def test_a_client_lives_as_long_as_its_loop_and_its_server(redis_url: str) -> None:
    """Also in a loop that nobody closes: Python collects it, with its files."""

    async def of_a_server_that_is_dropped() -> Any:
        client = await Server(redis_py.Redis.from_url(redis_url)).async_client()
        return ref(client)

    server = Server(redis_py.Redis.from_url(redis_url))
    loops = [asyncio.new_event_loop() for _ in range(2)]
    first, again, other = (loop.run_until_complete(server.async_client()) for loop in (loops[0], *loops))
    assert first is again is not other
    dropped = loops[0].run_until_complete(of_a_server_that_is_dropped())
    gc.collect()
    for _ in range(10):  # the loop closes it in a task, which ends
        loops[0].run_until_complete(asyncio.sleep(0))
    gc.collect()
    assert dropped() is None
    loops.pop().close()
    gone: list[Any] = [ref(first), ref(other), ref(loops.pop())]
    del first, again, other
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert [each() for each in gone] == [None] * 3


@pytest.mark.parametrize("most", [1, 10, None])
def test_more_calls_at_a_time_than_connections_wait_for_one_another(
    those: Clients, most: int | None, prefix: str
) -> None:
    """As threads do; each has a key of its own, and all run. To open a thousand at once takes longer than each may."""
    many = MANY if those.kind == "plain" else MANY // 10
    options: dict[str, Any] = {} if most is None else {"max_connections": most}
    options |= {"socket_timeout": LIMIT, "socket_connect_timeout": LIMIT}  # after which redis-py connects again

    async def all_at_once() -> Any:
        return await asyncio.gather(*(call(number) for number in range(many)))

    with those.connected(**options) as client:
        call = decorated(work, "{number}", timeout=600, redis=client)
        begun = those.witness.info("stats")["total_connections_received"]
        assert asyncio.run(all_at_once()) == list(range(many))
        opened = those.witness.info("stats")["total_connections_received"] - begun
        assert opened <= min(most or many, 32) + OTHERS
        assert not those.witness.keys(f"*{prefix}*")


@pytest.mark.skipif(not hasattr(asyncio.Task, "cancelling"), reason="Python counts cancellations from 3.11 on")
def test_a_cancellation_that_redis_py_loses_ends_the_call(redis_url: str) -> None:
    """It connects with `asyncio.wait_for`, which until Python 3.12 loses one that comes at the last moment."""

    async def cancel_after(steps: int) -> None:
        """Each has a loop of its own, and so connects, which takes more steps than these."""
        call = asyncio.ensure_future(decorated(work, redis=redis_url)())
        for _ in range(steps):
            await asyncio.sleep(0)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    for steps in range(8):
        asyncio.run(cancel_after(steps))


class Commands:
    """Commands of a client with two connections, of which each ends as its name says, once the test lets it."""

    def __init__(self) -> None:
        self._client = AsyncClient(lambda: self, 2)
        self._may_end: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.tasks: dict[str, asyncio.Task[Any]] = {}

    async def execute_command(self, command: str) -> str:
        await self._may_end[command].wait()
        if command.startswith("times out"):
            raise redis_py.TimeoutError
        return command

    async def send(self, *commands: str) -> None:
        for command in commands:
            self.tasks[command] = asyncio.create_task(self._client.execute_command(command))
        await asyncio.sleep(0)

    async def end(self, *commands: str) -> None:
        """Have each end, one after the other."""
        for command in commands:
            self._may_end[command].set()
            told = pytest.raises(redis_py.TimeoutError, match=r"^$") if "times out" in command else nullcontext()
            with told:
                assert await asyncio.wait_for(self.tasks[command], LIMIT) == command
            await asyncio.sleep(0)  # the next one is sent


def test_commands_that_wait_for_a_connection_give_up_when_the_server_is_down() -> None:
    """Time-outs of commands that were sent together say nothing, as the loop may have been busy; one sent later does.

    A command that was cancelled takes no turn.
    """

    async def main() -> None:
        commands = Commands()
        await commands.send("times out", "times out too", "times out later", "answered", "cancelled", "waits")
        commands.tasks["cancelled"].cancel()
        await commands.end("times out", "times out too", "times out later")
        with pytest.raises(redis_py.TimeoutError, match="did not answer on any"):
            await asyncio.wait_for(commands.tasks["waits"], LIMIT)
        await commands.end("answered")

    asyncio.run(main())


def test_commands_that_wait_for_a_connection_go_on_while_the_server_answers_others() -> None:
    async def main() -> None:
        commands = Commands()
        await commands.send("first", "times out", "second", "times out later", "third", "times out last", "fourth")
        await commands.end("first", "times out", "times out later", "second", "times out last", "third", "fourth")

        # Nor is one that timed out long ago the first of two.
        await commands.send("times out alone")
        await commands.end("times out alone")
        await commands.send("times out again", "fifth", "sixth")
        await commands.end("times out again", "fifth", "sixth")

    asyncio.run(main())
