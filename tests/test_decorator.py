"""One decorator above a function: calls that overlap are skipped, and everything else about the function stays."""

# ruff: noqa: ARG001, ARG002, ARG003 - the decorated functions have arguments for the sake of their keys

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import pytest
from celery import Celery, Task
from redis import Redis

from only_one import LockLost, configure, current_lock, only_one, subscribe
from only_one.inspection import key_of
from only_one.keys.digest import digest
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, Function, as_async, both, decorated, decorated_async, own_key, patient

pytestmark = pytest.mark.usefixtures("redis")


# --- forms -------------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[Any, str, float]] = {
    "@only_one": (only_one, "{name}:{md5}", 30),
    "@only_one()": (only_one(), "{name}:{md5}", 30),
    '@only_one("k")': (only_one("k"), "k", 30),
    '@only_one("k", 300)': (only_one("k", 300), "k", 300),
    '@only_one(key="k", timeout=300)': (only_one(key="k", timeout=300), "k", 300),
    "@only_one(timeout=300)": (only_one(timeout=300), "{name}:{md5}", 300),
    '@only_one("k", timedelta, lease=60)': (only_one("k", timedelta(minutes=5), lease=60), "k", 60),
    "@only_one(key=callable)": (only_one(key=lambda a: f"made-of-{a}"), "made-of-1", 30),
    'only_one(function, key="k", timeout=300)': (lambda f: only_one(f, key="k", timeout=300), "k", 300),
    "only_one(function, 300)": (lambda f: only_one(f, 300), "{name}:{md5}", 300),
}


@pytest.mark.parametrize(("form", "key", "seconds"), FORMS.values(), ids=FORMS)
def test_every_form_decorates(redis: Redis, prefix: str, form: Function, key: str, seconds: float) -> None:
    def work(a: int) -> tuple[str, float]:
        left: Any = redis.pttl(own_key())
        return own_key(), left / 1000

    function = form(work)
    expected = prefix + key.format(name=f"{__name__}.{work.__qualname__}", md5=digest([1]))
    held, left = function(1)
    assert held == expected
    assert seconds / 2 < left <= seconds
    assert not redis.exists(expected)
    redis.set(expected, "another's")
    assert function(1) is None


@pytest.mark.usefixtures("prefix")
def test_a_parameter_called_name_is_part_of_the_digest() -> None:
    @only_one
    def work(name: str) -> str:
        return own_key()

    assert work("a") == work(name="a") != work("b")


def test_methods(prefix: str) -> None:
    @dataclass
    class Feed:
        url: str

        @only_one("feed:{self.url}:{more}")
        def load(self, more: int = 1) -> str:
            return own_key()

        @only_one("async:{self.url}")
        async def load_async(self) -> str:
            return own_key()

        @only_one("{self:md5}")
        def with_digest(self) -> str:
            return own_key()

        @classmethod
        @only_one("class:{a}")
        def of_class(cls, a: int) -> tuple[str, str]:
            return cls.__name__, own_key()

        @only_one("call:{self.url}")
        def __call__(self) -> str:
            return own_key()

    feed = Feed("a")
    assert (feed.load(), Feed("b").load(more=2)) == (f"{prefix}feed:a:1", f"{prefix}feed:b:2")
    assert key_of(feed.load, 3) == key_of(Feed.load, feed, more=3) == f"{prefix}feed:a:3"
    assert asyncio.run(feed.load_async()) == f"{prefix}async:a"
    assert feed.with_digest() == Feed("a").with_digest() != Feed("b").with_digest()
    assert Feed.of_class(1) == feed.of_class(a=1) == ("Feed", f"{prefix}class:1")
    assert feed() == only_one(feed.__call__, key="bound")() == f"{prefix}call:a"


def test_the_run_of_a_class_based_task(prefix: str) -> None:
    class Work(Task):  # type: ignore[misc]
        name = "a-task-of-a-class"

        @only_one
        def run(self, a: int) -> str:
            return own_key()

    key: Any = Celery(set_as_current=False).register_task(Work()).apply([1]).get()
    assert key.startswith(f"{prefix}a-task-of-a-class:")


