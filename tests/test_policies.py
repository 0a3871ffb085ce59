"""What a call gives when its key is taken, and when the server cannot be asked."""

# ruff: noqa: ARG001 - fixtures that configure something are asked for by name

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from only_one import (
    AlreadyRunning,
    LockLost,
    LockUnavailable,
    carry_on,
    configure,
    current_lock,
    fail,
    only_one,
    skip,
)
from only_one.testing import RedisServer

KeyIsBusy = Callable[..., AbstractContextManager[None]]
Make = Callable[..., Callable[[], Any]]
cover: Any = only_one
KNOWN_WITHIN = 2.3
"""Seconds within which a server that is down is known to be, with a client made here: two, and some for the machine."""


@pytest.fixture(params=["def", "async def"])
def make(request: pytest.FixtureRequest) -> Make:
    """What covers a function, sync or async, that gives the lock under which it ran: `make("k", timeout=3)`."""

    def sync(*args: Any, **options: Any) -> Any:
        return cover(current_lock, *args, **options)

    def async_(*args: Any, **options: Any) -> Callable[[], Any]:
        async def work() -> object:
            return current_lock()

        covered = cover(work, *args, **options)
        assert inspect.iscoroutinefunction(covered)
        return lambda: asyncio.run(covered())

    return sync if request.param == "def" else async_


# --- busy --------------------------------------------------------------------------------------------------------


def test_the_default_gives_none(redis: Redis, busy: KeyIsBusy, make: Make) -> None:
    assert make(key="k")() is not None
    with busy("k"):
        assert make(key="k")() is None


def test_skip_gives_none(redis: Redis, busy: KeyIsBusy, make: Make) -> None:
    with busy("k"), configure(when_busy=fail):
        assert make(key="k", when_busy=skip)() is None


def test_fail_raises_with_the_holder(redis: Redis, prefix: str, busy: KeyIsBusy, make: Make) -> None:
    with busy("k", timeout=60), pytest.raises(AlreadyRunning) as raised:
        make(key="k", when_busy=fail)()
    error = raised.value
    assert error.key == f"{prefix}k"
    assert error.task_id is None
    assert error.holder is not None
    assert error.holder.pid == os.getpid()
    assert error.holder.host == socket.gethostname()
    assert error.holder.name.endswith("hold_it")
    assert error.holder.state == "running"
    assert error.holder.deadline == pytest.approx(time.time() + 60, abs=5)
    for part in (f"{prefix}k", "hold_it", str(os.getpid())):
        assert part in str(error)


def test_a_callable_is_told_the_error_and_gives_the_result(
    redis: Redis, prefix: str, busy: KeyIsBusy, make: Make
) -> None:
    told: list[AlreadyRunning] = []

    def policy(error: AlreadyRunning) -> str:
        told.append(error)
        return "instead"

    covered = make(key="k", when_busy=policy)
    assert covered() != "instead"
    assert told == []
    with busy("k"):
        assert covered() == "instead"
    assert [type(error) for error in told] == [AlreadyRunning]
    assert told[0].key == f"{prefix}k"


def test_what_a_callable_raises_comes_out(redis: Redis, busy: KeyIsBusy, make: Make) -> None:
    def policy(error: AlreadyRunning) -> str:
        raise LookupError(error.key)

    with busy("k"), pytest.raises(LookupError):
        make(key="k", when_busy=policy)()


def test_what_is_no_holder_of_ours_is_busy_all_the_same(redis: Redis, prefix: str, make: Make) -> None:
    for value in ("somebody else's", '{"a": 1}', "[]", b"\xff\xfe", "", "null"):
        redis.set(f"{prefix}k", value)
        with pytest.raises(AlreadyRunning) as raised:
            make(key="k", when_busy=fail)()
        assert raised.value.holder is None
        assert raised.value.task_id is None
        assert f"{prefix}k" in str(raised.value)
        assert redis.delete(f"{prefix}k") == 1


def test_policies_are_plain_callables() -> None:
    error = AlreadyRunning("k")
    skip(error)
    with pytest.raises(AlreadyRunning) as raised:
        fail(error)
    assert raised.value is error


# --- down --------------------------------------------------------------------------------------------------------


@contextmanager
def refuses() -> Iterator[int]:
    """A port on which nobody listens."""
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        yield line.getsockname()[1]


@contextmanager
def never_answers() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as line:
        yield line.getsockname()[1]


@contextmanager
def accepts_nothing() -> Iterator[int]:
    """A port whose queue is full, so that what is sent to it is dropped."""
    with ExitStack() as lines:
        line = lines.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(20):
            waiting = lines.enter_context(socket.socket())
            waiting.settimeout(0.2)
            if connects_in_time(waiting, line.getsockname()):
                continue
            yield line.getsockname()[1]
            return
        pytest.fail("this system's queues have no end")


def connects_in_time(line: socket.socket, address: tuple[str, int]) -> bool:
    """Whether somebody takes the connection."""
    try:
        line.connect(address)
    except TimeoutError:
        return False
    return True


Fault = Callable[[], AbstractContextManager[int]]


def url_of(port: int) -> str:
    """Where a client connects."""
    return f"redis://127.0.0.1:{port}/0"


