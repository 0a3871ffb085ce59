"""Equal calls have equal keys, different calls have different ones, in every process and on every day.

`python -m tests.keys.test_keys > tests/golden/keys.json` writes the golden file anew, which is to be done only together
with a change that is meant to break exclusion in the middle of a deploy.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import pytest

from only_one.keys.digest import digest
from tests.keys.calls import Colour, Level, Mode, Point, Sheet, importer, maker

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "keys.json"
BROKEN = (
    "this change gives other keys than the last release: in the middle of a deploy two runs would not see each other"
)
VALUES: dict[str, object] = {
    "None": None,
    "True": True,
    "False": False,
    "0": 0,
    "1": 1,
    "-1": -1,
    "2**64": 2**64,
    "10**5000": 10**5000,
    "0.0": 0.0,
    "-0.0": -0.0,
    "1.0": 1.0,
    "0.1": 0.1,
    "1e300": 1e300,
    "5e-324": 5e-324,
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
    "''": "",
    "'a'": "a",
    "'1'": "1",
    "url": "https://example.org/feed.xml?a=1&b=2",
    "'\\xe9'": "\xe9",
    "smile": "\U0001f600",
    "surrogate": "\ud800",
    "nul": "a\0b",
    "b''": b"",
    "b'a'": b"a",
    "b'\\xff'": b"\xff",
    "[]": [],
    "[1, '1', 1.0]": [1, "1", 1.0],
    "[[1], [2, [3]]]": [[1], [2, [3]]],
    "(1, 2)": (1, 2),
    "['\\ud800']": ["\ud800"],
    "{}": {},
    "{'b': 1, 'a': 2}": {"b": 1, "a": 2},
    "{1: 'a', 'b': 2}": {1: "a", "b": 2},
    "{True: 1, None: 2, 1.5: 3}": {True: 1, None: 2, 1.5: 3},
    "{inf: 1, nan: 2}": {math.inf: 1, math.nan: 2},
    "{'a': {'b': [{}]}}": {"a": {"b": [{}]}},
    "set()": set(),
    "{1, 2, 3}": {1, 2, 3},
    "{'a', 'b', 'c', 'd', 'e'}": {"a", "b", "c", "d", "e"},
    "{'a', 1, None, b'a'}": {"a", 1, None, b"a"},
    "frozenset({frozenset()})": frozenset({frozenset(), frozenset({"a", "b"})}),
    "Colour.RED": Colour.RED,
    "Colour.BLUE": Colour.BLUE,
    "Level.LOW": Level.LOW,
    "Mode.FAST": Mode.FAST,
    "Decimal('1.10')": Decimal("1.10"),
    "Decimal('-Infinity')": Decimal("-Infinity"),
    "Decimal('1E+5')": Decimal("1E+5"),
    "UUID": UUID("12345678123456781234567812345678"),
    "date": date(2026, 1, 2),
    "datetime": datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001
    "datetime to the second": datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001
    "datetime in UTC": datetime(2026, 1, 2, tzinfo=timezone.utc),
    "datetime at +05:30": datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    "time": time(3, 4, 5, 6),
    "time in UTC": time(3, tzinfo=timezone.utc),
    "timedelta": timedelta(days=1, seconds=2, microseconds=3),
    "-timedelta": -timedelta(microseconds=1),
    "Path": PurePosixPath("/srv/feeds/a b.xml"),
    "Point": Point(1, "a"),
    "Sheet": Sheet("a", ["b"], 1),
}
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "default": ("{name}:{md5}", (1,), {}),
    "default, all given": ("{name}:{md5}", ("https://example.org", [1, {"a": b"x"}], None), {"d": Mode.FAST}),
    "cookbook": ("{name}-lock-{a:md5}", ("https://example.org/feed.xml",), {}),
    "two fields": ("{a}:{b}", ("x:y", "50%"), {}),
    "odd separators": ("{a}2{b} -> {c}", ("%", "5", "->"), {}),
    "braces": ("{{{a} }}-{name}", ("{x}",), {}),
    "long": ("{a}", ("feed-" + "x" * 1000,), {}),
    "long and more": ("{a}:{b}", ("feed:" + "x" * 1000, "%"), {}),
    "just not long": ("{a}", ("x" * 100,), {}),
    "format": ("{a:%Y-%m-%d}/{b:05.1f}", (date(2026, 1, 2), 2.25), {}),
    "conversion": ("{a!r}", ("it's",), {}),
    "item": ("{a[sku]}:{b.real}", ({"sku": "A-1"}, 3), {}),
    "Enum": ("{a}", (Mode.FAST,), {}),
    "not ASCII": ("{a}", ("\xe9\U0001f600",), {}),
}


def all_keys() -> dict[str, dict[str, str]]:
    """What the golden file holds."""
    calls = {label: maker(key, importer)(*args, **kwargs) for label, (key, args, kwargs) in CALLS.items()}
    return {"digests": {label: digest(value) for label, value in VALUES.items()}, "calls": calls}


@pytest.mark.parametrize("kind", ["digests", "calls"])
def test_keys_are_those_of_the_golden_file(kind: str) -> None:
    golden = json.loads(GOLDEN.read_text())[kind]
    now = all_keys()[kind]
    changed = {label: (was, now.get(label)) for label, was in golden.items() if now.get(label) != was}
    assert not changed, f"{BROKEN}. Changed: {changed}"
    missing = now.keys() - golden.keys()
    assert not missing, (
        f"not in the golden file yet: {missing}; python -m tests.keys.test_keys > tests/golden/keys.json"
    )


def test_keys_are_the_same_in_another_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-m", "tests.keys.test_keys"]
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert json.loads(output.stdout) == all_keys()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(all_keys(), indent=2) + "\n")
