"""Make a Celery task unique from queued to finished, also a lazy task: a proxy of a task that Celery makes later."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task, _state
from celery.app.annotations import prepare

from only_one.call.effective_options import refuse
from only_one.errors import ConfigurationError, OnlyOneError
from only_one.events import logger
from only_one.keys.template import compile_key
from only_one.policies import Retry
from only_one.settings import Options

from . import worker_signals as worker_signals  # which listens from now on
from .enqueue import Publication
from .task_run import TaskCaller, decorations_of, functions_of


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
    _check_awaited(type(task))
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


def refuse_async_tasks() -> None:
    """Have each task that is made of a decorated async function raise an error whenever it is called.

    A decorated function does not know whether ``@app.task`` stands above it. The apps tell us when they make a task.
    """
    for app in _state._get_active_apps():  # noqa: SLF001 - as `shared_task` does
        app.annotations = _Annotations(app)


def _refuse_in_app(app: Celery) -> None:
    """The same for an app that is created later, which may have made tasks by now."""
    app.annotations = annotations = _Annotations(app)
    for task in app.tasks.values():
        annotations.annotate(type(task))


_state.connect_on_app_finalize(_refuse_in_app)


@dataclass
class _Annotations:
    """Celery's ``task_annotations`` of an app: those that are configured, and before them one of ours."""

    app: Celery

    def __iter__(self) -> Iterator[Any]:
        yield self
        yield from prepare(self.app.conf.task_annotations)  # not earlier, because it loads the configuration

    def annotate(self, kind: Any) -> None:
        """Called by Celery with the class of each task that it makes."""
        try:
            if decorations_of(kind):
                _check_awaited(kind)
        except ConfigurationError as error:
            logger.error("%s", error)
            # A worker calls the class's `__call__`, if the class has its own; and `run` may yet be replaced.
            kind.__call__ = kind.apply_async = staticmethod(functools.partial(refuse, error))


def _check_awaited(kind: Any) -> None:
    """Refuse an async function as the ``run`` of a class of tasks: Celery would not await it, and would say nothing.

    Raises:
        ConfigurationError: for such a function; the message says what to write instead.
    """
    # For `pydantic=True` Celery wraps the function, and the wrapper is not async.
    function = next((each for each in functions_of(kind) if not _is_celerys(each)), None)
    # A `__call__` of the user's may run the coroutine, and the pool of that library does.
    may_be_awaited = kind.__call__ != Task.__call__ or "celery_aio_pool" in sys.modules
    if inspect.iscoroutinefunction(function) and not may_be_awaited:
        msg = (
            f"{function.__module__}.{function.__qualname__} is the async function of a task, which Celery does not "
            "await, so it would never run: write @only_one and @app.task above a def that calls asyncio.run(...)"
        )
        raise ConfigurationError(msg)


def _is_celerys(function: Any) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith("celery.")
