"""Policies of tasks where there is no worker: in eager mode, called as functions, and written wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, chain, chord, group
from pydantic import BaseModel
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

KeyIsBusy = Callable[..., AbstractContextManager[None]]
CLOSED = "redis://127.0.0.1:1/0"
cover: Any = only_one
pytestmark = pytest.mark.usefixtures("redis")

POLICIES: dict[str, dict[str, Any]] = {
    "not given": {},
    "skip": {"when_busy": skip},
    "fail": {"when_busy": fail},
    "retry": {"when_busy": retry()},
    "retry, limited": {"when_busy": retry(countdown=0.1, max_retries=3)},
    "buffer_one": {"when_busy": buffer_one()},
    "callable": {"when_busy": lambda error: f"{error.key} is busy"},
}
RAISE = {"fail", "retry", "retry, limited", "buffer_one"}


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery(f"app-{uuid4()}", set_as_current=False)
    app.conf.update(broker_url="memory://", result_backend="cache+memory://", task_always_eager=True)
    yield app
    app.close()


def a_task(app: Celery, *options: Any, key: str = "k", **more: Any) -> Any:
    def work(value: Any = None) -> Any:
        return value or current_lock().key

    return app.task(cover(work, *options, key=key, **more), name=f"task-{uuid4()}", shared=False)


CALLS: dict[str, Callable[[Any], Any]] = {
    "eager delay": lambda task: task.delay().get(),
    "eager apply_async": lambda task: task.apply_async().get(),
    "apply": lambda task: task.apply().get(),
    "called": lambda task: task(),
    "its run": lambda task: task.run(),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_key_that_is_busy_where_nothing_can_be_put_back(
    app: Celery, busy: KeyIsBusy, prefix: str, how: str, policy: str
) -> None:
    task, call = a_task(app, **POLICIES[policy]), CALLS[how]
    with busy("k"):
        if policy in RAISE:
            with pytest.raises(AlreadyRunning) as raised:
                call(task)
            assert raised.value.key == f"{prefix}k"
            assert raised.value.holder is not None
        else:
            assert call(task) == (f"{prefix}k is busy" if policy == "callable" else None)
    assert call(task) == f"{prefix}k"


@pytest.mark.parametrize("how", CALLS)
def test_a_server_that_is_down_where_nothing_can_be_put_back(app: Celery, how: str) -> None:
    with pytest.raises(LockUnavailable):
        CALLS[how](a_task(app, redis=CLOSED, when_down=retry()))


def test_a_plain_function_has_no_task_to_put_back(busy: KeyIsBusy) -> None:
    for policy in (retry(), buffer_one()):
        with busy("k"), pytest.raises(AlreadyRunning):
            only_one("k", when_busy=policy)(lambda: None)()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retry_within_its_own_run_is_not_skipped_behind_itself(
    app: Celery, redis: Redis, prefix: str, policy: str
) -> None:
    seen = []

    @app.task(bind=True, max_retries=3, shared=False, name=f"retries-{uuid4()}")  # type: ignore[untyped-decorator]
    @cover("k", **POLICIES[policy])  # type: ignore[untyped-decorator]
    def work(self: Any) -> str:
        seen.append((self.request.retries, current_lock().is_held))
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return "done"

    assert work.delay().get() == "done"
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

    @app.task(bind=True, shared=False, name=f"others-{uuid4()}")  # type: ignore[untyped-decorator]
    @only_one("k-{number}", when_busy=fail)
    def work(self: Any, number: int) -> str:
        seen.append(current_lock().key.removeprefix(prefix))
        if number < 3:
            raise self.retry(args=(number + 1,), countdown=0)
        return "done"

    assert work.delay(1).get() == "done"
    assert seen == ["k-1", "k-2", "k-3"]


def test_another_run_from_inside_a_run_is_busy(app: Celery) -> None:
    seen: list[Any] = []

    @app.task(shared=False, name=f"within-{uuid4()}")  # type: ignore[untyped-decorator]
    @only_one("k")
    def work(depth: int) -> str:
        if depth:
            seen.extend([work.delay(depth - 1).result, work(depth - 1), work.run(depth - 1)])
        return "ran"

    assert work.delay(1).get() == "ran"
    assert seen == [None, None, None]


def gather(values: list[Any]) -> list[Any]:
    return values


def test_an_eager_chord_and_group(app: Celery, busy: KeyIsBusy, prefix: str) -> None:
    first, other, total = a_task(app), a_task(app, key="other"), app.task(gather, name="total", shared=False)
    assert group(first.si(), other.si()).apply().get() == [f"{prefix}k", f"{prefix}other"]
    with busy("k"):
        assert group(first.si(), other.si()).apply().get() == [None, f"{prefix}other"]
        # None of these is said by Celery to have others after it.
        assert chord([first.si(), other.si()], total.s()).apply().get() == [None, f"{prefix}other"]
        assert chain(first.si(), total.s()).apply().get() is None
    assert chord([first.si(), other.si()], total.s()).apply().get() == [f"{prefix}k", f"{prefix}other"]
    assert chain(first.si(), other.s()).apply().get() == f"{prefix}k"


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


# --- written wrongly ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [retry, buffer_one])
@pytest.mark.parametrize(
    "countdown", [0, -1, float("nan"), float("inf"), 0.0001, "5", True, timedelta(0), timedelta(seconds=-1)], ids=repr
)
def test_a_countdown_that_could_not_work(policy: Any, countdown: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"countdown=.*: write"):
        policy(countdown=countdown)


@pytest.mark.parametrize("number", [-1, 1.5, "3", True], ids=repr)
def test_a_number_of_retries_that_could_not_work(number: Any) -> None:
    with pytest.raises(ConfigurationError, match="write a number such as 10"):
        retry(max_retries=number)


def test_countdowns_that_work() -> None:
    for countdown in (1, 0.5, timedelta(seconds=2), None):
        assert callable(retry(countdown))
        assert callable(buffer_one(countdown))
    assert retry(1).countdown == retry(timedelta(seconds=1)).countdown == 1
    assert retry(max_retries=0).max_retries == 0


@pytest.mark.parametrize("policy", [retry, buffer_one])
def test_a_policy_without_parentheses(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match="with parentheses"):
        cover("k", when_busy=policy)(lambda: None)
    with pytest.raises(ConfigurationError, match="with parentheses"):
        configure(when_busy=policy)
    with pytest.raises(ConfigurationError, match="with parentheses"):
        policy(AlreadyRunning("k"))


@pytest.mark.parametrize(
    "options",
    [{"when_down": buffer_one()}, {"when_lost": buffer_one()}, {"when_lost": retry()}, {"when_down": retry}],
    ids=["down: buffer_one", "lost: buffer_one", "lost: retry", "down: retry without parentheses"],
)
def test_a_policy_that_cannot_do_it(options: Any) -> None:
    with pytest.raises(ConfigurationError, match="write"):
        cover("k", **options)(lambda: None)


@pytest.mark.parametrize("policy", [retry(1.1), buffer_one(1.1), retry(timedelta(minutes=1))], ids=repr)
def test_a_countdown_that_would_make_the_broker_deliver_copies(app: Celery, redis_url: str, policy: Any) -> None:
    app.conf.update(broker_url=redis_url, broker_transport_options={"visibility_timeout": 3})
    with pytest.raises(ConfigurationError, match=r"countdown=.*visibility_timeout|visibility timeout"):
        a_task(app, when_busy=policy).delay().get()
    app.conf.update(broker_transport_options={"visibility_timeout": 3600})
    assert a_task(app, when_busy=policy).delay(1).get() == 1


def test_a_countdown_against_the_brokers_default(app: Celery, redis_url: str) -> None:
    app.conf.update(broker_url=redis_url)
    assert a_task(app, when_busy=retry(1000)).delay(1).get() == 1
    with pytest.raises(ConfigurationError, match="1201"):
        a_task(app, when_busy=retry(1201)).delay().get()
