"""redis-py's locks, for which a lost reply is no wrong answer, and which say who holds a key that is taken."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockNotOwnedError, ResponseError

from .clock import now
from .protocol import (
    NEVER,
    Dialect,
    Expiry,
    Note,
    Outcome,
    Steps,
    T,
    expiry_in,
    give_back_noting,
    give_back_otherwise,
    outcome,
    replace,
    replace_noting,
    take_in_two,
)

if TYPE_CHECKING:
    from typing_extensions import Self

RAW = {"NEVER_DECODE": True}
"""Options of redis-py by which replies come as bytes, also from clients that decode."""

_GET = {**RAW, "get": True}
"""The same for a SET whose reply is the value that stood there."""


def drive(client: Any, steps: Steps[T]) -> T:
    """Send what `steps` decides, and return what it returns."""
    try:
        command = next(steps)
        while True:
            try:
                reply = client.execute_command(*command, **RAW)
            except Exception as error:  # noqa: BLE001 - it is for `steps` to say which errors end it
                command = steps.throw(error)
            else:
                command = steps.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(client: Any, steps: Steps[T]) -> T:
    """Send what `steps` decides, and return what it returns."""
    try:
        command = next(steps)
        while True:
            try:
                reply = await client.execute_command(*command, **RAW)
            except Exception as error:  # noqa: BLE001 - it is for `steps` to say which errors end it
                command = steps.throw(error)
            else:
                command = steps.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


def take(client: Any, dialect: Dialect, key: Any, token: bytes, expiry: Expiry) -> bytes | None:
    """Take a key once, without waiting.

    Args:
        client: a client of redis-py.
        dialect: what is known of the server.
        key: the key as it is in Redis.
        token: the value that says whose it is.
        expiry: when the key expires, as `expiry_in` spells it.

    Returns:
        None if the key is ours, else the value that stands there.
    """
    if dialect.sets_and_gets:
        try:
            found: bytes | None = client.execute_command("SET", key, token, b"NX", b"GET", *expiry, **_GET)
        except ResponseError as error:
            dialect.unlearn_get(error)
        else:
            # Our own token: the reply was lost, and redis-py sent the command again.
            return None if found == token else found
    return drive(client, take_in_two(key, token, expiry))


async def take_async(client: Any, dialect: Dialect, key: Any, token: bytes, expiry: Expiry) -> bytes | None:
    """Take a key once, without waiting.

    Args:
        client: an asyncio client of redis-py.
        dialect: what is known of the server.
        key: the key as it is in Redis.
        token: the value that says whose it is.
        expiry: when the key expires, as `expiry_in` spells it.

    Returns:
        None if the key is ours, else the value that stands there.
    """
    if dialect.sets_and_gets:
        try:
            found: bytes | None = await client.execute_command("SET", key, token, b"NX", b"GET", *expiry, **_GET)
        except ResponseError as error:
            dialect.unlearn_get(error)
        else:
            # Our own token: the reply was lost, and redis-py sent the command again.
            return None if found == token else found
    return await drive_async(client, take_in_two(key, token, expiry))


def give_back(client: Any, dialect: Dialect, key: Any, token: bytes) -> Outcome:
    """Delete a key if it holds `token`, and say what became of it."""
    command = dialect.release_command(key, token)
    try:
        reply = client.execute_command(*command, **RAW)
    except ResponseError as error:
        return drive(client, give_back_otherwise(dialect, key, token, command, error))
    if reply == 0:  # the native commands do not say whose a key is that is not ours
        reply = client.execute_command("GET", key, **RAW)
    return outcome(reply)


async def give_back_async(client: Any, dialect: Dialect, key: Any, token: bytes) -> Outcome:
    """Delete a key if it holds `token`, and say what became of it."""
    command = dialect.release_command(key, token)
    try:
        reply = await client.execute_command(*command, **RAW)
    except ResponseError as error:
        return await drive_async(client, give_back_otherwise(dialect, key, token, command, error))
    if reply == 0:  # the native commands do not say whose a key is that is not ours
        reply = await client.execute_command("GET", key, **RAW)
    return outcome(reply)


class _Common:
    """What the two locks share: all but the sending.

    Attributes:
        dialect: what is known of the server.
        expires_at: when the key that was taken last expires, by `clock.now()`.
    """

    name: Any
    timeout: float | None
    local: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See redis-py."""
        super().__init__(*args, **kwargs)
        self.dialect = Dialect()
        self.expires_at = math.inf

    @classmethod
    def held(cls, client: Any, dialect: Dialect, name: str, token: bytes, ttl: float) -> Self:
        """The lock of a key that has been taken with `token` for `ttl` seconds; a call that is skipped makes none."""
        lock = cls(client, name, ttl, thread_local=False)
        lock.dialect = dialect  # which all locks in a server share
        lock.local.token = token
        return lock

    def _expiry(self) -> Expiry:
        # Counted from before the command is sent: the key never outlives what its holder believes.
        self.expires_at = now() + self.timeout if self.timeout else math.inf
        return expiry_in(self.timeout) if self.timeout else NEVER

    def _extended(self, asked: float, seconds: float, *, from_now: bool) -> None:
        self.expires_at = seconds + (asked if from_now else self.expires_at)

    def _check(self, became: Outcome) -> None:
        # A key that is gone before its time was deleted by a release of ours whose reply was lost.
        if became.fate == "taken" or (became.fate == "gone" and now() >= self.expires_at):
            msg = "Cannot release a lock that's no longer owned"
            raise LockNotOwnedError(msg)


