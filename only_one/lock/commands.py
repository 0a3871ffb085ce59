"""The lock's commands and Lua scripts, the drivers that send them, sync and async, and the clock of all deadlines.

Each command function is a generator: it yields one command at a time and is sent its reply, or thrown its error.
So it decides without sending, and one piece of code serves both drivers. The idea is that of httpx's auth flows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, Union

from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

T = TypeVar("T")
Command = tuple[Union[str, bytes, int], ...]
Commands = Generator[Command, Any, T]
Expiry = tuple[bytes, ...]

NEVER: Expiry = ()

now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds by the clock of all deadlines: nobody sets it, and where it can it runs on through a suspend."""

TROUBLE = (RedisError, RedisClusterException, OSError)
"""What redis-py raises when the server could not be asked, or refused."""


class MarkerUpdate(NamedTuple):
    """The completion marker: it tells redeliveries of a task's message that the run has ended.

    Attributes:
        name: the key beside the run's.
        lasts: milliseconds for which it is kept for redeliveries that have not asked yet; 0 if all have asked.
    """

    name: str
    lasts: int


class ReleaseResult(NamedTuple):
    """The result of a release or a renewal.

    Attributes:
        status: "held" (it was ours, and is released or renewed), "gone" (missing), or "taken" (owned by another).
        value: what is stored at the key if it is owned by another.
        has_redeliveries: redeliveries of the task's message wait to be told what has become of its run.
    """

    status: Literal["held", "gone", "taken"]
    value: bytes = b""
    has_redeliveries: bool = False


_GONE = ReleaseResult("gone")
_RESULTS: dict[int | None, ReleaseResult] = {1: ReleaseResult("held"), 2: ReleaseResult("held", has_redeliveries=True)}
"""The result by the number that a command or script replies; 2 is that of a key that redeliveries wait for."""


class Script:
    """A Lua script that begins with the value of the key, and ends with it where that is not ours."""

    def __init__(self, then: str) -> None:
        self.text = f"local value = redis.call('get', KEYS[1])\n{then}\nreturn value"
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


_RELEASE = Script("if value == ARGV[1] then return redis.call('del', KEYS[1]) end")
_RENEW = Script("if value == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end")
# The new value may be there already, if the reply was lost and redis-py has sent the command again.
_IF_OLD_REPLACE = """
if value == ARGV[1] or value == ARGV[2] then
    redis.call('set', KEYS[1], ARGV[2], 'PX', ARGV[3])
    return 1 + copies
end"""
_REPLACE = Script(f"local copies = 0{_IF_OLD_REPLACE}")
_FENCE = Script("""
if value == ARGV[1] then
    local time = redis.call('time')
    local fence = time[1] * 1000000 + time[2]
    local last = redis.call('get', KEYS[2])
    if last then fence = math.max(fence, last + 1) end
    redis.call('set', KEYS[2], string.format('%.0f', fence), 'PX', ARGV[2])
    return fence
end""")

# The redeliveries of a task's message say in a hash beside the key that they wait; see `celery.redelivery`.
_SET_MARKER = """
local copies, lasts = redis.call('exists', KEYS[2]), tonumber(ARGV[#ARGV])
if copies == 1 or lasts > 0 then
    redis.call('hset', KEYS[2], 'ended', ARGV[1], 'ended_at', redis.call('time')[1], 'stored', 0)
    copies = 1
end
if lasts > 0 then redis.call('pexpire', KEYS[2], lasts) end
"""
_RELEASE_AND_MARK = Script(f"{_SET_MARKER}\nif value == ARGV[1] then return redis.call('del', KEYS[1]) + copies end")
_REPLACE_AND_MARK = Script(f"{_SET_MARKER}{_IF_OLD_REPLACE}")
_FENCE_REMEMBERED = 24 * 3600 * 1000
"""Milliseconds for which the last fencing token is remembered. The server's clock goes on where it is forgotten."""

_VANISHED = 3
"""How often a key that is taken when set and missing when read is tried again, before it counts as taken."""


