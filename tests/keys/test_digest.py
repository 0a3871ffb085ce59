"""Equal values have equal digests, different values have different ones, before and after the broker."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from kombu.utils import json as broker

from only_one.keys import digest as encoding
from only_one.keys.digest import digest
from tests.keys import calls
from tests.keys.calls import LONG, Colour, Feed, Level, Mode, Number, Point, Sheet, Text, carried, importer, maker

# Confusable on purpose: equal when printed, equal for Python, or a part of how another one is encoded.
CONFUSABLE: list[Any] = [None, "None", "null", True, "True", "true", False, 0, "0", 0.0, -0.0, 1, "1", 1.0]
CONFUSABLE += ["1.0", b"1", b"", "", "b'1'", "a", b"a", "a,b", ",", ":", "[", "[]", "{}", '"', "'", '["a"]']
CONFUSABLE += ["i1:1", "l0:", Decimal(1), Decimal("1.0"), UUID(int=1), str(UUID(int=1)), UUID(int=1).hex]
CONFUSABLE += [math.inf, "inf", "nan"]
CONFUSABLE += [date(2020, 1, 1), "2020-01-01", datetime(2020, 1, 1), datetime(2020, 1, 1, tzinfo=timezone.utc)]  # noqa: DTZ001
CONFUSABLE += [timedelta(1), timedelta(seconds=1), time(1), "01:00:00", PurePosixPath("a"), PurePosixPath("1")]


def after_the_broker(value: object) -> Any:
    """What a worker gets where a producer has sent this."""
    return broker.loads(broker.dumps(value))  # type: ignore[no-untyped-call]


@given(carried, carried)
@example({7: 1, -1.5: 2, True: 3, None: 4, 1e300: 5, math.inf: 6}, None)
def test_a_trip_through_the_broker_does_not_count(first: Any, second: Any) -> None:
    key = maker("{md5}", importer)
    args, kwargs = after_the_broker([[first], {"d": second}])
    assert key(*args, **kwargs) == key(first, d=second)
    assert digest(args[0]) == digest(first)


@pytest.mark.parametrize(
    ("value", "same"),
    [
        (Colour.BLUE, ["blue", 3]),
        ({"a": Level.LOW, "b": {Mode.FAST}}, {"a": 1, "b": {"fast"}}),
        ({Mode.FAST: 1}, {"fast": 1}),
        ({Level.LOW: 1}, {"1": 1}),
        ({Colour.NONE: 1}, {"null": 1}),
        ({math.inf: 1, -math.inf: 2, math.nan: 3}, {"Infinity": 1, "-Infinity": 2, "NaN": 3}),
        ({"a": (1, [2])}, {"a": [1, (2,)]}),
        (frozenset({1}), {1}),
        (Text("a"), "a"),
        (Number(3), 3),
        (Point(1, 2), [1, 2]),
        (Sheet("a", seen=1), Sheet("a")),  # as they are equal
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
        (Path("a/b"), PurePosixPath("a/b")),
        (Path(os.fsdecode(b"\xff")), PurePosixPath("\udcff")),
        (datetime(2020, 1, 1, tzinfo=timezone.utc), datetime(2020, 1, 1, tzinfo=timezone(timedelta(0), "Z"))),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_equal_values_have_one_digest(value: object, same: object) -> None:
    assert digest(value) == digest(same)
    assert digest([value]) == digest((same,))


@pytest.mark.parametrize("main", ["__main__", "__mp_main__"])
def test_a_dataclass_of_a_program_that_was_started_by_a_module_s_name(
    main: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = digest(Feed("a"))
    monkeypatch.setattr(Feed, "__module__", main)
    monkeypatch.setitem(sys.modules, main, calls)
    assert digest(Feed("a")) == imported
    monkeypatch.delattr(calls, "Feed")  # now it is the class of another program, which was pickled by value
    assert digest(Feed("a")) != imported


def test_different_values_have_different_digests() -> None:
    containers = [[1], {"1": 1}, {1}, [[1]], (b"1",), [], {}, frozenset(), [""], [None], {"": ""}]
    containers += [["a", "b"], ["a,b"], {"a": 1}, {"a": "1"}, {"a": None}, [[]], [["a"], "b"], ["a", ["b"]]]
    containers += [{"a"}, ["a"], {True}]
    dataclasses = [Feed("a"), Feed("b"), Feed("a", ["x"]), Sheet("a"), {"url": "a", "tags": []}]
    huge = [10**5000, 10**5000 + 1, -(10**5000), 2**64, 2**64 + 1, 2.0**64]
    values = [*CONFUSABLE, *containers, *dataclasses, *huge]
    assert len({digest(value) for value in values}) == len(values)


def test_a_python_that_has_openssls_md5_only_and_not_for_security(monkeypatch: pytest.MonkeyPatch) -> None:
    """As builds for FIPS are."""
    md5 = hashlib.md5

    def not_for_security(content: bytes, *, usedforsecurity: bool = True) -> Any:
        assert not usedforsecurity
        return md5(content, usedforsecurity=False)

    monkeypatch.setitem(sys.modules, "_md5", None)
    monkeypatch.setattr(hashlib, "md5", not_for_security)
    spec: Any = encoding.__spec__
    there = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(there)
    for value in ("a", "x" * LONG, [1]):
        assert there.digest(value) == digest(value)
