"""Exceptions out of nowhere: a soft time limit or Ctrl-C may be raised at any line of ours, and leaves nothing behind.

Here they are raised at every line in turn, found by tracing a call, and by real signals at random moments.
"""

from __future__ import annotations

import asyncio
import dis
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import pytest
import redis as redis_py
from celery.exceptions import SoftTimeLimitExceeded

import only_one as package
from only_one import AlreadyRunning, ConfigurationError, current_lock, events, fail, leases, only_one
from only_one.events import Event
from tests.proxy import Proxy
from tests.waiting import LIMIT, eventually

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = [pytest.mark.interrupts, pytest.mark.timeout(method="thread")]  # as SIGALRM is ours

NAME = "k"
LEASE = 0.4
OURS = str(Path(package.__file__).parent)
SOON = 2.0
"""Seconds within which a key is free that would expire in 600 s; usually it is a few thousandths."""

MOST = 3000
"""Places in one call; there are a few hundred."""

Call = Callable[[], Any]
Trace = Callable[[FrameType, str, Any], Any]


class Runner:
    """An event loop that several coroutines run in, one after the other, as `asyncio.Runner` is from Python 3.11."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        return self

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class Interruption(BaseException):
    """What a signal handler may raise, as Celery's does at a soft time limit."""


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


class AtLine:
    """Raises an error before the n-th line of ours that a call comes to.

    Attributes:
        where: the place, once it has been come to.
    """

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self._left = number
        self._error = error
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Trace | None:
        """What `sys.settrace` is given: looks at the calls of functions."""
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        return self.look if event == "call" else None

    def look(self, frame: FrameType, event: str, _argument: Any) -> Trace:
        if event == "line":
            self.count(frame)
        return self.look

    def count(self, frame: FrameType) -> None:
        self._left -= 1
        if not self._left:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise self._error


_after_calls: dict[CodeType, set[int]] = {}


def after_calls(code: CodeType) -> set[int]:
    """The instructions of a function that come after a call: where Python looks for signals, beside its begin."""
    if code not in _after_calls:
        found, called = {0}, False
        for each in dis.get_instructions(code):
            if called:
                found.add(each.offset)
            called = each.opname.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")) or each.opname == "RESUME"
        _after_calls[code] = found
    return _after_calls[code]


class AfterCall(AtLine):
    """The same, where Python itself looks for signals: when a function begins, and after each call that it makes."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        found = super().__call__(frame, event, argument)
        if found is not None:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return found

    def look(self, frame: FrameType, event: str, _argument: Any) -> Trace:
        if event == "opcode" and frame.f_lasti in after_calls(frame.f_code):
            self.count(frame)
        return self.look


@contextmanager
def traced(trace: AtLine) -> Iterator[None]:
    """Have this thread traced; coverage, if it is at work, goes on after it."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def held() -> list[Any]:
    """What is renewed."""
    return leases._renewer.held()


def nothing_is_held() -> bool:
    """Whether the run is over, for all that can be seen of it in here."""
    try:
        lock = current_lock()
    except ConfigurationError:
        return not held()
    return not lock.is_held and not held()


def interrupt(trace: AtLine, call: Call) -> tuple[Any, bool]:
    """Call with an interruption; returns what came of it, and whether nothing is held after it."""
    try:
        with traced(trace):
            result = call()
    except (Interruption, SoftTimeLimitExceeded, KeyboardInterrupt, AlreadyRunning) as error:
        return error, nothing_is_held()
    return result, nothing_is_held()


def check_every_place(
    kind: type[AtLine], make: Callable[[], Call], check: Callable[[], None], error: type[BaseException] = Interruption
) -> None:
    """Interrupt a call at each place in turn, until it comes through without."""
    interrupted = 0
    for number in range(1, MOST):
        trace = kind(number, error)
        # In a context of its own: what `current_lock()` gives after an interruption is not for other tests.
        result, is_over = copy_context().run(interrupt, trace, make())
        print(f"interrupted at {trace.where}, place {number}")  # shown when it fails
        assert is_over
        check()
        if not trace.where:
            break
        interrupted += isinstance(result, error)
    else:
        pytest.fail(f"there are more than {MOST} places")
    assert interrupted > 20


TIMES = {"lease": {"lease": LEASE}, "timeout": {"timeout": 600}, "both": {"timeout": 600, "lease": 60}}
KINDS: dict[str, type[AtLine]] = {"lines": AtLine}
if sys.version_info < (3, 12):  # whose tracing shows every instruction
    KINDS["after calls"] = AfterCall


def work() -> str:
    return "done"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_a_run_that_is_interrupted(redis: Any, key: str, kind: type[AtLine], times: Any) -> None:
    covered = only_one(work, key=NAME, **times)
    assert covered() == "done"
    limit = LEASE + 1 if times == TIMES["lease"] else SOON

    def check() -> None:
        assert eventually(lambda: not redis.exists(key), limit), f"left for {redis.pttl(key)} ms: {redis.get(key)}"
        assert covered() == "done"

    check_every_place(kind, lambda: covered, check)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tracing does not show every instruction there")
