"""Connections that are kept between commands: nobody sees that they are, whatever becomes of them.

Replies are checked against their commands: each `ECHO` has a text of its own.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock
from uuid import uuid4

import pytest
import redis as redis_py
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from only_one import inspection, only_one
from only_one.connections import kept_connections
from only_one.connections.kept_connections import _packed, packed
from only_one.connections.server import Server, find_server
from only_one.driver import Command, Commands, drive_async
from only_one.events import Down
from only_one.lock.redis_lock import Lock
from rigs.proxy import Proxy
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.decorated import decorated
from tests.faults.programs import Running
from tests.interruptions import Interruption, handled, interrupt, is_interrupted_after, while_handling
from tests.renewal import is_idle, is_renewed

ROOT = Path(__file__).parents[2]
HANGS_FOR = 2.0
"""Seconds that a client waits for a reply where none comes; all others are there sooner on any machine."""

_texts = count()


def echo(client: Any) -> bool:
    """Send a command whose reply can be no other command's."""
    text = f"text {os.getpid()} {next(_texts)}"
    assert client.send_raw(("ECHO", text)) == text.encode()
    return True


def fill(client: Any, number: int) -> set[int]:
    """Have a client keep so many connections, and return the server's ids of them."""
    client.idle += [client.connection_pool.make_connection() for _ in range(len(client.idle), number)]
    return kept(client)


def kept(client: Any) -> set[int]:
    """The server's ids of the connections that are kept."""

    def id_of(connection: Any) -> int:
        connection.send_command("CLIENT ID")
        number: int = connection.read_response()
        return number

    return {*map(id_of, client.idle)}


def steps(command: Command) -> Commands[Any]:
    return (yield command)


@pytest.fixture
def name() -> str:
    """By which the server knows the connections of the test."""
    return f"test-{uuid4().hex}"


@pytest.fixture
def client(redis_url: str, name: str) -> Iterator[Any]:
    """What sends the commands of calls in the place of a user's client."""
    with redis_py.Redis.from_url(redis_url, client_name=name) as given:
        yield Server(given).client


def connections(watching: Any, name: str) -> set[int]:
    """The server's ids of all connections of a name."""
    return {int(each["id"]) for each in watching.client_list() if each["name"] == name}


# Which clients can be given


class Subclass(redis_py.Redis):
    """A client of the user's own."""


class Behind:
    """What stands before a client, as Flask-Redis's: it has what the client has, and a copy of it has no client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Connection(redis_py.Connection):
    """A connection of the user's own class."""


TOKENS = Mock(["get_credentials", "on_next"], get_credentials=lambda: ())
"""A provider of credentials that are renewed, as for Entra ID."""


def with_(**options: Any) -> Callable[[RedisServer], Any]:
    return lambda server: redis_py.Redis.from_url(server.url, **options)


def waits(server: RedisServer) -> Any:
    return redis_py.Redis(connection_pool=redis_py.BlockingConnectionPool.from_url(server.url, max_connections=1))


CLIENTS: dict[str, Callable[[RedisServer], Any]] = {
    "by address": lambda server: redis_py.Redis(port=server.port, health_check_interval=1),
    "unix socket": lambda server: redis_py.Redis.from_url(f"unix://{server.unix_socket}"),
    "URL": lambda server: f"{server.url}?decode_responses=yes&protocol=3",
    "URL of a unix socket": lambda server: f"unix://{server.unix_socket}?db=1",
    "callable": lambda server: lambda: redis_py.Redis.from_url(server.url, protocol=3, decode_responses=True),
    "another encoding": with_(encoding="latin-1", encoding_errors="ignore"),
    "subclass": lambda server: Subclass.from_url(server.url),
    "behind an object": lambda server: Behind(redis_py.Redis.from_url(server.url)),
    "few connections": with_(max_connections=1),
    "waits for connections": waits,
    "one connection": with_(single_connection_client=True),
    "own connections": with_(connection_class=Connection),
    "renewed credentials": with_(credential_provider=TOKENS),
}


