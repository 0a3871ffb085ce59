"""Equal calls have equal keys, different calls have different ones, in every process and on every day.

The golden file has an expression and its result in each line: a value's digest, or the key of a call.
`python -m tests.keys.test_keys > tests/golden/keys.json`, into another file first, writes it anew, with the results of
lines that were added with an empty result. A result that changes breaks exclusion in the middle of a deploy.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import pathlib
import sys
import uuid
from pathlib import Path
from typing import Any

from only_one.keys.digest import digest
from tests.keys import calls

ROOT = Path(__file__).parents[2]
GOLDEN: dict[str, str] = json.loads((ROOT / "tests" / "golden" / "keys.json").read_text())
BROKEN = (
    "this change gives other keys than the last release: in the middle of a deploy two runs would not see each other"
)


def key(template: str, *args: Any, **kwargs: Any) -> str:
    """The key of a call of `importer`."""
    return calls.maker(template, calls.importer)(*args, **kwargs)


def key_of_any(template: str, *args: Any, **kwargs: Any) -> str:
    """The key of a call of `anything`."""
    return calls.maker(template, calls.anything)(*args, **kwargs)


# What the expressions may name.
NAMES: dict[str, Any] = {"digest": digest, "key": key, "key_of_any": key_of_any, "math": math}
for module in (calls, decimal, pathlib, uuid, dt):  # the last wins, as `uuid` has a `time` of its own
    NAMES |= vars(module)


def all_keys() -> dict[str, str]:
    """What the golden file holds, computed now."""
    return {expression: eval(expression, dict(NAMES)) for expression in GOLDEN}  # noqa: S307 - they are our own


def test_keys_are_those_of_the_golden_file() -> None:
    """Which another process has written: Python's hashes differ in each."""
    changed = {each: (GOLDEN[each], now) for each, now in all_keys().items() if GOLDEN[each] != now}
    assert not changed, f"{BROKEN}. Changed: {changed}"
    assert len(GOLDEN) > 70


if __name__ == "__main__":
    sys.stdout.write(json.dumps(all_keys(), indent=2) + "\n")
