"""The effective options: the decorator's, then configured, the environment's, the app's, and the defaults."""

# ruff: noqa: ARG001 - fixtures that configure something are asked for by name, and so are arguments by keys

from __future__ import annotations

import gc
import logging
import math
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import celery
import pytest
from celery import Celery, _state, shared_task
from redis import Redis, UsernamePasswordCredentialProvider
from redis.exceptions import RedisClusterException

from only_one import configure, current_lock, fail, only_one, settings, skip
from only_one.celery import app_settings
from only_one.celery.app_settings import current_app, server_of
from only_one.connections import server as servers_of_product
from only_one.errors import AlreadyRunning, ConfigurationError, LockUnavailable, OnlyOneError, UnkeyableArgument
from only_one.inspection import held
from rigs.servers import RedisServer
from tests.decorated import a_task, call_both, decorated, decorated_async, own_key, token_of_the_dead

NOWHERE = {"broker_url": "memory://", "result_backend": "cache+memory://"}
KEY = "only_one:k"


@pytest.fixture
def unconfigured(prefix: str) -> Iterator[None]:
    """Nothing is configured at all, not even the prefix of each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_overrides", [])
        patch.setattr(settings, "current", {})
        yield


@pytest.fixture
def url(own_server: RedisServer, unconfigured: None) -> Iterator[str]:
    """The first database, where nothing is configured."""
    yield own_server.url
    with Redis.from_url(own_server.url) as client:
        client.flushall()


def url_of(server: RedisServer, database: int) -> str:
    return f"redis://127.0.0.1:{server.port}/{database}"


def places(server: RedisServer) -> list[str]:
    """The databases in which the keys of the current runs are, and the keys."""
    stored = []
    for database in range(6):
        with Redis.from_url(url_of(server, database)) as client:
            stored += [f"{database} {key.decode()}" for key in client.scan_iter("*k")]
    return stored


def an_app(**settings: Any) -> Celery:
    return Celery(f"app-{uuid4()}", set_as_current=False, changes={**NOWHERE, **settings})


def run(task: Any, *args: Any) -> Any:
    """The result of a run of the task, or the exception that it raises."""
    return task.apply(args, throw=True).get()


Levels = dict[str, dict[str, Any]]


def call_with(levels: Levels, body: Any) -> Any:
    """The result, or the class of the error, of a run whose options are given at several levels.

    It is a task of the app, if one of the levels is "app"; else a function, sync and async.
    """
    given = levels.get("decorator", {})
    try:
        with pytest.MonkeyPatch.context() as patch, configure(**levels.get("configured", {})):
            for name, value in levels.get("environment", {}).items():
                patch.setenv(f"ONLY_ONE_{name.upper()}", value)
            if "app" in levels:
                return run(a_task(an_app(**levels["app"]), body, **given))
            result, of_async = call_both(body, **given)
            assert of_async == result
            return result
    except OnlyOneError as error:
        return type(error)


# --- the server --------------------------------------------------------------------------------------------------

ALL = {"only_one_redis": 1, "result_backend": 2, "broker_url": 3}
BY_CLASS = {"result_backend": "celery.backends.redis:RedisBackend", "redis_host": "127.0.0.1", "redis_db": 3}
REST = {"redis_host": "127.0.0.1", "redis_port": "{port}"}
SENTINEL = {"broker_url": "sentinel://127.0.0.1:26379", "broker_transport_options": {"master_name": "main"}}
WITH_TLS = {"broker_url": "rediss://127.0.0.1:6379", "broker_use_ssl": {"ssl_cert_reqs": "none"}}
ALSO_WITH_TLS = {"broker_url": "redis://127.0.0.1:6379", "broker_use_ssl": True}
WITHOUT_HOST = {"broker_url": "redis://", "broker_host": "127.0.0.1"}
WITHOUT_URL = {"broker_url": None, "broker_transport": "redis", "broker_host": "h"}
IN_CAPITALS = {"broker_url": "REDIS://h:6379/1"}
SOCKET = "redis+socket://{socket}?virtual_host=3"
TLS = "rediss://:CERT_SECRET@127.0.0.1:6379/0?ssl_cert_reqs="


def filled_in(server: RedisServer, value: Any) -> Any:
    """A level's value of the table: numbers are URLs of databases, and the server's places stand in texts."""
    if isinstance(value, dict):
        return {name: each if name == "redis_db" else filled_in(server, each) for name, each in value.items()}
    if isinstance(value, list):
        return [filled_in(server, each) for each in value]
    if isinstance(value, str):
        return value.format(port=server.port, socket=server.unix_socket)
    return url_of(server, value) if type(value) is int else value


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ({"environment": {"redis_url": 2}}, 2),
        ({"environment": {"redis_url": 2}, "configured": {"redis": 1}, "decorator": {"redis": None}}, 1),
        ({"environment": {"redis_url": 2}, "configured": {"redis": 1}, "decorator": {"redis": 3}}, 3),
        ({"app": ALL}, 1),
        ({"app": ALL, "environment": {"redis_url": 4}}, 1),
        ({"app": ALL, "configured": {"redis": 4}}, 4),
        ({"app": {"result_backend": 2, "broker_url": 3}}, 2),
        ({"app": {"result_backend": 2}, "environment": {"redis_url": 4}}, 4),
        # As a settings module has those that it takes from an environment in which they are not.
        ({"app": {"result_backend": 2, **dict.fromkeys(f"only_one_{name}" for name in settings.CONFIGURABLE)}}, 2),
        ({"app": {"result_backend": None, "broker_url": 3}}, 3),
        ({"app": {"result_backend": "rpc://", "broker_url": 3}}, 3),
        ({"app": {"broker_url": [1, 2]}}, 1),
        ({"app": {"broker_url": "redis://127.0.0.1:{port}/1;redis://127.0.0.1:{port}/2"}}, 1),
        ({"app": {**BY_CLASS, "redis_port": "{port}", "broker_url": 1}}, 3),
        ({"app": {"broker_url": "redis://127.0.0.1:{port}//"}}, 0),
        ({"app": {"result_backend": "redis://127.0.0.1:{port}/3/"}}, 3),
        # The rest of the address is in settings of Celery's.
        ({"app": {"result_backend": "redis:///3", **REST}}, 3),
        # As Celery writes the URL of a socket.
        ({"app": {"result_backend": SOCKET}}, 3),
        ({"app": {"broker_url": SOCKET.replace("=", "=/")}}, 3),
        ({"app": {**SENTINEL, "result_backend": 1}}, 1),
        ({"app": SENTINEL, "environment": {"redis_url": 1}}, 1),
    ],
    ids=repr,
)
def test_the_server_is_the_decorators_then_configured_then_the_environments_then_the_apps(
    own_server: RedisServer, url: str, levels: Levels, expected: Any
) -> None:
    found = call_with(filled_in(own_server, levels), lambda: places(own_server))
    assert found == [f"{expected} {KEY}"]


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize("broker", [None, "memory://", "amqp://"])
def test_the_last_resort_is_localhost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broker: str | None
) -> None:
    monkeypatch.setattr(servers_of_product, "_from_urls", {})  # each is logged once
    caplog.set_level(logging.INFO)
    own = {"decorator": {"key": str(uuid4()), "when_down": skip}}
    call_with(own if broker is None else {"app": {"broker_url": broker}, **own}, lambda: None)
    assert "locks are kept in redis://localhost:6379/0" in caplog.messages


def test_a_callable_is_called_once_and_not_when_decorating(url: str) -> None:
    calls: list[object] = []

    class Source:
        """As a dataclass it has no hash, and nobody could look it up: it is called for each function."""

        __hash__: Any = None

        def __call__(self) -> object:
            calls.append(self)
            return client

    source = Source()
    with Redis.from_url(url) as client:
        functions = [decorated(own_key, redis=source.__call__) for _ in range(3)]
        unhashable = decorated(own_key, redis=source)
        assert calls == []
        assert [function() for function in (*functions, unhashable, unhashable)] == [KEY] * 5
        with configure(redis=source.__call__):
            assert functions[0]() == decorated(own_key)() == KEY
        assert run(a_task(an_app(only_one_redis=source.__call__))) == KEY
    assert calls == [source, source]


def test_a_callable_that_cannot_reach_what_it_asks_is_asked_again_by_the_next_call(url: str) -> None:
    nor_now = RedisClusterException("as where a cluster's client cannot connect"), OSError("nor now")
    answers: list[Any] = [TimeoutError("no address is known"), *nor_now, url]

    def source() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    decorate = {"redis": source}
    with pytest.raises(LockUnavailable, match="no address is known"):
        decorated(own_key, **decorate)()
    for each in (decorated, decorated_async):
        assert each(own_key, when_down=skip, **decorate)() is None
    assert decorated(own_key, **decorate)() == KEY


PROVIDER = "redis://h:5/3?credential_provider=redis.UsernamePasswordCredentialProvider"


@pytest.mark.skipif(celery.VERSION < (5, 6), reason="Celery's backend knows no provider before")
@pytest.mark.parametrize(
    "config",
    [
        {"result_backend": "redis://h:5/3", "redis_backend_credential_provider": UsernamePasswordCredentialProvider()},
        {"result_backend": PROVIDER},
    ],
    ids=["setting", "URL"],
)
def test_a_backend_with_a_credential_provider_gives_its_own_client(config: dict[str, Any]) -> None:
    client: Any = server_of(an_app(**config))
    options = client.connection_pool.connection_kwargs
    assert isinstance(options["credential_provider"], UsernamePasswordCredentialProvider)


@pytest.mark.parametrize("verify", ["required", "optional", "none"])
def test_a_url_with_tls_as_celery_documents_it(verify: str) -> None:
    for where in ("result_backend", "broker_url"):
        url = server_of(an_app(**{where: f"{TLS}CERT_{verify.upper()}"}))
        assert url == TLS + verify
        assert servers_of_product.find_server(url) is not None  # redis-py reads it


@pytest.mark.parametrize(
    "config",
    [SENTINEL, WITH_TLS, ALSO_WITH_TLS, WITHOUT_HOST, WITHOUT_URL, IN_CAPITALS, {"broker_url": PROVIDER}],
)
def test_a_broker_whose_url_does_not_say_all_is_told_with_what_to_write(config: dict[str, Any]) -> None:
    """And is not taken for localhost."""
    with pytest.raises(
        ConfigurationError, match=r"write only_one_redis=... in its configuration, a URL, a client or a"
    ):
        server_of(an_app(**config))


# --- what is logged of the server --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p%40hunter2@127.0.0.1:1/0", "redis://***@127.0.0.1:1/0"),
        ("rediss://user:hunter2@127.0.0.1:1/0", "rediss://***@127.0.0.1:1/0"),
        ("unix://user:hunter2@/nowhere/socket", "unix://***@/nowhere/socket"),
        ("unix:///nowhere/socket?password=hunter2", "unix:///nowhere/socket?password=***"),
        ("redis://127.0.0.1:1?username=u&password=hunter2", "redis://127.0.0.1:1?username=u&password=***"),
    ],
)
def test_the_server_is_logged_once_without_its_password(
    url: str, shown: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_of_product, "_from_urls", {})  # each is logged once
    errors: list[str] = []
    with caplog.at_level(logging.DEBUG):
        call_both(lambda: None, redis=url, when_down=lambda error: errors.append(f"{error} {error!r}"))
    logged = [record for record in caplog.records if record.levelno == logging.INFO and record.name == "only_one"]
    assert [record.getMessage() for record in logged] == [f"locks are kept in {shown}"]
    assert vars(logged[0])["only_one_server"] == shown
    everything = [caplog.text, *errors, *(str(vars(record)) for record in caplog.records)]
    assert errors
    assert "hunter2" not in "".join(everything)


# --- options and levels ------------------------------------------------------------------------------------------


def own_policy(error: OnlyOneError) -> str:
    """A policy of the user's own, to be found by its dotted name."""
    return f"own policy for {type(error).__name__}"


