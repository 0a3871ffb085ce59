"""One covered run: take the key, run, give the key back. Sync and async stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from redis.exceptions import ResponseError

from . import settings
from .clock import now
from .errors import AlreadyRunning, ConfigurationError, LockUnavailable
from .events import Acquired, Busy, Down, Lost, Released, emit, logger, wanted
from .holder import Identity
from .keys import MakeKey
from .leases import Lease, hold, let_go, release_later
from .lock import AsyncLock, Lock, take, take_async
from .policies import CarryOn, skip
from .protocol import TROUBLE, Outcome
from .servers import Server, Source, find_server

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Policy = Callable[[Any], Any]

_current: ContextVar[Lease] = ContextVar("only_one_current_lock")

_CARRY_ON = object()
_UNFINISHED = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})


def current_lock() -> Lease:
    """The lock of the run that calls this: `.key`, `.holder`, `.expires_in`, `.is_held`, `.ensure_held()`.

    Raises:
        ConfigurationError: outside of a covered run.
    """
    try:
        return _current.get()
    except LookupError:
        msg = "current_lock() was called outside of a covered run: call it in a function that has @only_one above it"
        raise ConfigurationError(msg) from None


@dataclass(frozen=True)
class Options:
    """What one decorator says; what it leaves to the settings is UNSET."""

    timeout: float | None
    lease: float | None
    when_busy: Any
    when_down: Policy
    redis: Source | settings.Unset


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
        ttl_ms: the same in milliseconds.
        limit: seconds that a run may hold it, or infinity.
        free_in: seconds after which the key is free at the latest, or None if it is renewed without limit.
        renewed: whether the key is renewed while the run lives.
        when_busy: what a call gives whose key is taken.
        when_down: what a call gives whose server cannot be asked.
    """

    made_from: settings.Settings
    server: Server | None
    prefix: str
    ttl: float
    ttl_ms: int
    limit: float
    free_in: float | None
    renewed: bool
    when_busy: Policy
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
        self, function: Callable[..., Any], name: str, options: Options, compile_key: Callable[[bool], MakeKey]
    ) -> None:
        self.function = function
        self.name = name
        self.plain = Call(name, Identity(name))
        self.plain_bound = Call(name, Identity(name), bound=True)
        self._options = options
        self._compile_key = compile_key
        self.key = compile_key(False)
        self._bound_key: MakeKey | None = None
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


def _make_plan(options: Options, configured: settings.Settings) -> Plan:
    timeout, lease = options.timeout, options.lease
    if timeout is None and lease is None:
        timeout, lease = settings.check_times(configured.timeout, configured.lease)
    if timeout is None and lease is None:
        lease = settings.DEFAULT_LEASE
    limit = inf if timeout is None else timeout
    ttl = min(limit, inf if lease is None else lease)
    source = options.redis if options.redis is not settings.UNSET else None
    return Plan(
        made_from=configured,
        server=find_server(source or settings.source_of(configured)) if settings.is_active(configured) else None,
        prefix=settings.most_specific(configured.prefix, settings.DEFAULT_PREFIX),
        ttl=ttl,
        ttl_ms=round(ttl * 1000),
        limit=limit,
        free_in=None if limit == inf else limit,
        renewed=ttl < limit,
        when_busy=settings.most_specific(options.when_busy, configured.when_busy, skip),
        when_down=options.when_down,
    )


class _Begun:
    """A call that has asked for its key, and whose run, if there is one, has to be ended."""

    __slots__ = ("call", "lease", "plan", "server")

    def __init__(self, plan: Plan, server: Server, call: Call, lease: Lease) -> None:
        self.plan = plan
        self.server = server
        self.call = call
        self.lease = lease

    def taken(self) -> None:
        """The key is ours."""
        if self.plan.renewed:
            hold(self.lease)
        if wanted(Acquired):
            emit(Acquired(self.lease.key, self.call.name, self.lease.token))

    def down(self, problem: Exception) -> Any:
        """What `when_down` gives, or `_CARRY_ON`."""
        # A server that refuses has done with what it was sent before, if redis-py has sent it twice.
        self.adrift(settled=isinstance(problem, ResponseError))
        error = LockUnavailable(self.lease.key, f"{type(problem).__name__}: {problem}")
        error.__cause__ = problem
        if wanted(Down):
            emit(Down(self.lease.key, self.call.name, error))
        try:
            return self.plan.when_down(error)
        except CarryOn:
            self.lease.lose("unavailable")
            return _CARRY_ON

    def adrift(self, *, settled: bool) -> None:
        """Whether the token stands on the server is not known: see to it in the background."""
        lease = self.lease
        release_later(lease.client, self.server.dialect, lease.key, lease.token, lease.expires_at, settled=settled)

    def ended(self) -> None:
        """The function has returned or raised: the key is renewed no more, and what was lost until now is told."""
        let_go(self.lease)
        self._tell_loss()

    def released(self, outcome: Outcome | None) -> None:
        """The key has been given back; None where the server could not be asked."""
        lease = self.lease
        if outcome is None:
            self.adrift(settled=True)
        elif outcome.fate == "taken" and lease.is_held:
            lease.lose("taken", outcome.value)
            self._tell_loss()
        if wanted(Released):
            emit(Released(lease.key, self.call.name, outcome.fate if outcome else "unknown", now() - lease.begun))

    def _tell_loss(self) -> None:
        lost = self.lease.loss()
        if lost is not None and wanted(Lost):
            emit(Lost(self.lease.key, self.call.name, lost.reason, lost.value))


