"""The branches that histories take through the lock's code, and exceptions at its lines, as by a signal handler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from linecache import getline
from pathlib import Path
from typing import Any

from coverage.parser import PythonParser

Branch = tuple[str, int, int]

ROOMS = ("/only_one/lock/", "/only_one/call/", "/only_one/driver.py")


class Interrupted(Exception):
    """Raised in the middle of a call, as by a signal handler."""


def handle_signal(error: BaseException, _interrupted: Any) -> None:
    """Raise an exception as a signal handler does, which Python calls with the interrupted frame."""
    raise error


class Tracer:
    """Traces a thread: counts its branches, and raises at a line of the package, or of redis-py.

    Attributes:
        met: how often each branch was taken, by file, line and next line; None if nobody counts.
        left: the lines until the tracer raises; it never does if this is not positive.
        kind: the class of the exception.
        rooms: the folders in whose lines it raises.
        world: the world, which is troubled then.
        raised: the exception that was raised, unless Python or redis-py drops it.
    """

    rooms: tuple[str, ...] = ("/only_one/", "/redis/")

    def __init__(self, met: Counter[tuple[str, int, int]] | None, left: int = 0, world: Any = None) -> None:
        self.met, self.left, self.world = met, left, world
        self.kind: type[Exception] = Interrupted
        self.raised: Exception | None = None

    def trace(self, frame: Any, _what: str, _arg: Any) -> Any:
        file, first, met = frame.f_code.co_filename, frame.f_code.co_firstlineno, self.met
        is_counted, may_raise = _kind_of(file, self.rooms)
        raises = may_raise and self.left > 0 and frame.f_code.co_name not in ("__del__", "_drop")
        if met is None or not is_counted:
            return self._count_down if raises else None
        last = frame.f_lineno if frame.f_lineno != first else -first  # a generator goes on at its last line

        def step(frame: Any, what: str, arg: Any) -> Any:
            nonlocal last
            if what in ("line", "return"):
                now = frame.f_lineno if what == "line" else -first
                met[file, last, now] += 1
                last = now
            if raises:
                self._count_down(frame, what, arg)
            return step

        return step

    def _count_down(self, frame: Any, what: str, _arg: Any) -> Any:
        if what == "line":
            self.left -= 1
            if self.left == 0:
                error = self.kind()
                self.world.troubled_at = self.world.now
                self.raised = None if _is_dropped(frame) else error
                handle_signal(error, frame)
        return self._count_down


def _is_dropped(frame: Any) -> bool:
    """Whether an exception that is raised here is dropped.

    Python drops it while it collects garbage, redis-py while it checks or closes a connection.
    """
    code = frame.f_code
    line = f"{code.co_filename} {code.co_name} {getline(code.co_filename, frame.f_lineno)}"
    is_dropped = re.search(r"/redis/.*( get_connection |sock\.(shutdown|close)\()", line) is not None
    while frame and not is_dropped:
        code, frame = frame.f_code, frame.f_back
        is_dropped = re.search(_DROPS, f"{code.co_filename} {code.co_name} ") is not None
    return is_dropped


_DROPS = "/redis/observability/|/redis/cluster.py initialize "
_DROPS += "| (__del__|_drop|can_read|on_disconnect|pairs_to_dict_typed) "


@cache
def _kind_of(file: str, rooms: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether the branches of a file are counted, and whether its lines may raise."""
    return any(room in file for room in ROOMS), any(room in file for room in rooms)


EXCEPTIONS = {
    "self._bound_key = cache(": "when a function without parameters is decorated",
    'next(iter(self.signature.parameters), None) == "self"': "when a key is refused",
    "return _run_as(_switched_off": "locking is switched off: nothing to interleave",
    "return await _run_as_async(_switched_off": "locking is switched off: nothing to interleave",
    'getattr(result, "close"': "a mistake of the user, who is told at once",
    'msg = "current_lock() was called outside': "a mistake of the user, who is told at once",
    "self.end(next(iter([*self.values()])": "10,000 pending releases at a time",
    'if has_expired or result.status == "taken":': "redis-py's own Lock.release, which no call uses",
    "if step():  # return": "more than 500 leases in a process",
    'sys.modules.keys() & {"gevent.monkey"': "gevent and eventlet",
    "while not self.is_ending:": "the same: they end the thread",
    "if not self.vacancy:  # def end": "the same",
    "if not self.vacancy:  # self.is_ending": "the same",
    "call/job_queues.py": "queues: the jobs of the lock's world are those of `work_id`",
    "if warning := eviction_warning(": "a server that evicts keys, of which only a warning tells",
    "if logger.isEnabledFor(level):  # def": "a logger that nobody hears",
    "call.claim_work():  # if not isinstance": "a task is never an async run",
    "isinstance(call.ended_by, GeneratorExit)": "a coroutine that is closed by hand",
    "if is_of_signal_handler(error):  # raise": "Python traces no line after an exception that its tracer has raised",
    "if any(map(_was_called_by_signal, frames[1:], frames)):  # return True": "the same",
    "if result is CARRIED_ON:": "a mistake of the user, who is told at once",
    "if end is not None:": "the same",
    "for _ in range(3):": "a key that is set and free again three times within one call",
}
"""Branches that no history takes, by their file, or some of their first line and the line after it, and why."""


def describe_rare(package: Path, steps: Counter[Branch], least: int) -> Iterator[str]:
    """Describe the branches of the lock's code, and each of them that was taken less often than ``least`` times.

    A branch is a line from which there are several ways, and the line after it. Of each step it is known how often
    one line came after another.
    """
    kinds: Counter[str] = Counter()
    unused = set(EXCEPTIONS)
    for path in [package / "driver.py", *sorted(package.glob("call/*.py")), *sorted(package.glob("lock/*.py"))]:
        parser, lines = PythonParser(text=path.read_text(), filename=str(path)), ["", *path.read_text().splitlines()]
        parser.parse_source()
        code_of = [line.partition("  # ")[0].strip() for line in lines].__getitem__
        ways = parser.exit_counts()
        taken: Counter[tuple[int, int]] = Counter()
        for step in [step for step in steps if step[0] == str(path)]:
            for branch in parser.translate_arcs([step[1:]]):
                taken[branch] += steps[step]
        for before, after in sorted(branch for branch in parser.arcs() if ways.get(branch[0], 0) > 1):
            text, count = f"{code_of(before)}  # {code_of(abs(after))}", taken[before, after]
            name = f"{path.relative_to(package)}:{before} -> {after}"
            exceptions = {each for each in EXCEPTIONS if each in f"{name} {text}"}
            unused -= exceptions
            kind = "met" if count >= least else "excepted" if exceptions else "rare"
            kinds[kind] += 1
            if kind == "rare":
                yield f"{count:8} {name:32} {text}"[:150]
    yield from (f"no branch has the exception {each!r}" for each in sorted(unused))
    rare = f"{kinds['rare']} were met less than {least} times"
    yield f"{kinds.total()} branches, {kinds['excepted']} are excepted, {rare}"
