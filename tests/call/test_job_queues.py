"""A job of another queue that finds a previous attempt of itself at its key. `make queues` shows the real queues."""

# ruff: noqa: ARG001 - a fixture that configures something is asked for by name

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from only_one import AlreadyRunning, current_lock, fail, only_one, skip
from only_one.call import job_queues
from only_one.lock.token import TokenFactory
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, Function, as_async, both, decorated
from tests.faults.programs import Program
from tests.lock.test_holder import changed

ID = "job-1"
ELSEWHERE = {"machine": "another", "host": "another"}
LONG = 600_000


class Requeued(Exception):
    """What a queue raises to requeue a job, with its options."""

    def __init__(self, *_: str, **options: float) -> None:
        self.options = options


def in_rq(attempt: int | None, left: int | None = None) -> dict[str, Any]:
    job = SimpleNamespace(id=ID, number_of_retries=attempt, retries_left=left)
    return {"rq": SimpleNamespace(get_current_job=lambda: job)}


def in_dramatiq(message: Any, *later: Any) -> dict[str, Any]:
    """In the run of a message, and after the first look at it in the runs of others."""
    messages = itertools.chain([message], itertools.repeat(later[-1] if later else message))
    current = SimpleNamespace(get_current_message=lambda: next(messages))
    errors = SimpleNamespace(Retry=Requeued)
    return {"dramatiq": SimpleNamespace(middleware=SimpleNamespace(CurrentMessage=current), errors=errors)}


