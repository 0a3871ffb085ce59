"""docs/comparison.md has what `make benchmark-peers` measures; the measuring needs other libraries, and minutes."""

from __future__ import annotations

import re

from benchmarks import peers
from benchmarks.peers_app import PEERS
from tests.documented import tables

PAGE = peers.PAGE.read_text()


def test_the_page_has_rows_of_checks_and_a_column_for_each_library() -> None:
    measured = tables(PAGE.partition(peers.BEGIN)[2].partition(peers.END)[0])
    assert [name for head, *_ in measured for name in head[1:]] == [peer.name for peer in PEERS]
    assert len(measured) == 2
    for head, *rows in measured:
        shown = [row[0] for row in rows]
        assert shown == [check for check in peers.CHECKS if check in shown]
        assert all(len(row) == len(head) and all(row) and len({*row[1:]}) > 1 for row in rows)
    found = {row[0] for _, *rows in measured for row in rows}
    assert peers.CHECKS.keys() - found == {"free after an exception"}, "which all do alike"


def test_the_page_says_with_which_versions_and_when() -> None:
    packages = ["celery", "redis-py", *filter(None, dict.fromkeys(peer.package for peer in PEERS))]
    versions = ".*".join(rf"{re.escape(package)} \d[\w.]*" for package in packages)
    assert re.search(rf"^Measured on 20\d\d-\d\d-\d\d with Python .*{versions}\.$", PAGE, re.MULTILINE)