@pytest.mark.parametrize(
    ("option", "of_app", "configured", "decorator", "expected"),
    [
        ("prefix", "app:", None, None, "app:k"),
        ("prefix", "app:", "configured:", None, "configured:k"),
        ("when_busy", None, None, None, None),
        ("when_busy", "only_one:fail", None, None, AlreadyRunning),
        ("when_busy", fail, None, None, AlreadyRunning),
        ("when_busy", f"{__name__}.own_policy", None, None, "own policy for AlreadyRunning"),
        ("when_busy", fail, lambda _: "configured", lambda _: "decorator", "decorator"),
        ("takeover", None, None, None, KEY),
        ("takeover", False, None, None, None),
        ("takeover", None, None, False, None),
        ("active", False, None, None, KEY),
        ("active", False, True, None, None),
    ],
)
def test_an_option_is_the_decorators_then_configured_then_the_apps_then_the_default(
    url: str, option: str, of_app: Any, configured: Any, decorator: Any, expected: Any
) -> None:
    """`takeover` finds a dead holder at the key; `when_busy` and `active` find a stranger there."""
    stored = {"takeover": token_of_the_dead(), "when_busy": b"a stranger", "active": b"a stranger"}
    levels: Levels = {"configured": {"redis": url}}
    if of_app is not None:
        levels["app"] = {f"only_one_{option}": of_app}
    if configured is not None:
        levels["configured"][option] = configured
    if decorator is not None:
        levels["decorator"] = {option: decorator}
    with Redis.from_url(url) as client:
        if option in stored:
            client.set(KEY, stored[option])
        assert call_with(levels, own_key) == expected


