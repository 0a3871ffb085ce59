"""What can be covered, and the function that runs in its place."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from .errors import ConfigurationError, KeyTemplateError
from .keys import MakeKey, compile_key, has_field
from .plan import Cover, Options
from .run import run, run_async
from .servers import Source
from .settings import Settings

_CELERY = "celery.app.task"
"""Celery is not imported by us, but a task can only be running where others have imported it."""


def is_task(found: Any) -> bool:
    """Whether it is a Celery task, or a proxy of one, by its type alone."""
    return any(base.__module__ in ("celery.local", _CELERY) for base in type(found).__mro__)


def cover_function(function: Any, key: Any, options: Options) -> Any:
    """A function in whose place only one run at a time is under way.

    Raises:
        KeyTemplateError: for a key that could not work.
        ConfigurationError: for something that cannot be covered.
    """
    check_function(function)
    check_not_twice(function, key)
    name = qualified_name(function)
    if has_field(key, "name"):
        check_name(function)
    signature = _signature(function)
    first = next(iter(signature.parameters), None)
    takes_self = first == "self"
    if has_field(key, "md5") and first in ("self", "cls"):
        check_method(function, first)
    compiled = functools.partial(_compile, signature)
    return _wrap(Cover(function, name, key, options, compiled, said_by, takes_self=takes_self))


def cover_run(task: Any, key: Any, options: Options) -> Any:
    """What is to be a task's `run`, where the task is covered from queued to finished.

    Raises:
        KeyTemplateError: for a key that could not work.
        ConfigurationError: for something that cannot be covered.
    """
    check_function(task.run)
    check_not_twice(task.run, key)
    compiled = functools.partial(_compile, _signature(task.run))
    return _wrap(Cover(task.run, task.name, key, options, compiled, said_by, takes_self=False, task=task))


def _wrap(cover: Cover) -> Any:
    wrapper = _wrap_async(cover) if inspect.iscoroutinefunction(cover.function) else _wrap_sync(cover)
    # Celery checks the arguments of `.delay()` by the signature, and does not follow `__wrapped__` to find it.
    wrapper.__signature__ = _signature(cover.function)
    wrapper.__only_one__ = cover
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


def said_by(app: Any) -> tuple[Settings, Callable[[], Source | None]]:
    """What a Celery app says, and where its own server is; with None that of the app that is current, if one is."""
    if _CELERY not in sys.modules:
        return Settings(), lambda: None
    from .tasks import app_settings  # noqa: PLC0415 - not before Celery is there

    return app_settings.said_by(app)


def _compile(signature: inspect.Signature, key: Any, bound: bool) -> MakeKey:  # noqa: FBT001
    """The key of calls with, or without, the task itself as first argument."""
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        signature = signature.replace(parameters=parameters[1:])
    return compile_key(key, signature)


# What can be covered


def check_function(function: Any) -> None:
    """Refuse what cannot be covered.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    reason = _why_not(function)
    if reason:
        msg = f"only_one cannot cover {reason}"
        raise ConfigurationError(msg)


def _why_not(function: Any) -> str | None:
    kind = type(function)
    if issubclass(kind, (staticmethod, classmethod, property)):
        return f"a {kind.__name__}: write @only_one below @{kind.__name__}, directly above the function"
    if issubclass(kind, type):
        return f"the class {function.__name__}: write @only_one above the method that does the work, such as run"
    if not callable(function) or not hasattr(function, "__qualname__"):
        return (
            f"{function!r}, which is no function: write @only_one above a def, or above the __call__ of its class, "
            "and a key as key='a-name'"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return (
            f"the generator function {function.__name__}, whose call returns before its body has run: "
            "write @only_one above the function that consumes it"
        )
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


def check_method(function: Callable[..., Any], first: str) -> None:
    """Refuse `{md5}` above a method of a plain class: its object is an argument, too, and has no digest.

    A class with annotations may become a dataclass, which has one, and `run` may be that of a task, which is left out.

    Raises:
        KeyTemplateError: saying what to write instead.
    """
    owner, _, name = function.__qualname__.rpartition(".")
    body = inspect.currentframe()
    while body is not None and body.f_locals.get("__qualname__") != owner:
        body = body.f_back
    if body is None or (first == "self" and (name == "run" or "__annotations__" in body.f_locals)):
        return
    instead = f"{name}:{{self.id}}" if first == "self" else name
    msg = (
        f"{{md5}} above the method {function.__qualname__} would be of its {first}, too, which has no stable digest: "
        f"write a key that says which calls exclude each other, such as @only_one('{instead}')"
    )
    raise KeyTemplateError(msg)


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