def test_one_decorator_above_two_functions_and_two_above_one(prefix: str) -> None:
    once = only_one("{name}", timeout=60)

    @once
    def first() -> list[Any]:
        return [own_key(), second()]

    @once
    @only_one("another key")
    def second() -> list[Any]:
        return [own_key(), first()]

    names = [f"{prefix}{__name__}.{function.__qualname__}" for function in (first, second)]
    assert first() == [names[0], [f"{prefix}another key", None]]
    assert key_of(second) == names[1]


# --- what is kept ------------------------------------------------------------------------------------------------


def original(a: int, b: str = "x", *rest: int, c: float = 1.5, **others: bytes) -> list[str]:
    """Does what it says."""
    return [str(a), b, str(c), *map(str, rest), *others]


original.colour = "green"  # type: ignore[attr-defined]


@only_one("pickled")
def pickled() -> None:
    """Has its own name in the module."""


@pytest.mark.parametrize("function", [original, as_async(original)])
@pytest.mark.parametrize("decorator", [only_one, only_one("k", 3)])
def test_the_metadata_of_a_function_is_kept(decorator: Any, function: Any) -> None:
    kept = decorator(function)
    assert inspect.isfunction(kept)
    assert kept is not function
    assert kept.__wrapped__ is function  # type: ignore[attr-defined]
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "colour"):
        assert getattr(kept, attribute) == getattr(function, attribute)
    assert vars(kept)["__signature__"] == inspect.signature(kept) == inspect.signature(function)
    assert inspect.iscoroutinefunction(kept) == inspect.iscoroutinefunction(function)
    assert pickle.loads(pickle.dumps(pickled)) is pickled  # noqa: S301


@both
def test_arguments_and_result_are_passed_through(decorate: Decorate) -> None:
    function = decorate(original, "{a}")
    assert function(1, "y", 2, 3, c=4.5, more=b"") == ["1", "y", "4.5", "2", "3", "more"]
    assert function(a=1) == ["1", "x", "1.5"]
    result = object()
    assert decorate(lambda: result)() is result


# --- overlap -----------------------------------------------------------------------------------------------------


def call_often(url: str, prefix: str, folder: Path) -> Counter[str | None]:
    """The results of calls in a process of its own, from several threads and event loops, beside two like it."""

    def work() -> str:
        witness = folder / "a run is under way"
        witness.touch(exist_ok=False)
        time.sleep(random.choice([0, 0.002]))
        witness.unlink()
        return "ran"

    functions = [decorated(work, timeout=600), decorated(work), decorated_async(work)]
    (folder / f"{os.getpid()}.ready").touch()
    assert eventually(lambda: len(list(folder.glob("*.ready"))) == 3)
    with configure(redis=url, prefix=prefix), ThreadPoolExecutor(3) as pool:
        return Counter(pool.map(lambda function: function(), functions * 30))


