"""What comes out of nowhere: an exception, or a signal handler's call, at a chosen line of ours or after a time."""

from __future__ import annotations

import dis
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import only_one as package
from rigs.waiting import LIMIT

OURS = str(Path(package.__file__).parent)

Trace = Callable[[FrameType, str, Any], Any]


class Interruption(BaseException):
    """What a signal handler may raise, as Celery's does at a soft time limit."""


def raises(error: BaseException | type[BaseException]) -> Callable[..., None]:
    """What such a handler does, or whatever else a test puts in a function's place."""

    def call(*_: object, **__: object) -> None:
        raise error

    return call


def raises_at_first(error: BaseException | type[BaseException]) -> Callable[..., None]:
    """What a handler does that has a second signal end the process, before it raises at the first."""

    def call(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise error

    return call


interrupt = raises(Interruption)


EVERY_INSTRUCTION_IS_TRACED = sys.version_info < (3, 12)


class AtPlace:
    """Does something, such as to raise, at the n-th place of ours that a call comes to.

    A place is where Python looks for signals: where a function begins, and after each call that it makes. From Python
    3.12 on, whose tracing does not show these, it is each line.

    Attributes:
        where: the place, once the call has come to it.
    """

    def __init__(self, number: int, then: Callable[[], object] = interrupt) -> None:
        self._left = number
        self._then = then
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Trace | None:
        """What `sys.settrace` is given: looks at the calls of functions."""
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = EVERY_INSTRUCTION_IS_TRACED, not EVERY_INSTRUCTION_IS_TRACED
        return self._look

    def _look(self, frame: FrameType, event: str, _argument: Any) -> Trace:
        self._left -= event == "line" or (event == "opcode" and frame.f_lasti in _after_calls(frame.f_code))
        if not self._left and not self.where:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            sys.settrace(None)  # it is costly, and has done its work
            self._then()
        return self._look


@cache
def _after_calls(code: CodeType) -> set[int]:
    """The instructions of a function that come after a call, and its first one."""
    offsets, was_call = {0}, False
    for each in dis.get_instructions(code):
        if was_call:
            offsets.add(each.offset)
        was_call = each.opname.startswith(("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")) or each.opname == "RESUME"
    return offsets


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Have this thread traced; coverage, if it is at work, goes on after it."""
    before = sys.gettrace()
    with garbage_left():
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


@contextmanager
def garbage_left() -> Iterator[None]:
    """Collect no garbage meanwhile.

    The lines in which an earlier call's coroutine ends are none of this call's. And Python drops an exception that
    comes while it collects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def handled(handle: Callable[..., object], number: int = signal.SIGALRM) -> Iterator[None]:
    """Have a signal handled until the end of the block, at which no alarm is left."""
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


def while_handling(error: type[BaseException], call: Callable[[], object]) -> None:
    """Call where an exception is handled that a signal handler has raised before, and which is none of the call's."""
    with handled(raises(error), signal.SIGUSR1):
        try:
            signal.raise_signal(signal.SIGUSR1)
        except error:
            call()


def is_interrupted_after(seconds: float, call: Callable[[], object]) -> bool:
    """Call, and have an alarm in the middle of it; returns whether it was interrupted."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Call the handler now if the alarm came last. Else, while other threads run, Python may call it after this
        # function. Signal 0 sends nothing, and has Python look for signals that have come.
        signal.pthread_kill(threading.get_ident(), 0)
    except Interruption:
        return True
    return False


@contextmanager
def raised_after(
    event: threading.Event, error: type[BaseException], handler: Callable[..., Callable[..., None]] = raises
) -> Iterator[None]:
    """A block in whose thread, the main one, a signal handler raises once something has happened."""

    def send_signal() -> None:
        event.wait(LIMIT)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    with handled(handler(error), signal.SIGUSR1):
        threading.Thread(target=send_signal).start()
        yield
