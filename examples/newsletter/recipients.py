"""Who gets a mailing: a database of recipients, their tags, and who has unsubscribed, read by ranges of ids."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import places

FILE = "recipients.sqlite"

BUSY = 2.0
"""Seconds to wait for whoever has the database locked."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS recipients (
    id INTEGER PRIMARY KEY CHECK (id > 0),
    email TEXT NOT NULL UNIQUE COLLATE NOCASE,
    name TEXT NOT NULL,
    unsubscribed INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS tags (
    recipient INTEGER NOT NULL REFERENCES recipients,
    tag TEXT NOT NULL,
    PRIMARY KEY (recipient, tag)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mailings (
    name TEXT PRIMARY KEY,
    include TEXT NOT NULL,
    exclude TEXT NOT NULL,
    size INTEGER NOT NULL,
    last INTEGER NOT NULL
);
"""

CHOSEN = """
FROM recipients WHERE id > :after AND id <= :last AND NOT unsubscribed
AND EXISTS (SELECT 1 FROM tags WHERE recipient = id AND tag IN (SELECT value FROM json_each(:include)))
AND NOT EXISTS (SELECT 1 FROM tags WHERE recipient = id AND tag IN (SELECT value FROM json_each(:exclude)))
"""


@dataclass(frozen=True)
class Recipient:
    """Somebody who is written to."""

    id: int
    email: str
    name: str


@dataclass(frozen=True)
class Mailing:
    """A mailing, as it was when it was first started.

    Attributes:
        name: what it is called, in keys and files.
        include: who has one of these tags is written to,
        exclude: unless they have one of these.
        size: how many ids a chunk spans.
        last: the last id.
    """

    name: str
    include: Sequence[str]
    exclude: Sequence[str]
    size: int
    last: int

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.last // self.size)

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return places.directory() / self.name

    def tags(self) -> dict[str, str]:
        """What the query asks for."""
        return {"include": json.dumps(self.include), "exclude": json.dumps(self.exclude)}


@contextmanager
def database(*, mode: str = "ro") -> Iterator[sqlite3.Connection]:
    """The house's database; what is changed is committed at the end.

    Args:
        mode: "ro", "rw" or "rwc", as in SQLite's URIs.

    Yields:
        A connection.
    """
    uri = f"{(places.directory() / FILE).as_uri()}?mode={mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY)) as connection, connection:
        yield connection


def is_empty() -> bool:
    """Whether there is nobody in the database, or no database."""
    if not (places.directory() / FILE).exists():
        return True
    with database() as connection:
        tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'recipients'").fetchone()
        return not tables[0] or connection.execute("SELECT 1 FROM recipients").fetchone() is None


def add(people: Iterable[tuple[Recipient, bool, Sequence[str]]]) -> None:
    """Add people to the database.

    Args:
        people: each with whether they have unsubscribed, and their tags.
    """
    with database(mode="rwc") as connection:
        connection.executescript(SCHEMA)
        for person, unsubscribed, tags in people:
            row = (person.id, person.email, person.name, unsubscribed)
            connection.execute("INSERT INTO recipients VALUES (?, ?, ?, ?)", row)
            connection.executemany("INSERT INTO tags VALUES (?, ?)", [(person.id, tag) for tag in tags])


def unsubscribe(ids: Iterable[int]) -> None:
    """Write down that these people want no mails any more."""
    with database(mode="rw") as connection:
        connection.executemany("UPDATE recipients SET unsubscribed = 1 WHERE id = ?", [(each,) for each in ids])


def register(name: str, include: Sequence[str], exclude: Sequence[str], size: int) -> Mailing:
    """Have a mailing; one that is there already stays as it is, so that all of its starts make the same chunks.

    Args:
        name: what it is called.
        include: who has one of these tags is written to.
        exclude: unless they have one of these.
        size: how many ids a chunk spans.

    Returns:
        The mailing.

    Raises:
        ValueError: the name is none for a file, the size is not positive, or it was begun as something else.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,60}", name):
        msg = f"{name!r} is no name for a mailing: small letters, digits and hyphens"
        raise ValueError(msg)
    if size < 1:
        msg = f"a chunk of {size} recipients cannot be made"
        raise ValueError(msg)
    wanted = Mailing(name, sorted(include), sorted(exclude), size, 0)
    with database(mode="rw") as connection:
        (last,) = connection.execute("SELECT ifnull(max(id), 0) FROM recipients").fetchone()
        row = {"name": name, "size": size, "last": last, **wanted.tags()}
        connection.execute("INSERT OR IGNORE INTO mailings VALUES (:name, :include, :exclude, :size, :last)", row)
    found = mailing(name)
    if (found.include, found.exclude, found.size) != (wanted.include, wanted.exclude, wanted.size):
        msg = f"the mailing {name} was begun with other tags, or with another size of chunks: {found.size}"
        raise ValueError(msg)
    return found


def mailing(name: str) -> Mailing:
    """A mailing that was registered.

    Args:
        name: what it is called.

    Returns:
        The mailing.

    Raises:
        LookupError: there is none of this name.
    """
    with database() as connection:
        row = connection.execute("SELECT include, exclude, size, last FROM mailings WHERE name = ?", (name,)).fetchone()
    if row is None:
        msg = f"there is no mailing called {name}"
        raise LookupError(msg)
    return Mailing(name, json.loads(row[0]), json.loads(row[1]), row[2], row[3])


def chunk(of: Mailing, number: int) -> list[Recipient]:
    """The recipients of a chunk.

    They are read by a range of ids, which is the same at each start: a chunk costs the same wherever it is, however
    many others there are.

    Args:
        of: the mailing.
        number: which chunk, from 0.
    """
    span = {"after": number * of.size, "last": (number + 1) * of.size}
    with database() as connection:
        rows = connection.execute(f"SELECT id, email, name {CHOSEN} ORDER BY id", {**of.tags(), **span})
        return [Recipient(*row) for row in rows]


def count(of: Mailing) -> int:
    """How many recipients a mailing has."""
    with database() as connection:
        row = connection.execute(f"SELECT count(*) {CHOSEN}", {**of.tags(), "after": 0, "last": of.last})
        return int(row.fetchone()[0])


def unsubscribed(first: int, last: int) -> set[int]:
    """Who has unsubscribed by now.

    Args:
        first: the first id to ask about.
        last: the last id to ask about.
    """
    query = "SELECT id FROM recipients WHERE id BETWEEN ? AND ? AND unsubscribed"
    with database() as connection:
        return {row[0] for row in connection.execute(query, (first, last))}
