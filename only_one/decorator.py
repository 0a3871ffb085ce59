"""`only_one` itself: reads its arguments, sees what it wraps, and hands over to `run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from .covering import cover_function, is_task
from .errors import ConfigurationError
from .plan import Options
from .policies import carry_on, fail
from .servers import Source, check_source
from .settings import (
    UNSET,
    Unset,
    check_at_least,
    check_policy,
    check_takeover,
    check_times,
    check_when_busy,
    check_when_lost,
)
from .times import Seconds

if TYPE_CHECKING:
    from typing_extensions import Never, TypeVar

    from .errors import AlreadyRunning, LockLost, LockUnavailable

    P = ParamSpec("P")
    R = TypeVar("R")
    Busy = TypeVar("Busy", default=None)
    Down = TypeVar("Down", default=Never)
    Busy_co = TypeVar("Busy_co", covariant=True)
    Down_co = TypeVar("Down_co", covariant=True)

    class CeleryTask(Protocol):
        """A task, which stays what it is: what its policies return comes to its results."""

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            """See Celery."""

    AnyTask = TypeVar("AnyTask", bound=CeleryTask)

    class Decorator(Protocol[Busy_co, Down_co]):
        """What `only_one(...)` gives: the function's type, with what the policies return beside its result."""

        @overload
        def __call__(self, task: AnyTask, /) -> AnyTask: ...
        @overload
        def __call__(
            self, function: Callable[P, Coroutine[Any, Any, R]], /
        ) -> Callable[P, Coroutine[Any, Any, R | Busy_co | Down_co]]: ...
        @overload
        def __call__(self, function: Callable[P, R], /) -> Callable[P, R | Busy_co | Down_co]: ...


DEFAULT_KEY = "{name}:{md5}"


