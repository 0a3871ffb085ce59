"""Connections that are kept between commands: nobody sees that they are, whatever becomes of them.

Replies are checked against their commands: each `ECHO` has a text of its own.
"""

from __future__ import annotations

import gc
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock
from uuid import uuid4

import pytest
import redis as redis_py
from redis.backoff import ConstantBackoff, NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from only_one import only_one
from only_one.clock import now
from only_one.connections import connection_pool
from only_one.connections.connection_pool import _MOST_KEPT, PinnedClient, _packed, _Pinned, guarded_pool, packed
from only_one.connections.server import Server
from only_one.driver import raw_sender, unanswered
from only_one.events import Down
from only_one.lock.redis_lock import Lock
from rigs.proxy import Proxy
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.clients import Subclass
from tests.decorated import decorated
from tests.faults.programs import Running
from tests.interruptions import (
    Interruption,
    handled,
    interrupt,
    is_interrupted_after,
    while_handling,
)
from tests.renewal import is_idle, is_renewed

ROOT = Path(__file__).parents[2]
HANGS_FOR = 2.0
"""Seconds that a client waits for a reply where none comes; all others are there sooner on any machine."""

ALL = redis_py.ConnectionPool().max_connections
"""Connections that a client may open which says nothing of it."""

ONCE = Retry(NoBackoff(), 0)

_texts = count()


def echo(client: Any) -> bool:
    """Send a command whose reply can be no other command's."""
    text = f"text {os.getpid()} {next(_texts)}"
    reply = raw_sender(client)(("ECHO", text))
    assert reply == text.encode()
    return True


def fill(pinned: PinnedClient, number: int) -> set[int]:
    """Have a client keep so many connections, and return the server's ids of them."""
    for each in [_Pinned(pinned.connection_pool) for _ in range(len(pinned.kept), number)]:
        pinned._keep(each)
    return kept(pinned)


def kept(client: PinnedClient) -> set[int]:
    """The server's ids of the connections that are kept."""

    def id_of(connection: Any) -> int:
        connection.send_command("CLIENT ID")
        number: int = connection.read_response()
        return number

    return {id_of(pinned.connection) for pinned in list(client.kept)}


@pytest.fixture
def name() -> str:
    """By which the server knows the connections of the test."""
    return f"test-{uuid4().hex}"


@pytest.fixture
def client(redis_url: str, name: str) -> Iterator[Any]:
    """A client as users have it."""
    with redis_py.Redis.from_url(redis_url, client_name=name) as own:
        yield own


@pytest.fixture
def pinned(client: Any) -> PinnedClient:
    return PinnedClient(client)


def lent(client: Any) -> int:
    """How many connections its pool has lent."""
    return len(client.connection_pool._in_use_connections)


def connections(watching: Any, name: str) -> set[int]:
    """The server's ids of all connections of a name."""
    return {int(each["id"]) for each in watching.client_list() if each["name"] == name}


# Which clients are replaced


class Connection(redis_py.Connection):
    """A connection of the user's own class."""

    def send_command(self, *args: Any, **options: Any) -> None:
        """See redis-py."""
        untyped: Any = super()
        untyped.send_command(*args, **options)


TOKENS = Mock(["get_credentials", "on_next"], get_credentials=lambda: ())
"""A provider of credentials that are renewed, as for Entra ID."""


def altered(url: str) -> Any:
    client: Any = redis_py.Redis.from_url(url)
    client.execute_command = Mock(wraps=client.execute_command)
    return client


@contextmanager
def without_a_pool(url: str) -> Iterator[Any]:
    """What the user has put around a client: it has what a lock needs, and shows no pool."""
    with redis_py.Redis.from_url(url) as client:
        what_it_needs = ("execute_command", "register_script", "pipeline")
        yield SimpleNamespace(**{name: getattr(client, name) for name in what_it_needs})


def with_(**options: Any) -> Callable[[str], Any]:
    return lambda url: redis_py.Redis.from_url(url, **options)


