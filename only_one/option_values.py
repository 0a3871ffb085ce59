"""Checks of an option's value: seconds, bool, prefix, callable. ``settings`` says which option has which check."""

import functools
import inspect
import re
from datetime import timedelta
from typing import Any, Union

from .errors import ConfigurationError
from .signatures import signature

Seconds = Union[float, timedelta]

LONGEST = 10 * 365 * 24 * 3600.0
"""Seconds, the longest time for which a key may be kept."""


def seconds(name: str, value: object, instead: str, *, or_zero: bool = False) -> float:
    """The value of a time option, in seconds.

    Args:
        name: the option's name, for the error message.
        value: seconds, or a timedelta.
        instead: the advice for "no limit", for the error message.
        or_zero: whether 0 is allowed.

    Returns:
        Seconds, at least 0.001 (or 0, with ``or_zero``) and at most ten years.

    Raises:
        ConfigurationError: for any other value.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    is_zero = or_zero and value == 0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name}={value!r}: write seconds, such as {name}=300, or a timedelta, such as timedelta(minutes=5)"
    elif value > LONGEST:
        msg = f"{name} is longer than ten years: write at most ten years, in seconds; {instead}"
    elif value >= 0.001 or is_zero:  # noqa: PLR2004 - Redis counts in milliseconds
        return float(value)
    else:  # NaN, too
        msg = f"{name}={value!r}: write at least 0.001 seconds; {instead}"
    raise ConfigurationError(msg)


def seconds_or_none(name: str, value: object, instead: str) -> float | None:
    """Like ``seconds``, but None is allowed, and says that there is no such time."""
    return None if value is None else seconds(name, value, instead)


def check_bool(name: str, value: object) -> bool:
    """Return the value if it is a bool.

    Raises:
        ConfigurationError: for any other value.
    """
    if not isinstance(value, bool):
        msg = f"{name}={value!r}: write {name}=True or {name}=False"
        raise ConfigurationError(msg)
    return value


def check_prefix(name: str, value: object) -> str:
    """Return the value if it is a str without braces, which would move some keys to another slot of a cluster.

    Surrogates are refused, too, because no client could send them.

    Raises:
        ConfigurationError: for any other value.
    """
    if not isinstance(value, str) or re.search("[{}\ud800-\udfff]", value):
        msg = f"{name}={value!r}: write a str of UTF-8 without braces, such as {name}='myapp:only_one:'"
        raise ConfigurationError(msg)
    return value


def check_work_id(name: str, value: Any) -> Any:
    """Return the value if it is a callable, and not async.

    Raises:
        ConfigurationError: for any other value.
    """
    if not callable(value) or is_async(value):
        msg = f"{name}={value!r}: write a callable of the call's arguments, such as {name}=lambda job: job.id"
        raise ConfigurationError(msg)
    return value


def is_async(function: Any) -> bool:
    """Whether a callable is an async function, an object whose class has an async ``__call__``, or a partial of one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_callable(name: str, function: Any, arguments: int, instead: str) -> None:
    """Refuse an async callable, and one that cannot be called with so many arguments.

    Args:
        name: the option's name, for the error message.
        function: the callable.
        arguments: the number of arguments in each call.
        instead: the advice, for the error message.

    Raises:
        ConfigurationError: for such a function; the message says what to write instead.
    """
    if is_async(function):
        msg = f"{name}={function!r} is async, and nobody would await it: {instead}"
        raise ConfigurationError(msg)
    try:
        signature(function).bind(*[None] * arguments)
    except TypeError as error:
        msg = f"{name}={function!r} is called with {arguments} argument(s), and cannot be ({error}): {instead}"
        raise ConfigurationError(msg) from None
    except ValueError:
        pass  # a builtin may have no signature
