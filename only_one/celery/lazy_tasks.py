"""Make a task unique from queued to finished, also a lazy one: Celery's proxy of a task that it makes later."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from celery import Celery, Task, _state

from only_one.call.decorated_function import check_function, wrap
from only_one.call.effective_options import Decoration
from only_one.errors import ConfigurationError, OnlyOneError
from only_one.events import logger
from only_one.keys import compile_key
from only_one.policies import Retry
from only_one.settings import Options

from . import worker_signals as worker_signals  # which listens from now on
from .enqueue import Publication
from .task_run import functions_of, is_bound


def decorate_task(task_or_proxy: Any, key: Any, options: Options) -> Any:
    """Make a task unique from queued to finished, without evaluating it where it is lazy.

    Args:
        task_or_proxy: a task, or Celery's proxy of one.
        key: a key template, or a callable.
        options: what the decorator says.

    Returns:
        What was given; its `apply_async` and `run` are decorated.

    Raises:
        KeyTemplateError: for a key that could not work.
        ConfigurationError: for an option that could not work, or something that cannot be decorated.
    """
    policy = options.get("when_busy")
    if isinstance(policy, Retry):
        msg = (
            f"when_busy={policy!r} above @app.task: there is nothing to put back yet when a task is queued; "
            "write @only_one below @app.task, or buffer_one()"
        )
        raise ConfigurationError(msg)
    if _is_evaluated(task_or_proxy):
        task = task_behind(task_or_proxy)
        _install(task, key, options)
        lazy: LazyTask | None = LazyTask(functions_of(task)[-1], task.name, is_bound(task))
    else:
        lazy = _lazy_task_behind(task_or_proxy)
        if lazy is not None:
            _check(lazy, key)
    _when_evaluated(task_or_proxy, lazy, functools.partial(_install_late, key, options))
    return task_or_proxy


# Lazy tasks


class LazyTask(NamedTuple):
    """What Celery makes a task of.

    Attributes:
        function: the function below `@app.task` or `@shared_task`.
        name: the task's name, if it was given one.
        bound: whether the task is its first argument; None where that cannot be seen.
    """

    function: Callable[..., Any]
    name: str | None
    bound: bool | None

    def task_in(self, app: Celery) -> Task | None:
        """The task that an app, which is finalized, has made of it."""
        task = app.tasks.get(self.name or app.gen_task_name(self.function.__name__, self.function.__module__))
        return task if task is not None and self.function in functions_of(task) else None


def _is_evaluated(task_or_proxy: Any) -> bool:
    """Whether it is a task itself, or a proxy that has made its own; to ask in another way would evaluate it."""
    kind = type(task_or_proxy)
    return issubclass(kind, Task) or (hasattr(kind, "__then__") and task_or_proxy.__evaluated__())


def task_behind(task_or_proxy: Any) -> Any:
    """The task, which is evaluated if it was not yet."""
    is_task = issubclass(type(task_or_proxy), Task)
    return task_or_proxy if is_task else task_or_proxy._get_current_object()  # noqa: SLF001 - which Celery documents


def _lazy_task_behind(proxy: Any) -> LazyTask | None:
    """What Celery will make the proxy's task of; None where that cannot be seen."""
    try:
        given = object.__getattribute__(proxy, "_Proxy__args")
        if given:
            options = object.__getattribute__(proxy, "_Proxy__kwargs")
            return LazyTask(given[0], options.get("name"), bool(options.get("bind")))
        known = inspect.getclosurevars(object.__getattribute__(proxy, "_Proxy__local")).nonlocals
        return LazyTask(known["fun"], known["name"], None)
    except (AttributeError, KeyError, TypeError):
        return None


def _when_evaluated(task_or_proxy: Any, lazy: LazyTask | None, install: Callable[[Task], None]) -> None:
    """Call `install` with the task and its copies in other apps as soon as they are there, perhaps more than once.

    Celery makes copies of the tasks of one app in all others, unless they have `shared=False`.
    """
    if hasattr(type(task_or_proxy), "__then__"):
        task_or_proxy.__then__(lambda: install(task_behind(task_or_proxy)))
    if lazy is None:
        return

    def install_in(sender: Celery, **_: Any) -> None:
        task = lazy.task_in(sender)
        if task is not None:
            install(task)

    _state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(install_in, weak=False))
    for app in _state._get_active_apps():  # noqa: SLF001 - as `shared_task` does
        if app.finalized:
            install_in(app)


def _check(lazy: LazyTask, key: Any) -> None:
    """Refuse now what will be refused when the task is evaluated."""
    check_function(lazy.function)
    signature = inspect.signature(lazy.function)
    # A shared task does not say whether the first parameter is the task.
    takes_self = next(iter(signature.parameters), None) == "self" if lazy.bound is None else lazy.bound
    parameters = list(signature.parameters.values())
    compile_key(key, inspect.Signature(parameters[1:]) if takes_self else signature)


# Tasks that are there


def _install(task: Task, key: Any, options: Options) -> None:
    configured = _configured(key, *options, *options.values())
    installed = vars(task).get("only_one_configured")
    if installed == configured:
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
    task.apply_async = _deduplicated(task, wrapper.__only_one__)
    task.run = wrapper
    vars(task)["only_one_configured"] = configured


def _configured(*values: Any) -> str:
    """A key and its options, in words that are the same when a module is loaded again."""
    return repr(
        [f"{each.__module__}.{each.__qualname__}" if hasattr(each, "__qualname__") else repr(each) for each in values]
    )


def _install_late(key: Any, options: Options, task: Task) -> None:
    """The same where nobody could be told of an error, so that every call of the task raises it."""
    try:
        _install(task, key, options)
    except OnlyOneError as error:
        # Where the module is loaded a second time, it is the first error that is told.
        vars(task)["only_one_configured"] = _configured(key, *options, *options.values())
        logger.error("%s cannot be covered: %s", task.name, error)
        task.run = task.apply_async = functools.partial(_refuse, error)


def _refuse(error: OnlyOneError, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise error


_POSITIONS = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")


def _deduplicated(task: Task, decoration: Decoration) -> Callable[..., Any]:
    """The task's `apply_async`, by which a duplicate is not published."""
    set_on_the_task = vars(task).get("apply_async")

    @functools.wraps(task.apply_async)
    def apply_async(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(_POSITIONS, args, strict=False)), **options}
        if len(given) < len(args) + len(options):
            return task.__class__.apply_async(task, *args, **options)  # which refuses them
        # What has been put in the place of its class's since, as by instrumentation, is called, too.
        original = set_on_the_task or functools.partial(type(task).apply_async, task)
        return Publication(task, original, given.pop("args", None), given.pop("kwargs", None), given).queue(decoration)

    return apply_async
