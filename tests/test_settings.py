"""What holds where the decorator says nothing: by `configure`, the environment, the task's app, and the defaults."""

# ruff: noqa: ARG001, ARG005 - fixtures that configure something are asked for by name, and so are arguments by keys

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import pytest
from celery import Celery, _state, shared_task
from redis import Redis

from only_one import (
    AlreadyRunning,
    ConfigurationError,
    configure,
    current_lock,
    fail,
    only_one,
    retry,
    settings,
    skip,
)
from only_one.celery import app_settings
from only_one.celery.app_settings import current_app, server_of
from only_one.connections import server as servers_of_product
from only_one.errors import OnlyOneError
from only_one.holder import Holder
from only_one.inspection import held
from rigs.servers import RedisServer, redis_server

KeyIsBusy = Callable[..., AbstractContextManager[None]]
CLOSED = "redis://127.0.0.1:1/0"
NOWHERE = {"broker_url": "memory://", "result_backend": "cache+memory://"}
cover: Any = only_one


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RedisServer]]:
    """Three servers, to see on which of them a key is taken."""
    with redis_server() as first, redis_server() as second, redis_server() as third:
        yield [first, second, third]


@pytest.fixture
def unconfigured(prefix: str) -> Iterator[None]:
    """Nothing is configured at all, not even the prefix of each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_overrides", [])
        patch.setattr(settings, "current", {})
        yield


@pytest.fixture
def url(servers: list[RedisServer], unconfigured: None) -> str:
    """Of the first server, where nothing is configured."""
    return servers[0].url


of_app = pytest.mark.usefixtures("unconfigured")


def key_of(**options: Any) -> str:
    """The key of a run."""
    return str(cover(lambda: current_lock().key, key="k", **options)())


def places(servers: list[RedisServer]) -> list[str]:
    """On which server and in which database the current run's key stands, and as what."""
    found = []
    for number, server in enumerate(servers):
        for database in (0, 3):
            with Redis.from_url(f"redis://127.0.0.1:{server.port}/{database}") as client:
                found += [f"{number}/{database} {key.decode()}" for key in client.scan_iter("*k")]
    return found


def place(servers: list[RedisServer], **options: Any) -> int:
    """On which of the servers a run takes its key, a sync one and an async one."""

    def work() -> list[str]:
        return places(servers)

    async def work_async() -> list[str]:
        return work()

    (found,) = cover(work, key="k", **options)()
    assert asyncio.run(cover(work_async, key="k", **options)()) == [found]
    return int(found[0])


def an_app(**settings: Any) -> Celery:
    return Celery(f"app-{uuid4()}", set_as_current=False, changes={**NOWHERE, **settings})


def own_key() -> str:
    return str(current_lock().key)


def a_task(app: Celery, function: Any = own_key, **options: Any) -> Any:
    """A task of the app."""
    function.__name__ = "work"  # Celery compiles a function of that name
    return app.task(cover(function, key="k", **options), name=f"task-{uuid4()}", shared=False)


def run(task: Any, *args: Any) -> Any:
    """What a run of the task gives, or raises."""
    return task.apply(args, throw=True).get()


def place_of_task(servers: list[RedisServer], app: Celery, **options: Any) -> str:
    """On which server a run of a task of the app takes its key, and in which database."""
    ((found, _),) = (each.split() for each in run(a_task(app, lambda: places(servers), **options)))
    return str(found)


# --- the server --------------------------------------------------------------------------------------------------


