"""A call to its key. Nothing here knows of Redis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import Signature, iscoroutinefunction, signature
from string import Formatter
from typing import Any

from .arguments import Arguments
from .errors import KeyTemplateError, UnkeyableArgument
from .escaping import ALWAYS, escape, shorten
from .fields import Field, Text, text_of

MakeKey = Callable[[str, tuple[Any, ...], Mapping[str, Any]], str]
"""The name of the task or function, and the call's positional and keyword arguments, to the key."""


def compile_key(key: object, call: Signature) -> MakeKey:
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


def has_field(key: object, name: str) -> bool:
    """Whether a key template uses `{name}`, or another field."""
    return isinstance(key, str) and any(field == name for _, field, _, _ in _parse(key))


# Callables


def _computed(key: Callable[..., Any], arguments: Arguments) -> MakeKey:
    if iscoroutinefunction(key):
        msg = "key= is an async function: write a plain one, the key is made before anything is awaited"
        raise KeyTemplateError(msg)
    called = getattr(key, "__qualname__", repr(key))
    by_name = _check_parameters(key, called, arguments)

    def make(_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        bound = arguments.bind(args, kwargs)
        made = key(**bound.arguments) if by_name else key(*bound.args, **bound.kwargs)
        if not isinstance(made, str) or not made:
            msg = f"key={called} returned {made!r}: return a str that is not empty"
            raise UnkeyableArgument(msg)
        return shorten(escape(made))

    return make


def _check_parameters(key: Callable[..., Any], called: str, arguments: Arguments) -> bool:
    """Whether the callable has the function's own parameters, and is called by name; else it is by position."""
    try:
        accepted = signature(key)
    except (TypeError, ValueError):
        return False  # builtins such as str.join have none to check
    example = arguments.example()
    by_name = not arguments.gathers and set(arguments.names) == set(accepted.parameters)
    try:
        if by_name:
            accepted.bind(**example.arguments)
        else:
            accepted.bind(*example.args, **example.kwargs)
    except TypeError as error:
        msg = (
            f"key={called} takes {accepted} ({error}): write it with all parameters of the function, {arguments.call}, "
            "as it is called with all of them"
        )
        raise KeyTemplateError(msg) from None
    return by_name


# Templates


def _parse(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(Formatter().parse(template))
    except ValueError as error:
        msg = f"key template {template!r}: {error}; a literal brace is written {{{{ or }}}}"
        raise KeyTemplateError(msg) from None


def _split(template: str) -> tuple[list[str], list[Field]]:
    """The literals, one more than there are fields, and the fields between them."""
    if not template:
        msg = "the key template is empty: write a name for the lock, such as 'nightly-report', or '{name}:{md5}'"
        raise KeyTemplateError(msg)
    literals, fields = [""], []
    for literal, path, spec, conversion in _parse(template):
        literals[-1] += literal
        if path is not None:
            fields.append(Field(template, path, conversion, spec or ""))
            literals.append("")
    return literals, fields


def _template(template: str, arguments: Arguments) -> MakeKey:
    literals, fields = _split(template)
    escaped = ALWAYS.union(_check_separator(*pair) for pair in zip(fields, literals[1:], fields[1:], strict=False))
    spelt = [literal.replace("{", "%7B").replace("}", "%7D") for literal in literals]
    texts = [text_of(field, arguments, escaped) for field in fields]
    if fields and fields[0].path == "name":
        return _joined(_head(spelt[0], texts[0], spelt[1]), texts[1:], spelt[2:])
    return _joined(lambda _name: spelt[0], texts, spelt[1:])


def _head(before: str, name_text: Text, after: str) -> Callable[[str], str]:
    """The name with what stands around it: most of a key, and spelt once."""
    return functools.cache(lambda name: before + name_text(name, (), {}) + after)


def _joined(head: Callable[[str], str], texts: list[Text], literals: list[str]) -> MakeKey:
    if not texts:
        return lambda name, _args, _kwargs: head(name)
    if len(texts) == 1:
        (text,), (tail,) = texts, literals
        return lambda name, args, kwargs: head(name) + text(name, args, kwargs) + tail
    pairs = list(zip(texts, literals, strict=True))
    return lambda name, args, kwargs: (
        head(name) + "".join([text(name, args, kwargs) + literal for text, literal in pairs])
    )


def _check_separator(left: Field, separator: str, right: Field) -> str:
    """The character that ends the left one of two fields, and so must not stand in a value."""
    if not separator:
        problem = f"nothing stands between {left} and {right}"
    elif separator[0] in ALWAYS:
        problem = f"{separator[0]!r} cannot separate {left} from {right}"
    else:
        return separator[0]
    msg = f"key template {left.template!r}: {problem}, write {left}:{right}"
    raise KeyTemplateError(msg)
