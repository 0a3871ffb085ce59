"""The witness: every run writes down when it begins and ends, and does not ask the lock.

All processes append to one file, one `write` per line, so no line is lost when its writer is killed.
The clock is the machine's monotonic one, which is the same in all its processes.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import dropwhile
from math import inf
from pathlib import Path

from only_one import Busy


def directory() -> Path:
    """Where the demo keeps its files."""
    return Path(os.environ.get("DEMO_DIRECTORY", "."))


def row_of(name: str) -> str:
    """The row of the picture to which a feed's URL, a task's name or a key belongs: its last part."""
    return re.split("[/:.]", name)[-1]


def note(kind: str, row: str, pid: int | None = None) -> None:
    """Append a line to the journal.

    Args:
        kind: "tick", "start", "end", "kill" or "skip".
        row: the task, or the task's feed.
        pid: the process in which it happened, if it is not this one.
    """
    line = json.dumps([time.monotonic(), kind, row, pid or os.getpid()]) + "\n"
    with (directory() / "journal").open("ab", buffering=0) as file:
        file.write(line.encode())


@contextmanager
def witnessed(row: str) -> Iterator[None]:
    """Note the start and the end of the run inside; a run that is killed or fails notes no end.

    Args:
        row: what runs.
    """
    note("start", row)
    yield
    note("end", row)


def note_skip(event: object) -> None:
    """Note that a call was skipped; to be given to `only_one.subscribe`."""
    if isinstance(event, Busy):
        note("skip", row_of(event.key))


@dataclass
class Run:
    """One run; times are in seconds of the journal's clock.

    Attributes:
        pid: the process in which it ran.
        start: when it began.
        end: when it ended; infinite while it runs.
        outcome: "running", "finished" or "killed".
    """

    pid: int
    start: float
    end: float = inf
    outcome: str = "running"


@dataclass
class Row:
    """What happened to one task, or to one feed of a task."""

    ticks: list[float] = field(default_factory=list)
    skips: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def overlaps(self) -> list[float]:
        """When a run began although an earlier one had not ended."""
        found, busy_until = [], -inf
        for run in self.runs:
            if run.start < busy_until:
                found.append(run.start)
            busy_until = max(busy_until, run.end)
        return found

    @property
    def since_kill(self) -> list[Run]:
        """The run that was killed, and those that began later; empty if none was killed."""
        return list(dropwhile(lambda run: run.outcome != "killed", self.runs))

    @property
    def is_settled(self) -> bool:
        """Whether each tick has become a run or a skip, and nothing runs."""
        is_idle = all(run.outcome != "running" for run in self.runs)
        return is_idle and len(self.ticks) == len(self.runs) + len(self.skips)


Rows = Mapping[str, Row]
OUTCOMES = {"end": "finished", "kill": "killed"}


def read(names: Iterable[str]) -> Rows:
    """Everything that the journal tells so far.

    Args:
        names: the rows, in the order in which they are shown.
    """
    rows = {name: Row() for name in names}
    text = (directory() / "journal").read_text()
    lines = [json.loads(line) for line in text.split("\n")[:-1]]  # the last one may be half written
    for at, kind, name, pid in sorted(lines):
        row = rows[name]
        if kind == "start":
            row.runs.append(Run(pid, at))
        elif kind in OUTCOMES:
            run = next(run for run in reversed(row.runs) if run.pid == pid)
            run.end, run.outcome = at, OUTCOMES[kind]
        else:
            {"tick": row.ticks, "skip": row.skips}[kind].append(at)
    return rows
