"""What an app's configuration says, for the runs of its tasks: between `configure` and the defaults."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, shared_task
from redis import Redis

from only_one import (
    AlreadyRunning,
    ConfigurationError,
    LockUnavailable,
    buffer_one,
    configure,
    current_lock,
    fail,
    only_one,
    retry,
    skip,
)
from only_one.errors import OnlyOneError
from only_one.holder import Holder
from only_one.testing import RedisServer, redis_server
from tests.waiting import eventually

CLOSED = "redis://127.0.0.1:1/0"
NOWHERE = {"broker_url": "memory://", "result_backend": "cache+memory://"}
cover: Any = only_one


@pytest.fixture(autouse=True)
def prefix(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is configured, and there is no environment; what a test configures is put back at its end."""
    for variable in ("ONLY_ONE_REDIS_URL", "ONLY_ONE_ACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    with configure():
        yield


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RedisServer]]:
    """Servers of which each test finds out on which of them a key is taken."""
    with redis_server() as first, redis_server() as second, redis_server() as third:
        yield [first, second, third]


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


def places(servers: list[RedisServer]) -> list[str]:
    """On which server and in which database the current run's key stands, and as what."""
    found = []
    for number, server in enumerate(servers):
        for database in (0, 3):
            with Redis.from_url(f"redis://127.0.0.1:{server.port}/{database}") as client:
                found += [f"{number}/{database} {key.decode()}" for key in client.scan_iter("*k")]
    return found


def place(servers: list[RedisServer], app: Celery, **options: Any) -> Any:
    return run(a_task(app, lambda: places(servers), **options))


# --- the server --------------------------------------------------------------------------------------------------


def test_the_server_is_the_decorators_then_configured_then_the_environments_then_the_apps(
    servers: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (server.url for server in servers)
    app = an_app(result_backend=first)
    assert place(servers, app) == ["0/0 only_one:k"]
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", second)
    assert place(servers, app) == ["1/0 only_one:k"]
    with configure(redis=third):
        assert place(servers, app) == ["2/0 only_one:k"]
        assert place(servers, app, redis=first) == ["0/0 only_one:k"]
    assert place(servers, app) == ["1/0 only_one:k"]


def test_of_an_app_it_is_the_setting_then_the_result_backend_then_the_broker(servers: list[RedisServer]) -> None:
    first, second, third = (server.url for server in servers)
    assert place(servers, an_app(only_one_redis=first, result_backend=second, broker_url=third))[0][0] == "0"
    assert place(servers, an_app(result_backend=second, broker_url=third))[0][0] == "1"
    assert place(servers, an_app(broker_url=third))[0][0] == "2"
    assert place(servers, an_app(broker_url=third, result_backend=None))[0][0] == "2"
    assert place(servers, an_app(broker_url=third, result_backend="rpc://"))[0][0] == "2"


def test_the_apps_setting_against_what_is_configured(servers: list[RedisServer]) -> None:
    first, second, _ = (server.url for server in servers)
    app = an_app(only_one_redis=first)
    with configure(redis=second):
        assert place(servers, app)[0][0] == "1"
    assert place(servers, app)[0][0] == "0"


def test_a_setting_is_a_client_a_url_or_a_callable(servers: list[RedisServer]) -> None:
    with Redis.from_url(servers[1].url) as client:
        for source in (client, servers[1].url, lambda: client, f"unix://{servers[1].unix_socket}"):
            assert place(servers, an_app(only_one_redis=source))[0][0] == "1"


@pytest.mark.parametrize("where", ["result_backend", "broker_url"])
def test_the_apps_own_server_as_celery_spells_it(servers: list[RedisServer], where: str) -> None:
    server = servers[2]
    assert place(servers, an_app(**{where: f"redis://127.0.0.1:{server.port}/3"})) == ["2/3 only_one:k"]
    assert place(servers, an_app(**{where: f"redis+socket://{server.unix_socket}"})) == ["2/0 only_one:k"]
    assert place(servers, an_app(**{where: f"redis+socket://{server.unix_socket}?virtual_host=3"})) == [
        "2/3 only_one:k"
    ]


@pytest.mark.parametrize("where", ["result_backend", "broker_url"])
def test_a_password_of_the_apps_server(where: str) -> None:
    with redis_server("--requirepass", "p@ss/w:rd") as server:
        app = an_app(**{where: f"redis://:p%40ss%2Fw%3Ard@127.0.0.1:{server.port}/0"})
        assert run(a_task(app)) == "only_one:k"


def test_the_first_of_several_brokers(servers: list[RedisServer]) -> None:
    for brokers in ([servers[1].url, servers[0].url], f"{servers[1].url};{servers[0].url}"):
        assert place(servers, an_app(broker_url=brokers))[0][0] == "1"


@pytest.mark.parametrize("settings", [NOWHERE, {"broker_url": "amqp://"}], ids=["memory", "amqp"])
def test_the_last_resort_is_localhost(settings: Any) -> None:
    program = f"""
import logging
from celery import Celery
from only_one import only_one, skip
logging.basicConfig(level=logging.INFO)
app = Celery(set_as_current=False, changes={settings!r})
@app.task
@only_one("{uuid4()}", when_down=skip)
def work(): ...
work.apply(throw=True)
"""
    output = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=30, check=True)
    assert "redis://localhost:6379/0" in output.stderr


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
    assert place(servers, an_app(**settings, only_one_redis=url))[0][0] == "1"
    assert place(servers, an_app(**{**settings, "result_backend": url}))[0][0] == "1"
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", url)
    assert place(servers, an_app(**settings))[0][0] == "1"


