"""What a field of a template means, however the arguments are given; which values have no stable text; escaping."""

from __future__ import annotations

import re
from collections import deque
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from only_one import OnlyOneError, UnkeyableArgument
from tests.keys.calls import LONG, Feed, Mode, Opaque, Point, as_it_is, importer, key_of, maker, surrogates


@pytest.mark.parametrize("template", ["{a}", "{a!s}", "{a!r}", "{a:>8}", "{a:md5}", "{md5}"])
def test_an_enum_is_its_value_in_every_kind_of_field(template: str) -> None:
    assert key_of(Mode.FAST, template) == key_of("fast", template)


@pytest.mark.parametrize("template", ["{a}", "{a}:{b}", as_it_is])
@pytest.mark.parametrize("length", [200, 201, LONG])
def test_a_long_value_is_hashed_behind_a_readable_head(template: Any, length: int) -> None:
    def function(a: str, b: str = "b") -> None: ...

    key = maker(template, function if template == "{a}:{b}" else lambda a: a)
    text = "feed-" + "x" * (length - 5)
    texts = [text, text[:-1] + "y", text[:-1], text + "x", "feed-y" + text[6:]]
    keys = [key(text) for text in texts]
    assert len(set(keys)) == len(keys)
    assert all(one.startswith("feed-") for one in keys)
    assert max(map(len, keys)) < 300
    assert (text in keys[0]) == (length == 200)
    assert length == 200 or key(keys[0]) != keys[0]  # a short value cannot pass for a long one


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


LOOP: list[Any] = []
LOOP.append(LOOP)
RING: dict[str, Any] = {}
RING["x"] = [RING]
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


class Told:
    """Has a text, with its address in it."""

    def __init__(self, digits: str) -> None:
        self.digits = digits

    def __repr__(self) -> str:
        return f"<Told 0x{id(self):{self.digits}}>"

    __str__ = __repr__


# Of no known type: itself, as a part, or as the key of a dict; `Feed` is a class with fields, and no instance of it.
UNKNOWN: list[Any] = [Opaque(), Feed, key_of, iter([1]), 1j, bytearray(b"a"), {10**5000: "too long for JSON"}]
UNSET_FIELD = Feed("a")
object.__delattr__(UNSET_FIELD, "url")
UNKNOWN += [UNSET_FIELD, [1, [Opaque()]], {"a": Opaque()}, {Opaque(): 1}, {Opaque()}, Feed("a", [Opaque()])]  # type: ignore[list-item]
ENDLESS = [LOOP, RING, DEEP]
# Their text has an address in it.
ADDRESSED = [Opaque(), Opaque().__init__, ValueError(Opaque()), partial(print, Opaque())]  # type: ignore[misc]
ADDRESSED += [Told("x"), Told("016X")]  # as on Linux, and on Windows
IN_TEXTS = ("{feed}", "{feed!r}", "{feed!s}", "{feed!a}", "{feed!r:md5}", "{feed!r:>99}", "{feed!r:.9}")
# Their text differs between processes, or after the broker.
CONTAINERS: list[Any] = [[1], (), {"a": 1}, {1}, Feed("a"), Point(1, 2)]
UNKNOWN_CONTAINERS = [deque([{"a"}]), MappingProxyType({1: {"a"}}), SimpleNamespace(a={"a"}), [Opaque()]]


@pytest.mark.parametrize(
    ("templates", "value", "words"),
    [
        *((("{md5}", "{feed:md5}"), value, "'feed'.*key=callable") for value in [*UNKNOWN, *ENDLESS]),
        *((IN_TEXTS, value, "'feed'") for value in ADDRESSED),
        *((("{feed}", "{feed!r}", "{feed!r:md5}"), value, r"'feed'.*\{feed:md5\}") for value in CONTAINERS),
        *((("{feed}", "{feed!r}"), value, r"'feed'.*text: write key=callable") for value in UNKNOWN_CONTAINERS),
        (("{md5}", "{feed:md5}"), Opaque(), "is or holds a tests.keys.calls.Opaque: "),
        (("{md5}",), UNSET_FIELD, "is or holds a tests.keys.calls.Feed: "),
        (("{md5}",), {10**5000: 1}, "is or holds a builtins.int: "),
        (("{feed}", "{feed!r}"), ValueError(Opaque()), "is or holds a builtins.ValueError: "),
        (("{feed}",), Opaque(), "is a tests.keys.calls.Opaque, which"),
        (("{feed.id}",), None, r"\{feed.id\}.*'feed'.*: pass a value that has it, or write key=callable$"),
        (("{feed[id]}",), {}, r"\{feed\[id\]\}.*'feed'"),
        (("{feed[3]}",), [1], r"\{feed\[3\]\}.*'feed' \(IndexError: "),
        (("{feed[id]}",), 3, r"\{feed\[id\]\}.*'feed'"),
        (("{feed:d}",), "x", r"\{feed:d\}.*'feed' of type str \(.*: write another format, or key=callable$"),
        (("{feed!r:d}",), 3, r"\{feed!r:d\}.*'feed' of type str \("),
        (("{feed:%Y}",), None, r"\{feed:%Y\}.*'feed' of type NoneType \("),
    ],
)
def test_a_value_without_a_stable_key_is_named_with_the_way_out(
    templates: tuple[str, ...], value: object, words: str
) -> None:
    for template in templates:
        with pytest.raises(UnkeyableArgument, match=words) as raised:
            maker(template, lambda feed, other=1: (feed, other))(value)
        assert "0x" not in str(raised.value)


