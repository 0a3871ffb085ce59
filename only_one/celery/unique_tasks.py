"""Tasks that are unique from queued to finished: their ``apply_async`` and their ``run`` are decorated."""

import functools
from collections.abc import Callable
from logging import ERROR
from typing import Any

from celery import Task

from only_one.call.effective_options import refuse
from only_one.errors import ConfigurationError, OnlyOneError
from only_one.events import log
from only_one.keys.template import compile_key
from only_one.policies import Retry
from only_one.settings import Options

from .async_tasks import refuse_async_run
from .enqueue import Publication
from .lazy_tasks import function_behind, install_in_apps
from .task_functions import TaskCaller, functions_of, task_behind


def decorate_task(task_or_proxy: Any, key: Any, options: Options, signature_of: Any, wrap: Any) -> Any:
    """Make a task unique from queued to finished, without evaluating it if it is lazy.

    Args:
        task_or_proxy: a task, or Celery's proxy of one.
        key: a key template, or a callable.
        options: the decorator's options.
        signature_of: gives the signature of a function, and refuses a function that cannot be decorated.
        wrap: decorates a task's ``run``.

    Returns:
        ``task_or_proxy``; its ``apply_async`` and ``run`` are decorated.

    Raises:
        KeyTemplateError: for a key that cannot work.
        ConfigurationError: for an option that cannot work, or an object that cannot be decorated.
    """
    if type(policy := options.get("when_busy")) is Retry:
        msg = (
            f"when_busy={policy!r} above @app.task: there is nothing to requeue yet when a task is queued; "
            "write @only_one below @app.task, or buffer_one()"
        )
        raise ConfigurationError(msg)
    # If the module is loaded again, functions among the key and the options are new objects with the same names.
    values: tuple[Any, ...] = (key, *options, *options.values())
    names = [f"{each.__module__}.{each.__qualname__}" if hasattr(each, "__qualname__") else each for each in values]
    decorate = functools.partial(wrap, key=key, options=options)
    install = functools.partial(_install_late, decorate, repr(names))
    kind = type(task_or_proxy)  # any other question would evaluate a lazy task
    is_evaluated = hasattr(kind, "__then__") and task_or_proxy.__evaluated__()
    if is_evaluated or issubclass(kind, Task):
        task = task_behind(task_or_proxy)
        _install(decorate, repr(names), task)
        function, name = [*functions_of(task)][-1], task.name
    else:
        function, name = function_behind(task_or_proxy)
        if function is not None and isinstance(key, str):
            compile_key(key, signature_of(function))  # which may have the task itself: that is refused later
    if hasattr(kind, "__then__"):
        task_or_proxy.__then__(lambda: install(task_behind(task_or_proxy)))
    if function is not None:
        install_in_apps(function, name, install)
    return task_or_proxy


_POSITIONS = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")
"""The positional parameters of Celery's ``apply_async``, in order."""


def _install(decorate: Callable[..., Any], configured: str, task: Task) -> None:
    """Decorate a task's ``run`` and ``apply_async``; ``configured`` names the key and the options.

    Raises:
        ConfigurationError: for a task that cannot be decorated, or is decorated with another key or other options.
    """
    installed = vars(task).get("only_one_configured")
    if installed == configured:
        return  # it is installed already, or its module is loaded again and Celery keeps the first task
    if installed is not None:
        msg = f"{task.name} is unique from queued to finished already: write one @only_one above @app.task"
        raise ConfigurationError(msg)
    if task.name is None:
        registers = f"only_one(app.register_task({type(task).__name__}()))"
        msg = f"{task!r} has no name before it is registered: write {registers}"
        raise ConfigurationError(msg)
    refuse_async_run(task)
    wrapper, set_on_the_task = decorate(task.run, task=task), vars(task).get("apply_async")
    # A direct call of the task has the settings of its app.
    wrapper.__only_one__.plain = wrapper.__only_one__.plain_bound = TaskCaller(task)

    @functools.wraps(task.apply_async)
    def apply_async(*args: Any, **options: Any) -> Any:
        """Publish the task, unless it is a duplicate."""
        given = {**dict(zip(_POSITIONS, args, strict=False)), **options}
        if len(given) < len(args) + len(options):
            return task.__class__.apply_async(task, *args, **options)  # it refuses an argument that is given twice
        # The class's method is looked up in each call, because instrumentation may have replaced it since.
        original = set_on_the_task or functools.partial(type(task).apply_async, task)
        publication = Publication(task, original, given.pop("args", None), given.pop("kwargs", None), given)
        return publication.queue(wrapper.__only_one__)

    task.apply_async, task.run = apply_async, wrapper
    vars(task)["only_one_configured"] = configured


def _install_late(decorate: Callable[..., Any], configured: str, task: Task) -> None:
    """Install after the decorator has returned: an error is logged, and every call of the task raises it."""
    try:
        _install(decorate, configured, task)
    except OnlyOneError as error:
        # If the module is loaded again, this error stays.
        vars(task)["only_one_configured"] = configured
        log(ERROR, "%s cannot be decorated: %s", task.name, error)
        task.run = task.apply_async = functools.partial(refuse, error)
