"""Exceptions out of nowhere: a soft time limit or Ctrl-C may be raised at any line of ours, and leaves nothing behind.

Here they are raised at every line in turn, found by tracing a call, and by real signals at random moments.
"""

from __future__ import annotations

import asyncio
import dis
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from only_one import AlreadyRunning, ConfigurationError, current_lock, events, fail, only_one
from only_one.events import Event
from only_one.lock import renewal
from rigs.waiting import LIMIT, eventually
from tests.proxy import Proxy
from tests.renewal import is_renewed

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = [pytest.mark.interrupts, pytest.mark.timeout(method="thread")]  # as SIGALRM is ours

OURS = str(Path(package.__file__).parent)
MOST = 3000
"""Places in one call; there are a few hundred."""

Call = Callable[[], Any]
CallWith = Callable[[str], Any]
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
    """Have this thread traced; coverage, if it is at work, goes on after it.

    No garbage is collected meanwhile: the lines in which an earlier call's coroutine ends are none of this call's.
    """
    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


def held() -> list[Any]:
    """What is renewed."""
    return renewal._renewer.held()


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
    except (Interruption, SoftTimeLimitExceeded, AlreadyRunning) as error:
        return error, nothing_is_held()
    return result, nothing_is_held()


class Keys:
    """The keys of a test, of which each interrupted call has one of its own: nobody waits for one before the next."""

    def __init__(self, client: Any, prefix: str) -> None:
        self.client = client
        self._prefix = prefix

    def __call__(self, which: str) -> str:
        """A key as it is in Redis."""
        return self._prefix + which

    def is_free(self, which: str) -> bool:
        """Whether the key is not there."""
        return not self.client.exists(self(which))

    def left(self) -> list[tuple[bytes, Any]]:
        """What is there, to say so when it should not be."""
        return [(key, self.client.get(key)) for key in self.client.scan_iter(f"{self._prefix}*")]


@pytest.fixture
def keys(redis: Any, prefix: str) -> Keys:
    return Keys(redis, prefix)


def check_every_place(
    keys: Keys,
    kind: type[AtLine],
    call: CallWith,
    *,
    error: type[BaseException] = Interruption,
    before: Callable[[str], None] = lambda _: None,
    is_over: Callable[[str], bool] | None = None,
    gives: Any = "done",
) -> None:
    """Interrupt a call at each place in turn, until it comes through without.

    Args:
        keys: the keys; each call has its number as key.
        kind: where it is interrupted.
        call: the call, which is given its key.
        error: what is raised.
        before: what is done with the key before the call.
        is_over: whether the key is as it should be some time after the call; if not given, it is free.
        gives: what an undisturbed call gives; one is made after each interruption, as it must not be told of that.
    """
    interrupted = 0
    for number in range(1, MOST):
        which = str(number)
        before(which)
        trace = kind(number, error)
        # In a context of its own: what `current_lock()` gives after an interruption is not for other tests.
        result, has_ended = copy_context().run(interrupt, trace, partial(call, which))
        print(f"interrupted at {trace.where}, place {number}")  # shown when it fails
        assert has_ended
        before("after")
        assert call("after") == gives
        if not trace.where:
            break
        interrupted += isinstance(result, error)
    else:
        pytest.fail(f"there are more than {MOST} places")
    assert interrupted > 20
    for which in map(str, range(1, number + 1)):
        assert eventually(lambda: (is_over or keys.is_free)(which)), (which, keys.left())  # noqa: B023


TIMES = {"lease": {"lease": 600}, "timeout": {"timeout": 600}}
KINDS: dict[str, type[AtLine]] = {"lines": AtLine}
if sys.version_info < (3, 12):  # whose tracing shows every instruction
    KINDS["after calls"] = AfterCall


def work(which: str) -> str:
    return "done" if which else ""


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_a_run_that_is_interrupted(keys: Keys, kind: type[AtLine], times: Any) -> None:
    covered = only_one(work, key="{which}", **times)
    assert covered("first") == "done"
    check_every_place(keys, kind, covered)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tracing does not show every instruction there")
def test_a_first_run_that_is_interrupted(keys: Keys) -> None:
    """Not at every line: tracing can raise between the end of a `with` block and its exit, and no signal can."""

    later = only_one(work, key="{which}", timeout=600)

    def covered(which: str) -> Any:
        call = later if which == "after" else only_one(work, key="{which}", timeout=600)
        return call(which)

    check_every_place(keys, AfterCall, covered)


@pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")  # interrupted between its call and the await
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_async_run_that_is_interrupted(keys: Keys, kind: type[AtLine]) -> None:
    @only_one("{which}", timeout=600)
    async def work_async(which: str) -> str:
        await asyncio.sleep(0)
        return work(which)

    with Runner() as runner:
        runner.run(work_async("first"))
        check_every_place(keys, kind, lambda which: runner.run(work_async(which)))


