"""The wrapper that runs in place of a decorated function, sync or async, and what can be decorated at all."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from only_one.connections.server import Source
from only_one.errors import ConfigurationError, KeyTemplateError
from only_one.keys import has_field
from only_one.settings import Options

from .driver import run, run_async
from .effective_options import Decoration

_CELERY = "celery.app.task"
"""Celery is not imported by us, but a task can only be running where others have imported it."""


def is_task(target: Any) -> bool:
    """Whether `target` is a Celery task, or a proxy of one, by its type alone: much else evaluates a lazy task."""
    return any(base.__module__ in ("celery.local", _CELERY) for base in type(target).__mro__)


def wrap(function: Any, key: Any, options: Options, task: Any = None) -> Any:
    """The wrapper of a function, of which only one call at a time runs.

    Args:
        function: what is decorated.
        key: a template, or a callable of the call's arguments.
        options: the decorator's.
        task: the Celery task whose `run` is wrapped, where it is unique from queued to finished.

    Raises:
        KeyTemplateError: for a key that could not work.
        ConfigurationError: for something that cannot be decorated.
    """
    check_function(function)
    _check_not_twice(function, key)
    signature = _signature(function)
    first = next(iter(signature.parameters), None) if task is None else None
    if task is None and has_field(key, "name"):
        _check_name(function)
    if first in ("self", "cls") and has_field(key, "md5"):
        _check_method(function, first)
    name = _qualified_name(function) if task is None else task.name
    decoration = Decoration(
        function, name, key, options, signature, configured_by_app, takes_self=first == "self", task=task
    )
    wrapper = _wrap_async(decoration) if inspect.iscoroutinefunction(function) else _wrap_sync(decoration)
    # Celery checks the arguments of `.delay()` by the signature, and does not follow `__wrapped__` to find it.
    wrapper.__signature__ = signature
    wrapper.__only_one__ = decoration
    return wrapper


def _wrap_sync(decoration: Decoration) -> Any:
    @functools.wraps(decoration.function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        caller = _tasks().caller_of(decoration, wrapper, args) if _CELERY in sys.modules else decoration.plain
        return run(decoration, caller, args, kwargs)

    return wrapper


def _wrap_async(decoration: Decoration) -> Any:
    @functools.wraps(decoration.function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        caller = _tasks().caller_of(decoration, wrapper, args) if _CELERY in sys.modules else decoration.plain
        return await run_async(decoration, caller, args, kwargs)

    return wrapper


def _tasks() -> Any:
    from only_one.celery import task_run  # noqa: PLC0415 - not before Celery is there

    return task_run


def configured_by_app(app: Any) -> tuple[Options, Callable[[], Source | None]]:
    """The options in a Celery app's configuration, and what gives its own server; None is the current app, if any."""
    if _CELERY not in sys.modules:
        return {}, lambda: None
    from only_one.celery import app_settings  # noqa: PLC0415 - not before Celery is there
    from only_one.celery import worker_signals as worker_signals  # noqa: PLC0415 - which listens from now on

    return app_settings.app_options(app)


# What can be decorated


def check_function(function: Any) -> None:
    """Refuse what cannot be decorated.

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


def _check_not_twice(function: Any, key: Any) -> None:
    """Refuse a second decorator with the key of the first: it would find itself busy in every call."""
    decorated = getattr(function, "__only_one__", None)
    if decorated is not None and decorated.template == key:
        msg = f"{function.__qualname__} is covered with key={key!r} already: write one @only_one, or another key"
        raise ConfigurationError(msg)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:
        msg = f"only_one cannot cover {function!r}, whose parameters are unknown: write @only_one above a def around it"
        raise ConfigurationError(msg) from None


def _qualified_name(function: Callable[..., Any]) -> str:
    """`module.qualname`, where a program that was started with `-m` has its module's name, and not `__main__`."""
    return f"{_module(function) or function.__module__}.{function.__qualname__}"


def _module(function: Callable[..., Any]) -> str | None:
    """The name by which everybody else knows a function's module, or None where there is no such name."""
    if function.__module__ not in ("__main__", "__mp_main__"):
        return function.__module__
    spec = getattr(inspect.unwrap(function), "__globals__", {}).get("__spec__")
    return getattr(spec, "name", None)


def _check_name(function: Callable[..., Any]) -> None:
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


def _check_method(function: Callable[..., Any], first: str) -> None:
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
