"""Something is raised when a command has been sent and its reply is yet to come: no other command takes it for its own.

It is raised before each reply in turn, those among them with which a connection begins; and when a `with` of Python's
own or an `async with` has taken a lock, redis-py's or ours, and has yet to begin: nobody waits for it for ever.
The pool sees no sign of a reply that is yet to come, as on a slow network.
The witness is a value of somebody else's, beside which nothing may run.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import redis as redis_py
import redis.asyncio.connection
import redis.connection
from celery.exceptions import SoftTimeLimitExceeded

from only_one import LockUnavailable, current_lock, inspection, only_one
from only_one.connections.server import Server
from rigs.waiting import LIMIT, eventually
from tests.clients import Clients, clients
from tests.decorated import as_async, decorated
from tests.interruptions import Interruption, handled, raises

MOST = 100
"""Moments in one call; there are some ten."""


class Moments:
    """When something may be raised in this thread: before a reply is read, and when a lock is taken.

    Attributes:
        has_come: whether the last one that something was to be raised at has come.
    """

    has_come = True

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._left = 0

    def is_next(self) -> None:
        """One has come."""
        if threading.get_ident() == self._thread:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGUSR1)

    def each(self) -> Iterator[int]:
        """The number of each in turn, and the first of which there is none."""
        for number in range(1, MOST):
            yield number
            if not self.has_come:
                assert number > 1
                return
        pytest.fail(f"there are more than {MOST} moments")

    @contextmanager
    def interrupted_at(self, number: int, error: type[BaseException]) -> Iterator[None]:
        """Raise `error` at the n-th from now on."""
        self._left = number
        with handled(raises(error), signal.SIGUSR1), suppress(error):
            yield
        self.has_come, self._left = self._left <= 0, 0


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Moments:
    """Those at which something is raised; and no reply is there when a pool looks for one."""
    own = Moments()
    sync: Any = redis.connection.AbstractConnection
    asynchronous: Any = redis.asyncio.connection.AbstractConnection

    def at_a_moment(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            own.is_next()
            return function(*args, **options)

        return call

    def enter(condition: Any) -> Any:
        assert condition.acquire(timeout=LIMIT)
        own.is_next()
        return True

    async def enter_async(lock: Any) -> None:
        await lock.acquire()
        own.is_next()

    for kind, can_read in ((sync, Mock(return_value=False)), (asynchronous, AsyncMock(return_value=False))):
        monkeypatch.setattr(kind, "read_response", at_a_moment(kind.read_response))
        for name in ("can_read", "can_read_destructive"):
            monkeypatch.setattr(kind, name, can_read, raising=False)
    monkeypatch.setattr(threading.Condition, "__enter__", enter)
    for kind in (asyncio.Lock, asyncio.Semaphore):
        monkeypatch.setattr(kind, "__aenter__", enter_async)
    return own


both = pytest.mark.parametrize("error", [SoftTimeLimitExceeded, Interruption])


@both
@pytest.mark.parametrize("which", ["call", "held"])
def test_a_command_that_is_interrupted(
    those: Clients, moments: Moments, prefix: str, which: str, error: type[BaseException]
) -> None:
    """Its SET, what its run asks of its lock, its release; and a search for all keys."""
    for number in moments.each():
        with those.connected() as client:
            call = only_one(lambda: current_lock().extend(5), key="k", timeout=600, redis=client)
            next_call = only_one(lambda: "done", key="k", timeout=600, redis=client)
            ask: Callable[[], Any] = call if which == "call" else lambda: list(inspection.held(redis=client))
            those.witness.set(f"{prefix}other", "to be found")
            with moments.interrupted_at(number, error):
                ask()
            those.witness.set(f"{prefix}k", "somebody else")
            assert [next_call() for _ in range(3)] == [None] * 3, f"interrupted at {number}"
            assert len(list(inspection.held(redis=client))) == 2
            those.witness.delete(f"{prefix}k")
            assert next_call() == "done"


@both
def test_a_command_of_an_event_loop_that_is_interrupted(
    those: Clients, moments: Moments, prefix: str, error: type[BaseException]
) -> None:
    async def check(number: int, call: Callable[[], Awaitable[Any]]) -> None:
        # What is raised while redis-py first looks at a cluster, it takes for an error of the node.
        with moments.interrupted_at(number, error), suppress(LockUnavailable):
            await call()
        those.witness.set(f"{prefix}k", "somebody else")
        assert [await asyncio.wait_for(call(), LIMIT) for _ in range(3)] == [None] * 3, f"interrupted at {number}"
        those.witness.delete(f"{prefix}k")
        assert await call() == "done"

    for number in moments.each():
        with those.connected() as client:
            asyncio.run(check(number, decorated(as_async(lambda: "done"), timeout=600, redis=client)))


@pytest.mark.usefixtures("prefix")
def test_who_waits_for_a_connection_when_a_command_is_interrupted(redis_url: str, moments: Moments) -> None:
    async def check(number: int, call: Callable[[str], Awaitable[str]]) -> None:
        with moments.interrupted_at(number, Interruption):
            calls = asyncio.gather(*map(call, "abc"), return_exceptions=True)
            replies = await asyncio.wait_for(calls, LIMIT)
        interrupted = [each for each in replies if isinstance(each, Interruption)]
        assert len(interrupted) == moments.has_come
        assert {*replies} - {*interrupted} <= {*"abc"}

    for number in moments.each():
        with redis_py.Redis.from_url(redis_url, max_connections=1) as client:
            call = decorated(as_async(lambda which: which), "{which}", timeout=600, redis=client)
            asyncio.run(check(number, call))


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """What Python warns of, such as of connections that nobody has closed."""
    gc.collect()  # what earlier tests have left
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        yield messages


def test_commands_that_are_forgotten_and_collected_outside_of_their_event_loop(
    those: Clients, warned: list[warnings.WarningMessage]
) -> None:
    """As what awaits them was interrupted; redis-py raises that no loop is running, and keeps their connections."""

    async def send(server: Server) -> None:
        await (await server.async_client()).send_raw(("GET", "k"))

    async def begin(server: Server) -> Any:
        await send(server)
        command = (await server.async_client()).send_raw(("GET", "k"))
        command.send(None)
        return command

    with those.connected() as client:
        server = Server(client)
        loop = asyncio.new_event_loop()
        commands = [loop.run_until_complete(begin(server)) for _ in range(2)]
        connected = len(those.witness.client_list())
        for command in commands:
            with suppress(RuntimeError, redis_py.RedisError):
                command.close()
            loop.run_until_complete(send(server))
        assert eventually(lambda: len(those.witness.client_list()) < connected)
        command = loop.run_until_complete(begin(server))  # after which no other follows
        with suppress(RuntimeError, redis_py.RedisError):
            command.close()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        del command, commands, loop, server
        gc.collect()
    assert [str(each.message) for each in warned] == []


def test_what_renews_closes_its_connections_when_it_is_collected(
    those: Clients, warned: list[warnings.WarningMessage]
) -> None:
    """The garbage collector may come to them first, as to what is younger here, and would warn of each."""
    with those.connected() as client:
        server: Any = Server(client)
        server.itself = server
        node = server.node_of("k")
        for _ in range(2):  # the second time with a new socket in a connection that is older
            node.client.close_idle()
            gc.collect(0)
            assert node.send([("GET", "k")]) == [None]
        connected = len(those.witness.client_list())
        del server, node
        gc.collect()
        assert eventually(lambda: len(those.witness.client_list()) < connected)
    assert [str(each.message) for each in warned] == []


def test_a_question_for_the_master_that_was_interrupted_leaves_its_answer_to_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with clients("Sentinel") as those, those.connected() as given:
        client: Any = Server(given).client
        manager = client.connection_pool.sentinel_manager
        pool = manager.sentinels[0].connection_pool
        asked, of_another_thread = pool.make_connection(), pool.make_connection()
        of_another_thread.connect()
        pool._in_use_connections.add(of_another_thread)

        def question(_: object) -> None:
            asked.send_command("ECHO", "of the interrupted")
            pool._available_connections.append(asked)
            raise Interruption

        with monkeypatch.context() as patched:
            patched.setattr(manager, "discover_master", question)
            with pytest.raises(Interruption):
                client.send_raw(("PING",))
        assert of_another_thread._sock is not None
        of_another_thread.disconnect()
        monkeypatch.setattr(redis.connection.AbstractConnection, "can_read", Mock(return_value=False))
        assert client.send_raw(("PING",)) == b"PONG"