def test_the_server_is_the_decorators_then_configured_then_the_environments(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (server.url for server in servers)
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", third)
    assert place(servers) == 2
    with configure(redis=second):
        assert place(servers) == 1
        assert place(servers, redis=first) == 0
        assert place(servers, redis=None) == 1
    assert place(servers) == 2
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", first)
    assert place(servers) == 0


@of_app
def test_then_it_is_the_apps_setting_its_result_backend_or_its_broker(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (server.url for server in servers)
    app = an_app(only_one_redis=first, result_backend=second, broker_url=third)
    assert place_of_task(servers, app) == "0/0"
    with configure(redis=second):
        assert place_of_task(servers, app) == "1/0"
        assert place_of_task(servers, app, redis=third) == "2/0"
    assert place_of_task(servers, an_app(result_backend=second, broker_url=third)) == "1/0"
    for backend in (None, "rpc://", "cache+memory://"):
        assert place_of_task(servers, an_app(result_backend=backend, broker_url=third)) == "2/0"
    for brokers in ([second, first], f"{second};{first}"):
        assert place_of_task(servers, an_app(broker_url=brokers)) == "1/0"
    by_class = {"result_backend": "celery.backends.redis:RedisBackend", "redis_host": "127.0.0.1", "redis_db": 3}
    assert place_of_task(servers, an_app(**by_class, redis_port=servers[2].port, broker_url=first)) == "2/3"
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", third)
    assert place_of_task(servers, an_app(result_backend=first)) == "2/0"


@of_app
@pytest.mark.parametrize("broker", [None, "memory://", "amqp://"])
def test_the_last_resort_is_localhost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broker: str | None
) -> None:
    monkeypatch.setattr(servers_of_product, "_from_urls", {})  # each is told of once
    caplog.set_level(logging.INFO)
    if broker is None:
        only_one(f"{uuid4()}", when_down=skip)(lambda: None)()
    else:
        run(an_app(broker_url=broker).task(only_one(f"{uuid4()}", when_down=skip)(own_key), name="t", shared=False))
    assert "locks are kept in redis://localhost:6379/0" in caplog.messages


def test_a_server_is_given_as_client_url_or_callable(servers: list[RedisServer]) -> None:
    server = servers[1]
    with (
        Redis.from_url(server.url, decode_responses=True) as decoding,
        Redis.from_url(server.url, protocol=3) as newer,
        Redis(unix_socket_path=str(server.unix_socket)) as local,
    ):
        urls = [f"unix://{server.unix_socket}", f"{server.url}?decode_responses=yes&protocol=3"]
        for source in [decoding, newer, local, *urls, lambda: newer]:
            assert place(servers, redis=source) == 1
            with configure(redis=source):
                assert place(servers) == 1
            assert place_of_task(servers, an_app(only_one_redis=source)) == "1/0"


def test_a_callable_is_called_once_and_not_when_decorating(servers: list[RedisServer]) -> None:
    calls: list[str] = []

    class Source:
        """As a dataclass it has no hash, and nobody could look it up: it is called for each function."""

        __hash__: Any = None

        def client(self) -> object:
            calls.append("method")
            return client

        def __call__(self) -> object:
            calls.append("unhashable")
            return client

    source = Source()
    with Redis.from_url(servers[0].url) as client:
        covered = [only_one("{a}", redis=source.client)(lambda a: current_lock().is_held) for _ in range(3)]
        unhashable = only_one("{a}", redis=source)(lambda a: current_lock().is_held)
        assert calls == []
        for each in covered:
            assert each(1)
            with configure(redis=source.client):
                assert each(2)
                assert only_one("{a}")(lambda a: current_lock().is_held)(1)
        assert calls == ["method"]
        assert unhashable(1)
        assert unhashable(2)
        assert calls == ["method", "unhashable"]


def test_nothing_is_asked_of_a_server_when_decorating_or_configuring() -> None:
    with socket.create_server(("127.0.0.1", 0)) as line:
        line.settimeout(0)
        with configure(redis=f"redis://127.0.0.1:{line.getsockname()[1]}/0"):
            only_one("k")(lambda: None)
            with pytest.raises(BlockingIOError):
                line.accept()


@of_app
@pytest.mark.parametrize("where", ["result_backend", "broker_url"])
def test_the_apps_own_server_as_celery_spells_it(servers: list[RedisServer], where: str) -> None:
    server = servers[2]
    assert place_of_task(servers, an_app(**{where: f"redis://127.0.0.1:{server.port}/3"})) == "2/3"
    assert place_of_task(servers, an_app(**{where: f"redis+socket://{server.unix_socket}?virtual_host=3"})) == "2/3"


@pytest.mark.parametrize("where", ["result_backend", "broker_url"])
@pytest.mark.parametrize("verify", ["required", "optional", "none"])
def test_a_url_with_tls_as_celery_documents_it(where: str, verify: str) -> None:
    written = f"rediss://:CERT_SECRET@127.0.0.1:6379/0?ssl_cert_reqs=CERT_{verify.upper()}"
    url = server_of(an_app(**{where: written}))
    assert url == f"rediss://:CERT_SECRET@127.0.0.1:6379/0?ssl_cert_reqs={verify}"
    assert servers_of_product.find_server(url) is not None  # redis-py reads it


@of_app
@pytest.mark.parametrize(
    "settings",
    [
        {"broker_url": "sentinel://127.0.0.1:26379", "broker_transport_options": {"master_name": "main"}},
        {"broker_url": "rediss://127.0.0.1:6379", "broker_use_ssl": {"ssl_cert_reqs": "none"}},
        {"broker_url": "redis://127.0.0.1:6379", "broker_use_ssl": True},
    ],
    ids=["sentinel", "rediss", "broker_use_ssl"],
)
def test_a_broker_that_cannot_be_found_by_its_url_alone_is_not_taken_for_localhost(
    servers: list[RedisServer], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="only_one_redis"):
        run(a_task(an_app(**settings)))
    url = servers[1].url
    assert place_of_task(servers, an_app(**settings, only_one_redis=url)) == "1/0"
    assert place_of_task(servers, an_app(**{**settings, "result_backend": url})) == "1/0"
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", url)
    assert place_of_task(servers, an_app(**settings)) == "1/0"


# --- what is logged of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "url", "shown"),
    [
        ("decorator", "redis://:hunter2@127.0.0.1:1/0", "redis://***@127.0.0.1:1/0"),
        ("configure", "redis://user:p%40hunter2@127.0.0.1:1/0", "redis://***@127.0.0.1:1/0"),
        (
            "environment",
            "redis://127.0.0.1:1/0?username=u&password=hunter2&protocol=3",
            "redis://127.0.0.1:1/0?username=u&password=***&protocol=3",
        ),
        ("decorator", "rediss://user:hunter2@127.0.0.1:1/0", "rediss://***@127.0.0.1:1/0"),
        ("decorator", "unix://user:hunter2@/nowhere/socket", "unix://***@/nowhere/socket"),
        ("decorator", "unix:///nowhere/socket?password=hunter2", "unix:///nowhere/socket?password=***"),
    ],
)
def test_the_server_is_logged_once_without_its_password(
    url: str, where: str, shown: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_of_product, "_from_urls", {})  # each is told of once
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
    assert told[0].getMessage() == f"locks are kept in {shown}"
    assert vars(told[0])["only_one_server"] == shown
    assert "hunter2" not in caplog.text
    assert "hunter2" not in "".join(str(vars(record)) for record in caplog.records)
    assert "hunter2" not in f"{error} {error!r}"


