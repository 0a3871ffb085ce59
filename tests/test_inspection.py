"""Looking at keys and releasing them, for functions and tasks: nothing is acquired to look, nothing released unseen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from celery import Celery, shared_task
from celery._state import get_current_app
from redis import Redis
from redis.exceptions import NoPermissionError

from only_one import ConfigurationError, UnkeyableArgument, configure, current_lock, inspection, only_one, settings
from only_one.inspection import held, held_key, holder_of, key_of, release, release_key
from only_one.lock.token import TokenFactory
from only_one.testing import redis_server
from rigs.waiting import LIMIT, eventually
from tests.decorated import decorated
from tests.renewal import renew_now


@pytest.fixture
def app(redis: Redis) -> Iterator[Any]:  # noqa: ARG001 - for its settings
    previous = get_current_app()
    made = Celery("inspected", broker="memory://", set_as_current=False)
    yield made
    previous.set_current()
    made.close()


def commands(redis: Redis, *names: str) -> int:
    return sum(redis.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)


def test_the_prefix_is_no_pattern(redis: Redis, prefix: str) -> None:
    redis.set(f"{prefix}ab:not ours", "x")
    for own in ("a*", "a?", "a[bc]", "a\\"):
        with configure(prefix=prefix + own):
            redis.set(f"{prefix}{own}k", "x")
            assert [each.key for each in held()] == [f"{prefix}{own}k"]
            redis.delete(f"{prefix}{own}k")


def test_looking_acquires_nothing_and_never_asks_for_all_keys() -> None:
    with redis_server() as server, Redis.from_url(server.url) as client, configure(redis=server.url, prefix="many:"):
        client.mset({f"many:{number}": "x" for number in range(1234)})
        client.config_resetstat()
        rows = held()
        next(rows)
        scanned = commands(client, "scan")  # for the first, not all are looked for
        assert len(list(rows)) == 1233
        assert commands(client, "scan") > scanned

        # A transaction would be one for each key in a cluster, and is nobody's right.
        assert commands(client, "keys", "set", "del", "delifeq", "delex", "eval", "multi") == 0
        assert 0 < commands(client, "scan") < 20

        for command in ("get", "pttl"):
            client.acl_setuser("default", commands=[f"-{command}"])
            with pytest.raises(NoPermissionError, match=command):
                next(held())
            client.acl_setuser("default", commands=[f"+{command}"])


FOREIGN = [b"\x1b[31mred", b"\xff\xfe\x00", b"", b"{}", b'{"only_one":1}', b"[" * 100_000]


@pytest.mark.parametrize("decode_responses", [False, True], ids=["raw", "decoding"])
@pytest.mark.parametrize("name", [b"k", b"\xff"], ids=["text", "no text"])
@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: repr(value[:12]))
def test_a_foreign_value_is_shown_as_it_is_and_released(
    redis_url: str, prefix: str, name: bytes, value: bytes, *, decode_responses: bool
) -> None:
    """On another server than the configured one, too."""
    with Redis.from_url(f"{redis_url}?db=1", decode_responses=decode_responses) as client:
        client.set(prefix.encode() + name, value)
        (found,) = held(redis=client)
        assert found[1:] == (value, None, None)
        assert found.holder is None
        assert held_key(found.key, redis=client) == found
        assert not release_key(found.key, value + b"another", redis=client)
        assert release_key(found.key, found.value, redis=client)
        assert not list(held(redis=client))


def test_a_scan_shows_each_key_once_and_one_that_has_expired_since_has_no_time_left() -> None:
    """SCAN may show a key again, and a key may expire before it is read."""
    client = Mock()
    client.send_raw.side_effect = [[b"7", [b"a"]], [b"8", []], [b"9", [b"b"]], [b"0", [b"a"]]]
    client.send.side_effect = [[b"x", -1], [b"x", -2]]  # of GET and PTTL
    server: Any = SimpleNamespace(client=client)
    found = [(each.key, each.value, each.expires_in) for each in inspection._scan(server, "*")]
    assert found == [("a", b"x", None), ("b", b"x", 0.0)]


def test_one_key_is_seen_with_and_without_its_prefix(redis: Redis, prefix: str) -> None:
    stored = {f"{prefix}k": b"x", f"{prefix}{prefix}l": b"another"}
    redis.mset({**stored, f"not ours:{prefix}m": b"x"})
    for given, key in {"k": f"{prefix}k", f"{prefix}k": f"{prefix}k", f"{prefix}l": f"{prefix}{prefix}l"}.items():
        found = held_key(given)
        assert found is not None
        assert (found.key, found.value) == (key, stored[key])
    for given in ("l", f"not ours:{prefix}m"):
        assert held_key(given) is None


@pytest.mark.parametrize("decode_responses", [False, True])
def test_a_release_frees_the_key_of_a_call_and_the_run_learns_it(
    redis_url: str, redis: Redis, prefix: str, *, decode_responses: bool
) -> None:
    reasons: list[str] = []
    client = Redis.from_url(redis_url, decode_responses=decode_responses)

    def work(a: int, b: int = 2) -> bool:  # noqa: ARG001
        holder = holder_of(function, 1)
        assert holder is not None
        assert (holder.pid, holder.state) == (os.getpid(), "running")
        assert holder_of(function, a=2) is None
        assert key_of(function, 1, b=5) == f"{prefix}1"
        assert release(function, a=1)
        assert not redis.exists(f"{prefix}1")
        renew_now(current_lock())
        return eventually(lambda: bool(reasons))

    function = decorated(work, "{a}", lease=600, redis=client, when_lost=lambda lost: reasons.append(lost.reason))
    assert function(1)
    assert reasons == ["deleted"]
    assert holder_of(function, 1) is None
    assert not release(function, 1)
    client.close()


@pytest.mark.parametrize("kind", ["bound", "queue", "shared"])
def test_the_key_of_a_task_is_that_of_its_run(app: Celery, prefix: str, redis: Redis, kind: str) -> None:
    def plain(feed: str) -> None: ...
    def bound(self: Any, feed: str) -> None: ...

    decorate = only_one("{name}:{feed}")
    name = f"t.{uuid4()}"
    tasks: dict[str, Callable[[], Any]] = {
        "bound": lambda: app.task(name=name, bind=True)(decorate(bound)),
        "queue": lambda: decorate(app.task(name=name, bind=True)(bound)),
        "shared": lambda: decorate(shared_task(name=name)(plain)),
    }
    app.set_current()
    task = tasks[kind]()

    assert key_of(task, "a") == key_of(task, feed="a") == f"{prefix}{name}:a"
    expected: Any = ("running", "the-id", "dead")  # this process has no such run
    if kind == "queue":
        expected = ("queued", task.delay("a").id, None)
    else:
        redis.set(f"{prefix}{name}:a", TokenFactory(name, "the-id").token(None))
    (found,) = held()
    holder = holder_of(task, "a")
    assert holder == found.holder
    assert holder is not None
    assert (holder.state, holder.task_id, found.process) == expected
    assert release(task, "a")
    assert holder_of(task, "a") is None


def test_the_settings_of_an_app_hold_where_it_is_given(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("own settings", broker=redis_url, set_as_current=False)
    app.conf.only_one_prefix = f"own:{os.getpid()}:"
    key = f"own:{os.getpid()}:k"
    with Redis.from_url(redis_url) as client:
        client.set(key, "x", ex=10**6)
        with configure(prefix="another:"):
            assert not list(held(app=app))  # what is configured for the process comes first
        monkeypatch.setattr(settings, "current", {})
        (found,) = held(app=app)
        assert found.key == key
        assert found.expires_in == pytest.approx(10**6, abs=LIMIT)
        assert held_key("k", app=app) is not None
        assert release_key(key, "x", app=app)
        assert not client.exists(key)


def test_a_wrong_call_is_refused() -> None:
    def work(feed: str) -> None: ...

    function, bare = decorated(work, "{feed}"), Celery("bare", set_as_current=False)
    not_decorated: list[Any] = [print, bare.task(work), "a name", None]
    for each in not_decorated:
        with pytest.raises(ConfigurationError, match="write @only_one above it"):
            key_of(each)
    with pytest.raises(TypeError, match="feed"):
        key_of(function)
    with pytest.raises(UnkeyableArgument):
        key_of(function, object())
    with configure(active=False), pytest.raises(ConfigurationError, match=r"^the locking is .*active=True"):
        key_of(function, "a")