def test_a_server_of_the_app_that_is_down_is_known_soon() -> None:
    for settings in ({"only_one_redis": CLOSED}, {"result_backend": CLOSED}, {"broker_url": CLOSED}):
        began = time.monotonic()
        with pytest.raises(LockUnavailable):
            run(a_task(an_app(**settings)))
        assert time.monotonic() - began < 2.5


# --- the other settings ------------------------------------------------------------------------------------------


@pytest.fixture
def url(servers: list[RedisServer]) -> str:
    return servers[0].url


def test_the_prefix_is_configured_then_the_apps_then_the_default(url: str) -> None:
    assert run(a_task(an_app(only_one_redis=url))) == "only_one:k"
    app = an_app(only_one_redis=url, only_one_prefix="app:")
    assert run(a_task(app)) == "app:k"
    with configure(prefix="configured:"):
        assert run(a_task(app)) == "configured:k"


def times(url: str) -> tuple[int, float | None]:
    """How long the current run's key lives now, and how long the run may have it at the most."""
    lock = current_lock()
    with Redis.from_url(url) as client:
        left = client.pttl(lock.key)
    holder = lock.holder
    assert holder is not None
    assert isinstance(left, int)
    return round(left / 1000), None if holder.deadline is None else round(holder.deadline - holder.since)


@pytest.mark.parametrize(
    ("of_app", "configured", "decorated", "expected"),
    [
        ({}, {}, {}, (30, None)),
        ({"timeout": 600}, {}, {}, (600, 600)),
        ({"lease": 7}, {}, {}, (7, None)),
        ({"timeout": 600, "lease": 7}, {}, {}, (7, 600)),
        ({"timeout": 600, "lease": 7}, {"timeout": 500}, {}, (500, 500)),
        ({"timeout": 600, "lease": 7}, {"lease": 9}, {}, (9, None)),
        ({"timeout": 600, "lease": 7}, {"takeover": True}, {}, (7, 600)),
        ({"timeout": 600, "lease": 7}, {"timeout": 500}, {"lease": 11}, (11, None)),
        ({"timeout": 600, "lease": 7}, {}, {"timeout": 400}, (400, 400)),
        ({"lease": 500}, {}, {"timeout": 400}, (400, 400)),  # what is inherited never makes a decorator invalid
    ],
    ids=repr,
)
def test_timeout_and_lease_are_taken_together_from_one_level(
    url: str, of_app: Any, configured: Any, decorated: Any, expected: Any
) -> None:
    app = an_app(only_one_redis=url, **{f"only_one_{name}": value for name, value in of_app.items()})
    with configure(**configured):
        assert run(a_task(app, lambda: times(url), **decorated)) == expected


def test_what_the_app_says_never_makes_a_decorator_invalid(url: str) -> None:
    app = an_app(only_one_redis=url, only_one_timeout=0.1)
    assert run(a_task(app, at_least=0.2)) == "only_one:k"
    with Redis.from_url(url) as client:
        assert eventually(lambda: not client.exists("only_one:k"))


def own_policy(error: OnlyOneError) -> str:
    """A policy of the user's own, to be found by its dotted name."""
    return f"own policy for {type(error).__name__}"


class Policies:
    """Where there are policies, too."""

    @staticmethod
    def inner(error: OnlyOneError) -> str:
        return f"inner policy for {type(error).__name__}"


@pytest.fixture
def busy(url: str) -> Iterator[None]:
    """Somebody else holds the key."""
    with Redis.from_url(url) as client:
        client.set("only_one:k", "somebody else")
        yield
        client.delete("only_one:k")


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("policy", ["only_one.fail", "only_one:fail", "only_one.policies.fail", fail])
def test_when_busy_by_its_name(url: str, policy: Any) -> None:
    app = an_app(only_one_redis=url, only_one_when_busy=policy)
    with pytest.raises(AlreadyRunning):
        run(a_task(app))
    assert run(a_task(app, when_busy=skip)) is None
    with configure(when_busy=lambda _: "configured"):
        assert run(a_task(app)) == "configured"
        assert run(a_task(app, when_busy=lambda _: "decorated")) == "decorated"


