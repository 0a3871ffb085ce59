"""The fields of a key template, such as ``{name}``, ``{md5}`` and ``{user.id}``: checked, read and formatted.

A field has the value of a parameter, however the argument is given: ``f(1)``, ``f(a=1)`` and ``f(1, b=2)`` have the
same key if the default of ``b`` is 2.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import BoundArguments, Parameter, Signature
from pathlib import PurePath
from typing import Any, NamedTuple

from only_one.errors import UnkeyableArgument

from .digest import UnknownType, digest, plain, type_name

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

FieldText = Callable[[str, Args, Kwargs], str]
"""A function that gives a field's text for one call: it takes the name of the task or function, and the arguments."""

BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

_STEP = r"\.([^.\[\]]+)|\[([^\[\]]+)\]"
_OWN = ("name", "md5")
_DIGEST = ":md5"  # the format that is our own
_TEXTUAL = (str, bytes, int, float, type(None), PurePath)
_IDENTITIES = ("id", "pk", "uuid", "key", "name")
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {"": lambda value: value, "!r": repr, "!s": str, "!a": ascii}


class Field(NamedTuple):
    """A field as it is written in a template.

    Attributes:
        path: a parameter, with attributes and items.
        conversion: "!r", "!s", "!a" or none.
        spec: the format of the value, with the colon before it; or none.
    """

    path: str
    conversion: str
    spec: str

    def __str__(self) -> str:
        return f"{{{self.path}{self.conversion}{self.spec}}}"

    @property
    def parameter(self) -> str:
        """The name with which the path begins."""
        return re.split(r"[.\[]", self.path)[0]


class Arguments:
    """Reads the arguments of calls of one signature. It avoids ``Signature.bind`` where it can, because that is slow.

    Attributes:
        signature: that of the calls.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        parameters = list(signature.parameters.values())
        positions = sum(each.kind in BY_POSITION for each in parameters)
        # By the number of arguments that are given by position.
        self._others = [_others(parameters[given:]) for given in range(positions + 1)]

    def example(self) -> BoundArguments:
        """A call with an argument for each parameter but ``*args`` and ``**kwargs``."""
        example, kinds = self.signature.bind_partial(), BY_POSITION + BY_NAME
        example.arguments = {name: None for name, each in self.signature.parameters.items() if each.kind in kinds}
        return example

    def bind(self, args: Args, kwargs: Kwargs) -> BoundArguments:
        """The call with every default applied.

        Raises:
            TypeError: if the function could not be called so.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            msg = f"{error}: the decorated function takes ({', '.join(self.signature.parameters)})"
            raise TypeError(msg) from None
        bound.apply_defaults()
        return bound

    def values(self, args: Args, kwargs: Kwargs) -> list[Any]:
        """Every parameter's value, in the order of the signature.

        Raises:
            TypeError: if the function could not be called so.
        """
        if len(args) < len(self._others):
            names, defaults, required, allowed = self._others[len(args)]
            if required <= kwargs.keys() <= allowed:
                return [*args, *map(kwargs.get, names, defaults)]
        return list(self.bind(args, kwargs).arguments.values())


def _others(parameters: list[Parameter]) -> tuple[list[str], list[Any], frozenset[str], frozenset[str]]:
    """Of parameters that are not given by position: all names, all defaults, the required names, the allowed keywords.

    ``*args`` and ``**kwargs`` count as required and not as allowed, so that every call of such a function is bound.
    """
    required = frozenset(each.name for each in parameters if each.default is Parameter.empty)
    allowed = frozenset(each.name for each in parameters if each.kind in BY_NAME)
    return [each.name for each in parameters], [each.default for each in parameters], required, allowed


def field_problem(field: Field, arguments: Arguments) -> str | None:
    """What is wrong with a field, and what to write instead; None for a field that can work."""
    path, parameter = field.path, field.parameter
    if path in _OWN:
        advice = f"write {{{path}}}, or rename a parameter that is called so"
        return None if field == (path, "", "") else f"{field} takes no conversion and no format, {advice}"
    if not re.fullmatch(rf"[^.\[\]]+({_STEP})*", path):
        return f"{field} names no parameter, write one of {_choices(arguments)}"
    names = [parameter, *(name for step in re.findall(_STEP, path) for name in step)]
    if any(name.startswith("_") for name in names):
        return f"{field} has a name that begins with an underscore, write a public one or key=callable"
    if parameter in _OWN:
        return f"{{{parameter}}} is no parameter but only_one's own: rename the parameter, or write key=callable"
    if parameter not in arguments.signature.parameters:
        return f"{parameter!r} is not a parameter, write one of {_choices(arguments, parameter)}"
    if "{" in field.spec:
        return f"{field} has a field inside its format, write the format out"
    if field.conversion not in _CONVERSIONS:
        return f"{field} has an unknown conversion, write !r, !s or !a"
    return None


def _choices(arguments: Arguments, missing: str = "name") -> str:
    """The fields that could be meant, for an error message."""
    parameters = arguments.signature.parameters.values()
    names = [f"{each.name}[{missing}]" if each.kind is Parameter.VAR_KEYWORD else each.name for each in parameters]
    return ", ".join(f"{{{name}}}" for name in (*_OWN, *names))


