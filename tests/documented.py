"""What the tables of docs/celery.md say, for the tests that see whether it is so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "celery.md"

BROKERS = {"redis": "Redis, Valkey", "classic": "RabbitMQ, classic queues", "quorum": "RabbitMQ, quorum queues"}
"""The columns in which the table of brokers says it."""


def _tables() -> Iterator[list[dict[str, str]]]:
    """The rows of each table, by the heads of their columns; that of the first is ""."""
    for block in PAGE.read_text().split("\n\n"):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        if block.startswith("|"):
            names = ["", *lines[0][1:]]
            yield [dict(zip(names, line, strict=True)) for line in lines[2:]]


def rows_with(column: str) -> list[dict[str, str]]:
    """The rows of the tables that have such a column."""
    return [row for table in _tables() for row in table if column in row]


def documented(promise: str, column: str) -> str:
    """One cell.

    Raises:
        ValueError: unless there is just one.
    """
    (found,) = [row[column] for row in rows_with(column) if row[""] == promise]
    return found