def test_what_is_a_little_too_deep_among_all_arguments_is_named() -> None:
    key = maker("{md5}", lambda a: a)

    def nest() -> None:
        value: list[Any] = []
        while key(value):
            value = [value]

    with pytest.raises(UnkeyableArgument, match="'a'"):
        nest()


class Row:
    """A row of a database, without a digest; to read its key would ask the database."""

    __slots__ = ("_loaded", "name")

    @property
    def pk(self) -> int:
        return self._loaded  # type: ignore[no-any-return, attr-defined]


class Keyed:
    """Has a method that is called like what identifies other objects."""

    def key(self) -> None: ...


@pytest.mark.parametrize(
    ("template", "value", "advice"),
    [
        ("{md5}", SimpleNamespace(id=7), "{ctx.id}"),
        ("{ctx:md5}", SimpleNamespace(key="x", name="y"), "{ctx.key}"),
        ("{ctx.user:md5}", SimpleNamespace(id=7, user=SimpleNamespace(uuid="u")), "{ctx.user.uuid}"),
        ("{md5}", Row(), "{ctx.pk}"),
        ("{ctx}", Row(), "{ctx.pk}"),
        ("{md5}", {"pool": Opaque(), "id": 7}, None),
        ("{md5}", Opaque(), "{ctx.id}"),
        ("{md5}", object(), None),
        ("{md5}", Keyed(), None),
        ("{ctx}", [Opaque()], None),
    ],
)
def test_what_is_suggested_in_place_of_a_value_without_a_key_exists(template: str, value: Any, advice: Any) -> None:
    with pytest.raises(UnkeyableArgument, match="key=callable") as raised:
        maker(template, lambda ctx: ctx)(value)
    assert re.findall(r"such as (\S+),", str(raised.value)) == ([advice] if advice else [])


# --- how the arguments are given ---


@pytest.mark.parametrize("template", ["{md5}", "{a:md5}:{rest:md5}:{others:md5}"])
def test_every_kind_of_parameter(template: str) -> None:
    def mixed(a: int, /, b: int = 2, *rest: int, c: int, d: int = 4, **others: int) -> None: ...

    key = maker(template, mixed)
    assert key(1, c=3) == key(1, 2, c=3, d=4) == key(1, b=2, d=4, c=3)
    assert key(1, 2, 5, c=3, x=1, y=2) == key(1, 2, 5, y=2, x=1, c=3)
    calls = [key(1, c=3), key(2, c=3), key(1, 2, 5, c=3), key(1, 2, 5, 6, c=3), key(1, c=3, x=1), key(1, c=3, y=1)]
    calls += [key(1, c=3, a=1), key(1, c=3, x=1, y=2)]
    assert len(set(calls)) == len(calls)
    key = maker("{md5}", lambda a, b: (a, b))
    assert key(1, 2) == key(b=2, a=1) != key(2, 1)


def test_a_positional_only_name_may_come_again_as_keyword() -> None:
    def mixed(a: int = 0, /, **others: int) -> None: ...

    key = maker("{a}:{others[a]}", mixed)
    assert key(1, a=2) == "1:2"
    assert maker("{a}", mixed)(a=2) == "0"
    with pytest.raises(TypeError):
        maker("{md5}", lambda a, /: a)(a=2)
    with pytest.raises(TypeError):
        maker("{md5}", lambda a, *, b=2, c=3: (a, b, c))(1, 2)


@pytest.mark.parametrize("template", ["{a}", "{a:md5}", "{a.real}:{name}"])
def test_a_key_of_one_parameter_does_not_look_at_the_rest(template: str) -> None:
    key = maker(template, lambda a, b, *rest, **others: (a, b, rest, others))
    assert key(1, object(), object(), x=object()) == key(1, 2) == key(1) == key(a=1)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((), {"b": 1}), ((1, 2, 3, 4), {}), ((1,), {"nope": 1}), ((1,), {"a": 1})], ids=repr
)
def test_a_call_that_could_not_be_made_has_no_key(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError, match=r": the decorated function takes \(a, b, c, d\)$") as raised:
        maker("{md5}", importer)(*args, **kwargs)
    assert not isinstance(raised.value, OnlyOneError)