@pytest.mark.usefixtures("busy")
def test_when_busy_by_the_name_of_a_policy_of_ones_own(url: str) -> None:
    found = run(a_task(an_app(only_one_redis=url, only_one_when_busy=f"{__name__}.own_policy")))
    assert found == "own policy for AlreadyRunning"


@pytest.mark.usefixtures("busy")
def test_without_a_setting_a_busy_key_gives_none(url: str) -> None:
    assert run(a_task(an_app(only_one_redis=url))) is None
    assert run(a_task(an_app(only_one_redis=url, only_one_when_busy="only_one.skip"))) is None


@pytest.fixture
def dead(url: str) -> Iterator[None]:
    """Who holds the key is dead."""
    program = f"""
import os, signal, only_one
only_one.only_one("k", 600, redis={url!r})(lambda: os.kill(os.getpid(), signal.SIGKILL))()
"""
    subprocess.run([sys.executable, "-c", program], timeout=30, check=False)
    with Redis.from_url(url) as client:
        assert Holder.parse(client.get("only_one:k")) is not None
        yield
        client.delete("only_one:k")


@pytest.mark.usefixtures("dead")
def test_takeover(url: str) -> None:
    app = an_app(only_one_redis=url, only_one_takeover=False)
    assert run(a_task(app)) is None
    with configure(takeover=False):
        assert run(a_task(an_app(only_one_redis=url, only_one_takeover=True))) is None
    assert run(a_task(app, takeover=True)) == "only_one:k"


@pytest.mark.usefixtures("dead")
def test_what_is_configured_for_takeover_wins(url: str) -> None:
    app = an_app(only_one_redis=url, only_one_takeover=False)
    with configure(takeover=True):
        assert run(a_task(app)) == "only_one:k"


@pytest.mark.usefixtures("busy")
def test_active(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = an_app(only_one_redis=url, only_one_active=False)
    task = a_task(app, lambda: "ran")
    assert run(task) == "ran"
    with configure(active=True):
        assert run(task) is None
    assert run(a_task(an_app(only_one_redis=CLOSED, only_one_active=False), lambda: "ran")) == "ran"
    app = an_app(only_one_redis=url, only_one_active=True)
    assert run(a_task(app, lambda: "ran")) is None
    with configure(active=False):
        assert run(a_task(app, lambda: "ran")) == "ran"
    monkeypatch.setenv("ONLY_ONE_ACTIVE", "0")
    assert run(a_task(an_app(only_one_redis=url), lambda: "ran")) == "ran"


# --- how they are written ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("namespace", ["CELERY", "celery", "JOBS_"])
@pytest.mark.parametrize("kind", ["object", "dict", "name"])
def test_with_a_namespace(url: str, namespace: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = namespace if namespace.endswith("_") else f"{namespace}_"
    settings = {"ONLY_ONE_REDIS": url, "ONLY_ONE_PREFIX": "only_", "ONLY_ONE_WHEN_BUSY": "only_one.fail"}
    settings["ONLY_ONE_PREFIX"] = "only_one:"
    if namespace.islower():
        settings = {name.lower(): value for name, value in settings.items()}
    settings = {begin + name: value for name, value in settings.items()}
    settings |= {"ONLY_ONE_PREFIX": "outside of the namespace:", "only_one_prefix": "outside of the namespace:"}
    app = Celery(set_as_current=False)
    source: Any = SimpleNamespace(**settings)
    if kind == "dict":
        source = settings
    elif kind == "name":
        monkeypatch.setitem(sys.modules, "settings_of_a_test", source)
        source = "settings_of_a_test"
    app.config_from_object(source, namespace=namespace)
    with pytest.raises(AlreadyRunning) as raised:
        run(a_task(app))
    assert raised.value.key == "only_one:k"


def test_from_an_object_without_a_namespace(url: str) -> None:
    app = Celery(set_as_current=False)
    app.config_from_object(SimpleNamespace(only_one_redis=url, only_one_prefix="of the object:"))
    assert run(a_task(app)) == "of the object:k"


@pytest.mark.parametrize("how", ["attribute", "update", "item", "object"])
def test_what_is_set_after_decorating(url: str, how: str) -> None:
    app = Celery(set_as_current=False)
    task = a_task(app)
    settings = {"only_one_redis": url, "only_one_prefix": "late:"}
    if how == "attribute":
        app.conf.only_one_redis, app.conf.only_one_prefix = url, "late:"
    elif how == "update":
        app.conf.update(settings)
    elif how == "item":
        for name, value in settings.items():
            app.conf[name] = value
    else:
        app.config_from_object(settings)
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
        ("redis", "http://localhost", "redis://"),
        ("prefix", "{a}", "without braces"),
        ("prefix", 5, "without braces"),
        ("timeout", 0, "write"),
        ("timeout", -1, "write"),
        ("timeout", "soon", "write"),
        ("timeout", True, "write"),
        ("lease", float("nan"), "write"),
        ("lease", "10", "write"),
        ("when_busy", "fail", "only_one.fail"),
        ("when_busy", "only_one.fial", "only_one.f"),
        ("when_busy", "no_such_package.policy", "only_one.f"),
        ("when_busy", "only_one.carry_on", "write"),
        ("when_busy", "only_one.retry", "()"),
        ("when_busy", "only_one.buffer_one", "()"),
        ("when_busy", "only_one.__all__", "write"),
        ("when_busy", 5, "write"),
        ("takeover", "no", "write"),
        ("active", "no", "write"),
        ("active", 0, "write"),
    ],
    ids=repr,
)
def test_a_wrong_value_says_what_to_write(url: str, name: str, value: Any, instead: str) -> None:
    app = an_app(**{"only_one_redis": url, f"only_one_{name}": value})
    for _ in range(2):  # not once only
        with pytest.raises(ConfigurationError) as raised:
            run(a_task(app))
        assert f"only_one_{name}" in str(raised.value)
        assert instead in str(raised.value)


