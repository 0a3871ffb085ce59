"""The decorator ``only_one``: its parameters and types, the functions it accepts, and the wrapper that it returns."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, overload

from . import signatures
from .call import job_queues
from .call.effective_options import Caller, Decoration
from .call.run import run, run_async
from .connections.server import Source
from .errors import AlreadyRunning, ConfigurationError, KeyTemplateError, LockLost, LockUnavailable
from .keys.digest import importable_name
from .keys.template import check_name, has_field
from .option_values import Seconds
from .policies import carry_on, fail
from .settings import CHECKS, Options, check

if TYPE_CHECKING:
    from types import EllipsisType

    from typing_extensions import Never, TypedDict, TypeVar, Unpack

    P = ParamSpec("P")
    R = TypeVar("R")
    Busy = TypeVar("Busy", default=None, covariant=True)  # noqa: PLC0105
    Down = TypeVar("Down", default=Never, covariant=True)  # noqa: PLC0105
    Async = Callable[P, Coroutine[Any, Any, R]]
    Key = str | Callable[..., str]
    Time = Seconds | EllipsisType | None

    class Keywords(TypedDict, Generic[Busy, Down], total=False):
        """The parameters that ``only_one`` takes by keyword only; its policies return ``Busy`` and ``Down``."""

        lease: Time
        at_least: Seconds
        when_busy: Callable[[AlreadyRunning], Busy]
        when_lost: Callable[[LockLost], object]
        when_down: Callable[[LockUnavailable], Down]
        takeover: bool
        work_id: Callable[..., object]
        redis: Source | None

    class CeleryTask(Protocol):
        """A Celery task, which keeps its type: the values of its policies come as results of the task."""

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            """See Celery."""

    Task = TypeVar("Task", bound=CeleryTask)

    class Decorator(Protocol[Busy, Down]):
        """The type of ``only_one(...)``: it adds the types that the policies return to the function's own."""

        @overload
        def __call__(self, task: Task, /) -> Task: ...
        @overload
        def __call__(self, function: Async[P, R], /) -> Async[P, R | Busy | Down]: ...
        @overload
        def __call__(self, function: Callable[P, R], /) -> Callable[P, R | Busy | Down]: ...


_CELERY = "celery.app.task"
"""The module of Celery's tasks. We do not import Celery: a task can only run where others have imported it."""


