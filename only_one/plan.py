"""What the decorator and the settings come to, for the calls of one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from . import settings
from .errors import KeyTemplateError
from .holder import Identity
from .keys import MakeKey
from .policies import skip
from .protocol import Expiry, expiry_in
from .servers import Server, Source, find_server

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Policy = Callable[[Any], Any]


@dataclass(frozen=True)
class Options:
    """What one decorator says; what it leaves to the settings is UNSET."""

    timeout: float | None
    lease: float | None
    has_times: bool
    at_least: float
    when_busy: Any
    when_lost: Policy
    when_down: Policy
    takeover: Any
    redis: Source | None


@dataclass(frozen=True)
class Call:
    """Who calls, as the key and the token name it.

    Attributes:
        name: the task's name, or the function's.
        identity: the same in a token.
        bound: the first argument is the task itself.
    """

    name: str
    identity: Identity
    bound: bool = False


@dataclass(frozen=True)
class Plan:
    """What the decorator and the settings come to.

    Attributes:
        made_from: the settings that it was made from.
        server: None where the locking is switched off.
        prefix: what every key begins with.
        ttl: seconds that the key is first taken for.
        expiry: the same as it is sent.
        limit: seconds that a run may hold it, or infinity.
        free_in: seconds after which the key is free at the latest, or None if it is renewed without limit.
        at_least: seconds for which the key is kept, from when it was taken, after a run that has succeeded.
        takeover: whether a dead holder on this machine does not block.
        when_busy: what a call gives whose key is taken.
        when_lost: what is done about a key that is lost during the run.
        when_down: what a call gives whose server cannot be asked.
    """

    made_from: settings.Settings
    server: Server | None
    prefix: str
    ttl: float
    expiry: Expiry
    limit: float
    free_in: float | None
    at_least: float
    takeover: bool
    when_busy: Policy
    when_lost: Policy
    when_down: Policy


class Cover:
    """A function, and how its runs are covered.

    Attributes:
        function: what is covered.
        name: the function's, with its module's.
        key: makes the key of a call, without the prefix.
        plain: the call of the function by itself.
        plain_bound: the same by hand, with a task as first argument.
        plan: what was in force when it was called last.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: Options,
        compile_key: Callable[[bool], MakeKey],
        *,
        takes_self: bool,
    ) -> None:
        self.function = function
        self.name = name
        self.plain = Call(name, Identity(name))
        self.plain_bound = Call(name, Identity(name), bound=True)
        self._options = options
        self._compile_key = compile_key
        self._bound_key: MakeKey | None = None
        try:
            self.key = compile_key(False)
        except KeyTemplateError as error:
            # It may be meant for the arguments without the task, which only `@app.task(bind=True)` will tell.
            if not takes_self:
                raise
            with suppress(KeyTemplateError):
                self._bound_key = compile_key(True)
            if self._bound_key is None:
                raise
            self.key = _refuse(error)
        self.plan: Plan | None = None

    def bound_key(self, name: str, args: Args, kwargs: Kwargs) -> str:
        """The key of a call whose first argument is the task itself, which is no part of the key."""
        if self._bound_key is None:
            self._bound_key = self._compile_key(True)
        return self._bound_key(name, args[1:], kwargs)

    def make_plan(self) -> Plan:
        """What is in force now; to be made anew when `configure` has been called since."""
        self.plan = _make_plan(self._options, settings.current)
        return self.plan


def _refuse(error: KeyTemplateError) -> MakeKey:
    def make(_name: str, _args: Args, _kwargs: Kwargs) -> str:
        raise error

    return make


def _make_plan(options: Options, configured: settings.Settings) -> Plan:
    timeout, lease = options.timeout, options.lease
    if not options.has_times:
        timeout, lease = settings.check_times(configured.timeout, configured.lease)
    if timeout is None and lease is None:
        lease = settings.DEFAULT_LEASE
    limit = inf if timeout is None else timeout
    ttl = min(limit, inf if lease is None else lease)
    source = settings.source_of(configured) if options.redis is None else options.redis
    return Plan(
        made_from=configured,
        server=find_server(source) if settings.is_active(configured) else None,
        prefix=settings.most_specific(configured.prefix, settings.DEFAULT_PREFIX),
        ttl=ttl,
        expiry=expiry_in(ttl),
        limit=limit,
        free_in=None if limit == inf else limit,
        at_least=options.at_least,
        takeover=settings.most_specific(options.takeover, configured.takeover, True),
        when_lost=options.when_lost,
        when_busy=settings.most_specific(options.when_busy, configured.when_busy, skip),
        when_down=options.when_down,
    )
