"""The MD5 of any value: the same in every process, on every Python, before and after a trip through the broker."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from importlib import import_module
from pathlib import PurePath
from typing import Any
from uuid import UUID

VERSION = b"\xff1"
"""The beginning of the encoding of every value, except a str by itself: no UTF-8 text begins with this byte.

It changes if the encoding of a known type changes; a new type leaves it. A golden file pins both.
"""

_MOST_REMEMBERED = 200
"""The most characters of a str whose digest is remembered; longer ones would take much memory."""

_hash = hashlib.md5
with suppress(ImportError):  # for short texts it takes a third of OpenSSL's time
    _hash = import_module("_md5").md5
md5 = partial(_hash, usedforsecurity=False)


def utf8(text: str) -> bytes:
    """Encode a str, with lone surrogates, as Python reads them from the name of a file that is not UTF-8."""
    return str.encode(text, "utf-8", "surrogatepass")


class UnknownType(Exception):
    """A value has no canonical encoding; raised with the name of its type."""


def importable_name(module: str, namespace: Mapping[str, Any]) -> str:
    """The name by which other programs import a module, also a module that was started as a program with ``-m``.

    Args:
        module: the name that the module has in this process.
        namespace: its global variables.

    Returns:
        The name; ``"__main__"`` for a program that no other can import.
    """
    if module not in ("__main__", "__mp_main__"):
        return module
    return getattr(namespace.get("__spec__"), "name", None) or "__main__"


def type_name(value: object) -> str:
    """The name of a value's type, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def digest(value: Any) -> str:
    """The MD5 of one value.

    A str is digested as its plain UTF-8, as in the recipe of Celery's cookbook.

    Returns:
        32 hexadecimal digits.

    Raises:
        UnknownType: for a value, or a part of it, that has no canonical encoding.
    """
    if type(value) is str and len(value) <= _MOST_REMEMBERED:
        return _digest_of_short(value)
    value = plain(value)
    try:
        content = utf8(value) if issubclass(type(value), str) else VERSION + _encode(value)
    except RecursionError:
        raise UnknownType(type_name(value)) from None
    return md5(content).hexdigest()


@lru_cache(maxsize=4096)
def _digest_of_short(text: str) -> str:
    """The digest of a short str. It is remembered, because calls come again with the same arguments."""
    return md5(utf8(text)).hexdigest()


def plain(value: Any) -> Any:
    """The value itself, or that of an Enum."""
    while isinstance(value, Enum):
        value = value.value
    return value


def _encode(value: object) -> bytes:
    """The canonical encoding of one value: a letter for the type, a length, and the content."""
    kind = type(value)
    if kind not in _ENCODERS:
        # By the type, because `isinstance` believes the `__class__` of a lazy object, which lacks its methods.
        kind = next(each for each in _ENCODERS if issubclass(kind, each))
    return _ENCODERS[kind](value)


def _sized(letter: bytes, content: bytes) -> bytes:
    return b"%s%d:%s" % (letter, len(content), content)


def _text(letter: bytes, content: str) -> bytes:
    return _sized(letter, utf8(content))


def _list(value: Iterable[object]) -> bytes:
    return _sized(b"l", b"".join([_encode(item) for item in value]))


def _set(value: Iterable[object]) -> bytes:
    return _sized(b"S", b"".join(sorted(_encode(item) for item in value)))


def _dict(value: dict[Any, Any]) -> bytes:
    return _sized(b"d", b"".join(sorted(_dict_key(key) + _encode(item) for key, item in value.items())))


def _dict_key(key: object) -> bytes:
    """Encode a dict's key: a scalar as the str that JSON makes of it."""
    key = plain(key)
    if key is None or isinstance(key, (int, float)):
        try:
            key = json.dumps(key)
        except ValueError:  # more digits than Python writes
            raise UnknownType(type_name(key)) from None
    return _encode(key)


def _dataclass(value: Any) -> bytes:
    if not is_dataclass(value) or isinstance(value, type):
        raise UnknownType(type_name(value))
    try:
        compared = {field.name: getattr(value, field.name) for field in fields(value) if field.compare}
    except AttributeError:  # a field is not set yet
        raise UnknownType(type_name(value)) from None
    kind = type(value)
    namespace = getattr(sys.modules.get(kind.__module__), "__dict__", {})
    is_of_module = kind.__qualname__.partition(".")[0] in namespace  # else it was pickled by value, in another program
    module = importable_name(kind.__module__, namespace if is_of_module else {})
    return _sized(b"C", _encode(f"{module}.{kind.__qualname__}") + _dict(compared))


# The first class that fits a subclass counts: an Enum may be a str, a datetime is a date, all are objects.
_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    Enum: lambda member: _encode(plain(member)),
    str: lambda value: _text(b"s", value),
    bool: lambda value: b"T" if value else b"F",
    int: lambda value: _sized(b"i", int.__format__(value, "x").encode()),
    float: lambda value: _text(b"f", float.__repr__(value)),
    type(None): lambda _: b"N",
    bytes: lambda value: _sized(b"b", bytes(value)),
    list: _list,
    tuple: _list,
    dict: _dict,
    set: _set,
    frozenset: _set,
    Decimal: lambda value: _text(b"D", Decimal.__str__(value)),
    UUID: lambda value: _text(b"U", value.hex),
    datetime: lambda value: _text(b"t", datetime.isoformat(value)),
    date: lambda value: _text(b"a", date.isoformat(value)),
    time: lambda value: _text(b"c", time.isoformat(value)),
    timedelta: lambda value: _text(b"e", f"{value.days},{value.seconds},{value.microseconds}"),
    PurePath: lambda value: _text(b"p", value.as_posix()),
    object: _dataclass,
}
