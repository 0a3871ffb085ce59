"""One decorator above a function: what overlaps is skipped, and everything else about the function stays as it was."""

# ruff: noqa: ARG001, ARG002, ARG003 - what is covered here has arguments for the sake of its keys

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from redis import ConnectionPool, Redis

from only_one import (
    ConfigurationError,
    LockLost,
    OnlyOneError,
    configure,
    current_lock,
    only_one,
)
from only_one.inspection import key_of
from only_one.keys.digest import digest
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.renewal import is_idle, is_renewed

README = Path(__file__).parents[1] / "README.md"
KeyIsBusy = Callable[..., AbstractContextManager[None]]
Function = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("redis")
spawn = get_context("spawn")


class Job:
    """Work that goes on until it is told to end, and that knows by itself whether it overlapped."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self.runs = self.inside = self.most = 0
        self._counting = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """One more run for the length of the block."""
        with self._counting:
            self.runs += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            yield
        finally:
            with self._counting:
                self.inside -= 1

    def work(self) -> str:
        """What a covered function does in these tests."""
        with self.counted():
            self.begun.set()
            assert self.end.wait(LIMIT)
        return "done"

    async def work_async(self) -> str:
        """The same on an event loop."""
        with self.counted():
            self.begun.set()
            await until(self.end.is_set)
        return "done"


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""

    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - conditions of other threads have no event
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), LIMIT)


@contextmanager
def while_runs(job: Job, call: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Have a call run in another thread; it is told to end when the block ends."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(call)
        run.add_done_callback(lambda _: job.begun.set())
        try:
            assert job.begun.wait(LIMIT)
            yield run
        finally:
            job.end.set()
            run.exception(LIMIT)


def run_of(function: Function, *args: Any, **kwargs: Any) -> Any:
    """The result of a call, of a coroutine function, too."""
    result = function(*args, **kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def keys_of(redis: Redis, prefix: str) -> list[str]:
    """What this test has left in Redis."""
    return [key.decode() for key in redis.scan_iter(match=f"*{prefix}*", count=1000)]


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
    "only_one(function)": (only_one, "{name}:{md5}", 30),
    'only_one(function, key="k", timeout=300)': (lambda f: only_one(f, key="k", timeout=300), "k", 300),
    "only_one(function, 300)": (lambda f: only_one(f, 300), "{name}:{md5}", 300),
}


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(("form", "key", "seconds"), FORMS.values(), ids=FORMS)
def test_every_form_covers(
    redis: Redis, prefix: str, form: Callable[[Function], Any], key: str, seconds: float, kind: str
) -> None:
    job = Job()

    def work(a: int) -> str:
        return job.work()

    async def work_async(a: int) -> str:
        return await job.work_async()

    function: Function = work if kind == "def" else work_async
    covered = form(function)
    name = f"{function.__module__}.{function.__qualname__}"
    with while_runs(job, lambda: run_of(covered, 1)) as run:
        (taken,) = keys_of(redis, prefix)
        assert taken == prefix + key.format(name=name, md5=digest([1]))
        assert seconds / 2 < redis.pttl(taken) / 1000 <= seconds
        assert run_of(covered, 1) is None
        assert not run.done()
    assert run.result() == "done"
    assert job.runs == job.most == 1
    assert keys_of(redis, prefix) == []
    assert run_of(covered, 1) == "done"
    assert job.runs == 2


def test_methods(redis: Redis, prefix: str) -> None:
    class Feed:
        def __init__(self, url: str) -> None:
            self.url = url

        @only_one("feed:{self.url}")
        def load(self, then: Callable[[], object]) -> str:
            then()
            return self.url

        @only_one("feed:{self.url}:{more}")
        async def load_async(self, more: int = 1) -> tuple[str, str]:
            return self.url, current_lock().key

        @staticmethod
        @only_one("static:{a}")
        def static(a: int) -> tuple[int, str]:
            return a, current_lock().key

        @classmethod
        @only_one("class:{a}")
        def of_class(cls, a: int) -> tuple[str, str]:
            return cls.__name__, current_lock().key

        @property
        @only_one("property:{self.url}")
        def size(self) -> str:
            return current_lock().key

        @only_one("call:{self.url}")
        def __call__(self) -> str:
            return current_lock().key

    one, other = Feed("a"), Feed("b")
    seen: list[object] = []
    assert one.load(lambda: seen.extend([one.load(lambda: None), other.load(lambda: None)])) == "a"
    assert seen == [None, "b"]
    assert asyncio.run(one.load_async()) == ("a", f"{prefix}feed:a:1")
    assert Feed.static(1) == one.static(1) == (1, f"{prefix}static:1")
    assert Feed.of_class(1) == one.of_class(a=1) == ("Feed", f"{prefix}class:1")
    assert one.size == f"{prefix}property:a"
    assert one() == f"{prefix}call:a"
    assert only_one(one.__call__, key="bound")() == f"{prefix}call:a"
    assert only_one(one.static, key="again")(1) == (1, f"{prefix}static:1")
    assert keys_of(redis, prefix) == []


def test_methods_whose_object_has_a_digest_or_is_a_task(prefix: str) -> None:
    @dataclass
    class Feed:
        url: str

        @only_one
        def load(self) -> str:
            return current_lock().key

    class Work(Task):  # type: ignore[misc]
        name = "a-task-of-a-class"

        @only_one
        def run(self, a: int) -> str:
            return current_lock().key

    app = Celery(set_as_current=False)
    assert Feed("a").load() == Feed("a").load() != Feed("b").load()
    key: Any = app.register_task(Work()).apply([1]).get()
    assert key.startswith(f"{prefix}a-task-of-a-class:")


def test_one_decorator_above_two_functions(prefix: str) -> None:
    once = only_one("{name}", timeout=60)

    @once
    def first() -> tuple[str, Any]:
        return current_lock().key, second()

    @once
    def second() -> tuple[str, Any]:
        return current_lock().key, first()

    seen: Any = first()
    outer, (inner, skipped) = seen
    assert outer == f"{prefix}{__name__}.{first.__qualname__}"
    assert inner == f"{prefix}{__name__}.{second.__qualname__}"
    assert skipped is None


def test_a_function_covered_twice_by_different_keys() -> None:
    @only_one("outer")
    @only_one("inner:{a}")
    def work(a: int) -> str:
        return current_lock().key.rpartition("inner")[2]

    assert work(1) == ":1"


# --- what is kept ------------------------------------------------------------------------------------------------


def original(a: int, b: str = "x", *rest: int, c: float = 1.5, **others: bytes) -> list[str]:
    """Does what it says."""
    return [str(a), b, str(c), *map(str, rest), *others]


original.colour = "green"  # type: ignore[attr-defined]
module_level = only_one("module-level")(original)


async def original_async(a: int, b: str = "x") -> str:
    """Does it later."""
    return f"{a}{b}"


@pytest.mark.parametrize("function", [original, original_async])
@pytest.mark.parametrize("decorator", [only_one, only_one("k", 3)])
def test_what_is_known_of_a_function_is_kept(decorator: Any, function: Function) -> None:
    covered = decorator(function)
    assert inspect.isfunction(covered)
    assert covered is not function
    assert covered.__wrapped__ is function  # type: ignore[attr-defined]
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(covered, attribute) == getattr(function, attribute)
    assert inspect.signature(covered) == inspect.signature(function)
    assert vars(covered)["__signature__"] == inspect.signature(function)
    assert inspect.iscoroutinefunction(covered) == inspect.iscoroutinefunction(function)
    assert getattr(covered, "colour", None) == getattr(function, "colour", None)


def test_a_covered_function_pickles_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(pickled)) is pickled  # noqa: S301


@only_one("pickled")
def pickled() -> None:
    """Stands under its own name in the module."""


def test_arguments_and_result_go_through() -> None:
    assert module_level(1, "y", 2, 3, c=4.5, more=b"") == ["1", "y", "4.5", "2", "3", "more"]
    assert module_level(a=1) == ["1", "x", "1.5"]
    result = object()
    assert only_one("k")(lambda: result)() is result
    assert asyncio.run(only_one("k")(original_async)(1, b="z")) == "1z"


@pytest.mark.parametrize("key", ["k", "{a}", "{name}:{md5}"])
def test_a_call_that_does_not_bind_fails_as_without_us(redis: Redis, prefix: str, key: str) -> None:
    def work(a: int, b: int = 1) -> None: ...

    covered: Any = only_one(key)(work)
    for args, kwargs in [((), {}), ((1, 2, 3), {}), ((1,), {"nope": 1}), ((1,), {"a": 1})]:
        with pytest.raises(TypeError) as raised:
            covered(*args, **kwargs)
        assert not isinstance(raised.value, OnlyOneError)
    assert keys_of(redis, prefix) == []


def test_celery_still_checks_the_arguments_of_delay() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)

    @app.task(name="shop.import")  # type: ignore[untyped-decorator]
    @only_one("k")
    def task(a: int, b: int = 2) -> None: ...

    with pytest.raises(TypeError, match="positional"):
        task.delay(1, 2, 3)
    with pytest.raises(TypeError, match="required"):
        task.delay()


# --- overlap -----------------------------------------------------------------------------------------------------


def test_event_loops_and_threads_exclude_each_other() -> None:
    job = Job()
    sync, async_ = only_one("both")(job.work), only_one("both")(job.work_async)
    other = only_one("other")(lambda: "at once")

    ended: list[str | None] = []

    async def one() -> None:
        ended.append(await async_())

    async def eight() -> None:
        await asyncio.gather(*(one() for _ in range(8)))

    with while_runs(job, lambda: asyncio.run(eight())):
        assert eventually(lambda: len(ended) == 7)  # all others have asked while the one runs
        assert sync() is None
        assert asyncio.run(async_()) is None
        assert other() == "at once"
    assert Counter(ended) == {None: 7, "done": 1}
    job.begun.clear()
    job.end.clear()
    with while_runs(job, sync):
        assert sync() is None
        assert asyncio.run(async_()) is None
    assert job.runs == 2
    assert job.most == 1


def test_a_call_from_inside_its_own_run_is_busy() -> None:
    @only_one("{a}")
    def work(a: int, deeper: int) -> list[Any]:
        return [current_lock().key[-1], work(a, deeper - 1) if deeper else None, work(a + 1, 0) if deeper else None]

    assert work(1, 1) == ["1", None, ["2", None, None]]

    @only_one("async")
    async def work_async(deeper: int) -> list[Any]:
        return ["ran", await work_async(deeper - 1) if deeper else None]

    assert asyncio.run(work_async(1)) == ["ran", None]


def test_after_a_call_from_inside_the_outer_run_still_holds(redis: Redis, prefix: str) -> None:
    inner = only_one("inner")(lambda: current_lock().key)

    @only_one("outer")
    def outer() -> list[Any]:
        lock = current_lock()
        seen = [inner(), outer(), current_lock() is lock, lock.is_held]
        return [*seen, redis.exists(lock.key)]

    assert outer() == [f"{prefix}inner", None, True, True, 1]


def count(url: str, prefix: str, folder: Path, times: int, *, asynchronous: bool) -> Counter[str]:
    """In a process of its own: read, wait, write; without exclusion this counts too little."""
    outcome: Counter[str] = Counter()

    def add_one(key: str) -> bool:
        file = folder / key
        seen = int(file.read_text())
        witness = folder / f"{key}.inside"
        try:
            witness.open("x").close()
        except FileExistsError:
            outcome["overlaps"] += 1
        time.sleep(0.001)
        file.write_text(str(seen + 1))
        witness.unlink(missing_ok=True)
        outcome["runs"] += 1
        return True

    async def add_one_async(key: str) -> bool:
        return add_one(key)

    covered = only_one("count:{key}")(add_one)
    covered_async = only_one("count:{key}")(add_one_async)
    left = dict.fromkeys("ab", times)

    async def main() -> None:
        deadline = time.monotonic() + LIMIT
        while any(left.values()):
            assert time.monotonic() < deadline, f"still to be counted: {left}"
            for key in left:
                if not left[key]:
                    continue
                if await covered_async(key) if asynchronous else covered(key):
                    left[key] -= 1
                else:
                    outcome["skips"] += 1
                    await asyncio.sleep(random.uniform(0, 0.002))

    with configure(redis=url, prefix=prefix):
        (folder / f"{os.getpid()}.ready").touch()
        assert eventually((folder / "go").exists)
        asyncio.run(main())
    return outcome


def test_processes_that_contend_lose_no_count(redis: Redis, redis_url: str, prefix: str, tmp_path: Path) -> None:
    processes, times = 3, 25
    for key in "ab":
        (tmp_path / key).write_text("0")
    with ProcessPoolExecutor(processes, spawn) as pool:
        # They begin when all are there, and find the first key taken by this process: so they do meet.
        calls = [
            pool.submit(count, redis_url, prefix, tmp_path, times, asynchronous=bool(number % 2))
            for number in range(processes)
        ]

        @only_one("count:a")
        def first() -> None:
            (tmp_path / "go").touch()
            assert eventually(lambda: (tmp_path / "b").read_text() != "0")  # so one of them was skipped

        assert eventually(lambda: len(list(tmp_path.glob("*.ready"))) == processes)
        first()
        outcome = sum((call.result(LIMIT) for call in calls), Counter[str]())
    assert [(tmp_path / key).read_text() for key in "ab"] == [str(processes * times)] * 2
    assert outcome["runs"] == processes * times * 2
    assert outcome["overlaps"] == 0
    assert outcome["skips"] > 0, "they never met, so nothing was shown"
    assert keys_of(redis, prefix) == []


PROGRAM = """
import asyncio, sys
from only_one import configure, current_lock, only_one