def test_a_first_run_that_is_interrupted(redis: Any, key: str) -> None:
    """Not at every line: tracing can raise between the end of a `with` block and its exit, and no signal can."""

    def check() -> None:
        assert eventually(lambda: not redis.exists(key), SOON), f"left for {redis.pttl(key)} ms: {redis.get(key)}"
        assert only_one(work, key=NAME, timeout=600)() == "done"

    check_every_place(AfterCall, lambda: only_one(work, key=NAME, timeout=600), check)


@pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")  # interrupted between its call and the await
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_async_run_that_is_interrupted(redis: Any, key: str, kind: type[AtLine]) -> None:
    async def work_async() -> str:
        await asyncio.sleep(0)
        return "done"

    covered = only_one(work_async, key=NAME, timeout=600)
    with Runner() as runner:
        runner.run(covered())

        def check() -> None:
            assert eventually(lambda: not redis.exists(key), SOON), f"left for {redis.pttl(key)} ms: {redis.get(key)}"
            assert runner.run(covered()) == "done"

        check_every_place(kind, lambda: lambda: runner.run(covered()), check)


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, KeyboardInterrupt])
def test_a_run_that_is_interrupted_by_others_exceptions(redis: Any, key: str, error: type[BaseException]) -> None:
    covered = only_one(lambda: "done", key=NAME, timeout=600)
    assert covered() == "done"

    def check() -> None:
        assert eventually(lambda: not redis.exists(key), SOON), f"left for {redis.pttl(key)} ms: {redis.get(key)}"
        assert covered() == "done"

    check_every_place(AtLine, lambda: covered, check, error)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_a_call_that_is_interrupted_while_busy(redis: Any, key: str, kind: type[AtLine], policy: str) -> None:
    options: dict[str, Any] = {"when_busy": fail} if policy == "fail" else {}
    covered = only_one(lambda: "done", key=NAME, timeout=600, **options)
    assert covered() == "done"

    def make() -> Call:
        redis.set(key, "somebody else")
        return covered

    def check() -> None:
        assert redis.get(key) == b"somebody else"
        redis.delete(key)
        assert covered() == "done"
        assert not redis.exists(key)

    check_every_place(kind, make, check)


def test_a_run_that_is_interrupted_while_it_takes_over(redis: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.logger, "disabled", True)  # or most places are those of the log
    covered = only_one(lambda: "done", key=NAME, timeout=600)
    tokens: list[bytes] = []

    def look() -> None:
        tokens.append(redis.get(key))

    only_one(look, key=NAME, timeout=600)()
    # The same machine, and a process that there is not.
    dead = tokens[0].replace(b'"pid":%d,' % os.getpid(), b'"pid":%d,' % 2**30)
    assert dead != tokens[0]

    def make() -> Call:
        redis.set(key, dead, px=600_000)
        return covered

    def check() -> None:
        assert eventually(lambda: redis.get(key) in (None, dead), SOON), redis.get(key)
        assert covered() == "done"
        assert not redis.exists(key)

    check_every_place(AtLine, make, check)


def test_a_run_that_is_interrupted_and_kept(redis: Any, key: str) -> None:
    """It is free, or kept as after any run that has succeeded; but never held."""
    covered = only_one(lambda: "done", key=NAME, timeout=600, at_least=1)
    assert covered() == "done"
    redis.delete(key)

    def is_free_or_kept() -> bool:
        value = redis.get(key)
        return value is None or (b'"kept"' in value and redis.pttl(key) <= 1000)

    def check() -> None:
        assert eventually(is_free_or_kept, SOON), f"left for {redis.pttl(key)} ms: {redis.get(key)}"
        redis.delete(key)

    check_every_place(AtLine, lambda: covered, check)


def test_a_run_of_which_is_told(redis: Any, key: str) -> None:
    """With somebody who listens, there are more lines to be interrupted at."""
    covered = only_one(lambda: "done", key=NAME, timeout=600)
    told: list[Event] = []
    unsubscribe = package.subscribe(told.append)
    try:
        assert covered() == "done"

        def check() -> None:
            assert eventually(lambda: not redis.exists(key), SOON), f"left for {redis.pttl(key)} ms: {redis.get(key)}"

        check_every_place(AtLine, lambda: covered, check)
    finally:
        unsubscribe()
    assert told


def test_a_server_that_is_down(server: Any, key: str) -> None:
    """What is to be released later is, though it was interrupted when it was noted down."""
    covered = only_one(lambda: "done", key=NAME, timeout=600, when_down=lambda _error: "down")
    assert covered() == "done"
    server.kill()
    assert covered() == "down"
    check_every_place(AtLine, lambda: covered, lambda: None)
    server.start()
    assert covered() == "done"
    with redis_py.Redis.from_url(server.url) as client:
        assert eventually(lambda: not client.exists(key), SOON)


# Real signals


