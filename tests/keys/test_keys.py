"""Equal calls have equal keys, different calls have different ones, in every process and on every day.

`python tests/keys/test_keys.py > tests/golden/keys.json` writes the golden file anew, which is to be done only together
with a change that is meant to break exclusion in the middle of a deploy.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.util
import inspect
import json
import math
import os
import random
import subprocess
import sys
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from kombu.utils import json as broker

from only_one import OnlyOneError, UnkeyableArgument
from only_one.keys import compile_key
from only_one.keys import digest as encoding
from only_one.keys.arguments import Arguments
from only_one.keys.digest import _digest_of_short, digest

GOLDEN = Path(__file__).parents[1] / "golden" / "keys.json"
NAME = "shop.tasks.import_feed"
BROKEN = (
    "this change gives other keys than the last release: in the middle of a deploy two runs would not see each other"
)
LONG = 10_000

settings.register_profile("only_one", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("only_one")

MakeOne = Callable[..., str]


def maker(key: str | Callable[..., str], function: Callable[..., object], name: str = NAME) -> MakeOne:
    """What makes the key of a call of this function."""
    make = compile_key(key, inspect.signature(function))
    return lambda *args, **kwargs: make(name, args, kwargs)


def as_it_is(a: str) -> str:
    """A callable that makes keys."""
    return a


def key_of(value: object, template: str = "{a}") -> str:
    """The key of a call with this one argument."""
    return maker(template, lambda a: a)(value)


class Colour(enum.Enum):
    RED = "red"
    BLUE = ("blue", 3)
    NONE = None


class Level(enum.IntEnum):
    LOW = 1


class Mode(str, enum.Enum):
    FAST = "fast"


class Text(str):
    __slots__ = ()


class Number(int):
    pass


Point = namedtuple("Point", "x y")  # noqa: PYI024 - the untyped kind is what is in the field


@dataclass(frozen=True)
class Feed:
    url: str
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sheet:
    url: str
    tags: list[str] = field(default_factory=list)
    seen: int = field(default=0, compare=False)


Sheet.__module__ = "shop.models"  # in every process


class Opaque:
    """Of no known type."""

    id = 7


# --- what values are made of -------------------------------------------------------------------------------------

surrogates = st.text(st.characters(exclude_categories=()), max_size=5)
offsets = st.none() | st.timedeltas(timedelta(hours=-14), timedelta(hours=14)).map(
    lambda offset: timezone(timedelta(minutes=offset // timedelta(minutes=1)))
)
carried_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | surrogates
    | st.binary(max_size=5)
    | st.decimals()
    | st.uuids()
    | st.datetimes(timezones=offsets)
    | st.dates()
)
json_keys = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.floats()


def as_json_spells(key: object) -> str:
    """How the json module spells a scalar as the key of an object."""
    (spelt,) = json.loads(json.dumps({key: 0}))
    return str(spelt)


def dicts_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    """Dicts that JSON does not shorten: no two keys are spelt alike."""
    items = st.lists(st.tuples(json_keys, values), max_size=3, unique_by=lambda item: as_json_spells(item[0]))
    return items.map(dict)


carried = st.recursive(
    carried_scalars,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | dicts_of(inner),
    max_leaves=8,
)

# Confusable on purpose: equal when printed, equal for Python, or a part of how another one is spelt.
confusable_scalars: list[Any] = [None, "None", "null", True, "True", "true", False, 0, "0", 0.0, -0.0, 1, "1", 1.0]
confusable_scalars += ["1.0", b"1", b"", "", "b'1'", "a", b"a", "a,b", ",", ":", "[", "[]", "{}", '"', "'", '["a"]']
confusable_scalars += ["i1:1", "l0:", Decimal(1), Decimal("1.0"), UUID(int=1), str(UUID(int=1)), UUID(int=1).hex]
confusable_scalars += [math.inf, "inf", "nan"]
confusable_scalars += [date(2020, 1, 1), "2020-01-01", datetime(2020, 1, 1), datetime(2020, 1, 1, tzinfo=timezone.utc)]  # noqa: DTZ001
confusable_scalars += [timedelta(1), timedelta(seconds=1), time(1), "01:00:00", PurePosixPath("a"), PurePosixPath("1")]
hashables = st.sampled_from(confusable_scalars)
confusable = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(hashables.filter(lambda key: isinstance(key, str)), inner, max_size=2)
        | st.frozensets(hashables, max_size=3)
    ),
    max_leaves=5,
)


def model(value: object) -> object:
    """What decides whether two values are the same for us, spelt by other means than the product's."""
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(model, value))
    if isinstance(value, dict):
        return "dict", frozenset((key, model(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(model, value))
    return type(value).__name__, repr(value)


def rebuilt(value: Any, leaf: Callable[[Any], Any], sequence: Callable[[list[Any]], Any]) -> Any:
    """The value with other leaves and other sequences in it, its dicts built the other way round."""
    if isinstance(value, dict):
        return {key: rebuilt(item, leaf, sequence) for key, item in reversed(value.items())}
    if isinstance(value, (list, tuple)):
        return sequence([rebuilt(item, leaf, sequence) for item in value])
    return leaf(value)


# --- equal calls -------------------------------------------------------------------------------------------------


def importer(a: Any, b: Any = 2, c: Any = (3, "x"), *, d: Any = None) -> None:
    """A function as users have them."""


@pytest.mark.parametrize("template", ["{md5}", "{a:md5}:{b:md5}:{c:md5}:{d:md5}"])
@given(st.lists(carried, min_size=1, max_size=3), st.none() | carried, st.integers(0, 3), st.randoms())
def test_how_a_call_is_spelt_does_not_count(
    template: str, given_: list[Any], d: Any, positional: int, chance: random.Random
) -> None:
    key = maker(template, importer)
    named = [*list(zip("abc", given_, strict=False))[positional:], ("d", d)]
    chance.shuffle(named)
    spelt_out = dict(zip("abcd", [*given_, *[2, (3, "x")][len(given_) - 1 :], d], strict=True))
    assert key(*given_[:positional], **dict(named)) == key(**spelt_out)


@pytest.mark.parametrize("template", ["{md5}", "{a}:{b}"])
def test_a_default_counts_as_given(template: str) -> None:
    key = maker(template, importer)
    assert key(1) == key(a=1) == key(1, 2) == key(1, b=2) == key(b=2, a=1) == key(1, 2, (3, "x"), d=None)
    assert key(1) != key(1, 3)


@pytest.mark.parametrize("template", ["{md5}", "{a:md5}:{rest:md5}:{others:md5}"])
def test_every_kind_of_parameter(template: str) -> None:
    def mixed(a: int, /, b: int = 2, *rest: int, c: int, d: int = 4, **others: int) -> None: ...

    key = maker(template, mixed)
    assert key(1, c=3) == key(1, 2, c=3, d=4) == key(1, b=2, d=4, c=3)
    assert key(1, 2, 5, c=3, x=1, y=2) == key(1, 2, 5, y=2, x=1, c=3)
    calls = [key(1, c=3), key(2, c=3), key(1, 2, 5, c=3), key(1, 2, 5, 6, c=3), key(1, c=3, x=1), key(1, c=3, y=1)]
    calls += [key(1, c=3, a=1), key(1, c=3, x=1, y=2)]
    assert len(set(calls)) == len(calls)


def test_a_positional_only_name_may_come_again_as_keyword() -> None:
    def mixed(a: int = 0, /, **others: int) -> None: ...

    key = maker("{a}:{others[a]}", mixed)
    assert key(1, a=2) == "1:2"
    assert maker("{a}", mixed)(a=2) == "0"


def after_the_broker(value: object) -> Any:
    """What a worker gets where a producer has sent this."""
    return broker.loads(broker.dumps(value))  # type: ignore[no-untyped-call]


@given(carried, carried)
def test_a_trip_through_the_broker_does_not_count(first: Any, second: Any) -> None:
    key = maker("{md5}", importer)
    args, kwargs = after_the_broker([[first], {"d": second}])
    assert key(*args, **kwargs) == key(first, d=second)
    assert digest(args[0]) == digest(first)


@given(carried)
def test_a_tuple_equals_a_list_and_dict_order_does_not_count(value: Any) -> None:
    assert digest(rebuilt(value, lambda leaf: leaf, tuple)) == digest(rebuilt(value, lambda leaf: leaf, list))


@given(st.lists(hashables, max_size=6), st.randoms())
def test_set_order_does_not_count(items: list[Any], chance: random.Random) -> None:
    unique = {model(item): item for item in items}  # 1, 1.0 and True are one item: the first that comes
    first = set(unique.values())
    shuffled = list(first)
    chance.shuffle(shuffled)
    assert digest(first) == digest(set(shuffled)) == digest(frozenset(reversed(shuffled)))


def test_set_order_does_not_count_where_hashes_collide() -> None:
    items = [number * 2**61 - number for number in range(100)]  # hash() of each is 0: order is that of insertion
    backwards = items[::-1]
    assert digest(set(items)) == digest(set(backwards))


@given(carried)
def test_an_enum_is_its_value_wherever_it_stands(value: Any) -> None:
    def member(leaf: Any) -> Any:
        if not isinstance(leaf, (str, int, bytes)):
            return leaf
        made: Any = enum.Enum
        return made("Of", {"MEMBER": leaf})["MEMBER"]

    assert digest(rebuilt(value, member, list)) == digest(value)


@pytest.mark.parametrize("template", ["{a}", "{a!s}", "{a!r}", "{a:>8}", "{a:md5}", "{md5}"])
def test_an_enum_is_its_value_in_every_kind_of_field(template: str) -> None:
    assert key_of(Mode.FAST, template) == key_of("fast", template)


@pytest.mark.parametrize(
    ("value", "same"),
    [
        (Colour.BLUE, ["blue", 3]),
        ({Mode.FAST: 1}, {"fast": 1}),
        ({Level.LOW: 1}, {"1": 1}),
        ({Colour.NONE: 1}, {"null": 1}),
        ({math.inf: 1, -math.inf: 2, math.nan: 3}, {"Infinity": 1, "-Infinity": 2, "NaN": 3}),
        (Text("a"), "a"),
        (Number(3), 3),
        (Point(1, 2), [1, 2]),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (Path("a/b"), PurePosixPath("a/b")),
        (datetime(2020, 1, 1, tzinfo=timezone.utc), datetime(2020, 1, 1, tzinfo=timezone(timedelta(0), "Z"))),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_these_are_one(value: object, same: object) -> None:
    assert digest(value) == digest(same)
    assert digest([value]) == digest((same,))


def test_a_lone_str_is_the_md5_of_its_utf8() -> None:
    url = "https://example.org/f\N{LATIN SMALL LETTER E WITH DIAERESIS}ed"
    assert digest(url) == hashlib.md5(url.encode(), usedforsecurity=False).hexdigest()


def test_the_key_of_the_cookbook() -> None:
    url = "https://example.org/feed.xml"
    key = maker("{name}-lock-{feed_url:md5}", lambda feed_url: feed_url)(url)
    assert key == f"{NAME}-lock-{hashlib.md5(url.encode(), usedforsecurity=False).hexdigest()}"


# --- different calls ---------------------------------------------------------------------------------------------


@given(confusable, confusable)
@example(["a", "b"], ["a,b"])
@example({"a": 1}, {"a": "1"})
@example([[]], [])
@example([["a"], "b"], ["a", ["b"]])
@example({"a": None}, {})
@example(frozenset({"a"}), ["a"])
@example(frozenset({1}), frozenset({True}))
def test_digests_are_equal_exactly_where_values_are(first: Any, second: Any) -> None:
    assert (digest(first) == digest(second)) == (model(first) == model(second))


def test_the_types_do_not_blur() -> None:
    values = [1, 1.0, True, "1", b"1", Decimal(1), None, "None", [1], {"1": 1}, {1}, [[1]], (b"1",), PurePosixPath("1")]
    values += ["", b"", [], {}, frozenset(), [""], [None], {"": ""}, 0, 0.0, False, UUID(int=1), timedelta(1), time(1)]
    values += [date(2020, 1, 1), datetime(2020, 1, 1), "2020-01-01"]  # noqa: DTZ001
    assert len({digest(value) for value in values}) == len(values)


def test_dataclasses_of_different_classes_differ() -> None:
    values = [Feed("a"), Feed("b"), Feed("a", ["x"]), Sheet("a"), {"url": "a", "tags": []}]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(Sheet("a", seen=1)) == digest(Sheet("a"))  # as they are equal


def test_where_arguments_stand_counts() -> None:
    key = maker("{md5}", lambda *args, **kwargs: (args, kwargs))
    calls = [key(), key(1), key(1, 2), key((1, 2)), key(a=1), key(b=1), key(1, a=2), key({"a": 2}), key((1,), {"a": 2})]
    calls += [key(None), key([]), key({}), key("a", 1), key(a="1"), key("a=1"), key(args=1), key(kwargs={"a": 1})]
    assert len(set(calls)) == len(calls)
    key = maker("{md5}", lambda a, b: (a, b))
    assert key(1, 2) == key(b=2, a=1) != key(a=2, b=1)


NASTY = "%:{}-_/ab AFf01235789"
separators = st.text(NASTY, min_size=1, max_size=3).filter(lambda text: text[0] not in "%{}")
nasty_values = st.text(NASTY, max_size=4)


@st.composite
def templates_and_two_calls(draw: st.DrawFn) -> tuple[str, list[str], list[str]]:
    """A template of several fields with odd separators, and two calls whose values are odd to match."""
    count = draw(st.integers(1, 3))
    between = [draw(separators) for _ in range(count - 1)]
    pieces = [draw(st.text(NASTY, max_size=2)), *between, draw(st.text(NASTY, max_size=2))]
    template = ""
    for index, piece in enumerate(pieces):
        template += piece.replace("{", "{{").replace("}", "}}") + (f"{{{'abc'[index]}}}" if index < count else "")
    first = [draw(nasty_values) for _ in range(count)]
    # The second is often the first with its text shifted over the separators, which is what tricks are made of.
    second = list(first)
    if count > 1 and draw(st.booleans()):
        at = draw(st.integers(0, count - 2))
        whole = first[at] + between[at] + first[at + 1]
        cuts = [cut for cut in range(len(whole)) if whole.startswith(between[at], cut)]
        cut = draw(st.sampled_from(cuts))
        second[at], second[at + 1] = whole[:cut], whole[cut + len(between[at]) :]
    else:
        second = [draw(nasty_values) for _ in range(count)]
    return template, first, second


@settings(max_examples=200)
@given(templates_and_two_calls())
@example(("{a}:{b}", ["a:b", "c"], ["a", "b:c"]))
@example(("{a}:{b}", ["%3A", ""], [":", ""]))
@example(("{a}2{b}", ["%", "5"], ["%25", ""]))
@example(("{a}5{b}", ["%2", ""], ["%", ""]))
@example(("{a}::{b}", ["a:", "b"], ["a", ":b"]))
@example(("{a}A{b}", ["A", "3"], ["", "3A"]))
@example(("{a}", ["{"], ["%7B"]))
def test_no_two_calls_share_a_key(case: tuple[str, list[str], list[str]]) -> None:
    template, first, second = case
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in "abc"[: len(first)]]
    make = compile_key(template, inspect.Signature(parameters))
    keys = [make(NAME, tuple(values), {}) for values in (first, second)]
    assert (keys[0] == keys[1]) == (first == second)
    assert not set("{}") & set(keys[0] + keys[1])


@given(nasty_values, nasty_values, nasty_values, nasty_values)
def test_the_name_is_kept_apart_from_the_values(name: str, value: str, other_name: str, other_value: str) -> None:
    make = compile_key("{name}:{a}", inspect.signature(lambda a: a))
    same = make(name, (value,), {}) == make(other_name, (other_value,), {})
    assert same == ((name, value) == (other_name, other_value))


@given(nasty_values, nasty_values)
@example("{", "%7B")
@example("%7B", "%257B")
@example("\ud800", "\ud801")
def test_what_a_callable_returns_is_kept_apart_and_can_be_sent(first: str, second: str) -> None:
    assume(first and second)
    make = maker(as_it_is, lambda a: a)
    assert (make(first) == make(second)) == (first == second)
    assert not set("{}") & set(make(first))
    make(first).encode()  # as redis-py does


@pytest.mark.parametrize("template", ["{a}", "{a}:{b}", as_it_is])
@pytest.mark.parametrize("length", [200, 201, LONG])
def test_a_long_value_is_hashed_behind_a_readable_head(template: Any, length: int) -> None:
    def function(a: str, b: str = "b") -> None: ...

    key = maker(template, function if template == "{a}:{b}" else lambda a: a)
    text = "feed-" + "x" * (length - 5)
    texts = [text, text[:-1] + "y", text[:-1], text + "x", "feed-y" + text[6:]]
    keys = [key(text) for text in texts]
    assert len(set(keys)) == len(keys)
    for one in keys:
        assert one.startswith("feed-")
        assert len(one) < 300
    assert (text in keys[0]) == (length == 200)


def test_a_short_value_cannot_pass_for_a_long_one() -> None:
    def function(a: str, b: str = "b") -> None: ...

    for template in ("{a}:{b}", "{a}~{b}"):
        key = maker(template, function)
        long = key("x" * LONG)
        assert key(long[:-2]) != long
        for cut in (at for at, character in enumerate(long) if character == "~"):
            assert key(long[:cut], long[cut + 1 :]) != long
            assert key(long[: cut - 1], long[cut + 1 :]) != long
    alone = maker("{a}", lambda a: a)
    assert alone(alone("x" * LONG)) != alone("x" * LONG)
    computed = maker(as_it_is, lambda a: a)
    assert computed(computed("x" * LONG)) != computed("x" * LONG)


@given(st.lists(surrogates, min_size=2, max_size=2, unique=True))
@example(["\ud800", "\ud801"])
@example(["\ud800", "?"])
@example(["\ud800", "\\ud800"])
@example(["\ud83d\ude00", "\U0001f600"])
def test_any_str_has_a_key_of_its_own_that_can_be_sent(values: list[str]) -> None:
    for template in ("{a}", "{a:md5}", "{md5}"):
        keys = [key_of(value, template) for value in values]
        assert keys[0] != keys[1]
        for key in keys:
            key.encode()  # as redis-py does


def test_huge_numbers() -> None:
    values = [10**5000, 10**5000 + 1, -(10**5000), 2**64, 2**64 + 1, 2.0**64]
    assert len({digest(value) for value in values}) == len(values)


# --- the fields --------------------------------------------------------------------------------------------------

USER = SimpleNamespace(id=7, team=SimpleNamespace(name="ops"))


@pytest.mark.parametrize(
    ("template", "args", "kwargs", "key"),
    [
        ("nightly-report", (1,), {}, "nightly-report"),
        ("{name}", (1,), {}, NAME),
        ("{a}", ("x",), {}, "x"),
        ("{a}", (None,), {}, "None"),
        ("{a.id}", (USER,), {}, "7"),
        ("{a.team.name}:{b}", (USER, 1), {}, "ops:1"),
        ("{a[0]}", ({"0": "x"},), {}, "x"),
        ("{a[0]}", ({0: "x"},), {}, "x"),
        ("{a[0][sku].id}", ([{"sku": USER}],), {}, "7"),
        ("{a[not a name]}", ({"not a name": 3},), {}, "3"),
        ("{rest[1]}", (0, 0, "x", "y"), {}, "y"),
        ("{others[feed]}", (0,), {"feed": "f"}, "f"),
        ("{c}", (0,), {"c": 5}, "5"),
        ("{a:%H:%M}", (time(3, 4),), {}, "03:04"),
        ("{a:03d}", (7,), {}, "007"),
        ("{a!s}", (1,), {}, "1"),
        ("{a!a}", ("\xe9",), {}, "'\\xe9'"),
        ("{a!r:>5}", ("x",), {}, "  'x'"),
        ("{a}:{b}", ("x:y%", "z"), {}, "x%3Ay%25:z"),
        ("{a}:{b}-{c}", ("X-\ud800", ":Y"), {"c": "-"}, "X%2D%ED%A0%80:%3AY-%2D"),
        ("{a}", (b"x",), {}, "b'x'"),
        ("{a:>5}", (b"x",), {}, " b'x'"),
        ("{a.id:md5}", (USER,), {}, digest(7)),
        ("{a[0]:md5}", ([[1, 2]],), {}, digest([1, 2])),
        ("{rest:md5}", (0, 0, "x"), {}, digest(["x"])),
        ("{others:md5}", (0,), {"x": 1}, digest({"x": 1})),
        ("{a!r:md5}", ("x",), {}, digest("'x'")),
        ("{a!s:md5}", (1,), {}, digest("1")),
    ],
)
def test_fields(template: str, args: tuple[Any, ...], kwargs: dict[str, Any], key: str) -> None:
    def function(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **others: Any) -> None: ...

    assert maker(template, function)(*args, **kwargs) == key


def test_a_constant_key_asks_nothing_of_the_call() -> None:
    make = compile_key("k", inspect.signature(importer))
    assert make(NAME, (), {}) == make(NAME, (object(), 2, 3, 4, 5), {"nope": 1}) == "k"


@pytest.mark.parametrize("template", ["{a}", "{a:md5}", "{a.real}:{name}"])
def test_a_key_of_one_parameter_does_not_look_at_the_rest(template: str) -> None:
    key = maker(template, lambda a, b, *rest, **others: (a, b, rest, others))
    assert key(1, object(), object(), x=object()) == key(1, 2) == key(1) == key(a=1)


@pytest.mark.parametrize("template", ["{md5}", "{a}:{b}:{d}", "{b.real}"])
def test_an_ordinary_call_is_not_bound(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """That would take longer than all the rest of making its key."""
    key = maker(template, importer)
    monkeypatch.setattr(Arguments, "bind", None)
    assert key(1) == key(a=1) == key(1, 2) == key(1, b=2) == key(b=2, a=1) == key(1, 2, (3, "x")) == key(1, d=None)
    assert key(1, 3, d=4) != key(1)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((), {"b": 1}), ((1, 2, 3, 4), {}), ((1,), {"nope": 1}), ((1,), {"a": 1})], ids=repr
)
def test_a_call_that_could_not_be_made_has_no_key(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError) as raised:
        maker("{md5}", importer)(*args, **kwargs)
    assert not isinstance(raised.value, OnlyOneError)


def test_the_digests_of_short_texts_are_remembered() -> None:
    """Long ones would take the memory."""
    _digest_of_short.cache_clear()
    digest("x" * 200)
    assert _digest_of_short.cache_info().currsize == 1
    digest("x" * 201)
    assert _digest_of_short.cache_info().currsize == 1


def test_the_md5_of_python_itself_is_the_faster_one() -> None:
    assert encoding.md5 is pytest.importorskip("_md5").md5


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


def test_a_callable_gets_all_arguments_by_their_names() -> None:
    def key(a: int, b: int = 0, *rest: int, c: int, **others: int) -> str:
        return f"{a} {b} {rest} {c} {others}"

    def function(a: int, b: int = 2, *rest: int, c: int = 3, **others: int) -> None: ...

    make = maker(key, function)
    assert make(1) == make(a=1) == make(1, 2) == "1 2 () 3 %7B%7D"
    assert make(1, 2, 9, c=4, x=5) == "1 2 (9,) 4 %7B'x': 5%7D"
    assert maker(lambda *, b, a: f"{a}{b}", lambda a, b: (a, b))(1, 2) == "12"


def test_a_callable_that_has_other_names_gets_them_in_their_order() -> None:
    assert maker(lambda x, y: f"{x}{y}", lambda a, b: (a, b))(b=2, a=1) == "12"
    assert maker(max, lambda a, b: (a, b))("x", b="y") == "y"  # whose parameters nobody knows


# --- what has no key ---------------------------------------------------------------------------------------------

LOOP: list[Any] = []
LOOP.append(LOOP)
RING: dict[str, Any] = {}
RING["x"] = [RING]
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


class Told:
    """Has a text, with its address in it."""

    def __repr__(self) -> str:
        return f"<Told {id(self):#x}>"


# `Feed` itself is a class with fields, of which there is no instance to spell.
UNKNOWN = {
    "an object": Opaque(),
    "a class": Feed,
    "a function": key_of,
    "an iterator": iter([1]),
    "a complex": 1j,
    "a bytearray": bytearray(b"a"),
    "in a list": [1, [Opaque()]],
    "in a dict": {"a": Opaque()},
    "as a dict's key": {Opaque(): 1},
    "a number as a dict's key that is too long for JSON": {10**5000: 1},
    "in a set": {Opaque()},
    "in a dataclass": Feed("a", [Opaque()]),  # type: ignore[list-item]
    "a list of itself": LOOP,
    "a dict of itself": RING,
    "too deep": DEEP,
}


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN)
def test_what_has_no_stable_key_is_named_with_the_way_out(value: object) -> None:
    for template in ("{md5}", "{feed:md5}"):
        with pytest.raises(UnkeyableArgument, match="key=callable") as raised:
            maker(template, lambda feed, other=1: (feed, other))(value)
        assert "'feed'" in str(raised.value)
        assert "0x" not in str(raised.value)


def test_what_is_a_little_too_deep_among_all_arguments_is_named() -> None:
    def is_refused(value: object) -> bool:
        try:
            return not key(value)
        except UnkeyableArgument as error:
            return "'a'" in str(error)

    key = maker("{md5}", lambda a: a)
    value: list[Any] = []
    while not is_refused(value):
        value = [value]


ADDRESSED = {
    "an object": Opaque(),
    "a method": Opaque().__init__,  # type: ignore[misc]
    "in an error": ValueError(Opaque()),
    "in a partial": partial(print, Opaque()),
    "written by hand": Told(),
}


@pytest.mark.parametrize("value", ADDRESSED.values(), ids=ADDRESSED)
@pytest.mark.parametrize("template", ["{feed}", "{feed!r}", "{feed!s}", "{feed!a}", "{feed!r:md5}", "{feed!r:>99}"])
def test_no_text_with_an_address_gets_into_a_key(template: str, value: object) -> None:
    with pytest.raises(UnkeyableArgument, match="'feed'") as raised:
        maker(template, lambda feed: feed)(value)
    assert "0x" not in str(raised.value)


CONTAINERS: list[Any] = [[1], (), {"a": 1}, {1}, Feed("a"), Point(1, 2), deque([{"a"}]), MappingProxyType({1: {"a"}})]


@pytest.mark.parametrize("container", [*CONTAINERS, SimpleNamespace(a={"a"})], ids=repr)
def test_a_container_in_a_plain_field_is_told_to_be_digested(container: object) -> None:
    """Its text differs between processes, or after the broker."""
    for template in ("{feed}", "{feed!r}", "{feed!r:md5}"):
        with pytest.raises(UnkeyableArgument, match=r"'feed'.*\{feed:md5\}"):
            maker(template, lambda feed: feed)(container)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{feed.id}", None),
        ("{feed[id]}", {}),
        ("{feed[3]}", [1]),
        ("{feed[id]}", 3),
        ("{feed:d}", "x"),
        ("{feed:%Y}", None),
    ],
)
def test_a_field_that_cannot_be_read_is_named(template: str, value: object) -> None:
    with pytest.raises(UnkeyableArgument) as raised:
        maker(template, lambda feed: feed)(value)
    assert template in str(raised.value)
    assert "'feed'" in str(raised.value)


# --- everywhere, and for ever ------------------------------------------------------------------------------------

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
        f"not in the golden file yet: {missing}; python tests/keys/test_keys.py > tests/golden/keys.json"
    )


def test_keys_are_the_same_in_another_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.run([sys.executable, __file__], env=environment, check=True, capture_output=True)
    assert json.loads(output.stdout) == all_keys()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(all_keys(), indent=2) + "\n")