@overload
def only_one(task: Task, /, timeout: Time = ..., *, key: Key = ..., **options: Unpack[Keywords[Any, Any]]) -> Task: ...
@overload
def only_one(function: Async[P, R], /) -> Async[P, R | None]: ...
@overload
def only_one(function: Callable[P, R], /) -> Callable[P, R | None]: ...
@overload
def only_one(
    function: Async[P, R], /, timeout: Time = ..., *, key: Key = ..., **options: Unpack[Keywords[Busy, Down]]
) -> Async[P, R | Busy | Down]: ...
@overload
def only_one(
    function: Callable[P, R], /, timeout: Time = ..., *, key: Key = ..., **options: Unpack[Keywords[Busy, Down]]
) -> Callable[P, R | Busy | Down]: ...
@overload
def only_one(key: str = ..., timeout: Time = ..., **options: Unpack[Keywords[Busy, Down]]) -> Decorator[Busy, Down]: ...
@overload
def only_one(*, key: Key, timeout: Time = ..., **options: Unpack[Keywords[Busy, Down]]) -> Decorator[Busy, Down]: ...
def only_one(  # pyright: ignore[reportInconsistentOverload] - a key by position is `function_or_key`
    function_or_key: Any = ...,
    /,
    timeout: Any = ...,
    *,
    key: Any = ...,
    lease: Any = ...,
    at_least: Any = 0,
    when_busy: Any = ...,
    when_lost: Any = carry_on,
    when_down: Any = fail,
    takeover: Any = ...,
    work_id: Any = ...,
    redis: Any = None,
) -> Any:
    """Let only one run with the same key be under way at a time, in all processes that share a Redis server.

    A call whose key is busy does not run: ``when_busy`` says what the call returns or raises
    instead.
    Above a function or an ``async def`` function, also below ``@app.task``: one run at a time.
    Above ``@app.task``: one task at a time, unique from queued to finished.
    It stands directly above the ``def``, and below every other decorator except Celery's.
    Exception: above one that commits when the function has returned, such as Django's
    ``transaction.atomic``; or the key would be free before the commit.
    Above one that registers the function as it is, such as a route of FastAPI or Flask, it would
    have no effect there.

    Args:
        function_or_key: the first positional argument: the function, if the decorator is used
            without parentheses or as a function; else the key, a str, as ``key`` is by keyword.
        timeout: seconds or a timedelta, the longest that a run may hold its key.
            Alone, it is also how long the key outlives a dead holder.
        key: a template of ``{name}``, ``{md5}`` (of all arguments) and the function's parameters,
            such as ``"{name}:{feed_url:md5}"``; or, by keyword, a callable that takes the call's
            arguments and returns a str.
            The MD5 of arguments in a lock's name is the idea of Celery's cookbook.
        lease: seconds or a timedelta, how long the key outlives a dead holder.
            The key is renewed while the run lives. Without ``timeout`` and ``lease`` the lease is
            30 s.
        at_least: seconds or a timedelta: after a successful run, the key is kept until this long
            after the run began.
        when_busy: the policy for a busy key, called with ``AlreadyRunning``; its result, or the
            error that it raises, is the call's. ``skip`` (returns None), ``fail``, ``retry()``,
            ``buffer_one()``, or any callable.
            The default is ``skip``, except for tasks to which None would do harm: a retry or a
            redelivered message is requeued, and a task whose result a chord or chain needs raises
            ``AlreadyRunning``.
        when_lost: the policy for a run that has lost its key, called once with ``LockLost``, in a
            thread of its own, soon after the loss is known. ``carry_on`` (the default), ``fail``
            (an async run is cancelled, and the call raises ``LockLost`` in place of its result), or
            any callable.
        when_down: the policy for a server that cannot be asked, called with ``LockUnavailable``.
            ``fail`` (the default), ``skip``, ``carry_on`` (run without the key), ``retry()``, or
            any callable.
        takeover: whether a call takes over the key of a holder on this machine whose process is
            dead.
            Write False for runs that leave children behind that go on working.
        work_id: a callable that takes the call's arguments, as ``key`` does, and returns the id of
            the job that the call belongs to, or None for no job.
            A call whose key is held by a previous attempt of its own job is never skipped: the job
            is requeued, or waits until the key is free, or raises ``AlreadyRunning``.
            The jobs of RQ, Dramatiq (with ``CurrentMessage``) and arq are known without it, and
            Celery's tasks always are.
        redis: the server: a client of redis-py, a URL, or a callable that returns a client: called
            until it has returned one, for all functions that it is given to.
            The default is the configured server, by ``configure`` or ``app.conf.only_one_redis``,
            else ``ONLY_ONE_REDIS_URL`` of the environment, else the Celery app's result backend or
            broker, else ``redis://localhost:6379/0``.

    Returns:
        The decorated function or task; or a decorator, if no function is given.

    Raises:
        KeyTemplateError: for a key that cannot work, or a ``work_id`` with other parameters.
        ConfigurationError: for an option that cannot work, or an object that cannot be decorated.
            Each call of a Celery task that is made of an async function raises it, too, because
            Celery would not await the function: once its app is finalized, or its worker begins.
    """
    given = {name: value for name, value in locals().items() if name in CHECKS and value is not ...}
    if redis is None:
        del given["redis"]
    as_key = issubclass(type(function_or_key), str)  # `isinstance` would evaluate a lazy task
    if as_key and key is not ...:
        msg = f"two keys are given, {function_or_key!r} and key={key!r}: write one of them"
        raise ConfigurationError(msg)
    template = function_or_key if as_key else "{name}:{md5}" if key is ... else key
    decorate = _NoContextManager(_decorate, template, check(given, {}))
    return decorate if as_key or function_or_key is ... else decorate(function_or_key)


