"""What copies of a task's message, and triggers of `buffer_one`, leave in Redis beside the key that they wait for."""

from __future__ import annotations

from typing import Any, NamedTuple

from only_one.protocol import Script, Steps, evaluate

_READ = """
local found = redis.call('hmget', KEYS[2], 'number', 'ended', 'stored', 'ended_at')
value = {found[1] or 0, found[2] or '', found[3] or 0, redis.call('time')[1] - (found[4] or 0)}"""
_LOOK = Script(_READ)
_ASK = Script(f"""
redis.call('hset', KEYS[2], 'asked', 1)
redis.call('pexpire', KEYS[2], ARGV[1])
{_READ}""")
# Who was to store the result is of no interest by then, and takes most of the memory.
_STORED = Script("value = redis.call('exists', KEYS[2]) == 1 and redis.call('hset', KEYS[2], 'stored', 1, 'ended', '')")
_NUMBER = Script("""
if tonumber(redis.call('hget', KEYS[2], 'number') or 0) < tonumber(ARGV[1]) then
    redis.call('hset', KEYS[2], 'number', ARGV[1])
    redis.call('pexpire', KEYS[2], ARGV[2])
end""")

# A trigger's number is the server's time, in microseconds, when it first arrived; the set forgets those of long ago.
_TRIGGER = Script("""
local what, id, number, kept = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local function of(member) return tonumber(redis.call('zscore', KEYS[2], member) or 0) end
local function raise(member, to)
    redis.call('zadd', KEYS[2], string.format('%.0f', math.max(of(member), to)), member)
end
local time = redis.call('time')
local now = time[1] * 1000000 + time[2]
redis.call('zremrangebyscore', KEYS[2], '-inf', string.format('%.0f', now - kept * 1000))
if what == 'pending' then
    raise('pending', number)
elseif what == 'withdraw' then
    if of('pending') == number then redis.call('zrem', KEYS[2], 'pending') end
elseif what == 'anew' then
    local same, like = ARGV[5], of('same:' .. ARGV[5])
    if like == of('pending') and like > of('begun') and now < of('until:' .. same) then
        for _, member in ipairs(redis.call('zrangebyscore', KEYS[2], like, like)) do
            if string.sub(member, 1, 3) == 'id:' then return string.sub(member, 4) end
        end
    end
    number = math.max(now, of('last') + 1)
    raise('last', number)
    raise('id:' .. id, number)
    if same ~= '' then
        raise('same:' .. same, number)
        redis.call('zadd', KEYS[2], string.format('%.0f', now + ARGV[6] * 1000), 'until:' .. same)
    end
else
    if number == 0 then number = of('id:' .. id) end
    if number == 0 then number = math.max(now, of('last') + 1) end
    raise('last', number)
    raise('id:' .. id, number)
    if number < math.max(of('pending'), of('begun')) then number = 0
    elseif what == 'begin' then raise('begun', number) end
end
redis.call('pexpire', KEYS[2], ARGV[4])
value = number""")


class Copies(NamedTuple):
    """What is known of the copies of a message.

    Attributes:
        number: that of the latest that was published; the others do not count.
        ended: the token of the run that has ended for which copies have waited; empty if none has.
        is_stored: its result is stored, and what comes after it is published.
        age: seconds since it ended.
    """

    number: int
    ended: bytes
    is_stored: bool
    age: int


def look_for_copies(key: str, note: str) -> Steps[Copies]:
    """What is known of the copies of a message."""
    return _copies((yield from evaluate(_LOOK, key, beside=note)))


def ask_of_copy(key: str, note: str, seconds: float) -> Steps[Copies]:
    """Leave word for the run that holds the key, for so many seconds, that a copy of its message waits."""
    return _copies((yield from evaluate(_ASK, key, round(seconds * 1000), beside=note)))


def _copies(found: list[Any]) -> Copies:
    number, ended, stored, age = found
    return Copies(int(number), ended, bool(int(stored)), int(age))


def number_copy(key: str, note: str, number: int, seconds: float) -> Steps[None]:
    """Note the number of a copy that was published."""
    yield from evaluate(_NUMBER, key, number, round(seconds * 1000), beside=note)


def tell_copies_of_result(key: str, note: str) -> Steps[None]:
    """Note that the result of the run that has ended is stored."""
    yield from evaluate(_STORED, key, beside=note)


def number_trigger(key: str, what: str, seconds: float, task_id: str, number: int | None) -> Steps[int | None]:
    """Number a trigger of `buffer_one`, or note what has become of it.

    Args:
        key: the key as it is in Redis.
        what: "arrive" (it has to wait), "pending" (it is published), "begin" (it has the key) or "withdraw".
        seconds: how long it is remembered.
        task_id: the trigger's id.
        number: its number, where that is known.

    Returns:
        Its number, or None if a newer one has taken its place.
    """
    found = yield from evaluate(
        _TRIGGER, key, what, task_id, number or 0, round(seconds * 1000), beside=f"{{{key}}}:triggers"
    )
    return found or None


def number_new_trigger(key: str, seconds: float, task_id: str, digest: str, waits: float) -> Steps[int | str]:
    """Number a trigger of `buffer_one` that is about to be queued.

    Args:
        key: the key as it is in Redis.
        seconds: how long it is remembered.
        task_id: the trigger's id.
        digest: what tells it from others with this key; empty where that cannot be told.
        waits: seconds for which it is waited for, if it waits.

    Returns:
        Its number; or the id of one with the same digest that waits, and is the newest.
    """
    kept, limit = round(seconds * 1000), round(waits * 1000)
    found: int | bytes = yield from evaluate(
        _TRIGGER, key, "anew", task_id, 0, kept, digest, limit, beside=f"{{{key}}}:triggers"
    )
    return found if isinstance(found, int) else found.decode()