def test_processes_threads_and_event_loops_never_overlap(
    redis: Redis, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    """`tests/simulation` searches for the moments at which they might."""
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        calls = [pool.submit(call_often, patient(redis_url), prefix, tmp_path) for _ in range(3)]
        results = sum((each.result(LIMIT) for each in calls), Counter[str | None]())
    assert results.keys() == {"ran", None}
    assert results.total() == 3 * 3 * 30
    assert not redis.exists(f"{prefix}k")


# --- the name of a function --------------------------------------------------------------------------------------


def test_a_function_that_cloudpickle_sends_to_another_process_has_the_same_key(prefix: str) -> None:
    """As Ray and Dask do with a function that cannot be imported there: with all that belongs to it."""

    @only_one("{name}:{a}", when_busy=lambda error: f"busy: {error.key}")
    def work(a: int, then: Callable[[], object] = list) -> list[object]:
        return [own_key(), then()]

    @only_one("{name}:{a}", when_busy=lambda error: f"busy: {error.key}")
    async def work_async(a: int, *, deeper: bool = True) -> list[object]:
        return [own_key(), await work_async(a, deeper=False) if deeper else None]

    sent, sent_async = pickle.loads(cloudpickle.dumps([work, work_async]))  # noqa: S301 - our own
    key, key_async = (f"{prefix}{__name__}.{each.__qualname__}:1" for each in (work, work_async))
    assert sent is not work
    assert work(1, lambda: sent(1)) == [key, f"busy: {key}"]
    assert sent(1) == [key, []]
    assert asyncio.run(sent_async(1)) == [key_async, f"busy: {key_async}"]


@pytest.mark.parametrize("main", ["__main__", "__mp_main__"])
def test_a_function_of_a_program_that_was_started_by_a_module_s_name(prefix: str, main: str) -> None:
    """`python -m reports.nightly`, and a process that it spawns."""
    started = {"__name__": main, "__spec__": ModuleSpec("reports.nightly", None), "current_lock": current_lock}
    function: Any = FunctionType(own_key.__code__, started)
    assert only_one("{name}")(function)() == f"{prefix}reports.nightly.own_key"


def test_a_function_of_c(prefix: str) -> None:
    of_c = only_one("{name}")(math.sqrt)
    assert of_c(9) == 3
    assert key_of(of_c, 9) == f"{prefix}math.sqrt"
    method: Any = str.upper
    upper = only_one("{name}")(method)
    assert upper("a") == "A"
    assert key_of(upper, "a") == f"{prefix}builtins.str.upper"


@pytest.mark.parametrize("made", [functools.cache, functools.singledispatch, functools.partial])
def test_what_python_makes_of_a_function_can_be_decorated(prefix: str, made: Any) -> None:
    function: Function = only_one("k")(functools.update_wrapper(made(own_key), own_key))
    assert function(1) == f"{prefix}k"


# --- current_lock ------------------------------------------------------------------------------------------------


def test_current_lock_says_what_the_run_holds(redis: Redis) -> None:
    def work(a: str) -> tuple[Any, Any]:
        lock = current_lock()
        lock.ensure_held()
        assert 0 < lock.expires_in <= 600
        return lock, redis.get(lock.key)

    function: Any = only_one("{name}:{a:md5}", timeout=600)(work)
    lock, value = function("hunter2")
    assert lock.key == key_of(function, "hunter2")
    assert value == lock.token
    assert b"hunter2" not in value
    holder = lock.holder
    name = f"{__name__}.{work.__qualname__}"
    assert (holder.pid, holder.name, holder.task_id, holder.state) == (os.getpid(), name, None, "running")
    assert holder.deadline == pytest.approx(time.time() + 600, abs=LIMIT)
    assert holder.since == pytest.approx(time.time(), abs=LIMIT)
    assert (lock.is_held, lock.expires_in) == (False, 0)  # after the run
    with pytest.raises(LockLost, match="released"):
        lock.ensure_held()


# --- annotations, which Python 3.14 evaluates when it is asked for them ---

lazy_annotations = pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates them where they are written")

SOURCE = """
def decorated(order: Later, count: int = 1) -> Later: ...
def key_of_order(order: Later, count: int) -> str: return f"order-{order}"
def hook(event: Later) -> None: ...
"""


def run_as_module(source: str) -> dict[str, Any]:
    """The names of a module, without this file's import from the future."""
    names: dict[str, Any] = {"__name__": __name__, "only_one": only_one}
    exec(compile(source, __file__, "exec", dont_inherit=True), names)  # noqa: S102 - it is our own
    return names


@lazy_annotations
def test_a_function_a_key_and_a_hook_may_have_annotations_that_are_defined_later() -> None:
    module = run_as_module(SOURCE)
    decorated = only_one(module["decorated"], key=module["key_of_order"], when_busy=module["hook"])
    subscribe(module["hook"])()
    parameters = inspect.signature(decorated).parameters
    assert list(parameters) == ["order", "count"]
    assert parameters["count"].annotation is int
