"""The decorator `only_one`: its parameters, its types, and whether it stands above a function or a Celery task."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, overload

from .call.decorated_function import is_task, wrap
from .connections.server import Source
from .errors import ConfigurationError
from .policies import carry_on, fail
from .settings import CHECKS, UNSET, Options, Unset, check
from .validation import Seconds

if TYPE_CHECKING:
    from typing_extensions import Never, TypedDict, TypeVar, Unpack

    from .errors import AlreadyRunning, LockLost, LockUnavailable

    P = ParamSpec("P")
    R = TypeVar("R")
    Busy = TypeVar("Busy", default=None)
    Down = TypeVar("Down", default=Never)
    Busy_co = TypeVar("Busy_co", covariant=True)
    Down_co = TypeVar("Down_co", covariant=True)
    Time = Seconds | Unset | None

    class Keywords(TypedDict, Generic[Busy, Down], total=False):
        """What `only_one` takes by keyword alone; `Busy` and `Down` are what its policies return."""

        lease: Time
        at_least: Seconds
        when_busy: Callable[[AlreadyRunning], Busy]
        when_lost: Callable[[LockLost], object]
        when_down: Callable[[LockUnavailable], Down]
        takeover: bool
        redis: Source | None

    class KeywordsAndKey(Keywords[Busy, Down], total=False):
        """The same, where the key is not given by position."""

        key: str | Callable[..., str]

    class CeleryTask(Protocol):
        """A task, which stays what it is: what its policies return comes to its results."""

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            """See Celery."""

    AnyTask = TypeVar("AnyTask", bound=CeleryTask)

    class Decorator(Protocol[Busy_co, Down_co]):
        """What `only_one(...)` gives: the function's type, with what the policies return beside its result."""

        @overload
        def __call__(self, task: AnyTask, /) -> AnyTask: ...
        @overload
        def __call__(
            self, function: Callable[P, Coroutine[Any, Any, R]], /
        ) -> Callable[P, Coroutine[Any, Any, R | Busy_co | Down_co]]: ...
        @overload
        def __call__(self, function: Callable[P, R], /) -> Callable[P, R | Busy_co | Down_co]: ...


DEFAULT_KEY = "{name}:{md5}"


@overload
def only_one(task: AnyTask, /, timeout: Time = ..., **options: Unpack[KeywordsAndKey[object, object]]) -> AnyTask: ...
@overload
def only_one(
    function: Callable[P, Coroutine[Any, Any, R]], /, timeout: Time = ..., **options: Unpack[KeywordsAndKey[Busy, Down]]
) -> Callable[P, Coroutine[Any, Any, R | Busy | Down]]: ...
@overload
def only_one(
    function: Callable[P, R], /, timeout: Time = ..., **options: Unpack[KeywordsAndKey[Busy, Down]]
) -> Callable[P, R | Busy | Down]: ...
@overload
def only_one(key: str, /, timeout: Time = ..., **options: Unpack[Keywords[Busy, Down]]) -> Decorator[Busy, Down]: ...
@overload
def only_one(*, timeout: Time = ..., **options: Unpack[KeywordsAndKey[Busy, Down]]) -> Decorator[Busy, Down]: ...
def only_one(
    function_or_key: Any = UNSET,
    /,
    timeout: Any = UNSET,
    *,
    key: Any = UNSET,
    lease: Any = UNSET,
    at_least: Any = 0,
    when_busy: Any = UNSET,
    when_lost: Any = carry_on,
    when_down: Any = fail,
    takeover: Any = UNSET,
    redis: Any = None,
) -> Any:
    """Let only one run of a function with the same key be under way at a time, in all processes that share a Redis.

    A call whose key is taken does not run.
    Works on functions and `async def` functions, also on those below `@app.task`: one run at a time.
    Works on Celery tasks, above `@app.task`: one task at a time, from queued to finished.

    Args:
        function_or_key: the function, where the decorator is used without parentheses or as a function; else `key`.
        timeout: seconds or timedelta: the longest that a run may hold its key.
            Alone, it is also how long the key outlives a holder that has died.
        key: a template of `{name}`, `{md5}` (of all arguments) and the function's parameters, such as
            `"{name}:{feed_url:md5}"`; or, by keyword, a callable that takes the call's arguments and returns a str.
        lease: seconds or timedelta: how long the key outlives a holder that has died.
            It is renewed while the run lives. Without `timeout` and `lease` it is 30 s.
        at_least: seconds or timedelta: after a run that has succeeded, the key is kept until this long after it was
            taken.
        when_busy: called with `AlreadyRunning` when the key is taken; what it returns or raises is what the call gives.
            `skip` (gives None), `fail`, `retry()`, `buffer_one()`, or any callable.
            The default is `skip`, except for tasks to which None would do harm: see the README.
        when_lost: called once with `LockLost` when the run has lost its key, soon after that is known, in a thread of
            its own. `carry_on` (the default), `fail` (an async run is cancelled, and the call raises `LockLost` in
            place of its result), or any callable.
        when_down: called with `LockUnavailable` when the server cannot be asked.
            `fail` (the default), `skip`, `carry_on` (run without the key), `retry()`, or any callable.
        takeover: a holder on this machine whose process is dead does not block.
            False is for runs that leave children behind that go on working.
        redis: the server: a client of redis-py, a URL, or a callable that returns a client, called once for all
            functions that it is given to.
            Default: as configured, else the environment's `ONLY_ONE_REDIS_URL`, else the Celery app's, else
            `redis://localhost:6379/0`.

    Returns:
        The decorated function, or the decorator for one.

    Raises:
        KeyTemplateError: for a key that could not work.
        ConfigurationError: for an option that could not work, or something that cannot be decorated.
    """
    given = {name: value for name, value in locals().items() if name in CHECKS and value is not UNSET}
    if redis is None:
        del given["redis"]
    as_key = issubclass(type(function_or_key), str)  # `isinstance` would evaluate a lazy task
    if as_key and key is not UNSET:
        msg = f"two keys are given, {function_or_key!r} and key={key!r}: write one of them"
        raise ConfigurationError(msg)
    if isinstance(timeout, str) and not timeout[:1].isdigit():  # which would be a time, and no key
        msg = f"timeout={timeout!r} is a str: write the key first and then the seconds, only_one({timeout!r}, 300)"
        raise ConfigurationError(msg)
    template = function_or_key if as_key else key
    decorate = functools.partial(_decorate, DEFAULT_KEY if template is UNSET else template, check(given, {}))
    return decorate if as_key or function_or_key is UNSET else decorate(function_or_key)


def _decorate(key: Any, options: Options, target: Any) -> Any:
    """The function or the task, decorated.

    A decorator may stand above several functions: they share no state.
    """
    # Only the type of `target` is looked at, because almost anything else evaluates a lazy Celery task.
    if is_task(target):
        from only_one.celery import lazy_tasks  # noqa: PLC0415 - not before Celery is there

        return lazy_tasks.decorate_task(target, key, options)
    wrapper = wrap(target, key, options)
    if "celery" in sys.modules:
        from only_one.celery import worker_signals as worker_signals  # noqa: PLC0415 - for the worker's main process, which runs nothing
    return wrapper
