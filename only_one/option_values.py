"""Checks of an option's value: seconds, callable, bool, prefix. Which option has which check is in `settings`."""

import inspect
from datetime import timedelta
from typing import Any, Union

from .errors import ConfigurationError

Seconds = Union[float, timedelta]


def seconds(name: str, value: object, instead: str, *, or_zero: bool = False) -> float:
    """A time in seconds.

    Args:
        name: what the option is called, to say in an error.
        value: seconds, or a timedelta.
        instead: what to write for "no limit", to say in an error.
        or_zero: whether 0 is a time, too.

    Returns:
        Seconds, at least a thousandth and at most ten years.

    Raises:
        ConfigurationError: for anything else.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name}={value!r}: write seconds, such as {name}=300, or a timedelta, such as timedelta(minutes=5)"
    elif value > 10 * 365 * 24 * 3600:
        msg = f"{name} is longer than ten years: write at most ten years, in seconds; {instead}"
    elif value >= 0.001 or (or_zero and value == 0):  # noqa: PLR2004 - Redis counts in milliseconds
        return float(value)
    else:  # NaN, too
        msg = f"{name}={value!r}: write at least 0.001 seconds; {instead}"
    raise ConfigurationError(msg)


def seconds_or_none(name: str, value: object, instead: str) -> float | None:
    """The same, where None is a value that says that there is no such time."""
    return None if value is None else seconds(name, value, instead)


def check_bool(name: str, value: object) -> bool:
    """A bool.

    Raises:
        ConfigurationError: for anything else.
    """
    if not isinstance(value, bool):
        msg = f"{name}={value!r}: write {name}=True or {name}=False"
        raise ConfigurationError(msg)
    return value


def check_prefix(name: str, value: object) -> str:
    """A str without braces, which would move some keys of a cluster to other slots than those beside them.

    Raises:
        ConfigurationError: for anything else.
    """
    if not isinstance(value, str) or "{" in value or "}" in value:
        msg = f"{name}={value!r}: write a str without braces, such as {name}='myapp:only_one:'"
        raise ConfigurationError(msg)
    return value


def check_callable(name: str, function: Any, arguments: int, instead: str) -> None:
    """Refuse an async function, and one that does not take so many arguments.

    Args:
        name: what the option is called, to say in an error.
        function: the callable.
        arguments: how many arguments it will be called with.
        instead: what to write instead, to say in an error.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    if inspect.iscoroutinefunction(function):
        msg = f"{name}={function!r} is an async function, which nobody would await: {instead}"
        raise ConfigurationError(msg)
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        msg = f"{name}={function!r} is called with {arguments} argument(s), and cannot be ({error}): {instead}"
        raise ConfigurationError(msg) from None
    except ValueError:
        pass  # builtins have no signature to look at
