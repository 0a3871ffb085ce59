"""What happened, and who listens. Logging is the hook that is always there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from .errors import LockUnavailable
from .lock.holder import Holder, printable
from .validation import check_callable

logger = logging.getLogger("only_one")


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
class Busy(Event):
    """A call found its key taken, and did not run.

    Attributes:
        value: what is stored at the key.
    """

    value: bytes

    @property
    def holder(self) -> Holder | None:
        """Who runs instead, or None where the value is not one of ours."""
        return Holder.parse(self.value)

    def __str__(self) -> str:
        holder = self.holder
        if holder is None:
            return (
                f"{self.name} did not run: {printable(self.key)} is taken by a value that is not a holder of only_one"
            )
        now = time.time()
        free = (
            "free when it ends"
            if holder.deadline is None
            else f"free in {max(0.0, holder.deadline - now):.1f} s at the latest"
        )
        since = f"{printable(holder.state)} for {now - holder.since:.1f} s"
        return f"{self.name} did not run: {printable(self.key)} is taken by {holder}, {since}, {free}"


@dataclass(frozen=True)
class Reclaimed(Event):
    """A call took over a key whose holder is certainly dead, or forgotten by this very process.

    Attributes:
        value: what was stored at the key.
    """

    value: bytes

    @property
    def holder(self) -> Holder | None:
        """Who held the key."""
        return Holder.parse(self.value)

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
class Lost(Event):
    """A run lost its key while it ran; told as soon as that is known.

    Attributes:
        reason: as in `LockLost`.
        value: what is stored at the key instead, where that is known.
    """

    reason: str
    value: str

    @property
    def holder(self) -> Holder | None:
        """Who holds the key now, where that is known."""
        return Holder.parse(self.value)

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


Hook = Callable[[Event], object]

_LEVELS: dict[type, int] = {
    Acquired: logging.DEBUG,
    Busy: logging.INFO,
    Reclaimed: logging.WARNING,
    Released: logging.DEBUG,
    Lost: logging.WARNING,
    Down: logging.DEBUG,
}

_hooks: tuple[list[Hook], ...] = ()


def subscribe(hook: Hook) -> Callable[[], None]:
    """Have `hook` called with every event of this process, in the thread in which it happens.

    Args:
        hook: takes one event; an error in it is logged and goes no further.

    Returns:
        A function that ends the subscription.

    Raises:
        ConfigurationError: if `hook` cannot be called.
    """
    global _hooks  # noqa: PLW0603 - replaced as a whole, so that emitting needs no lock
    check_callable("hook", hook, 1, "write subscribe(function), it is called with each event")
    subscription = [hook]  # an object of its own, as one hook may be subscribed twice
    _hooks = (*_hooks, subscription)

    def unsubscribe() -> None:
        global _hooks  # noqa: PLW0603
        _hooks = tuple(each for each in _hooks if each is not subscription)

    return unsubscribe


def wanted(kind: type[Event]) -> bool:
    """Whether anybody would see an event of this kind; building one is not free."""
    return bool(_hooks) or logger.isEnabledFor(_LEVELS[kind])


def emit(event: Event) -> None:
    """Tell everybody who listens."""
    with suppress(Exception):  # a filter or handler that fails is not to fail the call
        _log(event)
    for (hook,) in _hooks:
        try:
            hook(event)
        except Exception:
            logger.exception("a hook failed on %s: %r", type(event).__name__, hook)


def _log(event: Event) -> None:
    extra = {"only_one_event": type(event).__name__, "only_one_key": event.key, "only_one_name": event.name}
    logger.log(_LEVELS[type(event)], "%s", event, extra=extra)
