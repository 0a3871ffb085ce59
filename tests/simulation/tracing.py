"""The branches that histories take through the lock's code, and exceptions at its lines, as of a signal handler."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from coverage.parser import PythonParser

ROOMS = ("/only_one/lock/", "/only_one/call/")


class Interrupted(Exception):
    """Raised in the middle of a call, as by a signal handler."""


class Tracer:
    """Traces a thread: counts its branches, and raises at a line of the package, or of redis-py.

    Attributes:
        met: how often each branch was taken, by file, line and next line; None if nobody counts.
        left: lines until it raises; none if it is not positive.
    """

    def __init__(self, met: Counter[tuple[str, int, int]] | None, left: int = 0) -> None:
        self.met, self.left = met, left

    def trace(self, frame: Any, _what: str, _arg: Any) -> Any:
        file, first = frame.f_code.co_filename, frame.f_code.co_firstlineno
        counts = self.met is not None and any(room in file for room in ROOMS)
        raises = self.left > 0 and ("/only_one/" in file or "/redis/" in file)
        raises = raises and frame.f_code.co_name not in ("__del__", "_drop")
        if not counts and not raises:
            return None
        last = frame.f_lineno if frame.f_lineno != first else -first  # a generator goes on where it was

        def step(frame: Any, what: str, _arg: Any) -> Any:
            nonlocal last
            if counts and self.met is not None and what in ("line", "return"):
                now = frame.f_lineno if what == "line" else -first
                self.met[file, last, now] += 1
                last = now
            if raises and what == "line":
                self.left -= 1
                if self.left == 0:
                    raise Interrupted
            return step

        return step


def branches_of(package: Path) -> set[tuple[str, int, int]]:
    """The branches of the lock's code: each line from which there are several ways, and the line after it."""
    found: set[tuple[str, int, int]] = set()
    for path in [path for room in ("lock", "call") for path in sorted((package / room).glob("*.py"))]:
        parser = PythonParser(text=path.read_text(), filename=str(path))
        parser.parse_source()
        ways = parser.exit_counts()
        found.update((str(path), line, after) for line, after in parser.arcs() if ways.get(line, 0) > 1)
    return found