@pytest.mark.usefixtures("prefix")
@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_a_client_of_any_kind_has_runs_that_are_renewed(server: RedisServer, make: Callable[[Any], Any]) -> None:
    """And its server is asked whether it evicts keys."""
    given = make(server)
    with Running("\xfcber", lease=60, redis=given) as run:
        assert is_idle()
        assert is_renewed(run.lock)
        assert run.lock.server.looked_at_from == math.inf
        assert decorated(lambda: "done", "\xfcber", redis=given)() is None
    getattr(given, "close", list)()


def test_a_client_that_remembers_replies_is_asked_anew() -> None:
    cache = pytest.importorskip("redis.cache")
    with redis_py.Redis(protocol=3, cache_config=cache.CacheConfig()) as given:
        assert given.connection_pool.cache is not None
        assert type(Server(given).client.connection_pool.make_connection()) is redis_py.Connection


def test_a_client_of_one_connection_waits_for_no_command_of_the_user_s(redis: Any, redis_url: str, key: str) -> None:
    given = redis_py.Redis.from_url(f"{redis_url}?client_name={key}", single_connection_client=True)
    with given, ThreadPoolExecutor(2) as pool:
        try:
            blocked = pool.submit(given.blpop, [key], 0)
            assert eventually(lambda: "blpop" in [each["cmd"] for each in redis.client_list() if each["name"] == key])
            assert pool.submit(decorated(lambda: "done", redis=given)).result(LIMIT) == "done"
            assert not blocked.done()
        finally:
            redis.lpush(key, "the blocked command ends")


