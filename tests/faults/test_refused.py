"""Servers that answer, and refuse."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from only_one import LockUnavailable, carry_on, configure, current_lock, fail, skip
from only_one.connections.server import Server, find_server
from rigs.proxy import Proxy
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, both, decorated, decorated_async
from tests.faults.programs import Running
from tests.renewal import fails_to_renew, is_renewed

TROUBLES = {
    "none": ("PING", "PING"),
    "no memory": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "a replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "a password": ("CONFIG SET requirepass right", "CONFIG SET requirepass "),
    "no connection": ("CONFIG SET maxclients 1", "CONFIG SET maxclients 500"),
    "no right to acquire": ("ACL SETUSER limited reset on >secret ~* +@all -set", "ACL DELUSER limited"),
}
"""What breaks a server, and what mends it."""


@contextmanager
def trouble(client: Any, name: str) -> Iterator[None]:
    """The server has this trouble until the end of the block."""
    breaks, mends = TROUBLES[name]
    client.execute_command(*breaks.split(" "))
    try:
        yield
    finally:
        client.execute_command(*mends.split(" "))


@pytest.fixture
def client(own_server: RedisServer) -> Iterator[Any]:
    """A client that may do everything, at the server where the tests acquire their keys: each mends what it breaks."""
    with redis_py.Redis.from_url(own_server.url) as own, configure(redis=own_server.url):
        yield own


def url_of_user(server: RedisServer, client: Any, *rules: str) -> str:
    """The URL for a user with these rights."""
    client.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", *rules)
    return server.url.replace("redis://", "redis://limited:secret@")


def is_held() -> bool:
    return current_lock().is_held


@both
@pytest.mark.parametrize(
    ("name", "credentials", "named"),
    [
        ("no memory", "", "OutOfMemoryError"),
        ("a replica", "", "ReadOnlyError"),
        ("a password", ":wrong@", "AuthenticationError"),
        ("no right to acquire", "limited:secret@", "NoPermissionError"),
    ],
)
def test_a_server_that_refuses_is_named_and_when_down_decides(
    own_server: RedisServer, client: Any, prefix: str, decorate: Decorate, name: str, credentials: str, named: str
) -> None:
    url = own_server.url.replace("redis://", f"redis://{credentials}")
    with trouble(client, name):
        for options in ({}, {"when_down": fail}):
            with pytest.raises(LockUnavailable, match=named) as caught:
                decorate(is_held, redis=url, **options)()
            assert caught.value.key == f"{prefix}k"
            assert type(caught.value.__cause__).__name__ == named
            assert f"of localhost:{own_server.port}: " in str(caught.value).replace("127.0.0.1", "localhost")
            assert "secret" not in str(caught.value)
        assert decorate(is_held, redis=url, when_down=skip)() is None
        assert decorate(is_held, redis=url, when_down=carry_on)() is False  # it runs, and knows that it holds nothing
        assert decorate(is_held, redis=url, when_down=lambda error: type(error.__cause__).__name__)() == named
    assert decorate(is_held, redis=own_server.url)() is True
    assert not client.exists(f"{prefix}k")


@both
@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        ("no connection", "redis://", "rediss://", "write redis:// in place of rediss://"),
        ("none", "redis://", "rediss://", "write redis:// in place of rediss://"),
        ("a password", "redis://", "redis://:wrong@", "write the server's user and password: redis://"),
        ("a password", "redis://", "redis://", "write the server's user and password: redis://"),
        ("none", "/0", "/99", "write the number of a database"),
    ],
    ids=["answers without TLS", "waits for no TLS", "wrong password", "no password", "no such database"],
)
def test_a_wrong_url_is_told_with_what_to_write(
    own_server: RedisServer, client: Any, decorate: Decorate, name: str, before: str, after: str, words: str
) -> None:
    url = own_server.url.replace(before, after)
    patient = url if "rediss" in url else f"{url}?socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"
    with trouble(client, name), pytest.raises(LockUnavailable, match=words):
        decorate(is_held, redis=patient)()


async def ask_async(server: Server) -> None:
    await (await server.async_client()).send_raw(("PING",))


@pytest.mark.parametrize(
    "ask",
    [lambda server: server.client.send_raw(("PING",)), lambda server: asyncio.run(ask_async(server))],
    ids=["sync", "async"],
)
@pytest.mark.parametrize("option", ["", "ssl_ca_certs=/of/nobody.pem"], ids=["nobody is named", "no such file"])
def test_a_certificate_that_is_not_trusted_is_told_with_what_to_write(
    own_server: RedisServer, ask: Callable[[Server], None], option: str
) -> None:
    """Without a call: its release in the background would connect while the proxy ends; Python loses such a socket."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(Path(__file__).with_name("tls.pem"))
    # A file is looked for when the client has connected, and before it says anything.
    with Proxy(own_server.url, tls=None if option else context) as proxy:
        patient = f"{proxy.url}?{option}&socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"
        server = find_server(patient.replace("redis:", "rediss:"))
        with pytest.raises((redis_py.ConnectionError, OSError)) as raised:
            ask(server)
    assert "ssl_ca_certs=/path/ca.pem" in server.describe(raised.value)


def test_a_user_who_may_acquire_and_not_release_gets_the_result_all_the_same(
    own_server: RedisServer, client: Any, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And a warning names the right: nothing else would tell why the key stays until its time is over."""
    url = url_of_user(own_server, client, "+set", "+get", "+hello")
    assert decorated(is_held, redis=url, timeout=600)() is True
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{prefix}k could not be released")
    assert "'eval' command" in warning
    assert decorated_async(is_held, redis=url, timeout=600, takeover=False)() is None  # the key could not be released
    with pytest.raises(LockUnavailable, match=r"(?i)eval"):  # nor be taken over from ourselves
        decorated_async(is_held, redis=url, timeout=600)()
    url_of_user(own_server, client, "+@all")
    assert eventually(lambda: not client.exists(f"{prefix}k"))
    assert decorated_async(is_held, redis=url, timeout=600)() is True


@pytest.mark.parametrize(("missing", "rights"), [("eval", []), ("pttl", ["+eval"]), ("pexpire", ["+eval", "+pttl"])])
def test_a_user_who_may_take_and_not_renew_is_told_which_right_is_missing(
    own_server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture, missing: str, rights: list[str]
) -> None:
    """By a warning at the first renewal, and once."""

    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    url = url_of_user(own_server, client, "+set", "+get", "+del", *rights)
    with Running(lease=60, redis=url) as run:
        caplog.clear()
        assert fails_to_renew(run.lock)
        assert eventually(warned)
        assert fails_to_renew(run.lock)
        (warning,) = warned()
        assert warning.startswith(f"{run.lock.key} cannot be renewed")
        is_terse = missing != "eval" and client.info("server")["redis_version"].startswith("7.0.")
        # Redis 7.0 does not say which command of a script is refused.
        assert ("executing the script" if is_terse else f"'{missing}' command") in warning
        assert run.lock.is_held
        url_of_user(own_server, client, "+@all")
        assert is_renewed(run.lock)


def test_a_server_that_runs_out_of_memory_during_a_run_goes_on_renewing(client: Any, prefix: str) -> None:
    with Running(lease=60) as run, trouble(client, "no memory"):
        with pytest.raises(redis_py.ResponseError, match="maxmemory"):
            client.set("filler", "x")
        client.pexpire(f"{prefix}k", 30_000)
        assert is_renewed(run.lock)
        assert client.pttl(f"{prefix}k") > 30_000
        run.__exit__()
    assert not client.exists(f"{prefix}k")
    assert run.told == []
