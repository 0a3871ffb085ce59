"""A store that refuses stale writes: one column and one `WHERE` more than one that does not."""

import sqlite3
from contextlib import closing
from pathlib import Path

SCHEMA = "CREATE TABLE IF NOT EXISTS report (name TEXT PRIMARY KEY, text TEXT NOT NULL, fence INTEGER NOT NULL)"

# Checked and written in one statement: between a SELECT and an UPDATE, another write could come.
UPSERT = """
INSERT INTO report (name, text, fence) VALUES (:name, :text, :fence)
ON CONFLICT (name) DO UPDATE SET text = excluded.text, fence = excluded.fence
WHERE excluded.fence >= report.fence
"""


class StaleWrite(Exception):
    """The run that writes is not the newest that has written: it has lost its lock, and may not know."""


def write(path: Path, name: str, text: str, fence: int) -> None:
    """Store a report, unless a later run has done so already.

    Args:
        path: the store's file.
        name: the report's.
        text: what is in it.
        fence: `current_lock().fence` of the run that writes; a run may write several times.

    Raises:
        StaleWrite: a run with a higher fence has written it.
    """
    with closing(sqlite3.connect(path, timeout=10)) as database, database:
        database.execute(SCHEMA)
        written = database.execute(UPSERT, {"name": name, "text": text, "fence": fence}).rowcount
    if not written:
        msg = f"{name} was written by a later run than the one with fence {fence}"
        raise StaleWrite(msg)


def read(path: Path, name: str) -> str:
    """What is in a report."""
    with closing(sqlite3.connect(path, timeout=10)) as database:
        return str(database.execute("SELECT text FROM report WHERE name = ?", [name]).fetchone()[0])
