"""What a call gives when its key is busy or its server down: plain callables from the error to the result."""

from __future__ import annotations

from typing import NoReturn

from .errors import ConfigurationError, OnlyOneError
from .times import Seconds, seconds


class CarryOn(Exception):
    """Raised by `carry_on`, for the run that called it."""


class PutBack(Exception):
    """Raised by `retry` and `buffer_one`, for the run of a task that called them.

    Attributes:
        error: what is raised where there is no task that could be put back.
        countdown: seconds until it is delivered again, or None for a delay that grows.
        max_retries: how often at the most, or None for no limit.
        only_newest: of all that wait for the key, only the newest is to.
    """

    def __init__(
        self,
        error: OnlyOneError,
        countdown: float | None = None,
        max_retries: int | None = None,
        *,
        only_newest: bool = False,
    ) -> None:
        self.error = error
        self.countdown = countdown
        self.max_retries = max_retries
        self.only_newest = only_newest


class Retry:
    """What `retry` gives: see there."""

    def __init__(self, countdown: float | None, max_retries: int | None) -> None:
        self.countdown = countdown
        self.max_retries = max_retries

    def __repr__(self) -> str:
        return f"retry(countdown={self.countdown!r}, max_retries={self.max_retries!r})"

    def __call__(self, error: OnlyOneError) -> NoReturn:
        """Have the task put back."""
        raise PutBack(error, self.countdown, self.max_retries)


class BufferOne:
    """What `buffer_one` gives: see there."""

    def __init__(self, countdown: float | None) -> None:
        self.countdown = countdown

    def __repr__(self) -> str:
        return f"buffer_one(countdown={self.countdown!r})"

    def __call__(self, error: OnlyOneError) -> NoReturn:
        """Have the task put back, in the place of older ones that wait."""
        raise PutBack(error, self.countdown, only_newest=True)


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


def retry(countdown: Seconds | None = None, max_retries: int | None = None) -> Retry:
    """A policy that puts the Celery task back into its queue, under the same id, until it can run.

    Args:
        countdown: seconds or timedelta until it is delivered again. By default a second, doubling to ten, with jitter.
        max_retries: how often it is put back at the most; then the call raises. By default there is no limit.

    Returns:
        The policy. Outside of a worker, and in eager mode, it raises the error.

    Raises:
        ConfigurationError: for a time or a number that could not work.
    """
    if max_retries is not None and (type(max_retries) is not int or max_retries < 0):
        msg = f"retry(max_retries={max_retries!r}): write a number such as 10, or leave it out for no limit"
        raise ConfigurationError(msg)
    return Retry(_countdown("retry", countdown), max_retries)


def buffer_one(countdown: Seconds | None = None) -> BufferOne:
    """A policy by which of all that wait for a key only the newest task stays: one running, one pending.

    The newest trigger always runs, and no older one after it; one that is dropped gives None.

    Args:
        countdown: seconds or timedelta until the pending one is delivered again, as for `retry`.

    Returns:
        The policy. Outside of a worker, and in eager mode, it raises the error.

    Raises:
        ConfigurationError: for a time that could not work.
    """
    return BufferOne(_countdown("buffer_one", countdown))


def _countdown(policy: str, countdown: object) -> float | None:
    if countdown is None:
        return None
    if isinstance(countdown, OnlyOneError):
        msg = f"{policy} was called with {countdown!r}: write {policy}(), with parentheses"
        raise ConfigurationError(msg)
    return seconds("countdown", countdown, "for a delay that grows leave it out")
