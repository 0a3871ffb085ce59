"""Lazy tasks: what is known of a task that Celery has not made yet, and the task in each app once it is made.

Only then it is known of an async function that Celery would not await it: such a task is refused, with ``@only_one``
above or below.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from logging import ERROR
from typing import Any

from celery import Celery, Task, _state, signals

from only_one.call.effective_options import refuse
from only_one.errors import ConfigurationError
from only_one.events import log

from .task_functions import async_function_of, decorations_of, functions_of


def function_behind(proxy: Any) -> tuple[Any, str | None]:
    """The function of which Celery will make a task, and the task's name if it was given one; else None."""
    try:
        if given := object.__getattribute__(proxy, "_Proxy__args"):
            return given[0], object.__getattribute__(proxy, "_Proxy__kwargs").get("name")
        known = inspect.getclosurevars(object.__getattribute__(proxy, "_Proxy__local")).nonlocals
        return known["fun"], known["name"]
    except (AttributeError, KeyError, TypeError):
        return None, None


def install_in_apps(function: Any, name: str | None, install: Callable[[Task], None]) -> None:
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


def refuse_async_run(task: Any) -> None:
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
                refuse_async_run(task)
        except ConfigurationError as error:
            log(ERROR, "%s", error)
            task.run = task.apply_async = functools.partial(refuse, error)


_state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(_refuse_async_tasks, weak=False))
signals.worker_init.connect(_refuse_async_tasks)  # for tasks that were made when the app was finalized already
