"""Tables in Markdown, and what is measured in the pages of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without a line break at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(page: Path, text: str) -> None:
    """Replace what is between the two marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
