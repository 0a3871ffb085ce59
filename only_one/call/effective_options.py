"""The effective options of a decorated function, from the decorator and all settings; its key; its callers."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from inspect import Parameter, Signature
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from only_one import settings
from only_one.connections.server import Server, Source, find_server
from only_one.errors import KeyTemplateError, OnlyOneError
from only_one.forks import see_fork
from only_one.keys.template import compile_call, compile_key
from only_one.lock.commands import MarkerUpdate, Retained
from only_one.lock.token import TokenFactory
from only_one.policies import RequeueRequest, skip

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Policy = Callable[[Any], Any]
AtEnd = tuple[Retained | None, MarkerUpdate | None]
"""The value to store in place of the token, None to release the key; and the completion marker to set, or None."""


@dataclass(frozen=True, kw_only=True)
class EffectiveOptions(settings.Settings):
    """The effective options of a function, and values that follow from them.

    Attributes:
        made_from: the options of ``configure`` when these were made.
        server: the server that stores the key; None if the locking is switched off.
        ttl: seconds for which the key is acquired at first.
    """

    made_from: settings.Options
    server: Server | None
    ttl: float

    def not_renewed(self, ttl: float, timeout: float) -> "EffectiveOptions":
        """The same options with another ``timeout`` and no lease: the key is acquired for ``ttl`` seconds at first."""
        made = object.__new__(EffectiveOptions)  # because `dataclasses.replace` costs a tenth of a SET
        vars(made).update(vars(self), ttl=ttl, timeout=timeout, lease=None)
        return made


class Call:
    """One call that asks for its key, as its caller sees it.

    Attributes:
        options: the effective options.
        server: the server that stores the key.
        key: the key as it is in Redis.
        token: the value that says who owns the key; empty if another call acquires it.
        ended_by: the exception that the function has raised; None if it has raised none.
    """

    token = b""
    ended_by: BaseException | None = None

    def __init__(self, options: EffectiveOptions, server: Server, key: str) -> None:
        self.options = options
        self.server = server
        self.key = key


class Caller:
    """The caller of a function, and its answers to the questions of a call. This class answers for a plain function.

    Attributes:
        name: the name of the task or function.
        token_factory: makes the tokens with which the caller acquires a key.
        bound: whether the first argument is the task itself.
        app: the task's app; None for a plain function.
        key: the key as it is in Redis, if the task's message has brought it.
        queued: the value that was stored at the key when the task was queued.
    """

    app: Any = None
    key: str | None = None
    queued: bytes | None = None

    def __init__(self, name: str, token_factory: TokenFactory, *, bound: bool = False) -> None:
        self.name = name
        self.token_factory = token_factory
        self.bound = bound

    def check(self, options: EffectiveOptions) -> None:
        """Refuse options that cannot work in this app."""

    def is_held_by_own(self, value: bytes) -> bool:  # noqa: ARG002
        """Whether the key is held by a previous attempt of the same work, for which the call may wait."""
        return False

    def asks_again_in(self, call: Call, left: float) -> float:  # noqa: ARG002
        """Seconds after which a key that a previous attempt holds is asked for again; 0 if ``on_busy`` decides now.

        Args:
            call: the call.
            left: seconds until the key expires, if it is not renewed.
        """
        return 0

    def on_busy(self, call: Call, value: bytes) -> Policy:  # noqa: ARG002
        """The policy for a key that holds ``value``. A task that is its own holder raises an error to end the call."""
        return call.options.when_busy or skip

    def on_down(self, call: Call) -> Policy:
        """The policy for a server that could not be asked."""
        return call.options.when_down

    def requeue(self, call: Call, how: RequeueRequest) -> Any:  # noqa: ARG002
        """Requeue the task; here there is none.

        Raises:
            OnlyOneError: the error that the policy was called with.
        """
        raise how.error from how.error.__cause__  # so that the request is not shown as its context

    def claim_work(self, call: Call) -> bool:  # noqa: ARG002
        """Whether the work must still be done, now that the key is ours. A task may raise an error to end the call."""
        return True

    def can_take_queued(self, call: Call, value: bytes) -> bool:  # noqa: ARG002
        """Whether a call may take the key over from ``value``, a task that waits in a queue."""
        return True

    def at_end(self, call: Call) -> AtEnd:  # noqa: ARG002
        """The retained value after a run that has not succeeded, and the completion marker after any run."""
        return None, None

    def on_marked(self, call: Call) -> None:
        """Take note that the completion marker is set, or may be."""


@dataclass(eq=False, repr=False)
class Decoration:
    """A decorated function: its key and its effective options.

    Attributes:
        function: the function as it was before.
        name: its name, with its module's.
        template: the key as it was given.
        own: the decorator's options.
        signature: the function's.
        app_options: takes a Celery app, or None for the current app; gives the options of its configuration, and a
            function that gives its own server.
        is_unique: whether it is the run of a task that is unique from queued to finished, retries included.
        work_id: gives what ``work_id`` returns for a call, positional and keyword; None if there is no such option.
        plain: the caller of a plain function.
        plain_bound: the caller of a task's function that is called by hand, with the task as first argument.
        digest: gives the name and the MD5 of all arguments of a call, positional and keyword, which tells calls with
            one key apart; it raises ``UnkeyableArgument`` if they cannot be compared.
    """

    function: Callable[..., Any]
    name: str
    template: Any
    own: settings.Options
    signature: Signature
    app_options: Callable[[Any], tuple[settings.Options, Callable[[], Source | None]]]
    is_unique: bool

    def __post_init__(self) -> None:
        self.plain = Caller(self.name, TokenFactory(self.name))
        self.plain_bound = Caller(self.name, TokenFactory(self.name), bound=True)
        # By the app, and by this object for the current app. Weakly, because an app that is not collected would go on
        # counting as one of this process.
        self._options_by_app: WeakKeyDictionary[Any, EffectiveOptions] = WeakKeyDictionary()
        parameters = list(self.signature.parameters.values())
        if parameters and parameters[0].kind is not Parameter.VAR_POSITIONAL:
            del parameters[0]  # the task itself
        # No `cached_property`: until Python 3.12 that has a lock, which a fork may leave locked for ever.
        self._bound_key = cache(partial(compile_key, self.template, Signature(parameters)))
        work_id = self.own.get("work_id")
        self.work_id = work_id and compile_call("work_id", work_id, self.signature)
        self.digest = partial(compile_key("{name}:{md5}", self.signature), self.name)
        try:
            self._key = compile_key(self.template, self.signature)
        except KeyTemplateError as error:
            # The key may be meant for the arguments without the task: only `@app.task(bind=True)`, above, tells that.
            if not self.is_unique and next(iter(self.signature.parameters), None) == "self":
                with suppress(KeyTemplateError):
                    self._bound_key()
                    self._key = partial(refuse, error)
                    return
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Have it made anew where it is unpickled: cloudpickle sends it with a function of ``__main__``."""
        return Decoration, tuple(getattr(self, field.name) for field in fields(self))

    def options_for(self, caller: Caller) -> EffectiveOptions:
        """The effective options of a call. They are made once for each app, and anew after each ``configure``."""
        see_fork()
        of_app = caller.app or self
        options = self._options_by_app.get(of_app)
        if options is None or options.made_from is not settings.current:
            options = effective_options(self.own, *self.app_options(caller.app))
            caller.check(options)
            if options.server is None or options.server.is_known:
                self._options_by_app[of_app] = options
        return options

    def make_key(self, caller: Caller, args: Args, kwargs: Kwargs) -> str:
        """The key of a call, without the prefix; the task itself, as first argument, is no part of it."""
        if caller.bound:
            return self._bound_key()(caller.name, args[1:], kwargs)
        return self._key(caller.name, args, kwargs)


def effective_options(
    own: settings.Options, of_app: settings.Options, app_server: Callable[[], Source | None]
) -> EffectiveOptions:
    """The effective options of a decorator's options, an app's, and a function that gives the app's own server."""
    current = settings.current
    merged = settings.merge(own, current, of_app)
    ttl = min(filter(None, (merged.timeout, merged.lease)))  # `merge` always gives one of them
    server = find_server(settings.source_of(merged, app_server)) if settings.is_active(merged) else None
    return EffectiveOptions(**vars(merged), made_from=current, server=server, ttl=ttl)


def refuse(error: OnlyOneError, *_args: Any, **_kwargs: Any) -> NoReturn:
    """Stand in for a function that could not be decorated: every call raises the error."""
    raise error
