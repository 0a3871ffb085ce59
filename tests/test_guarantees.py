"""The pages that say what is promised: they name tests that exist, and are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize(
    ("page", "at_least"), [("docs/guarantees", 30), ("docs/how-it-works", 10), ("examples/newsletter/README", 10)]
)
def test_each_test_that_is_named_exists(page: str, at_least: int) -> None:
    # The newsletter's says of which file its tests are.
    text = (ROOT / f"{page}.md").read_text().replace("`test_", "`tests/live/test_newsletter.py::test_")
    named = NAMED.findall(text)
    assert len(named) > at_least
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or (test and f"def {test}(" not in (ROOT / path).read_text())
    ]
    assert missing == []