class _NoContextManager(functools.partial[Any]):
    """What ``only_one(...)`` returns, with a clear error for ``with only_one(...)``."""

    def __enter__(self) -> None:
        msg = "only_one is no context manager: write the block as a function, with @only_one(...) above its def"
        raise ConfigurationError(msg)

    __exit__ = __aenter__ = __aexit__ = __enter__  # Python looks for both methods before it calls the first


def _decorate(key: Any, options: Options, target: Any) -> Any:
    """Decorate a function or a task. One decorator may stand above several functions: they share no state."""
    if is_task(target):
        from only_one.celery import unique_tasks  # noqa: PLC0415 - not before Celery is there

        return unique_tasks.decorate_task(target, key, options, signature_of, wrap)
    return wrap(target, key, options)


def is_task(target: Any) -> bool:
    """Whether ``target`` is a Celery task, or a proxy of one, by its type alone: much else evaluates a lazy task."""
    return any(base.__module__ in ("celery.local", _CELERY) for base in type(target).__mro__)


def configured_by_app(app: Any) -> tuple[Options, Callable[[], Source | None]]:
    """The options in an app's configuration, and a function that gives its server; for None, the current app's."""
    if _CELERY not in sys.modules:
        return {}, lambda: None
    from only_one.celery import app_settings  # noqa: PLC0415 - not before Celery is there

    return app_settings.app_options(app)


def wrap(function: Any, key: Any, options: Options, task: Any = None) -> Any:
    """The wrapper that runs in place of a function, one call per key at a time.

    Args:
        function: the function.
        key: a template, or a callable of the call's arguments.
        options: the decorator's.
        task: the Celery task whose ``run`` is wrapped, if it is unique from queued to finished.

    Raises:
        KeyTemplateError: for a key that cannot work.
        ConfigurationError: for an object that cannot be decorated.
    """
    signature = signature_of(function)
    check_name(key, signature)
    decorated = getattr(function, "__only_one__", None)
    if decorated is not None and decorated.template == key:  # each call would find its key held by itself
        msg = f"{function.__qualname__} is decorated with key={key!r} twice: write one @only_one, or another key"
        raise ConfigurationError(msg)
    name = _name_of(function, key, signature) if task is None else task.name
    decoration = Decoration(function, name, key, options, signature, configured_by_app, task is not None)

    def sync_wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(decoration, _caller_of(decoration, wrapper, args, kwargs), args, kwargs)

    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        return await run_async(decoration, _caller_of(decoration, wrapper, args, kwargs), args, kwargs)

    wrapper: Any = async_wrapper if inspect.iscoroutinefunction(function) else sync_wrapper
    functools.update_wrapper(wrapper, function)
    # Celery checks the arguments of `.delay()` by the signature, and does not follow `__wrapped__` to find it.
    wrapper.__signature__ = signature
    wrapper.__only_one__ = decoration
    if "celery" in sys.modules:  # the import connects our handlers to Celery's signals, in a worker's main process, too
        from only_one.celery import ended_tasks  # noqa: F401, PLC0415 - not before Celery is there
    return wrapper


@functools.cache
def _delivery() -> Any:
    """The module of deliveries, imported once Celery is there. An import in each call would cost as much as the key."""
    from only_one.celery import delivery  # noqa: PLC0415 - see above

    return delivery


