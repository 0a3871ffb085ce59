"""Values to digests: the same MD5 in every process, on every Python, before and after a trip through the broker."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import lru_cache
from importlib import import_module
from pathlib import PurePath
from typing import Any
from uuid import UUID

VERSION = b"\xff1"
"""Begins every encoding but that of a lone str. A change of the encoding changes it, and a golden file pins both.

No UTF-8 text begins with this byte, so no str is spelt like anything else.
"""

_SHORT = 200
"""Characters of a str whose digest is remembered; longer ones would take the memory."""

md5 = hashlib.md5
with suppress(ImportError):  # CPython's own takes a third of OpenSSL's time for a text as short as an argument
    md5 = import_module("_md5").md5


class UnknownType(Exception):
    """Raised for a value whose type has no canonical spelling.

    Attributes:
        kind: the type.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind


def digest(value: object) -> str:
    """The MD5 of one value.

    A str is digested as its plain UTF-8, as in the recipe of Celery's cookbook.

    Returns:
        32 hexadecimal digits.

    Raises:
        UnknownType: for a value, or a part of it, that has no canonical spelling.
    """
    if type(value) is str and len(value) <= _SHORT:
        return _digest_of_short(value)
    value = plain(value)
    if isinstance(value, str):
        return md5(_utf8(value), usedforsecurity=False).hexdigest()
    try:
        return md5(VERSION + _encode(value), usedforsecurity=False).hexdigest()
    except RecursionError:
        raise UnknownType(type(value)) from None


@lru_cache(maxsize=4096)
def _digest_of_short(text: str) -> str:
    """Calls come back with the same arguments, or there would be no need of us."""
    return md5(_utf8(text), usedforsecurity=False).hexdigest()


def _encode(value: object) -> bytes:
    """The canonical spelling of one value: a letter for the type, a length, and the content."""
    encoder = _ENCODERS.get(type(value)) or _encoder_of_subclass(value)
    return encoder(value)


def plain(value: object) -> object:
    """The value itself, or that of an Enum."""
    while isinstance(value, Enum):
        value = value.value
    return value


def _sized(letter: bytes, content: bytes) -> bytes:
    return b"%s%d:%s" % (letter, len(content), content)


def _joined(letter: bytes, parts: Iterable[bytes]) -> bytes:
    return _sized(letter, b"".join(parts))


def _utf8(value: str) -> bytes:
    try:
        return str.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, as in file names that are not UTF-8
        return str.encode(value, "utf-8", "surrogatepass")


def _str(value: str) -> bytes:
    return _sized(b"s", _utf8(value))


def _spelt(letter: bytes, spell: Callable[[Any], str]) -> Callable[[Any], bytes]:
    return lambda value: _sized(letter, spell(value).encode())


def _mapping(value: dict[Any, Any]) -> bytes:
    return _joined(b"d", sorted(_mapping_key(key) + _encode(item) for key, item in value.items()))


def _mapping_key(key: object) -> bytes:
    key = plain(key)
    if key is None:
        return _str("null")
    if isinstance(key, bool):
        return _str("true" if key else "false")
    if isinstance(key, int):
        try:
            return _str(int.__repr__(key))
        except ValueError:  # more digits than Python spells, JSON neither
            raise UnknownType(int) from None
    if isinstance(key, float):
        return _str(_json_float(key))
    return _encode(key)


def _json_float(value: float) -> str:
    spelling = float.__repr__(value)
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(spelling, spelling)


def _set(value: Iterable[object]) -> bytes:
    return _joined(b"S", sorted(_encode(item) for item in value))


def _list(value: Iterable[object]) -> bytes:
    return _joined(b"l", [_encode(item) for item in value])


def _dataclass(value: Any) -> bytes:
    kind = type(value)
    compared = [(field.name, getattr(value, field.name)) for field in fields(value) if field.compare]
    return _joined(b"C", [_str(f"{kind.__module__}.{kind.__qualname__}"), _mapping(dict(compared))])


# The order counts for subclasses: a datetime is a date, a bool is an int.
_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    str: _str,
    bool: lambda value: b"T" if value else b"F",
    int: lambda value: _sized(b"i", int.__format__(value, "x").encode()),
    float: _spelt(b"f", float.__repr__),
    type(None): lambda _: b"N",
    bytes: lambda value: _sized(b"b", bytes(value)),
    list: _list,
    tuple: _list,
    dict: _mapping,
    set: _set,
    frozenset: _set,
    UUID: _spelt(b"U", lambda value: value.hex),
    datetime: _spelt(b"t", datetime.isoformat),
    date: _spelt(b"a", date.isoformat),
    time: _spelt(b"c", time.isoformat),
    timedelta: _spelt(b"e", lambda value: f"{value.days},{value.seconds},{value.microseconds}"),
    PurePath: _spelt(b"p", lambda value: value.as_posix()),
}


def _encoder_of_subclass(value: object) -> Callable[[Any], bytes]:
    if isinstance(value, Enum):
        return lambda member: _encode(plain(member))
    decimal = sys.modules.get("decimal")  # which takes long to import, and which whoever has a Decimal has imported
    if decimal is not None and isinstance(value, decimal.Decimal):
        return _spelt(b"D", decimal.Decimal.__str__)
    for kind, encoder in _ENCODERS.items():
        if isinstance(value, kind):
            return encoder
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass
    raise UnknownType(type(value))
