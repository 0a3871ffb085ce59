"""Make a Celery task unique from queued to finished: its ``apply_async`` and its ``run`` are decorated."""

import functools
from collections.abc import Callable
from logging import ERROR
from typing import Any

from celery import Task

from only_one.call.effective_options import refuse
from only_one.errors import ConfigurationError, OnlyOneError
from only_one.events import log
from only_one.policies import Retry
from only_one.settings import Options

from .async_tasks import prepare_async_run
from .enqueue import Publication
from .lazy_tasks import check_lazy, install_in_apps, task_behind
from .task_functions import TaskCaller, functions_of


def decorate_task(task_or_proxy: Any, key: Any, options: Options, signature_of: Any, wrap: Any) -> Any:
    """Make a task unique from queued to finished, without evaluating it if it is lazy.

    Args:
        task_or_proxy: a task, or Celery's proxy of one.
        key: a key template, or a callable.
        options: the decorator's.
        signature_of: gives the signature of a function, and refuses a function that cannot be decorated.
        wrap: decorates the function that is a task's ``run``.

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
    # The key and its options, in words that are the same when a module is loaded again.
    values: tuple[Any, ...] = (key, *options, *options.values())
    words = [f"{each.__module__}.{each.__qualname__}" if hasattr(each, "__qualname__") else each for each in values]
    decorate = functools.partial(wrap, key=key, options=options)
    install = functools.partial(_install_late, decorate, repr(words))
    kind = type(task_or_proxy)  # any other question evaluates it
    is_evaluated = hasattr(kind, "__then__") and task_or_proxy.__evaluated__()
    if is_evaluated or issubclass(kind, Task):
        task = task_behind(task_or_proxy)
        _install(decorate, repr(words), task)
        function, name = [*functions_of(task)][-1], task.name
    else:
        function, name = check_lazy(task_or_proxy, key, signature_of)
    if hasattr(kind, "__then__"):
        task_or_proxy.__then__(lambda: install(task_behind(task_or_proxy)))
    if function is not None:
        install_in_apps(function, name, install)
    return task_or_proxy


_POSITIONS = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")


def _install(decorate: Callable[..., Any], configured: str, task: Task) -> None:
    installed = vars(task).get("only_one_configured")
    if installed == configured:
        return  # installed; or its module is loaded again, and Celery keeps the first task
    if installed is not None:
        msg = f"{task.name} is unique from queued to finished already: write one @only_one above @app.task"
        raise ConfigurationError(msg)
    if task.name is None:
        registers = f"only_one(app.register_task({type(task).__name__}()))"
        msg = f"{task!r} has no name before it is registered: write {registers}"
        raise ConfigurationError(msg)
    prepare_async_run(type(task))
    wrapper, set_on_the_task = decorate(task.run, task=task), vars(task).get("apply_async")
    # Called directly, it has its app's settings.
    wrapper.__only_one__.plain = wrapper.__only_one__.plain_bound = TaskCaller(task)

    @functools.wraps(task.apply_async)
    def apply_async(*args: Any, **options: Any) -> Any:
        """Publish the task, unless it is a duplicate."""
        given = {**dict(zip(_POSITIONS, args, strict=False)), **options}
        if len(given) < len(args) + len(options):
            return task.__class__.apply_async(task, *args, **options)  # which refuses them
        # A method that has replaced its class's since, as by instrumentation, is called, too.
        original = set_on_the_task or functools.partial(type(task).apply_async, task)
        publication = Publication(task, original, given.pop("args", None), given.pop("kwargs", None), given)
        return publication.queue(wrapper.__only_one__)

    task.apply_async, task.run = apply_async, wrapper
    vars(task)["only_one_configured"] = configured


def _install_late(decorate: Callable[..., Any], configured: str, task: Task) -> None:
    """The same after the decorator has returned: an error is logged, and every call of the task raises it."""
    try:
        _install(decorate, configured, task)
    except OnlyOneError as error:
        # Where the module is loaded a second time, it is the first error that is told.
        vars(task)["only_one_configured"] = configured
        log(ERROR, "%s cannot be decorated: %s", task.name, error)
        task.run = task.apply_async = functools.partial(refuse, error)
