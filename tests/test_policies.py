"""What a call gives when its key is taken, and when the server cannot be asked: of functions, and of tasks."""

# ruff: noqa: ARG001 - fixtures that configure something are asked for by name

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, chain, chord, group
from pydantic import BaseModel
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from only_one import (
    AlreadyRunning,
    ConfigurationError,
    KeyTemplateError,
    LockLost,
    LockUnavailable,
    buffer_one,
    carry_on,
    current_lock,
    fail,
    only_one,
    retry,
    skip,
)
from only_one.connections.server import find_server
from only_one.policies import RequeueRequest
from rigs.servers import RedisServer
from rigs.waiting import eventually

KeyIsBusy = Callable[..., AbstractContextManager[None]]
Make = Callable[..., Callable[[], Any]]
CLOSED = "redis://127.0.0.1:1/0"
cover: Any = only_one


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
        assert make(key="k", when_down=carry_on)() is None  # the server is not down
        assert make(key="k", when_lost=fail)() is None  # nothing is lost by who never had it


def test_fail_raises_with_the_holder(redis: Redis, prefix: str, busy: KeyIsBusy, make: Make) -> None:
    with busy("k", timeout=600), pytest.raises(AlreadyRunning) as raised:
        make(key="k", when_busy=fail)()
    error = raised.value
    assert error.key == f"{prefix}k"
    assert error.task_id is None
    assert error.holder is not None
    assert error.holder.pid == os.getpid()
    assert error.holder.host == socket.gethostname()
    assert error.holder.name.endswith("hold_it")
    assert error.holder.state == "running"
    assert error.holder.deadline == pytest.approx(time.time() + 600, abs=120)
    for part in (f"{prefix}k", "hold_it", str(os.getpid())):
        assert part in str(error)
    assert "{" not in str(error), "the value as it stands in Redis is not for people"


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
    assert [(type(error), error.key) for error in told] == [(AlreadyRunning, f"{prefix}k")]


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


FAULTS: list[Any] = [refuses, never_answers, accepts_nothing]


def url_of(port: int) -> str:
    """Where a client connects."""
    return f"redis://127.0.0.1:{port}/0"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_down_is_told(prefix: str, make: Make, fault: Any) -> None:
    with fault() as port, pytest.raises(LockUnavailable, match=f"{prefix}k") as raised:
        make(key="k", redis=url_of(port), when_busy=skip)()
    assert raised.value.key == f"{prefix}k"
    assert isinstance(raised.value.__cause__, RedisError)


def test_a_server_that_is_down_is_one_error_with_one_cause_as_short_as_redis_py_s_own(make: Make) -> None:
    with pytest.raises(RedisError) as of_redis_py:
        Redis.from_url(CLOSED, retry=Retry(NoBackoff(), 0)).ping()
    with pytest.raises(LockUnavailable) as raised:
        make(key="k", redis=CLOSED)()
    shown = [traceback.format_exception(each.value) for each in (raised, of_redis_py)]
    assert "".join(shown[0]).count("\nTraceback") <= 1  # that of the call itself
    assert shown[0][0].startswith("redis.exceptions.ConnectionError: ")
    assert len(shown[0]) <= len(shown[1])


def test_a_client_that_is_made_here_waits_for_two_seconds_at_most() -> None:
    """A second attempt included, which is made at once; the time itself is in the next test."""

    async def twin() -> Any:
        return await server.async_client()

    server = find_server(CLOSED)
    asyncio_client = asyncio.run(twin())
    for client, pool in (
        (server.client, server.client.connection_pool),
        (asyncio_client, asyncio_client.client.connection_pool),
    ):
        options = pool.connection_kwargs
        assert options["retry"]._retries == 0  # or a command would be sent again by two
        attempts = 1 + client.sends_again
        assert attempts == 2
        assert 1.5 < attempts * options["socket_timeout"] < 2
        assert 0.9 < attempts * options["socket_connect_timeout"] < 2
        assert pool.max_connections >= 2**31  # as many as there are calls at a time


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_down_is_known_soon(make: Make, fault: Any, record_property: Any) -> None:
    with fault() as port:
        covered = make(key="k", redis=url_of(port))
        begun = time.monotonic()
        with pytest.raises(LockUnavailable):
            covered()
        seconds = time.monotonic() - begun
    record_property("known after seconds", seconds)
    assert seconds < 2.3