class Features:
    """Which commands one server knows, learnt from what it refuses.

    Attributes:
        sets_and_gets: it knows `SET NX GET` (from Redis 7.0, and Valkey).
        release: how it compares and deletes: `DELIFEQ` (Valkey 9), `DELEX` (Redis 8.4), or a script (all).
    """

    __slots__ = ("release", "sets_and_gets")

    def __init__(self) -> None:
        self.sets_and_gets = True
        self.release: Literal["DELIFEQ", "DELEX", "EVALSHA"] = "DELIFEQ"

    def release_command(self, key: str | bytes, token: bytes) -> Command:
        """The command that deletes `key` if it holds `token`."""
        if self.release == "DELIFEQ":
            return ("DELIFEQ", key, token)
        if self.release == "DELEX":
            return ("DELEX", key, "IFEQ", token)
        return ("EVALSHA", _RELEASE.sha, 1, key, token)

    def cleanup_command(self, key: str | bytes, token: bytes) -> Command:
        """The same with the script sent whole: many go in one trip, and none may need a second one."""
        if self.release == "EVALSHA":
            return ("EVAL", _RELEASE.text, 1, key, token)
        return self.release_command(key, token)

    def fall_back_from(self, refused: object, error: ResponseError) -> bool:
        """Whether there is another command to release with, after this one was refused."""
        if refused not in ("DELIFEQ", "DELEX") or not _is_unknown(error):
            return False
        if refused == self.release:
            self.release = "DELEX" if refused == "DELIFEQ" else "EVALSHA"
        return True


def _is_unknown(error: ResponseError) -> bool:
    """Whether the server does not know a command, or does not let this user call it."""
    return "unknown command" in str(error).lower() or is_forbidden(error)


def is_forbidden(error: object) -> bool:
    """Whether the server does not let this user do something, by itself or in a script."""
    text = str(error).lower()
    return isinstance(error, ResponseError) and ("permission" in text or "can't run this command" in text)


def expiry_in(seconds: float) -> Expiry:
    """The expiry of a key as SET takes it; as bytes, which cost redis-py less than a str and an int in every call."""
    return b"PX", b"%d" % round(seconds * 1000)


def acquire(features: Features, key: str | bytes, token: bytes, expiry: Expiry) -> Commands[bytes | None]:
    """Set a key if it is free.

    Args:
        features: the commands that the server knows.
        key: the key as it is in Redis.
        token: the value that says whose it is.
        expiry: when the key expires, as `expiry_in` encodes it.

    Returns:
        None if the key is ours, else the value that is stored there.
    """
    if features.sets_and_gets:
        try:
            value: bytes | None = yield ("SET", key, token, b"NX", b"GET", *expiry)
        except ResponseError as error:
            if "syntax error" not in str(error):
                raise
            features.sets_and_gets = False
        else:
            # Our own token: the reply was lost, and redis-py sent the command again.
            return None if value == token else value
    for _ in range(_VANISHED):
        if (yield ("SET", key, token, b"NX", *expiry)):
            return None
        value = yield ("GET", key)
        if value is not None:
            return None if value == token else value
    return b""


def release(
    features: Features, key: str | bytes, token: bytes, marker: MarkerUpdate | None = None
) -> Commands[ReleaseResult]:
    """Delete a key if it is ours.

    Args:
        features: the commands that the server knows.
        key: the key as it is in Redis.
        token: the value with which it was acquired.
        marker: the completion marker that tells redeliveries of a task's message that its run has ended.

    Returns:
        What became of the key.

    Raises:
        ResponseError: if the server refuses each of our commands.
    """
    if marker:
        return parse_result((yield from evaluate(_RELEASE_AND_MARK, key, token, marker.lasts, beside=marker.name)))
    while True:
        command = features.release_command(key, token)
        try:
            reply = yield command
        except NoScriptError:
            reply = yield ("EVAL", _RELEASE.text, 1, key, token)
        except ResponseError as error:
            if not features.fall_back_from(command[0], error):
                raise
            continue
        # The native commands do not say whose a key is that is not ours.
        return parse_result((yield ("GET", key)) if reply == 0 else reply)


def renew_command(key: str | bytes, token: bytes, ttl: int) -> Command:
    """The command that lets a key live for `ttl` more milliseconds if it holds `token`; for `parse_result`.

    The script is sent whole, so that no restart and no SCRIPT FLUSH costs a second trip.
    """
    return ("EVAL", _RENEW.text, 1, key, token, ttl)


