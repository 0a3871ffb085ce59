"""docs/comparison.md has what `make benchmark-peers` measures; the measuring needs other libraries, and minutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peers_app import PEERS

# Each table as its lines' cells, without the line below its head.
Table = list[list[str]]


def tables(text: str) -> list[Table]:
    block = text.partition(peers.BEGIN)[2].partition(peers.END)[0]
    parts = [[line for line in part.splitlines() if line.startswith("|")] for part in block.split("\n\n")]
    rows = [[[cell.strip() for cell in line.strip("|").split("|")] for line in part] for part in parts if part]
    return [[head, *body] for head, _, *body in rows]


@pytest.mark.parametrize("number", [0, 1])
def test_the_page_has_a_row_for_each_check(number: int) -> None:
    head, *rows = tables(peers.PAGE.read_text())[number]
    assert [row[0] for row in rows] == list(peers.CHECKS)
    assert all(len(row) == len(head) and all(row) for row in rows)


def test_the_page_has_a_column_for_each_library() -> None:
    columns = [name for head, *_ in tables(peers.PAGE.read_text()) for name in head[1:]]
    assert columns == [peer.name for peer in PEERS]


def test_the_page_says_with_which_versions_and_when() -> None:
    packages = ["celery", "redis-py", *filter(None, dict.fromkeys(peer.package for peer in PEERS))]
    versions = ".*".join(rf"{re.escape(package)} \d[\w.]*" for package in packages)
    assert re.search(
        rf"^Measured on 20\d\d-\d\d-\d\d with Python .*{versions}\.$", peers.PAGE.read_text(), re.MULTILINE
    )


def test_only_what_is_between_the_marks_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{peers.BEGIN}\nold\n{peers.END}\nafter\n")
    peers.write(page, "new")
    peers.write(page, "newer")
    assert page.read_text() == f"before\n{peers.BEGIN}\n\nnewer\n\n{peers.END}\nafter\n"