def test_a_run_that_is_interrupted_by_celery_s_time_limit(keys: Keys) -> None:
    """Which is an `Exception`, as those of redis-py are."""
    covered = only_one(work, key="{which}", timeout=600)
    assert covered("first") == "done"
    check_every_place(keys, AtLine, covered, error=SoftTimeLimitExceeded)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("policy", [None, fail], ids=["skip", "fail"])
def test_a_call_that_is_interrupted_while_busy(keys: Keys, kind: type[AtLine], policy: Any) -> None:
    options: dict[str, Any] = {"when_busy": policy} if policy else {}
    covered = only_one(work, key="{which}", timeout=600, **options)
    assert covered("first") == "done"

    def before(which: str) -> None:
        if which != "after":
            keys.client.set(keys(which), "somebody else")

    def is_over(which: str) -> bool:
        return bool(keys.client.get(keys(which)) == b"somebody else")

    check_every_place(keys, kind, covered, before=before, is_over=is_over)


def test_a_run_that_is_interrupted_while_it_takes_over(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.logger, "disabled", True)  # or most places are those of the log
    covered = only_one(work, key="{which}", timeout=600)
    assert covered("first") == "done"
    tokens: list[bytes] = []
    only_one(lambda: tokens.append(current_lock().token), key="token", timeout=600)()
    # The same machine, and a process that there is not.
    dead = tokens[0].replace(b'"pid":%d,' % os.getpid(), b'"pid":%d,' % 2**30)
    assert dead != tokens[0]

    def before(which: str) -> None:
        keys.client.set(keys(which), dead, px=600_000)

    def is_over(which: str) -> bool:
        return keys.client.get(keys(which)) in {None, dead}

    check_every_place(keys, AtLine, covered, before=before, is_over=is_over)


def test_a_run_that_is_interrupted_and_kept(keys: Keys) -> None:
    """It is free, or kept as after any run that has succeeded; but never held."""
    covered = only_one(work, key="{which}", timeout=600, at_least=300)
    assert covered("first") == "done"

    def before(which: str) -> None:
        keys.client.delete(keys(which))

    def is_over(which: str) -> bool:
        value = keys.client.get(keys(which))
        return value is None or (b'"kept"' in value and keys.client.pttl(keys(which)) <= 300_000)

    check_every_place(keys, AtLine, covered, before=before, is_over=is_over)


def test_a_run_of_which_is_told(keys: Keys) -> None:
    """With somebody who listens, there are more lines to be interrupted at."""
    covered = only_one(work, key="{which}", timeout=600)
    told: list[Event] = []
    unsubscribe = package.subscribe(told.append)
    try:
        assert covered("first") == "done"
        check_every_place(keys, AtLine, covered)
    finally:
        unsubscribe()
    assert told


def test_a_server_that_is_down(server: Any, prefix: str) -> None:
    """What is to be released later is, though it was interrupted when it was noted down."""
    covered = only_one(work, key="{which}", timeout=600, when_down=lambda _error: "down")
    assert covered("first") == "done"
    server.kill()
    with redis_py.Redis.from_url(server.url) as client:
        check_every_place(Keys(client, prefix), AtLine, covered, is_over=lambda _: True, gives="down")
        server.start()
        assert eventually(lambda: covered("first") == "done")
        assert eventually(lambda: not client.keys())


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised where Python collects garbage
def test_runs_that_are_interrupted_by_signals(keys: Keys, redis_url: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)

    def fresh() -> tuple[Any, CallWith, float]:
        """A client of its own, as redis-py's pool may lose a connection; and how long a call takes."""
        client = redis_py.Redis.from_url(redis_url)
        call = only_one(work, key="{which}", redis=client, lease=600)
        assert call("first") == "done"
        began = time.monotonic()
        assert [call("first") for _ in range(10)] == ["done"] * 10
        return client, call, (time.monotonic() - began) / 10

    hits = 0
    client, call, usual = fresh()
    with alarms():
        for number in range(300):
            if number % 25 == 24:
                client.close()
                client, call, usual = fresh()
            moment = max(1e-6, moments.uniform(0, 1.3 * usual))
            if copy_context().run(interrupted_after, moment, partial(call, str(number))):
                hits += 1
            assert nothing_is_held()
            assert call("after") == "done"
    client.close()
    print(f"{hits} of 300 interrupted")
    assert hits > 20
    assert eventually(lambda: not keys.left()), keys.left()


class BeforeReply(AtLine):
    """Calls something when redis-py has sent the n-th command and is about to read its reply."""

    def __init__(self, number: int, then: Call) -> None:
        super().__init__(number, Interruption)
        self._then = then

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Trace | None:
        caller = frame.f_back.f_code.co_name if frame.f_back else ""
        if event == "call" and frame.f_code.co_name == "read_response" and caller in ("attempt", "parse_response"):
            self._left -= 1
            if not self._left:
                self._then()
        return None


