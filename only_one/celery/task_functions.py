"""A task's functions: their decorations, the caller of one outside of a run, and the key that a message gives."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from celery import Task

from only_one.call.effective_options import Caller, Decoration, EffectiveOptions
from only_one.lock.token import TokenFactory

from .broker import refuse_long_countdown


def functions_of(task: Any) -> Iterator[Any]:
    """The task's ``run``, and the functions that it wraps: Celery wraps it for autoretry and pydantic."""
    return _with_wrapped(task.run)


def functions_with_bases(task: Any) -> Iterator[Any]:
    """The same, and those of its bases' ``run``, which may be called by ``super()``, and of their ``__call__``."""
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
    """The decorations of a task's functions, each once: a wrapper copies the attributes of its function."""
    functions = functions_with_bases(task)
    return list(dict.fromkeys(each.__only_one__ for each in functions if hasattr(each, "__only_one__")))


def unique_decoration_of(task: Any) -> Decoration | None:
    """The decoration of a task that is unique from queued to finished; None for any other."""
    return next((decoration for decoration in decorations_of(task) if decoration.is_unique), None)


def module_of(function: Any) -> Any:
    """The name of the module in which a function was written; None if that is not known."""
    return getattr(function, "__globals__", {}).get("__name__")


def task_of_items(task: Any, kwargs: Any) -> str | None:
    """The name of the task that a message of ``map``, ``starmap`` or ``chunks`` calls; None for any other message."""
    if task.name not in ("celery.map", "celery.starmap"):
        return None
    name: str | None = ((kwargs or {}).get("task") or {}).get("task")
    return name


class TaskCaller(Caller):
    """A call of a task's function: it has its app's settings, and is otherwise like the call of a plain function."""

    def __init__(self, task: Task, token_factory: TokenFactory | None = None, *, bound: bool = False) -> None:
        self._task: Any = task  # whose name is None for type checkers
        super().__init__(self._task.name, token_factory or TokenFactory(self._task.name), bound=bound)
        self.app = task.app

    def check(self, options: EffectiveOptions) -> None:
        """Refuse countdowns after which the broker would redeliver the message.

        Raises:
            ConfigurationError: for such a countdown; the message says what to write instead.
        """
        for policy in (options.when_busy, options.when_down):
            refuse_long_countdown(self.app, getattr(policy, "countdown", None))

    def keeps_key(self, decoration: Decoration, key: str, request: Any, args: Any, kwargs: Any) -> bool:
        """Whether a retry with these arguments has the key of its task, which ``request`` is about.

        The same arguments have the same key, whatever a worker or a base's ``__call__`` has made of them for the run.
        """
        with suppress(Exception):  # of arguments that have no digest, or cannot be compared
            if list(args or ()) == list(request.args or ()) and (kwargs or {}) == (request.kwargs or {}):
                return True
            prefix = decoration.options_for(self).prefix
            return prefix + decoration.make_key(self, tuple(args or ()), kwargs or {}) == key
        return False


def caller_from_outside(task: Any, decoration: Decoration) -> Caller:
    """The caller for a task's function outside of its run, with arguments without ``self``."""
    bound = not decoration.is_unique and not isinstance(inspect.getattr_static(type(task), "run"), staticmethod)
    return TaskCaller(task, bound=bound)


def key_of_message(task: Any, decoration: Decoration, prefix: str, args: Any, kwargs: Any) -> str | None:
    """The key of the message's run; None if that may have had another than the message's arguments give.

    What may change them (pydantic, a base's ``__call__``, a function in between) is the user's, and is not called here.
    And a callable may read what only the run has, such as a context variable.
    """
    # The wrapper of `autoretry_for` hands on what it is given.
    functions = [each for each in functions_of(task) if module_of(each) != "celery.app.autoretry"]
    is_innermost = decoration.is_unique or functions[1:2] == [decoration.function]
    # The first class that has a `__call__`; that of Celery's class is another in a worker.
    is_called_by = next(kind for kind in type(task).__mro__ if "__call__" in vars(kind))
    may_change = not is_innermost or is_called_by is not Task
    if may_change or callable(decoration.template):
        return None
    return key_of_arguments(task, decoration, prefix, args, kwargs)


def key_of_arguments(task: Any, decoration: Decoration, prefix: str, args: Any, kwargs: Any) -> str:
    """The key that the message's arguments give: its run's, unless something changes them on their way to it."""
    caller = caller_from_outside(task, decoration)
    return prefix + decoration.make_key(caller, (task, *args) if caller.bound else tuple(args), kwargs)