def parse_result(reply: int | bytes | None) -> ReleaseResult:
    """The result of a release or a renewal, by its reply: a number if the key was ours, else the value stored there."""
    return ReleaseResult("taken", reply) if isinstance(reply, bytes) else _RESULTS.get(reply, _GONE)


def extend(key: str, token: bytes, ttl: int) -> Commands[ReleaseResult]:
    """Let a key live for `ttl` more milliseconds from now if it is ours."""
    return parse_result((yield from evaluate(_RENEW, key, token, ttl)))


def replace(key: str, old: bytes, new: bytes, ttl: int, marker: MarkerUpdate | None = None) -> Commands[ReleaseResult]:
    """Store `new` in place of `old` for `ttl` milliseconds, if `old` is still there; `marker` is as for `release`."""
    if marker:
        return parse_result(
            (yield from evaluate(_REPLACE_AND_MARK, key, old, new, ttl, marker.lasts, beside=marker.name))
        )
    return parse_result((yield from evaluate(_REPLACE, key, old, new, ttl)))


def take_over(features: Features, key: str, old: bytes, token: bytes, seconds: float) -> Commands[bytes | None]:
    """Acquire a key for `seconds` from a holder that is dead or queued, if its value `old` is still there.

    Returns:
        None if the key is ours, else the value that is stored there.
    """
    became = yield from replace(key, old, token, round(seconds * 1000))
    if became.status == "gone":
        return (yield from acquire(features, key, token, expiry_in(seconds)))
    return None if became.status == "held" else became.value


def mint_fence(key: str, token: bytes) -> Commands[int | bytes | None]:
    """A number higher than all before it, if the key is ours; else what is stored there.

    The number is the server's time in microseconds, and never below the last plus one.
    So it goes on rising where the server has forgotten the last one, as long as its clock does not step back.
    The idea of fencing tokens is Martin Kleppmann's, in "How to do distributed locking".
    """
    reply: int | bytes | None = yield from evaluate(_FENCE, key, token, _FENCE_REMEMBERED, beside=f"{{{key}}}:fence")
    return reply


def evaluate(script: Script, key: str | bytes, *args: bytes | str | int, beside: str | None = None) -> Commands[Any]:
    """Run a script for a key, and perhaps one beside it in its slot; sent whole where the server does not know it."""
    keys = (key,) if beside is None else (key, beside)
    try:
        return (yield ("EVALSHA", script.sha, len(keys), *keys, *args))
    except NoScriptError:
        return (yield ("EVAL", script.text, len(keys), *keys, *args))


# Sending them

RAW = {"NEVER_DECODE": True}
"""Options of redis-py by which replies come as bytes, also from clients that decode."""

_OPTIONS = {**RAW, "get": True}
"""The same; and the reply to a SET is the value that was stored there."""


def drive(client: Any, commands: Commands[T]) -> T:
    """Send the commands of a generator, and return what it returns."""
    try:
        return _send(client, commands)
    finally:
        commands.close()  # now: what a signal's handler raises while a generator is collected would be lost


def _send(client: Any, commands: Commands[T]) -> T:
    try:
        command = next(commands)
        while True:
            try:
                reply = client.execute_command(*command, **_OPTIONS)
            except Exception as error:  # noqa: BLE001 - it is for the generator to say which errors end it
                command = commands.throw(error)
            else:
                command = commands.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(client: Any, commands: Commands[T]) -> T:
    """Send the commands of a generator, and return what it returns."""
    try:
        return await _send_async(client, commands)
    finally:
        commands.close()


async def _send_async(client: Any, commands: Commands[T]) -> T:
    try:
        command = next(commands)
        while True:
            try:
                reply = await client.execute_command(*command, **_OPTIONS)
            except Exception as error:  # noqa: BLE001 - it is for the generator to say which errors end it
                command = commands.throw(error)
            else:
                command = commands.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


def release_now(client: Any, features: Features, key: str | bytes, token: bytes) -> ReleaseResult:
    """Delete a key if it holds `token`, and say what became of it."""
    return drive(client, release(features, key, token))
