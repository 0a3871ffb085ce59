"""The effective options of a decorated function, from the decorator and all settings; its key; who calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from inspect import Parameter, Signature
from math import inf
from typing import Any, NamedTuple, Union

from only_one import settings
from only_one.connections.server import Server, Source, find_server
from only_one.errors import KeyTemplateError
from only_one.keys import MakeKey, compile_key
from only_one.lock.commands import Expiry, MarkerUpdate, expiry_in
from only_one.lock.holder import TokenFactory
from only_one.policies import RequeueRequest, skip

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Policy = Callable[[Any], Any]
AppOptions = Callable[[Any], tuple[settings.Options, Callable[[], Union[Source, None]]]]
"""Gives the options of a Celery app's configuration, and what gives its own server; None is the current app."""


class AtEnd(NamedTuple):
    """What a run stores at its end.

    Attributes:
        retained: what is stored at the key after a run that has not succeeded, and for how many milliseconds; None if
            the key is released.
        marker: the completion marker to be set for redeliveries of a task's message; None if none is set.
        on_marked: is called if the marker is set, or may be.
    """

    retained: tuple[bytes, int] | None = None
    marker: MarkerUpdate | None = None
    on_marked: Callable[[], None] = lambda: None


_NOTHING = AtEnd()


class Caller:
    """Who calls, and the answers to what a call asks a task; these are the answers of a plain function.

    Attributes:
        name: the task's name, or the function's.
        token_factory: makes the tokens with which the caller acquires a key.
        bound: the first argument is the task itself.
        app: the task's app; None for a plain function.
        key: the key as it is in Redis, where it has come with the task's message.
        queued: the value with which it was stored there when the task was queued.
    """

    app: Any = None
    key: str | None = None
    queued: bytes | None = None

    def __init__(self, name: str, token_factory: TokenFactory, *, bound: bool = False) -> None:
        self.name = name
        self.token_factory = token_factory
        self.bound = bound

    def check(self, options: EffectiveOptions) -> None:
        """Refuse options that could not work in this app."""

    def on_busy(self, options: EffectiveOptions, server: Server, key: str, value: bytes) -> Policy:  # noqa: ARG002
        """The key holds `value`: the policy that decides; a task raises what ends the call, if it is its own holder."""
        return options.when_busy or skip

    def requeue(self, server: Server, key: str, how: RequeueRequest) -> Any:  # noqa: ARG002 - a task's needs them
        """Requeue the task; here there is none.

        Raises:
            OnlyOneError: the error that asked for it.
        """
        how.error.__suppress_context__ = True
        raise how.error

    def is_current(self, options: EffectiveOptions, server: Server, key: str) -> bool:  # noqa: ARG002
        """The key is ours: whether the work is still to be done; a task raises what ends the call without it."""
        return True

    def can_take_queued(self, value: bytes) -> bool:  # noqa: ARG002
        """Whether the key may be taken over from `value`, which waits in a queue."""
        return True

    def at_end(self, options: EffectiveOptions, server: Server, key: str, ended_by: BaseException | None) -> AtEnd:  # noqa: ARG002
        """What the release stores, now that the run has ended, with an exception or without."""
        return _NOTHING


@dataclass(frozen=True, kw_only=True)
class EffectiveOptions(settings.Settings):
    """The effective options of a function, and what follows from them.

    Attributes:
        made_from: what `configure` had set when they were made.
        server: None where the locking is switched off.
        ttl: seconds for which the key is acquired at first.
        expiry: the same as it is sent.
        limit: seconds that a run may hold it, or infinity.
    """

    made_from: settings.Options
    server: Server | None
    ttl: float
    expiry: Expiry
    limit: float


class Decoration:
    """A decorated function: its key and its effective options.

    Attributes:
        function: what is decorated.
        name: the function's, with its module's.
        template: the key as it was given.
        key: makes the key of a call, without the prefix.
        plain: the caller of the function by itself.
        plain_bound: the same by hand, with a task as first argument.
        task: the task that is unique from queued to finished; None for a function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        template: Any,
        options: settings.Options,
        signature: Signature,
        app_options: AppOptions,
        *,
        takes_self: bool,
        task: Any = None,
    ) -> None:
        self.function = function
        self.name = name
        self.template = template
        self.task = task
        self.plain = Caller(name, TokenFactory(name))
        self.plain_bound = Caller(name, TokenFactory(name), bound=True)
        self._options = options
        # No `cached_property`: until Python 3.12 that has a lock, which a fork may leave locked for ever.
        self._bound_key = cache(partial(_compile_bound, template, signature))
        self._digest = cache(partial(compile_key, "{md5}", signature))
        self._app_options = app_options
        try:
            self.key = compile_key(template, signature)
        except KeyTemplateError as error:
            # It may be meant for the arguments without the task, which only `@app.task(bind=True)` will tell.
            if not takes_self:
                raise
            try:
                self._bound_key()
            except KeyTemplateError:
                raise error from None
            self.key = _refuse(error)
        self._options_by_app: dict[Any, EffectiveOptions] = {}

    def _find_options(self, caller: Caller) -> EffectiveOptions:
        """The effective options as of now; another call of `configure` makes them stale."""
        configured = settings.current
        of_app, app_server = self._app_options(caller.app)
        merged = settings.merge(self._options, configured, of_app)
        limit = inf if merged.timeout is None else merged.timeout
        ttl = limit if merged.lease is None else min(limit, merged.lease)
        server = find_server(settings.source_of(merged, app_server)) if settings.is_active(merged) else None
        options = EffectiveOptions(
            **vars(merged), made_from=configured, server=server, ttl=ttl, expiry=expiry_in(ttl), limit=limit
        )
        caller.check(options)
        self._options_by_app[caller.app] = options
        return options

    def options_for(self, caller: Caller) -> EffectiveOptions:
        """The effective options of a call."""
        options = self._options_by_app.get(caller.app)
        return self._find_options(caller) if options is None or options.made_from is not settings.current else options

    def digest(self, args: Args, kwargs: Kwargs) -> str:
        """What tells the calls with one key apart, by all of their arguments.

        Raises:
            UnkeyableArgument: where they cannot be compared.
        """
        return self._digest()(self.name, args, kwargs)

    def make_key(self, caller: Caller, args: Args, kwargs: Kwargs) -> str:
        """The key of a call, without the prefix; the task itself, as first argument, is no part of it."""
        if caller.bound:
            return self._bound_key()(caller.name, args[1:], kwargs)
        return self.key(caller.name, args, kwargs)


def _compile_bound(key: Any, signature: Signature) -> MakeKey:
    """The key of calls with the task itself as first argument."""
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind is not Parameter.VAR_POSITIONAL:
        signature = signature.replace(parameters=parameters[1:])
    return compile_key(key, signature)


def _refuse(error: KeyTemplateError) -> MakeKey:
    def make(_name: str, _args: Args, _kwargs: Kwargs) -> str:
        raise error

    return make