def test_carry_on_runs_without_the_key(prefix: str, make: Make) -> None:
    lock: Any = make(key="k", redis=CLOSED, when_down=carry_on)()
    assert lock.key == f"{prefix}k"
    assert lock.is_held is False
    assert lock.reason == "unavailable"
    assert lock.expires_in == 0
    with pytest.raises(LockLost) as raised:
        lock.ensure_held()
    assert (raised.value.key, raised.value.reason, raised.value.holder) == (f"{prefix}k", "unavailable", None)
    assert f"{prefix}k" in str(raised.value)


def test_carry_on_keeps_the_exception_of_the_run() -> None:
    def work() -> None:
        assert not current_lock().is_held
        raise LookupError

    with pytest.raises(LookupError) as raised:
        only_one(work, key="k", redis=CLOSED, when_down=carry_on)()
    assert raised.value.__context__ is None


def test_other_policies_when_the_server_is_down(prefix: str, make: Make) -> None:
    assert make(key="k", redis=CLOSED, when_down=skip)() is None
    told: Any = make(key="k", redis=CLOSED, when_down=lambda error: error)()
    assert type(told) is LockUnavailable
    assert told.key == f"{prefix}k"
    assert isinstance(told.__cause__, RedisError)
    assert "connecting to 127.0.0.1:1" in str(told), "the cause is not told"
    with pytest.raises(LockUnavailable):
        make(key="k", redis=CLOSED, when_down=fail)()


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
    assert eventually(lambda: not isinstance(covered(), AlreadyRunning)), "still taken by a call that has given up"


# --- tasks, where there is no worker -----------------------------------------------------------------------------


@pytest.fixture
def app(redis: Redis) -> Iterator[Celery]:
    app = Celery(f"app-{uuid4()}", set_as_current=False)
    app.conf.update(broker_url="memory://", result_backend="cache+memory://", task_always_eager=True)
    yield app
    app.close()


def a_task(app: Celery, function: Any = None, *, key: str = "k", bind: bool = False, **options: Any) -> Any:
    def work(value: Any = None) -> Any:
        return value or current_lock().key

    covered = cover(function or work, key=key, **options)
    return app.task(covered, name=f"task-{uuid4()}", shared=False, bind=bind)


CALLS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda task: task.apply_async().get(),
    "apply": lambda task: task.apply().get(),
    "called": lambda task: task(),
    "its run": lambda task: task.run(),
}


@pytest.mark.parametrize("how", CALLS)
def test_where_nothing_can_be_put_back(app: Celery, busy: KeyIsBusy, prefix: str, how: str) -> None:
    call = CALLS[how]
    for policy in (retry(), retry(countdown=0.1, max_retries=3), buffer_one()):
        task = a_task(app, when_busy=policy)
        with busy("k"), pytest.raises(AlreadyRunning) as raised:
            call(task)
        assert raised.value.key == f"{prefix}k"
        assert raised.value.holder is not None
        assert shows_no_request(raised.value)
        assert call(task) == f"{prefix}k"
    with busy("k"):
        assert call(a_task(app)) is None
    with pytest.raises(LockUnavailable) as unavailable:
        call(a_task(app, redis=CLOSED, when_down=retry()))
    assert isinstance(unavailable.value.__cause__, RedisError)
    assert shows_no_request(unavailable.value)


def shows_no_request(error: Exception) -> bool:
    """Whether the traceback of an error has nothing of how a policy asks for a requeue."""
    return "RequeueRequest" not in "".join(traceback.format_exception(error))


