"""What has come of a mailing, by the SMTP server's own list and a query of the database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from . import memory, places, recipients, spool
from .recipients import CHOSEN, Mailing

ACCEPTED = "accepted"
"""The SMTP server's file."""

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Summary:
    """What has come of a mailing.

    Attributes:
        recipients: who were chosen.
        messages: made for them.
        accepted: by the SMTP server, in all, and those twice that were.
        duplicates: accepted for somebody who had one already.
        wrong: accepted for somebody who was not chosen: unsubscribed, excluded, or not included.
        seconds: from the start to the end.
        peak_mb: the memory of the largest process, in megabytes; None where the system does not tell.
    """

    recipients: int
    messages: int
    accepted: int
    duplicates: int
    wrong: int
    seconds: float
    peak_mb: float | None

    def line(self) -> str:
        """The summary for a machine."""
        return json.dumps(asdict(self))

    def text(self, making: float, sending: float) -> str:
        """The summary for people.

        Args:
            making: seconds that making took.
            sending: seconds that sending took.
        """
        largest = "unknown" if self.peak_mb is None else f"{self.peak_mb:.0f}"
        return "\n".join(
            [
                f"recipients  {self.recipients:9}  chosen",
                f"messages    {self.messages:9}  made in {making:.1f} s{_rate(self.messages, making)}",
                f"accepted    {self.accepted:9}  by the SMTP server in {sending:.1f} s{_rate(self.accepted, sending)}",
                f"duplicates  {self.duplicates:9}",
                f"wrong       {self.wrong:9}  unsubscribed or excluded, mailed all the same",
                f"memory      {largest:>9}  MB, of the largest process",
            ]
        )

    @property
    def problem(self) -> str | None:
        """Why the mailing is not as it should be; None if it is."""
        if self.wrong:
            return f"{self.wrong} were written to who should not have been"
        if (got := self.accepted - self.duplicates) != self.recipients:
            return f"{got} of {self.recipients} have got it"
        return None


def _rate(number: int, seconds: float) -> str:
    return f", {number / seconds:.0f} a second" if seconds > 1 else ""


def summary(mailing: Mailing, seconds: float) -> Summary:
    """Sum up a mailing, while the processes are still there whose memory it tells.

    Args:
        mailing: which one.
        seconds: what it took.
    """
    counts = accepted(mailing)
    peak = memory.peak()
    return Summary(
        recipients.count(mailing),
        sum(spool.count(mailing, number) for number in range(mailing.chunks) if spool.path(mailing, number).exists()),
        *counts,
        seconds=round(seconds, 2),
        peak_mb=None if peak is None else round(peak / MEGABYTE, 1),
    )


def accepted(mailing: Mailing) -> tuple[int, int, int]:
    """What the SMTP server has accepted: all, those who had it already, and those who were not chosen.

    Args:
        mailing: which one.
    """
    people = (places.directory() / recipients.FILE).as_uri() + "?mode=ro"
    with closing(sqlite3.connect("", uri=True)) as connection:  # a file of its own, which grows no memory
        connection.execute("ATTACH ? AS house", (people,))
        connection.execute("CREATE TABLE accepted (email TEXT COLLATE NOCASE)")
        connection.executemany("INSERT INTO accepted VALUES (?)", _lines(places.directory() / ACCEPTED))
        everybody, distinct = connection.execute("SELECT count(*), count(DISTINCT email) FROM accepted").fetchone()
        (wrong,) = connection.execute(
            f"SELECT count(*) FROM accepted WHERE email NOT IN (SELECT email {CHOSEN})",  # noqa: S608
            {**mailing.tags(), "after": 0, "last": mailing.last},
        ).fetchone()
        return everybody, everybody - distinct, wrong


def _lines(path: Path) -> Iterator[tuple[str]]:
    with path.open() as file:
        for line in file:
            yield (line.rstrip("\n"),)
