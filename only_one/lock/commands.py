"""The lock's commands and Lua scripts, as command generators: acquire, release, replace, renew and fence."""

from typing import Any, Literal, NamedTuple, Union

from redis.exceptions import ResponseError

from only_one.clock import now
from only_one.connections.server_features import Features
from only_one.driver import Command, Commands, drive, unanswered

Key = Union[str, bytes]


class Retained(NamedTuple):
    """A value to store at a key in place of a token.

    Attributes:
        value: the value.
        until: when it expires, by ``now()``.
        note: the name of a key beside it, which may have news of the task that the value names; None if the value
            names no task that waits. If the note is ``WAITS_NO_MORE``, the key is released instead. If it is another
            value, that value is stored instead, for as long as the note lives. If the key is owned by another task,
            which may store this one's value at its end, the value becomes the note.
    """

    value: bytes
    until: float
    note: str | None = None


WAITS_NO_MORE = 1
"""The note of a task that has ended meanwhile."""


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
    """A Lua script that reads the key, and then runs Lua code that may return; else it returns the stored value."""

    def __init__(self, then: str) -> None:
        """Make a script of ``then``, the Lua code, in which ``value`` is the stored value."""
        self.text = f"local value = redis.call('get', KEYS[1])\n{then}\nreturn value"

    def command(self, keys: tuple[Key, ...], *args: bytes | str | int) -> Command:
        """The command that runs the script for keys of one slot.

        The script is sent whole: so no restart, no failover and no SCRIPT FLUSH costs a second trip.
        """
        return ("EVAL", self.text, len(keys), *keys, *args)


# It never shortens the key's life: a command that was sent before another may arrive after it. But a renewal leaves no
# longer one than the whole lease: the server's clock may have been set back, and the holder may be killed later.
RENEW = Script("""
if value == ARGV[1] then
    local ttl = math.max(tonumber(ARGV[2]), redis.call('pttl', KEYS[1]))
    return redis.call('pexpire', KEYS[1], math.min(ttl, tonumber(ARGV[3] or ttl)))
end""")
# The fencing token is the server's time in microseconds, or the last token plus one if that is more. The server
# remembers the last token for a day. If it has forgotten that one, tokens rise as long as its clock does not step back.
# The idea of fencing tokens is Martin Kleppmann's, in "How to do distributed locking".
FENCE = Script("""
if value == ARGV[1] then
    local time, last = redis.call('time'), redis.call('get', KEYS[2])
    local fence = math.max(time[1] * 1000000 + time[2], (last or 0) + 1)
    redis.call('set', KEYS[2], string.format('%.0f', fence), 'PX', 24 * 3600 * 1000)
    return fence
end""")
# The completion marker, KEYS[2], is a hash in which redeliveries of a task's message note that they wait; see
# `celery.redelivery`. Without a marker, `lasts` is -1.
_SET_MARKER = """
local redeliveries, lasts = 0, tonumber(ARGV[#ARGV])
if lasts > 0 or (lasts == 0 and redis.call('exists', KEYS[2]) == 1) then
    redis.call('hset', KEYS[2], 'ended', ARGV[1], 'ended_at', redis.call('time')[1], 'stored', 0)
    redeliveries = 1
end
if lasts > 0 then redis.call('pexpire', KEYS[2], lasts) end"""
_RELEASE = Script(f"{_SET_MARKER}\nif value == ARGV[1] then return redis.call('del', KEYS[1]) + redeliveries end")
# If the new value is there already, because the command was sent twice, its expiry is left alone: the run that it names
# may have asked for more time meanwhile.
_REPLACE = Script(f"""{_SET_MARKER}
local may_be_missing, has_note = ARGV[4] == 'may be missing', ARGV[4] == 'has note'
local is_there = value == ARGV[2] and value ~= ARGV[1]
if value == ARGV[1] or is_there or (not value and may_be_missing) then
    local note = has_note and redis.call('get', KEYS[#KEYS])
    if note == '{WAITS_NO_MORE}' then
        redis.call('del', KEYS[1])
    elseif note then
        redis.call('set', KEYS[1], note, 'PX', redis.call('pttl', KEYS[#KEYS]))
    elseif not is_there then
        redis.call('set', KEYS[1], ARGV[2], 'PX', ARGV[3])
    end
    return 1 + redeliveries
elseif value and has_note and not string.find(value, string.match(ARGV[2], '"task_id":"[^"]*"'), 1, true) then
    redis.call('set', KEYS[#KEYS], ARGV[2], 'NX', 'PX', ARGV[3])
end""")


