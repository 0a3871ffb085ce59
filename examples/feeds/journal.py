"""The witness: every run writes down when it begins and ends, and does not ask the lock.

One file for all processes, opened with O_APPEND, one `write` per line: so no line is torn, and none is lost when its
writer is killed.
The clock is the machine's monotonic one, which is the same in all its processes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from only_one import Busy, Down, Lost


def directory() -> Path:
    """Where the demo keeps its files."""
    return Path(os.environ.get("DEMO_DIRECTORY", tempfile.gettempdir()))


def _journal() -> Path:
    return directory() / "journal.jsonl"


@dataclass(frozen=True)
class Line:
    """One line of the journal.

    Attributes:
        at: when, in seconds of the monotonic clock.
        kind: "tick", "start", "end", "fail", "kill", "skip", "lost" or "down".
        row: the task, or the task's feed.
        pid: the process that it happened in; of a skip, the process that held the key.
    """

    at: float
    kind: str
    row: str
    pid: int


def note(kind: str, row: str, pid: int | None = None) -> None:
    """Append a line to the journal.

    Args:
        kind: what happened; see `Line`.
        row: to what.
        pid: the process that it happened in, if it is not this one.
    """
    line = Line(time.monotonic(), kind, row, os.getpid() if pid is None else pid)
    file = os.open(_journal(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(asdict(line)).encode() + b"\n")
    finally:
        os.close(file)


@contextmanager
def witnessed(row: str) -> Iterator[None]:
    """Note the start and the end of the run inside; a run that is killed has no end.

    Args:
        row: what runs.
    """
    note("start", row)
    try:
        yield
    except BaseException:
        note("fail", row)
        raise
    note("end", row)


def note_event(event: object, row: str) -> None:
    """Note what only_one reports of a call, as far as the demo shows it.

    Args:
        event: what a hook of `only_one.subscribe` is given.
        row: what was called.
    """
    if isinstance(event, Busy):
        note("skip", row, event.holder.pid if event.holder else 0)
    elif isinstance(event, (Lost, Down)):
        note(type(event).__name__.lower(), row)


class Reader:
    """Reads a journal that is still being written."""

    def __init__(self) -> None:
        self._path = _journal()
        self._path.touch()
        self._position = 0

    def read(self) -> list[Line]:
        """The lines that have come since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            whole = file.read().rpartition(b"\n")[0]
        self._position += len(whole) + 1 if whole else 0
        return [Line(**json.loads(line)) for line in whole.splitlines()]