def compile_field(field: Field, arguments: Arguments, escape: Callable[[str], str]) -> FieldText:
    """Prepare a field in which ``field_problem`` sees no problem: the function that gives its text."""
    if field.path == "name":
        return lambda name, _args, _kwargs: escape(name)
    if field.path == "md5":
        return _text_of_all(arguments)
    serialize, steps = _serializer(field, escape), re.findall(_STEP, field.path)
    to_text: Callable[[Any], str] = (lambda value: serialize(_follow(field, steps, value))) if steps else serialize
    name, parameters, missing = field.parameter, arguments.signature.parameters, Parameter.empty
    kind, default = parameters[name].kind, parameters[name].default
    by_position, by_name, position = kind in BY_POSITION, kind in BY_NAME, list(parameters).index(name)

    def text(_name: str, args: Args, kwargs: Kwargs) -> str:
        if by_position and position < len(args):
            value = args[position]
        else:
            value = kwargs.get(name, default) if by_name else default
        if value is missing:  # for `*args` and `**kwargs`, too, which have no default
            value = arguments.bind(args, kwargs).arguments[name]
        try:
            return to_text(value)
        except UnknownType as error:
            raise _no_digest(name, error, _identity(field.path, _follow(field, steps, value))) from None

    return text


def _text_of_all(arguments: Arguments) -> FieldText:
    """The function that gives the text of ``{md5}``."""

    def text(_name: str, args: Args, kwargs: Kwargs) -> str:
        values = arguments.values(args, kwargs)
        try:
            return digest(values)
        except UnknownType as error:
            culprit, value = "", None
            # Each value is digested in a list, because all values were: so one that was nested too deeply raises again.
            with suppress(UnknownType):
                for culprit, value in zip(arguments.signature.parameters, values, strict=True):
                    digest([culprit, value])
            raise _no_digest(culprit, error, _identity(culprit, value)) from None

    return text


def _no_digest(name: str, unknown: UnknownType, identity: str) -> UnkeyableArgument:
    problem = f"no stable key can be made from the parameter {name!r}, which is or holds a {unknown}"
    return _unkeyable(problem, f"write {identity}key=callable, or leave it out of the key")


def _identity(path: str, value: object) -> str:
    """The advice to write what identifies a value; empty if the value has nothing by which it is usually identified."""
    # Statically, because a property is the user's code, and may ask a database; a method identifies nothing.
    names = [name for name in _IDENTITIES if not callable(inspect.getattr_static(value, name, print))]
    return f"what identifies it, such as {{{path}.{names[0]}}}, or " if names else ""


def _unkeyable(problem: str, instead: str) -> UnkeyableArgument:
    return UnkeyableArgument(f"{problem}: {instead}")


def _serializer(field: Field, escape: Callable[[str], str]) -> Callable[[Any], str]:
    """The function that makes text of the value at the field's path."""
    if field.spec == _DIGEST:
        return (lambda value: digest(_formatted(field, "", value))) if field.conversion else digest
    if field.spec or field.conversion:
        spec = field.spec[1:]
        return lambda value: escape(_formatted(field, spec, value))
    return lambda value: escape(value if type(value) is str else _formatted(field, "", value))


def _follow(field: Field, steps: list[tuple[str, str]], value: Any) -> Any:
    """The attribute or item at the field's path, from the value of its parameter."""
    try:
        for attribute, item in steps:
            if attribute:
                value = getattr(value, attribute)
            else:
                is_key = isinstance(value, Mapping) and item in value  # the broker makes each key a str
                value = value[int(item) if item.isdecimal() and not is_key else item]
    except (AttributeError, LookupError, TypeError) as error:
        problem = f"{field} cannot be read from the parameter {field.parameter!r} ({type(error).__name__}: {error})"
        raise _unkeyable(problem, "pass a value that has it, or write key=callable") from error
    return value


def _has_stable_text(value: object) -> bool:
    """Whether equal values have equal texts. A set's order differs by process, and the broker makes a tuple a list."""
    return not isinstance(value, Iterable) and type(value).__str__ is not object.__str__


def _no_text(field: Field, value: object) -> UnkeyableArgument:
    by_digest = ""
    with suppress(UnknownType):
        digest(value)
        by_digest = f"{{{field.path}{_DIGEST}}}, or "
    problem = f"the parameter {field.parameter!r} is a {type_name(value)}, which has no stable text"
    return _unkeyable(problem, f"write {by_digest}{_identity(field.path, value)}key=callable")


def _formatted(field: Field, spec: str, value: object) -> str:
    """The text of a value, by the field's conversion and the format ``spec``."""
    value = plain(value)
    is_textual = isinstance(value, _TEXTUAL)
    if not is_textual and not _has_stable_text(value):
        raise _no_text(field, value)
    if isinstance(value, bytes) and not field.conversion:
        value = repr(value)
    try:
        converted = _CONVERSIONS[field.conversion](value)
        text = format(converted, spec)
    except (TypeError, ValueError, OverflowError) as error:
        kind = str if field.conversion else type(value)
        problem = f"{field} cannot format the parameter {field.parameter!r} of type {kind.__qualname__} ({error})"
        raise _unkeyable(problem, "write another format, or key=callable") from error
    # A text with the address of an object differs by process.
    if not is_textual and re.search(r"0x[0-9a-fA-F]{6,}", converted if field.conversion else text):
        raise UnknownType(type_name(value))
    return text
