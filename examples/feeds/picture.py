"""The journal for people: rows over time, and what became of the run that was killed."""

import time
from collections.abc import Iterator
from math import inf

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from .journal import Row, Rows

SIGNS = {
    "running": ("━", "green"),
    "skipped": ("╳", "yellow"),  # noqa: RUF001 - a cross over the whole cell
    "finished": ("●", "bold green"),
    "killed": ("K", "bold white on red"),
    "overlap": ("!", "bold white on magenta"),
}
"""The character and the colour of a state; the later one wins where two fall into one character."""

MARK_EVERY = 5
"""Seconds between two marks of the axis."""

LABEL_WIDTH = 14


class Picture:
    """What happened so far, drawn to the width of a terminal.

    Args:
        title: the first line.
        duration: seconds for which it must have room, and for a little more.
    """

    def __init__(self, title: str, duration: float) -> None:
        self._title, self._duration = title, duration
        self.rows: Rows = {}

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
        room = max(options.max_width - LABEL_WIDTH - 2, 10)
        every = max(int(room / (1.15 * self._duration) * MARK_EVERY), 1)
        begin = min((row.ticks[0] for row in self.rows.values() if row.ticks), default=inf)
        table = Table("", _axis(room, every), box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name, row in self.rows.items():
            table.add_row(name, Text.assemble(*_cells(row, begin, MARK_EVERY / every, room)))
        table.add_row("total", _total(self.rows), style="bold")
        legend = [part for state, sign in SIGNS.items() for part in (sign, f" {state}   ")]
        notes = map(Text, _notes(self.rows))
        yield Group(Text(self._title, "bold"), "", table, "", Text.assemble(*legend), "", *notes)


def _total(rows: Rows) -> str:
    names = ("ticks", "runs", "skips", "overlaps")
    return ", ".join(f"{sum(len(getattr(row, name)) for row in rows.values())} {name}" for name in names)


def _axis(room: int, every: int) -> str:
    """The seconds, one mark in so many characters."""
    return "".join(f"{number * MARK_EVERY} s".ljust(every) for number in range(room // every + 1))[:room]


def _cells(row: Row, begin: float, step: float, room: int) -> Iterator[tuple[str, str] | str]:
    """The sign to show in each character, which stands for `step` seconds; a blank where nothing happened."""
    moments = [(run.end, run.outcome) for run in row.runs]
    moments += [(at, "skipped") for at in row.skips] + [(at, "overlap") for at in row.overlaps]
    for number in range(room):
        start, end = begin + number * step, begin + (number + 1) * step
        states = {state for at, state in moments if start <= at < end}
        if any(run.start < end and start < min(run.end, time.monotonic()) for run in row.runs):
            states.add("running")
        shown = [sign for state, sign in SIGNS.items() if state in states]
        yield shown[-1] if shown else " "


def _notes(rows: Rows) -> Iterator[str]:
    yield "Runs and overlaps: counted from what each run wrote down itself, not from the lock."
    for name, row in rows.items():
        if row.since_kill:
            killed, *later = row.since_kill
            yield f"Killed: process {killed.pid}, in the middle of {name}, by SIGKILL."
            if later:
                yield f"The next run of {name} began {later[0].start - killed.end:.1f} s later."


def has_recovered(rows: Rows) -> bool:
    """Whether a feed whose import was killed has been imported again."""
    return any(run.outcome == "finished" for row in rows.values() for run in row.since_kill)


def problem(rows: Rows) -> str | None:
    """Why the demo has failed, in one line; None if it has not.

    Args:
        rows: everything that happened.
    """
    checks = {
        "two runs overlapped": any(row.overlaps for row in rows.values()),
        "nothing was skipped": not any(row.skips for row in rows.values()),
        "not every tick became a run or a skip": not all(row.is_settled for row in rows.values()),
        "no import was killed and made again": not has_recovered(rows),
    }
    return next((reason for reason, failed in checks.items() if failed), None)
