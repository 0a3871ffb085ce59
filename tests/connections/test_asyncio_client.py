"""The connections that async calls keep: none is left open, none gives a reply to another command."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import redis as redis_py
from redis import asyncio as redis_asyncio

from only_one import LockUnavailable, only_one
from only_one.connections.asyncio_client import AsyncClient, make_async_client
from only_one.connections.server import Server
from only_one.driver import RAW
from rigs.proxy import Proxy
from rigs.waiting import LIMIT, eventually
from tests.decorated import call_both
from tests.interruptions import Interruption


@pytest.fixture
def named(redis: Any, redis_url: str, key: str) -> Any:
    """The URL of a client with a name, and a function that gives the server's ids of its connections."""

    def connections() -> list[str]:
        return [each["id"] for each in redis.client_list() if each["name"] == key]

    return f"{redis_url}?client_name={key}", connections


def test_kept_connections_that_the_server_has_closed_are_replaced(redis: Any, named: Any) -> None:
    url, connections = named

    async def work(number: int) -> int:
        await asyncio.sleep(0)
        return number

    async def main() -> None:
        call = only_one(work, key="{number}", timeout=600, redis=url)
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
        for send in (client.execute_command, partial(asyncio.to_thread, server.client.execute_command)):
            await send("PING", **RAW)
            before = connections()
            for _ in range(3):
                with pytest.raises(redis_py.ResponseError, match="WRONGTYPE"):
                    await send("GET", key, **RAW)
            assert connections() == before

    asyncio.run(main())


def test_after_a_time_out_no_other_kept_connection_is_used(proxy: Proxy) -> None:
    """A firewall that forgets connections forgets all that were idle, and lets new ones through."""
    server = Server(redis_py.Redis.from_url(proxy.url, socket_timeout=2))

    async def main() -> None:
        client = await server.async_client()

        def ask() -> Any:
            return client.execute_command("CLIENT", "ID", **RAW)

        kept = await asyncio.gather(ask(), ask())
        proxy.lose_request("ECHO", then="hang")
        with pytest.raises(redis_py.TimeoutError):
            await client.execute_command("ECHO", "x", **RAW)
        assert await ask() not in kept

    asyncio.run(main())


def test_a_client_that_was_closed_waits_no_longer_for_a_reply_than_before(proxy: Proxy) -> None:
    """A loop closes it with its generators, and may be run again."""
    server = Server(redis_py.Redis.from_url(proxy.url, socket_timeout=2))

    async def main() -> None:
        client = await server.async_client()
        for _ in range(2):  # on a new connection, and on one that is kept
            await client.execute_command("PING", **RAW)
        await client.aclose()
        proxy.lose_request("ECHO", then="hang")
        with pytest.raises(redis_py.TimeoutError):
            await client.execute_command("ECHO", "x", **RAW)

    asyncio.run(main())


def test_no_command_waits_for_redis_py_s_check_of_a_kept_connection(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has no time limit: a frozen server was waited for without an end."""
    checks: list[object] = []

    async def check_health(connection: object) -> None:
        checks.append(connection)

    async def main() -> None:
        await client.execute_command("PING")
        monkeypatch.setattr(redis_asyncio.Connection, "check_health", check_health)
        await client.execute_command("PING")
        await client.aclose()

    with redis_py.Redis.from_url(redis_url, health_check_interval=3600) as source:
        client = make_async_client(source)
        asyncio.run(main())
    assert checks == []


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


def test_a_command_that_is_cancelled_leaves_those_their_turn_that_wait(redis_url: str, key: str) -> None:
    server = Server(redis_py.Redis.from_url(redis_url, max_connections=1))

    async def main() -> None:
        client = await server.async_client()
        await client.execute_command("PING", **RAW)
        blocked = asyncio.create_task(client.execute_command("BLPOP", key, 0, **RAW))
        waiting = asyncio.create_task(client.execute_command("PING", **RAW))
        for _ in range(5):
            await asyncio.sleep(0)
        blocked.cancel()
        assert await waiting == b"PONG"

    asyncio.run(main())


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


@pytest.mark.parametrize("said", [{}, {"enabled": False}, {"enabled": "auto"}])
def test_an_event_loop_s_connections_hear_no_news_of_maintenance(redis_url: str, said: dict[str, Any]) -> None:
    """Whatever the user's own client does: redis-py's pool would act on them, and has none of these connections."""
    pytest.importorskip("redis.asyncio.maint_notifications")
    notices = pytest.importorskip("redis.maint_notifications")
    options = {"maint_notifications_config": notices.MaintNotificationsConfig(**said)} if said else {}
    pool: Any = redis_py.ConnectionPool.from_url(redis_url, protocol=3, **options)

    async def main() -> None:
        client = make_async_client(redis_py.Redis(connection_pool=pool))
        await client.execute_command("PING", **RAW)
        (connection,) = client.client._idle
        assert connection._maint_notifications_connection_handler is None
        await client.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["returns", "is cancelled", "fails"])
def test_an_event_loop_that_ends_leaves_no_connection_open(named: Any, ends: str) -> None:
    url, connections = named

    started = asyncio.Event()

    async def work(number: int) -> int:
        started.set()
        await asyncio.sleep(LIMIT if ends == "is cancelled" else 0)
        if ends == "fails":
            raise RuntimeError
        return number

    async def main() -> None:
        call = only_one(work, key="{number}", timeout=600, redis=url)
        calls = [asyncio.create_task(call(number)) for number in range(9)]
        if ends == "is cancelled":
            await started.wait()
            for each in calls:
                each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert connections()

    asyncio.run(main())
    assert eventually(lambda: len(connections()) <= 1), "only the thread that renews has one"


@pytest.mark.parametrize("commands", [600, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_command_that_is_cancelled_never_leaves_its_reply_to_another(redis_url: str, commands: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    moments, server = random.Random(seed), Server(redis_py.Redis.from_url(redis_url))

    async def main() -> set[str]:
        client = await server.async_client()

        async def ask(number: int) -> str:
            reply = await client.execute_command("ECHO", f"{number}", **RAW)
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
        assert len(living()) <= before + 20, "as many as were sent at a time"
        return results

    def living() -> list[Any]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is redis_asyncio.Connection]

    before = len(living())
    assert asyncio.run(main()) == {"its own", "CancelledError"}


def test_a_client_of_another_encoding_has_one_key_for_sync_and_async_calls(
    redis: Any, redis_url: str, key: str
) -> None:
    stored = f"{key}\u00e9".encode("latin-1")
    with redis_py.Redis.from_url(redis_url, encoding="latin-1") as client:
        assert call_both(lambda: redis.exists(stored), "k\u00e9", timeout=600, redis=client) == [1, 1]
