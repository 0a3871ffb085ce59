"""One field of a key template: which value of the call it means, and that value's text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

from .arguments import Arguments, Get
from .encoding import UnknownType, digest, plain
from .errors import KeyTemplateError, UnkeyableArgument
from .escaping import escape, shorten

Text = Callable[[str, tuple[Any, ...], Mapping[str, Any]], str]
"""The name, and the call's positional and keyword arguments, to a part of the key."""

_PATH = r"(?P<first>[^.\[\]]+)(?P<rest>(?:\.[^.\[\]]+|\[[^\[\]]+\])*)"
_STEP = r"\.([^.\[\]]+)|\[([^\[\]]+)\]"
"""Finds an attribute or an item, and an empty str for the other."""

_ADDRESS = r"0x[0-9a-fA-F]{6,}"
_OWN = ("name", "md5")
_CONVERSIONS: dict[str | None, Callable[[Any], Any]] = {None: lambda value: value, "r": repr, "s": str, "a": ascii}


class Field(NamedTuple):
    """A field as it is written in a template."""

    template: str
    path: str
    conversion: str | None
    spec: str

    def __str__(self) -> str:
        conversion = f"!{self.conversion}" if self.conversion else ""
        spec = f":{self.spec}" if self.spec else ""
        return f"{{{self.path}{conversion}{spec}}}"

    def error(self, problem: str) -> KeyTemplateError:
        """What is wrong with the field, and what to write instead."""
        return KeyTemplateError(f"key template {self.template!r}: {problem}")


class _Value(NamedTuple):
    """What a field means: a parameter, and the attributes and items that lead on from it."""

    field: Field
    parameter: str
    steps: list[tuple[str, str]]


def text_of(field: Field, arguments: Arguments, escaped: frozenset[str]) -> Text:
    """The function that gives a field's text.

    Args:
        field: the field as it is written.
        arguments: the parameters of the function.
        escaped: the characters that are escaped in the text.

    Raises:
        KeyTemplateError: if the field could not work.
    """
    if field.path not in _OWN:
        return _parameter_text(_value(field, arguments), arguments, escaped)
    if field.conversion or field.spec:
        problem = f"{field} takes no conversion and no format, write {{{field.path}}}"
        raise field.error(problem)
    return _name_text(escaped) if field.path == "name" else _all_text(arguments)


def _name_text(escaped: frozenset[str]) -> Text:
    return lambda name, _args, _kwargs: shorten(escape(name, escaped))


