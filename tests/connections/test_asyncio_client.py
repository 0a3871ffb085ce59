"""The connections that async calls keep: none is left open, none gives a reply to another command.

Also in one event loop after the other, many at a time, and when one is cancelled.
What becomes of them after errors is in `test_kept_connections.py`, with those of threads.
"""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock
from weakref import ref

import pytest
import redis as redis_py
from redis import asyncio as redis_asyncio

from only_one import current_lock
from only_one.connections.asyncio_client import AsyncClient, make_async_client
from only_one.connections.own_pools import SHORT_TIMEOUTS, own_pool
from only_one.connections.server import Server, find_server
from only_one.driver import ServerTimeout
from rigs.waiting import LIMIT
from tests.clients import Clients
from tests.decorated import decorated
from tests.interruptions import Interruption


@pytest.mark.parametrize("error", [redis_py.ConnectionError, ValueError])
def test_a_connection_that_cannot_be_made_costs_no_other(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """As at a server that has as many as it takes, where another program would have what is closed.

    And as while what gives the credentials is away, which may raise anything.
    """
    client = make_async_client(redis_py.Redis.from_url(redis_url), Mock())

    async def main() -> None:
        await asyncio.gather(*(client.send_raw(("PING",)) for _ in range(2)))
        kept = [*client.client._idle]
        client.client._idle.clear()

        async def refuse(_: Any) -> None:
            client.client._idle.extend(kept)
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(redis_asyncio.Connection, "connect", refuse)
            with pytest.raises(error):
                await client.send_raw(("PING",))
        assert client.client._idle == kept
        await client.aclose()

    asyncio.run(main())


def test_a_server_that_is_frozen_holds_up_no_command_by_redis_py_s_check_and_fails_no_end(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In asyncio, that check has no time limit; and to close a connection with TLS waits for the server's answer."""
    checks = [AsyncMock(), Mock()]

    async def main() -> None:
        await client.send_raw(("PING",))
        monkeypatch.setattr(redis_asyncio.Connection, "check_health", checks[0])
        await client.send_raw(("PING",))
        (connection,) = client.client._idle
        await connection.disconnect()
        connection.disconnect = AsyncMock(side_effect=TimeoutError)
        await client.aclose()
        connection.disconnect.assert_awaited_once()

    with redis_py.Redis.from_url(redis_url, health_check_interval=3600) as source:
        client = make_async_client(source, Mock())
        asyncio.run(main())
        of_threads = Server(source).client
        of_threads.send_raw(("PING",))
        monkeypatch.setattr(redis_py.Connection, "check_health", checks[1])
        assert [of_threads.send_raw(("PING",)), *of_threads.send([("PING",)])] == [b"PONG"] * 2
    assert [each.call_count for each in checks] == [0, 0]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_client_is_closed_again_whose_command_ends_or_is_interrupted_meanwhile(*, is_interrupted: bool) -> None:
    """It has been replaced after a signal, and the command has opened a connection while it was closed."""
    closed: list[str] = []

    class Replaced:
        async def close_connections(self) -> None:
            closed.append("closed")
            if len(closed) == 1:
                if is_interrupted:
                    raise Interruption
                client.to_be_closed.add(self)  # as the end of that command does

    client = AsyncClient(Replaced, 1, Mock())
    with suppress(Interruption):
        asyncio.run(client.aclose())
    asyncio.run(client.close_what_is_left())
    assert closed == ["closed", "closed"]


@pytest.mark.parametrize("said", [{}, {"enabled": False}, {"enabled": True}, {"enabled": "auto"}])
def test_our_own_connections_hear_no_news_of_maintenance(redis_url: str, said: dict[str, Any]) -> None:
    """Whatever the user's own client does: redis-py's pool would act on them, and has none of an event loop's.

    With a client of ours, from a URL, a server that is frozen after such news would be known in ten seconds.
    """
    notices = pytest.importorskip("redis.maint_notifications")
    options = {"maint_notifications_config": notices.MaintNotificationsConfig(**said)} if said else {}
    pool: Any = redis_py.ConnectionPool.from_url(redis_url, protocol=3, **options)
    of_the_thread = own_pool(pool, SHORT_TIMEOUTS)
    assert not of_the_thread.maint_notifications_enabled()
    from_url: Any = find_server(f"{redis_url}?protocol=3").client.connection_pool
    assert not from_url.maint_notifications_enabled()
    for our_pool in (of_the_thread, from_url):
        assert our_pool.make_connection()._maint_notifications_connection_handler is None
    pytest.importorskip("redis.asyncio.maint_notifications")

    async def main() -> None:
        client = make_async_client(redis_py.Redis(connection_pool=pool), Mock())
        await client.send_raw(("PING",))
        (connection,) = client.client._idle
        assert connection._maint_notifications_connection_handler is None
        await client.aclose()

    asyncio.run(main())


# Event loops, and many calls at a time in one


MANY = 1000
"""Calls at a time."""
OTHERS = 4
"""Connections at the most that look around in a cluster, or renew."""


async def hold(number: int = 0) -> int:
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
        call = decorated(hold, "{number}", timeout=600, redis=client)
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
        call = asyncio.ensure_future(decorated(hold, redis=redis_url)())
        for _ in range(steps):
            await asyncio.sleep(0)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    for steps in range(8):
        asyncio.run(cancel_after(steps))


@pytest.mark.parametrize("is_down", [True, False])
def test_commands_that_wait_for_a_connection_give_up_unless_the_server_answers_another(*, is_down: bool) -> None:
    """When a command times out; and one that is cancelled leaves its turn to those that wait."""
    names = ("times out", "another", "cancelled", "third", "fourth")

    async def main() -> None:
        replies = {name: asyncio.get_running_loop().create_future() for name in names}

        async def reply_to(name: Any) -> Any:
            return await replies[name[0]]

        client = AsyncClient(lambda: SimpleNamespace(send_raw=reply_to), 2, Mock())
        times_out, another, cancelled, *waiting = [asyncio.create_task(client.send_raw((name,))) for name in names]
        await asyncio.sleep(0)
        cancelled.cancel()
        if not is_down:
            replies["another"].set_result("its reply")
            assert await another == "its reply"
        replies["times out"].set_exception(redis_py.TimeoutError())
        with pytest.raises(redis_py.TimeoutError, match=r"^$"):
            await times_out
        for name in {*names} - {"times out", "another"}:
            replies[name].set_result(name)
        ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), LIMIT)
        assert [type(each) for each in ended] == [ServerTimeout if is_down else str] * 2
        another.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("commands", [600, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_command_that_is_cancelled_never_leaves_its_reply_to_another(redis_url: str, commands: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    moments, server = random.Random(seed), Server(redis_py.Redis.from_url(redis_url))

    async def main() -> set[str]:
        client = await server.async_client()

        async def ask(number: int) -> str:
            reply = await client.send_raw(("ECHO", f"{number}"))
            return "its own" if reply == b"%d" % number else "another's"

        async def cancel_at_random(number: int) -> str:
            asking = asyncio.create_task(ask(number))
            for _ in range(moments.randrange(12)):
                await asyncio.sleep(0)
            if moments.random() < 1 / 2:
                asking.cancel()
            (result,) = await asyncio.gather(asking, return_exceptions=True)
            return result if isinstance(result, str) else type(result).__name__

        results: set[str] = set()
        for begin in range(0, commands, 20):
            results.update(await asyncio.gather(*map(cancel_at_random, range(begin, begin + 20))))
        assert len(client.client._all) <= 20, "as many as were sent at a time"
        return results

    assert asyncio.run(main()) == {"its own", "CancelledError"}
