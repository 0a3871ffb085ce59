"""The decorator above tasks that Celery makes later, and above their copies in other apps."""

from __future__ import annotations

import asyncio
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from celery import Celery, Task, _state, shared_task
from celery.local import PromiseProxy
from celery.signals import worker_init

from only_one import ConfigurationError, KeyTemplateError, current_lock, fail
from tests.celery.deliveries import QUEUE_TIMEOUT, Awaits, Keys, Queue, decorated, done, unique, work
from tests.decorated import CLOSED

pytestmark = pytest.mark.usefixtures("redis")


@contextmanager
def is_current(app: Celery) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_state._tls, "current_app", app)
        yield


@pytest.mark.parametrize("kind", ["not shared", "shared", "shared_task"])
def test_decorating_evaluates_nothing(kind: str) -> None:
    app = Celery(f"app-{uuid4()}", set_as_current=False)
    with is_current(app):
        for decorate in (decorated, decorated("k-{value}", 300, when_busy=fail, at_least=1, redis=CLOSED)):
            name = f"task-{uuid4()}"
            made = shared_task(name=name) if kind == "shared_task" else app.task(name=name, shared=kind == "shared")
            proxy = made(work)
            task = decorate(proxy)
            assert kind == "shared_task" or not proxy.__evaluated__()
            assert type(task) is not type(proxy) or kind == "shared_task" or not task.__evaluated__()
            assert not app.finalized
            assert not app.configured
        assert task.name == name  # which evaluates it
        assert app.tasks[name].name == name
        assert app.finalized


def test_a_task_that_was_made_already_is_decorated_at_once(queue: Queue) -> None:
    proxy = queue.app.task(work, name="made.already", shared=False)
    assert proxy.name == "made.already"  # which evaluates it
    with pytest.raises(KeyTemplateError, match="nothing"):
        decorated("k-{nothing}")(proxy)
    assert decorated("k")(proxy).delay() == queue.app.tasks["made.already"].delay()
    assert len(queue) == 1


def test_a_decorated_task_is_what_it_was_also_when_pickled(queue: Queue) -> None:
    with is_current(queue.app):
        task = unique(queue.app, "k", celery={"name": "kept", "rate_limit": "10/s", "max_retries": 7})
        first = task.delay()
        for each in (queue.app.tasks["kept"], pickle.loads(pickle.dumps(task)), pickle.loads(pickle.dumps(task.s(1)))):  # noqa: S301
            assert each.delay() == first
        assert pickle.loads(pickle.dumps(task)) is queue.app.tasks["kept"]  # noqa: S301 - our own
    assert len(queue) == 1
    assert isinstance(task, Task)
    assert (task.name, task.rate_limit, task.max_retries, task.app) == ("kept", "10/s", 7, queue.app)
    assert (task.__doc__, task.__name__) == (work.__doc__, "work")
    assert task.apply_async.__doc__ == Task.apply_async.__doc__
    assert task.s(1).task == "kept"


def test_a_task_of_a_program_has_the_name_that_celery_knows(queue: Queue, keys: Keys) -> None:
    """Its function is one of ``__main__``, whose name would be the same in every program."""

    def report() -> str:
        return current_lock().key

    main = {"__name__": "__main__", "current_lock": current_lock}
    task = unique(queue.app, "{name}", function=FunctionType(report.__code__, main), celery={"name": "reports.nightly"})
    assert task() == f"{keys.prefix}reports.nightly"
    assert task.delay().id == keys.holder("reports.nightly").task_id


# Several apps


def test_a_shared_task_in_three_apps(new_app: Any, keys: Keys) -> None:
    first, second = new_app("first", only_one_queue_timeout=timedelta(minutes=5)), new_app("second")
    second.finalize()
    task = decorated("k-{value}")(shared_task(work, name=f"task-{uuid4()}"))
    for number, app in enumerate([first, second, new_app("late")]):
        with is_current(app):
            answer = task.delay(number)
            assert answer.app is app
            assert task.delay(number) == app.tasks[task.name].delay(number) == answer
        assert keys.redis.llen(app.conf.task_default_queue) == 1
        assert keys.holder(f"k-{number}").task_id == answer.id
        assert keys.lives_for(300 if app is first else QUEUE_TIMEOUT, f"k-{number}")
    # The apps have one key, as they have one server and one prefix.
    with is_current(second):
        assert task.delay(0).id == keys.holder("k-0").task_id
    assert keys.redis.llen(second.conf.task_default_queue) == 1