@only_one{key}
def main():
    return current_lock().key

@only_one("async")
async def main_async():
    return current_lock().key

configure(redis=sys.argv[1], prefix=sys.argv[2])
print(main(), asyncio.run(main_async()), "celery" in sys.modules)
"""


def test_the_name_of_a_function_in_main_needs_the_m_switch(redis_url: str, prefix: str, tmp_path: Path) -> None:
    def run(key: str, *command: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "nightly_report.py").write_text(PROGRAM.replace("{key}", key))
        command = (sys.executable, *command, redis_url, prefix)
        return subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)

    refused = run("", "nightly_report.py")
    assert refused.returncode == 1
    assert "KeyTemplateError" in refused.stderr
    assert "python -m" in refused.stderr
    accepted = run("", "-m", "nightly_report")
    assert accepted.stdout.startswith(f"{prefix}nightly_report.main:"), accepted.stderr
    with_a_key = run("('nightly-report')", "nightly_report.py")
    assert with_a_key.stdout == f"{prefix}nightly-report {prefix}async False\n", with_a_key.stderr


SENDER = """
import asyncio, subprocess, sys, cloudpickle
from only_one import configure, current_lock, only_one

@only_one("{name}:{a}")
def work(a, then=lambda: None):
    return current_lock().key, then()

