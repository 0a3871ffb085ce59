"""Connections that are kept between commands: nobody sees that they are, whatever becomes of them.

Replies are checked against their commands: each `ECHO` has a text of its own.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import pytest
import redis as redis_py
from redis.backoff import ConstantBackoff, NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry
from redis.sentinel import Sentinel

from only_one import configure, only_one, subscribe
from only_one.connections import connection_pool
from only_one.connections.connection_pool import _MOST_KEPT, PinnedClient, _Pinned, packed
from only_one.connections.server import Server
from only_one.driver import RAW
from only_one.events import Down, Event
from only_one.lock.redis_lock import Lock
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests.proxy import Proxy
from tests.renewal import is_idle

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parents[2]
HANGS_FOR = 2.0
"""Seconds that a client waits for a reply where none comes; all others are there sooner on any machine."""

ALL = redis_py.ConnectionPool().max_connections
"""Connections that a client may open which says nothing of it."""

_texts = count()


def echo(client: Any) -> bool:
    """Send a command whose reply can be no other command's."""
    text = f"text {os.getpid()} {next(_texts)}"
    reply = client.execute_command("ECHO", text, **RAW)
    assert reply == text.encode()
    return True


def fill(direct: PinnedClient, number: int) -> set[int]:
    """Have `direct` keep so many connections, and return the server's ids of them."""
    key = f"fill:{uuid4().hex}"
    with redis_py.Redis(connection_pool=direct.connection_pool) as client, ThreadPoolExecutor(number) as pool:
        waiting = [pool.submit(direct.execute_command, "BLPOP", key, 10 * LIMIT, **RAW) for _ in range(number)]

        def blocked() -> bool:
            found = [each for each in client.client_list() if each["cmd"] == "blpop" and "b" in each["flags"]]
            return len(found) == number

        assert eventually(blocked)
        client.rpush(key, *range(number))
        assert sorted(int(each.result(LIMIT)[1]) for each in waiting) == list(range(number))
    return kept(direct)


def kept(direct: PinnedClient) -> set[int]:
    """The server's ids of the connections that are kept."""

    def id_of(connection: Any) -> int:
        connection.send_command("CLIENT ID")
        number: int = connection.read_response()
        return number

    return {id_of(pinned.connection) for pinned in list(direct.kept)}


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
def direct(client: Any) -> PinnedClient:
    assert PinnedClient.fits(client)
    return PinnedClient(client)


def lent(client: Any) -> int:
    """How many connections its pool has lent."""
    return len(client.connection_pool._in_use_connections)


def connections(watching: Any, name: str) -> set[int]:
    """The server's ids of all connections of a name."""
    return {int(each["id"]) for each in watching.client_list() if each["name"] == name}


# For whom it stands


class Subclass(redis_py.Redis):
    pass


class Connection(redis_py.Connection):
    """A connection of the user's own class, which sees what is sent, but for redis-py's `CLIENT SETINFO`."""

    seen: ClassVar[list[Any]] = []

    def send_command(self, *args: Any, **options: Any) -> None:
        """See redis-py."""
        if args[0] in ("SET", "GET"):
            self.seen.append(args[0])
        untyped: Any = super()
        untyped.send_command(*args, **options)


class Tokens:
    """A provider of credentials that are renewed, as for Entra ID."""

    def get_credentials(self) -> tuple[str]:
        return ("secret",)

    def on_next(self, callback: Callable[[Any], Any]) -> None: ...

    def on_error(self, callback: Callable[[Exception], Any]) -> None: ...


def altered(url: str) -> Any:
    client: Any = redis_py.Redis.from_url(url)
    plain = client.execute_command
    client.seen = []
    client.execute_command = lambda *args, **options: (client.seen.append(args[0]), plain(*args, **options))[1]
    return client


def with_own_connections(url: str) -> Any:
    client: Any = redis_py.Redis(connection_pool=redis_py.ConnectionPool.from_url(url, connection_class=Connection))
    client.seen = Connection.seen
    return client


class Without:
    """What the user has put around a client: it sends commands, and shows no pool."""

    def __init__(self, url: str) -> None:
        self._client = redis_py.Redis.from_url(url)
        self.execute_command, self.register_script = self._client.execute_command, self._client.register_script

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