class Subclass(redis_py.Redis):
    """A client that is used as it is, with a pool that keeps a connection whose reply is yet to come."""


@pytest.mark.parametrize("kind", [redis_py.Redis, Subclass])
@pytest.mark.parametrize("which", ["SET", "extend", "release"])
def test_a_reply_that_nobody_waits_for_is_not_taken_for_another(
    redis: Any, redis_url: str, prefix: str, kind: type[redis_py.Redis], which: str
) -> None:
    """A run is interrupted when redis-py has sent its SET, what it asks of its lock, or its release.

    The reply is not taken for that to the release, nor for that to the next one's SET.

    Connections that others use meanwhile are left to them.
    """

    def soft_time_limit() -> None:
        raise SoftTimeLimitExceeded

    with Proxy(redis_url) as proxy, ThreadPoolExecutor(1) as pool:
        client = kind.from_url(proxy.url, socket_timeout=2 * LIMIT)

        def ask() -> None:
            if which == "extend":
                current_lock().extend(5)

        first = only_one(ask, key="first", timeout=600, redis=client)
        second = only_one(lambda: "done", key="second", timeout=600, redis=client)
        assert [first(), second()] == [None, "done"]
        redis.set(f"{prefix}second", "somebody else")
        waiting = pool.submit(client.execute_command, "BLPOP", f"{prefix}list", LIMIT)
        assert eventually(lambda: "BLPOP" in proxy.commands)
        held_up = proxy.hold_up(*(["SET"] if which == "SET" else ["DELIFEQ", "DELEX", "EVAL"]))
        number = 1 if which == "SET" else 2
        result, _ = copy_context().run(interrupt, BeforeReply(number, soft_time_limit), first)
        assert isinstance(result, SoftTimeLimitExceeded) == (which != "release")
        assert held_up.met.wait(LIMIT)
        with traced(BeforeReply(1, held_up.let_go)):
            assert second() is None
        redis.rpush(f"{prefix}list", "a reply")
        assert waiting.result(LIMIT)[1] == b"a reply"
        client.close()
        assert redis.get(f"{prefix}second") == b"somebody else"
        assert eventually(lambda: not redis.exists(f"{prefix}first"))


def test_signals_during_a_run_that_is_renewed(keys: Keys) -> None:
    """What is raised by a signal ends the run, and with it the renewal; the thread that renews lives on."""

    @only_one("{which}", lease=600)
    def renews(which: str) -> None:
        assert is_renewed(current_lock())
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(LIMIT)
        assert not which

    with alarms():
        for which in "abc":
            with pytest.raises(Interruption):
                copy_context().run(renews, which)
            assert nothing_is_held()
            assert keys.is_free(which)
    assert [each.name for each in threading.enumerate()].count("only_one-leases") == 1
    assert only_one(lambda: is_renewed(current_lock()), key="d", lease=600)()


if sys.version_info < (3, 12):  # whose tracing shows every instruction
    Places = AfterCall
else:
    Places = AtLine


class Calling(Places):
    """Calls something, as a handler of signals may, where Python looks for signals."""

    def __init__(self, number: int, then: Call) -> None:
        super().__init__(number, Interruption)
        self._then = then

    def count(self, frame: FrameType) -> None:
        self._left -= 1
        if not self._left:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            sys.settrace(None)  # it is costly, and has done its work
            self._then()


@pytest.mark.timeout(LIMIT, method="thread")  # it would wait without end
@pytest.mark.parametrize("first", [False, True], ids=["later calls", "first calls"])
def test_a_handler_that_calls_what_is_covered_at_every_place(keys: Keys, *, first: bool) -> None:
    """It waits for nothing that the interrupted call holds."""

    def cover(name: str) -> Call:
        return only_one(lambda: "done", key=name, timeout=600)

    outer, inner = cover("outer"), cover("inner")
    assert (outer(), inner()) == ("done", "done")
    for number in range(1, MOST):
        results: list[Any] = []
        call, then = (cover("outer"), cover("inner")) if first else (outer, inner)
        trace = Calling(number, lambda then=then, results=results: results.append(then()))  # type: ignore[misc]
        with traced(trace):
            assert call() == "done"
        assert not held()
        assert keys.is_free("outer")
        if not trace.where:
            break
        assert results == ["done"], trace.where
    assert number > 20


def test_a_handler_that_calls_what_is_covered(keys: Keys) -> None:
    """In the middle of a run or of a registration: a handler may do so at any moment, and waits for nothing."""
    seed = random.randrange(2**32)
    print("seed", seed)
    moments = random.Random(seed)
    inner = only_one(lambda: "inner", key="inner", lease=600)
    outer = only_one(lambda: "outer", key="outer", lease=600)
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
    assert keys.is_free("outer")
    assert not held()
