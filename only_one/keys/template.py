"""Key templates such as ``{name}:{md5}``, and ``key=callable``: compiled once into a function that makes the key.

A text in a key is escaped, and shortened if it is overlong.
"""

import functools
import re
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from string import Formatter
from typing import Any

from only_one.errors import KeyTemplateError, UnkeyableArgument
from only_one.option_values import is_async
from only_one.signatures import signature

from .digest import digest, utf8
from .fields import Args, Arguments, Field, Kwargs, compile_field, field_problem

MakeKey = Callable[[str, Args, Kwargs], str]
"""A function that makes the key of a call: it takes the name of the task or function, and the call's arguments."""

RESERVED = frozenset("{}%")
"""The characters that are escaped in every value: braces would move keys to another slot of a cluster."""

_LONGEST_VALUE = 200
"""The most characters of an escaped text. A longer one is cut to its first 40 characters and its MD5."""


def compile_key(key: object, call: Signature) -> MakeKey:
    """Prepare the key of a function's calls, once, when the function is decorated.

    Args:
        key: a template, such as ``"{name}:{feed_url:md5}"``, or a callable that takes the arguments of the call.
        call: the function's signature; for the calls of a bound task, without the task itself.

    Returns:
        A function that makes the key of one call.

    Raises:
        KeyTemplateError: for a template, or a callable, that cannot work.
    """
    if isinstance(key, str):
        return _template(key, Arguments(call))
    if callable(key):
        return _computed(key, call)
    msg = f"key is {key!r}: write a template such as '{{name}}:{{md5}}', or key=callable of the call's arguments"
    raise KeyTemplateError(msg)


def has_field(key: object, name: str) -> bool:
    """Whether a key template has the field ``name``, such as ``{md5}``. One with a format is refused."""
    return isinstance(key, str) and f"{{{name}}}" in map(str, _split(key)[1])


def check_name(key: object, call: Signature) -> None:
    """Refuse ``{name}`` where it may be meant as a parameter of that name, and no field has the parameter's value.

    Raises:
        KeyTemplateError: for such a template, by which calls with different values would share their key.
    """
    has_name_alone = has_field(key, "name") and not has_field(key, "md5")
    if has_name_alone and "name" in call.parameters:
        problem = "{name} is the function's own name, and not its parameter that is called so"
        instead = "rename the parameter or write key=callable, or write the function's name out if that is meant"
        msg = f"key template {key!r}: {problem}: {instead}"
        raise KeyTemplateError(msg)


def _computed(key: Callable[..., Any], call: Signature) -> MakeKey:
    """The function that makes the key by calling the user's ``key``."""
    if is_async(key):
        msg = "key= is async: write a plain one, the key is made before anything is awaited"
        raise KeyTemplateError(msg)
    compute, escape = compile_call("key", key, call), escaper()

    def make(_name: str, args: Args, kwargs: Kwargs) -> str:
        computed = compute(args, kwargs)
        if not isinstance(computed, str) or not computed:
            msg = f"key={_label(key)} returned {computed!r}: return a str that is not empty"
            raise UnkeyableArgument(msg)
        return escape(computed)

    return make


def compile_call(option: str, function: Callable[..., Any], call: Signature) -> Callable[[Args, Kwargs], Any]:
    """Prepare to call an option's ``function`` with the arguments of a call, positional and keyword, defaults applied.

    Raises:
        KeyTemplateError: if it does not accept all arguments of a call.
    """
    arguments = Arguments(call)
    by_name = _check_parameters(f"{option}={_label(function)}", function, arguments)

    def compute(args: Args, kwargs: Kwargs) -> Any:
        bound = arguments.bind(args, kwargs)
        return function(**bound.arguments) if by_name else function(*bound.args, **bound.kwargs)

    return compute