def test_times_that_do_not_go_together(url: str) -> None:
    app = an_app(only_one_redis=url, only_one_timeout=5, only_one_lease=10)
    with pytest.raises(ConfigurationError, match="longer than"):
        run(a_task(app))


# --- whose settings ----------------------------------------------------------------------------------------------


def test_two_apps_with_one_shared_task(servers: list[RedisServer]) -> None:
    name = f"shared-{uuid4()}"

    def work() -> list[str]:
        return places(servers)

    shared_task(name=name)(cover(work, key="k"))
    first = an_app(only_one_redis=servers[0].url, only_one_prefix="first:")
    second = an_app(only_one_redis=servers[1].url)
    third = an_app(result_backend=servers[2].url, only_one_prefix="third:")
    for _ in range(2):
        assert run(first.tasks[name]) == ["0/0 first:k"]
        assert run(second.tasks[name]) == ["1/0 only_one:k"]
        assert run(third.tasks[name]) == ["2/0 third:k"]


def test_two_apps_exclude_each_other_where_they_share_server_and_prefix(url: str) -> None:
    first, second = an_app(only_one_redis=url), an_app(result_backend=url)
    inner = a_task(second)
    assert run(a_task(first, lambda: [current_lock().key, run(inner), current_lock().key])) == [
        "only_one:k",
        None,
        "only_one:k",
    ]
    assert run(inner) == "only_one:k"


def test_a_task_inside_another_apps_task_has_its_own_apps_settings(servers: list[RedisServer]) -> None:
    first = an_app(only_one_redis=servers[0].url, only_one_prefix="first:")
    second = an_app(only_one_redis=servers[1].url, only_one_prefix="second:")
    inner = a_task(second, lambda: places(servers))
    found = run(a_task(first, lambda: [places(servers), run(inner), places(servers)]))
    assert found == [["0/0 first:k"], ["0/0 first:k", "1/0 second:k"], ["0/0 first:k"]]


def test_a_task_that_is_called_is_a_plain_function(servers: list[RedisServer]) -> None:
    app = an_app(only_one_redis=servers[0].url, only_one_prefix="app:")
    task = a_task(app, lambda: places(servers))
    with configure(redis=servers[1].url):
        assert task() == task.run() == ["1/0 only_one:k"]

        def around() -> Any:
            return task.run()

        assert run(a_task(app, around, redis=servers[2].url)) == ["1/0 only_one:k", "2/0 app:k"]


def test_a_covered_function_in_a_task_has_no_apps_settings(servers: list[RedisServer]) -> None:
    app = an_app(only_one_redis=servers[0].url, only_one_prefix="app:")
    inner = cover(lambda: places(servers), key="k")

    def around() -> Any:
        return inner()

    with configure(redis=servers[1].url):
        assert run(app.task(around, name="around", shared=False)) == ["1/0 only_one:k"]


@pytest.mark.parametrize("policy", [None, retry(), buffer_one(), fail])
def test_a_call_from_inside_its_own_run_has_the_apps_settings_and_is_busy(url: str, policy: Any) -> None:
    app = an_app(only_one_redis=url, only_one_prefix="the-apps:")
    keys: list[str] = []

    def work() -> Any:
        keys.append(own_key())
        assert len(keys) == 1, "it has run inside of its own run"
        try:
            return [task.run()]
        except AlreadyRunning as error:
            return error.key

    task = a_task(app, work, **({} if policy is None else {"when_busy": policy}))
    assert run(task) == ([None] if policy is None else "the-apps:k")
    assert keys == ["the-apps:k"]
