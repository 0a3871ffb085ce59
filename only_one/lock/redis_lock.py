"""redis-py's `Lock` and `AsyncLock`, which send our own commands, so that a lost reply gives no wrong answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockNotOwnedError

from .commands import (
    NEVER,
    Commands,
    Expiry,
    Features,
    MarkerUpdate,
    ReleaseResult,
    acquire,
    drive,
    drive_async,
    expiry_in,
    now,
    release,
    replace,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class _Common:
    """What the two locks share: all but the sending.

    Attributes:
        features: which commands the server knows.
        expires_at: when the key that was acquired last expires, by `commands.now()`.
    """

    name: Any
    timeout: float | None
    local: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See redis-py."""
        super().__init__(*args, **kwargs)
        self.features = Features()
        self.expires_at = math.inf

    @classmethod
    def held(cls, client: Any, features: Features, name: str, token: bytes, ttl: float) -> Self:
        """The lock of a key that was acquired with `token` for `ttl` seconds; a call that is skipped makes none."""
        lock = cls(client, name, ttl, thread_local=False)
        lock.features = features  # which all locks in a server share
        lock.local.token = token
        return lock

    def end(self, retained: tuple[bytes, int] | None, marker: MarkerUpdate | None) -> Commands[ReleaseResult]:
        """Delete the key, or store a value in place of the token for some milliseconds, if the key is ours."""
        token = self.local.token
        if retained:
            return replace(self.name, token, *retained, marker)
        return release(self.features, self.name, token, marker)

    def _expiry(self) -> Expiry:
        # Counted from before the command is sent: the key never outlives what its holder believes.
        self.expires_at = now() + self.timeout if self.timeout else math.inf
        return expiry_in(self.timeout) if self.timeout else NEVER

    @contextmanager
    def _living_on(self, seconds: float, *, from_now: bool) -> Iterator[None]:
        asked = now()
        yield
        self.expires_at = seconds + (asked if from_now else self.expires_at)

    def _check(self, became: ReleaseResult) -> None:
        # A key that is gone before its time was deleted by a release of ours whose reply was lost.
        if became.status == "taken" or (became.status == "gone" and now() >= self.expires_at):
            msg = "Cannot release a lock that's no longer owned"
            raise LockNotOwnedError(msg)


class Lock(_Common, redis.lock.Lock):
    """redis-py's `Lock`, to be used in its place."""

    def do_acquire(self, token: Any) -> bool:
        """Acquire the key if it is free."""
        return drive(self.redis, acquire(self.features, self.name, token, self._expiry())) is None

    def do_release(self, expected_token: Any) -> None:
        """Delete the key if it is ours.

        Raises:
            LockNotOwnedError: if it is somebody else's, or has expired.
        """
        self._check(drive(self.redis, release(self.features, self.name, expected_token)))

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:  # noqa: FBT001 - redis-py's
        """Let the key live for `additional_time` more seconds, counted from now if `replace_ttl`, if it is ours."""
        with self._living_on(additional_time, from_now=replace_ttl):
            return super().do_extend(additional_time, replace_ttl)

    def do_reacquire(self) -> Literal[True]:
        """Let the key live for its whole time again, if it is ours."""
        with self._living_on(self.timeout or math.inf, from_now=True):
            return super().do_reacquire()


class AsyncLock(_Common, redis.asyncio.lock.Lock):
    """redis-py's asyncio `Lock`, to be used in its place."""

    async def do_acquire(self, token: Any) -> bool:
        """Acquire the key if it is free."""
        return await drive_async(self.redis, acquire(self.features, self.name, token, self._expiry())) is None

    async def do_release(self, expected_token: Any) -> None:
        """Delete the key if it is ours.

        Raises:
            LockNotOwnedError: if it is somebody else's, or has expired.
        """
        self._check(await drive_async(self.redis, release(self.features, self.name, expected_token)))

    async def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:  # noqa: FBT001 - redis-py's
        """Let the key live for `additional_time` more seconds, counted from now if `replace_ttl`, if it is ours."""
        with self._living_on(additional_time, from_now=replace_ttl):
            return await super().do_extend(additional_time, replace_ttl)

    async def do_reacquire(self) -> Literal[True]:
        """Let the key live for its whole time again, if it is ours."""
        with self._living_on(self.timeout or math.inf, from_now=True):
            return await super().do_reacquire()