def _all_text(arguments: Arguments) -> Text:
    def text(_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        values = arguments.values(args, kwargs)
        try:
            return digest(values)
        except UnknownType as error:
            culprit = next(index for index, value in enumerate(values) if not _has_digest(value))
            raise _unkeyable(arguments.names[culprit], error.kind) from None

    return text


def _has_digest(value: object) -> bool:
    """Whether one of all arguments has a canonical spelling where it stands, one level down."""
    try:
        digest([value])
    except UnknownType:
        return False
    return True


def _unkeyable(name: str, kind: type) -> UnkeyableArgument:
    return UnkeyableArgument(
        f"no stable key can be made from the parameter {name!r}, which is or holds a "
        f"{kind.__module__}.{kind.__qualname__}: write what identifies it, such as {{{name}.id}}, or key=callable, "
        "or leave it out of the key"
    )


# Parameters


def _value(field: Field, arguments: Arguments) -> _Value:
    matched = re.fullmatch(_PATH, field.path)
    if not matched:
        problem = f"{field} names no parameter, write one of {_choices(arguments)}"
        raise field.error(problem)
    parameter = matched["first"]
    steps = re.findall(_STEP, matched["rest"])
    if any(word.startswith("_") for word in (parameter, *(word for step in steps for word in step))):
        problem = f"{field} has a name that begins with an underscore, write a public one or key=callable"
        raise field.error(problem)
    if parameter in _OWN:
        problem = f"{{{parameter}}} is no parameter but only_one's own: rename the parameter, or write key=callable"
        raise field.error(problem)
    if parameter not in arguments.names:
        problem = f"{parameter!r} is not a parameter, write one of {_choices(arguments, parameter)}"
        raise field.error(problem)
    return _Value(field, parameter, steps)


def _choices(arguments: Arguments, missing: str = "name") -> str:
    """The fields that could be meant, to say in an error."""
    fields: list[str] = [*_OWN]
    for name in arguments.names:
        gathers_names = arguments.call.parameters[name].kind is Parameter.VAR_KEYWORD
        fields.append(f"{name}[{missing}]" if gathers_names else name)
    return ", ".join(f"{{{field}}}" for field in fields)


def _parameter_text(value: _Value, arguments: Arguments, escaped: frozenset[str]) -> Text:
    field = value.field
    if "{" in field.spec:
        problem = f"{field} has a field inside its format, write the format out"
        raise field.error(problem)
    if field.conversion not in _CONVERSIONS:
        problem = f"{field} has an unknown conversion, write !r, !s or !a"
        raise field.error(problem)
    get = _getter(value, arguments)
    # The argument itself, where it is given by position: a call saved in what every call pays for.
    position = sys.maxsize if value.steps else arguments.position(value.parameter)
    return _digest_text(value, get, position) if field.spec == "md5" else _plain_text(value, get, position, escaped)


def _getter(value: _Value, arguments: Arguments) -> Get:
    get = arguments.getter(value.parameter)

    def follow(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        found = get(args, kwargs)
        try:
            for attribute, item in value.steps:
                found = getattr(found, attribute) if attribute else _item(found, item)
        except (AttributeError, LookupError, TypeError) as error:
            msg = (
                f"{value.field} cannot be read from the parameter {value.parameter!r} "
                f"({type(error).__name__}: {error}): pass a value that has it, or write key=callable"
            )
            raise UnkeyableArgument(msg) from error
        return found

    return follow


def _item(value: Any, item: str) -> Any:
    """`value[item]`; a number may have become a str on its way through the broker, as a dict's key."""
    if not item.isdecimal() or (isinstance(value, Mapping) and item in value):
        return value[item]
    return value[int(item)]


def _digest_text(value: _Value, get: Get, position: int) -> Text:
    converts = value.field.conversion is not None

    def text(_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        found = args[position] if position < len(args) else get(args, kwargs)
        try:
            return digest(_converted(value, found) if converts else found)
        except UnknownType as error:
            raise _unkeyable(value.parameter, error.kind) from None

    return text


def _plain_text(value: _Value, get: Get, position: int, escaped: frozenset[str]) -> Text:
    as_it_is = not value.field.spec and not value.field.conversion

    def text(_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        found = args[position] if position < len(args) else get(args, kwargs)
        if not as_it_is or type(found) is not str:
            found = _formatted(value, found)
        return shorten(escape(found, escaped))

    return text


def _formatted(value: _Value, found: Any) -> str:
    converted = _converted(value, found)
    if isinstance(converted, bytes):
        converted = repr(converted)
    try:
        text = format(converted, value.field.spec)
    except (TypeError, ValueError) as error:
        msg = (
            f"{value.field} cannot format the parameter {value.parameter!r}, a {type(converted).__qualname__} "
            f"({error}): write another format, or key=callable"
        )
        raise UnkeyableArgument(msg) from error
    return _without_address(value, converted, text)


def _converted(value: _Value, found: Any) -> Any:
    found = plain(found)
    if _has_no_stable_text(found):
        # The text of a container differs for equal ones: a set's order by process, a tuple's brackets by the broker.
        raise _unkeyable_text(value, type(found))
    converted = _CONVERSIONS[value.field.conversion](found)
    return _without_address(value, found, converted) if value.field.conversion else converted


def _unkeyable_text(value: _Value, kind: type) -> UnkeyableArgument:
    return UnkeyableArgument(
        f"the parameter {value.parameter!r} is a {kind.__module__}.{kind.__qualname__}, which has no stable text: "
        f"write {{{value.field.path}:md5}}, or what identifies it, such as {{{value.field.path}.id}}, or key=callable"
    )


def _has_no_stable_text(found: object) -> bool:
    """Whether it holds others, or has no text of its own but what its `repr` says of it."""
    if found is None or isinstance(found, (str, bytes, int, float)):
        return False
    return isinstance(found, Iterable) or type(found).__str__ is object.__str__


def _without_address(value: _Value, found: object, text: str) -> str:
    """`text`, unless it holds the address of an object, which is another in every process."""
    if not isinstance(found, str) and re.search(_ADDRESS, text):
        raise _unkeyable(value.parameter, type(found))
    return text
