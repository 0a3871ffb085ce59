"""The lock's commands and Lua scripts, the drivers that send them, sync and async, and the clock of all deadlines.

Each command function is a generator: it yields one command at a time and is sent its reply, or thrown its error.
So it decides without sending, and one piece of code serves both drivers. The idea is that of httpx's auth flows.
"""

import time
from collections.abc import Generator
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, Union

import redis
from redis.exceptions import RedisClusterException, RedisError, ResponseError

T = TypeVar("T")
Key = Union[str, bytes]
Command = tuple[Union[str, bytes, int], ...]
Commands = Generator[Command, Any, T]
Expiry = tuple[bytes, ...]

now = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
"""Seconds by the clock of all deadlines: nobody sets it, and if the system can, it runs on through a suspend."""

TROUBLE = (RedisError, RedisClusterException, OSError)
"""The errors that redis-py raises when the server could not be asked, or refused."""

unanswered: ContextVar[int] = ContextVar("unanswered", default=0)
"""How many attempts to send a command got no answer in this context, whoever has sent the command again.

If the number has grown meanwhile, a command may have been sent twice, and the first of the two may be yet to arrive.
"""


def note_unanswered() -> None:
    """Count an attempt that got no answer."""
    unanswered.set(unanswered.get() + 1)


class Retained(NamedTuple):
    """A value to store at a key in place of a token.

    Attributes:
        value: the value.
        until: when it expires, by ``now()``.
        note: the name of a key beside it: if there is such a key, the task that the value names waits no more, and the
            key is released instead. None if the value names no task that waits.
    """

    value: bytes
    until: float
    note: str | None = None


class MarkerUpdate(NamedTuple):
    """The completion marker to set: it tells redeliveries of a task's message that the run has ended.

    Attributes:
        name: the name of the marker, a key beside the run's.
        lasts: milliseconds for which it is kept for redeliveries that have not asked yet; 0 if all have asked.
    """

    name: str
    lasts: int


class ReleaseResult(NamedTuple):
    """The result of a release, or of a replacement.

    Attributes:
        status: "held" (the key was ours, and is released or replaced), "gone" (missing), or "taken" (owned by another).
        value: the value that is stored at the key if it is owned by another.
        has_redeliveries: whether redeliveries of the task's message wait for the end of the run.
    """

    status: Literal["held", "gone", "taken"]
    value: bytes = b""
    has_redeliveries: bool = False


_RESULTS: dict[int | None, ReleaseResult] = {1: ReleaseResult("held"), 2: ReleaseResult("held", has_redeliveries=True)}
"""The result by the number that a command or script replies; 2 says that redeliveries wait."""


class Script:
    """A Lua script that begins by reading the key, and returns the stored value if that is not ours."""

    def __init__(self, then: str) -> None:
        self.text = f"local value = redis.call('get', KEYS[1])\n{then}\nreturn value"

    def command(self, keys: tuple[Key, ...], *args: bytes | str | int) -> Command:
        """The command that runs the script for keys of one slot.

        The script is sent whole: so no restart, no failover and no SCRIPT FLUSH costs a second trip.
        """
        return ("EVAL", self.text, len(keys), *keys, *args)


