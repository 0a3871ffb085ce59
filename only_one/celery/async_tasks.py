"""Tasks of a decorated async function: refused if Celery would not await it; else the function finds its task."""

import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from logging import ERROR
from typing import Any

from celery import Celery, Task, _state
from celery.app.annotations import prepare

from only_one.call.effective_options import refuse
from only_one.errors import ConfigurationError
from only_one.events import log

from .delivery import under_way
from .task_functions import decorations_of, functions_of, module_of


def refuse_async_tasks() -> None:
    """Refuse each task of a decorated async function that nobody would await: its calls raise an error.

    A decorator does not see whether ``@app.task`` stands above it, so the apps tell us when they make a task.
    """
    for app in _state._get_active_apps():  # noqa: SLF001 - as `shared_task` does
        app.annotations = _Annotations(app)


def _refuse_in_app(app: Celery) -> None:
    """Do the same in an app that is finalized later, also for the tasks that it has made by then."""
    app.annotations = annotations = _Annotations(app)
    for task in app.tasks.values():
        annotations.annotate(type(task))


_state.connect_on_app_finalize(_refuse_in_app)


@dataclass
class _Annotations:
    """An app's ``task_annotations``, through which Celery shows us each task: ours first, then the configured ones."""

    app: Celery

    def __iter__(self) -> Iterator[Any]:
        yield self
        yield from prepare(self.app.conf.task_annotations)  # only now, because this loads the configuration

    def annotate(self, kind: Any) -> None:
        """Called by Celery with the class of each task that it makes."""
        try:
            if decorations_of(kind):
                prepare_async_run(kind)
        except ConfigurationError as error:
            log(ERROR, "%s", error)
            # `run` may be replaced later. A worker calls the class's own `__call__`, if there is one.
            kind.__call__ = kind.apply_async = staticmethod(functools.partial(refuse, error))


def prepare_async_run(kind: Any) -> None:
    """Prepare a class of tasks whose ``run`` is an async function; other classes are left alone.

    If the class has its own ``__call__``, that may await the function in another thread: the function finds its task
    there, too.

    Raises:
        ConfigurationError: if nobody would await the function; the message says what to write instead.
    """
    # For `pydantic=True` Celery wraps the function, and the wrapper is not async.
    function = next((each for each in functions_of(kind) if not str(module_of(each)).startswith("celery.")), None)
    if not inspect.iscoroutinefunction(function):
        return
    if kind.__call__ != Task.__call__:
        _keep_task_in_threads(kind)
    elif "celery_aio_pool" not in sys.modules:  # the pool of that package awaits the function
        msg = (
            f"{function.__module__}.{function.__qualname__} is the async function of a task, which Celery does not "
            "await, so it would never run: write @only_one and @app.task above a def that calls asyncio.run(...)"
        )
        raise ConfigurationError(msg)


def _keep_task_in_threads(kind: Any) -> None:
    """Let the function find its task if ``__call__`` awaits it in another thread, as by asgiref's async_to_sync."""
    call = kind.__call__

    @functools.wraps(call)
    def keeps_task(task: Any, *args: Any, **kwargs: Any) -> Any:
        with under_way(task):
            return call(task, *args, **kwargs)

    kind.__call__ = keeps_task
