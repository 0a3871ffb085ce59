"""Tasks that are unique from queued to finished: their ``apply_async`` and their ``run`` are decorated.

A task may be made later, by a proxy of Celery's, and is copied into other apps.
And tasks of an async function, decorated above or below: those that nobody would await are refused.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from logging import ERROR
from typing import Any

from celery import Celery, Task, _state, signals

from only_one.call.effective_options import refuse
from only_one.errors import ConfigurationError, OnlyOneError
from only_one.events import log
from only_one.keys.template import compile_key
from only_one.policies import Retry
from only_one.settings import Options

from .enqueue import Publication
from .task_functions import TaskCaller, async_function_of, decorations_of, functions_of, task_behind


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
        function, name = _function_behind(task_or_proxy)
        if function is not None and isinstance(key, str):
            compile_key(key, signature_of(function))  # which may have the task itself: that is refused later
    if hasattr(kind, "__then__"):
        task_or_proxy.__then__(lambda: install(task_behind(task_or_proxy)))
    if function is not None:
        _install_in_apps(function, name, install)
    return task_or_proxy


def _function_behind(proxy: Any) -> tuple[Any, str | None]:
    """The function of which Celery will make a task, and the task's name if it was given one; else None."""
    try:
        if given := object.__getattribute__(proxy, "_Proxy__args"):
            return given[0], object.__getattribute__(proxy, "_Proxy__kwargs").get("name")
        known = inspect.getclosurevars(object.__getattribute__(proxy, "_Proxy__local")).nonlocals
        return known["fun"], known["name"]
    except (AttributeError, KeyError, TypeError):
        return None, None


def _install_in_apps(function: Any, name: str | None, install: Callable[[Task], None]) -> None:
    """Call ``install`` with the task of each app, as soon as the app has made it, perhaps more than once.

    Celery makes a task in every app, unless it has ``shared=False``.
    """

    def install_in(sender: Celery, **_: Any) -> None:
        task = sender.tasks.get(name or sender.gen_task_name(function.__name__, function.__module__))
        if task is not None and function in functions_of(task):
            install(task)

    _state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(install_in, weak=False))
    for app in _state._get_active_apps():  # noqa: SLF001 - as `shared_task` does
        if app.finalized:
            install_in(app)


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
    _refuse_async_run(task)
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


def _refuse_async_run(task: Any) -> None:
    """Refuse a task whose ``run`` is an async function, unless the task's own ``__call__`` or the pool may await it.

    Raises:
        ConfigurationError: if nobody would await the function; the message says what to write instead.
    """
    function = async_function_of(task)
    is_awaited = type(task).__call__ != Task.__call__ or "celery_aio_pool" in sys.modules
    if function is not None and not is_awaited:
        msg = (
            f"{function.__module__}.{function.__qualname__} is the async function of a task, which Celery does not "
            "await, so it would never run: write @only_one and @app.task above a def that calls asyncio.run(...)"
        )
        raise ConfigurationError(msg)


def _refuse_async_tasks(sender: Any, **_: Any) -> None:
    """Let each call of such a task raise the error. ``sender`` is an app, or the worker of one.

    A decorator does not see whether ``@app.task`` stands above it, so the tasks that an app has made are looked at.
    """
    for task in getattr(sender, "app", sender).tasks.values():
        try:
            if decorations_of(task):
                _refuse_async_run(task)
        except ConfigurationError as error:
            log(ERROR, "%s", error)
            task.run = task.apply_async = functools.partial(refuse, error)


_state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(_refuse_async_tasks, weak=False))
signals.worker_init.connect(_refuse_async_tasks)  # for tasks that were made when the app was finalized already
