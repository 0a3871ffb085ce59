"""Decorated async functions: in one event loop after the other, and many at a time."""

from __future__ import annotations

import asyncio
import gc
import warnings
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
        assert opened <= min(most or many, 100) + OTHERS
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


class Client:
    """A client of which each command ends as its name says.

    Attributes:
        goes_on: ends what "times out".
    """

    goes_on: asyncio.Event

    async def execute_command(self, command: str) -> str:
        if command == "times out":
            await self.goes_on.wait()
            raise redis_py.TimeoutError
        if command == "takes long":
            await asyncio.Event().wait()
        return command


@pytest.mark.parametrize("is_down", [False, True], ids=["another has its reply", "none has"])
def test_a_command_that_waits_for_a_connection_on_which_another_times_out(*, is_down: bool) -> None:
    """It has its turn if the server answers others, and gives up if that is down; one that was cancelled takes none."""
    Client.goes_on, asyncio_client = asyncio.Event(), AsyncClient(Client, 2)

    def send(command: str) -> asyncio.Task[Any]:
        return asyncio.create_task(asyncio_client.execute_command(command))

    async def main() -> None:
        timed_out = send("times out")
        if not is_down:
            assert await send("answered") == "answered"
        takes_long, cancelled, waits = send("takes long"), send("cancelled"), send("waits")
        await asyncio.sleep(0)
        cancelled.cancel()
        Client.goes_on.set()
        with pytest.raises(redis_py.TimeoutError):
            await timed_out
        if is_down:
            with pytest.raises(redis_py.TimeoutError, match="did not answer on any"):
                await waits
        else:
            assert await waits == "waits"
        takes_long.cancel()

    asyncio.run(main())