@contextmanager
def alarms() -> Iterator[None]:
    """SIGALRM raises."""

    def interrupt(*_: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted_after(seconds: float, call: Call) -> bool:
    """Call, and have it interrupted after a time; whether it was."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interruption:
        return True
    return False


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised where Python collects garbage
def test_runs_that_are_interrupted_by_signals(redis: Any, redis_url: str, key: str, times: Any) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    limit = LEASE + 1 if times == TIMES["lease"] else SOON

    def fresh() -> tuple[Any, Call, float]:
        """A client of its own, as redis-py's pool may lose a connection; and how long a call takes."""
        client = redis_py.Redis.from_url(redis_url)
        call = only_one(lambda: "done", key=NAME, redis=client, **times)
        assert call() == "done"
        began = time.monotonic()
        assert [call() for _ in range(10)] == ["done"] * 10
        return client, call, (time.monotonic() - began) / 10

    hits, waited = 0, 0.0
    client, call, usual = fresh()
    with alarms():
        for number in range(300):
            if number % 25 == 24:
                client.close()
                client, call, usual = fresh()
            moment = max(1e-6, moments.uniform(0, 1.3 * usual))
            if copy_context().run(interrupted_after, moment, call):
                hits += 1
            assert nothing_is_held()
            began = time.monotonic()
            assert eventually(lambda: not redis.exists(key), limit), f"{redis.pttl(key)} ms: {redis.get(key)}"
            waited = max(waited, time.monotonic() - began)
            assert call() == "done"
    client.close()
    print(f"{hits} of 300 interrupted; a key was left for {waited:.3f} s at the most")
    assert hits > 50


class BeforeReply(AtLine):
    """Raises when redis-py has sent a command and is about to read the reply."""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Trace | None:
        if event == "call" and frame.f_code.co_name == "parse_response":
            self.count(frame)
        return None


def test_a_reply_that_nobody_waits_for_is_not_taken_for_another(redis: Any, redis_url: str, prefix: str) -> None:
    """A call is interrupted when redis-py has sent its SET; "it was free" is not the answer to the next one's."""
    with Proxy(redis_url) as proxy:
        first, second = [only_one(work, key=name, timeout=600, redis=proxy.url) for name in ("first", "second")]
        assert [first(), second()] == ["done", "done"]
        redis.set(f"{prefix}second", "somebody else")
        held_up = proxy.hold_up("SET")
        assert isinstance(copy_context().run(interrupt, BeforeReply(1, Interruption), first)[0], Interruption)
        assert held_up.met.wait(LIMIT)
        letting_go = threading.Timer(0.2, held_up.let_go)
        letting_go.start()
        assert second() is None
        letting_go.join()
        assert redis.get(f"{prefix}second") == b"somebody else"
        assert eventually(lambda: not redis.exists(f"{prefix}first"), SOON)


def test_signals_during_a_run_that_is_renewed(redis: Any, key: str) -> None:
    """What is raised by a signal ends the run, and with it the renewal; the thread that renews lives on."""

    @only_one(NAME, lease=LEASE)
    def work() -> None:
        time.sleep(60)

    with alarms():
        for seconds in (0.05, 1.2 * LEASE, 2.5 * LEASE):
            assert copy_context().run(interrupted_after, seconds, work)
            assert nothing_is_held()
            assert not redis.exists(key)
    assert [each.name for each in threading.enumerate()].count("only_one-leases") == 1
    again = only_one(lambda: not eventually(lambda: not redis.exists(key), 3 * LEASE), key=NAME, lease=LEASE)
    assert again()


class Calling(AfterCall):
    """Calls something, as a handler of signals may, where Python looks for signals."""

    def __init__(self, number: int, then: Call) -> None:
        super().__init__(number, Interruption)
        self._then = then

    def count(self, frame: FrameType) -> None:
        self._left -= 1
        if not self._left:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self._then()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("first", [False, True], ids=["later calls", "first calls"])
def test_a_handler_that_calls_what_is_covered_at_every_place(redis: Any, key: str, *, first: bool) -> None:
    """It waits for nothing that the interrupted call holds."""

    def cover(name: str) -> Call:
        return only_one(work, key=name, timeout=600)

    outer, inner = cover(NAME), cover("inner")
    assert (outer(), inner()) == ("done", "done")
    for number in range(1, MOST):
        results: list[Any] = []
        call, then = (cover(NAME), cover("inner")) if first else (outer, inner)
        trace = Calling(number, lambda then=then, results=results: results.append(then()))  # type: ignore[misc]
        with traced(trace):
            assert call() == "done"
        assert not held()
        assert not redis.exists(key)
        if not trace.where:
            break
        assert results == ["done"], trace.where
    assert number > 20


def test_a_handler_that_calls_what_is_covered(redis: Any, key: str) -> None:
    """In the middle of a run or of a registration: a handler may do so at any moment, and waits for nothing."""
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    inner = only_one(lambda: "inner", key="inner", lease=LEASE)
    outer = only_one(lambda: "outer", key=NAME, lease=LEASE)
    results: list[Any] = []
    before = signal.signal(signal.SIGALRM, lambda *_: results.append(inner()))
    try:
        for number in range(200):
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 2e-3))
            assert outer() == "outer"
            assert eventually(partial(lambda wanted: len(results) == wanted, number + 1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert results == ["inner"] * 200
    assert not redis.exists(key)
    assert not held()