@only_one("{name}:{a}", when_busy=lambda error: error.key)
async def work_async(a, deeper=True):
    return current_lock().key, await work_async(a, False) if deeper else None

def send():
    return subprocess.run([sys.executable, "receiver.py", *sys.argv[1:]], input=cloudpickle.dumps([work, work_async]))

configure(redis=sys.argv[1], prefix=sys.argv[2])
work(1, send)
"""
RECEIVER = """
import asyncio, pickle, sys
from only_one import configure

configure(redis=sys.argv[1], prefix=sys.argv[2])
work, work_async = pickle.load(sys.stdin.buffer)
print(work(1), work(2), asyncio.run(work_async(3)))
"""


def test_a_function_of_main_that_cloudpickle_sends_to_another_process_has_the_same_key(
    redis_url: str, prefix: str, tmp_path: Path
) -> None:
    """As Ray and Dask do: the first call meets the sender's own run."""
    (tmp_path / "sender.py").write_text(SENDER)
    (tmp_path / "receiver.py").write_text(RECEIVER)
    command = [sys.executable, "-m", "sender", redis_url, prefix]
    sent = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    key, key_async = f"{prefix}sender.work:2", f"{prefix}sender.work_async:3"
    assert sent.stdout == f"None {(key, None)} {(key_async, key_async)}\n", sent.stderr


