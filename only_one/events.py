"""Events (acquired, busy, taken over, released, lost, down), the level at which each is logged, and ``subscribe``."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from logging import DEBUG, ERROR, INFO, WARNING, Logger, getLogger
from typing import Any, Literal, ParamSpec

from .driver import is_of_signal_handler
from .errors import HasHolder, LockUnavailable
from .holder import Holder, printable
from .option_values import check_callable

P = ParamSpec("P")

logger = getLogger("only_one")


@dataclass(frozen=True)
class Event:
    """Something that happened to a call; each subclass adds fields of its own.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        name: the name of the task or function.
    """

    key: str
    name: str


@dataclass(frozen=True)
class Acquired(Event):
    """A call acquired its key, and runs, unless its work is done already; logged at DEBUG.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        name: the name of the task or function.
        token: the value that the call stored at the key, as bytes.
    """

    token: bytes

    @property
    def holder(self) -> Holder | None:
        """The call, as other calls see it."""
        return Holder.parse(self.token)

    def __str__(self) -> str:
        return f"{self.name} holds {printable(self.key)}"


@dataclass(frozen=True)
class Busy(HasHolder, Event):
    """A call found its key busy, and did not run; logged at INFO.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        name: the name of the task or function.
        value: the value that is stored at the key, as bytes; empty if it is not known, as for a
            call that was not queued because an equal task of ``buffer_one`` waits.
        holder: the ``Holder`` that the value names; None if it names none.
    """

    value: bytes

    def __str__(self) -> str:
        holder, now = self.holder, time.time()
        taken = f"{self.name} did not run: {printable(self.key)} is taken"
        if not self.value:
            return f"{taken} by a value that is not known, or an equal task waits for it"
        if holder is None:
            return f"{taken} by a value that is not a holder of only_one"
        since = f"{printable(holder.state)} for {max(0, now - holder.since):.1f} s"
        return f"{taken} by {holder}, {since}, free {_when_free(holder, now)}"


def _when_free(holder: Holder, now: float) -> str:
    if holder.deadline is None:
        return "when it ends"
    if holder.deadline <= now:  # the run has called `extend`, or its machine's clock differs
        return "when its key expires"
    but = ", unless it is extended" if holder.state == "running" else ""
    return f"in {holder.deadline - now:.1f} s at the latest{but}"


@dataclass(frozen=True)
class Reclaimed(HasHolder, Event):
    """A call took over the key of a run whose process has died; logged at WARNING.

    A key is taken over without an event if a waiting task has it, or if an ended call of this very process left it.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        name: the name of the task or function that took the key over.
        value: the value that was stored at the key, as bytes.
        holder: the ``Holder`` that the value names: the dead one.
    """

    value: bytes

    def __str__(self) -> str:
        return f"{self.name} took over {printable(self.key)} from {self.holder}, which has ended without releasing it"


@dataclass(frozen=True)
class Released(Event):
    """A run ended and released its key; logged at DEBUG.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        name: the name of the task or function.
        outcome: ``"held"`` (the key was ours until now), ``"gone"`` (the key was missing, as it is
            after a release whose first reply was lost, too), ``"taken"`` (the key had another
            holder, and was left alone), ``"unknown"`` (the server could not be asked, an exception
            interrupted the call, or the key expired before its retained value was stored; the
            release goes on in the background), or ``"kept"`` (the key stays for the rest of
            ``at_least``).
        seconds: the seconds from the question for the key to the end of its release.
    """

    outcome: Literal["held", "gone", "taken", "unknown", "kept"]
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} released {printable(self.key)} after {self.seconds:.3f} s ({self.outcome})"


@dataclass(frozen=True)
class Lost(HasHolder, Event):
    """A run lost its key; emitted as soon as the loss is known, and logged at WARNING.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        name: the name of the task or function.
        reason: as in ``LockLost``: ``"overrun"`` (the run took longer than ``timeout``), ``"expired"``
            (the key was not renewed in time), ``"taken"`` (another holder has the key), or
            ``"deleted"`` (the key was removed by hand, or by a restart).
        value: the value that is stored at the key now, a str; empty if there is none, or it is not
            known.
        holder: the ``Holder`` that the value names; None if it names none.
    """

    reason: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} lost {printable(self.key)} while it ran ({self.reason}): another may have run beside it"


@dataclass(frozen=True)
class Down(Event):
    """A call could not ask the server for its key; logged at DEBUG.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        name: the name of the task or function.
        error: the error that ``when_down`` is called with.
    """

    error: LockUnavailable

    def __str__(self) -> str:
        return f"{self.name}: {self.error}"


_LEVELS: dict[Any, int] = {Acquired: DEBUG, Busy: INFO, Reclaimed: WARNING, Released: DEBUG, Lost: WARNING, Down: DEBUG}

_hooks: dict[object, Callable[[Event], object]] = {}

_warned_of: set[object] = set()
"""What this process was warned of, by ``warn_once``."""


def warn_of_first_skip(key: str, name: str, value: bytes) -> None:
    """Warn of the first skip of this process if the log shows none: a job that was skipped looks as if it was done."""
    if Busy in _warned_of or _is_shown(INFO):
        return
    busy = Busy(key, name, value)
    how = "only this first skip of the process is a warning: set the level of the log to INFO to see all of them"
    warn_once(Busy, "%s (%s)", busy, how, extra=_extra(busy))


def _is_shown(level: int) -> bool:
    """Whether a handler of our log, or of one above it, shows records of a level."""
    each: Logger | None = logger if logger.isEnabledFor(level) else None
    while each is not None:
        if any(handler.level <= level for handler in each.handlers):
            return True
        each = each.parent if each.propagate else None
    return False


def log(level: int, message: str, *args: object, **options: Any) -> None:
    """Log a line that is no event. An error of the user's filter or handler fails no call."""
    try:
        logger.log(level, message, *args, **options)
    except Exception as error:
        if is_of_signal_handler(error):
            raise


