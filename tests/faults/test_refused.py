"""Servers that answer, and refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis as redis_py

from only_one import LockUnavailable, carry_on, configure, current_lock, fail, only_one, skip
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Running
from tests.renewal import fails_to_renew, is_renewed, later


@contextmanager
def out_of_memory(server: RedisServer, client: Any) -> Iterator[str]:
    """No memory is left, and nothing may be evicted."""
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    yield server.url
    client.config_set("maxmemory", 0)


@contextmanager
def read_only(server: RedisServer, client: Any) -> Iterator[str]:
    """It is the replica of another."""
    client.replicaof("127.0.0.1", 1)
    yield server.url
    client.replicaof("NO", "ONE")


@contextmanager
def wrong_password(server: RedisServer, client: Any) -> Iterator[str]:
    """It wants another password than the URL has."""
    client.config_set("requirepass", "right")
    yield server.url.replace("redis://", "redis://:wrong@")
    client.config_set("requirepass", "")


@contextmanager
def not_permitted(server: RedisServer, client: Any) -> Iterator[str]:
    """Our user may not call what takes a key."""
    client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@all", "-set")
    yield server.url.replace("redis://", "redis://reader:secret@")
    client.execute_command("ACL", "DELUSER", "reader")


@pytest.fixture(scope="module")
def their_server() -> Iterator[RedisServer]:
    """One for all tests: each mends what it has broken."""
    with redis_server() as own:
        yield own


@pytest.fixture
def server(their_server: RedisServer, prefix: str) -> Iterator[RedisServer]:
    assert prefix
    with configure(redis=their_server.url):
        yield their_server


Trouble = Callable[[RedisServer, Any], Any]

troubles = pytest.mark.parametrize(
    ("trouble", "named"),
    [
        (out_of_memory, "OutOfMemoryError"),
        (read_only, "ReadOnlyError"),
        (wrong_password, "AuthenticationError"),
        (not_permitted, "NoPermissionError"),
    ],
)


def call(**options: Any) -> Any:
    """What a call gives."""
    return only_one(lambda: current_lock().is_held, key="k", **options)()


def call_async(**options: Any) -> Any:
    """The same in an event loop."""

    @only_one("k", **options)
    async def work() -> bool:
        return current_lock().is_held

    return asyncio.run(work())


both = pytest.mark.parametrize("calls", [call, call_async], ids=["sync", "async"])


@both
@troubles
def test_a_server_that_refuses_is_named_and_when_down_decides(
    server: RedisServer, prefix: str, calls: Callable[..., Any], trouble: Trouble, named: str
) -> None:
    with redis_py.Redis.from_url(server.url) as client:
        with trouble(server, client) as url:
            with pytest.raises(LockUnavailable, match=named) as caught:
                calls(redis=url)
            assert caught.value.key == f"{prefix}k"
            assert type(caught.value.__cause__).__name__ == named
            assert "secret" not in str(caught.value)
            with pytest.raises(LockUnavailable):
                calls(redis=url, when_down=fail)
            assert calls(redis=url, when_down=skip) is None
            assert calls(redis=url, when_down=carry_on) is False  # it runs, and knows that it holds nothing
            seen: list[LockUnavailable] = []

            def note(error: LockUnavailable) -> str:
                seen.append(error)
                return "instead"

            assert calls(redis=url, when_down=note) == "instead"
            assert [type(error.__cause__).__name__ for error in seen] == [named]
        assert calls(redis=server.url) is True
        assert not client.exists(f"{prefix}k")


@both
@pytest.mark.parametrize(
    ("before", "after", "setting", "words"),
    [
        ("redis://", "rediss://", ("maxclients", 1), "write redis:// in place of rediss://"),
        ("redis://", "rediss://", None, "write redis:// in place of rediss://"),
        ("redis://", "redis://:wrong@", ("requirepass", "right"), "write the server's user and password: redis://"),
        ("redis://", "redis://", ("requirepass", "right"), "write the server's user and password: redis://"),
        ("/0", "/99", None, "write the number of a database"),
    ],
    ids=["answers without TLS", "waits for no TLS", "wrong password", "no password", "no such database"],
)
def test_a_wrong_url_is_told_with_what_to_write(
    server: RedisServer,
    calls: Callable[..., Any],
    before: str,
    after: str,
    setting: tuple[str, object] | None,
    words: str,
) -> None:
    url = server.url.replace(before, after)
    with redis_py.Redis.from_url(server.url) as client:
        usual = client.config_get(setting[0]) if setting else {}
        if setting:
            client.config_set(*setting)
        patient = url if "rediss" in url else f"{url}?socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"
        try:
            with pytest.raises(LockUnavailable, match=words):
                calls(redis=patient)
        finally:
            for name, value in usual.items():
                client.config_set(name, value)


def test_a_user_who_may_take_and_not_release_gets_the_result_all_the_same(server: RedisServer, prefix: str) -> None:
    with redis_py.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "taker", "on", ">secret", "~*", "-@all", "+set", "+get", "+hello")
        url = server.url.replace("redis://", "redis://taker:secret@")
        assert call(redis=url, timeout=600) is True
        assert call_async(redis=url, timeout=600, takeover=False) is None  # the key could not be given back
        with pytest.raises(LockUnavailable, match=r"(?i)eval"):  # nor be taken over from ourselves
            call_async(redis=url, timeout=600)
        client.execute_command("ACL", "SETUSER", "taker", "+@all")
        assert eventually(lambda: not client.exists(f"{prefix}k"))
        assert call_async(redis=url, timeout=600) is True


def test_a_user_who_may_take_and_not_renew_is_told_which_right_is_missing(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """By a warning at the first renewal, and once."""
    rules = ["~*", "-@all", "+set", "+get", "+del"]

    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    with redis_py.Redis.from_url(server.url) as client:
        for missing in ("eval", "pexpire"):
            client.execute_command("ACL", "SETUSER", "taker", "reset", "on", ">secret", *rules)
            url = server.url.replace("redis://", "redis://taker:secret@")
            with Running(missing, lease=60, redis=url) as run:
                caplog.clear()
                assert fails_to_renew(run.lock)
                assert eventually(warned)
                assert fails_to_renew(run.lock)
                (warning,) = warned()
                assert warning.startswith(f"{run.lock.key} cannot be renewed")
                assert f"'{missing}' command" in warning
                assert run.lock.is_held
                client.execute_command("ACL", "SETUSER", "taker", "+eval", "+pexpire")
                assert is_renewed(run.lock)
            rules.append(f"+{missing}")


def test_a_server_that_runs_out_of_memory_during_a_run_goes_on_renewing(server: RedisServer, prefix: str) -> None:
    told: list[object] = []
    with redis_py.Redis.from_url(server.url) as client:
        with Running(lease=60, when_lost=told.append) as run, out_of_memory(server, client):
            with pytest.raises(redis_py.ResponseError, match="maxmemory"):
                client.set("filler", "x")
            client.pexpire(f"{prefix}k", 30_000)
            assert is_renewed(run.lock)
            assert client.pttl(f"{prefix}k") > 30_000
            run.__exit__()
        assert run.result == "done"
        assert not client.exists(f"{prefix}k")
    assert told == []


def test_a_server_that_becomes_a_replica_during_a_run(server: RedisServer) -> None:
    """As in a failover: a lease that can be renewed again in time is kept, and another is lost when it is over."""
    told: list[str] = []
    with (
        redis_py.Redis.from_url(server.url) as client,
        Running(lease=60, when_lost=lambda lost: told.append(lost.reason)) as run,
    ):
        with read_only(server, client):
            assert fails_to_renew(run.lock)
        assert is_renewed(run.lock)
        assert told == []
        with read_only(server, client), later(60):
            assert eventually(lambda: told)
    assert run.result == "done"
    assert told == ["expired"]