@pytest.mark.parametrize("fault", [refuses, never_answers, accepts_nothing])
def test_a_server_that_is_down_is_known_soon(prefix: str, make: Make, fault: Fault) -> None:
    with fault() as port:
        covered = make(key="k", redis=url_of(port))
        begun = time.monotonic()
        with pytest.raises(LockUnavailable) as raised:
            covered()
        assert time.monotonic() - begun < KNOWN_WITHIN
    assert raised.value.key == f"{prefix}k"
    assert isinstance(raised.value.__cause__, RedisError)
    assert f"{prefix}k" in str(raised.value)


@pytest.mark.parametrize("fault", [refuses, never_answers])
def test_carry_on_runs_without_the_key(prefix: str, make: Make, fault: Fault) -> None:
    with fault() as port:
        begun = time.monotonic()
        lock = make(key="k", redis=url_of(port), when_down=carry_on)()
        assert time.monotonic() - begun < KNOWN_WITHIN
    assert lock.key == f"{prefix}k"
    assert lock.is_held is False
    assert lock.reason == "unavailable"
    assert lock.expires_in == 0
    with pytest.raises(LockLost) as raised:
        lock.ensure_held()
    assert raised.value.key == f"{prefix}k"
    assert raised.value.reason == "unavailable"


def test_carry_on_keeps_the_exception_of_the_run() -> None:
    def work() -> None:
        assert not current_lock().is_held
        raise LookupError

    with refuses() as port, pytest.raises(LookupError) as raised:
        only_one(work, key="k", redis=url_of(port), when_down=carry_on)()
    assert raised.value.__context__ is None


def test_skip_gives_none_when_the_server_is_down(make: Make) -> None:
    with refuses() as port:
        assert make(key="k", redis=url_of(port), when_down=skip)() is None


def test_fail_is_the_same_as_the_default_when_the_server_is_down(make: Make) -> None:
    with refuses() as port, pytest.raises(LockUnavailable):
        make(key="k", redis=url_of(port), when_down=fail)()


def test_a_callable_gives_the_result_when_the_server_is_down(prefix: str, make: Make) -> None:
    told: list[LockUnavailable] = []

    def policy(error: LockUnavailable) -> str:
        told.append(error)
        return "instead"

    with refuses() as port:
        assert make(key="k", redis=url_of(port), when_down=policy)() == "instead"
    assert [error.key for error in told] == [f"{prefix}k"]
    assert isinstance(told[0].__cause__, RedisError)


def test_what_a_callable_raises_comes_out_when_the_server_is_down(make: Make) -> None:
    def policy(error: LockUnavailable) -> str:
        raise LookupError(error.key)

    with refuses() as port, pytest.raises(LookupError):
        make(key="k", redis=url_of(port), when_down=policy)()


def test_when_busy_is_not_asked_when_the_server_is_down(make: Make) -> None:
    with refuses() as port, pytest.raises(LockUnavailable):
        make(key="k", redis=url_of(port), when_busy=skip)()


def test_when_down_is_not_asked_when_the_key_is_taken(redis: Redis, busy: KeyIsBusy, make: Make) -> None:
    with busy("k"):
        assert make(key="k", when_down=carry_on)() is None


def test_a_server_that_is_back_is_used_at_once(server: RedisServer, make: Make) -> None:
    covered = make(key="k", when_down=lambda _: "down")
    assert covered() != "down"
    server.kill()
    assert covered() == "down"
    server.start()
    assert covered() != "down"


def test_a_call_that_gave_up_leaves_no_ghost(server: RedisServer, make: Make) -> None:
    covered = make(key="k", when_down=lambda _: "down", when_busy=lambda error: error)
    server.pause()
    assert covered() == "down"
    server.resume()  # and now it carries out what it was sent
    deadline = time.monotonic() + 5
    while isinstance(result := covered(), AlreadyRunning):
        assert time.monotonic() < deadline, f"still taken by a call that has given up: {result}"
        time.sleep(0.01)
    assert result != "down"


@pytest.mark.parametrize("other", ["list", "hash", "set"])
def test_a_value_of_another_type_is_no_busy_key(redis: Redis, prefix: str, make: Make, other: str) -> None:
    key = f"{prefix}k"
    {"list": redis.rpush, "hash": lambda k, v: redis.hset(k, v, v), "set": redis.sadd}[other](key, "x")
    with pytest.raises(LockUnavailable, match=key) as raised:
        make(key="k")()
    assert "WRONGTYPE" in str(raised.value) or other in str(raised.value)
    assert redis.type(key) == other.encode()
    assert make(key="k", when_down=carry_on)().reason == "unavailable"


def test_an_answer_that_refuses_is_down_too(server: RedisServer, prefix: str, make: Make) -> None:
    with Redis.from_url(server.url) as client:
        client.config_set("requirepass", "hunter2")
        client.close()
    with pytest.raises(LockUnavailable, match=f"{prefix}k") as raised:
        make(key="k")()
    assert isinstance(raised.value.__cause__, RedisError)
    assert make(key="k", redis=server.url.replace("//", "//:hunter2@"))() is not None


def test_a_server_that_is_full_is_down_too(server: RedisServer, make: Make) -> None:
    with Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1")
        client.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(LockUnavailable, match="memory"):
            make(key="k")()