def times() -> tuple[float, float | None]:
    """The time for which the run's key was acquired, and for which the run may hold it at the longest; in seconds."""
    lock = current_lock()
    assert lock.holder is not None
    longest = lock.holder.deadline and round(lock.holder.deadline - lock.holder.since, 1)
    # Some time has gone by: all that a row of this test asks for is a multiple of 30 s.
    return math.ceil(lock.expires_in / 30) * 30, longest


@pytest.mark.parametrize(
    ("of_app", "configured", "decorator", "expected"),
    [
        ({}, {}, {}, (30, None)),
        ({"timeout": 600, "lease": 90}, {}, {}, (90, 600)),
        ({"timeout": 600, "lease": 90}, {"timeout": 480}, {}, (480, 480)),
        ({"timeout": 600, "lease": 90}, {"timeout": timedelta(minutes=8), "lease": 60}, {}, (60, 480)),
        ({"timeout": 600, "lease": 90}, {"timeout": None}, {}, (30, None)),
        # What is inherited never makes a decorator invalid.
        ({"lease": 480}, {"lease": 420}, {"timeout": 360}, (360, 360)),
        ({"timeout": 300}, {}, {"at_least": 600}, (300, 300)),
        ({}, {}, {"timeout": 0.5}, (30, 0.5)),
        ({"timeout": 60}, {"timeout": 90}, {"lease": timedelta(minutes=2)}, (120, None)),
        ({}, {"timeout": 600, "lease": 90}, {"timeout": 120, "lease": 120}, (120, 120)),
        ({}, {"timeout": 600, "lease": 90}, {"lease": None}, (30, None)),
    ],
    ids=repr,
)
def test_timeout_and_lease_are_taken_together_from_one_level(
    url: str, of_app: Any, configured: Any, decorator: Any, expected: Any
) -> None:
    app = {"only_one_redis": url, **{f"only_one_{name}": value for name, value in of_app.items()}}
    assert call_with({"app": app, "configured": configured, "decorator": decorator}, times) == expected
    if not of_app:
        own = {"redis": url, **decorator}
        assert call_with({"configured": configured, "decorator": own}, times) == expected