def _label(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _check_parameters(label: str, key: Callable[..., Any], arguments: Arguments) -> bool:
    """Whether the callable has the function's own parameters and is called by name; else it is called by position.

    Raises:
        KeyTemplateError: if the callable does not accept all arguments of a call.
    """
    try:
        accepted = signature(key)
    except (TypeError, ValueError):
        return False  # a builtin such as str.join has no signature
    example = arguments.example()
    by_name = example.arguments.keys() == arguments.signature.parameters.keys() == accepted.parameters.keys()
    by_name &= all(each.kind is not Parameter.POSITIONAL_ONLY for each in accepted.parameters.values())
    args, kwargs = ((), example.arguments) if by_name else (example.args, example.kwargs)
    try:
        accepted.bind(*args, **kwargs)
    except TypeError as error:
        instead = f"write all parameters of the function, {arguments.signature}"
        msg = f"{label} takes {accepted} ({error}): {instead}; a bound task's first must be called self"
        raise KeyTemplateError(msg) from None
    return by_name


def _split(template: str) -> tuple[list[str], list[Field]]:
    """The literals and the fields of a template: a literal, maybe an empty one, stands before and after each field."""
    if not template:
        msg = "the key template is empty: write a name for the lock, such as 'nightly-report', or '{name}:{md5}'"
        raise KeyTemplateError(msg)
    literals, fields = [""], []
    try:
        for literal, path, spec, conversion in Formatter().parse(template):
            literals[-1] += literal
            if path is not None:
                fields.append(Field(path, f"!{conversion}" if conversion else "", f":{spec}" if spec else ""))
                literals.append("")
    except ValueError as error:
        msg = f"key template {template!r}: {error}; a literal brace is written {{{{ or }}}}"
        raise KeyTemplateError(msg) from None
    return literals, fields


def _template(template: str, arguments: Arguments) -> MakeKey:
    """The function that makes the key of a template."""
    literals, fields = _split(template)
    between = literals[1 : len(fields)]
    problems = [*map(_separator_problem, fields, between, fields[1:])]
    problems += [field_problem(field, arguments) for field in fields]
    for problem in filter(None, problems):
        msg = f"key template {template!r}: {problem}"
        raise KeyTemplateError(msg)
    escape = escaper(separator[0] for separator in between)
    start, *tails = [re.sub("[{}\ud800-\udfff]", percent_encoded, literal) for literal in literals]
    if not fields:
        return lambda _name, _args, _kwargs: start
    parts = [(compile_field(field, arguments, escape), tail) for field, tail in zip(fields, tails, strict=True)]
    named = [parts.pop(0)] if fields[0].path == "name" else []
    # The beginning of a key, up to the first field that is not `{name}`, is made once for each name.
    head = functools.cache(lambda name: start + "".join([text(name, (), {}) + after for text, after in named]))
    if len(parts) == 1:
        ((text, tail),) = parts
        return lambda name, args, kwargs: head(name) + text(name, args, kwargs) + tail
    return lambda name, args, kwargs: head(name) + "".join([text(name, args, kwargs) + after for text, after in parts])


def _separator_problem(left: Field, separator: str, right: Field) -> str | None:
    """What is wrong with the literal between two fields; None for one that can work.

    The first character of the literal is escaped in the values, so that it ends them.
    """
    if not separator:
        return f"nothing stands between {left} and {right}, write {left}:{right}"
    if separator[0] in RESERVED:
        return f"{separator[0]!r} cannot separate {left} from {right}, write {left}:{right}"
    return None


def escaper(separators: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that percent-encodes reserved characters in a value, as in a URL, and shortens an overlong text.

    Surrogates are encoded too, because no client can send them.
    A shortened text has ``%~``, which no other escaped text has, so it differs from all others.

    Args:
        separators: the characters that end a value.
    """
    special = re.compile(f"[{re.escape(''.join(RESERVED.union(separators)))}\ud800-\udfff]")

    def escape(text: str) -> str:
        text = special.sub(percent_encoded, text) if special.search(text) else text
        return text if len(text) <= _LONGEST_VALUE else f"{text[:40]}%~{digest(text)}"

    return escape


def percent_encoded(match: re.Match[str]) -> str:
    """The matched text, percent-encoded as in a URL."""
    return "".join(f"%{byte:02X}" for byte in utf8(match[0]))