OTHERS: dict[str, Callable[[str], Any]] = {
    "subclass": Subclass.from_url,
    "few connections": lambda url: redis_py.Redis.from_url(url, max_connections=ALL - 1),
    "one connection": lambda url: redis_py.Redis.from_url(url, single_connection_client=True),
    "altered": altered,
    "own connections": with_own_connections,
    "another encoding": lambda url: redis_py.Redis.from_url(url, encoding="latin-1"),
    "other errors": lambda url: redis_py.Redis.from_url(url, encoding_errors="replace"),
    "no pool": Without,
}
PLAIN: dict[str, Callable[[RedisServer], Any]] = {
    "by URL": lambda server: redis_py.Redis.from_url(server.url),
    "by address": lambda server: redis_py.Redis(port=server.port),
    "unix socket": lambda server: redis_py.Redis.from_url(f"unix://{server.unix_socket}"),
    "decodes": lambda server: redis_py.Redis.from_url(server.url, decode_responses=True),
    "RESP3": lambda server: redis_py.Redis.from_url(server.url, protocol=3),
    "checks": lambda server: redis_py.Redis.from_url(server.url, health_check_interval=1),
    "many connections": lambda server: redis_py.Redis.from_url(server.url, max_connections=ALL),
}


def is_used_as_it_is(client: Any) -> bool:
    """Whether commands go through the client's own class, and its own pool if it has one."""
    used = Server(client).client
    pools = [vars(each.connection_pool) for each in (used, client) if hasattr(each, "connection_pool")]
    return (
        isinstance(used, type(client))
        and not isinstance(used, PinnedClient)
        and all(each is pools[0] for each in pools)
    )


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_clients_that_are_used_as_they_are(redis_url: str, prefix: str, make: Callable[[str], Any]) -> None:
    assert prefix
    with make(redis_url) as client:
        assert is_used_as_it_is(client)
        assert only_one(lambda: "done", key="k", timeout=600, redis=client)() == "done"
        if hasattr(client, "seen"):
            assert client.seen[0] == "SET"


def renamed(patch: pytest.MonkeyPatch) -> None:
    """A release of redis-py in which the method that sends has another name."""
    kind: Any = redis_py.connection.AbstractConnection
    patch.setattr(kind, "send_now", kind.send_packed_command, raising=False)
    patch.setattr(kind, "send_command", lambda self, *args, **_: self.send_now(self.pack_command(*args)))
    for each in kind.__mro__:
        if "send_packed_command" in vars(each):
            patch.delattr(each, "send_packed_command")


def without_the_argument(patch: pytest.MonkeyPatch) -> None:
    """A release in which the method that reads says by another argument that a reply is not decoded."""
    kind: Any = redis_py.connection.AbstractConnection
    read = kind.read_response
    patch.setattr(kind, "read_response", lambda self, *, raw=False: read(self, disable_decoding=raw))
    client: Any = redis_py.Redis
    patch.setattr(client, "parse_response", lambda _, connection, *__, **___: connection.read_response(raw=True))