MESSAGE, REDELIVERED = (SimpleNamespace(message_id=ID, options={"retries": 1}) for _ in range(2))
ARQ = {"arq": SimpleNamespace(Retry=Requeued)}
CONTEXT = {"job_id": ID, "job_try": 1, "redis": None}
REQUEUES: dict[str, Any] = {
    "delay": (in_dramatiq(MESSAGE), (), 1000, ("a previous attempt holds the key",)),
    "defer": (ARQ, (CONTEXT,), 1, ()),
}
"""By the option for the time: the queue, the arguments, the units of a second, and what the error says."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """A callable that has modules imported."""

    def install(modules: dict[str, Any]) -> None:
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    return install


@pytest.fixture
def hold(redis: Redis, key: str) -> Callable[..., None]:
    """A callable that has an attempt of the job hold the key, on another machine if nothing else is said."""

    def hold(milliseconds: int, attempt: int | None = 1, **changes: Any) -> None:
        value = TokenFactory("m.f", ID, attempt).token(None)
        redis.set(key, changed(value, **(changes or ELSEWHERE)), px=milliseconds)

    return hold


def ran(*_: Any) -> tuple[str | None, int | None, str | None]:
    """The work that the run names in its token, and its queue."""
    holder: Any = current_lock().holder
    return holder.task_id, holder.attempt, holder.queue


def named(*_: Any) -> str:
    return ID


NONE = (None, None, None)
OTHERS = {"process": "another"}
"""Another process of this machine, which lives: it has the number of this one."""


@both
@pytest.mark.parametrize(
    ("modules", "args", "options", "work"),
    [
        ({}, (), {}, NONE),
        ({}, (), {"work_id": named}, (ID, None, None)),
        ({}, (7,), {"work_id": lambda job: job}, ("7", None, None)),
        (in_rq(2), (7,), {"work_id": lambda job: None}, NONE),  # noqa: ARG005
        (in_rq(2), (), {}, (ID, 2, "rq")),
        (in_rq(None), (), {}, (ID, 0, "rq")),
        (in_rq(None, 1), (), {}, (ID, None, "rq")),
        ({"rq": SimpleNamespace(get_current_job=lambda: None)}, (), {}, NONE),
        ({"rq": SimpleNamespace()}, (), {}, NONE),  # another's, or half imported
        (in_dramatiq(MESSAGE), (), {}, (ID, 1, "dramatiq")),
        (in_dramatiq(SimpleNamespace(message_id=ID, options={})), (), {}, (ID, 0, "dramatiq")),
        (in_dramatiq(None), (), {}, NONE),
        (ARQ, (CONTEXT,), {}, (ID, 1, "arq")),
        (ARQ, ({"job_id": ID},), {}, NONE),
        (ARQ, (7,), {}, NONE),
        (ARQ, (), {}, NONE),
        ({}, (CONTEXT,), {}, NONE),
    ],
)
def test_a_run_names_its_job(
    redis: Redis, install: Any, decorate: Decorate, modules: Any, args: Any, options: Any, work: Any
) -> None:
    install(modules)
    body: Function = (lambda job: ran()) if args else (lambda: ran())  # noqa: ARG005, PLW0108
    assert decorate(body, **options)(*args) == work


def test_inside_of_a_celery_task_no_other_queue_is_asked(redis: Redis, install: Any) -> None:
    install(in_rq(2))

    def work() -> Any:
        return decorated(ran)(), decorated(ran, work_id=named)()

    assert Celery(set_as_current=False).task(work, name="t").apply().get() == (NONE, (ID, None, None))


@both
@pytest.mark.parametrize(
    ("modules", "options", "held", "result"),
    [
        (in_rq(2), {}, {}, ID),
        (in_rq(None, 1), {}, {"attempt": None}, ID),
        ({}, {"work_id": named, "when_busy": skip}, {"attempt": None}, ID),
        ({}, {"work_id": named, "timeout": 600}, {"attempt": None}, ID),
        ({}, {"work_id": named}, {"attempt": None, **OTHERS}, ID),
        (in_rq(2), {"when_busy": fail}, OTHERS, ID),
        (in_rq(2), {"takeover": False}, {**OTHERS, "pid": 2**30}, ID),  # dead, and not taken over
        (in_rq(2), {}, {**ELSEWHERE, "attempt": 3}, None),  # later, or of other work with the same id
        (in_rq(2), {}, {**ELSEWHERE, "task_id": "job-2"}, None),
        (in_rq(2), {}, {**ELSEWHERE, "state": "kept"}, None),  # it has succeeded
        (in_rq(2), {"takeover": False}, {"state": "running"}, ID),  # of this process, in which no such run is under way
        ({}, {"work_id": named}, ELSEWHERE, None),  # whose attempt is not known here
        (in_rq(2), {"work_id": lambda: None}, ELSEWHERE, None),
        ({}, {}, ELSEWHERE, None),
    ],
)
def test_it_waits_for_a_previous_attempt_and_is_busy_by_all_else(
    install: Any, hold: Any, decorate: Decorate, modules: Any, options: Any, held: Any, result: str | None
) -> None:
    """Whatever the policy says."""
    install(modules)
    hold(300 if result else LONG, **held)
    job, *_ = decorate(ran, **options)() or NONE
    assert job == result


@pytest.mark.usefixtures("redis")
@pytest.mark.parametrize("begun", ["outside of runs", "in a run of other work", "in one that is over by then"])
def test_an_attempt_in_the_same_process_waits_for_the_other_and_a_call_from_inside_the_run_does_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    """A consumer may be a run itself, and a start-up may begin one."""
    monkeypatch.setattr("only_one.call.run.time", None)  # whose `sleep` would block the event loop
    calls: list[asyncio.Task[Any]] = []
    under_way: list[str] = []
    caplog.set_level(logging.INFO, "only_one")

    @only_one("job", work_id=named)
    async def work() -> str:
        under_way.append("work")
        nested = await work()
        waits = f"{__name__}.{work.__qualname__} waits for the key of a previous attempt of job {ID}"
        assert await asyncio.to_thread(eventually, lambda: waits in caplog.messages)
        assert under_way == ["work"]
        under_way.clear()
        return f"done, nested: {nested}"

    def begin() -> None:
        calls.extend(asyncio.create_task(work()) for _ in range(2))

    @only_one("consumer")
    async def consumer() -> None:
        begin()
        if begun == "in a run of other work":
            await asyncio.wait(calls)

    async def program() -> Any:
        begin() if begun == "outside of runs" else await consumer()
        return await asyncio.gather(*calls)

    assert asyncio.run(program()) == ["done, nested: None"] * 2


@pytest.mark.usefixtures("redis")
@pytest.mark.parametrize(
    ("modules", "second"),
    [
        (lambda: ARQ, "NoneType"),
        (lambda: in_rq(1), "NoneType"),
        (lambda: in_dramatiq(MESSAGE), "NoneType"),
        (lambda: in_dramatiq(MESSAGE, REDELIVERED), "Requeued"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"work_id": named}], ids=["known", "work_id"])
def test_of_two_calls_of_a_job_at_once(install: Any, modules: Callable[[], Any], second: str, options: Any) -> None:
    """Neither is the previous attempt of the other; a redelivery that comes to the same process is one of it."""
    install(modules())
    has_ended = asyncio.Event()

    @only_one("k", **options)
    async def work(_context: Any) -> str:
        await has_ended.wait()
        return "done"

    async def job() -> None:
        calls = [asyncio.create_task(work(CONTEXT.copy())) for _ in range(2)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        has_ended.set()
        results: Any = await asyncio.gather(*calls, return_exceptions=True)
        assert {each if each == "done" else type(each).__name__ for each in results} == {"done", second}

    asyncio.run(job())


@both
@pytest.mark.parametrize(("option", "row"), REQUEUES.items())
@pytest.mark.parametrize("options", [{}, {"timeout": 600}, {"work_id": named}], ids=["lease", "timeout", "work_id"])
def test_its_queue_requeues_it_until_the_key_expires(
    redis: Any, key: str, install: Any, hold: Any, decorate: Decorate, option: str, row: Any, options: Any, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "only_one")
    modules, args, second, text = row
    install(modules)
    hold(LONG, attempt=None)
    body: Function = (lambda ctx: "ran") if args else (lambda: "ran")  # noqa: ARG005
    with pytest.raises(Requeued) as raised:
        decorate(body, **options)(*args)
    assert raised.value.args == text
    assert list(raised.value.options) == [option]
    assert 600 - LIMIT < raised.value.options[option] / second <= 600
    assert redis.pttl(key) > LONG / 2
    name = f"{__name__}.{body.__qualname__}"
    assert f"{name} requeues job {ID}: a previous attempt holds {key}" in caplog.messages


@pytest.mark.usefixtures("redis")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_inside_of_a_run_is_no_attempt_of_a_job_that_only_work_id_names() -> None:
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()

    @only_one("k", work_id=named)
    def work(then: Callable[[], object]) -> str:
        then()
        return "done"

    def call_in_child() -> None:
        process = fork.Process(target=lambda: results.put(work(bool)))
        process.start()
        process.join()

    assert work(call_in_child) == "done"
    assert not results.empty(), "the child's call has failed"
    assert results.get() is None


def in_a_loop(body: Function, **options: Any) -> Function:
    return lambda: asyncio.run(as_async(decorated(body, **options))())


GIVES_UP: dict[str, tuple[Callable[..., Function], dict[str, Any], int]] = {
    "more than a lease is left": (decorated, {"timeout": 600}, LONG),
    "more than its lease is left": (decorated, {"lease": 100}, LONG),
    "it would block the event loop": (in_a_loop, {}, 20_000),
}


@pytest.mark.parametrize("case", GIVES_UP)
def test_it_raises_at_once_where_it_may_not_wait(redis: Redis, key: str, hold: Any, case: str) -> None:
    decorate, options, milliseconds = GIVES_UP[case]
    hold(milliseconds, attempt=None)
    with pytest.raises(AlreadyRunning) as raised:
        decorate(ran, work_id=named, when_busy=skip, **options)()
    assert raised.value.task_id == ID
    assert redis.pttl(key) > milliseconds / 4


@both
def test_it_gives_up_after_a_lease_while_the_holder_lives(
    hold: Any, monkeypatch: pytest.MonkeyPatch, decorate: Decorate
) -> None:
    moments = iter([0, 0, 3600, 3601])  # it comes, and looks at once, after a lease, and a second later
    monkeypatch.setattr(job_queues, "now", lambda: next(moments))
    monkeypatch.setattr(job_queues, "_ASKS_EVERY", 0.01)
    hold(LONG, attempt=None)
    with pytest.raises(AlreadyRunning):
        decorate(ran, work_id=named, lease=3600)()
    assert list(moments) == []


IMPORTS = """
import sys, redis, redis.asyncio
before = {name.partition(".")[0] for name in sys.modules}
import only_one, only_one.call.job_queues
new = {name.partition(".")[0] for name in sys.modules} - before
print(*new - sys.stdlib_module_names)
"""


@pytest.mark.sees_mutmut
def test_nothing_of_a_queue_is_imported() -> None:
    """Nor anything else than the standard library and redis-py, with what that imports: so it costs nothing."""
    with Program(IMPORTS) as program:
        assert program.line() == "only_one"
