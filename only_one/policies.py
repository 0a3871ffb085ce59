"""Policies: the values of ``when_busy``, ``when_lost`` and ``when_down``, callables that get the error as argument."""

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import ConfigurationError, OnlyOneError
from .option_values import Seconds, check_callable, seconds_or_none

_OR_GROWING = "for a delay that grows leave it out"


class CarryOn(Exception):
    """Raised by ``carry_on``; the call that asked the policy catches it."""


@dataclass(frozen=True)
class Retry:
    """The policy that ``retry`` returns.

    Attributes:
        countdown: seconds until the message is delivered again; None for a delay that grows.
        max_retries: the most requeues of the task; None for no limit.
    """

    countdown: float | None
    max_retries: int | None = None

    def __repr__(self) -> str:
        return f"retry(countdown={self.countdown!r}, max_retries={self.max_retries!r})"

    def __call__(self, error: OnlyOneError) -> NoReturn:
        """Ask for a requeue of the task."""
        raise RequeueRequest(error, self)


class BufferOne(Retry):
    """The policy that ``buffer_one`` returns: the task is requeued in the place of older ones that wait."""

    def __repr__(self) -> str:
        return f"buffer_one(countdown={self.countdown!r})"


@dataclass(eq=False)
class RequeueRequest(Exception):
    """Raised by ``retry`` and ``buffer_one``; the call that asked the policy catches it and requeues its task.

    Attributes:
        error: raised if there is no task that can be requeued.
        policy: how to requeue the task.
    """

    error: OnlyOneError
    policy: Retry


def skip(_error: OnlyOneError) -> None:
    """Return None in place of the function's result: a policy for ``when_busy`` and ``when_down``."""


def fail(error: OnlyOneError) -> NoReturn:
    """Raise the error: a policy for ``when_busy``, ``when_down`` and ``when_lost``.

    With ``when_lost=fail`` an async run is cancelled, and the call raises ``LockLost`` in place of
    its result.

    Args:
        error: the error that describes the situation.

    Raises:
        OnlyOneError: that error.
    """
    raise error


def carry_on(_error: OnlyOneError) -> NoReturn:
    """Let the run begin, or go on, without the key: a policy for ``when_down`` and ``when_lost``.

    Raises:
        CarryOn: always; the call catches it.
    """
    raise CarryOn


def retry(countdown: Seconds | None = None, max_retries: int | None = None) -> Retry:
    """Requeue the Celery task, under the same id, until it can run: a policy for ``when_busy`` and ``when_down``.

    Args:
        countdown: seconds or a timedelta until the message is delivered again.
            By default it is one second that doubles to ten, with jitter.
        max_retries: the most requeues; after them the call raises the error. By default there is no
            limit.

    Returns:
        The policy. Outside of a worker, and in eager mode, it raises the error.

    Raises:
        ConfigurationError: for a time or a number that cannot work.
    """
    is_number = type(max_retries) is int and max_retries >= 0
    if max_retries is not None and not is_number:
        msg = f"retry(max_retries={max_retries!r}): write a number such as 10, or leave it out for no limit"
        raise ConfigurationError(msg)
    return Retry(seconds_or_none("countdown", countdown, _OR_GROWING), max_retries)


def buffer_one(countdown: Seconds | None = None) -> BufferOne:
    """One task runs, and only the newest of those that wait stays: a policy for ``when_busy``.

    The newest task runs, and no older task runs after it. A task that is dropped returns None.
    Exception: older tasks run, too, if they have waited for longer than twice the broker's
    visibility timeout, and for 1 h at least, because the order is forgotten then.

    Args:
        countdown: seconds or a timedelta until the waiting task is delivered again, as for
            ``retry``.

    Returns:
        The policy. Outside of a worker, and in eager mode, it raises the error.

    Raises:
        ConfigurationError: for a time that cannot work.
    """
    return BufferOne(seconds_or_none("countdown", countdown, _OR_GROWING))


_UNFIT: list[tuple[str, object, str]] = [
    ("when_busy", carry_on, "would run two at a time: write when_busy=skip or when_busy=fail"),
    ("when_lost", skip, "comes when the run has begun: write when_lost=carry_on to let it go on, or when_lost=fail"),
    ("when_lost", Retry, "is too late to wait: write when_lost=fail, and the task may retry by itself"),
    ("when_down", BufferOne, "needs the server to say which task is the newest: write when_down=retry()"),
]
"""The policies that make no sense for an option: its name, a function or a whole class, and the advice."""


def check_policy(name: str, policy: Any) -> Any:
    """Return the policy if it makes sense for the option ``name``.

    Raises:
        ConfigurationError: for another policy, or for a value that cannot be called with one error.
    """
    first = "carry_on" if name == "when_lost" else "skip"
    instead = f"write {name}={first}, {name}=fail, or any callable that takes the error and returns the result"
    is_error = isinstance(policy, type) and issubclass(policy, BaseException)  # the call would return it
    if is_error or not callable(policy):
        msg = f"{name}={policy!r}: {instead}"
        raise ConfigurationError(msg)
    if policy is retry or policy is buffer_one:
        msg = f"{name}={policy.__name__}: write {name}={policy.__name__}(), with parentheses"
        raise ConfigurationError(msg)
    for option, unfit, why in _UNFIT:
        is_unfit = policy is unfit or (isinstance(unfit, type) and isinstance(policy, unfit))
        if is_unfit and name == option:
            msg = f"{name}={getattr(policy, '__name__', repr(policy))} {why}"
            raise ConfigurationError(msg)
    check_callable(name, policy, 1, instead)
    return policy


def check_result(result: Any) -> Any:
    """Return what a policy has returned, if it can be a result.

    Raises:
        ConfigurationError: for another policy, which would have to be called, and for a coroutine.
    """
    if inspect.iscoroutine(result):
        result.close()
        name = result.__qualname__
        msg = f"a policy returned the coroutine {name}, which nobody would await: write a policy that returns a result"
        raise ConfigurationError(msg)
    if isinstance(result, Retry) or any(result is each for each in (skip, fail, carry_on, retry, buffer_one)):
        name = getattr(result, "__name__", repr(result))
        msg = f"{name} was returned by a policy: call it, as in return retry()(error) or return fail(error)"
        raise ConfigurationError(msg)
    return result