# --- switched off ------------------------------------------------------------------------------------------------


def is_switched_off(**options: Any) -> bool:
    """Whether calls run without a key, and none of them sees that."""

    def has_no_server() -> bool:
        current_lock().ensure_held()
        assert type(current_lock().fence) is int
        assert current_lock().is_held
        assert current_lock().key.endswith(":k")
        assert getattr(current_lock().holder, "pid", None) == os.getpid()
        return current_lock().server is None

    of_sync, of_async = call_both(has_no_server, **options)
    assert of_sync is of_async
    return bool(of_sync)


def test_no_server_is_asked_by_decorating_or_configuring_nor_when_switched_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as line:
        line.settimeout(0)
        url = f"redis://127.0.0.1:{line.getsockname()[1]}/0"
        with configure(redis=url):
            only_one("k")(lambda: None)
            with configure(active=False):
                assert is_switched_off()
                assert is_switched_off(redis=url, when_busy=fail)
                with pytest.raises(UnkeyableArgument):
                    only_one(key=lambda: "")(lambda: None)()  # as it will where it is switched on
                with pytest.raises(ConfigurationError):
                    only_one("k", timeout=0)  # it will be switched on elsewhere
        with pytest.raises(BlockingIOError):
            line.accept()


@pytest.mark.parametrize("word", ["1", "true", "Yes", "on", "", "0", "FALSE", "no", "off"])
def test_the_environment_switches_off_where_nothing_is_configured(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("ONLY_ONE_ACTIVE", word)
    assert is_switched_off() is (word in {"0", "FALSE", "no", "off"})
    with configure(active=True):
        assert not is_switched_off()


# --- configure itself --------------------------------------------------------------------------------------------


def test_configured_options_hold_in_every_thread_until_the_block_ends(redis: Redis, prefix: str) -> None:
    before = decorated(lambda: (own_key(), *times()))
    with configure(), ThreadPoolExecutor(1) as pool:
        configure(prefix=f"{prefix}a:")
        configure(timeout=90)
        assert before() == pool.submit(before).result() == (f"{prefix}a:k", 90, 90)
        with configure(prefix=f"{prefix}b:"):
            assert before() == pool.submit(before).result() == (f"{prefix}b:k", 90, 90)
        assert before() == (f"{prefix}a:k", 90, 90)
    assert before() == (f"{prefix}k", 30, None)


def test_a_block_that_ends_first_takes_nothing_from_the_others(redis: Redis, prefix: str) -> None:
    """As blocks do that are in two threads."""
    function = decorated(lambda: (own_key(), *times()))
    first = configure(prefix=f"{prefix}a:", timeout=90)
    first.__enter__()
    with configure(prefix=f"{prefix}b:"):
        first.__exit__(None, None, None)
        assert function() == (f"{prefix}b:k", 30, None)
    assert function() == (f"{prefix}k", 30, None)
    with ThreadPoolExecutor(1) as pool, configure():
        with pool.submit(configure, prefix=f"{prefix}c:").result():
            assert function() == (f"{prefix}c:k", 30, None)
        for_good = pool.submit(configure, timeout=90).result()
    assert function() == (f"{prefix}k", 90, 90)
    with for_good:
        pass


def test_a_block_cannot_be_entered_again() -> None:
    """Its options would not hold, and no call would say so."""
    options = configure(timeout=90)
    with options:
        pass
    with configure():
        dropped = configure(timeout=90)
    for each in (options, dropped):
        with pytest.raises(ConfigurationError, match="write with configure"), each:
            pass


def test_a_bad_value_changes_nothing(redis: Redis, prefix: str) -> None:
    bad: list[dict[str, Any]] = [{"timeout": 0}, {"lease": 200}, {"when_busy": "skip"}, {"redis": "localhost"}]
    with configure(timeout=90):
        for each in bad:
            with pytest.raises(ConfigurationError):
                configure(**{"prefix": f"{prefix}a:", "timeout": 60, **each})
        with pytest.raises(ConfigurationError, match="lease=200"):
            configure(lease=200)  # which does not go with the time-out that there is
        assert decorated(lambda: (own_key(), *times()))() == (f"{prefix}k", 90, 90)


# --- how an app's settings are written ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "redis", "prefix", "unread"),
    [
        (None, "only_one_redis", "only_one_prefix", "ONLY_ONE_PREFIX only_one_prefx"),
        ("CELERY", "CELERY_ONLY_ONE_REDIS", "CELERY_ONLY_ONE_PREFIX", "ONLY_ONE_PREFIX"),
        ("celery", "celery_only_one_redis", "celery_only_one_prefix", "ONLY_ONE_PREFIX"),
        ("JOBS", "JOBS_ONLY_ONE_REDIS", "JOBS_ONLY_ONE_PREFIX", "CELERY_ONLY_ONE_REDIS_URL JOBS_ONLY_ONE_URL"),
        ("JOBS_", "JOBS_ONLY_ONE_REDIS", "JOBS_ONLY_ONE_PREFIX", "JOBS_ONLY_ONE_WHEN_DOWN"),
    ],
)
def test_settings_are_read_in_the_app_s_namespace_also_after_decorating_and_others_are_warned_of_once(
    url: str, caplog: pytest.LogCaptureFixture, namespace: str | None, redis: str, prefix: str, unread: str
) -> None:
    app = Celery(f"app-{uuid4()}", set_as_current=False)
    task = a_task(app)
    outside = {"only_one_prefix": "outside of the namespace:"}
    given = {**outside, redis: url, prefix: "own:", **dict.fromkeys(unread.split(), "not read")}
    app.config_from_object(SimpleNamespace(**given), namespace=namespace)
    for _ in range(2):
        assert run(task) == "own:k"
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    text = "the configuration of the app {!r} has {}, which is not read: write {}, "
    for message, name in zip(sorted(warned), sorted(unread.split()), strict=True):
        assert message.startswith(text.format(app.main, name, redis))


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("lease", 100, "longer than"),
        ("when_busy", "only_one.fial", ": write 'only_one.fail', or 'package.module.name' of a policy"),
        ("when_busy", "no_such_package.policy", "only_one.f"),
        ("when_busy", "only_one.retry", "()"),
    ],
    ids=repr,
)
def test_a_wrong_value_of_an_app_says_what_to_write(url: str, name: str, value: Any, instead: str) -> None:
    """`test_bad_input.py` has more of them: an app's are checked as those of `configure`."""
    app = an_app(**{"only_one_redis": url, "only_one_timeout": 60, f"only_one_{name}": value})
    for _ in range(2):  # not once only
        with pytest.raises(ConfigurationError) as raised:
            run(a_task(app))
        assert f"only_one_{name}" in str(raised.value)
        assert instead in str(raised.value)