RENEW = Script("if value == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end")
# The server's time in microseconds, and never below the last number plus one. So it goes on rising where the server
# has forgotten the last one, as long as its clock does not step back. It is remembered for a day.
# The idea of fencing tokens is Martin Kleppmann's, in "How to do distributed locking".
FENCE = Script("""
if value == ARGV[1] then
    local time, last = redis.call('time'), redis.call('get', KEYS[2])
    local fence = math.max(time[1] * 1000000 + time[2], (last or 0) + 1)
    redis.call('set', KEYS[2], string.format('%.0f', fence), 'PX', 24 * 3600 * 1000)
    return fence
end""")
# The redeliveries of a task's message say in a hash beside the key that they wait; see `celery.redelivery`.
# Without a completion marker there is no such key, and `lasts` is -1.
_SET_MARKER = """
local copies, lasts = 0, tonumber(ARGV[#ARGV])
if lasts > 0 or (lasts == 0 and redis.call('exists', KEYS[2]) == 1) then
    redis.call('hset', KEYS[2], 'ended', ARGV[1], 'ended_at', redis.call('time')[1], 'stored', 0)
    copies = 1
end
if lasts > 0 then redis.call('pexpire', KEYS[2], lasts) end"""
_RELEASE = Script(f"{_SET_MARKER}\nif value == ARGV[1] then return redis.call('del', KEYS[1]) + copies end")
# The new value may be there already, if the reply was lost and the command was sent again.
_REPLACE = Script(f"""{_SET_MARKER}
local may_be_missing, may_be_withdrawn = ARGV[4] == 'may be missing', ARGV[4] == 'may be withdrawn'
if value == ARGV[1] or value == ARGV[2] or (not value and may_be_missing) then
    if may_be_withdrawn and redis.call('get', KEYS[#KEYS]) then
        redis.call('del', KEYS[1])
    else
        redis.call('set', KEYS[1], ARGV[2], 'PX', ARGV[3])
    end
    return 1 + copies
end""")


class Features:
    """The server features: which commands one server knows, learnt from its refusals.

    Attributes:
        sets_and_gets: whether it knows ``SET NX GET`` (from Redis 7.0, and Valkey).
        release: how it compares and deletes: ``DELIFEQ`` (Valkey 9), ``DELEX`` (Redis 8.4), or a script (all).
    """

    sets_and_gets = True
    release: Literal["DELIFEQ", "DELEX", "EVAL"] = "DELIFEQ"

    def release_command(self, key: Key, token: bytes) -> Command:
        """The command that deletes ``key`` if it holds ``token``."""
        if self.release == "DELIFEQ":
            return ("DELIFEQ", key, token)
        if self.release == "DELEX":
            return ("DELEX", key, "IFEQ", token)
        return _RELEASE.command((key,), token, -1)

    def fall_back_from(self, refused: object, error: ResponseError) -> bool:
        """Whether there is another command to release with, after this one was refused."""
        # The server does not know the command, or does not let this user call it.
        is_unknown = "unknown command" in str(error).lower() or is_forbidden(error)
        has_other = refused in ("DELIFEQ", "DELEX") and is_unknown
        if has_other and refused == self.release:
            self.release = "DELEX" if refused == "DELIFEQ" else "EVAL"
        return has_other


def is_forbidden(error: object) -> bool:
    """Whether the error says that this user lacks a right, for a command or in a script."""
    text = str(error).lower()
    return isinstance(error, ResponseError) and ("permission" in text or "can't run this command" in text)


def expiry_in(seconds: float | None) -> Expiry:
    """The expiry of a key as SET takes it, None for never. Bytes cost redis-py less than a str and an int."""
    return () if seconds is None else (b"PX", b"%d" % round(seconds * 1000))


