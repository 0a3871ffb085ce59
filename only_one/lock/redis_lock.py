"""The lock classes: redis-py's ``Lock`` and ``AsyncLock`` with our commands, so a lost reply gives no wrong answer."""

import math
from typing import Any

import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockNotOwnedError

from only_one.clock import now
from only_one.connections.server_features import Features
from only_one.driver import Commands, drive, drive_async

from . import commands


class _Common:
    """The code that both locks share: all but the sending of commands, which ``AsyncLock`` awaits.

    Attributes:
        features: which commands the server knows.
        expires_at: when the key that was acquired last expires unless it is extended, by ``clock.now()``.
    """

    local: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.features = Features()
        self.expires_at = math.inf

    def do_acquire(self: Any, token: Any) -> Any:
        """Acquire the key if it is free."""
        return self._drive(self.redis, self._acquire(token))

    def do_release(self: Any, expected_token: Any) -> Any:
        """Delete the key if it is ours.

        Raises:
            LockNotOwnedError: if the key has another owner, or has expired.
        """
        return self._drive(self.redis, self._release(expected_token))

    def _acquire(self: Any, token: bytes) -> Commands[bool]:
        # Counted from before the command is sent, so the holder never takes the key for its own after the expiry.
        self.expires_at = now() + (self.timeout or math.inf)
        return (yield from commands.acquire(self.features, self.name, token, self.timeout or None)) is None

    def _release(self: Any, token: bytes) -> Commands[None]:
        result = yield from commands.end(self.features, self.name, token)
        # A key that is missing before its expiry was deleted by a release of ours whose reply was lost.
        has_expired = result.status == "gone" and now() >= self.expires_at
        if has_expired or result.status == "taken":
            msg = "Cannot release a lock that's no longer owned"
            raise LockNotOwnedError(msg)


class Lock(_Common, redis.lock.Lock):
    """A drop-in replacement for redis-py's ``Lock``."""

    _drive = staticmethod(drive)


class AsyncLock(_Common, redis.asyncio.lock.Lock):
    """A drop-in replacement for redis-py's asyncio ``Lock``."""

    _drive = staticmethod(drive_async)
