"""A call to its key. Nothing here knows of Redis."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from inspect import Parameter, Signature, iscoroutinefunction, signature
from string import Formatter
from typing import Any, NamedTuple

from .arguments import Arguments, Get
from .encoding import UnknownType, digest, plain
from .errors import KeyTemplateError, UnkeyableArgument

MakeKey = Callable[[str, tuple[Any, ...], Mapping[str, Any]], str]
"""The name of the task or function, and the call's positional and keyword arguments, to the key."""

LONGEST_VALUE = 200
"""Characters of one field's text beyond which it is cut to a head and digested."""

_HEAD = 40
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PATH = re.compile(r"(?P<first>[^.\[\]]+)(?P<rest>(?:\.[^.\[\]]+|\[[^\[\]]+\])*)\Z")
_STEP = re.compile(r"\.(?P<attribute>[^.\[\]]+)|\[(?P<item>[^\[\]]+)\]")


def compile_key(key: str | Callable[..., str], call: Signature) -> MakeKey:
    """Prepare the key of a function's calls, once, when it is decorated.

    Args:
        key: a template, such as `"{name}:{feed_url:md5}"`, or a callable that takes the arguments of the call.
        call: the function's signature, without the bound task.

    Returns:
        A function that makes the key of one call.

    Raises:
        KeyTemplateError: for a template, or a callable, that could not work.
    """
    if isinstance(key, str):
        return _template(key, Arguments(call))
    if callable(key):
        return _computed(key, Arguments(call))
    msg = f"key is {key!r}: write a template such as '{{name}}:{{md5}}', or key=callable of the call's arguments"
    raise KeyTemplateError(msg)


def names_the_function(key: object) -> bool:
    """Whether a key template uses `{name}`."""
    return isinstance(key, str) and any(field == "name" for _, field, _, _ in _parse(key))


_ALWAYS = frozenset("{}%")


def escape(text: str, characters: frozenset[str] = _ALWAYS) -> str:
    """`text` with braces, `%` and what else is in `characters` spelt as in a URL, so that no two texts are spelt alike."""
    if characters.isdisjoint(text):
        return text
    return "".join(_percent(character) if character in characters else character for character in text)


def shorten(text: str) -> str:
    """`text`, or where it is overlong its head and its MD5.

    `%~` stands in no escaped text, so what is cut is never spelt like what is not.
    """
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:_HEAD]}%~{digest(text)}"


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


# Callables as keys