def test_a_plain_function_has_no_task_to_put_back(redis: Redis, busy: KeyIsBusy) -> None:
    for policy in (retry(), buffer_one()):
        with busy("k"), pytest.raises(AlreadyRunning) as raised:
            only_one("k", when_busy=policy)(lambda: None)()
        assert shows_no_request(raised.value)


@pytest.mark.parametrize("options", [{}, {"when_busy": retry()}, {"when_busy": buffer_one()}], ids=repr)
def test_a_retry_within_its_own_run_is_not_skipped_behind_itself(
    app: Celery, redis: Redis, prefix: str, options: Any
) -> None:
    seen = []

    def work(self: Any) -> str:
        seen.append((self.request.retries, current_lock().is_held))
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return "done"

    assert a_task(app, work, bind=True, **options).delay().get() == "done"
    assert seen == [(0, True), (1, True), (2, True)]
    assert not redis.exists(f"{prefix}k")


def test_an_autoretry_within_its_own_run(app: Celery, redis: Redis, prefix: str) -> None:
    seen = []

    @app.task(bind=True, autoretry_for=(OSError,), default_retry_delay=0, shared=False, name=f"auto-{uuid4()}")  # type: ignore[untyped-decorator]
    @only_one("k", when_busy=fail)
    def work(self: Any) -> str:
        seen.append(self.request.retries)
        if self.request.retries < 2:
            raise OSError
        return "done"

    assert work.delay().get() == "done"
    assert seen == [0, 1, 2]
    assert not redis.exists(f"{prefix}k")


def test_a_retry_with_other_arguments_takes_the_other_key(app: Celery, prefix: str) -> None:
    seen = []

    def work(self: Any, number: int) -> str:
        seen.append(current_lock().key.removeprefix(prefix))
        if number < 3:
            raise self.retry(args=(number + 1,), countdown=0)
        return "done"

    assert a_task(app, work, key="k-{number}", bind=True, when_busy=fail).delay(1).get() == "done"
    assert seen == ["k-1", "k-2", "k-3"]


def test_a_callable_that_makes_the_key_of_a_bound_task_is_not_given_the_task(app: Celery, prefix: str) -> None:
    def work(self: Any, number: int) -> str:
        return current_lock().key

    made: Any = {"key": lambda number: f"k-{number}"}
    assert a_task(app, work, bind=True, **made).delay(1).get() == f"{prefix}k-1"
    covered: Any = only_one(**made)(work)
    with pytest.raises(KeyTemplateError, match="self"):  # for a plain function, of which it could not be known before
        covered(None, 1)


def test_another_run_from_inside_a_run_is_busy(app: Celery) -> None:
    seen: list[Any] = []

    def work(depth: int) -> str:
        if depth:
            seen.extend([task.delay(depth - 1).result, task(depth - 1), task.run(depth - 1)])
        return "ran"

    task = a_task(app, work)
    assert task.delay(1).get() == "ran"
    assert seen == [None, None, None]


def gather(values: list[Any]) -> list[Any]:
    return values


def test_an_eager_chord_and_group(app: Celery, busy: KeyIsBusy, prefix: str) -> None:
    first, other, total = a_task(app), a_task(app, key="other"), app.task(gather, name="total", shared=False)
    with busy("k"):
        assert group(first.si(), other.si()).apply().get() == [None, f"{prefix}other"]
        # None of these is said by Celery to have others after it.
        assert chord([first.si(), other.si()], total.s()).apply().get() == [None, f"{prefix}other"]
        assert chain(first.si(), total.s()).apply().get() is None
    assert chord([first.si(), other.si()], total.s()).apply().get() == [f"{prefix}k", f"{prefix}other"]


