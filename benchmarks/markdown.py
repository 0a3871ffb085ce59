"""What was measured, with what: versions, tables in Markdown, and the pages of the documentation."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def versions(*packages: str) -> str:
    """The versions of Python and of packages."""
    named = [f"{'redis-py' if name == 'redis' else name} {version(name)}" for name in packages]
    return ", ".join([f"Python {platform.python_version()}", *named])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without a line break at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(page: Path, text: str) -> None:
    """Replace what is between the two marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
