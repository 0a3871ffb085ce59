"""Lazy tasks: the proxy of a task that Celery makes later, and the copies of a task in other apps."""

import inspect
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, _state

from only_one.keys.template import compile_key

from .task_functions import functions_of


def task_behind(task_or_proxy: Any) -> Any:
    """The task; a proxy's task is evaluated now, if it was not before."""
    # Celery documents `_get_current_object`.
    return task_or_proxy if issubclass(type(task_or_proxy), Task) else task_or_proxy._get_current_object()  # noqa: SLF001


def check_lazy(proxy: Any, key: Any, signature_of: Callable[..., Any]) -> tuple[Any, str | None]:
    """Refuse a key or a function now that would be refused when the task is evaluated.

    Returns:
        The function of which Celery will make the task, and the task's name if it was given one. Both are None if
        the proxy does not show them.
    """
    try:
        given = object.__getattribute__(proxy, "_Proxy__args")
        if given:
            known = object.__getattribute__(proxy, "_Proxy__kwargs")
            function, name, takes_task = given[0], known.get("name"), bool(known.get("bind"))
        else:
            known = inspect.getclosurevars(object.__getattribute__(proxy, "_Proxy__local")).nonlocals
            function, name, takes_task = known["fun"], known["name"], None
    except (AttributeError, KeyError, TypeError):
        return None, None
    signature = signature_of(function)
    if takes_task is None:  # the proxy of a shared task does not show `bind`
        takes_task = next(iter(signature.parameters), None) == "self"
    if takes_task:
        signature = inspect.Signature(list(signature.parameters.values())[1:])
    compile_key(key, signature)
    return function, name


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
