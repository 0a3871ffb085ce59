"""What users give us to call, looked at before it is needed."""

from __future__ import annotations

import inspect
from typing import Any

from .errors import ConfigurationError


def check_callable(name: str, function: Any, arguments: int, instead: str) -> None:
    """Refuse an async function, and one that does not take so many arguments.

    Args:
        name: what it was given as, to say in an error.
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
