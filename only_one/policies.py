"""What a call gives when its key is busy or its server down: plain callables from the error to the result."""

from __future__ import annotations

from typing import NoReturn

from .errors import OnlyOneError


class CarryOn(Exception):
    """Raised by `carry_on`, for the run that called it."""


def skip(_error: OnlyOneError) -> None:
    """Give None in place of a result."""


def fail(error: OnlyOneError) -> NoReturn:
    """Raise the error.

    Raises:
        OnlyOneError: the one that is given.
    """
    raise error


def carry_on(_error: OnlyOneError) -> NoReturn:
    """Let the run begin without the key.

    Raises:
        CarryOn: to the run, which catches it.
    """
    raise CarryOn
