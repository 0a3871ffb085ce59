"""The decorator above tasks that Celery makes later, and above their copies in other apps."""

from __future__ import annotations

import asyncio
import functools
import importlib
import pickle
import sys
from pathlib import Path
from types import FunctionType
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, shared_task
from celery.local import PromiseProxy
from redis import Redis

from only_one import ConfigurationError, KeyTemplateError, current_lock, fail
from only_one.holder import Holder
from tests.celery.enqueueing import (
    CLOSED,
    QUEUE_TIMEOUT,
    a_task,
    cover,
    is_current,
    lives_for,
    messages,
    other,
    work,
)

pytestmark = pytest.mark.usefixtures("redis", "finalizers")


@pytest.mark.parametrize("kind", ["not shared", "shared", "shared_task"])
def test_decorating_evaluates_nothing(kind: str) -> None:
    app = Celery(f"app-{uuid4()}", set_as_current=False)
    with is_current(app):
        for decorate in (cover, cover("k-{value}", 300), cover(key="k", when_busy=fail, at_least=1, redis=CLOSED)):
            name = f"task-{uuid4()}"
            made = shared_task(name=name) if kind == "shared_task" else app.task(name=name, shared=kind == "shared")
            proxy = made(work)
            decorated = decorate(proxy)
            assert kind == "shared_task" or not proxy.__evaluated__()
            assert type(decorated) is not type(proxy) or kind == "shared_task" or not decorated.__evaluated__()
            assert not app.finalized
            assert not app.configured
        assert decorated.name == name  # which evaluates it
        assert app.tasks[name].name == name
        assert app.finalized


def test_a_task_that_was_made_already_is_covered_at_once(app: Celery, queued: Any) -> None:
    proxy = app.task(work, name="made.already", shared=False)
    assert proxy.name == "made.already"  # which evaluates it
    with pytest.raises(KeyTemplateError, match="nothing"):
        cover("k-{nothing}")(proxy)
    assert cover("k")(proxy).delay() == app.tasks["made.already"].delay()
    assert queued() == 1


def test_the_task_is_what_it_was(app: Celery) -> None:
    task = a_task(app, "k", celery={"name": "kept", "rate_limit": "10/s", "max_retries": 7})
    assert app.tasks["kept"].delay() == task.delay()
    assert isinstance(task, Task)
    assert (task.name, task.rate_limit, task.max_retries, task.app) == ("kept", "10/s", 7, app)
    assert task.__doc__ == work.__doc__
    assert task.__name__ == "work"
    assert task.apply_async.__doc__ == Task.apply_async.__doc__
    assert task.s(1).task == "kept"


def test_a_task_of_a_program_has_the_name_that_celery_knows(app: Celery, prefix: str, held: Any) -> None:
    """Its function is one of ``__main__``, whose name would be the same in every program."""

    def report() -> str:
        return current_lock().key

    main = {"__name__": "__main__", "current_lock": current_lock}
    task = a_task(app, "{name}", function=FunctionType(report.__code__, main), celery={"name": "reports.nightly"})
    assert task() == f"{prefix}reports.nightly"
    assert task.delay().id == held("reports.nightly").task_id


def test_a_shared_task_in_three_apps(new_app: Any, queued: Any, held: Any, left: Any) -> None:
    first, second = new_app("first", only_one_queue_timeout=300), new_app("second")
    second.finalize()
    task = cover("k-{value}")(shared_task(work, name=f"task-{uuid4()}"))
    late = new_app("late")
    for number, (app, queue) in enumerate([(first, "first"), (second, "second"), (late, "late")]):
        with is_current(app):
            answer = task.delay(number)
            assert answer.app is app
            assert task.delay(number) == answer == app.tasks[task.name].delay(number)
        assert queued(queue) == 1
        assert held(f"k-{number}").task_id == answer.id
        assert lives_for(300 if app is first else QUEUE_TIMEOUT, left(f"k-{number}"))
    # The apps have one key, as they have one server and one prefix.
    with is_current(second):
        assert task.delay(0).id == held("k-0").task_id
    assert queued("second") == 1


def bound(self: Any, value: int = 0) -> Any:
    return self, value