def _begin(plan: Plan, server: Server, call: Call, key: str, token: bytes, begun: float) -> _Begun:
    return _Begun(plan, server, call, Lease(server.client, key, token, begun, plan.ttl, plan.limit))


def _busy(plan: Plan, call: Call, key: str, value: bytes) -> Any:
    """What `when_busy` gives."""
    if wanted(Busy):
        emit(Busy(key, call.name, value))
    if plan.when_busy is skip:
        return None
    try:
        return plan.when_busy(AlreadyRunning(key, value.decode(errors="backslashreplace")))
    except CarryOn:
        msg = "when_busy ends in carry_on, which would run two at a time: write when_busy=skip or when_busy=fail"
        raise ConfigurationError(msg) from None


def _refuse_unfinished(cover: Cover, result: Any) -> None:
    """The key would be given back before the work is done."""
    getattr(result, "close", lambda: None)()
    msg = (
        f"{cover.name} returned a {type(result).__name__}, which has yet to run, and nothing would cover it: "
        "write @only_one directly above the async def, or above a function that consumes the generator"
    )
    raise ConfigurationError(msg)


def run(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    plan = cover.plan
    if plan is None or plan.made_from is not settings.current:
        plan = cover.make_plan()
    key = plan.prefix + (cover.bound_key if call.bound else cover.key)(call.name, args, kwargs)
    server = plan.server
    if server is None:
        return _run_as(_unlocked(key), cover, args, kwargs)
    token, begun = call.identity.token(plan.free_in), now()
    found, problem = None, None
    try:
        found = take(server.client, server.dialect, key, token, plan.ttl_ms)
    except TROUBLE as error:
        problem = error
    except BaseException:
        _begin(plan, server, call, key, token, begun).adrift(settled=False)
        raise
    if found is not None:
        return _busy(plan, call, key, found)
    this = _begin(plan, server, call, key, token, begun)
    if problem is not None:
        instead = this.down(problem)
        return _run_as(this.lease, cover, args, kwargs) if instead is _CARRY_ON else instead
    try:
        this.taken()
        return _run_as(this.lease, cover, args, kwargs)
    finally:
        _give_back(this, Lock.held(server.client, server.dialect, key, token, plan.ttl))


async def run_async(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Run the function if its key is free, and give what the policies say if not."""
    plan = cover.plan
    if plan is None or plan.made_from is not settings.current:
        plan = cover.make_plan()
    key = plan.prefix + (cover.bound_key if call.bound else cover.key)(call.name, args, kwargs)
    server = plan.server
    if server is None:
        return await _run_as_async(_unlocked(key), cover, args, kwargs)
    client = await server.async_client()
    token, begun = call.identity.token(plan.free_in), now()
    found, problem = None, None
    try:
        found = await take_async(client, server.dialect, key, token, plan.ttl_ms)
    except TROUBLE as error:
        problem = error
    except BaseException:
        _begin(plan, server, call, key, token, begun).adrift(settled=False)
        raise
    if found is not None:
        return _busy(plan, call, key, found)
    this = _begin(plan, server, call, key, token, begun)
    if problem is not None:
        instead = this.down(problem)
        return await _run_as_async(this.lease, cover, args, kwargs) if instead is _CARRY_ON else instead
    try:
        this.taken()
        return await _run_as_async(this.lease, cover, args, kwargs)
    finally:
        await _give_back_async(this, AsyncLock.held(client, server.dialect, key, token, plan.ttl))


def _run_as(lease: Lease, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    reset = _current.set(lease)
    try:
        result = cover.function(*args, **kwargs)
        if type(result) in _UNFINISHED:
            _refuse_unfinished(cover, result)
        return result
    finally:
        _current.reset(reset)


async def _run_as_async(lease: Lease, cover: Cover, args: Args, kwargs: Kwargs) -> Any:
    reset = _current.set(lease)
    try:
        work: Coroutine[Any, Any, Any] = cover.function(*args, **kwargs)
        return await work
    finally:
        _current.reset(reset)


def _unlocked(key: str) -> Lease:
    """The lock of a run where the locking is switched off: held, for all that the run can see."""
    return Lease(None, key, b"", now(), inf, inf)


def _give_back(this: _Begun, lock: Lock) -> None:
    if this.lease.is_inherited:
        return
    this.ended()
    outcome = None
    try:
        outcome = lock.give_back()
    except Exception as error:  # noqa: BLE001 - nothing in here may take the place of the run's own result or exception
        logger.debug("%s could not be released, and will be in the background: %s", this.lease.key, error)
    finally:
        this.released(outcome)


async def _give_back_async(this: _Begun, lock: AsyncLock) -> None:
    if this.lease.is_inherited:
        return
    this.ended()
    outcome = None
    try:
        outcome = await lock.give_back()
    except Exception as error:  # noqa: BLE001 - nothing in here may take the place of the run's own result or exception
        logger.debug("%s could not be released, and will be in the background: %s", this.lease.key, error)
    finally:
        this.released(outcome)
