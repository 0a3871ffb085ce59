"""Looking at keys and freeing them, for functions and tasks: nothing is taken to look, and nothing is freed unseen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from celery import Celery, shared_task
from celery._state import get_current_app
from redis import Redis
from redis.exceptions import NoPermissionError

from only_one import ConfigurationError, UnkeyableArgument, configure, current_lock, only_one
from only_one.inspection import held, held_key, holder_of, key_of, release, release_key
from only_one.lock.token import TokenFactory
from only_one.testing import redis_server
from rigs.waiting import LIMIT, eventually
from tests.renewal import renew_now

Busy = Callable[..., AbstractContextManager[None]]


@only_one("{name}:{feed}")
def import_feed(feed: str) -> str:
    return feed


@pytest.fixture
def app(redis: Redis, redis_url: str) -> Iterator[Any]:
    previous = get_current_app()
    made = Celery("inspected", broker=redis_url, set_as_current=False)
    made.conf.task_default_queue = f"inspected:{os.getpid()}"
    yield made
    redis.delete(made.conf.task_default_queue)
    previous.set_current()
    made.close()


def commands(redis: Redis, *names: str) -> int:
    return sum(redis.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)


def test_a_held_key_is_seen_with_its_holder(redis: Redis, prefix: str, busy: Busy) -> None:
    with busy("a", lease=1200), busy("b", timeout=600):
        found = {each.key: each for each in held()}

    assert found.keys() == {f"{prefix}a", f"{prefix}b"}
    for each in found.values():
        assert each.holder is not None
        assert (each.holder.state, each.holder.pid) == ("running", os.getpid())
        assert each.process == "alive"
    assert 1200 - LIMIT < (found[f"{prefix}a"].expires_in or 0) <= 1200
    assert 600 - LIMIT < (found[f"{prefix}b"].expires_in or 0) <= 600
    assert not list(held())
    assert not redis.exists(f"{prefix}a", f"{prefix}b")


def test_the_prefix_is_no_pattern(redis: Redis, prefix: str) -> None:
    redis.set(f"{prefix}ab:not ours", "x")
    for own in ("a*", "a?", "a[bc]", "a\\"):
        with configure(prefix=prefix + own):
            redis.set(f"{prefix}{own}k", "x")
            assert [each.key for each in held()] == [f"{prefix}{own}k"]
            redis.delete(f"{prefix}{own}k")


def test_what_stands_beside_a_key_is_not_taken_for_one(redis: Redis, prefix: str) -> None:
    redis.set(f"{{{prefix}k}}:fence", 1)

    assert not list(held())


def test_looking_takes_nothing_and_never_asks_for_all_keys() -> None:
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


@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: repr(value[:12]))
def test_a_foreign_value_is_shown_as_it_is(redis: Redis, prefix: str, value: bytes) -> None:
    redis.set(f"{prefix}k", value, px=60_000)

    (found,) = held()

    assert (found.value, found.holder, found.process) == (value, None, None)
    assert release_key(found.key, value)
    assert not redis.exists(f"{prefix}k")


def test_a_value_of_another_type_is_seen(redis: Redis, prefix: str) -> None:
    redis.lpush(f"{prefix}k", "x")

    (found,) = held()

    assert (found.key, found.value, found.holder, found.expires_in) == (f"{prefix}k", b"", None, None)


def test_a_key_that_is_no_text_is_seen_and_freed(redis: Redis, prefix: str) -> None:
    redis.set(prefix.encode() + b"\xff", "x")

    (found,) = held()

    assert held_key(found.key) == found
    assert release_key(found.key, found.value)
    assert not list(held())


class KeyGoesMeanwhile(Redis):
    """A key is gone when it has been read, and is then asked when it expires."""

    def pipeline(self, *args: Any, **options: Any) -> Any:
        made: Any = super().pipeline(*args, **options)
        send = made.execute_command
        made.execute_command = lambda name, *rest, **its: send({"GET": "GETDEL"}.get(name, name), *rest, **its)
        return made


def test_a_key_that_expires_meanwhile_has_no_time_left(redis_url: str, redis: Redis, prefix: str) -> None:
    redis.set(f"{prefix}k", "x", px=600_000)
    with KeyGoesMeanwhile.from_url(redis_url) as client:
        (found,) = held(redis=client)
    assert found.expires_in == 0.0


def test_one_key_is_seen_with_and_without_its_prefix(redis: Redis, prefix: str) -> None:
    redis.set(f"{prefix}k", "x", px=60_000)
    redis.set(f"{prefix}{prefix}l", "another")

    for key in ("k", f"{prefix}k"):
        found = held_key(key)
        assert found is not None
        assert (found.key, found.value) == (f"{prefix}k", b"x")
    found = held_key(f"{prefix}l")
    assert found is not None
    assert found.key == f"{prefix}{prefix}l"
    assert held_key("l") is None


def test_a_client_that_decodes(redis_url: str, redis: Redis, prefix: str) -> None:
    redis.set(prefix.encode() + b"\xff", b"\xff")
    with Redis.from_url(redis_url, decode_responses=True) as client:
        (found,) = held(redis=client)
        assert found.value == b"\xff"
        assert release_key(found.key, found.value, redis=client)


def test_the_key_and_holder_of_a_call(redis: Redis, prefix: str) -> None:
    seen: list[Any] = []

    @only_one("{a}")
    def function(a: int, b: int = 2) -> None:  # noqa: ARG001
        seen.append((holder_of(function, 1), holder_of(function, a=2), key_of(function, 1, b=5)))

    function(1)

    ((holder, other, key),) = seen
    assert holder is not None
    assert (holder.pid, holder.state) == (os.getpid(), "running")
    assert other is None
    assert key == f"{prefix}1"
    assert holder_of(function, 1) is None
    assert not redis.exists(f"{prefix}1")


def test_a_release_frees_and_the_run_learns_it(redis: Redis, prefix: str) -> None:
    reasons: list[str] = []

    @only_one("k", lease=600, when_lost=lambda lost: reasons.append(lost.reason))
    def function() -> bool:
        freed = release(function)
        assert not redis.exists(f"{prefix}k")
        renew_now(current_lock())
        return freed and eventually(lambda: bool(reasons))

    assert function()
    assert reasons == ["deleted"]
    assert not release(function)


def test_a_key_that_has_another_holder_by_now_is_left_alone(redis: Redis, prefix: str) -> None:
    redis.set(f"{prefix}k", "seen")
    (found,) = held()
    redis.set(f"{prefix}k", "another")

    assert not release_key(found.key, found.value)
    assert redis.get(f"{prefix}k") == b"another"
    assert release_key(found.key, "another")


@pytest.mark.parametrize("kind", ["task", "bound", "queue", "shared"])
def test_the_key_of_a_task_is_that_of_its_run(app: Celery, prefix: str, redis: Redis, kind: str) -> None:
    def plain(feed: str) -> None: ...
    def bound(self: Any, feed: str) -> None: ...

    cover = only_one("{name}:{feed}")
    name = f"t.{kind}"
    tasks: dict[str, Callable[[], Any]] = {
        "task": lambda: app.task(name=name)(cover(plain)),
        "bound": lambda: app.task(name=name, bind=True)(cover(bound)),
        "queue": lambda: cover(app.task(name=name, bind=True)(bound)),
        "shared": lambda: cover(shared_task(name=name)(plain)),
    }
    app.set_current()
    task = tasks[kind]()

    assert key_of(task, "a") == key_of(task, feed="a") == f"{prefix}{name}:a"
    redis.set(f"{prefix}{name}:a", TokenFactory(name, "the-id").token(None))
    holder = holder_of(task, "a")
    assert holder is not None
    assert holder.task_id == "the-id"
    assert release(task, "a")
    assert holder_of(task, "a") is None


def test_a_task_that_is_queued(app: Any, prefix: str) -> None:
    @only_one("{name}:{feed}")
    @app.task(name="t")  # type: ignore[untyped-decorator]
    def task(feed: str) -> None: ...

    result = task.delay("a")
    (found,) = held()
    holder = holder_of(task, "a")

    assert holder == found.holder
    assert holder is not None
    assert (found.key, holder.state, holder.task_id, found.process) == (f"{prefix}t:a", "queued", result.id, None)
    assert release(task, "a")
    assert not list(held())


def test_the_settings_of_an_app_hold_where_it_is_given(redis_url: str) -> None:
    app = Celery("own settings", broker=redis_url, set_as_current=False)
    app.conf.only_one_prefix = f"own:{os.getpid()}:"
    app.conf.only_one_redis = redis_url
    name = f"own:{os.getpid()}:k"
    with Redis.from_url(redis_url) as client, configure(prefix="another:"):
        client.set(name, "x", px=600_000)
        assert not list(held(app=app))  # what is configured for the process comes first
    from only_one import settings  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch, Redis.from_url(redis_url) as client:
        patch.setattr(settings, "current", {})
        assert [each.key for each in held(app=app)] == [name]
        assert release_key(name, "x", app=app)
        assert not client.exists(name)


def test_what_is_not_covered() -> None:
    app: Any = Celery("bare", set_as_current=False)

    @app.task  # type: ignore[untyped-decorator]
    def task() -> None: ...

    for each in (print, task, "a name", None):
        with pytest.raises(ConfigurationError, match="write @only_one above it"):
            key_of(each)  # type: ignore[arg-type]


def test_a_wrong_call_is_refused_as_it_would_be(redis: Redis) -> None:  # noqa: ARG001 - for its settings
    with pytest.raises(TypeError, match="feed"):
        key_of(import_feed)
    with pytest.raises(UnkeyableArgument):
        key_of(import_feed, object())


def test_where_the_locking_is_switched_off() -> None:
    with configure(active=False), pytest.raises(ConfigurationError, match="active=True"):
        key_of(import_feed, "a")
