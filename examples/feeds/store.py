"""Where the entries go: SQLite, written by several processes at once."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import feedparser

from .journal import directory

SCHEMA = """
CREATE TABLE IF NOT EXISTS entry (
    feed_url TEXT, id TEXT, title TEXT, link TEXT, updated TEXT, PRIMARY KEY (feed_url, id)
)
"""
UPSERT = """
INSERT INTO entry VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET title = excluded.title, link = excluded.link, updated = excluded.updated
"""
PRUNE = """
DELETE FROM entry WHERE rowid IN (SELECT rowid FROM entry ORDER BY updated DESC LIMIT -1 OFFSET ?)
"""
COUNT = "SELECT feed_url, count(*) FROM entry GROUP BY feed_url ORDER BY feed_url"


@contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    """The database for the length of a `with` block; committed at its end, unless it raises."""
    with closing(sqlite3.connect(directory() / "feeds.sqlite", timeout=10)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        with database:
            database.execute(SCHEMA)
            yield database


def save(feed_url: str, document: bytes) -> int:
    """Store the entries of an RSS or Atom document; those that are known are updated.

    Args:
        feed_url: where the document came from.
        document: the document as it was fetched.

    Returns:
        How many entries the document has.

    Raises:
        ValueError: it is not a feed.
    """
    feed = feedparser.parse(document)
    if not feed.version:
        msg = f"{feed_url} is not a feed"
        raise ValueError(msg)
    rows = [(feed_url, entry.id, entry.title, entry.link, _when(entry)) for entry in feed.entries]
    with transaction() as database:
        database.executemany(UPSERT, rows)
    return len(rows)


def _when(entry: Any) -> str:
    """RSS says when an entry was published, Atom when it was updated."""
    moment = entry.get("published_parsed") or entry.get("updated_parsed")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", moment) if moment else ""


def prune(keep: int) -> None:
    """Drop the oldest entries.

    Args:
        keep: how many entries may stay.
    """
    with transaction() as database:
        database.execute(PRUNE, [keep])


def count() -> list[tuple[str, int]]:
    """How many entries each feed has, as (feed_url, entries)."""
    with transaction() as database:
        return database.execute(COUNT).fetchall()
