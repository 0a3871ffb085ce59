"""The page that says what is promised: it names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_each_test_that_is_named_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 30
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert missing == []