def _computed(key: Callable[..., str], arguments: Arguments) -> MakeKey:
    if iscoroutinefunction(key):
        msg = "key= is an async function: write a plain one, the key is made before anything is awaited"
        raise KeyTemplateError(msg)
    _check_parameters(key, arguments)

    def make(_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        bound = arguments.bind(args, kwargs)
        made = key(*bound.args, **bound.kwargs)
        if not isinstance(made, str) or not made:
            msg = f"key={_called(key)} returned {made!r}: return a str that is not empty"
            raise UnkeyableArgument(msg)
        return shorten(escape(made))

    return make


def _check_parameters(key: Callable[..., str], arguments: Arguments) -> None:
    try:
        accepted = signature(key)
    except (TypeError, ValueError):
        return  # builtins such as str.join have none to check
    try:
        example = arguments.example()
        accepted.bind(*example.args, **example.kwargs)
    except TypeError as error:
        msg = f"key={_called(key)} is called with all arguments of the call, {arguments.call}, but it takes {accepted}: {error}"
        raise KeyTemplateError(msg) from None


def _called(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", function))


# Templates

_Text = Callable[[str, tuple[Any, ...], Mapping[str, Any]], str]


class _Field(NamedTuple):
    path: str
    conversion: str | None
    spec: str

    def __str__(self) -> str:
        conversion = f"!{self.conversion}" if self.conversion else ""
        spec = f":{self.spec}" if self.spec else ""
        return f"{{{self.path}{conversion}{spec}}}"


def _parse(template: str) -> list[tuple[str, str | None, str, str | None]]:
    try:
        return [(literal, field, spec or "", conversion) for literal, field, spec, conversion in Formatter().parse(template)]
    except ValueError as error:
        msg = f"key template {template!r}: {error}; a literal brace is written {{{{ or }}}}"
        raise KeyTemplateError(msg) from None


def _template(template: str, arguments: Arguments) -> MakeKey:
    literals, fields = _split(template)
    escaped = _ALWAYS.union(separator[0] for separator in _checked_separators(template, literals, fields))
    spelt = [literal.replace("{", "%7B").replace("}", "%7D") for literal in literals]
    texts = [_text(template, field, arguments, escaped) for field in fields]
    if not texts:
        return lambda _name, _args, _kwargs: spelt[0]
    if len(texts) == 1:
        (text,), (head, tail) = texts, spelt
        return lambda name, args, kwargs: head + text(name, args, kwargs) + tail

    form = "%s".join(literal.replace("%", "%%") for literal in spelt)
    if len(texts) == 2:  # noqa: PLR2004 - most templates have a name and one argument
        first, second = texts
        return lambda name, args, kwargs: form % (first(name, args, kwargs), second(name, args, kwargs))
    return lambda name, args, kwargs: form % tuple([text(name, args, kwargs) for text in texts])


def _split(template: str) -> tuple[list[str], list[_Field]]:
    """The literals, one more than there are fields, and the fields between them."""
    if not template:
        msg = "the key template is empty: write a name for the lock, such as 'nightly-report', or '{name}:{md5}'"
        raise KeyTemplateError(msg)
    literals, fields = [""], []
    for literal, path, spec, conversion in _parse(template):
        literals[-1] += literal
        if path is not None:
            fields.append(_Field(path, conversion, spec))
            literals.append("")
    return literals, fields


def _checked_separators(template: str, literals: list[str], fields: list[_Field]) -> list[str]:
    separators = literals[1:-1] if fields else []
    for index, separator in enumerate(separators):
        if not separator:
            msg = f"key template {template!r}: nothing stands between {fields[index]} and {fields[index + 1]}, write {fields[index]}:{fields[index + 1]}"
            raise KeyTemplateError(msg)
        if separator[0] in _ALWAYS:
            msg = f"key template {template!r}: {separator[0]!r} cannot separate {fields[index]} from {fields[index + 1]}, write {fields[index]}:{fields[index + 1]}"
            raise KeyTemplateError(msg)
    return separators


def _text(template: str, field: _Field, arguments: Arguments, escaped: frozenset[str]) -> _Text:
    """The function that gives one field's text, once the field is found to be sound."""
    if field.path in ("name", "md5"):
        if field.conversion or field.spec:
            msg = f"key template {template!r}: {field} takes no conversion and no format, write {{{field.path}}}"
            raise KeyTemplateError(msg)
        return _name_text(escaped) if field.path == "name" else _all_text(arguments)
    path = _parameter_path(template, field, arguments)
    if "{" in field.spec:
        msg = f"key template {template!r}: {field} has a field inside its format, write the format out"
        raise KeyTemplateError(msg)
    if field.conversion not in (None, "r", "s", "a"):
        msg = f"key template {template!r}: {field} has an unknown conversion, write !r, !s or !a"
        raise KeyTemplateError(msg)
    get = _getter(path, field, arguments)
    if field.spec == "md5":
        return _digest_text(path, field, get)
    return _plain_text(path, field, get, escaped)


def _name_text(escaped: frozenset[str]) -> _Text:
    spell = functools.cache(lambda name: shorten(escape(name, escaped)))
    return lambda name, _args, _kwargs: spell(name)


def _all_text(arguments: Arguments) -> _Text:
    def text(_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        values = arguments.values(args, kwargs)
        try:
            return digest(values)
        except UnknownType:
            raise _unkeyable(*_culprit(arguments.names, values)) from None

    return text


def _culprit(names: list[str], values: list[Any]) -> tuple[str, type]:
    """The first parameter whose value has no canonical spelling, and the type that is to blame."""
    for name, value in zip(names, values, strict=True):
        try:
            digest(value)
        except UnknownType as error:
            return name, error.kind
    return names[0], list  # nested so deeply that only all of them together are too deep


def _unkeyable(name: str, kind: type) -> UnkeyableArgument:
    return UnkeyableArgument(
        f"no stable key can be made from the parameter {name!r}, which is or holds a {kind.__module__}.{kind.__qualname__}: "
        f"pick what identifies it, such as {{{name}.id}}, leave it out of the key template, or use key=callable"
    )


def _digest_text(path: _Path, field: _Field, get: Get) -> _Text:
    def text(_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        value = get(args, kwargs)
        try:
            return digest(_converted(value, field.conversion, path) if field.conversion else value)
        except UnknownType as error:
            raise _unkeyable(path.parameter, error.kind) from None

    return text


def _plain_text(path: _Path, field: _Field, get: Get, escaped: frozenset[str]) -> _Text:
    def text(_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        value = get(args, kwargs)
        if type(value) is not str or field.spec:
            value = _formatted(value, field, path)
        return shorten(escape(value, escaped))

    return text


# One parameter's value


class _Path(NamedTuple):
    parameter: str
    steps: list[tuple[str, str]]


def _parameter_path(template: str, field: _Field, arguments: Arguments) -> _Path:
    matched = _PATH.match(field.path)
    if not matched:
        msg = f"key template {template!r}: {field} names no parameter, write one of {_choices(arguments)}"
        raise KeyTemplateError(msg)
    first, steps = matched["first"], [(step["attribute"] or "", step["item"] or "") for step in _STEP.finditer(matched["rest"])]
    if any(word.startswith("_") for word in (first, *(word for step in steps for word in step))):
        msg = f"key template {template!r}: {field} has a name that begins with an underscore, use a public one or key=callable"
        raise KeyTemplateError(msg)
    if first in ("name", "md5"):
        msg = f"key template {template!r}: {{{first}}} is only_one's own, a parameter called {first} cannot be a field: rename it, or use key=callable"
        raise KeyTemplateError(msg)
    if first not in arguments.names:
        msg = f"key template {template!r}: {first!r} is not a parameter, write one of {_choices(arguments, first)}"
        raise KeyTemplateError(msg)
    return _Path(first, steps)


def _choices(arguments: Arguments, missing: str = "name") -> str:
    """The fields that could be meant, to say in an error."""
    fields = ["name", "md5"]
    for name in arguments.names:
        gathers_names = arguments.call.parameters[name].kind is Parameter.VAR_KEYWORD
        fields.append(f"{name}[{missing}]" if gathers_names else name)
    return ", ".join(f"{{{field}}}" for field in fields)


def _getter(path: _Path, field: _Field, arguments: Arguments) -> Get:
    get = arguments.getter(path.parameter)
    if not path.steps:
        return get

    def follow(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = get(args, kwargs)
        for attribute, item in path.steps:
            try:
                value = getattr(value, attribute) if attribute else _item(value, item)
            except (AttributeError, LookupError, TypeError) as error:
                msg = f"{field} of the key template cannot be read from the parameter {path.parameter!r} ({type(error).__name__}: {error}): pass a value that has it, or use key=callable"
                raise UnkeyableArgument(msg) from error
        return value

    return follow


def _item(value: Any, item: str) -> Any:
    """`value[item]`; a number may have become a str on its way through the broker, as a dict's key."""
    if not item.isdecimal():
        return value[item]
    if isinstance(value, Mapping) and item in value:
        return value[item]
    return value[int(item)]


_CONVERSIONS: dict[str, Callable[[object], str]] = {"r": repr, "s": str, "a": ascii}
_CONTAINERS = (list, tuple, dict, set, frozenset)


def _converted(value: Any, conversion: str, path: _Path) -> str:
    value = plain(value)
    _refuse_container(value, path)
    return _refuse_address(_CONVERSIONS[conversion](value), value, path)


def _formatted(value: Any, field: _Field, path: _Path) -> str:
    if field.conversion:
        value = _converted(value, field.conversion, path)
    value = plain(value)
    _refuse_container(value, path)
    if isinstance(value, bytes):
        value = repr(value)
    try:
        text = format(value, field.spec)
    except (TypeError, ValueError) as error:
        msg = f"{field} of the key template cannot format the parameter {path.parameter!r}, a {type(value).__qualname__} ({error}): change the format, or use key=callable"
        raise UnkeyableArgument(msg) from error
    return _refuse_address(text, value, path)


def _refuse_container(value: object, path: _Path) -> None:
    """The text of a container differs for equal ones: a set's order by process, a tuple's brackets by the broker."""
    if isinstance(value, _CONTAINERS) or (is_dataclass(value) and type(value).__str__ is object.__str__):
        msg = f"the parameter {path.parameter!r} is a {type(value).__qualname__}, which has no stable text: write {{{path.parameter}:md5}}"
        raise UnkeyableArgument(msg)


def _refuse_address(text: str, value: object, path: _Path) -> str:
    if not isinstance(value, str) and _ADDRESS.search(text):
        raise _unkeyable(path.parameter, type(value))
    return text