@of_app
def test_a_server_with_a_password(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server("--requirepass", "p@ss/w:rd") as server, caplog.at_level(logging.DEBUG):
        url = server.url.replace("//", "//:p%40ss%2Fw%3Ard@")
        for where in ("only_one_redis", "result_backend", "broker_url"):
            assert run(a_task(an_app(**{where: url}))) == "only_one:k"
        with Redis(port=server.port, password="p@ss/w:rd") as client:  # noqa: S106
            assert key_of(redis=client) == "only_one:k"
    assert f":{server.port}" in caplog.text
    assert "p%40ss" not in caplog.text
    assert "p@ss" not in caplog.text


# --- prefix and times --------------------------------------------------------------------------------------------


def test_settings_hold_for_what_was_decorated_before_and_in_every_thread(
    servers: list[RedisServer], prefix: str
) -> None:
    covered = only_one("k")(lambda: current_lock().key)
    with configure(redis=servers[0].url), ThreadPoolExecutor(1) as pool:
        assert pool.submit(covered).result() == f"{prefix}k"
        with configure(prefix=f"{prefix}other:"):
            assert covered() == pool.submit(covered).result() == f"{prefix}other:k"
        assert covered() == f"{prefix}k"


def test_the_prefix_is_configured_then_the_apps_then_the_default(url: str) -> None:
    assert run(a_task(an_app(only_one_redis=url))) == "only_one:k"
    app = an_app(only_one_redis=url, only_one_prefix="app:")
    assert run(a_task(app)) == "app:k"
    with configure(prefix="configured:"):
        assert run(a_task(app)) == "configured:k"


def times() -> tuple[float, float | None]:
    """For how long the run's key was taken, and how long the run may hold it at the longest; in seconds."""
    lock = current_lock()
    assert lock.holder is not None
    longest = lock.holder.deadline and round(lock.holder.deadline - lock.holder.since, 1)
    # Some time has gone by: all that a row of this test asks for is a multiple of 30 s.
    return math.ceil(lock.expires_in / 30) * 30, longest


@pytest.mark.parametrize(
    ("of_app", "configured", "decorated", "expected"),
    [
        ({}, {}, {}, (30, None)),
        ({"timeout": 600}, {}, {}, (600, 600)),
        ({"lease": 90}, {}, {}, (90, None)),
        ({"timeout": 600, "lease": 90}, {}, {}, (90, 600)),
        ({"timeout": 600, "lease": 90}, {"timeout": 480}, {}, (480, 480)),
        ({"timeout": 600, "lease": 90}, {"timeout": timedelta(minutes=8), "lease": 60}, {}, (60, 480)),
        ({"timeout": 600, "lease": 90}, {"timeout": None}, {}, (30, None)),
        ({"timeout": 600, "lease": 90}, {"takeover": True}, {}, (90, 600)),
        ({"timeout": 600, "lease": 90}, {"timeout": 480}, {"lease": 120}, (120, None)),
        ({"timeout": 600, "lease": 90}, {}, {"timeout": 420}, (420, 420)),
        # What is inherited never makes a decorator invalid.
        ({"lease": 480}, {"lease": 420}, {"timeout": 360}, (360, 360)),
        ({"timeout": 60}, {"timeout": 90}, {"lease": timedelta(minutes=2)}, (120, None)),
        ({}, {"timeout": 600, "lease": 90}, {"timeout": 240, "lease": 120}, (120, 240)),
        ({}, {"timeout": 600, "lease": 90}, {"timeout": 120, "lease": 120}, (120, 120)),
        ({}, {"timeout": 600, "lease": 90}, {"timeout": None}, (30, None)),
        ({}, {"timeout": 600, "lease": 90}, {"lease": None}, (30, None)),
        ({}, {"timeout": 600, "lease": 90}, {"timeout": 120, "lease": None}, (120, 120)),
    ],
    ids=repr,
)
def test_timeout_and_lease_are_taken_together_from_one_level(
    url: str, of_app: Any, configured: Any, decorated: Any, expected: Any
) -> None:
    app = an_app(only_one_redis=url, **{f"only_one_{name}": value for name, value in of_app.items()})
    with configure(**configured):
        assert run(a_task(app, times, **decorated)) == expected
        if not of_app:
            assert cover(times, key="k", redis=url, **decorated)() == expected


def test_what_the_app_says_never_makes_at_least_invalid(url: str) -> None:
    app = an_app(only_one_redis=url, only_one_timeout=300)
    assert run(a_task(app, at_least=600)) == "only_one:k"
    with Redis.from_url(url) as client:
        assert 300 < client.ttl("only_one:k") <= 600
        client.delete("only_one:k")


def test_what_redis_is_told_is_what_the_run_is_told(redis: Redis) -> None:
    def work() -> bool:
        lock = current_lock()
        left: Any = redis.pttl(lock.key)
        # The run counts from before the command was sent, and is read a moment later.
        return bool(lock.expires_in - 0.002 <= left / 1000 <= 60)

    assert only_one("k", 60)(work)()
    assert only_one("k", lease=60)(work)()


# --- policies and takeover ---------------------------------------------------------------------------------------


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


def own_policy(error: OnlyOneError) -> str:
    """A policy of the user's own, to be found by its dotted name."""
    return f"own policy for {type(error).__name__}"


@pytest.fixture
def busy_for_apps(url: str) -> Iterator[None]:
    """Somebody else holds the key."""
    with Redis.from_url(url) as client:
        client.set("only_one:k", "somebody else")
        yield
        client.delete("only_one:k")


@pytest.mark.usefixtures("busy_for_apps")
def test_when_busy_of_an_app_by_its_name(url: str) -> None:
    for policy in ("only_one.fail", "only_one:fail", fail):
        app = an_app(only_one_redis=url, only_one_when_busy=policy)
        with pytest.raises(AlreadyRunning):
            run(a_task(app))
    assert run(a_task(app, when_busy=skip)) is None
    with configure(when_busy=lambda _: "configured"):
        assert run(a_task(app)) == "configured"
        assert run(a_task(app, when_busy=lambda _: "decorated")) == "decorated"
    found = run(a_task(an_app(only_one_redis=url, only_one_when_busy=f"{__name__}.own_policy")))
    assert found == "own policy for AlreadyRunning"
    assert run(a_task(an_app(only_one_redis=url))) is None


def test_takeover_is_the_decorators_then_configured_then_the_apps(url: str) -> None:
    program = f"""
import os, signal, only_one
only_one.only_one("k", 600, redis={url!r})(lambda: os.kill(os.getpid(), signal.SIGKILL))()
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    with Redis.from_url(url) as client:
        of_the_dead: Any = client.get("only_one:k")
        assert Holder.parse(of_the_dead) is not None
        app = an_app(only_one_redis=url, only_one_takeover=False)
        assert run(a_task(app)) is None
        with configure(takeover=False):
            assert run(a_task(an_app(only_one_redis=url, only_one_takeover=True))) is None
        assert run(a_task(app, takeover=True)) == "only_one:k"
        client.set("only_one:k", of_the_dead)
        with configure(takeover=True):
            assert run(a_task(app)) == "only_one:k"


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


def test_no_server_is_asked_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as line:
        line.settimeout(0)
        url = f"redis://127.0.0.1:{line.getsockname()[1]}/0"
        with configure(redis=url):
            with configure(active=False):
                assert switched_off()
                assert switched_off(redis=url, when_busy=fail)
                with pytest.raises(ConfigurationError):
                    only_one("k", timeout=0)  # it will be switched on elsewhere
            monkeypatch.setenv("ONLY_ONE_ACTIVE", "0")
            assert switched_off()
        with pytest.raises(BlockingIOError):
            line.accept()


@pytest.mark.parametrize(("value", "off"), [("0", True), ("False", True), ("1", False), ("", False)])
def test_the_environment_switches_off_where_nothing_is_configured(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, value: str, *, off: bool
) -> None:
    monkeypatch.setenv("ONLY_ONE_ACTIVE", value)
    assert switched_off() is off
    with configure(active=True):
        assert not switched_off()
    with configure(active=False):
        assert switched_off()
    assert switched_off() is off


def test_the_words_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for on, words in {True: ["1", "true", "Yes", "on"], False: ["0", "FALSE", "no", "off"]}.items():
        for word in words:
            monkeypatch.setenv("ONLY_ONE_ACTIVE", word)
            assert settings.is_active(settings.Settings()) is on


@pytest.mark.usefixtures("busy_for_apps")
def test_an_app_switches_off_where_nothing_is_configured(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = a_task(an_app(only_one_redis=url, only_one_active=False), lambda: "ran")
    assert run(task) == "ran"
    with configure(active=True):
        assert run(task) is None
    task = a_task(an_app(only_one_redis=url, only_one_active=True), lambda: "ran")
    assert run(task) is None
    with configure(active=False):
        assert run(task) == "ran"
    monkeypatch.setenv("ONLY_ONE_ACTIVE", "0")
    assert run(a_task(an_app(only_one_redis=url), lambda: "ran")) == "ran"


# --- configure itself --------------------------------------------------------------------------------------------


def test_configure_holds_on_and_a_block_puts_back_what_was(redis: Redis, prefix: str) -> None:
    with configure():
        configure(prefix=f"{prefix}a:")
        configure(timeout=90)
        assert key_of() == f"{prefix}a:k"
        assert only_one("k")(times)() == (90, 90)
        with configure(prefix=f"{prefix}b:"):
            assert key_of() == f"{prefix}b:k"
            assert only_one("k")(times)() == (90, 90)
        assert key_of() == f"{prefix}a:k"
    assert key_of() == f"{prefix}k"
    assert only_one("k")(times)() == (30, None)


def test_a_block_that_ends_first_takes_nothing_from_the_others(redis: Redis, prefix: str) -> None:
    """As blocks do that are in two threads."""
    first = configure(prefix=f"{prefix}a:", timeout=90)
    first.__enter__()
    with configure(prefix=f"{prefix}b:"):
        first.__exit__(None, None, None)
        assert key_of() == f"{prefix}b:k"
        assert only_one("k")(times)() == (30, None)
    assert key_of() == f"{prefix}k"


def test_what_is_not_given_is_shown_as_dots() -> None:
    assert "prefix: str | Unset = …, " in str(inspect.signature(configure)).replace("'", "")


def test_a_bad_value_changes_nothing(redis: Redis, prefix: str) -> None:
    bad: list[dict[str, Any]] = [{"timeout": 0}, {"lease": 200}, {"when_busy": "skip"}, {"redis": "localhost"}]
    with configure(timeout=90):
        for each in bad:
            with pytest.raises(ConfigurationError):
                configure(**{"prefix": f"{prefix}a:", "timeout": 60, **each})
        with pytest.raises(ConfigurationError, match="lease=200"):
            configure(lease=200)  # which does not go with the time-out that there is
        assert key_of() == f"{prefix}k"
        assert only_one("k")(times)() == (90, 90)


# --- how an app's settings are written ---------------------------------------------------------------------------


@pytest.mark.usefixtures("busy_for_apps")
@pytest.mark.parametrize(("kind", "namespace"), [("object", "CELERY"), ("dict", "celery"), ("name", "JOBS_")])
def test_with_a_namespace(url: str, namespace: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = namespace if namespace.endswith("_") else f"{namespace}_"
    given = {"ONLY_ONE_REDIS": url, "ONLY_ONE_PREFIX": "only_one:", "ONLY_ONE_WHEN_BUSY": "only_one.fail"}
    if namespace.islower():
        given = {name.lower(): value for name, value in given.items()}
    given = {begin + name: value for name, value in given.items()}
    given |= {"ONLY_ONE_PREFIX": "outside of the namespace:", "only_one_prefix": "outside of the namespace:"}
    app = Celery(set_as_current=False)
    source: Any = SimpleNamespace(**given)
    if kind == "dict":
        source = given
    elif kind == "name":
        monkeypatch.setitem(sys.modules, "settings_of_a_test", source)
        source = "settings_of_a_test"
    app.config_from_object(source, namespace=namespace)
    with pytest.raises(AlreadyRunning) as raised:
        run(a_task(app))
    assert raised.value.key == "only_one:k"


@pytest.mark.parametrize("how", ["attribute", "update", "object"])
def test_what_is_set_after_decorating(url: str, how: str) -> None:
    app = Celery(set_as_current=False)
    task = a_task(app)
    given = {"only_one_redis": url, "only_one_prefix": "late:"}
    if how == "attribute":
        app.conf.only_one_redis, app.conf.only_one_prefix = url, "late:"
    elif how == "update":
        app.conf.update(given)
    else:
        app.config_from_object(SimpleNamespace(**given))
    assert run(task) == "late:k"


def test_decorating_loads_no_configuration() -> None:
    app = Celery(set_as_current=False)
    app.config_from_object("there_is.no_such_module")
    a_task(app)
    assert not app.configured


def test_no_setting_is_none(url: str) -> None:
    """As a settings module has them that takes them from an environment in which they are not."""
    app = an_app(result_backend=url, only_one_redis=None, only_one_prefix=None, only_one_when_busy=None)
    app.conf.update(only_one_timeout=None, only_one_lease=None, only_one_takeover=None, only_one_active=None)
    assert run(a_task(app)) == "only_one:k"


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("redis", 5, "redis://"),
        ("redis", "localhost", "redis://"),
        ("prefix", "{a}", "without braces"),
        ("timeout", 0, "write"),
        ("lease", "10", "write"),
        ("lease", 100, "longer than"),
        ("queue_timeout", -1, "write"),
        ("when_busy", "fail", "only_one.fail"),
        ("when_busy", "only_one.fial", "only_one.f"),
        ("when_busy", "no_such_package.policy", "only_one.f"),
        ("when_busy", "only_one.carry_on", "write"),
        ("when_busy", "only_one.retry", "()"),
        ("when_busy", 5, "write"),
        ("takeover", "no", "write"),
        ("active", 0, "write"),
    ],
    ids=repr,
)
def test_a_wrong_value_of_an_app_says_what_to_write(url: str, name: str, value: Any, instead: str) -> None:
    app = an_app(**{"only_one_redis": url, "only_one_timeout": 60, f"only_one_{name}": value})
    for _ in range(2):  # not once only
        with pytest.raises(ConfigurationError) as raised:
            run(a_task(app))
        assert f"only_one_{name}" in str(raised.value)
        assert instead in str(raised.value)


# --- whose settings ----------------------------------------------------------------------------------------------


@of_app
def test_two_apps_with_one_shared_task(servers: list[RedisServer]) -> None:
    name = f"shared-{uuid4()}"

    def work() -> list[str]:
        return places(servers)

    shared_task(name=name)(cover(work, key="k"))
    first = an_app(only_one_redis=servers[0].url, only_one_prefix="first:")
    second = an_app(result_backend=servers[1].url)
    for _ in range(2):
        assert run(first.tasks[name]) == ["0/0 first:k"]
        assert run(second.tasks[name]) == ["1/0 only_one:k"]


def test_two_apps_exclude_each_other_where_they_share_server_and_prefix(url: str) -> None:
    first, second = an_app(only_one_redis=url), an_app(result_backend=url)
    inner = a_task(second)
    assert run(a_task(first, lambda: [own_key(), run(inner), own_key()])) == ["only_one:k", None, "only_one:k"]
    assert run(inner) == "only_one:k"


@of_app
def test_a_task_inside_another_apps_task_has_its_own_apps_settings(servers: list[RedisServer]) -> None:
    first = an_app(only_one_redis=servers[0].url, only_one_prefix="first:")
    second = an_app(only_one_redis=servers[1].url, only_one_prefix="second:")
    inner = a_task(second, lambda: places(servers))
    found = run(a_task(first, lambda: [places(servers), run(inner), places(servers)]))
    assert found == [["0/0 first:k"], ["0/0 first:k", "1/0 second:k"], ["0/0 first:k"]]


@of_app
def test_what_is_called_as_a_plain_function_has_no_apps_settings(servers: list[RedisServer]) -> None:
    app = an_app(only_one_redis=servers[0].url, only_one_prefix="app:")
    task, function = a_task(app, lambda: places(servers)), cover(lambda: places(servers), key="k")

    def around() -> Any:
        return [task.run(), function()]

    with configure(redis=servers[1].url):
        assert task() == task.run() == ["1/0 only_one:k"]
        found = ["1/0 only_one:k", "2/0 app:k"]
        assert run(a_task(app, around, redis=servers[2].url)) == [found, found]
        assert run(app.task(around, name="around", shared=False)) == [found[:1]] * 2


@of_app
def test_a_plain_function_has_the_settings_of_the_processs_app(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def current(*apps: Celery, default: Celery | None = None) -> None:
        monkeypatch.setattr(app_settings, "current_app", current_app)
        monkeypatch.setattr(_state, "_apps", WeakSet(apps))
        monkeypatch.setattr(_state, "default_app", default)

    def found() -> set[str]:
        def work() -> list[str]:
            return [*places(servers), *(each.key for each in held())]

        async def work_async() -> list[str]:
            return work()

        return {*cover(work, key="k")(), *asyncio.run(cover(work_async, key="k")())}

    names = ["first", "second"]
    first, second = (
        an_app(only_one_prefix=f"{name}:", broker_url=server.url) for name, server in zip(names, servers, strict=False)
    )
    other = an_app(only_one_prefix="nobody's:")
    first.set_as_current = second.set_as_current = True  # but not this thread's
    current(first, other)
    current_before = _state._tls.current_app
    with monkeypatch.context() as patch:
        patch.setenv("DJANGO_SETTINGS_MODULE", "no_such_settings")
        assert found() == {"0/0 first:k", "first:k"}
    assert (_state.default_app, _state._tls.current_app) == (None, current_before)
    assert not first.configured
    assert first.conf.only_one_prefix == "first:"
    assert first.configured
    assert current_app() is first
    assert found() == {"0/0 first:k", "first:k"}
    with configure(redis=servers[2].url):
        assert found() == {"2/0 first:k", "first:k"}
        with configure(prefix="configured:"):
            assert found() == {"2/0 configured:k", "configured:k"}
    current(first, second, default=second)
    assert found() == {"1/0 second:k", "second:k"}
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", servers[2].url)
    assert found() == {"2/0 second:k", "second:k"}
    for default in (None, other):
        current(first, second, default=default)  # it would be another in each thread
        assert found() == {"2/0 only_one:k", "only_one:k"}


@pytest.mark.parametrize(("namespace", "name"), [(None, "ONLY_ONE_PREFIX"), ("JOBS", "CELERY_ONLY_ONE_REDIS_URL")])
def test_a_setting_that_is_not_read_is_warned_of_once(
    url: str, caplog: pytest.LogCaptureFixture, namespace: str | None, name: str
) -> None:
    app = Celery(f"app-{uuid4()}", set_as_current=False)
    read = "JOBS_ONLY_ONE_REDIS" if namespace else "only_one_redis"
    app.config_from_object({name: "not read", read: url}, namespace=namespace)
    for _ in range(2):
        assert run(a_task(app)) == "only_one:k"
    (warned,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"has {name}, which is not read: write {read}, " in warned


@pytest.mark.parametrize("options", [{}, {"when_busy": retry()}], ids=repr)
def test_a_call_from_inside_its_own_run_has_the_apps_settings_and_is_busy(url: str, options: Any) -> None:
    app = an_app(only_one_redis=url, only_one_prefix="the-apps:")
    keys: list[str] = []

    def work() -> Any:
        keys.append(own_key())
        assert len(keys) == 1, "it has run inside of its own run"
        try:
            return [task.run()]
        except AlreadyRunning as error:
            return error.key

    task = a_task(app, work, **options)
    assert run(task) == ("the-apps:k" if options else [None])
    assert keys == ["the-apps:k"]