def _expiry_in(seconds: float) -> tuple[bytes, bytes]:
    """The expiry of a key as SET takes it, in bytes, which cost redis-py less than a str and an int."""
    return b"PX", b"%d" % round(seconds * 1000)


def acquire(features: Features, key: Key, token: bytes, seconds: float | None) -> Commands[bytes | None]:
    """Set a key if it is free.

    Args:
        features: the commands that the server knows.
        key: the key as it is in Redis.
        token: the value that says who owns the key.
        seconds: how long the key lives, unless it is renewed; None for ever.

    Returns:
        None if the key is ours, else the value that is stored there; empty if the key was busy and missing in turn.
    """
    expiry = _expiry_in(seconds) if seconds is not None else ()
    if features.sets_and_gets:
        try:
            value: bytes | None = yield ("SET", key, token, b"NX", b"GET", *expiry)
        except ResponseError as error:
            if "syntax error" not in str(error):
                raise
            features.sets_and_gets = False
        else:
            # Our own token is there if the command was sent twice, because the first reply was lost.
            return None if value == token else value
    for _ in range(3):  # a key that is busy when set may be missing when read; after the third time it is busy
        if (yield ("SET", key, token, b"NX", *expiry)):
            return None
        if (value := (yield ("GET", key))) is not None:
            return None if value == token else value
    return b""


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
        marker: as for ``end``.
        may_be_missing: whether to store the value also at a key that is missing by now. Never if it names a task that
            waits: its run may have released the key meanwhile.
    """
    beside = [each for each in (marker and marker.name, new.note) if each]
    condition = "has note" if new.note else "may be missing" if may_be_missing else ""
    milliseconds = max(1, round((new.until - now()) * 1000))  # a server refuses an expiry of 0
    return _REPLACE.command((key, *beside), token, new.value, milliseconds, condition, marker.lasts if marker else -1)


def replace(key: str, old: bytes, new: bytes, seconds: float) -> Commands[ReleaseResult]:
    """If ``old`` is stored at the key, store ``new`` for ``seconds``."""
    return parse_result((yield replacement(key, old, Retained(new, now() + seconds))))


def release_command(features: Features, key: Key, token: bytes, marker: MarkerUpdate | None = None) -> Command:
    """The command that deletes ``key`` if it holds ``token``, among those that the server knows."""
    if marker is not None:
        return _RELEASE.command((key, marker.name), token, marker.lasts)
    if features.release == "DELIFEQ":
        return ("DELIFEQ", key, token)
    if features.release == "DELEX":
        return ("DELEX", key, "IFEQ", token)
    return _RELEASE.command((key,), token, -1)


def end(
    features: Features, key: Key, token: bytes, retained: Retained | None = None, marker: MarkerUpdate | None = None
) -> Commands[ReleaseResult]:
    """Delete a key if it is ours, or store a retained value that has time left in place of the token.

    Args:
        features: the commands that the server knows.
        key: the key as it is in Redis.
        token: the value with which it was acquired.
        retained: the value to store; None to delete the key.
        marker: the completion marker, which tells redeliveries of a task's message that its run has ended.

    Returns:
        The result: released, missing, or owned by another.

    Raises:
        ResponseError: if the server refuses each of our commands.
    """
    unanswered_before = unanswered.get()
    new = retained if retained and retained.until > now() else None
    while True:
        command = replacement(key, token, new, marker) if new else release_command(features, key, token, marker)
        try:
            reply = yield command
            break
        except ResponseError as error:
            if not features.fall_back(command[0], error):
                raise
    if reply == 0:  # the native commands do not say who owns a key that is not ours
        reply = yield ("GET", key)
        if reply == token:  # it is there again, because the first of two SETs has arrived only now
            reply = None
    result = parse_result(reply)
    if result.status == "taken" and unanswered.get() != unanswered_before:
        return ReleaseResult("gone")  # the first of two releases has released the key, and another call has acquired it
    return result


def evaluate(script: Script, key: Key, *args: bytes | str | int, beside: tuple[str, ...] = ()) -> Commands[Any]:
    """Run a script for a key, and others beside it in its slot."""
    return (yield script.command((key, *beside), *args))


def release_now(client: Any, features: Features, key: Key, token: bytes) -> ReleaseResult:
    """Delete a key if it holds ``token``, and return the result."""
    return drive(client, end(features, key, token))
