"""What happened, and who listens. Logging is the hook that is always there."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from logging import DEBUG, INFO, WARNING, getLogger
from typing import Literal

from .errors import HasHolder, LockUnavailable
from .lock.holder import Holder, printable
from .option_values import check_callable

logger = getLogger("only_one")


@dataclass(frozen=True)
class Event:
    """Something that happened to a call; the kinds below add what else is known of it.

    Attributes:
        key: the key as it is in Redis.
        name: the task's or function's name.
    """

    key: str
    name: str


@dataclass(frozen=True)
class Acquired(Event):
    """A call acquired its key and runs.

    Attributes:
        token: the value that it stored at the key.
    """

    token: bytes

    @property
    def holder(self) -> Holder | None:
        """The call, as others see it."""
        return Holder.parse(self.token)

    def __str__(self) -> str:
        return f"{self.name} holds {printable(self.key)}"


@dataclass(frozen=True)
class Busy(HasHolder, Event):
    """A call found its key taken, and did not run.

    Attributes:
        value: what is stored at the key.
    """

    value: bytes

    def __str__(self) -> str:
        holder, now = self.holder, time.time()
        taken = f"{self.name} did not run: {printable(self.key)} is taken by"
        if holder is None:
            return f"{taken} a value that is not a holder of only_one"
        since = f"{printable(holder.state)} for {now - holder.since:.1f} s"
        end = "when it ends" if holder.deadline is None else f"in {max(0.0, holder.deadline - now):.1f} s at the latest"
        return f"{taken} {holder}, {since}, free {end}"


@dataclass(frozen=True)
class Reclaimed(HasHolder, Event):
    """A call took over a key whose holder is certainly dead, or forgotten by this very process.

    Attributes:
        value: what was stored at the key.
    """

    value: bytes

    def __str__(self) -> str:
        return f"{self.name} took over {printable(self.key)} from {self.holder}, which is dead"


@dataclass(frozen=True)
class Released(Event):
    """A run ended and released its key.

    Attributes:
        outcome: "held" (it was ours until now), "gone" (it was not there any more, which is also how a release looks
            whose first reply was lost), "taken" (it was somebody else's, and left alone), "unknown" (the server could
            not be asked; it is released in the background), "kept" (it stays for the rest of `at_least`).
        seconds: how long the key was held.
    """

    outcome: Literal["held", "gone", "taken", "unknown", "kept"]
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} released {printable(self.key)} after {self.seconds:.3f} s ({self.outcome})"


@dataclass(frozen=True)
class Lost(HasHolder, Event):
    """A run lost its key while it ran; told as soon as that is known.

    Attributes:
        reason: as in `LockLost`.
        value: what is stored at the key instead, where that is known.
    """

    reason: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} lost {printable(self.key)} while it ran ({self.reason}): another may have run beside it"


@dataclass(frozen=True)
class Down(Event):
    """A call could not ask the server for its key.

    Attributes:
        error: what `when_down` is told.
    """

    error: LockUnavailable

    def __str__(self) -> str:
        return f"{self.name}: {self.error}"


_LEVELS = {Acquired: DEBUG, Busy: INFO, Reclaimed: WARNING, Released: DEBUG, Lost: WARNING, Down: DEBUG}

_hooks: dict[object, Callable[[Event], object]] = {}


def subscribe(hook: Callable[[Event], object]) -> Callable[[], None]:
    """Have `hook` called with every event of this process, in the thread in which it happens.

    Args:
        hook: takes one event; an error in it is logged and goes no further.

    Returns:
        A function that ends the subscription.

    Raises:
        ConfigurationError: if `hook` cannot be called.
    """
    check_callable("hook", hook, 1, "write subscribe(function), it is called with each event")
    subscription = object()  # one hook may be subscribed twice
    _hooks[subscription] = hook

    def unsubscribe() -> None:
        _hooks.pop(subscription, None)

    return unsubscribe


def wanted(kind: type[Event]) -> bool:
    """Whether anybody would see an event of this kind; building one is not free."""
    return bool(_hooks) or logger.isEnabledFor(_LEVELS[kind])


def emit(event: Event) -> None:
    """Tell everybody who listens."""
    with suppress(Exception):  # a filter or handler that fails is not to fail the call
        extra = {"only_one_event": type(event).__name__, "only_one_key": event.key, "only_one_name": event.name}
        logger.log(_LEVELS[type(event)], "%s", event, extra=extra)
    for hook in _hooks.copy().values():  # others may subscribe meanwhile; copying needs no lock
        try:
            hook(event)
        except Exception:
            logger.exception("a hook failed on %s: %r", type(event).__name__, hook)