class Lock(_Common, redis.lock.Lock):
    """redis-py's `Lock`, to be used in its place."""

    def keep(self, value: bytes, ttl: int, note: Note | None) -> Outcome:
        """Put `value` in the place of the token for `ttl` milliseconds, if the key is ours; for `note` see below."""
        token = self.local.token
        steps = replace_noting(self.name, token, value, ttl, note) if note else replace(self.name, token, value, ttl)
        return drive(self.redis, steps)

    def give_back(self, note: Note | None) -> Outcome:
        """Delete the key if it is ours, and say what became of it; copies of its message are told at `note`."""
        if note:
            return drive(self.redis, give_back_noting(self.name, self.local.token, note))
        return give_back(self.redis, self.dialect, self.name, self.local.token)

    def do_acquire(self, token: Any) -> bool:
        """Take the key if it is free."""
        return take(self.redis, self.dialect, self.name, token, self._expiry()) is None

    def do_release(self, expected_token: Any) -> None:
        """Delete the key if it is ours.

        Raises:
            LockNotOwnedError: if it is somebody else's, or has expired.
        """
        self._check(give_back(self.redis, self.dialect, self.name, expected_token))

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:  # noqa: FBT001 - redis-py's
        """Let the key live for `additional_time` more seconds, counted from now if `replace_ttl`, if it is ours."""
        asked = now()
        done = super().do_extend(additional_time, replace_ttl)
        self._extended(asked, additional_time, from_now=replace_ttl)
        return done

    def do_reacquire(self) -> Literal[True]:
        """Let the key live for its whole time again, if it is ours."""
        asked = now()
        done = super().do_reacquire()
        self._extended(asked, self.timeout or math.inf, from_now=True)
        return done


class AsyncLock(_Common, redis.asyncio.lock.Lock):
    """redis-py's asyncio `Lock`, to be used in its place."""

    async def keep(self, value: bytes, ttl: int, note: Note | None) -> Outcome:
        """Put `value` in the place of the token for `ttl` milliseconds, if the key is ours; for `note` see below."""
        token = self.local.token
        steps = replace_noting(self.name, token, value, ttl, note) if note else replace(self.name, token, value, ttl)
        return await drive_async(self.redis, steps)

    async def give_back(self, note: Note | None) -> Outcome:
        """Delete the key if it is ours, and say what became of it; copies of its message are told at `note`."""
        if note:
            return await drive_async(self.redis, give_back_noting(self.name, self.local.token, note))
        return await give_back_async(self.redis, self.dialect, self.name, self.local.token)

    async def do_acquire(self, token: Any) -> bool:
        """Take the key if it is free."""
        return await take_async(self.redis, self.dialect, self.name, token, self._expiry()) is None

    async def do_release(self, expected_token: Any) -> None:
        """Delete the key if it is ours.

        Raises:
            LockNotOwnedError: if it is somebody else's, or has expired.
        """
        self._check(await give_back_async(self.redis, self.dialect, self.name, expected_token))

    async def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:  # noqa: FBT001 - redis-py's
        """Let the key live for `additional_time` more seconds, counted from now if `replace_ttl`, if it is ours."""
        asked = now()
        done = await super().do_extend(additional_time, replace_ttl)
        self._extended(asked, additional_time, from_now=replace_ttl)
        return done

    async def do_reacquire(self) -> Literal[True]:
        """Let the key live for its whole time again, if it is ours."""
        asked = now()
        done = await super().do_reacquire()
        self._extended(asked, self.timeout or math.inf, from_now=True)
        return done