def test_a_command_is_packed_as_by_redis_py() -> None:
    """With hiredis, and without."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    with redis_py.Redis() as given:
        connection: Any = given.connection_pool.make_connection()
        packers = [connection.pack_command, PythonRespSerializer(6000, given.get_encoder().encode).pack]
        for _ in range(500):
            values = [b"\x00\r\n", "\xfcber", 0, -7, 2.5, "", b"", draw.randbytes(draw.randrange(9000)), "x" * 7000]
            command: Any = ("SET", *draw.choices(values, k=draw.randrange(1, 8)))
            assert {b"".join(pack(*command)) for pack in packers} == {packed(command)} == {_packed(command)}


# Errors and time-outs


def test_connections_that_the_server_has_closed_cost_nothing(server: RedisServer, happened: list[Any]) -> None:
    """No error, whatever is handled just then; and not in many threads, either."""
    with redis_py.Redis.from_url(server.url) as watching, redis_py.Redis.from_url(server.url) as given:
        run = only_one(lambda number: number, key="{number}", timeout=600, redis=given)
        one = find_server(given)
        client = one.client
        for call in (partial(run, 0), partial(while_handling, TimeoutError, partial(run, 0))):
            before = fill(client, 16)
            watching.client_kill_filter(skipme=True)
            call()
            with ThreadPoolExecutor(16) as pool:
                assert list(pool.map(run, range(64), timeout=LIMIT)) == [*range(64)]
            assert not before & kept(client)
        fill(client, 2)
        watching.client_kill_filter(skipme=True)
        with pytest.raises(redis_py.ConnectionError):
            client.send([("PING",)])
        assert client.send([("PING",)]) == [b"PONG"]
        assert not watching.keys("only_one:*")
    assert not [event for event in happened if isinstance(event, Down)]


class OfThreads:
    """What sends the commands of calls in the threads of a process."""

    def __init__(self, server: Server) -> None:
        self.client: Any = server.client

    def send(self, *commands: Command) -> list[Any]:
        """The replies to commands, which are sent at the same time."""
        fill(self.client, len(commands))
        return [inspection._ask(self.client, command) for command in commands]

    def ids(self) -> set[int]:
        return kept(self.client)

    def close(self) -> None: ...


class OfAnEventLoop(OfThreads):
    """The same in an event loop."""

    def __init__(self, server: Server) -> None:
        self._loop, self._server = asyncio.new_event_loop(), server  # with which its client is closed
        self._run = self._loop.run_until_complete
        self.client = self._run(server.async_client())

    def send(self, *commands: Command) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*(drive_async(self.client, steps(command)) for command in commands))

        return self._run(together())

    def ids(self) -> set[int]:
        return {*self.send(*[("CLIENT", "ID")] * len(self.client.client._idle))}

    def close(self) -> None:
        self._run(self._loop.shutdown_asyncgens())
        self._loop.close()


@pytest.mark.parametrize("kind", [OfThreads, OfAnEventLoop])
def test_an_option_that_the_user_changes_counts_for_new_connections(
    redis: Any, redis_url: str, name: str, kind: type[OfThreads]
) -> None:
    """As a password that is renewed."""
    with redis_py.Redis.from_url(redis_url) as given, closing(kind(Server(given))) as one:
        given.connection_pool.connection_kwargs["client_name"] = name
        assert one.send(("ECHO", "a")) == [b"a"]
        assert connections(redis, name) == one.ids()


@pytest.mark.parametrize("kind", [OfThreads, OfAnEventLoop])
def test_a_command_that_times_out_is_sent_twice_and_leaves_no_kept_connection_and_one_that_is_refused_all(
    redis: Any, redis_url: str, name: str, kind: type[OfThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the client's retries: a reply that comes later goes to nobody.

    A firewall that forgets connections forgets all that were idle, and lets new ones through.
    No command waits until one is closed: TLS would wait for the server's answer.
    """
    monkeypatch.setattr(asyncio.StreamWriter, "wait_closed", AsyncMock(side_effect=AssertionError))
    options: dict[str, Any] = {"retry": Retry(NoBackoff(), 9), "retry_on_error": [redis_py.TimeoutError]}
    with (
        Proxy(redis_url) as proxy,
        redis_py.Redis.from_url(proxy.url, socket_timeout=HANGS_FOR, client_name=name, **options) as given,
        closing(kind(Server(given))) as one,
    ):
        one.send(*[("ECHO", "a")] * 3)
        before = one.ids()
        assert len(before) == 3
        with pytest.raises(redis_py.ResponseError, match="unknown command"):
            one.send(("NOTHING",))
        assert one.ids() == before
        proxy.forget_commands()
        proxy.lose_reply("GET", times=10, then="hang")
        with pytest.raises(redis_py.TimeoutError) as caught:
            one.send(("GET", name))
        assert proxy.commands == ["GET"] * 2
        # Not only when what was raised, and with it the call, is forgotten.
        assert one.ids() == set()
        one.send(("ECHO", "b"))
        assert eventually(lambda: not before & connections(redis, name))
        del caught


