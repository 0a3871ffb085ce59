"""The history for people: a live picture in a terminal, or a line per event where there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .history import History, Row
from .journal import Line

STEPS = (0.1, 0.2, 0.25, 0.4, 0.5, 1.0)
"""Seconds that one character of the picture may stand for."""

MARK_EVERY = 5
RECENT = 4
LABEL_WIDTH = 14
COUNTS_WIDTH = 14

SAID = {
    "start": "running in process {pid}",
    "end": "finished",
    "fail": "failed",
    "kill": "killed: process {pid} gets SIGKILL",
    "skip": "skipped: process {pid} holds the key",
    "lost": "lost its key",
    "down": "has no server",
}


@dataclass(frozen=True)
class Mark:
    """How a state looks.

    Attributes:
        glyph: its character.
        plain: its character where only ASCII can be shown.
        style: its colour.
    """

    glyph: str
    plain: str
    style: str


MARKS = {
    "running": Mark("━", "=", "green"),
    "skipped": Mark("\N{BOX DRAWINGS LIGHT DIAGONAL CROSS}", "x", "yellow"),
    "finished": Mark("●", "o", "bold green"),
    "failed": Mark("F", "F", "bold red"),
    "killed": Mark("K", "K", "bold white on red"),
    "overlap": Mark("!", "!", "bold white on magenta"),
}
"""The later one wins where two fall into one character."""


class View(Protocol):
    """Shows what happens."""

    def show(self, history: History, lines: Sequence[Line], now: float) -> None:
        """Show the news.

        Args:
            history: everything so far.
            lines: what is new in it.
            now: the journal's clock.
        """


@contextmanager
def view(console: Console, title: str, duration: float) -> Iterator[View]:
    """Show the job for the length of a `with` block, as the terminal, or what is there in place of one, can.

    Args:
        console: where to.
        title: the first line.
        duration: seconds that the picture has to have room for.

    Yields:
        The view.
    """
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield LiveView(live, Picture(title, duration, ascii_only=not console.encoding.startswith("utf")))
    else:
        print(title, flush=True)
        yield PlainView()


def sentence(line: Line, begin: float) -> str:
    """One event in words; empty for what is not worth a line.

    Args:
        line: the event.
        begin: when the job began, in seconds of the journal's clock.
    """
    if line.kind not in SAID:
        return ""
    return f"{line.at - begin:6.2f} s  {line.row:{LABEL_WIDTH}}  {SAID[line.kind].format(pid=line.pid)}"


class PlainView:
    """A line per event."""

    def show(self, history: History, lines: Sequence[Line], now: float) -> None:
        """Print the news; see `View`."""
        for line in lines:
            if text := sentence(line, history.begin or now):
                print(text, flush=True)


class LiveView:
    """A picture that is drawn anew several times a second."""

    def __init__(self, live: Live, picture: Picture) -> None:
        self._live = live
        self._picture = picture
        self._recent: deque[Line] = deque(maxlen=RECENT)

    def show(self, history: History, lines: Sequence[Line], now: float) -> None:
        """Draw the picture with the news; see `View`."""
        self._recent.extend(line for line in lines if line.kind in SAID)
        picture = self._picture.draw(history, list(self._recent), now, self._live.console.width)
        self._live.update(picture, refresh=True)


class Picture:
    """Draws rows over time, to the width of a terminal."""

    def __init__(self, title: str, duration: float, *, ascii_only: bool) -> None:
        self._title = title
        self._duration = duration
        self._ascii_only = ascii_only

    def draw(self, history: History, recent: Sequence[Line], now: float, width: int) -> Group:
        """The picture at a moment.

        Args:
            history: everything so far.
            recent: the events to tell in words.
            now: the journal's clock.
            width: characters from side to side.
        """
        room = max(width - LABEL_WIDTH - COUNTS_WIDTH - 4, 10)
        step = next((step for step in STEPS if self._duration / step <= room), STEPS[-1])
        columns = min(room, round(self._duration / step) + 1)
        begin = history.begin or now
        table = Table.grid(padding=(0, 2))
        for size in (LABEL_WIDTH, columns, COUNTS_WIDTH):
            table.add_column(width=size, no_wrap=True)
        table.add_row("", _axis(columns, step), Text("runs   skips", "dim"))
        for row in history.rows.values():
            cells = _cells(row, begin, now, step, columns)
            table.add_row(row.name, self._bar(cells), f"{len(row.runs):4}    {len(row.skips):4}")
        words = [Text(sentence(line, begin), "dim", no_wrap=True, overflow="ellipsis") for line in recent]
        words += [Text("")] * (RECENT - len(words))
        return Group(self._heading(now - begin), "", table, "", self._legend(), "", *words)

    def _heading(self, elapsed: float) -> Text:
        at = f"{elapsed:.1f} s of about {self._duration:g} s" if elapsed > 0 else "starting"
        return Text.assemble((self._title, "bold"), "\n", (at, "bold cyan"), no_wrap=True)

    def _glyph(self, state: str) -> tuple[str, str]:
        mark = MARKS[state]
        return (mark.plain if self._ascii_only else mark.glyph, mark.style)

    def _bar(self, cells: Sequence[str]) -> Text:
        return Text.assemble(*(self._glyph(state) if state else " " for state in cells))

    def _legend(self) -> Text:
        parts = [part for state in MARKS for part in (self._glyph(state), f" {state}   ")]
        return Text.assemble(*parts, no_wrap=True)


def _axis(columns: int, step: float) -> Text:
    marks = [" "] * columns
    for second in range(0, round(columns * step), MARK_EVERY):
        label = f"{second}s"
        at = round(second / step)
        marks[at : at + len(label)] = label
    return Text("".join(marks[:columns]), "dim")


def _cells(row: Row, begin: float, now: float, step: float, columns: int) -> list[str]:
    """The state to show in each column; empty where there is none."""
    order = list(MARKS)
    cells = [""] * columns

    def put(at: float, state: str) -> None:
        column = int((at - begin) / step)
        if 0 <= column < columns and (not cells[column] or order.index(state) > order.index(cells[column])):
            cells[column] = state

    for run in row.runs:
        end = now if run.end is None else run.end
        for column in range(int((end - run.start) / step) + 1):
            put(run.start + column * step, "running")
        put(end, run.outcome)
    for at in row.skips:
        put(at, "skipped")
    for at in row.overlaps:
        put(at, "overlap")
    return cells