OTHERS: dict[str, Callable[[str], Any]] = {
    "subclass": Subclass.from_url,
    "few connections": with_(max_connections=ALL - 1),
    "one connection": with_(single_connection_client=True),
    "altered": altered,
    "own connections": with_(connection_class=Connection),
    "renewed credentials": with_(credential_provider=TOKENS),
    "no pool": without_a_pool,
}
PLAIN: dict[str, Callable[[RedisServer], Any]] = {
    "by URL": lambda server: redis_py.Redis.from_url(server.url, max_connections=ALL),
    "by address": lambda server: redis_py.Redis(port=server.port, health_check_interval=1),
    "unix socket": lambda server: redis_py.Redis.from_url(f"unix://{server.unix_socket}"),
    "RESP3": lambda server: redis_py.Redis.from_url(server.url, protocol=3, decode_responses=True),
    "UTF8": lambda server: redis_py.Redis.from_url(server.url, encoding="UTF8", encoding_errors="ignore"),
}


def is_used_as_it_is(client: Any) -> bool:
    """Whether commands go through the client's own class, and its own pool if it has one."""
    used = Server(client).client
    if hasattr(client, "connection_pool") and vars(used.connection_pool) is not vars(client.connection_pool):
        return False
    return isinstance(used, type(client)) and not isinstance(used, PinnedClient)


@pytest.mark.usefixtures("prefix")
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_clients_that_are_used_as_they_are(redis_url: str, make: Callable[[str], Any]) -> None:
    """And are renewed all the same, and asked whether they evict keys, where they show which server they ask."""
    with make(redis_url) as client:
        assert is_used_as_it_is(client)
        with Running(lease=60, redis=client) as run:
            assert is_idle()
            assert is_renewed(run.lock)
            assert run.lock.server.looked_at_from == math.inf
        if isinstance(client.execute_command, Mock):
            assert client.execute_command.call_args_list[0].args[0] == "SET"


def test_a_client_of_one_connection_waits_for_no_command_of_the_user_s(redis: Any, redis_url: str, key: str) -> None:
    client = redis_py.Redis.from_url(f"{redis_url}?client_name={key}", single_connection_client=True)
    with client, ThreadPoolExecutor(2) as pool:
        try:
            blocked = pool.submit(client.blpop, [key], 0)
            assert eventually(lambda: "blpop" in [each["cmd"] for each in redis.client_list() if each["name"] == key])
            assert pool.submit(decorated(lambda: "done", redis=client)).result(LIMIT) == "done"
            assert not blocked.done()
        finally:
            redis.lpush(key, "the blocked command ends")


def test_of_a_client_that_remembers_replies_no_such_connection_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("redis.cache")
    for kind in (redis_py.ConnectionPool, redis_py.BlockingConnectionPool):
        monkeypatch.setattr(connection_pool, "_another_like", made := Mock(wraps=connection_pool._another_like))
        with redis_py.Redis(connection_pool=kind(protocol=3, cache_config=cache.CacheConfig())) as client:
            used = Server(client).client
            assert not isinstance(used, PinnedClient)
            assert type(used.connection_pool.make_connection()) is redis_py.Connection
            assert client.connection_pool.cache is not None
            assert vars(Server(client).client.connection_pool) is vars(used.connection_pool)
            made.assert_called_once()


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_clients_whose_connections_are_pinned(server: RedisServer, make: Callable[[RedisServer], Any]) -> None:
    with make(server) as client:
        pinned = Server(client).client
        assert isinstance(pinned, PinnedClient)
        assert only_one(lambda: "done", key="k", timeout=600, redis=client)() == "done"
        assert echo(pinned)
        (before,) = kept(pinned)
        assert echo(pinned)
        assert kept(pinned) == {before}
        pinned.set("bytes", b"\xff")
        assert kept(pinned) == {before}


def renamed(patch: pytest.MonkeyPatch) -> None:
    """A release of redis-py in which the method that sends has another name."""
    for each in redis_py.connection.AbstractConnection.__mro__:
        if "send_packed_command" in vars(each):
            patch.delattr(each, "send_packed_command")


