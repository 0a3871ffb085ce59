"""The results of calls whose key is busy, and of calls whose server is down: of functions, and of tasks."""

# ruff: noqa: ARG001 - fixtures that configure something are asked for by name

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from only_one import buffer_one, carry_on, current_lock, fail, retry, skip
from only_one.connections.server import find_server
from only_one.errors import AlreadyRunning, ConfigurationError, LockLost, LockUnavailable
from only_one.policies import BufferOne, RequeueRequest
from tests.decorated import CLOSED, Busy, Decorate, a_task, both, decorated, own_key

# --- busy --------------------------------------------------------------------------------------------------------


@both
def test_the_policy_for_a_busy_key_gets_the_error_and_gives_the_result(
    redis: Redis, prefix: str, busy: Busy, decorate: Decorate
) -> None:
    errors: list[AlreadyRunning] = []

    def policy(error: AlreadyRunning) -> str:
        errors.append(error)
        return "instead"

    function = decorate(lambda: "ran", when_busy=policy)
    assert function() == "ran"
    with busy("k", timeout=600):
        assert decorate(lambda: "ran")() is None
        assert decorate(lambda: "ran", when_down=carry_on)() is None  # the server is not down
        assert decorate(lambda: "ran", when_lost=fail)() is None  # a call that never had the key has not lost it
        assert function() == "instead"
        with pytest.raises(AlreadyRunning) as raised:
            decorate(lambda: "ran", when_busy=fail)()
    for error in (raised.value, *errors):
        assert error.key == f"{prefix}k"
        assert error.holder is not None
        assert (error.holder.pid, error.holder.host) == (os.getpid(), socket.gethostname())
        for part in (f"{prefix}k", "Running", str(os.getpid())):
            assert part in str(error)
        assert "{" not in str(error), "the value as it is stored in Redis is not for people"
    assert len(errors) == 1


# --- down --------------------------------------------------------------------------------------------------------


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
            waiting.setblocking(False)
            waiting.connect_ex(line.getsockname())
        yield line.getsockname()[1]


@both
@pytest.mark.parametrize("fault", [partial(nullcontext, 1), never_answers, accepts_nothing])
def test_a_server_that_is_down_is_named(prefix: str, decorate: Decorate, fault: Any) -> None:
    with fault() as port, pytest.raises(LockUnavailable, match=f"{prefix}k") as raised:
        decorate(current_lock, redis=f"redis://user:hunter2@127.0.0.1:{port}/0", when_busy=skip)()
    assert raised.value.key == f"{prefix}k"
    assert f" of 127.0.0.1:{port}: " in raised.value.problem
    assert "hunter2" not in str(raised.value)
    assert isinstance(raised.value.__cause__, RedisError)


def test_a_client_that_is_made_here_waits_for_two_seconds_at_most() -> None:
    """A second attempt included, which is made at once."""
    server = find_server(CLOSED)

    async def asyncio_client() -> Any:
        return await server.async_client()

    own: Any = asyncio.run(asyncio_client())
    for client, pool in ((server.client, server.client.connection_pool), (own, own.client.connection_pool)):
        options = pool.connection_kwargs
        assert options["retry"]._retries == 0  # or a command would be sent again by two
        attempts = 1 + client.sends_again
        assert attempts == 2
        assert 1.5 < attempts * options["socket_timeout"] < 2
        assert 0.9 < attempts * options["socket_connect_timeout"] < 2
        assert pool.max_connections >= 2**31  # as many as there are calls at a time


@pytest.mark.sees_mutmut
@both
def test_a_server_that_is_down_is_one_error_with_one_cause_as_short_as_redis_py_s_own(decorate: Decorate) -> None:
    with pytest.raises(RedisError) as of_redis_py:
        Redis.from_url(CLOSED, retry=Retry(NoBackoff(), 0)).ping()
    with pytest.raises(LockUnavailable) as raised:
        decorate(current_lock, redis=CLOSED)()
    shown = [traceback.format_exception(each.value) for each in (raised, of_redis_py)]
    assert "".join(shown[0]).count("\nTraceback") <= 1  # that of the call itself
    assert shown[0][0].startswith("redis.exceptions.ConnectionError: ")
    assert len(shown[0]) <= len(shown[1])


@both
def test_carry_on_runs_without_the_key(prefix: str, decorate: Decorate) -> None:
    lock = decorate(current_lock, redis=CLOSED, when_down=carry_on)()
    assert (lock.key, lock.is_held, lock.expires_in) == (f"{prefix}k", False, 0)
    with pytest.raises(LockLost, match=f"{prefix}k") as lost:
        lock.ensure_held()
    assert (lost.value.reason, lost.value.holder) == (lock.reason, None) == ("unavailable", None)

    def work() -> None:
        assert not current_lock().is_held
        raise LookupError

    with pytest.raises(LookupError) as raised:
        decorate(work, redis=CLOSED, when_down=carry_on)()
    assert raised.value.__context__ is None


