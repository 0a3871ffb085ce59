"""What holds where nothing is said at the decorator: the most specific wins."""

# ruff: noqa: ARG001, ARG005 - fixtures that configure something are asked for by name, and so are arguments by keys

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from redis import Redis

from only_one import AlreadyRunning, ConfigurationError, configure, current_lock, fail, only_one, skip
from only_one.testing import RedisServer, redis_server

KeyIsBusy = Callable[..., AbstractContextManager[None]]
CLOSED = "redis://127.0.0.1:1/0"
cover: Any = only_one


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RedisServer]]:
    """Three servers, to see on which of them a key is taken."""
    with redis_server() as first, redis_server() as second, redis_server() as third:
        yield [first, second, third]


def key_of(**options: Any) -> str:
    """The key of a run."""
    return str(cover(lambda: current_lock().key, key="k", **options)())


def place(servers: list[RedisServer], **options: Any) -> Any:
    """On which of the servers a run takes its key."""

    def work() -> list[int]:
        found = []
        for number, server in enumerate(servers):
            with Redis.from_url(server.url) as client:
                if client.exists(current_lock().key):
                    found.append(number)
        return found

    async def work_async() -> list[int]:
        return work()

    found = cover(work, key="k", **options)()
    assert asyncio.run(cover(work_async, key="k", **options)()) == found
    return found


# --- the server --------------------------------------------------------------------------------------------------


