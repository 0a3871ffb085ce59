"""A task's functions: their decorations, the caller of a function outside of a run, and the key of a message."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from celery import Task

from only_one.call.effective_options import Caller, Decoration, EffectiveOptions
from only_one.call.owed_key import note_of
from only_one.clock import now
from only_one.holder import Work
from only_one.lock.commands import Retained
from only_one.lock.token import TokenFactory

from .broker import refuse_long_countdown


def task_behind(task_or_proxy: Any) -> Any:
    """The task; a proxy's task is evaluated now, if it was not before."""
    # Celery documents `_get_current_object`.
    return task_or_proxy if issubclass(type(task_or_proxy), Task) else task_or_proxy._get_current_object()  # noqa: SLF001


def functions_of(task: Any) -> Iterator[Any]:
    """The task's ``run``, and the functions that it wraps; Celery itself wraps ``run`` for autoretry and pydantic."""
    return _with_wrapped(task.run)


def functions_with_bases(task: Any) -> Iterator[Any]:
    """The same, and the functions of its bases' ``run``, which ``super()`` may call, and of their ``__call__``."""
    yield from _with_wrapped(task.run)
    for kind in type(task).__mro__:
        for name in ("run", "__call__"):
            yield from _with_wrapped(vars(kind).get(name))


def _with_wrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def decorations_of(task: Any) -> list[Decoration]:
    """The decorations of a task's functions, the outermost first."""
    # Each once: a function that wraps a decorated function may have copied its attributes.
    functions = functions_with_bases(task)
    return list(dict.fromkeys(each.__only_one__ for each in functions if hasattr(each, "__only_one__")))


def module_of(function: Any) -> Any:
    """The name of the module in which a function was written; None if that is not known."""
    return getattr(function, "__globals__", {}).get("__name__")


def async_function_of(task: Any) -> Any:
    """The function of a task whose ``run`` is an async function; None for any other task."""
    # For `pydantic=True` Celery wraps the function, and the wrapper is not async.
    function = next((each for each in functions_of(task) if not str(module_of(each)).startswith("celery.")), None)
    return function if inspect.iscoroutinefunction(function) else None


def task_of_items(task: Any, kwargs: Any) -> str | None:
    """The name of the task that a message of ``map``, ``starmap`` or ``chunks`` calls; None for any other message."""
    if task.name not in ("celery.map", "celery.starmap"):
        return None
    name: str | None = ((kwargs or {}).get("task") or {}).get("task")
    return name


class TaskCaller(Caller):
    """The caller of a task's function, with the options of the task's app; else it answers as for a plain function.

    ``delivery.Delivery`` and ``enqueue.Publication``, which send commands of their own, derive from it.
    """

    def __init__(self, task: Any, work: Work | None = None, state: str = "running", *, bound: bool = False) -> None:
        """``work`` and ``state`` are those of the caller's tokens; None for no work of a message."""
        self._task = task
        super().__init__(task.name, self.tokens(work, state) if work else TokenFactory(task.name), bound=bound)
        self.app = task.app

    def tokens(self, work: Work, state: str) -> TokenFactory:
        """Return what makes the tokens with which the task acquires a key for this work."""
        return TokenFactory(self._task.name, work.id, work.attempt, state, work.replacement)

    def waiting_value(self, key: str, work: Work, seconds: float) -> Retained:
        """The value for a key while the task waits in its queue, for so many seconds at most."""
        return Retained(self.tokens(work, "queued").token(seconds), now() + seconds, note_of(key, *work))

    def check(self, options: EffectiveOptions) -> None:
        """Refuse countdowns after which the broker would redeliver the message.

        Raises:
            ConfigurationError: for such a countdown; the message says what to write instead.
        """
        for policy in (options.when_busy, options.when_down):
            refuse_long_countdown(self.app, getattr(policy, "countdown", None))

    def keeps_key(self, decoration: Decoration, key: str, request: Any, args: Any, kwargs: Any) -> bool:
        """Whether a retry with ``args`` and ``kwargs`` has ``key``, the key of the task whose request is ``request``.

        A retry with the request's arguments has it, even if pydantic or a base's ``__call__`` changes them for the run.
        """
        with suppress(Exception):  # of arguments that have no digest, or cannot be compared
            if list(args or ()) == list(request.args or ()) and (kwargs or {}) == (request.kwargs or {}):
                return True
            prefix = decoration.options_for(self).prefix
            return prefix + decoration.make_key(self, tuple(args or ()), kwargs or {}) == key
        return False


def caller_from_outside(task: Any, decoration: Decoration) -> Caller:
    """The caller of a task's function outside of the task's run, for arguments without ``self``."""
    bound = not decoration.is_unique and not isinstance(inspect.getattr_static(type(task), "run"), staticmethod)
    return TaskCaller(task, bound=bound)


def key_of_message(task: Any, decoration: Decoration, prefix: str, args: Any, kwargs: Any) -> str | None:
    """The key that a message's run has; None if the message's arguments may give another key than the run's.

    Pydantic, a base's ``__call__`` or a function above the decorated one may change the arguments for the run. That
    code is the user's, and is not called here. And a callable key may read what only the run has, such as a context
    variable.
    """
    # The wrapper of `autoretry_for` does not change the arguments.
    functions = [each for each in functions_of(task) if module_of(each) != "celery.app.autoretry"]
    is_innermost = decoration.is_unique or functions[1:2] == [decoration.function]
    # Functions cannot be compared here: a worker replaces the `__call__` of Celery's class.
    class_with_call = next(kind for kind in type(task).__mro__ if "__call__" in vars(kind))
    may_change = not is_innermost or class_with_call is not Task
    if may_change or callable(decoration.template):
        return None
    return key_of_arguments(task, decoration, prefix, args, kwargs)


def key_of_arguments(task: Any, decoration: Decoration, prefix: str, args: Any, kwargs: Any) -> str:
    """The key that a message's arguments give: that of its run, unless something changes them before the run."""
    caller = caller_from_outside(task, decoration)
    return prefix + decoration.make_key(caller, (task, *args) if caller.bound else tuple(args), kwargs)