@overload
def only_one(
    task: AnyTask,
    /,
    timeout: Seconds | Unset | None = ...,
    *,
    key: str | Callable[..., str] = ...,
    lease: Seconds | Unset | None = ...,
    at_least: Seconds = ...,
    when_busy: Callable[[AlreadyRunning], object] = ...,
    when_lost: Callable[[LockLost], object] = ...,
    when_down: Callable[[LockUnavailable], object] = ...,
    takeover: bool = ...,
    redis: Source | None = ...,
) -> AnyTask: ...
@overload
def only_one(
    function: Callable[P, Coroutine[Any, Any, R]],
    /,
    timeout: Seconds | Unset | None = ...,
    *,
    key: str | Callable[..., str] = ...,
    lease: Seconds | Unset | None = ...,
    at_least: Seconds = ...,
    when_busy: Callable[[AlreadyRunning], Busy] = ...,
    when_lost: Callable[[LockLost], object] = ...,
    when_down: Callable[[LockUnavailable], Down] = ...,
    takeover: bool = ...,
    redis: Source | None = ...,
) -> Callable[P, Coroutine[Any, Any, R | Busy | Down]]: ...
@overload
def only_one(
    function: Callable[P, R],
    /,
    timeout: Seconds | Unset | None = ...,
    *,
    key: str | Callable[..., str] = ...,
    lease: Seconds | Unset | None = ...,
    at_least: Seconds = ...,
    when_busy: Callable[[AlreadyRunning], Busy] = ...,
    when_lost: Callable[[LockLost], object] = ...,
    when_down: Callable[[LockUnavailable], Down] = ...,
    takeover: bool = ...,
    redis: Source | None = ...,
) -> Callable[P, R | Busy | Down]: ...
@overload
def only_one(
    key: str,
    /,
    timeout: Seconds | Unset | None = ...,
    *,
    lease: Seconds | Unset | None = ...,
    at_least: Seconds = ...,
    when_busy: Callable[[AlreadyRunning], Busy] = ...,
    when_lost: Callable[[LockLost], object] = ...,
    when_down: Callable[[LockUnavailable], Down] = ...,
    takeover: bool = ...,
    redis: Source | None = ...,
) -> Decorator[Busy, Down]: ...
@overload
def only_one(
    *,
    timeout: Seconds | Unset | None = ...,
    key: str | Callable[..., str] = ...,
    lease: Seconds | Unset | None = ...,
    at_least: Seconds = ...,
    when_busy: Callable[[AlreadyRunning], Busy] = ...,
    when_lost: Callable[[LockLost], object] = ...,
    when_down: Callable[[LockUnavailable], Down] = ...,
    takeover: bool = ...,
    redis: Source | None = ...,
) -> Decorator[Busy, Down]: ...
def only_one(
    function_or_key: Any = UNSET,
    /,
    timeout: Any = UNSET,
    *,
    key: Any = UNSET,
    lease: Any = UNSET,
    at_least: Any = 0,
    when_busy: Any = UNSET,
    when_lost: Any = carry_on,
    when_down: Any = fail,
    takeover: Any = UNSET,
    redis: Any = None,
) -> Any:
    """Let only one run of a function with the same key be under way at a time, in all processes that share a Redis.

    A call whose key is taken does not run.
    Works on functions, `async def` functions and the functions of Celery tasks, below `@app.task`.

    Args:
        function_or_key: the function, where the decorator is used without parentheses or as a function; else `key`.
        timeout: seconds or timedelta: the longest that a run may hold its key.
            Alone, it is also how long the key outlives a holder that has died.
        key: a template of `{name}`, `{md5}` (of all arguments) and the function's parameters, such as
            `"{name}:{feed_url:md5}"`; or, by keyword, a callable that takes the call's arguments and returns a str.
        lease: seconds or timedelta: how long the key outlives a holder that has died.
            It is renewed while the run lives. Without `timeout` and `lease` it is 30 s.
        at_least: seconds or timedelta: after a run that has succeeded, the key is kept until this long after it was
            taken.
        when_busy: called with `AlreadyRunning` when the key is taken; what it returns or raises is what the call gives.
            `skip` (gives None), `fail`, `retry()`, `buffer_one()`, or any callable. Not given it is `skip`, but for
            tasks to which None would do harm: see the README.
        when_lost: called once with `LockLost` when the run has lost its key, soon after that is known, in a thread of
            its own. `carry_on` (the default), `fail` (an async run is cancelled, and the call raises `LockLost` in
            place of its result), or any callable.
        when_down: called with `LockUnavailable` when the server cannot be asked.
            `fail` (the default), `skip`, `carry_on` (run without the key), `retry()`, or any callable.
        takeover: a holder on this machine whose process is dead does not block. False is for runs that leave children
            behind that go on working.
        redis: the server: a client of redis-py, a URL, or a callable that returns a client, called once for all
            functions that it is given to.
            Default: as configured, else the environment's `ONLY_ONE_REDIS_URL`, else the Celery app's, else
            `redis://localhost:6379/0`.

    Returns:
        The covered function, or the decorator that covers one.

    Raises:
        KeyTemplateError: for a key that could not work.
        ConfigurationError: for an option that could not work, or something that cannot be covered.
    """
    as_key = issubclass(type(function_or_key), str)  # `isinstance` would make a lazy task
    if as_key and key is not UNSET:
        msg = f"two keys are given, {function_or_key!r} and key={key!r}: write one of them"
        raise ConfigurationError(msg)
    template = function_or_key if as_key else key
    options = _options(
        timeout=timeout,
        lease=lease,
        at_least=at_least,
        when_busy=when_busy,
        when_lost=when_lost,
        when_down=when_down,
        takeover=takeover,
        redis=redis,
    )
    decorate = _decorator(DEFAULT_KEY if template is UNSET else template, options)
    return decorate if as_key or function_or_key is UNSET else decorate(function_or_key)


def _options(**given: Any) -> Options:
    """The options, found to be sound."""
    timeout = given["timeout"]
    if isinstance(timeout, str) and not timeout[:1].isdigit():  # which would be a time, and no key
        msg = f"timeout={timeout!r} is a str: write the key first and then the seconds, only_one({timeout!r}, 300)"
        raise ConfigurationError(msg)
    limit, renewed = check_times(timeout, given["lease"])
    if given["when_busy"] is not UNSET:
        check_when_busy(given["when_busy"])
    check_when_lost(given["when_lost"])
    check_policy("when_down", given["when_down"])
    check_takeover(given["takeover"])
    if given["redis"] is not None:
        check_source(given["redis"])
    has_times = timeout is not UNSET or given["lease"] is not UNSET
    at_least = check_at_least(given["at_least"], limit)
    return Options(**{**given, "timeout": limit, "lease": renewed, "has_times": has_times, "at_least": at_least})


def _decorator(key: Any, options: Options) -> Callable[[Any], Any]:
    """A decorator that may be used for several functions; nothing of one is seen by another."""

    def decorate(found: Any) -> Any:
        # Only its type is looked at, since a lazy Celery task is evaluated by almost anything else.
        if is_task(found):
            from .tasks import queue_cover  # noqa: PLC0415 - not before Celery is there

            return queue_cover.cover_task(found, key, options)
        wrapper = cover_function(found, key, options)
        if "celery" in sys.modules:
            from .tasks import endings as endings  # noqa: PLC0415 - listens in the worker's main process, which runs nothing
        return wrapper

    return decorate