def test_a_base_class_with_a_call_of_its_own(app: Celery, busy: KeyIsBusy, prefix: str) -> None:
    calls = []

    class Base(Task):  # type: ignore[misc]  # Celery has no types
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return super().__call__(*args, **kwargs)

    @app.task(base=Base, shared=False, name="based")  # type: ignore[untyped-decorator]
    @only_one("k", when_busy=fail)
    def work(value: int) -> list[Any]:
        return [value, current_lock().key]

    assert work.delay(1).get() == [1, f"{prefix}k"]
    with busy("k"), pytest.raises(AlreadyRunning):
        work.delay(2).get()
    assert calls == [(1,), (2,)]


def test_a_task_with_a_model(app: Celery, busy: KeyIsBusy, prefix: str) -> None:
    class Feed(BaseModel):
        key: str
        pages: int = 1

    def work(feed: Feed) -> Feed:
        return Feed(key=current_lock().key, pages=feed.pages)

    work.__annotations__.update(feed=Feed, **{"return": Feed})  # which are local to this test
    covered = only_one("{feed.key}", when_busy=fail)(work)
    task = app.task(pydantic=True, shared=False, name="modelled")(covered)
    assert task.delay({"key": "k", "pages": 3}).get() == {"key": f"{prefix}k", "pages": 3}
    with busy("k"), pytest.raises(AlreadyRunning):
        task.delay({"key": "k"}).get()


# --- countdowns --------------------------------------------------------------------------------------------------


def test_countdowns_that_work() -> None:
    assert retry(1).countdown == retry(timedelta(seconds=1)).countdown == 1
    assert buffer_one(timedelta(seconds=2)).countdown == 2
    assert retry(max_retries=0).max_retries == 0
    assert retry().countdown is retry().max_retries is buffer_one().countdown is None
    assert retry(0.001).countdown == 0.001
    assert retry(timedelta(days=10 * 365)).countdown == 10 * 365 * 24 * 3600


@pytest.mark.parametrize(
    ("policy", "shown", "wish"),
    [
        (retry(2, 3), "retry(countdown=2.0, max_retries=3)", (2, 3, False)),
        (buffer_one(2), "buffer_one(countdown=2.0)", (2, None, True)),
        (retry(), "retry(countdown=None, max_retries=None)", (None, None, False)),
    ],
)
def test_what_a_policy_wishes(policy: Any, shown: str, wish: Any) -> None:
    error = AlreadyRunning("k")
    with pytest.raises(RequeueRequest) as raised:
        policy(error)
    assert raised.value.error is error
    assert (raised.value.countdown, raised.value.max_retries, raised.value.only_newest) == wish
    assert repr(policy) == shown
    bare = RequeueRequest(error)
    assert (bare.countdown, bare.max_retries, bare.only_newest) == (None, None, False)


@pytest.mark.parametrize("make_policy", [retry, buffer_one])
def test_a_policy_can_be_shared(make_policy: Callable[..., Any]) -> None:
    """Nobody can change it for the others that were given it, and it can be looked up by its value."""
    policy = make_policy(2)
    with pytest.raises(AttributeError):
        policy.countdown = 3
    assert policy.countdown == 2
    assert {policy: "found"}[make_policy(2)] == "found"
    assert policy != make_policy(3)


@pytest.mark.parametrize("policy", [retry(1.1), buffer_one(1.1)], ids=repr)
def test_a_countdown_that_would_make_the_broker_deliver_copies(app: Celery, redis_url: str, policy: Any) -> None:
    app.conf.update(broker_url=redis_url, broker_transport_options={"visibility_timeout": 3})
    with pytest.raises(ConfigurationError, match=r"countdown=.*visibility_timeout|visibility timeout"):
        a_task(app, when_busy=policy).delay().get()
    app.conf.update(broker_transport_options={"visibility_timeout": 3600})
    assert a_task(app, when_busy=policy).delay(1).get() == 1


def test_a_countdown_against_the_brokers_default(app: Celery, redis_url: str) -> None:
    app.conf.update(broker_url=redis_url)
    assert a_task(app, when_busy=retry(1200)).delay(1).get() == 1
    with pytest.raises(ConfigurationError, match="1201"):
        a_task(app, when_busy=retry(1201)).delay().get()
