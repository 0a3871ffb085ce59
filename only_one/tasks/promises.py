"""Tasks that Celery will make when they are needed: what stands behind its proxies, seen without making them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from celery import Celery, Task, _state

from .wrapping import functions_of

Install = Callable[[Task], None]


class Promise(NamedTuple):
    """What a task is made of.

    Attributes:
        function: the function below `@app.task` or `@shared_task`.
        name: the task's name, if it was given one.
        bound: whether the task is its first argument; None where that cannot be seen.
    """

    function: Callable[..., Any]
    name: str | None
    bound: bool | None

    def made_in(self, app: Celery) -> Task | None:
        """The task that an app, which is finalized, has made of it."""
        task = app.tasks.get(self.name or app.gen_task_name(self.function.__name__, self.function.__module__))
        return task if task is not None and self.function in functions_of(task) else None


def made_already(found: Any) -> Task | None:
    """The task itself, if it is one, or a proxy that has made its own; to ask in another way would make it."""
    if issubclass(type(found), Task):
        task: Task = found
        return task
    if hasattr(type(found), "__then__") and found.__evaluated__():
        return found._get_current_object()  # noqa: SLF001 - which Celery documents
    return None


def task_behind(found: Any) -> Any:
    """The task, which is made if it was not yet."""
    return found if issubclass(type(found), Task) else found._get_current_object()  # noqa: SLF001 - as above


def promise_behind(proxy: Any) -> Promise | None:
    """What a proxy of a task will make it of; None where that cannot be seen, or it is made already."""
    try:
        given = object.__getattribute__(proxy, "_Proxy__args")
        if given:
            options = object.__getattribute__(proxy, "_Proxy__kwargs")
            return Promise(given[0], options.get("name"), bool(options.get("bind")))
        known = inspect.getclosurevars(object.__getattribute__(proxy, "_Proxy__local")).nonlocals
        return Promise(known["fun"], known["name"], None)
    except (AttributeError, KeyError, TypeError):
        return None


def when_made(found: Any, promise: Promise | None, install: Install) -> None:
    """Call `install` with the task and its copies in other apps as soon as they are there, perhaps more than once.

    Celery makes copies of the tasks of one app in all others, unless they have `shared=False`.
    """
    if hasattr(type(found), "__then__"):
        found.__then__(lambda: install(found._get_current_object()))  # noqa: SLF001 - which Celery documents
    if promise is None:
        return

    def install_in(sender: Celery, **_: Any) -> None:
        task = promise.made_in(sender)
        if task is not None:
            install(task)

    _state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(install_in, weak=False))
    for app in _state._get_active_apps():  # noqa: SLF001 - as `shared_task` does
        if app.finalized:
            install_in(app)
