"""The lease of a run: how long it holds its key, how it lengthens that, its fencing token, and ``current_lock``."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from math import inf
from typing import Any

from only_one import option_values
from only_one.clock import now
from only_one.connections.server import Server
from only_one.driver import drive
from only_one.errors import ConfigurationError, LockLost
from only_one.forks import see_fork
from only_one.holder import Holder

from .commands import FENCE, RENEW, Script, evaluate


class Lease:
    """The lock of one run; ``current_lock`` returns it.

    All attributes are known without a round trip, except ``fence``.
    ``extend`` and ``fence`` cost one round trip, and wait for it, in async runs too.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        token: the value that is stored at the key while it is ours.
        reason: why the key is lost, as in ``LockLost``, or ``"released"`` after the run; None while
            it is held.
        value: the value that is stored at the key since it was lost; empty if there is none, or it
            is not known.
        trouble: the error of the last renewal, or None if that succeeded.
        expires_at: until when the server lets the key live at least, by ``clock.now()``.
        asked_until: until when it does if an extension was done that got no answer.
        renewer: the object that renews the lease and tells its run of a loss; None before that begins.
    """

    reason: str | None = None
    value = b""
    trouble: Exception | None = None
    expires_at = asked_until = -inf
    renewer: Any = None
    _fence: int | None = None

    def __init__(
        self, server: Server | None, key: str, token: bytes, asked_at: float, ttl: float, limit: float
    ) -> None:
        """A lease that ends at ``asked_at + ttl`` unless it is renewed.

        Args:
            server: the server that stores the key; None if the locking is switched off.
            key: the key as it is in Redis.
            token: the value with which the key was acquired.
            asked_at: when the command that acquired the key was about to be sent, by
                ``clock.now()``.
            ttl: seconds for which the key was acquired, and which each renewal gives.
            limit: seconds after which the key is not renewed any more; infinity for never.
        """
        self.server = server
        self.key = key
        self.token = token
        self.asked_at = asked_at
        self.ttl = ttl
        self.ends_at = asked_at + limit
        self.renews = ttl < limit  # else it was acquired for all its time
        self.note_expiry(asked_at, ttl)
        # A list of one function at most, because `pop` gives it to one thread only.
        self.on_loss: list[Callable[[LockLost], None]] = []

    @property
    def holder(self) -> Holder | None:
        """The ``Holder`` of this run, as other calls see it."""
        return Holder.parse(self.token)

    @property
    def expires_in(self) -> float:
        """Seconds until the key expires, unless it is renewed; 0 once it is lost."""
        return max(0.0, self.expires_at - now()) if self.reason is None else 0.0

    def note_expiry(self, sent: float, ttl: float) -> None:
        """Note that the server lets the key live for ``ttl`` seconds at least, by a command that was sent then."""
        self.expires_at = max(self.expires_at, sent + ttl)
        # After a third of the time. A lease that lasts until the end is renewed no more.
        self.renew_at = sent + ttl / 3 if self.renews and self.expires_at < self.ends_at else self.ends_at

    def try_again_at(self, moment: float) -> None:
        """Try the next renewal at ``moment``; if the key expires before that, note its loss then."""
        self.renew_at = min(moment, self.expires_at)

    @property
    def is_held(self) -> bool:
        """Whether the key is ours, as far as this process can know."""
        return self.reason is None and now() < self.expires_at

    def ensure_held(self) -> None:
        """Stop a run that has lost its key.

        Raises:
            LockLost: if the key is not ours any more.
        """
        if lost := self.loss():
            raise lost

    def loss(self) -> LockLost | None:
        """The error that says how the key was lost; None while it is ours."""
        if self.is_held:
            return None
        reason = self.reason or self.reason_by(None)
        lost = LockLost(self.key, reason, self.value.decode(errors="backslashreplace"))
        lost.__cause__ = self.trouble if reason == "expired" else None
        return lost

    def reason_by(self, reply: object) -> str:
        """Why the key is lost. ``reply`` is the value that is stored there, or None if the key is missing."""
        if reply is not None:
            return "taken"
        moment = now()
        if moment >= self.ends_at:
            return "overrun"
        return "expired" if moment >= self.expires_at else "deleted"

    def lose(self, reason: str, value: bytes = b"") -> str:
        """Note that the key is lost, and return the reason; the reason that was noted first counts."""
        if self.reason is None:
            self.reason, self.value = reason, value
        return self.reason

    def tell_loss(self, lost: LockLost) -> None:
        """Tell the run of its loss, once."""
        try:
            tell = self.on_loss.pop()
        except IndexError:
            return
        tell(lost)

    def extend(self, seconds: option_values.Seconds) -> None:
        """Let the run hold its key for longer, at the cost of one round trip.

        Args:
            seconds: seconds or a timedelta by which the ``timeout`` is lengthened.
                Without a ``timeout`` nothing is done, because the key is renewed until the run ends.
                If two threads extend it at the same time, only one of the two extensions counts.

        Raises:
            ConfigurationError: for a time that cannot work.
            LockLost: if the key is not ours any more.
            redis.exceptions.RedisError: if the server cannot be asked.
        """
        ends_at = self.ends_at + option_values.seconds("extend", seconds, "to release the key, return")
        self.ensure_held()
        if ends_at == inf:
            return
        asked = now()
        # A key that is renewed gets no more than its lease, so that it does not outlive a dead holder for longer.
        ttl = min(self.ttl, ends_at - asked) if self.renews else ends_at - asked
        self.asked_until = asked + ttl
        self._ask(RENEW, round(ttl * 1000))
        self.ends_at = ends_at
        self.note_expiry(asked, ttl)
        self.renewer.wake_by(self.renew_at)

    @property
    def fence(self) -> int:
        """The fencing token of this run: an int, higher than that of every earlier run with this key.

        A run may go on after it has lost its key, and write late. A store is safe from that if each
        write carries the fencing token, and the store refuses a token that is lower than the
        highest it has seen.
        Exception: the number may be lower if the server's clock was set back, and the server has
        lost or forgotten the last number, which it remembers for a day.
        The token is made on first use, at the cost of one round trip.
        Fencing tokens are the idea of Martin Kleppmann, in "How to do distributed locking".

        Raises:
            LockLost: if the key is not ours any more.
            redis.exceptions.RedisError: if the server cannot be asked.
        """
        fence = self._fence
        if fence is None:
            asked: int = self._ask(FENCE, beside=(f"{{{self.key}}}:fence",))
            # Atomic: if another thread of the run has asked meanwhile, both get its fencing token.
            fence = vars(self).setdefault("_fence", asked)
        return fence

    def _ask(self, script: Script, *args: int, beside: tuple[str, ...] = ()) -> Any:
        """The number that a script replies while the key is ours; the time in microseconds if the locking is off.

        Raises:
            LockLost: if the key is not ours any more: then the reply is the value that is stored
                there.
        """
        see_fork()  # before the question, because the parent's connections are not the child's
        self.ensure_held()
        commands = evaluate(script, self.key, self.token, *args, beside=beside)
        reply = drive(self.server.client, commands) if self.server else time.time_ns() // 1000
        if not isinstance(reply, int):
            self.renewer.note_loss(self, reply)
        # The key is lost by this reply, or another thread has noted a loss meanwhile. If the expiry that is known here
        # has only passed meanwhile, that is no loss: the reply says that the key was ours.
        if self.reason is not None:
            self.ensure_held()
        return reply


current: ContextVar[Lease | None] = ContextVar(__name__, default=None)
"""The lock of the run that is under way in this context."""


def current_lock() -> Lease:
    """The lock of the run that calls this, to look at it, lengthen it, or get its fencing token.

    Returns:
        The lock, with ``.key``, ``.holder``, ``.expires_in``, ``.is_held``, ``.ensure_held()``,
        ``.extend(seconds)`` and ``.fence``.

    Raises:
        ConfigurationError: outside of the run of a decorated function.
    """
    lease = current.get()
    if lease is None:
        msg = "current_lock() was called outside of a decorated function: call it in one, and give its threads the lock"
        raise ConfigurationError(msg)
    return lease
