"""Who gets a mailing: a database of recipients and of who has unsubscribed, read by ranges of ids."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

SIZE = int(os.environ.get("NEWSLETTER_CHUNK", "1000"))
"""How many ids a chunk spans; the same at each start of a mailing."""

SCHEMA = "CREATE TABLE IF NOT EXISTS recipients (id INTEGER PRIMARY KEY, email TEXT, name TEXT, unsubscribed INTEGER)"
CHUNK = "SELECT id, email, name FROM recipients WHERE id > ? AND id <= ? AND NOT unsubscribed ORDER BY id"
NAMES = ["Ada Lovelace", "José García", "Zoë Ng", "明 Hopper", "O'Neil <Smith>", '"Bo" d\'Arc']


class Recipient(NamedTuple):
    """Somebody who is written to."""

    id: int
    email: str
    name: str


def directory() -> Path:
    """Where everything is kept."""
    return Path(os.environ.get("NEWSLETTER_DIRECTORY", "."))


@contextmanager
def database(mode: str = "ro") -> Iterator[sqlite3.Connection]:
    """The database for the length of a `with` block; what is changed is committed at its end, unless it raises.

    Args:
        mode: "ro", "rw" or "rwc", as in SQLite's URIs.
    """
    uri = f"{(directory() / 'recipients.sqlite').as_uri()}?mode={mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=2)) as connection, connection:
        yield connection


def have_people(number: int) -> None:
    """Make up people, unless there are some; every tenth of them has unsubscribed.

    Args:
        number: how many.
    """
    with database("rwc") as connection:
        connection.execute(SCHEMA)
        if connection.execute("SELECT 1 FROM recipients").fetchone() is None:
            people = ((n, f"person-{n}@example.net", NAMES[n % len(NAMES)], n % 10 == 0) for n in range(1, number + 1))
            connection.executemany("INSERT INTO recipients VALUES (?, ?, ?, ?)", people)


def last_id() -> int:
    """The highest id; 0 if there is nobody."""
    with database() as connection:
        return int(connection.execute("SELECT ifnull(max(id), 0) FROM recipients").fetchone()[0])


def chunks() -> int:
    """How many chunks a mailing has."""
    return -(-last_id() // SIZE)


def chunk(number: int) -> list[Recipient]:
    """The recipients of a chunk.

    They are read by a range of ids, so a chunk costs the same wherever it is, however many others there are.

    Args:
        number: which chunk, from 0.
    """
    with database() as connection:
        return [Recipient(*row) for row in connection.execute(CHUNK, (number * SIZE, (number + 1) * SIZE))]


def unsubscribed(first: int, last: int) -> set[int]:
    """Who has unsubscribed by now, of the people with these ids.

    Args:
        first: the first id.
        last: the last one.
    """
    query = "SELECT id FROM recipients WHERE id BETWEEN ? AND ? AND unsubscribed"
    with database() as connection:
        return {row[0] for row in connection.execute(query, (first, last))}
