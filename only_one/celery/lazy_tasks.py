"""Lazy tasks: what is known of a task that Celery has not made yet, and the task in each app once it is made."""

import inspect
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, _state

from .task_functions import functions_of


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

    # Celery keeps the lambda, and so `install_in`.
    _state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(install_in))
    for app in _state._get_active_apps():  # noqa: SLF001 - as `shared_task` does
        if app.finalized:
            install_in(app)