@pytest.mark.parametrize("order", ["before", "after", "made"])
@pytest.mark.parametrize("kind", [{}, {"bind": True, "autoretry_for": (OSError,)}], ids=["plain", "bound"])
def test_a_tasks_copy_in_another_app(new_app: Any, queued: Any, order: str, kind: Any) -> None:
    """`app.task` puts the task into every app that is finalized later."""
    app = new_app("first")
    if order == "made":
        app.finalize()
    copies = None if order == "after" else new_app("copies")
    name = f"task-{uuid4()}"
    task = cover("k")(app.task(bound if kind else work, name=name, **kind))
    first = task.delay()
    copies = copies or new_app("copies")
    copy = copies.tasks[name]
    assert copy.app is copies
    assert copy.delay() == first
    assert queued("copies") == 0
    assert queued("first") == 1


def test_another_task_of_that_name_in_another_app(new_app: Any, queued: Any) -> None:
    app, others = new_app("first"), new_app("others")
    name = f"task-{uuid4()}"
    another = others.task(other, name=name, shared=False)
    others.finalize()
    cover("k")(app.task(work, name=name)).delay()
    assert another.delay() != another.delay()
    assert queued("others") == 2


@pytest.mark.parametrize("kind", ["app.task", "shared_task", "not bound"])
def test_the_task_itself_is_no_field(app: Celery, kind: str) -> None:
    """Where that can be seen before the task is made."""

    def function(self: Any, value: int) -> Any:
        return self, value

    def another(this: Any, value: int) -> Any:
        return this, value

    options = {"name": f"task-{uuid4()}", "bind": True}
    if kind == "not bound":
        cover("k-{self}")(app.task(function, name=options["name"], shared=False))
        cover("k-{value}")(shared_task(work, name=options["name"]))
        return
    is_shared = kind == "shared_task"
    task = shared_task(function, **options) if is_shared else app.task(another, shared=False, **options)
    field = "self" if is_shared else "this"
    with pytest.raises(KeyTemplateError, match=field):
        cover(f"k-{{{field}}}")(task)


def test_pickled_it_is_the_task(app: Celery, queued: Any) -> None:
    with is_current(app):
        task = a_task(app, "k", celery={"name": "pickled"})
        first = task.delay()
        copy = pickle.loads(pickle.dumps(task))  # noqa: S301 - our own
        assert copy is app.tasks["pickled"]
        assert copy.delay() == first
        assert pickle.loads(pickle.dumps(task.s(1))).delay() == first  # noqa: S301 - our own
    assert queued() == 1