# --- whose settings ----------------------------------------------------------------------------------------------


def test_a_shared_task_has_the_settings_of_the_app_in_which_it_runs(own_server: RedisServer, url: str) -> None:
    """And of no other, where a task of one app calls that of another."""

    def work(*others: Any) -> list[Any]:
        return [places(own_server), *(run(each) for each in others), places(own_server)]

    name = f"shared-{uuid4()}"
    shared_task(name=name)(decorated(work))
    first = an_app(only_one_redis=url_of(own_server, 1), only_one_prefix="first:")
    second = an_app(result_backend=url_of(own_server, 2))
    outer, inner = ["1 first:k"], ["1 first:k", f"2 {KEY}"]
    for _ in range(2):
        assert run(first.tasks[name], second.tasks[name]) == [outer, [inner, inner], outer]
        assert run(second.tasks[name]) == [[f"2 {KEY}"]] * 2


def test_a_task_that_is_called_as_a_plain_function_has_no_apps_settings(own_server: RedisServer, url: str) -> None:
    app = an_app(only_one_redis=url_of(own_server, 1), only_one_prefix="app:")
    task, function = a_task(app, lambda: places(own_server)), decorated(lambda: places(own_server))

    def around() -> Any:
        return [task.run(), function()]

    with configure(redis=url_of(own_server, 2)):
        assert task() == task.run() == [f"2 {KEY}"]
        both = [f"2 {KEY}", "3 app:k"]
        assert run(a_task(app, around, redis=url_of(own_server, 3))) == [both, both]
        assert run(app.task(around, name="around", shared=False)) == [both[:1]] * 2


