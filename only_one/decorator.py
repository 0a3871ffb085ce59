"""`only_one` itself: reads its arguments, sees what it wraps, and hands over to `run`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from .errors import ConfigurationError, KeyTemplateError
from .keys import MakeKey, compile_key, names_the_function
from .plan import Cover, Options
from .policies import carry_on, fail
from .run import run, run_async
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

    class Decorator(Protocol[Busy_co, Down_co]):
        """What `only_one(...)` gives: the function's type, with what the policies return beside its result."""

        @overload
        def __call__(
            self, function: Callable[P, Coroutine[Any, Any, R]], /
        ) -> Callable[P, Coroutine[Any, Any, R | Busy_co | Down_co]]: ...
        @overload
        def __call__(self, function: Callable[P, R], /) -> Callable[P, R | Busy_co | Down_co]: ...


DEFAULT_KEY = "{name}:{md5}"

_CELERY = "celery.app.task"
"""Celery is not imported by us, but a task can only be running where others have imported it."""


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
        redis: the server: a client of redis-py, a URL, or a callable that returns a client, called once.
            Default: as configured, else the environment's `ONLY_ONE_REDIS_URL`, else `redis://localhost:6379/0`.

    Returns:
        The covered function, or the decorator that covers one.

    Raises:
        KeyTemplateError: for a key that could not work.
        ConfigurationError: for an option that could not work, or something that cannot be covered.
    """
    as_key = isinstance(function_or_key, str)
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
    if isinstance(timeout, str):
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

    def decorate(function: Any) -> Any:
        check_function(function)
        check_not_twice(function, key)
        name = qualified_name(function)
        if names_the_function(key):
            check_name(function)
        signature = _signature(function)
        takes_self = next(iter(signature.parameters), None) == "self"
        cover = Cover(function, name, key, options, functools.partial(_compile, key, signature), takes_self=takes_self)
        wrapper = _wrap(cover)
        if "celery" in sys.modules:
            from .tasks import endings as endings  # noqa: PLC0415 - listens in the worker's main process, which runs nothing
        wrapper.__only_one__ = cover
        return wrapper

    return decorate


def _wrap(cover: Cover) -> Any:
    wrapper = _wrap_async(cover) if inspect.iscoroutinefunction(cover.function) else _wrap_sync(cover)
    # Celery checks the arguments of `.delay()` by the signature, and does not follow `__wrapped__` to find it.
    wrapper.__signature__ = _signature(cover.function)
    return wrapper


def _wrap_sync(cover: Cover) -> Any:
    @functools.wraps(cover.function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _CELERY in sys.modules:
            return _tasks().run_task(cover, wrapper, args, kwargs)
        return run(cover, cover.plain, args, kwargs)

    return wrapper


def _wrap_async(cover: Cover) -> Any:
    @functools.wraps(cover.function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _CELERY in sys.modules:
            return await _tasks().run_task_async(cover, wrapper, args, kwargs)
        return await run_async(cover, cover.plain, args, kwargs)

    return wrapper


def _tasks() -> Any:
    from .tasks import running  # noqa: PLC0415 - not before Celery is there

    return running


def _compile(key: Any, signature: inspect.Signature, bound: bool) -> MakeKey:  # noqa: FBT001
    """The key of calls with, or without, the task itself as first argument."""
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        signature = signature.replace(parameters=parameters[1:])
    return compile_key(key, signature)


# What can be covered


def check_function(function: Any) -> None:
    """Refuse what cannot be covered.

    Only its type is looked at first, since a lazy Celery task is evaluated by almost anything else.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    reason = _why_not(function)
    if reason:
        msg = f"only_one cannot cover {reason}"
        raise ConfigurationError(msg)


def _why_not(function: Any) -> str | None:
    kind = type(function)
    if any(base.__module__ in ("celery.local", _CELERY) for base in kind.__mro__):
        return "a task from queued to finished: write @only_one below @app.task, directly above the function"
    if issubclass(kind, (staticmethod, classmethod, property)):
        return f"a {kind.__name__}: write @only_one below @{kind.__name__}, directly above the function"
    if issubclass(kind, type):
        return f"the class {function.__name__}: write @only_one above the method that does the work, such as run"
    if not callable(function):
        return f"{function!r}, which cannot be called: write @only_one above a function, and its key as key='a-name'"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return (
            f"the generator function {function.__name__}, whose call returns before its body has run: "
            "write @only_one above the function that consumes it"
        )
    if not hasattr(function, "__qualname__"):
        return f"{function!r}, which is no function: write @only_one above a def, or above the __call__ of its class"
    return None


def check_not_twice(function: Any, key: Any) -> None:
    """Refuse a second cover with the key of the first, which would find itself busy in every call.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    covered = getattr(function, "__only_one__", None)
    if covered is not None and covered.template == key:
        msg = f"{function.__qualname__} is covered with key={key!r} already: write one @only_one, or another key"
        raise ConfigurationError(msg)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:
        msg = f"only_one cannot cover {function!r}, whose parameters are unknown: write @only_one above a def around it"
        raise ConfigurationError(msg) from None


def qualified_name(function: Callable[..., Any]) -> str:
    """`module.qualname`, where a program that was started with `-m` has its module's name, and not `__main__`."""
    return f"{_module(function) or function.__module__}.{function.__qualname__}"


def _module(function: Callable[..., Any]) -> str | None:
    """The name by which everybody else knows a function's module, or None where there is no such name."""
    if function.__module__ not in ("__main__", "__mp_main__"):
        return function.__module__
    spec = getattr(inspect.unwrap(function), "__globals__", {}).get("__spec__")
    return getattr(spec, "name", None)


def check_name(function: Callable[..., Any]) -> None:
    """Refuse `{name}` where two different functions would have the same.

    Raises:
        KeyTemplateError: saying what to write instead.
    """
    if function.__name__ == "<lambda>":
        msg = "a lambda has no {name}: write @only_one('a-key') above a def, or key=lambda … if it was meant as the key"
        raise KeyTemplateError(msg)
    if _module(function) is None:
        msg = (
            f"{{name}} of {function.__qualname__} in __main__ would be the same in every program: "
            f"write a key, such as @only_one('{function.__name__}-of-my-program'), or start it with python -m"
        )
        raise KeyTemplateError(msg)
