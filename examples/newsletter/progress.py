"""How far a mailing is: two bars in a terminal, or a line now and then where there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import journal, spool
from .recipients import Mailing

EVERY = 2.0
"""Seconds between two lines."""

LIVE_EVERY = 0.25
"""Seconds between two looks at the files."""


class View(Protocol):
    """Shows how far it is."""

    def show(self, chunks: int, mails: int) -> None:
        """Show it.

        Args:
            chunks: how many are made.
            mails: how many are sent.
        """


class Follower:
    """Sees how far a mailing is by looking at its files, and shows it."""

    def __init__(self, mailing: Mailing, view: View) -> None:
        self._mailing, self._view, self._next = mailing, view, 0.0
        self.made_at: float | None = None

    def look(self, *, last: bool = False) -> None:
        """Look, if it is time to.

        Args:
            last: look in any case.
        """
        now = time.monotonic()
        missing = spool.missing(self._mailing) if self.made_at is None else []
        if not missing and self.made_at is None:
            self.made_at = now
        if last or now >= self._next:
            self._next = now + LIVE_EVERY
            self._view.show(self._mailing.chunks - len(missing), journal.count(self._mailing))


@contextmanager
def follow(mailing: Mailing, mails: int) -> Iterator[Follower]:
    """Show a mailing's progress on standard error for the length of a `with` block.

    Args:
        mailing: which one.
        mails: how many there will be.

    Yields:
        What has to be told to look.
    """
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        follower = Follower(mailing, Lines(mailing.chunks, mails))
        yield follower
        follower.look(last=True)
        return
    columns = TextColumn("{task.description:7}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        follower = Follower(mailing, Bars(progress, mailing.chunks, mails))
        yield follower
        follower.look(last=True)


class Bars:
    """A bar for the chunks and one for the mails."""

    def __init__(self, progress: Progress, chunks: int, mails: int) -> None:
        self._progress = progress
        self._chunks = progress.add_task("chunks", total=chunks)
        self._mails = progress.add_task("mails", total=mails, start=False)

    def show(self, chunks: int, mails: int) -> None:
        """Draw them; see `View`."""
        if mails:
            self._progress.start_task(self._mails)
        self._progress.update(self._chunks, completed=chunks)
        self._progress.update(self._mails, completed=mails)


class Lines:
    """A line when something has changed, every other second at most."""

    def __init__(self, chunks: int, mails: int) -> None:
        self._totals = chunks, mails
        self._last = (-1, -1)
        self._next = 0.0

    def show(self, chunks: int, mails: int) -> None:
        """Print it; see `View`."""
        now = (chunks, mails)
        if now == self._last or (time.monotonic() < self._next and now != self._totals):
            return
        self._last, self._next = now, time.monotonic() + EVERY
        Console(stderr=True).print(
            f"chunks {chunks} of {self._totals[0]}, mails {mails} of {self._totals[1]}", highlight=False
        )