def test_the_server_is_the_decorators_then_configured_then_the_environments(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (server.url for server in servers)
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", third)
    assert place(servers) == [2]
    with configure(redis=second):
        assert place(servers) == [1]
        assert place(servers, redis=first) == [0]
        assert place(servers, redis=None) == [1]
    assert place(servers) == [2]
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", first)
    assert place(servers) == [0]


def test_the_last_resort_is_localhost(prefix: str) -> None:
    program = f"""
import logging
from only_one import configure, only_one, skip
logging.basicConfig(level=logging.INFO)
configure(prefix={prefix!r})
only_one("k", when_down=skip)(lambda: None)()
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONLY_ONE_")}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=30, check=True)
    assert "redis://localhost:6379/0" in output.stderr


def test_a_server_is_given_as_client_url_or_callable(servers: list[RedisServer]) -> None:
    server = servers[1]
    with (
        Redis.from_url(server.url) as client,
        Redis.from_url(server.url, decode_responses=True) as decoding,
        Redis.from_url(server.url, protocol=3) as newer,
        Redis.from_url(server.url, protocol=2) as older,
        Redis(unix_socket_path=str(server.unix_socket)) as local,
    ):
        clients = [client, decoding, newer, older, local]
        urls = [server.url, f"unix://{server.unix_socket}", f"{server.url}?decode_responses=yes&protocol=3"]
        callables = [lambda: client, lambda: decoding]
        for source in [*clients, *urls, *callables]:
            assert place(servers, redis=source) == [1]
            with configure(redis=source):
                assert place(servers) == [1]


@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3}, {"protocol": 2}], ids=repr)
def test_the_holder_can_be_read_by_every_client(servers: list[RedisServer], busy: KeyIsBusy, options: Any) -> None:
    async def work() -> None: ...

    with Redis.from_url(servers[0].url, **options) as client, configure(redis=client), busy("k"):
        covered = only_one("k", when_busy=fail)(work)
        for call in (only_one("k", when_busy=fail)(lambda: None), lambda: asyncio.run(covered())):
            with pytest.raises(AlreadyRunning) as raised:
                call()
            assert raised.value.holder is not None
            assert raised.value.holder.pid == os.getpid()


def test_a_callable_is_called_once_and_not_when_decorating(servers: list[RedisServer]) -> None:
    calls: list[int] = []

    def source() -> object:
        calls.append(threading.get_ident())
        return client

    with Redis.from_url(servers[0].url) as client:
        covered = only_one("{a}", redis=source)(lambda a: current_lock().is_held)
        assert calls == []
        assert covered(1)
        assert covered(2)
        assert len(calls) == 1


def test_nothing_is_asked_of_a_server_when_decorating_or_configuring() -> None:
    with socket.create_server(("127.0.0.1", 0)) as line:
        line.settimeout(0)
        with configure(redis=f"redis://127.0.0.1:{line.getsockname()[1]}/0"):
            only_one("k")(lambda: None)
            with pytest.raises(BlockingIOError):
                line.accept()


def test_settings_hold_for_what_was_decorated_before(servers: list[RedisServer], prefix: str) -> None:
    covered = only_one("k")(lambda: current_lock().key)
    with configure(redis=servers[0].url):
        assert covered() == f"{prefix}k"
        with configure(prefix=f"{prefix}other:"):
            assert covered() == f"{prefix}other:k"
        assert covered() == f"{prefix}k"


def test_settings_hold_in_every_thread(redis: Redis, prefix: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread is older than the settings
        with configure(prefix=f"{prefix}later:"):
            assert pool.submit(key_of).result() == f"{prefix}later:k"


# --- what is logged of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@127.0.0.1:1/0",
        "redis://user:hunter2@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=hunter2",
        "redis://127.0.0.1:1/0?username=u&password=hunter2&protocol=3",
        "redis://:p%40hunter2@127.0.0.1:1/0",
        "rediss://user:hunter2@127.0.0.1:1/0",
        "unix://user:hunter2@/nowhere/socket",
        "unix:///nowhere/socket?password=hunter2",
    ],
)
@pytest.mark.parametrize("where", ["decorator", "configure", "environment"])
def test_the_server_is_logged_once_without_its_password(
    url: str, where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url.replace("hunter2", f"hunter2{where}")  # so that it is a new one
    options: dict[str, Any] = {"when_down": lambda error: error}
    if where == "decorator":
        options["redis"] = url
    if where == "environment":
        monkeypatch.setenv("ONLY_ONE_REDIS_URL", url)
    with configure(redis=url) if where == "configure" else configure(), caplog.at_level(logging.DEBUG):
        covered = only_one("k", **options)(lambda: None)
        error: Any = covered()
        covered()
    told = [record for record in caplog.records if record.levelno == logging.INFO and record.name == "only_one"]
    assert len(told) == 1
    assert "127.0.0.1" in told[0].getMessage() or "/nowhere/socket" in told[0].getMessage()
    assert "hunter2" not in caplog.text
    assert "hunter2" not in "".join(str(vars(record)) for record in caplog.records)
    assert "hunter2" not in f"{error} {error!r}"


def test_a_client_is_logged_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server("--requirepass", "hunter2") as server, caplog.at_level(logging.DEBUG):
        with Redis.from_url(server.url, password="hunter2") as client:  # noqa: S106
            assert place([], redis=client) == []
        assert place([], redis=server.url.replace("//", "//:hunter2@")) == []
    assert f":{server.port}" in caplog.text
    assert "hunter2" not in caplog.text


# --- times -------------------------------------------------------------------------------------------------------


def times(**options: Any) -> Any:
    """For how long a run takes its key, and how long it may hold it at the longest; in seconds."""

    def work() -> tuple[float, float | None]:
        lock = current_lock()
        assert lock.holder is not None
        longest = lock.holder.deadline and round(lock.holder.deadline - lock.holder.since, 1)
        return round(lock.expires_in), longest

    return cover(work, key="k", **options)()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (50, 100)),
        ({"timeout": 20}, (20, 20)),
        ({"timeout": timedelta(seconds=20)}, (20, 20)),
        ({"lease": 5}, (5, None)),
        ({"lease": timedelta(seconds=5)}, (5, None)),
        ({"timeout": 20, "lease": 5}, (5, 20)),
        ({"timeout": 20, "lease": 20}, (20, 20)),
        ({"timeout": None}, (30, None)),
        ({"lease": None}, (30, None)),
        ({"timeout": 20, "lease": None}, (20, 20)),
        ({"timeout": None, "lease": 5}, (5, None)),
    ],
    ids=repr,
)
def test_timeout_and_lease_are_taken_together_from_one_level(redis: Redis, options: Any, expected: object) -> None:
    with configure(timeout=100, lease=50):
        assert times(**options) == expected


def test_times_by_default_and_as_configured(redis: Redis) -> None:
    assert times() == (30, None)
    with configure(timeout=100):
        assert times() == (100, 100)
        with configure(timeout=None):
            assert times() == (30, None)
    with configure(lease=20):
        assert times() == (20, None)
        with configure(timeout=timedelta(minutes=1)):
            assert times() == (20, 60)
    assert times() == (30, None)


def test_what_is_inherited_never_makes_a_decorator_invalid(redis: Redis) -> None:
    long_lease, short_timeout = only_one("k", lease=40), only_one("k", timeout=2)
    with configure(timeout=10, lease=5):
        assert long_lease(lambda: round(current_lock().expires_in))() == 40
        assert times(lease=60) == (60, None)
        assert short_timeout(lambda: round(current_lock().expires_in))() == 2


def test_what_redis_is_told_is_what_the_run_is_told(redis: Redis) -> None:
    def work() -> bool:
        lock = current_lock()
        return -0.002 <= redis.pttl(lock.key) / 1000 - lock.expires_in < 0.1

    assert only_one("k", 60)(work)()
    assert only_one("k")(work)()


# --- policies ----------------------------------------------------------------------------------------------------


def test_when_busy_is_the_decorators_then_configured_then_skip(redis: Redis, busy: KeyIsBusy) -> None:
    @only_one("k")
    def covered() -> str:
        return "ran"

    with busy("k"):
        assert covered() is None
        with configure(when_busy=fail):
            with pytest.raises(AlreadyRunning):
                covered()
            with configure(when_busy=lambda _: "configured"):
                assert covered() == "configured"
                assert only_one("k", when_busy=lambda _: "decorator")(lambda: "ran")() == "decorator"
                assert only_one("k", when_busy=skip)(lambda: "ran")() is None
            with pytest.raises(AlreadyRunning):
                covered()
        assert covered() is None


# --- switched off ------------------------------------------------------------------------------------------------


def switched_off(**options: Any) -> bool:
    """Whether calls from inside their own run begin."""

    @cover("k", **options)  # type: ignore[untyped-decorator]
    def work(deeper: int) -> bool:
        lock = current_lock()
        lock.ensure_held()
        return bool(lock.is_held and (not deeper or work(deeper - 1)))

    @cover("k", **options)  # type: ignore[untyped-decorator]
    async def work_async(deeper: int) -> bool:
        lock = current_lock()
        lock.ensure_held()
        return bool(lock.is_held and (not deeper or await work_async(deeper - 1)))

    off = bool(work(2))
    assert bool(asyncio.run(work_async(2))) == off
    return off


@pytest.mark.parametrize("how", ["configured", "environment"])
def test_no_server_is_asked_when_switched_off(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "environment":
        monkeypatch.setenv("ONLY_ONE_ACTIVE", "0")
    with socket.create_server(("127.0.0.1", 0)) as line:
        line.settimeout(0)
        url = f"redis://127.0.0.1:{line.getsockname()[1]}/0"
        with configure(active=False) if how == "configured" else configure():
            assert switched_off(redis=url)
            with configure(redis=url):
                assert switched_off()
        with pytest.raises(BlockingIOError):
            line.accept()


def test_active_false_switches_off_and_puts_back(redis: Redis, busy: KeyIsBusy) -> None:
    with configure(active=False):
        assert switched_off()
        with configure(active=True):
            assert not switched_off()
        assert switched_off(timeout=3, when_busy=fail)
    with busy("k"):
        assert only_one("k")(lambda: "ran")() is None
        with configure(active=False):
            assert only_one("k")(lambda: "ran")() == "ran"


@pytest.mark.parametrize(("value", "off"), [("0", True), ("1", False)])
def test_the_environment_switches_off(redis: Redis, monkeypatch: pytest.MonkeyPatch, value: str, *, off: bool) -> None:
    monkeypatch.setenv("ONLY_ONE_ACTIVE", value)
    assert switched_off() is off
    with configure(active=True):
        assert not switched_off()
    with configure(active=False):
        assert switched_off()
    assert switched_off() is off


def test_the_environment_switches_off_a_whole_program() -> None:
    program = f"""
from only_one import only_one
print(only_one("k", redis={CLOSED!r})(lambda: "ran")())
"""
    environment = {**os.environ, "ONLY_ONE_ACTIVE": "0"}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=30, check=True)
    assert output.stdout == "ran\n"


def test_a_bad_decorator_is_refused_though_switched_off() -> None:
    with configure(active=False), pytest.raises(ConfigurationError):
        only_one("k", timeout=0)


def test_a_run_that_fails_fails_though_switched_off() -> None:
    def work() -> None:
        raise LookupError

    with configure(active=False), pytest.raises(LookupError):
        only_one("k")(work)()


# --- configure itself --------------------------------------------------------------------------------------------


def test_configure_holds_on_and_a_block_puts_back_what_was(redis: Redis, prefix: str) -> None:
    with configure():
        configure(prefix=f"{prefix}a:")
        configure(timeout=100)
        assert key_of() == f"{prefix}a:k"
        assert times() == (100, 100)
        with configure(prefix=f"{prefix}b:"):
            assert key_of() == f"{prefix}b:k"
            assert times() == (100, 100)
        assert key_of() == f"{prefix}a:k"
    assert key_of() == f"{prefix}k"
    assert times() == (30, None)


def test_a_block_that_fails_puts_back_too(redis: Redis, prefix: str) -> None:
    with pytest.raises(LookupError), configure(prefix=f"{prefix}a:"):
        raise LookupError
    assert key_of() == f"{prefix}k"


@pytest.mark.parametrize(
    "bad", [{"timeout": 0}, {"lease": 200}, {"when_busy": "skip"}, {"active": "no"}, {"redis": "localhost"}], ids=repr
)
def test_a_bad_value_changes_nothing(redis: Redis, prefix: str, bad: Any) -> None:
    with configure(timeout=100):
        with pytest.raises(ConfigurationError):
            configure(**{"prefix": f"{prefix}a:", "timeout": 50, **bad})
        assert key_of() == f"{prefix}k"
        assert times() == (100, 100)


def test_two_calls_of_configure_must_go_together(redis: Redis) -> None:
    with configure(timeout=100):
        with pytest.raises(ConfigurationError, match="lease=200"):
            configure(lease=200)
        assert times() == (100, 100)