def test_the_name_of_a_function_in_a_process_that_was_spawned_by_such_a_program(prefix: str) -> None:
    def work() -> str:
        return current_lock().key

    work.__module__ = "__mp_main__"
    assert only_one("{name}")(work)() == f"{prefix}{__name__}.{work.__qualname__}"


def test_the_name_of_a_function_of_c(prefix: str) -> None:
    covered = only_one("{name}")(math.factorial)
    assert covered(3) == 6
    assert key_of(covered, 3) == f"{prefix}math.factorial"


@pytest.mark.parametrize("made", [functools.cache, functools.singledispatch, functools.partial])
def test_what_python_makes_of_a_function_can_be_decorated(prefix: str, made: Any) -> None:
    def work(*args: object) -> str:
        return current_lock().key

    decorated: Function = only_one("k")(functools.update_wrapper(made(work), work))
    assert decorated(1) == f"{prefix}k"


def test_random_timing(redis: Redis, prefix: str) -> None:
    seed = int(os.environ.get("ONLY_ONE_TEST_SEED") or random.randrange(2**32))
    print(f"ONLY_ONE_TEST_SEED={seed}")
    witness = {key: threading.Lock() for key in "abc"}
    outcome: Counter[str] = Counter()

    def work(key: str, seconds: float, ends_by: str) -> str:
        if not witness[key].acquire(blocking=False):
            outcome["overlaps"] += 1
            return "overlap"
        time.sleep(seconds)
        witness[key].release()
        if ends_by == "exception":
            raise LookupError(key)
        return "ran"

    async def work_async(key: str, seconds: float, ends_by: str) -> str:
        return await asyncio.to_thread(work, key, seconds, ends_by)

    covered = only_one("{key}", timeout=600)(work)
    covered_async = only_one("{key}")(work_async)

    def calls(number: int) -> Counter[str]:
        chance = random.Random(f"{seed}/{number}")
        seen: Counter[str] = Counter()
        for _ in range(30):
            key, seconds = chance.choice("abc"), chance.choice([0, 0, chance.uniform(0, 0.004)])
            ends_by = chance.choice(["return", "return", "exception"])
            try:
                if chance.random() < 0.3:
                    result = asyncio.run(covered_async(key, seconds, ends_by))
                else:
                    result = covered(key, seconds, ends_by)
            except LookupError:
                result = "raised"
            seen[str(result)] += 1
            time.sleep(chance.choice([0, 0, chance.uniform(0, 0.002)]))
        return seen

    with ThreadPoolExecutor(6) as pool:
        seen = sum(pool.map(calls, range(6)), Counter[str]())
    assert outcome["overlaps"] == 0
    assert seen["ran"] > 0
    assert seen["raised"] > 0
    assert seen["None"] > 0
    assert seen.total() == 6 * 30
    assert keys_of(redis, prefix) == []


