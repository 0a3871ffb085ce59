"""The journal as a person asks for it: per row its ticks, runs and skips, and whether two runs overlapped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .journal import Line


@dataclass
class Run:
    """One run.

    Attributes:
        pid: the process that it ran in.
        start: when it began, in seconds of the journal's clock.
        end: when it ended; None while it runs.
        outcome: "running", "finished", "failed" or "killed".
    """

    pid: int
    start: float
    end: float | None = None
    outcome: str = "running"


@dataclass
class Row:
    """What happened to one task, or to one feed of a task; times are in seconds of the journal's clock."""

    name: str
    ticks: list[float] = field(default_factory=list)
    skips: list[float] = field(default_factory=list)
    trouble: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def running(self) -> list[Run]:
        """The runs that have no end yet."""
        return [run for run in self.runs if run.end is None]

    @property
    def overlaps(self) -> list[float]:
        """When a run began although an earlier one had not ended."""
        found, busy_until = [], float("-inf")
        for run in sorted(self.runs, key=lambda run: run.start):
            if run.start < busy_until:
                found.append(run.start)
            busy_until = max(busy_until, float("inf") if run.end is None else run.end)
        return found

    @property
    def adds_up(self) -> bool:
        """Whether every tick was a run or a skip."""
        return len(self.ticks) == len(self.runs) + len(self.skips)

    @property
    def killed(self) -> Run | None:
        """The run that was killed, if one was."""
        return next((run for run in self.runs if run.outcome == "killed"), None)

    @property
    def next_after_kill(self) -> Run | None:
        """The first run that began after one was killed."""
        killed = self.killed
        return next((run for run in self.runs if killed and killed.end and run.start > killed.end), None)

    def end(self, pid: int, at: float, outcome: str) -> None:
        """Note the end of the last run of a process.

        Args:
            pid: the process.
            at: when it ended.
            outcome: see `Run`.
        """
        for run in reversed(self.runs):
            if run.pid == pid:
                run.end, run.outcome = at, outcome
                return


OUTCOMES = {"end": "finished", "fail": "failed", "kill": "killed"}


class History:
    """Everything that the journal has told so far.

    Attributes:
        rows: the rows by name, in the order in which they are shown.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.rows = {name: Row(name) for name in names}

    def add(self, line: Line) -> None:
        """Take in one line of the journal.

        Args:
            line: the line.
        """
        row = self.rows[line.row]
        if line.kind == "start":
            row.runs.append(Run(line.pid, line.at))
        elif line.kind in OUTCOMES:
            row.end(line.pid, line.at, OUTCOMES[line.kind])
        else:
            {"tick": row.ticks, "skip": row.skips}.get(line.kind, row.trouble).append(line.at)

    @property
    def begin(self) -> float | None:
        """When the job began: at the first tick."""
        return min((row.ticks[0] for row in self.rows.values() if row.ticks), default=None)

    @property
    def adds_up(self) -> bool:
        """Whether every tick so far has become a run or a skip."""
        return all(row.adds_up for row in self.rows.values())

    @property
    def is_settled(self) -> bool:
        """Whether it adds up, and nothing runs."""
        return self.adds_up and not any(row.running for row in self.rows.values())

    @property
    def killed_row(self) -> Row | None:
        """The row in which a run was killed, if one was."""
        return next((row for row in self.rows.values() if row.killed), None)
