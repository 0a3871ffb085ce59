"""Coalescing, the latest wins: ``buffer_one`` numbers tasks in Redis, so only the newest of those that wait runs.

Each task with the key is numbered when it first arrives; its message carries the number.
The number is the server's time in microseconds.
A sorted set beside the key has the latest number, the pending (published) one, the begun one, and that of each id.
"""

from typing import Any

from celery import Celery

from only_one.connections.server import Server
from only_one.driver import drive
from only_one.lock.commands import Script, evaluate

from .broker import remembered_for, waits_for

_IS_WAITED_FOR = 30.0
"""Seconds for which equal calls get the pending task's result, from when it may begin.

Its message may be lost, or its worker killed, and no key says so. While a worker requeues it, it is known to be there.
"""

# The set forgets what is older than the time for which a message may still be delivered.
# Members with one number are sorted by the alphabet: an id stands before "last", "pending", "same:" and "sent:".
_NUMBER = Script("""
local what, id, number, same = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[5] or ''
local call = 'sent:' .. same
local function of(member) return tonumber(redis.call('zscore', KEYS[2], member) or 0) end
local function set(member, to) redis.call('zadd', KEYS[2], string.format('%.0f', to), member) end
local function raise(member) set(member, math.max(of(member), number)) end
local time = redis.call('time')
local now = time[1] * 1000000 + time[2]
redis.call('zremrangebyscore', KEYS[2], '-inf', string.format('%.0f', now - ARGV[4] * 1000))
if what == 'pending' then
    raise('pending')
    for _, member in ipairs(redis.call('zrangebyscore', KEYS[2], number, number)) do
        if string.sub(member, 1, 5) == 'same:' then set('until:' .. string.sub(member, 6), now + ARGV[6] * 1000) end
    end
else
    local like = what == 'anew' and of('same:' .. same)
    if like and like == of('pending') and like > of('begun') and now < of('until:' .. same) then
        local first = redis.call('zrangebyscore', KEYS[2], like, like)[1]
        if string.sub(first, 1, 3) == 'id:' then return string.sub(first, 4) end
    end
    if number == 0 and what ~= 'anew' then number = of('id:' .. id) end
    local is_newest = number < 0
    if is_newest then number = of(call) end
    if number <= 0 then number = math.max(now, of('last') + 1) end
    raise('last')
    raise('id:' .. id)
    if is_newest then raise(call) end
    if what == 'anew' and same ~= '' then
        raise('same:' .. same)
    elseif what ~= 'anew' and number < math.max(of('pending'), of('begun')) then
        number = 0
    elseif what == 'begin' then
        raise('begun')
    end
end
redis.call('pexpire', KEYS[2], ARGV[4])
value = number""")

NEWEST = -1
"""In place of a trigger: a task that has just been sent, and is newer than all, also if its id was used before."""


def arrive(server: Server, key: str, app: Celery, task_id: str, trigger: int | None, call: str) -> int:
    """Number a task that has to wait.

    Args:
        server: the server that stores the key.
        key: the key as it is in Redis.
        app: the task's app.
        task_id: the task's id.
        trigger: its number, if its message carries one; ``NEWEST`` for a new number; None for that which its id has.
        call: what tells this command from all others: it numbers a task once, also if it is sent, and arrives, twice.

    Returns:
        Its number; 0 if a newer task waits or has run.
    """
    return int(_send(server, key, app, "arrive", task_id, trigger, call))


def begin(server: Server, key: str, app: Celery, task_id: str, trigger: int | None, call: str) -> int:
    """Number a task that has the key: it supersedes every earlier task. See ``arrive`` for the arguments and result."""
    return int(_send(server, key, app, "begin", task_id, trigger, call))


def queue_anew(server: Server, key: str, app: Celery, task_id: str, digest: str) -> int | bytes:
    """Number a task that is about to be queued.

    Args:
        server: the server that stores the key.
        key: the key as it is in Redis.
        app: the task's app.
        task_id: the task's id.
        digest: what its name and arguments give, by which equal calls are known; empty if they cannot be compared.

    Returns:
        Its number; the id of the pending task if that is the newest and has the same digest.
    """
    reply: int | bytes = _send(server, key, app, "anew", task_id, 0, digest)
    return reply


def note_published(server: Server, key: str, app: Celery, trigger: int, expires: Any, until: Any) -> None:
    """Note that a task's message is in the queue: it is the pending task from now on, unless a newer one is.

    Args:
        server: the server that stores the key.
        key: the key as it is in Redis.
        app: the task's app.
        trigger: the task's number.
        expires: when the worker no longer begins it, in one of Celery's forms; or None.
        until: when it may begin, in seconds or as a time; None for at once.
    """
    seconds = waits_for(app, _IS_WAITED_FOR, None, until)
    if expires is not None:
        seconds = min(seconds, waits_for(app, 0, expires, None))
    _send(server, key, app, "pending", "", trigger, "", round(seconds * 1000))


def _send(server: Server, key: str, app: Celery, what: str, task_id: str, trigger: int | None, *more: Any) -> Any:
    lasts, beside = round(remembered_for(app) * 1000), (triggers_of(key),)
    return drive(server.client, evaluate(_NUMBER, key, what, task_id, trigger or 0, lasts, *more, beside=beside))


def triggers_of(key: str) -> str:
    """The name of the sorted set of a key."""
    return f"{{{key}}}:triggers"