# --- the end of a run --------------------------------------------------------------------------------------------


class Trouble(Exception):
    """What a run raises."""


def end_of_run(kind: str, during: Callable[[str], object], *, raises: bool) -> None:
    """A run during which something happens to the server or to the key has its own result or exception."""

    @only_one("k")
    def work() -> str:
        during(current_lock().key)
        if raises:
            raise Trouble
        return "result"

    @only_one("k")
    async def work_async() -> str:
        during(current_lock().key)
        if raises:
            raise Trouble
        return "result"

    def call() -> str | None:
        return work() if kind == "def" else asyncio.run(work_async())

    if raises:
        with pytest.raises(Trouble) as raised:
            call()
        assert raised.value.__context__ is None
        assert raised.value.__cause__ is None
    else:
        assert call() == "result"


both = pytest.mark.parametrize("kind", ["def", "async def"])
ends = pytest.mark.parametrize("raises", [False, True], ids=["return", "exception"])


@both
@ends
def test_a_result_is_kept_where_the_server_goes_away(server: RedisServer, kind: str, *, raises: bool) -> None:
    end_of_run(kind, lambda _: server.kill(), raises=raises)


@both
def test_a_result_is_kept_where_the_server_does_not_answer(server: RedisServer, kind: str) -> None:
    end_of_run(kind, lambda _: server.pause(), raises=False)
    server.resume()
    covered = only_one("k")(lambda: "ran")
    assert eventually(lambda: covered() == "ran"), "the key that could not be given back never came free"


@both
@ends
@pytest.mark.parametrize("other", ["gone", "somebody else's"])
def test_a_result_is_kept_and_nobody_elses_key_is_touched(
    redis: Redis, prefix: str, kind: str, other: str, *, raises: bool
) -> None:
    def during(key: str) -> None:
        redis.delete(key)
        if other != "gone":
            redis.set(key, other)

    end_of_run(kind, during, raises=raises)
    assert redis.get(f"{prefix}k") == (None if other == "gone" else other.encode())


class BreakingPool(ConnectionPool):
    """Of a client whose code is at fault, not its server."""

    is_broken = False

    def get_connection(self, *args: Any, **options: Any) -> Any:
        """Fail with no error of redis-py."""
        if self.is_broken:
            raise Trouble
        return super().get_connection(*args, **options)


def test_a_result_is_kept_where_the_client_breaks_and_other_runs_keep_their_keys(server: RedisServer) -> None:
    pool = BreakingPool.from_url(server.url)

    def break_it() -> str:
        pool.is_broken = True
        return "result"

    @only_one("long", lease=60)
    def long() -> bool:
        assert only_one("k", redis=Redis(connection_pool=pool))(break_it)() == "result"
        return is_renewed(current_lock())

    assert long()
    pool.is_broken = False
    pool.disconnect()


