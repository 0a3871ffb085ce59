"""Cover a task from the moment when it is queued until it has ended."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from celery import Task

from only_one.errors import ConfigurationError, OnlyOneError
from only_one.events import logger
from only_one.keys import compile_key
from only_one.plan import Cover
from only_one.policies import Retry
from only_one.settings import Options
from only_one.wrapper import check_function, wrap

from . import beat as beat  # which listens from now on, as the next three do
from . import endings as endings
from . import queue_endings as queue_endings
from . import received as received
from .promises import Promise, made_already, promise_behind, when_made
from .queueing import Publication
from .wrapping import functions_of, is_bound


def cover_task(found: Any, key: Any, options: Options) -> Any:
    """Cover a task, or what Celery will make one of, without making it.

    Args:
        found: a task, or Celery's proxy of one.
        key: a key template, or a callable.
        options: what the decorator says.

    Returns:
        What was given; its `apply_async` and `run` are covered.

    Raises:
        KeyTemplateError: for a key that could not work.
        ConfigurationError: for an option that could not work, or something that cannot be covered.
    """
    policy = options.get("when_busy")
    if isinstance(policy, Retry):
        msg = (
            f"when_busy={policy!r} above @app.task: there is nothing to put back yet when a task is queued; "
            "write @only_one below @app.task, or buffer_one()"
        )
        raise ConfigurationError(msg)
    install = functools.partial(_install_late, key, options)
    task = made_already(found)
    if task is not None:
        _install(task, key, options)
        when_made(found, Promise(functions_of(task)[-1], task.name, is_bound(task)), install)
        return found
    promise = promise_behind(found)
    if promise is not None:
        _check(promise, key)
    when_made(found, promise, install)
    return found


def _check(promise: Promise, key: Any) -> None:
    """Refuse now what will be refused when the task is made."""
    check_function(promise.function)
    signature = inspect.signature(promise.function)
    # A shared task does not say whether the first parameter is the task.
    takes_self = next(iter(signature.parameters), None) == "self" if promise.bound is None else promise.bound
    parameters = list(signature.parameters.values())
    compile_key(key, inspect.Signature(parameters[1:]) if takes_self else signature)


def _install(task: Task, key: Any, options: Options) -> None:
    spelling = _spelling(key, options)
    installed = vars(task).get("only_one_spelling")
    if installed == spelling:
        return  # it is installed; or its module was loaded a second time, and Celery keeps the first task, too
    if installed is not None:
        msg = f"{task.name} is covered from queued to finished already: write one @only_one above @app.task"
        raise ConfigurationError(msg)
    if task.name is None:
        msg = (
            f"{task!r} has no name before it is registered: write only_one(app.register_task({type(task).__name__}()))"
        )
        raise ConfigurationError(msg)
    wrapper = wrap(task.run, key, options, task)
    task.apply_async = _covered(task, wrapper.__only_one__)
    task.run = wrapper
    vars(task)["only_one_spelling"] = spelling


def _spelling(key: Any, options: Options) -> str:
    return repr([_spelt(each) for each in (key, *options, *options.values())])


def _spelt(value: Any) -> str:
    """A key or an option, in words that are the same when a module is loaded again."""
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


def _install_late(key: Any, options: Options, task: Task) -> None:
    """The same where nobody could be told of an error, so that every call of the task tells it."""
    try:
        _install(task, key, options)
    except OnlyOneError as error:
        vars(task)["only_one_spelling"] = _spelling(key, options)  # loaded a second time, it is the first that is told
        logger.error("%s cannot be covered: %s", task.name, error)
        task.run = task.apply_async = functools.partial(_refuse, error)


def _refuse(error: OnlyOneError, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise error


_POSITIONS = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")


def _covered(task: Task, cover: Cover) -> Callable[..., Any]:
    set_on_the_task = vars(task).get("apply_async")

    @functools.wraps(task.apply_async)
    def covered(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(_POSITIONS, args, strict=False)), **options}
        if len(given) < len(args) + len(options):
            return task.__class__.apply_async(task, *args, **options)  # which refuses them
        # What has been put in the place of its class's since, as by instrumentation, is called, too.
        apply_async = set_on_the_task or functools.partial(type(task).apply_async, task)
        return Publication(task, apply_async, given.pop("args", None), given.pop("kwargs", None), given).queue(cover)

    return covered
