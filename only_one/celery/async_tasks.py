"""Tasks of an async function, with ``@only_one`` above or below: those that nobody would await are refused."""

import functools
import sys
from logging import ERROR
from typing import Any

from celery import Task, _state, signals

from only_one.call.effective_options import refuse
from only_one.errors import ConfigurationError
from only_one.events import log

from .task_functions import async_function_of, decorations_of


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


_state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(_refuse_async_tasks))
signals.worker_init.connect(_refuse_async_tasks)  # for tasks that were made when the app was finalized already
