"""Checks of one value: seconds, callable, bool, prefix. Which option has which check is in `settings.CHECKS`."""

from __future__ import annotations

import inspect
import math
from datetime import timedelta
from typing import Any, Union

from .errors import ConfigurationError

Seconds = Union[float, timedelta]

_LONGEST = 10 * 365 * 24 * 3600


def seconds(name: str, value: object, instead: str) -> float:
    """A time in seconds.

    Args:
        name: what the option is called, to say in an error.
        value: seconds, or a timedelta.
        instead: what to write for "no limit", to say in an error.

    Returns:
        Seconds, at least a thousandth and at most ten years.

    Raises:
        ConfigurationError: for anything else.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name}={value!r}: write seconds, such as {name}=300, or a timedelta, such as timedelta(minutes=5)"
        raise ConfigurationError(msg)
    if value > _LONGEST:
        msg = f"{name} is longer than ten years: write at most ten years, in seconds; {instead}"
        raise ConfigurationError(msg)
    if math.isnan(value) or value < 0.001:  # noqa: PLR2004 - Redis counts in milliseconds
        msg = f"{name}={value!r}: write at least 0.001 seconds; {instead}"
        raise ConfigurationError(msg)
    return float(value)


def seconds_or_none(name: str, value: object, instead: str) -> float | None:
    """The same, where None is a value that says that there is no such time."""
    return None if value is None else seconds(name, value, instead)


def seconds_or_zero(name: str, value: object, instead: str) -> float:
    """The same, where 0 is a time, too."""
    is_zero = value in (0, timedelta(0)) and not isinstance(value, bool)
    return 0.0 if is_zero else seconds(name, value, instead)


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