def _caller_of(decoration: Decoration, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Caller:
    task = None
    if _CELERY in sys.modules:
        delivery = _delivery()
        # Without the tracer, as in a web process, no task runs. Celery is asked only with it, because to say that there
        # is no task it raises two exceptions, which cost more than the key.
        task = delivery.current_task() if "celery.app.trace" in sys.modules else None
        caller: Caller = delivery.caller_of(task, decoration, wrapper, args)
        if caller is not decoration.plain:
            return caller
    return job_queues.caller_of(decoration, args, kwargs, detects=task is None)


_ABOVE_THE_DEF = (
    "write @only_one directly above the def, below every other decorator except Celery's task, where above means "
    "from queued to finished; of a class-based task, above its run"
)


def signature_of(function: Any) -> inspect.Signature:
    """The signature of a function that can be decorated.

    Raises:
        ConfigurationError: for any other object; the message says what to write instead.
    """
    if not _is_function(function):
        problem = f"{function!r}, which is neither a function nor a key, a str: {_ABOVE_THE_DEF}"
    elif _is_scheduled(function):
        problem = f"{function.__qualname__}, because APScheduler would run it without the lock: {_ABOVE_THE_DEF}"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        instead = "write @only_one above the function that consumes it"
        problem = f"the generator function {function.__name__}, whose call returns before its body has run: {instead}"
    else:
        # Celery's autoretry wraps a bound method, and copies the `__signature__` of its function, which has the object
        # as first parameter. So the signature is that of the bound method.
        wrapped = getattr(function, "__wrapped__", None)
        try:
            return signatures.signature(wrapped if inspect.ismethod(wrapped) else function)
        except ValueError:
            problem = f"{function!r}, whose parameters are unknown: write @only_one above a def around it"
    msg = f"only_one cannot decorate {problem}"
    raise ConfigurationError(msg)


def _is_function(function: Any) -> bool:
    """Whether it is a function of any kind, and not an object that a decorator has made of one, as a task queue's does.

    Such an object may have the function's ``__qualname__``.
    """
    if isinstance(function, staticmethod):
        return False
    is_routine = inspect.isroutine(function) or isinstance(function, functools.partial)
    is_named_callable = callable(function) and hasattr(function, "__qualname__")
    # Prefect's tasks are routines by a `__get__` of their own, written in Python.
    is_of_prefect = inspect.isfunction(getattr(type(function), "__get__", None))
    return is_routine and is_named_callable and not is_of_prefect


def _is_scheduled(function: Any) -> bool:
    """Whether a job of APScheduler 3 has the function. Its decorator returns the function unchanged."""
    referrers = gc.get_referrers(function) if "apscheduler" in sys.modules else ()
    return any(type(each).__module__ == "apscheduler.job" for each in referrers)


def _name_of(function: Callable[..., Any], key: Any, signature: inspect.Signature) -> str:
    """The function's ``module.qualname``. A program started with ``-m`` has its module's name, and not ``__main__``.

    Raises:
        KeyTemplateError: if ``{name}`` would be that of different functions, or ``{md5}`` has no
            stable value.
    """
    own = getattr(function, "__module__", None) or "builtins"
    module = importable_name(own, getattr(inspect.unwrap(function), "__globals__", {}))
    if has_field(key, "name") and function.__name__ == "<lambda>":
        msg = "a lambda has no {name}: write @only_one('a-key') above a def, or key=lambda … if it was meant as the key"
        raise KeyTemplateError(msg)
    first = next(iter(signature.parameters), None)
    if first in ("self", "cls") and has_field(key, "md5"):
        _check_method(function, first)
    if has_field(key, "name") and module == "__main__":
        template = key if signature.parameters else "{name}"  # then there is nothing of which to make an MD5
        suggested = template.replace("{name}", f"{function.__name__}-of-my-program")
        instead = f"write a key, such as @only_one({suggested!r}), or start it with python -m"
        msg = f"{{name}} of {function.__qualname__} in __main__ would be the same in every program: {instead}"
        raise KeyTemplateError(msg)
    return f"{module}.{function.__qualname__}"


def _check_method(function: Callable[..., Any], first: str) -> None:
    """Refuse ``{md5}`` above a method: the object is an argument too, and has no digest that says what is meant.

    Exception: ``run`` may be the method of a task, which is no part of the key.

    Raises:
        KeyTemplateError: for such a method; the message says what to write instead.
    """
    owner, _, name = function.__qualname__.rpartition(".")
    is_method = owner and not owner.endswith("<locals>")
    may_be_task = first == "self" and name == "run"
    if may_be_task or not is_method:
        return
    key = f"{name}:{{self.id}}" if first == "self" else name
    problem = f"{{md5}} above the method {function.__qualname__} would be of its {first}, too"
    instead = f"write a key that says which calls exclude each other, such as @only_one('{key}')"
    msg = f"{problem}: {instead}"
    raise KeyTemplateError(msg)