def test_a_plain_function_has_the_settings_of_the_processs_app(
    own_server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_current(*apps: Celery, default: Celery | None = None) -> None:
        monkeypatch.setattr(app_settings, "current_app", current_app)
        monkeypatch.setattr(_state, "_apps", WeakSet(apps))
        monkeypatch.setattr(_state, "default_app", default)

    def seen() -> Any:
        def work() -> list[str]:
            return [*places(own_server), *(each.key for each in held())]

        return call_with({}, work)

    first = an_app(only_one_prefix="first:", broker_url=url_of(own_server, 1))
    second = an_app(only_one_prefix="second:", broker_url=url_of(own_server, 2))
    other = an_app(only_one_prefix="nobody's:")
    first.set_as_current = second.set_as_current = True  # but not this thread's
    make_current(first, other)
    current_before = _state._tls.current_app
    with monkeypatch.context() as patch:
        patch.setenv("DJANGO_SETTINGS_MODULE", "no_such_settings")
        assert seen() == ["1 first:k", "first:k"]
    assert (_state.default_app, _state._tls.current_app) == (None, current_before)
    assert not first.configured
    assert first.conf.only_one_prefix == "first:"
    assert first.configured
    assert current_app() is first
    assert seen() == ["1 first:k", "first:k"]
    make_current(first, second, default=second)
    assert seen() == ["2 second:k", "second:k"]
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", url_of(own_server, 4))
    for default in (None, other):
        make_current(first, second, default=default)  # it would be another in each thread
        assert seen() == [f"4 {KEY}", KEY]

    def work() -> list[str]:
        return places(own_server)

    one = decorated(work)

    def run_in(app: Any) -> Any:
        return run(app.task(one, name="of both", shared=False))

    assert [run_in(first), run_in(second)] == [["4 first:k"], ["4 second:k"]]
    make_current(first, second)
    del first
    gc.collect()
    assert seen() == ["4 second:k", "second:k"]  # the other was not kept by the function that was its task, too
