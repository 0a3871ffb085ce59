"""The connections that async calls keep: none is left open, none gives a reply to another command.

Also in one event loop after the other, many at a time, and when one is cancelled.
"""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from weakref import ref

import pytest
import redis as redis_py
from redis import asyncio as redis_asyncio

from only_one import LockUnavailable, current_lock, only_one
from only_one.connections.asyncio_client import AsyncClient, make_async_client
from only_one.connections.own_pools import SHORT_TIMEOUTS, own_pool
from only_one.connections.server import Server, find_server
from only_one.driver import ServerTimeout
from rigs.proxy import Proxy
from rigs.waiting import LIMIT
from tests.clients import Clients
from tests.decorated import as_async, decorated
from tests.interruptions import Interruption


@pytest.fixture
def named(redis: Any, redis_url: str, key: str) -> Any:
    """The URL of a client with a name, and a function that gives the server's ids of its connections."""

    def connections() -> list[str]:
        return [each["id"] for each in redis.client_list() if each["name"] == key]

    return f"{redis_url}?client_name={key}", connections


def test_kept_connections_that_the_server_has_closed_are_replaced(redis: Any, named: Any) -> None:
    url, connections = named

    async def main() -> None:
        call = decorated(as_async(lambda number: number), "{number}", timeout=600, redis=url)
        for _ in range(5):
            assert await asyncio.gather(*map(call, range(4))) == [0, 1, 2, 3]
            assert len(connections()) <= 5, "the thread that renews has one, too"
            for connection in connections():
                redis.client_kill_filter(_id=connection)
            assert [await call(number) for number in range(4)] == [0, 1, 2, 3]

    asyncio.run(main())


def test_a_command_that_is_refused_keeps_its_connection(redis: Any, named: Any, key: str) -> None:
    url, connections = named
    server = Server(redis_py.Redis.from_url(url))
    redis.lpush(key, "no lock")

    async def main() -> None:
        client = await server.async_client()
        for send in (client.send_raw, lambda command: asyncio.to_thread(server.client.send_raw, command)):
            await send(("PING",))
            before = connections()
            for _ in range(3):
                with pytest.raises(redis_py.ResponseError, match="WRONGTYPE"):
                    await send(("GET", key))
            assert connections() == before

    asyncio.run(main())


def test_after_a_time_out_no_other_kept_connection_is_used(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that forgets connections forgets all that were idle, and lets new ones through.

    No command waits until one is closed: TLS would wait for the server's answer.
    A client that was closed, as a loop does with its generators that may be run again, waits as long as before.
    """
    server = Server(redis_py.Redis.from_url(proxy.url, socket_timeout=2))

    async def main() -> None:
        client = await server.async_client()

        def ask() -> Any:
            return client.send_raw(("CLIENT", "ID"))

        monkeypatch.setattr(asyncio.StreamWriter, "wait_closed", AsyncMock(side_effect=AssertionError))

        async def time_out() -> None:
            proxy.lose_request("ECHO", then="hang")
            with pytest.raises(redis_py.TimeoutError):
                await client.send_raw(("ECHO", "x"))

        kept = await asyncio.gather(ask(), ask())
        await time_out()
        assert not {await ask(), await ask()} & {*kept}
        assert len(client.client._all) == 1, "the others are closed"
        await client.aclose()
        await time_out()

    asyncio.run(main())


def test_a_server_that_is_frozen_holds_up_no_command_by_redis_py_s_check_and_fails_no_end(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a kept connection has no time limit; to close one with TLS waits for the server's answer."""
    check = AsyncMock()

    async def main() -> None:
        await client.send_raw(("PING",))
        monkeypatch.setattr(redis_asyncio.Connection, "check_health", check)
        await client.send_raw(("PING",))
        (connection,) = client.client._idle
        await connection.disconnect()
        connection.disconnect = AsyncMock(side_effect=TimeoutError)
        await client.aclose()
        connection.disconnect.assert_awaited_once()

    with redis_py.Redis.from_url(redis_url, health_check_interval=3600) as source:
        client = make_async_client(source)
        asyncio.run(main())
    check.assert_not_called()


def test_calls_that_wait_for_a_connection_send_nothing_once_the_server_is_known_to_be_down(proxy: Proxy) -> None:
    """The first call and one that waits for it time out; the others would take as long each, and twice for a call."""

    async def work(number: int) -> None:
        pytest.fail(f"{number} has its key")

    async def main() -> list[Any]:
        call = only_one(work, key="{number}", redis=f"{proxy.url}?max_connections=1&socket_timeout=0.5")
        return await asyncio.gather(*map(call, range(9)), return_exceptions=True)

    proxy.lose_request("SET", times=18, then="hang")
    assert {type(each) for each in asyncio.run(main())} == {LockUnavailable}
    assert proxy.commands.count("SET") <= 2


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

    client = AsyncClient(Replaced, 1)
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
        client = make_async_client(redis_py.Redis(connection_pool=pool))
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

        client = AsyncClient(lambda: SimpleNamespace(send_raw=reply_to), 2)
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
