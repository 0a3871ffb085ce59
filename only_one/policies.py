"""The policies of `when_busy`, `when_lost` and `when_down`: plain callables from the error to the call's result."""

from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import ConfigurationError, OnlyOneError
from .option_values import Seconds, check_callable, seconds_or_none


class CarryOn(Exception):
    """Raised by `carry_on`, for the run that called it."""


@dataclass(eq=False)
class RequeueRequest(Exception):
    """Raised by `retry` and `buffer_one`, for the run of a task that called them.

    Attributes:
        error: what is raised where there is no task that could be put back.
        countdown: seconds until it is delivered again, or None for a delay that grows.
        max_retries: how often at the most, or None for no limit.
        only_newest: of all that wait for the key, only the newest must stay.
    """

    error: OnlyOneError
    countdown: float | None = None
    max_retries: int | None = None
    only_newest: bool = False


@dataclass(frozen=True)
class Retry:
    """The policy that `retry` makes."""

    countdown: float | None
    max_retries: int | None

    def __repr__(self) -> str:
        return f"retry(countdown={self.countdown!r}, max_retries={self.max_retries!r})"

    def __call__(self, error: OnlyOneError) -> NoReturn:
        """Have the task put back."""
        raise RequeueRequest(error, self.countdown, self.max_retries)


@dataclass(frozen=True)
class BufferOne:
    """The policy that `buffer_one` makes."""

    countdown: float | None

    def __repr__(self) -> str:
        return f"buffer_one(countdown={self.countdown!r})"

    def __call__(self, error: OnlyOneError) -> NoReturn:
        """Have the task put back, in the place of older ones that wait."""
        raise RequeueRequest(error, self.countdown, only_newest=True)


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
    if isinstance(countdown, OnlyOneError):
        msg = f"{policy} was called with {countdown!r}: write {policy}(), with parentheses"
        raise ConfigurationError(msg)
    return seconds_or_none("countdown", countdown, "for a delay that grows leave it out")


_UNFIT: list[tuple[str, object, str]] = [
    ("when_busy", carry_on, "would run two at a time: write when_busy=skip or when_busy=fail"),
    ("when_lost", skip, "comes when the run has begun: write when_lost=carry_on to let it go on, or when_lost=fail"),
    ("when_lost", Retry, "is too late to wait: write when_lost=fail, and the task may retry by itself"),
    ("when_lost", BufferOne, "is too late to wait: write when_lost=fail, and the task may retry by itself"),
    ("when_down", BufferOne, "needs the server to say which task is the newest: write when_down=retry()"),
]
"""By option the policies that make no sense there, a function or a whole class, with what to write instead."""


def check_policy(name: str, policy: Any) -> Any:
    """A policy that makes sense for the option `name`.

    Raises:
        ConfigurationError: for one that does not, or that cannot be called with one error.
    """
    instead = "write skip, fail, or any callable that takes the error and returns the result"
    if not callable(policy):
        msg = f"{name}={policy!r}: {instead}"
        raise ConfigurationError(msg)
    if policy is retry or policy is buffer_one:
        msg = f"{name}={policy.__name__}: write {name}={policy.__name__}(), with parentheses"
        raise ConfigurationError(msg)
    for option, unfit, why in _UNFIT:
        if name == option and (policy is unfit or type(policy) is unfit):
            msg = f"{name}={getattr(policy, '__name__', repr(policy))} {why}"
            raise ConfigurationError(msg)
    check_callable(name, policy, 1, instead)
    return policy