def bound(self: Any, value: int = 0) -> Any:
    return self, value


@pytest.mark.parametrize("order", ["before", "after", "made"])
@pytest.mark.parametrize(
    "kind", [{}, {"bind": True, "autoretry_for": (OSError,)}, {"name": None}], ids=["plain", "bound", "named by Celery"]
)
def test_a_tasks_copy_in_another_app(new_app: Any, keys: Keys, order: str, kind: Any) -> None:
    """`app.task` puts the task into every app that is finalized later."""
    app = new_app("first")
    if order == "made":
        app.finalize()
    others = None if order == "after" else new_app("others")
    function = bound if "bind" in kind else FunctionType(work.__code__, globals(), f"work_{uuid4().hex}", (0, 0))
    first = unique(app, "k", function=function, celery={"shared": True, **kind})
    answer = first.delay()
    others = others or new_app("others")
    copy = others.tasks[first.name]
    assert copy.app is others
    assert copy.delay() == answer
    assert [keys.redis.llen(each.conf.task_default_queue) for each in (app, others)] == [1, 0]


def test_another_task_of_that_name_in_another_app_is_not_decorated(new_app: Any) -> None:
    others = new_app("others")
    another = others.task(done, name="of both", shared=False)
    others.finalize()
    unique(new_app("first"), "k", celery={"name": "of both", "shared": True}).delay()
    assert another.delay() != another.delay()


# What is wrong


def test_the_task_itself_is_no_field(queue: Queue) -> None:
    """A lazy task does not say yet whether it is bound, so its calls are refused."""
    with is_current(queue.app):
        for task in (
            unique(queue.app, "k-{self}", function=bound, celery={"bind": True}),
            decorated("k-{self}")(shared_task(bound, name=f"task-{uuid4()}", bind=True)),
        ):
            with pytest.raises(KeyTemplateError, match="self"):
                task.delay()
    unique(queue.app, "k-{self}", function=bound).delay(1)  # which is not bound


