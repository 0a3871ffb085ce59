"""Functions, values and the keys of calls, for the tests of this room."""

from __future__ import annotations

import enum
import inspect
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta, timezone
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from only_one.keys.template import compile_key

NAME = "shop.tasks.import_feed"
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


surrogates = st.text(st.characters(exclude_categories=()), max_size=5)
offsets = st.none() | st.timedeltas(timedelta(hours=-14), timedelta(hours=14)).map(
    lambda offset: timezone(timedelta(minutes=offset // timedelta(minutes=1)))
)
scalars: list[Any] = [st.none(), st.booleans(), st.integers(), st.floats(), surrogates, st.binary(max_size=5)]
scalars += [st.decimals(), st.uuids(), st.datetimes(timezones=offsets), st.dates()]
carried = st.recursive(
    st.one_of(scalars),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def importer(a: Any, b: Any = 2, c: Any = (3, "x"), *, d: Any = None) -> None:
    """A function as users have them."""


def anything(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **others: Any) -> None:
    """A function that takes all kinds of arguments."""