@pytest.mark.parametrize("kind", [OfThreads, OfAnEventLoop])
def test_a_master_that_was_replaced_is_left_also_by_a_command_under_way(
    redis: Any, redis_url: str, name: str, kind: type[OfThreads]
) -> None:
    with (
        redis_py.Redis.from_url(redis_url, client_name=name) as given,
        closing(kind(server := Server(given))) as one,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(2):
            one.send(("ECHO", "a"), ("ECHO", "b"))
            before = one.ids()
            under_way = pool.submit(one.send, ("BLPOP", name, 0))
            assert eventually(lambda: "blpop" in {each["cmd"] for each in redis.client_list() if each["name"] == name})
            server.client.leave_master()
            redis.rpush(name, "it ends")
            assert under_way.result(LIMIT)
            one.send(("ECHO", "c"))
            assert len(before) == 2
            assert not before & one.ids()
            assert eventually(lambda before=before: not before & connections(redis, name))  # type: ignore[misc]


def test_a_connection_that_cannot_be_made_costs_no_other(client: Any) -> None:
    """As at a server that has as many as it takes: another program would have what is closed."""
    before = fill(client, 2)
    used, client.idle[:] = [*client.idle], []

    def refuse(_: Any) -> None:
        client.idle.extend(used)
        raise redis_py.ConnectionError

    client.connection_pool.connection_kwargs["redis_connect_func"] = refuse
    with pytest.raises(redis_py.ConnectionError):
        client.send_raw(("PING",))
    assert kept(client) == before


# Interruptions


def test_a_command_that_is_interrupted_costs_no_other_connection(client: Any) -> None:
    """As by a time limit of gevent's, which may be short and come often."""
    fill(client, 2)
    other, interrupted = client.idle
    interrupted.read_response = Mock(side_effect=Interruption)
    with pytest.raises(Interruption):
        client.send_raw(("PING",))
    assert client.idle == [other]


@pytest.mark.interrupts
@pytest.mark.timeout(method="thread")  # as SIGALRM is ours
def test_a_reply_is_never_another_command_s(
    client: Any, name: str, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is raised where Python collects garbage pytest would keep, and the connection that it is of.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    rounds, hits = 3000, 0
    with handled(interrupt):
        for _ in range(rounds):
            # Most of a command's time is that of its way to the server and back.
            hits += is_interrupted_after(moments.uniform(1e-6, 8e-5), lambda: [echo(client) for _ in range(3)])
            echo(client)
    print(f"{hits} of {rounds} interrupted, {len(connections(redis, name))} connections")
    assert hits > rounds / 10
    assert len(client.idle) <= 2
    gc.collect()
    assert eventually(lambda: len(connections(redis, name)) == len(client.idle))


# For how long they are kept


@pytest.mark.usefixtures("prefix")
def test_connections_neither_grow_nor_stay(redis: Any, redis_url: str, name: str) -> None:
    with redis_py.Redis.from_url(redis_url) as first:
        Lock(first, "a lock")  # redis-py keeps the first client for which a lock is made
    given = redis_py.Redis.from_url(redis_url, client_name=name)
    run = only_one(lambda which: f"done {which}", key="{which}", timeout=600, redis=given)
    assert run(0) == "done 0"
    # The thread that renews looks at a server that is new to it, by a connection of its own.
    assert is_idle()
    before = connections(redis, name)
    for number in range(1000):
        assert run(number) == f"done {number}"
    for number in range(50):
        assert only_one(lambda: "done", key=f"k{number}", timeout=600, redis=given)() == "done"
    assert connections(redis, name) == before
    del given, run
    gc.collect()
    assert eventually(lambda: not connections(redis, name))


# Forks

FORK = """
import os, sys
from only_one.connections.server import find_server
from tests.connections.test_kept_connections import echo, fill, kept

client = find_server(sys.argv[1]).client
ours = fill(client, 3)
sockets = [each._sock.fileno() for each in client.idle]
inodes = [os.fstat(each).st_ino for each in sockets]

for number in range(2):
    pid = os.fork()
    if not pid:
        assert [os.fstat(each).st_ino for each in sockets] == inodes
        assert not kept(client)
        for _ in range(10):
            assert echo(client)
        theirs = fill(client, 2)
        assert len(theirs) == 2 and not theirs & ours, (theirs, ours)
        if number % 2:
            os._exit(0)  # else what Python does at the end of a process
        sys.exit()
    echo(client)
    assert os.waitpid(pid, 0) == (pid, 0)
    echo(client)

assert kept(client) == ours, (kept(client), ours)
print("good")
"""


def test_what_begins_anew_leaves_the_earlier_connections_open(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: list[Any] = []
    monkeypatch.setattr(kept_connections, "_inherited", inherited)
    monkeypatch.setattr(kept_connections, "_all", [client])
    echo(client)
    pool, idle = client.connection_pool, client.idle
    kept_connections._begin_anew_in_child()
    assert inherited == [pool, idle]
    assert client.connection_pool is not pool
    assert (len(idle), client.idle) == (1, [])
    assert echo(client)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_leaves_the_parent_s_connections_alone(redis_url: str) -> None:
    """What another thread has acquired at the fork is in `tests/faults/test_fork.py`."""
    command = [sys.executable, "-c", FORK, redis_url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode, done.stderr) == ("good\n", 0, "")