def test_an_error_that_is_found_later_is_raised_by_every_call(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """And not only by the first, which nobody may have seen: of this lazy task nothing is known before."""
    for _ in range(2):  # its module may be loaded twice
        task = decorated("k-{nothing}")(
            PromiseProxy(lambda: queue.app.task(work, name="lazy", shared=False, lazy=False))
        )
        for call in (task.delay, task.delay, task.apply_async, task, queue.app.tasks["lazy"].delay):
            with pytest.raises(KeyTemplateError, match="nothing") as caught:
                call()
    assert len(queue) == 0
    assert caplog.messages == [f"lazy cannot be decorated: {caught.value}"]


@pytest.mark.parametrize("finalized", [False, True])
@pytest.mark.filterwarnings("ignore:.*already registered:Warning")
def test_a_module_that_is_loaded_twice(queue: Queue, keys: Keys, *, finalized: bool) -> None:
    def load() -> Any:
        def is_busy(error: Any) -> None: ...

        def function() -> None: ...

        return unique(queue.app, "k", function=function, celery={"name": "loaded twice"}, when_busy=is_busy)

    with is_current(queue.app):
        load()
        if finalized:
            queue.app.finalize()
        first = load().delay()
    assert len(queue) == 1
    assert keys.holder().task_id == first.id


def test_an_apply_async_that_others_have_put_there_is_called(queue: Queue) -> None:
    """As by instrumentation, on the task before it was decorated."""
    plain = queue.app.task(work, name=f"task-{uuid4()}", shared=False)
    own, calls = plain.apply_async, []

    def instrumented(*args: Any, **options: Any) -> Any:
        calls.append(options["task_id"])
        return own(*args, **options)

    plain.apply_async = instrumented
    task = decorated("k")(plain)
    assert task.delay() == task.delay()
    assert (len(calls), len(queue)) == (1, 1)


# Async tasks


@pytest.fixture
def fetch() -> Any:
    """A function of its own for each test: a decorator above a lazy task is for all tasks of a function."""

    async def fetch(*_: Any) -> str:
        return current_lock().key

    return fetch


def registered(app: Celery, run: Any, **options: Any) -> Any:
    return app.register_task(type("Registered", (Task,), {"run": run, "name": f"task-{uuid4()}", **options})())


RETRIED: Any = {"autoretry_for": (OSError,)}
ASYNC_TASKS: dict[str, Callable[..., Any]] = {
    "plain": lambda app, run: app.task(run),
    "bound": lambda app, run: app.task(run, bind=True),
    "retried": lambda app, run: app.task(run, **RETRIED),
    "pydantic": lambda app, run: app.task(run, pydantic=True),
    "shared": lambda _, run: shared_task(run, name=f"task-{uuid4()}"),
    "class-based": registered,
    "class-based and retried": functools.partial(registered, **RETRIED),
}


@pytest.mark.parametrize("make", [functools.partial(Celery.task, bind=True), registered], ids=["bound", "class-based"])
@pytest.mark.parametrize("options", [{}, RETRIED], ids=repr)
@pytest.mark.parametrize(
    "key", ["{value}:{other}", lambda *, value, other: f"{value}:{other}"], ids=["text", "callable"]
)
def test_the_key_above_a_method_has_its_arguments(queue: Queue, keys: Keys, make: Any, options: Any, key: Any) -> None:
    """Celery copies the signature of the function, which has the task itself, to its wrapper of the method."""

    def both(self: Any, value: int, other: int = 1) -> Any:
        return self.name, value, other

    task = decorated(key=key)(make(queue.app, decorated("below")(both), **options))
    answer = task.delay(5, 2)
    assert (keys.holder("5:2").task_id, keys.holder("5:2").name) == (answer.id, task.name)
    assert task.delay(other=2, value=5) == queue.app.tasks[task.name].delay(5, 2) == answer
    assert task.delay(5) != answer
    assert "5:1" in keys
    assert queue.deliver() == (task.name, 5, 2)


@pytest.mark.parametrize("order", ["before", "finalized"])
@pytest.mark.parametrize("make", ASYNC_TASKS.values(), ids=ASYNC_TASKS)
def test_every_call_of_a_task_that_celery_would_not_await_is_refused(
    new_app: Any, queue: Queue, fetch: Any, caplog: pytest.LogCaptureFixture, make: Any, order: str
) -> None:
    """Once its app is finalized; or if it was finalized before, once a worker begins."""
    app = new_app()
    if order == "finalized":
        app.finalize()
    with is_current(app):
        task = make(app, decorated("k")(fetch))
        if app.finalized:  # as also to register a task
            worker_init.send(sender=Mock(app=app))
        app.finalize()
        for call in (task.delay, task.apply_async, task.s().delay, functools.partial(task.apply, throw=True), task):
            with pytest.raises(ConfigurationError, match=r"does not await, so .* asyncio") as caught:
                call()
    assert len(queue) == 0
    assert str(caught.value) in caplog.messages


@pytest.mark.parametrize("options", [{}, {"lazy": False}, RETRIED], ids=repr)
def test_the_decorator_above_a_task_that_is_not_awaited_is_refused(queue: Queue, fetch: Any, options: Any) -> None:
    with pytest.raises(ConfigurationError, match="asyncio"):
        decorated("k")(queue.app.task(fetch, **options)).delay()


def test_an_awaited_task_can_be_async(queue: Queue, keys: Keys, fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the class of the task, by a decorator of the user's, or by the pool of a library."""
    queue.app.conf.task_annotations = {"*": {"rate_limit": "7/m"}}
    function = decorated("k")(fetch)
    run = functools.wraps(function)(lambda *args: asyncio.run(function(*args)))
    below = queue.app.task(function, base=Awaits, name="below")
    above = decorated("k")(queue.app.task(fetch, base=Awaits, name="above"))
    for task in (queue.app.task(run), below, above):
        assert task.apply().get() == f"{keys.prefix}k"
        assert task.rate_limit == "7/m"
    queue.app.task(fetch, name="not decorated")().close()
    monkeypatch.setitem(sys.modules, "celery_aio_pool", sys)
    in_a_pool = queue.app.task(function, name="in a pool")
    worker_init.send(sender=Mock(app=queue.app))
    assert asyncio.run(in_a_pool()) == f"{keys.prefix}k"