def test_what_is_found_wrong_later_is_raised_by_every_call(
    app: Celery, queued: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And not only by the first, which nobody may have seen; of this promise nothing is known before."""
    task = cover("k-{nothing}")(PromiseProxy(lambda: app.task(work, name="promised", shared=False, lazy=False)))
    for call in (task.delay, task.delay, task.apply_async, task, app.tasks["promised"].delay):
        with pytest.raises(KeyTemplateError, match="nothing"):
            call()
    assert queued() == 0
    (told,) = caplog.messages
    assert told.startswith("promised cannot be decorated: ")


def test_what_is_found_wrong_later_is_said_of_a_module_that_is_loaded_twice(app: Celery) -> None:
    for _ in range(2):
        task = cover("k-{nothing}")(PromiseProxy(lambda: app.task(work, name="promised", shared=False, lazy=False)))
        with pytest.raises(KeyTemplateError, match="nothing"):
            task.delay()


MODULE = """
from celery import current_app
from only_one import only_one

def is_busy(error): ...

@only_one("k", when_busy=is_busy)
@current_app.task(name="loaded twice", shared=False)
def task(): ...
"""


@pytest.mark.parametrize("finalized", [False, True])
@pytest.mark.filterwarnings("ignore:.*already registered:Warning")
def test_a_module_that_is_loaded_twice(app: Any, redis: Redis, prefix: str, tmp_path: Path, finalized: bool) -> None:  # noqa: FBT001
    from celery._state import get_current_app  # noqa: PLC0415 - to be put back

    name = f"loaded_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    before = get_current_app()
    app.set_current()
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module(name)
        if finalized:
            app.finalize()
        again = importlib.reload(module)
        first = again.task.delay()
    finally:
        sys.path.remove(str(tmp_path))
        before.set_current()
    assert len(messages(redis, prefix)) == 1
    assert Holder.parse(redis.get(f"{prefix}k") or b"").task_id == first.id  # type: ignore[union-attr]


def test_an_apply_async_that_others_have_put_there(app: Any, queued: Any) -> None:
    """As by instrumentation: on the task before it was covered, and on its class since."""
    plain = app.task(work, name=f"task-{uuid4()}", shared=False)
    own, calls = plain.apply_async, []

    def instrumented(*args: Any, **options: Any) -> Any:
        calls.append(options["task_id"])
        return own(*args, **options)

    plain.apply_async = instrumented
    task = cover("k")(plain)
    assert task.delay() == task.delay()
    assert (len(calls), queued()) == (1, 1)


async def fetch(*_: Any) -> str:
    return current_lock().key


class Awaiting(Task):  # type: ignore[misc]
    """Has tasks that run their coroutines."""

    def __call__(self, *args: Any) -> Any:
        return asyncio.run(self.run(*args))


def registered(app: Celery, run: Any, **options: Any) -> Any:
    return app.register_task(type("Registered", (Task,), {"run": run, "name": f"task-{uuid4()}", **options})())


RETRIED: Any = {"autoretry_for": (OSError,)}
ASYNC_TASKS: dict[str, Any] = {
    "plain": lambda app, run: app.task(run),
    "bound": lambda app, run: app.task(run, bind=True),
    "retried": lambda app, run: app.task(run, **RETRIED),
    "pydantic": lambda app, run: app.task(run, pydantic=True),
    "shared": lambda _, run: shared_task(run, name=f"task-{uuid4()}"),
    "class-based": registered,
    "class-based and retried": functools.partial(registered, **RETRIED),
}


@pytest.mark.parametrize("order", ["before", "finalized", "after"])
@pytest.mark.parametrize("make", ASYNC_TASKS.values(), ids=ASYNC_TASKS)
def test_every_call_of_a_task_that_celery_would_not_await_is_refused(
    new_app: Any, queued: Any, caplog: pytest.LogCaptureFixture, make: Any, order: str
) -> None:
    """Of an app that was created before or after the decoration, or was finalized before."""
    earlier = None if order == "after" else new_app()
    decorated = cover("k")(fetch)
    app = earlier or new_app()
    if order == "finalized":
        app.finalize()
    with is_current(app):
        task = make(app, decorated)
        if order == "after":
            app.finalize()
        for call in (task.delay, task.apply_async, task.s().delay, functools.partial(task.apply, throw=True), task):
            with pytest.raises(ConfigurationError, match="asyncio"):
                call()
    assert queued() == 0
    assert "asyncio.run" in caplog.text


@pytest.mark.parametrize("options", [{}, {"lazy": False}, RETRIED], ids=repr)
def test_so_is_the_decorator_above_such_a_task(app: Celery, options: Any) -> None:
    with pytest.raises(ConfigurationError, match="asyncio"):
        cover("k")(app.task(fetch, **options)).delay()


def test_an_async_function_that_is_awaited_can_be_a_task(
    app: Celery, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the class of the task, by a decorator of the user's, or by the pool of a library."""
    app.conf.task_annotations = {"*": {"rate_limit": "7/m"}}
    decorated = cover("k")(fetch)
    run = functools.wraps(decorated)(lambda *args: asyncio.run(decorated(*args)))
    tasks = {"sync": app.task(run), "below": app.task(decorated, base=Awaiting, name="below")}
    tasks["above"] = cover("k")(app.task(fetch, base=Awaiting, name="above"))
    for task in tasks.values():
        assert task.apply().get() == f"{prefix}k"
        assert task.rate_limit == "7/m"
    app.task(fetch, name="not decorated")().close()
    monkeypatch.setitem(sys.modules, "celery_aio_pool", sys)
    assert asyncio.run(app.task(decorated, name="in a pool")()) == f"{prefix}k"
