"""What the tables of the pages about Celery say, for the tests that see whether it is so."""

from __future__ import annotations

from pathlib import Path

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("celery*.md"))

BROKERS = {"redis": "Redis, Valkey", "classic": "RabbitMQ", "quorum": "RabbitMQ"}
"""The columns in which the table of brokers says it."""


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, row by row, without the line below its head."""
    blocks = [block.strip().splitlines() for block in text.split("\n\n") if block.lstrip().startswith("|")]
    rows = [[[cell.strip() for cell in line.strip("|").split("|")] for line in block] for block in blocks]
    return [[head, *body] for head, _, *body in rows]


def documented(promise: str, column: str) -> str:
    """One cell of the pages about Celery.

    Raises:
        ValueError: unless there is just one.
    """
    columns = [
        (row[0], row[head.index(column)])
        for head, *body in tables("\n\n".join(page.read_text() for page in PAGES))
        if column in head[1:]
        for row in body
    ]
    (found,) = [cell for first, cell in columns if first == promise]
    return found