def acquire(features: Features, key: Key, token: bytes, expiry: Expiry) -> Commands[bytes | None]:
    """Set a key if it is free.

    Args:
        features: the commands that the server knows.
        key: the key as it is in Redis.
        token: the value that says who owns the key.
        expiry: when the key expires, as ``expiry_in`` encodes it.

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
    for _ in range(3):  # busy when set, missing when read: busy after the third time
        if (yield ("SET", key, token, b"NX", *expiry)):
            return None
        if (value := (yield ("GET", key))) is not None:
            return None if value == token else value
    return b""


def release(features: Features, key: Key, token: bytes, marker: MarkerUpdate | None = None) -> Commands[ReleaseResult]:
    """Delete a key if it is ours.

    Args:
        features: the commands that the server knows.
        key: the key as it is in Redis.
        token: the value with which it was acquired.
        marker: the completion marker, which tells redeliveries of a task's message that its run has ended.

    Returns:
        The result: released, missing, or owned by another.

    Raises:
        ResponseError: if the server refuses each of our commands.
    """
    while marker is None and features.release != "EVAL":
        command = features.release_command(key, token)
        try:
            reply = yield command
        except ResponseError as error:
            if not features.fall_back_from(command[0], error):
                raise
        else:
            # The native commands do not say who owns a key that is not ours.
            return parse_result((yield ("GET", key)) if reply == 0 else reply)
    keys, lasts = ((key, marker.name), marker.lasts) if marker else ((key,), -1)
    return parse_result((yield _RELEASE.command(keys, token, lasts)))


def parse_result(reply: int | bytes | None) -> ReleaseResult:
    """The result of a release, by the reply: a number if the key was ours, else the value that is stored there."""
    if isinstance(reply, bytes):
        return ReleaseResult("taken", reply)
    return _RESULTS.get(reply) or ReleaseResult("gone")


def replacement(
    key: Key, token: bytes, new: Retained, marker: MarkerUpdate | None = None, *, may_be_missing: bool = False
) -> Command:
    """The command that stores a value in place of ``token``.

    Args:
        key: the key as it is in Redis.
        token: the value before.
        new: the value after.
        marker: as for ``release``.
        may_be_missing: whether to store the value also at a key that is missing by now. Never if it names a task that
            waits: its run may have released the key meanwhile.
    """
    beside = [each for each in (marker and marker.name, new.note) if each]
    condition = "may be withdrawn" if new.note else "may be missing" if may_be_missing else ""
    milliseconds = max(1, round((new.until - now()) * 1000))  # a server refuses to store a value for none
    return _REPLACE.command((key, *beside), token, new.value, milliseconds, condition, marker.lasts if marker else -1)


def replace(key: str, old: bytes, new: bytes, seconds: float) -> Commands[ReleaseResult]:
    """If ``old`` is stored at the key, store ``new`` for ``seconds``."""
    return parse_result((yield replacement(key, old, Retained(new, now() + seconds))))


def end(
    features: Features, key: str, token: bytes, retained: Retained | None, marker: MarkerUpdate | None
) -> Commands[ReleaseResult]:
    """If a key is ours, delete it, or store a retained value that has time left in place of the token."""
    before = unanswered.get()
    if retained and retained.until > now():
        became = parse_result((yield replacement(key, token, retained, marker)))
    else:
        became = yield from release(features, key, token, marker)
    if became.status == "taken" and unanswered.get() != before:
        return ReleaseResult("gone")  # the first of two releases has released it, and another has acquired it
    return became


def evaluate(script: Script, key: Key, *args: bytes | str | int, beside: tuple[str, ...] = ()) -> Commands[Any]:
    """Run a script for a key, and others beside it in its slot."""
    return (yield script.command((key, *beside), *args))


RAW = {"NEVER_DECODE": True, "get": True}
"""Options of redis-py: replies come as bytes, also from clients that decode, and SET with GET gives the old value."""


def _after(error: Exception, commands: Commands[T], command: Command, *, sends_again: bool) -> tuple[Command, bool]:
    """The command to send after an error, and whether the next one that gets no answer is sent again.

    A command of our own client that got no answer is sent again, once for each generator: so the client knows in the
    time of two attempts that a server is down. Other clients send again by themselves.
    """
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        note_unanswered()
        if sends_again:
            return command, False
    return commands.throw(error), sends_again


def drive(client: Any, commands: Commands[T]) -> T:
    """Send the commands of a generator, and return the generator's result."""
    sends_again = getattr(client, "sends_again", False)
    try:
        command = next(commands)
        while True:
            try:
                reply = client.execute_command(*command, **RAW)
            except Exception as error:  # noqa: BLE001 - the generator says which errors end it
                command, sends_again = _after(error, commands, command, sends_again=sends_again)
            else:
                command = commands.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        commands.close()  # now: what a signal handler raises while it is collected is lost


async def drive_async(client: Any, commands: Commands[T]) -> T:
    """Send the commands of a generator, and return the generator's result."""
    sends_again = getattr(client, "sends_again", False)
    try:
        command = next(commands)
        while True:
            try:
                reply = await client.execute_command(*command, **RAW)
            except Exception as error:  # noqa: BLE001 - the generator says which errors end it
                command, sends_again = _after(error, commands, command, sends_again=sends_again)
            else:
                command = commands.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        commands.close()  # now: what a signal handler raises while it is collected is lost


def release_now(client: Any, features: Features, key: Key, token: bytes) -> ReleaseResult:
    """Delete a key if it holds ``token``, and return the result."""
    return drive(client, release(features, key, token))