# --- tasks, where there is no worker -----------------------------------------------------------------------------


@pytest.fixture
def app(redis: Redis) -> Iterator[Celery]:
    app = Celery(f"app-{uuid4()}", set_as_current=False)
    app.conf.update(broker_url="memory://", result_backend="cache+memory://", task_always_eager=True)
    yield app
    app.close()


CALLS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda task: task.apply_async().get(),
    "apply": lambda task: task.apply().get(),
    "called": lambda task: task(),
    "its run": lambda task: task.run(),
    "a plain function": lambda task: task.__wrapped__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_where_there_is_no_message_to_requeue_the_error_is_raised(
    app: Celery, busy: Busy, prefix: str, call: Callable[[Any], Any]
) -> None:
    for policy in (retry(), retry(countdown=0.1, max_retries=3), buffer_one()):
        task = a_task(app, when_busy=policy)
        with busy("k"), pytest.raises(AlreadyRunning) as raised:
            call(task)
        assert raised.value.key == f"{prefix}k"
        assert raised.value.holder is not None
        assert "RequeueRequest" not in "".join(traceback.format_exception(raised.value))
        assert call(task) == f"{prefix}k"
    with busy("k"):
        assert call(a_task(app)) is None
    with pytest.raises(LockUnavailable) as unavailable:
        call(a_task(app, redis=CLOSED, when_down=retry()))
    assert isinstance(unavailable.value.__cause__, RedisError)
    assert "RequeueRequest" not in "".join(traceback.format_exception(unavailable.value))


@pytest.mark.parametrize("by", ["retry", "autoretry", "another key"])
def test_a_retry_within_its_own_run_is_not_busy_because_of_itself(
    app: Celery, redis: Redis, prefix: str, by: str
) -> None:
    def work(self: Any, number: int) -> list[str]:
        if self.request.retries == 2:
            return [own_key()]
        if by == "autoretry":
            raise OSError
        raise self.retry(args=(number + (by == "another key"),), countdown=0)

    function = decorated(work, key="{number}", when_busy=fail)
    retried = {"autoretry_for": (OSError,), "default_retry_delay": 0}
    task = app.task(function, bind=True, name=f"t-{uuid4()}", shared=False, **retried)
    assert task.delay(1).get() == [f"{prefix}{3 if by == 'another key' else 1}"]
    assert not redis.keys(f"{prefix}*")


# --- countdowns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "arguments", "shown", "asks_for"),
    [
        (retry, (), "retry(countdown=None, max_retries=None)", (None, None, False)),
        (retry, (2, 3), "retry(countdown=2.0, max_retries=3)", (2, 3, False)),
        (retry, (0.001, 0), "retry(countdown=0.001, max_retries=0)", (0.001, 0, False)),
        (retry, (timedelta(days=3650),), "retry(countdown=315360000.0, max_retries=None)", (315360000, None, False)),
        (buffer_one, (), "buffer_one(countdown=None)", (None, None, True)),
        (buffer_one, (timedelta(seconds=2),), "buffer_one(countdown=2.0)", (2, None, True)),
    ],
)
def test_a_policy_asks_for_a_requeue_and_can_be_shared(make: Any, arguments: Any, shown: str, asks_for: Any) -> None:
    error, policy = AlreadyRunning("k"), make(*arguments)
    with pytest.raises(RequeueRequest) as raised:
        policy(error)
    request = raised.value
    assert request.error is error
    assert (request.policy.countdown, request.policy.max_retries, isinstance(request.policy, BufferOne)) == asks_for
    assert repr(policy) == shown
    with pytest.raises(AttributeError):  # nobody can change it for the others that have it
        policy.countdown = 3
    assert {policy: "found"}[make(*arguments)] == "found"
    assert policy != make(3)


def test_a_countdown_that_would_make_the_broker_redeliver_is_refused(app: Celery, redis_url: str, prefix: str) -> None:
    """`tests/celery/test_broker.py` has the limits."""
    app.conf.broker_url = redis_url
    for option in ({"when_busy": retry(600)}, {"when_busy": buffer_one(600)}, {"when_down": retry(600)}):
        app.conf.broker_transport_options = {}
        assert a_task(app, **option).delay().get() == f"{prefix}k"
        app.conf.broker_transport_options = {"visibility_timeout": 60}
        with pytest.raises(ConfigurationError, match=r"countdown=.*visibility_timeout"):
            a_task(app, **option).delay().get()