@pytest.mark.parametrize("changed", [renamed, without_the_argument])
def test_a_release_of_redis_py_that_has_changed_costs_time_and_no_call(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, changed: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """By redis-py's own ways, all is as before. That this release has not changed, those who follow show."""
    assert prefix
    with redis_py.Redis.from_url(redis_url) as client:
        assert isinstance(Server(client).client, PinnedClient)
        with monkeypatch.context() as patch:
            changed(patch)
            client.connection_pool.disconnect()
            assert is_used_as_it_is(client)
            assert only_one(lambda: "done", key="k", timeout=600, redis=client)() == "done"


def test_a_command_is_packed_as_by_redis_py() -> None:
    """With hiredis, and without."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    with redis_py.Redis() as client:
        connection: Any = client.connection_pool.make_connection()
        encode = client.get_encoder().encode
        packers = [connection.pack_command, PythonRespSerializer(6000, encode).pack]
        for _ in range(500):
            values = [b"\x00\r\n", "\xfcber", 0, -7, 2.5, "", b"", draw.randbytes(draw.randrange(9000)), "x" * 7000]
            command: Any = ("SET", *draw.choices(values, k=draw.randrange(1, 8)))
            assert {b"".join(pack(*command)) for pack in packers} == {packed(command)}


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
        with pytest.raises(redis_py.ConnectionError, match="No connection available"):
            connect()
        assert client.ping(), "by one of the user's own"
        last = lent[1].connection
        for each in lent:
            each.close()
        for _ in range(2):
            with connect() as next_one:
                assert next_one.connection is last
    like.disconnect()


def test_clients_elsewhere_that_are_used_as_they_are() -> None:
    kind: Any = Sentinel
    monitored = kind([("127.0.0.1", 1)]).master_for("mymaster")
    assert is_used_as_it_is(monitored)
    renewed = redis_py.Redis(credential_provider=Tokens())  # type: ignore[arg-type]
    assert is_used_as_it_is(renewed)


def test_a_client_that_remembers_replies_is_used_as_it_is() -> None:
    cache = pytest.importorskip("redis.cache")
    with redis_py.Redis(protocol=3, cache_config=cache.CacheConfig()) as client:
        assert is_used_as_it_is(client)


def test_a_client_of_a_cluster_is_used_as_it_is() -> None:
    with redis_server("--cluster-enabled", "yes") as server:
        with redis_py.Redis.from_url(server.url) as node:
            node.execute_command("CLUSTER ADDSLOTS", *range(16384))
            assert eventually(lambda: node.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        with redis_py.RedisCluster.from_url(server.url) as client:
            assert is_used_as_it_is(client)
            assert only_one(lambda: "done", key="k", timeout=600, redis=client)() == "done"


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_clients_for_which_it_stands(server: RedisServer, make: Callable[[RedisServer], Any]) -> None:
    with make(server) as client:
        direct = Server(client).client
        assert isinstance(direct, PinnedClient)
        assert kept(direct) == set()
        assert only_one(lambda: "done", key="k", timeout=600, redis=direct._client)() == "done"
        assert direct.execute_command("ECHO", "text", **RAW) == b"text"
        before = kept(direct)
        assert direct.execute_command("ECHO", "more", **RAW) == b"more"
        assert kept(direct) == before
        assert len(before) == 1


# Connections that the server closes


def by_kill(server: RedisServer, client: Any) -> None:
    for each in client.client_list():
        if each["cmd"] != "client|list":
            client.client_kill_filter(_id=each["id"])
    assert server.process.poll() is None


def by_timeout(server: RedisServer, client: Any) -> None:
    client.config_set("timeout", 1)
    # Whoever looks is not idle, and is the only one that is left.
    assert eventually(lambda: len(client.client_list()) == 1), server.url


def by_restart(server: RedisServer, _client: Any) -> None:
    server.kill()
    server.start()


PATIENCE: dict[str, dict[str, Any]] = {
    "as made": {},
    "never again": {"retry": Retry(NoBackoff(), 0)},
    "again after a while": {
        "retry": Retry(ConstantBackoff(3600), 3),
        "retry_on_error": [redis_py.ConnectionError, redis_py.TimeoutError],
    },
}


@pytest.mark.parametrize("patience", PATIENCE.values(), ids=PATIENCE)
@pytest.mark.parametrize("close", [by_kill, by_timeout, by_restart])
def test_connections_that_the_server_has_closed_cost_nothing(
    server: RedisServer, close: Callable[[RedisServer, Any], None], patience: dict[str, Any]
) -> None:
    """No error, and no wait for another try: it would end by the limit of the test."""
    troubles: list[Event] = []
    unsubscribe = subscribe(lambda event: troubles.append(event) if isinstance(event, Down) else None)
    with redis_py.Redis.from_url(server.url) as watching, redis_py.Redis(port=server.port, **patience) as client:
        run = only_one(lambda: "done", key="k", timeout=600, redis=client)
        direct = PinnedClient(client)
        assert run() == "done"
        before = fill(direct, 4)
        watching.ping()
        close(server, watching)
        assert run() == "done"
        for _ in range(8):
            echo(direct)
        assert not before & kept(direct) or close is by_restart  # which begins to count anew
        assert not watching.exists("only_one:k")
    unsubscribe()
    assert troubles == []


@pytest.mark.usefixtures("prefix")
def test_many_threads_find_their_connections_closed(server: RedisServer) -> None:
    with redis_py.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0)) as client:
        direct = PinnedClient(client)
        for _ in range(5):
            assert len(fill(direct, _MOST_KEPT)) == _MOST_KEPT
            with redis_py.Redis.from_url(server.url) as other:
                by_kill(server, other)
            with ThreadPoolExecutor(_MOST_KEPT) as pool:
                for done in [pool.submit(echo, direct) for _ in range(4 * _MOST_KEPT)]:
                    done.result(LIMIT)


# Errors and time-outs


def test_an_error_of_the_server_keeps_the_connection(redis: Any, direct: PinnedClient, prefix: str) -> None:
    redis.set(f"{prefix}text", "no number")
    before = fill(direct, 1)
    for _ in range(5):
        with pytest.raises(redis_py.ResponseError, match="not an integer"):
            direct.execute_command("INCR", f"{prefix}text", **RAW)
        echo(direct)
        assert kept(direct) == before


def test_a_server_that_is_gone_leaves_no_connection_lent(server: RedisServer) -> None:
    with redis_py.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0)) as client:
        direct = PinnedClient(client)
        echo(direct)
        server.kill()
        with pytest.raises(redis_py.ConnectionError) as caught:
            echo(direct)
        assert lent(client) == 0
        del caught


def test_a_time_out_drops_the_connection(redis: Any, redis_url: str, name: str, prefix: str) -> None:
    """A reply that comes later goes to nobody."""
    options: dict[str, Any] = {"socket_timeout": HANGS_FOR, "retry": Retry(NoBackoff(), 0), "client_name": name}
    with redis_py.Redis.from_url(redis_url, **options) as client:
        direct = PinnedClient(client)
        (before,) = fill(direct, 1) if not direct.kept else kept(direct)
        with pytest.raises(redis_py.TimeoutError) as caught:
            direct.execute_command("BLPOP", f"{prefix}list", 0, **RAW)
        assert direct.kept == []
        # Not only when what was raised, and with it the call, is forgotten.
        assert eventually(lambda: before not in connections(redis, name))
        assert lent(client) == 0
        del caught
        redis.rpush(f"{prefix}list", "late")
        for _ in range(5):
            echo(direct)
            echo(client)
        assert redis.lpop(f"{prefix}list") == b"late"


@pytest.mark.parametrize("retries", [0, 1])
def test_a_time_out_is_tried_again_as_often_as_the_client_says(redis_url: str, retries: int) -> None:
    with Proxy(redis_url) as proxy:
        patience: dict[str, Any] = {"retry": Retry(NoBackoff(), retries), "retry_on_error": [redis_py.TimeoutError]}
        with redis_py.Redis.from_url(proxy.url, socket_timeout=HANGS_FOR, **patience) as client:
            direct = PinnedClient(client)
            echo(direct)
            proxy.forget_commands()
            proxy.lose_reply("INCR", times=10, then="hang")
            with pytest.raises(redis_py.TimeoutError):
                direct.execute_command("INCR", f"timeout:{uuid4().hex}", **RAW)
            assert proxy.commands == ["INCR"] * (1 + retries)
            echo(direct)


# Interruptions


class Interruption(BaseException):
    """Raised by a signal."""


class Alarm:
    """SIGALRM raises while a call is to be interrupted, and never later."""

    def __init__(self) -> None:
        self.hits = 0
        self._is_armed = False
        self._more: list[float] = []

    def __call__(self, *_: object) -> None:
        if self._is_armed:
            if self._more:
                signal.setitimer(signal.ITIMER_REAL, self._more.pop())
            raise Interruption

    def interrupt(self, call: Callable[[], object], first: float, *more: float) -> None:
        """Call, and have it interrupted after a time, and while that is seen to after more."""
        self._more = [*more]
        try:
            try:
                self._is_armed = True
                signal.setitimer(signal.ITIMER_REAL, first)
                call()
            finally:
                self._is_armed = False
        except Interruption:
            self._is_armed = False  # which the second may have come before
            self.hits += 1
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alarm]:
    # What is raised where Python collects garbage is nobody's; pytest would keep it, and the connection that it is of.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    own = Alarm()
    before = signal.signal(signal.SIGALRM, own)
    yield own
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.interrupts
@pytest.mark.timeout(method="thread")  # as SIGALRM is ours
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_a_reply_is_never_another_command_s(
    redis_url: str, name: str, redis: Any, alarm: Alarm, *, again: bool
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    rounds = 3000
    with redis_py.Redis.from_url(redis_url, client_name=name, max_connections=2**31) as client:
        direct = PinnedClient(client)
        for _ in range(rounds):
            # Most of a command's time is that of its way to the server and back.
            first = moments.uniform(1e-6, 8e-5)
            more = [moments.uniform(1e-6, 5e-5)] if again else []
            alarm.interrupt(lambda: [echo(direct) for _ in range(3)], first, *more)
            echo(direct)
        print(f"{alarm.hits} of {rounds} interrupted, {len(connections(redis, name))} connections")
        assert len(direct.kept) <= 2
    assert alarm.hits > rounds / 10
    gc.collect()
    assert eventually(lambda: not connections(redis, name))


def test_a_connection_whose_closing_is_interrupted_is_closed_before_it_is_lent_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the exception has the id of one that was being handled when the connection was lent, and is gone."""
    monkeypatch.setattr(connection_pool, "id", lambda _: 1, raising=False)
    closed: list[bool] = []

    def interrupted(*_: Any, **__: Any) -> Any:
        raise Interruption

    with redis_py.Redis.from_url(redis_url) as client:
        direct = PinnedClient(client)
        echo(direct)
        (pinned,) = direct.kept
        disconnect = pinned.connection.disconnect

        def close(*args: Any) -> None:
            closed.append(bool(closed))
            if len(closed) == 1:
                raise Interruption
            disconnect(*args)

        monkeypatch.setattr(pinned.connection, "disconnect", close)
        monkeypatch.setattr(pinned.connection, "send_packed_command", interrupted)
        with pytest.raises(Interruption):
            direct.execute_command("ECHO", "nobody's", **RAW)
        assert closed == [False, True]
        monkeypatch.undo()
        echo(direct)


class TwoInterruptions:
    """Raises when redis-py has sent a command and is about to read the reply, and at a line of ours after that."""

    def __init__(self, number: int) -> None:
        self.times = 0
        self._left = number

    def read_response(self, *_: Any, **__: Any) -> Any:
        """The first, which is none of the trace's, as Python ends a trace that raises."""
        self.times = 1
        raise Interruption

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if Path(frame.f_code.co_filename).name != "connection_pool.py":
            return None
        if self.times and event == "line":
            self._left -= 1
            if not self._left:
                self.times = 2
                raise Interruption
        return self


@pytest.mark.interrupts
@pytest.mark.usefixtures("alarm")  # for what is raised where Python collects garbage
def test_a_reply_is_never_another_command_s_after_two_interruptions(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes while the first is seen to."""
    with Proxy(redis_url) as proxy, redis_py.Redis.from_url(proxy.url) as client:
        direct = PinnedClient(client)
        for number in range(1, 30):
            echo(direct)
            held_up = proxy.hold_up("ECHO")
            trace, before = TwoInterruptions(number), sys.gettrace()
            with monkeypatch.context() as patch, suppress(Interruption):
                patch.setattr(redis_py.Connection, "read_response", trace.read_response)
                try:
                    sys.settrace(trace)
                    direct.execute_command("ECHO", "nobody's", **RAW)
                finally:
                    sys.settrace(before)
            assert held_up.met.wait(LIMIT)
            gc.collect()  # what the exceptions have kept
            letting_go = threading.Timer(0.05, held_up.let_go)
            letting_go.start()
            echo(client)
            echo(direct)
            letting_go.join()
            if trace.times < 2:
                break
    assert trace.times == 1
    assert number > 3


@pytest.mark.interrupts
@pytest.mark.timeout(method="thread")  # as SIGALRM is ours
def test_a_handler_that_sends_a_command_of_its_own(direct: PinnedClient) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    inner: list[bool] = []
    # So that it has a connection: up to redis-py 5 a pool's lock is held for ever by a handler in its thread.
    echo(direct)
    before = signal.signal(signal.SIGALRM, lambda *_: inner.append(echo(direct)))
    try:
        for number in range(500):
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 1e-4))
            while len(inner) == number:
                echo(direct)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(inner) == 500
    assert 2 <= len(direct.kept) <= 3


# Threads


def test_no_more_than_16_connections_are_kept(client: Any, direct: PinnedClient) -> None:
    pinned = [_Pinned(direct.connection_pool) for _ in range(17)]
    for each in pinned:
        direct._keep(each)
    assert direct.kept == pinned[:16]
    assert lent(client) == 16  # and the user has the other, as it is
    assert client.connection_pool._available_connections[0]._sock is not None
    direct.kept.clear()


def test_more_threads_than_connections_are_kept(redis: Any, redis_url: str, name: str) -> None:
    threads, most = 3 * _MOST_KEPT, min(ALL, 100)
    with redis_py.Redis.from_url(redis_url, client_name=name) as client:
        direct = PinnedClient(client)
        assert len(fill(direct, threads)) <= _MOST_KEPT + 2  # some may come at the same time
        with ThreadPoolExecutor(threads) as pool:
            work = [pool.submit(lambda: [echo(direct) for _ in range(100)]) for _ in range(threads)]
            while not all(each.done() for each in work):
                echo(client)
            for each in work:
                each.result()
        assert len(connections(redis, name)) <= threads + 1
        # The user has the others.
        pool_of_all = client.connection_pool
        rest = most - len(direct.kept)
        singles = [redis_py.Redis(connection_pool=pool_of_all, single_connection_client=True) for _ in range(rest)]
        for single in singles:
            echo(single)
        echo(direct)
        for single in singles:
            single.close()


@pytest.mark.parametrize("how", ["close", "disconnect", "reset"])
def test_a_user_who_closes_their_client(redis: Any, name: str, client: Any, direct: PinnedClient, how: str) -> None:
    before = fill(direct, 3)
    assert before <= connections(redis, name)
    if how == "close":
        client.close()
    elif how == "disconnect":
        client.connection_pool.disconnect()
    else:
        client.connection_pool.reset()
    if how != "reset":  # which forgets them, and is for children
        assert eventually(lambda: not connections(redis, name))
    for _ in range(3):
        assert len(fill(direct, 3)) == 3
        echo(client)
    client.close()
    assert how == "reset" or eventually(lambda: not connections(redis, name))


def test_a_user_who_closes_their_client_at_any_moment(redis_url: str) -> None:
    """No command gets another's reply; one that was sent just then may fail, as with redis-py alone."""
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    enough = threading.Event()
    done: list[bool] = []

    def work(direct: PinnedClient) -> None:
        while not enough.is_set():
            text = f"text {next(_texts)}"
            try:
                assert direct.execute_command("ECHO", text, **RAW) == text.encode()
            except AssertionError:
                raise
            except Exception:  # noqa: BLE001 - redis-py raises all kinds, when what it reads from is taken away
                done.append(False)
            else:
                done.append(True)

    with redis_py.Redis.from_url(redis_url, socket_timeout=HANGS_FOR) as client, ThreadPoolExecutor(4) as pool:
        direct = PinnedClient(client)
        works = [pool.submit(work, direct) for _ in range(4)]
        try:
            closed = 0
            while closed < 200 or sum(done) < 200:
                time.sleep(moments.uniform(0, 2e-3))
                client.close()
                closed += 1
        finally:
            enough.set()
        for each in works:
            each.result(LIMIT)
        echo(direct)
    print(f"closed {closed} times, {done.count(False)} of {len(done)} failed")


# Connections are not lost


@pytest.mark.usefixtures("prefix")
def test_connections_neither_grow_nor_stay(redis: Any, redis_url: str, name: str) -> None:
    with redis_py.Redis.from_url(redis_url) as first:
        Lock(first, "a lock")  # redis-py keeps the first client for which a lock is made
    client = redis_py.Redis.from_url(redis_url, client_name=name)
    run = only_one(lambda: "done", key="k", timeout=600, redis=client)
    assert run() == "done"
    # The thread that renews looks at a server that is new to it, by a connection of its own.
    assert is_idle()
    before = connections(redis, name)
    for _ in range(1000):
        assert run() == "done"
    assert connections(redis, name) == before
    with configure(redis=client):
        others = [only_one(lambda: "done", key=f"k{number}", timeout=600) for number in range(50)]
        assert [other() for other in others] == ["done"] * 50
    assert connections(redis, name) == before
    del client, run, others
    gc.collect()
    assert eventually(lambda: not connections(redis, name))


# Forks

HEAD = """
import os, sys, threading, time
import redis
from only_one.connections.connection_pool import PinnedClient
from only_one.driver import RAW
from tests.connections.test_connection_pool import echo, fill, kept

url = sys.argv[1]
"""

FORK = """
client = redis.Redis.from_url(url)
direct = PinnedClient(client)
ours = fill(direct, 3)
sockets = [pinned.connection._sock.fileno() for pinned in direct.kept]
inodes = [os.fstat(each).st_ino for each in sockets]
alone = sys.argv[2] == "alone"
enough, counts = threading.Event(), []

def work():
    number = 0
    while not enough.is_set():
        echo(direct)
        number += 1
    counts.append(number)

threads = [] if alone else [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()

def child(number):
    if alone:  # else they are those of threads that the child does not have
        assert [os.fstat(each).st_ino for each in sockets] == inodes
    assert not kept(direct)
    for _ in range(10):
        echo(direct)
        echo(client)
    theirs = fill(direct, 2)
    assert len(theirs) == 2 and not theirs & ours, (theirs, ours)
    if number % 2:
        os._exit(0)  # else what Python does at the end of a process

for number in range(10):
    pid = os.fork()
    if not pid:
        try:
            child(number)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        enough.set()
        sys.exit()
    until = time.monotonic() + 600
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        echo(direct)
    assert ended == (pid, 0), ended

enough.set()
for thread in threads:
    thread.join()
assert len(counts) == len(threads) and all(counts), counts
assert kept(direct) >= ours if alone else len(kept(direct) & ours) == 3, (kept(direct), ours)
client.close()
print("good")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("others", ["alone", "threads"])
def test_a_forked_child_leaves_the_parent_s_connections_alone(redis_url: str, others: str) -> None:
    # Forking beside threads, which is done on purpose, warns.
    command = [sys.executable, "-W", "ignore", "-c", HEAD + FORK, redis_url, others]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr
    assert not done.stderr


# gevent

GREENLETS = """
import gevent
from only_one import configure, only_one
seed = int(sys.argv[2])
import random
moments = random.Random(seed)
client = redis.Redis.from_url(url)
direct = PinnedClient(client)
stopped = 0

def work():
    global stopped
    for _ in range(100):
        try:
            with gevent.Timeout(moments.uniform(0, 0.02)):
                echo(direct)
        except gevent.Timeout:
            stopped += 1
        gevent.sleep(0)

gevent.joinall([gevent.spawn(work) for _ in range(50)], raise_error=True)
echo(direct)
echo(client)
killed = [gevent.spawn(direct.execute_command, "BLPOP", "nothing", 0, **RAW) for _ in range(10)]
gevent.sleep(0.05)
gevent.killall(killed)
echo(direct)
configure(redis=client, prefix=sys.argv[3])
runs = [gevent.spawn(only_one(lambda: "done", key=str(number), timeout=600)) for number in range(30)]
gevent.joinall(runs, raise_error=True)
print(len(direct.kept) <= 18, stopped > 50, {run.value for run in runs})
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_gevent(redis_url: str, prefix: str) -> None:
    pytest.importorskip("gevent")
    seed = random.randrange(2**32)
    print("seed", seed)
    program = f"from gevent import monkey\nmonkey.patch_all()\n{HEAD}{GREENLETS}"
    command = [sys.executable, "-W", "ignore", "-c", program, redis_url, str(seed), prefix]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True True {'done'}\n", 0), done.stderr