def without_the_argument(patch: pytest.MonkeyPatch) -> None:
    """A release in which the method that reads says by another argument that a reply is not decoded."""
    kind: Any = redis_py.connection.AbstractConnection
    patch.setattr(kind, "read_response", lambda _self, *, _raw=False: None)


@pytest.mark.parametrize("changed", [renamed, without_the_argument])
def test_a_release_of_redis_py_that_has_changed_is_used_as_it_is(
    client: Any, monkeypatch: pytest.MonkeyPatch, changed: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Which costs time and no call. That this release has not changed, the other tests show."""
    with monkeypatch.context() as patch:
        changed(patch)
        assert is_used_as_it_is(client)


def test_a_command_is_packed_as_by_redis_py() -> None:
    """With hiredis, and without."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    with redis_py.Redis() as client:
        connection: Any = client.connection_pool.make_connection()
        packers = [connection.pack_command, PythonRespSerializer(6000, client.get_encoder().encode).pack]
        for _ in range(500):
            values = [b"\x00\r\n", "\xfcber", 0, -7, 2.5, "", b"", draw.randbytes(draw.randrange(9000)), "x" * 7000]
            command: Any = ("SET", *draw.choices(values, k=draw.randrange(1, 8)))
            assert {b"".join(pack(*command)) for pack in packers} == {packed(command)} == {_packed(command)}


def test_a_pool_that_waits_has_its_like(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many connections, of which the last that was used is used next, and for which one waits as long."""

    def connect() -> Any:
        return redis_py.Redis(connection_pool=like, single_connection_client=True)

    counted: list[Any] = []
    pool = redis_py.BlockingConnectionPool.from_url(redis_url, max_connections=2, timeout=0.1)
    with redis_py.Redis(connection_pool=pool) as client:
        assert client.ping()
        monkeypatch.setattr("redis.connection.record_connection_count", lambda **to: counted.append(to), raising=False)
        like: Any = Server(client).client.connection_pool
        assert not counted, "the user's connections are what they were, in redis-py's metrics too"
        assert (type(like).__name__, like.connection_kwargs) == (type(pool).__name__, pool.connection_kwargs)
        lent = [connect(), connect()]
        begun = now()
        with pytest.raises(redis_py.ConnectionError, match="No connection available"):
            connect()
        assert now() - begun >= pool.timeout
        assert client.ping(), "by one of the user's own"
        last = lent[1].connection
        for each in lent:
            each.close()
        for _ in range(2):
            with connect() as next_one:
                assert next_one.connection is last
    like.disconnect()


def test_what_guards_a_pool_counts_nothing_when_it_is_collected(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py counts the connections of a pool that is collected as gone, in its metrics; these are the user's."""
    counted: list[Any] = []
    assert client.ping()
    ours = guarded_pool(client.connection_pool)
    number = getattr(ours, "_pool_id", "")
    monkeypatch.setattr("redis.connection.record_connection_count", lambda **to: counted.append(to), raising=False)
    del ours
    assert not [each for each in counted if number in each["pool_name"]]


def test_an_idle_connection_that_is_connected_anew_is_no_attempt_without_answer(redis: Any, redis_url: str) -> None:
    """The pool connects it before the command is sent: whoever has lent it before counts nothing any more."""
    name = f"test-{uuid4().hex}"
    with Subclass.from_url(redis_url, client_name=name) as client:
        ours = Server(client).client
        assert echo(ours)
        for number in connections(redis, name):
            redis.client_kill_filter(_id=number)
        before = unanswered.get()
        assert echo(ours)
        assert unanswered.get() == before


# Errors and time-outs


AFTER_A_WHILE: dict[str, Any] = {
    "retry": Retry(ConstantBackoff(3600), 3),
    "retry_on_error": [redis_py.ConnectionError, redis_py.TimeoutError],
    "decode_responses": True,
}


@pytest.mark.parametrize("patience", [{}, {"retry": ONCE}, AFTER_A_WHILE], ids=["as made", "never", "after a while"])
def test_connections_that_the_server_has_closed_cost_nothing(
    server: RedisServer, happened: list[Any], patience: dict[str, Any]
) -> None:
    """No error, and no wait for another try: it would end by the limit of the test. Not in many threads, either."""
    with redis_py.Redis.from_url(server.url) as watching, redis_py.Redis(port=server.port, **patience) as client:
        run = only_one(lambda: "done", key="k", timeout=600, redis=client)
        pinned = PinnedClient(client)
        assert run() == "done"
        lent_before = lent(client)
        before = fill(pinned, _MOST_KEPT + 1)
        assert len(before) == lent(client) - lent_before == 16, "the user has the other, as it is"
        assert all(each._sock is not None for each in client.connection_pool._available_connections)
        watching.client_kill_filter(skipme=True)
        assert run() == "done"
        with ThreadPoolExecutor(_MOST_KEPT) as pool:
            assert all(pool.map(echo, [pinned] * 4 * _MOST_KEPT, timeout=LIMIT))
        assert not before & kept(pinned)
        assert not watching.exists("only_one:k")
    assert not [event for event in happened if isinstance(event, Down)]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_command_that_times_out_is_sent_as_often_as_the_client_says(
    redis: Any, redis_url: str, name: str, prefix: str, retries: int
) -> None:
    """And its connection is dropped: a reply that comes later goes to nobody.

    So are the others that are kept: a firewall that forgets connections forgets all that were idle, and lets new ones
    through.
    """
    patience: dict[str, Any] = {"retry": Retry(NoBackoff(), retries), "retry_on_error": [redis_py.TimeoutError]}
    options = {"socket_timeout": HANGS_FOR, "client_name": name, **patience}
    with Proxy(redis_url) as proxy, redis_py.Redis.from_url(proxy.url, **options) as client:
        pinned = PinnedClient(client)
        before = fill(pinned, 2)
        proxy.forget_commands()
        proxy.lose_reply("INCR", times=10, then="hang")
        with pytest.raises(redis_py.TimeoutError) as caught:
            while_handling(TimeoutError, lambda: pinned.send_raw(("INCR", f"{prefix}number")))
        assert proxy.commands == ["INCR"] * (1 + retries)
        # Not only when what was raised, and with it the call, is forgotten.
        assert pinned.kept == []
        assert eventually(lambda: not before & connections(redis, name))
        del caught
        echo(pinned)
        assert lent(client) == 1
        for _ in range(5):
            echo(pinned)
            echo(client)


# Interruptions


@pytest.mark.interrupts
@pytest.mark.timeout(method="thread")  # as SIGALRM is ours
def test_a_reply_is_never_another_command_s(
    redis_url: str, name: str, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is raised where Python collects garbage pytest would keep, and the connection that it is of.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    rounds = 3000
    with redis_py.Redis.from_url(redis_url, client_name=name, max_connections=2**31) as client, handled(interrupt):
        pinned = PinnedClient(client)
        hits = 0
        for _ in range(rounds):
            # Most of a command's time is that of its way to the server and back.
            hits += is_interrupted_after(moments.uniform(1e-6, 8e-5), lambda: [echo(pinned) for _ in range(3)])
            echo(pinned)
        print(f"{hits} of {rounds} interrupted, {len(connections(redis, name))} connections")
        assert len(pinned.kept) <= 2
    assert hits > rounds / 10
    gc.collect()
    assert eventually(lambda: not connections(redis, name))


def test_a_connection_whose_closing_is_interrupted_is_closed_before_it_is_lent_again(
    pinned: PinnedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the exception has the id of one that was being handled when the connection was lent, and is gone."""
    monkeypatch.setattr(connection_pool, "id", bool, raising=False)
    while_handling(Interruption, lambda: echo(pinned))
    (connection,) = [each.connection for each in pinned.kept]
    close = Mock(wraps=connection.disconnect, side_effect=[Interruption, Interruption, DEFAULT])
    monkeypatch.setattr(connection, "disconnect", close)
    with monkeypatch.context() as once:
        once.setattr(connection, "send_packed_command", interrupt)
        with pytest.raises(Interruption):
            pinned.send_raw(("ECHO", "nobody's"))
    with pytest.raises(Interruption):  # when it is closed to return it to the pool
        echo(pinned)
    echo(pinned)
    assert close.call_count == 3
    monkeypatch.undo()


def test_an_exception_that_is_handled_already_does_not_interrupt_the_return_of_a_dropped_connection(
    pinned: PinnedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a call would count as sent twice, and its token would be released in the background for a whole lease."""
    echo(pinned)
    monkeypatch.setattr(pinned.kept[0].connection, "send_packed_command", interrupt)
    with pytest.raises(Interruption):
        pinned.send_raw(("ECHO", "nobody's"))
    monkeypatch.undo()
    before = unanswered.get()
    while_handling(Interruption, lambda: echo(pinned))
    assert unanswered.get() == before


def test_a_forgotten_connection_is_closed_also_where_its_pool_is_locked(client: Any, pinned: PinnedClient) -> None:
    """By who has the pool's lock themselves: garbage is collected anywhere."""
    forgotten = [_Pinned(pinned.connection_pool)]
    connection = forgotten[0].connection
    client.connection_pool._lock = threading.Lock()  # as in redis-py 5, which lets nobody acquire it twice
    with client.connection_pool._lock:
        forgotten.clear()
    assert connection._sock is None
    echo(pinned)
    assert lent(client) == 1


# For how long they are kept


@pytest.mark.usefixtures("prefix")
def test_connections_neither_grow_nor_stay(redis: Any, redis_url: str, name: str) -> None:
    with redis_py.Redis.from_url(redis_url) as first:
        Lock(first, "a lock")  # redis-py keeps the first client for which a lock is made
    client = redis_py.Redis.from_url(redis_url, client_name=name)
    run = only_one(lambda which: f"done {which}", key="{which}", timeout=600, redis=client)
    assert run(0) == "done 0"
    # The thread that renews looks at a server that is new to it, by a connection of its own.
    assert is_idle()
    before = connections(redis, name)
    for number in range(1000):
        assert run(number) == f"done {number}"
    for number in range(50):
        assert only_one(lambda: "done", key=f"k{number}", timeout=600, redis=client)() == "done"
    assert connections(redis, name) == before
    del client, run
    gc.collect()
    assert eventually(lambda: not connections(redis, name))


# Forks

FORK = """
import os, sys
import redis
from only_one.connections.connection_pool import PinnedClient
from tests.connections.test_connection_pool import echo, fill, kept

client = redis.Redis.from_url(sys.argv[1])
pinned = PinnedClient(client)
ours = fill(pinned, 3)
sockets = [each.connection._sock.fileno() for each in pinned.kept]
inodes = [os.fstat(each).st_ino for each in sockets]

for number in range(2):
    pid = os.fork()
    if not pid:
        assert [os.fstat(each).st_ino for each in sockets] == inodes
        assert not kept(pinned)
        for _ in range(10):
            assert echo(pinned) and echo(client)
        theirs = fill(pinned, 2)
        assert len(theirs) == 2 and not theirs & ours, (theirs, ours)
        if number % 2:
            os._exit(0)  # else what Python does at the end of a process
        sys.exit()
    echo(pinned)
    assert os.waitpid(pid, 0) == (pid, 0)
    echo(pinned)

assert len(kept(pinned) & ours) == 3, (kept(pinned), ours)
client.close()
print("good")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_leaves_the_parent_s_connections_alone(redis_url: str) -> None:
    """What another thread has acquired at the fork is in `tests/faults/test_fork.py`."""
    command = [sys.executable, "-c", FORK, redis_url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode, done.stderr) == ("good\n", 0, "")