def warn_once(about: object, message: str, *args: object, log: Callable[..., None] = log, **options: Any) -> None:
    """Log a warning, once for each ``about``; ``log`` is a function like ours."""
    if about not in _warned_of:
        _warned_of.add(about)
        log(WARNING, message, *args, **options)


def _extra(event: Event) -> dict[str, str]:
    return {"only_one_event": type(event).__name__, "only_one_key": event.key, "only_one_name": event.name}


def subscribe(hook: Callable[[Event], object]) -> Callable[[], None]:
    """Have ``hook`` called with every event of this process, in the thread in which the event happens.

    Args:
        hook: a function of one event; an error in it is logged and goes no further.
            It does not get the events of calls that it makes itself.

    Returns:
        A function that ends the subscription.

    Raises:
        ConfigurationError: if ``hook`` cannot be called with one argument.
    """
    check_callable("hook", hook, 1, "write subscribe(function), it is called with each event")
    subscription = object()  # one hook may be subscribed twice
    _hooks[subscription] = hook

    def unsubscribe() -> None:
        _hooks.pop(subscription, None)

    return unsubscribe


def emit(kind: Callable[P, Event], *values: P.args, **named: P.kwargs) -> None:
    """Log an event and call the hooks with it. To save time, it is built only if the log or a hook gets it."""
    if not _hooks and not logger.isEnabledFor(_LEVELS[kind]):
        return
    event = kind(*values, **named)
    for hook in (_log, *_hooks.copy().values()):  # of a copy, because others may subscribe meanwhile
        _tell(hook, event)


def _log(event: Event) -> None:
    logger.log(_LEVELS[type(event)], "%s", event, extra=_extra(event))


_at_work: ContextVar[tuple[object, ...]] = ContextVar("only_one_hooks", default=())
"""The hooks that have been called in this context, and have not returned yet."""


def _tell(hook: Callable[[Event], object], event: Event) -> None:
    """Call a hook with an event. An error of the hook is logged and fails no call; one of a signal handler is raised.

    A hook does not get the events of calls that it makes itself, because it might call itself without end.
    """
    at_work = _at_work.get()
    if any(each is hook for each in at_work):
        return
    try:
        _at_work.set((*at_work, hook))
        hook(event)
    except (Exception, SystemExit) as error:
        # `sys.exit()` ends the process, except in the thread that tells of a loss.
        ends_process = isinstance(error, SystemExit) and not isinstance(event, Lost)
        if ends_process or is_of_signal_handler(error):
            raise
        log(ERROR, "a hook failed on %s: %r", type(event).__name__, hook, exc_info=True)
    finally:
        _at_work.set(at_work)