# --- current_lock ------------------------------------------------------------------------------------------------


def test_current_lock(prefix: str) -> None:
    @only_one("{a}", timeout=600)
    def work(a: str) -> None:
        lock = current_lock()
        assert lock.key == f"{prefix}{a}"
        assert lock.is_held
        assert 0 < lock.expires_in <= 600
        lock.ensure_held()
        assert lock.holder is not None
        assert lock.holder.pid == os.getpid()
        assert lock.holder.name == f"{__name__}.{work.__qualname__}"
        assert lock.holder.task_id is None
        assert lock.holder.state == "running"
        assert lock.holder.deadline == pytest.approx(time.time() + 600, abs=LIMIT)
        assert lock.holder.since == pytest.approx(time.time(), abs=LIMIT)
        seen.append(a)

    seen: list[str] = []
    work("x")
    assert seen == ["x"]


def test_after_its_run_a_lock_is_not_held_any_more() -> None:
    async def work_async() -> object:
        return current_lock()

    locks: list[Any] = [only_one("k")(current_lock)(), asyncio.run(only_one("k")(work_async)())]
    for lock in locks:
        assert not lock.is_held
        assert lock.expires_in == 0
        with pytest.raises(LockLost) as lost:
            lock.ensure_held()
        assert lost.value.reason == "released"


def test_no_argument_is_in_what_stands_in_redis(redis: Redis, prefix: str) -> None:
    @only_one("{name}:{a:md5}")
    def work(a: str) -> object:
        return redis.get(current_lock().key)

    value = work("hunter2")
    assert isinstance(value, bytes)
    assert b"work" in value
    assert b"hunter2" not in value


def test_outside_of_a_run_there_is_no_lock() -> None:
    with pytest.raises(ConfigurationError, match="@only_one"):
        current_lock()
    only_one("k")(lambda: None)()
    with pytest.raises(ConfigurationError, match="@only_one"):
        current_lock()


def test_what_is_in_force_is_worked_out_once() -> None:
    def work(a: int, b: int) -> None: ...

    covered: Any = only_one("k")(work)
    cover = covered.__only_one__
    covered(1, 2)
    plan = cover._options_by_app[None]
    covered(1, 2)
    assert cover._options_by_app[None] is cover.options_for(cover.plain) is plan
    with configure(takeover=False):
        assert cover.options_for(cover.plain) is not plan
    assert cover.digest((1,), {"b": 2}) == digest([1, 2])


# --- what it costs -----------------------------------------------------------------------------------------------


def round_trips(redis: Redis, calls: Callable[[], object]) -> int:
    """How many commands the server has been sent meanwhile; what scripts call themselves is no trip."""

    def counts() -> Counter[str]:
        stats: dict[str, dict[str, int]] = redis.info("commandstats")
        return Counter({name.removeprefix("cmdstat_"): of_it["calls"] for name, of_it in stats.items()})

    before = counts()
    calls()
    spent = counts() - before
    del spent["info"]
    scripts = spent["eval"]
    for inner in ("get", "del"):
        spent[inner] -= min(scripts, spent[inner])
    return spent.total()


@both
@pytest.mark.parametrize("options", [{"timeout": 600}, {"lease": 600}], ids=repr)
def test_a_run_is_two_round_trips_and_a_skip_is_one(redis: Redis, busy: KeyIsBusy, kind: str, options: Any) -> None:
    skip_costs = 1 if int(redis.info("server")["redis_version"].split(".")[0]) >= 7 else 2

    @only_one("{a}", **options)
    def work(a: int) -> str:
        return "ran"

    @only_one("{a}", **options)
    async def work_async(a: int) -> str:
        return "ran"

    async def ten_times(a: int) -> None:
        for _ in range(10):
            await work_async(a)

    def ten(a: int) -> object:
        return [work(a) for _ in range(10)] if kind == "def" else runner.run_until_complete(ten_times(a))

    runner = asyncio.new_event_loop()
    with closing(runner), busy("1", lease=600):
        ten(1)
        ten(2)  # the connections are made, and the server is known
        assert is_idle()
        assert round_trips(redis, lambda: ten(2)) == 20
        assert round_trips(redis, lambda: ten(1)) == 10 * skip_costs
        runner.run_until_complete(runner.shutdown_asyncgens())
