"""Make a Celery task unique from queued to finished, also a lazy task: a proxy of a task that Celery makes later."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, _state

from only_one.call.effective_options import refuse
from only_one.errors import ConfigurationError, OnlyOneError
from only_one.events import logger
from only_one.keys.template import compile_key
from only_one.policies import Retry
from only_one.settings import Options

from . import worker_signals as worker_signals  # which listens from now on
from .enqueue import Publication
from .task_run import TaskCaller, functions_of


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
    if isinstance(policy := options.get("when_busy"), Retry):
        msg = (
            f"when_busy={policy!r} above @app.task: there is nothing to requeue yet when a task is queued; "
            "write @only_one below @app.task, or buffer_one()"
        )
        raise ConfigurationError(msg)
    # The key and its options, in words that are the same when a module is loaded again.
    values: tuple[Any, ...] = (key, *options, *options.values())
    words = [f"{each.__module__}.{each.__qualname__}" if hasattr(each, "__qualname__") else each for each in values]
    install = functools.partial(_install_late, wrap, key, options, repr(words))
    kind = type(task_or_proxy)  # any other question evaluates it
    if issubclass(kind, Task) or (hasattr(kind, "__then__") and task_or_proxy.__evaluated__()):
        task = task_behind(task_or_proxy)
        _install(wrap, key, options, repr(words), task)
        function, name = [*functions_of(task)][-1], task.name
    else:
        function, name = _check_lazy(task_or_proxy, key, signature_of)
    if hasattr(kind, "__then__"):
        task_or_proxy.__then__(lambda: install(task_behind(task_or_proxy)))
    if function is not None:
        _install_in_apps(function, name, install)
    return task_or_proxy


def task_behind(task_or_proxy: Any) -> Any:
    """The task, which is evaluated if it was not yet."""
    # Celery documents the method.
    return task_or_proxy if issubclass(type(task_or_proxy), Task) else task_or_proxy._get_current_object()  # noqa: SLF001


def _check_lazy(proxy: Any, key: Any, signature_of: Callable[..., Any]) -> tuple[Any, str | None]:
    """Refuse now what will be refused when the task is evaluated.

    Returns:
        The function of which Celery will make the task, and the task's name if it has one; None if they are hidden.
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
    # A shared task does not say whether it is its function's first argument.
    if takes_task or (takes_task is None and next(iter(signature.parameters), None) == "self"):
        signature = inspect.Signature(list(signature.parameters.values())[1:])
    compile_key(key, signature)
    return function, name


def _install_in_apps(function: Any, name: str | None, install: Callable[[Task], None]) -> None:
    """Call ``install`` with the task in each app, as soon as it is there, perhaps more than once.

    Celery copies the tasks of one app into all others, unless they have ``shared=False``.
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


def _install(wrap: Callable[..., Any], key: Any, options: Options, configured: str, task: Task) -> None:
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
    wrapper, set_on_the_task = wrap(task.run, key, options, task), vars(task).get("apply_async")
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


def _install_late(wrap: Callable[..., Any], key: Any, options: Options, configured: str, task: Task) -> None:
    """The same after the decorator has returned: an error is logged, and every call of the task raises it."""
    try:
        _install(wrap, key, options, configured, task)
    except OnlyOneError as error:
        # Where the module is loaded a second time, it is the first error that is told.
        vars(task)["only_one_configured"] = configured
        logger.error("%s cannot be decorated: %s", task.name, error)
        task.run = task.apply_async = functools.partial(refuse, error)
