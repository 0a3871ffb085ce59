"""Coalescing, the latest wins: ``buffer_one`` numbers tasks in Redis, so only the newest of those that wait runs.

Each task with the key is numbered when it is queued or first received; its message carries the number.
The number is the server's time in microseconds.
A pending task's message may be lost: after a while an equal call is published with its number, and one of them runs.

A sorted set beside the key has these members, each with its number:

- ``last``: the highest number so far.
- ``pending``: that of the newest task which was published.
- ``begun``: that of the newest task which has begun.
- ``id:`` and a task's id: that of this task.
- ``by:`` and a task's id: the same, once this task has begun.
- ``sent:`` and a command's id: that which the command has given; if it arrives twice, it gives the same again.
- ``held by:`` and a token's digest: that of the run with this token, as a task that waits behind it has given it.
- ``same:`` and a call's digest: that of the newest of equal tasks.
- ``until:`` and a call's digest: no number, but the time until which the newest of equal tasks is trusted to wait.
"""

from hashlib import blake2b
from typing import Any

from celery import Celery

from only_one.call.effective_options import Call
from only_one.driver import drive
from only_one.lock.commands import Script, evaluate

from .broker import remembered_for
from .queue_timeout import longest_wait

_TRUSTED_FOR = 30.0
"""Seconds for which a pending task is trusted to wait, from when it may begin: equal calls get its result.

Its message may be lost, or its worker killed, and no key says so. The time begins anew when a worker requeues it.
"""

# The set forgets what is older than the time for which a message may still be delivered.
_COMMON = """
local carried, lasts = tonumber(ARGV[1]), ARGV[2]
local function of(member) return tonumber(redis.call('zscore', KEYS[2], member) or 0) end
local function set(member, to) redis.call('zadd', KEYS[2], string.format('%.0f', to), member) end
local function raise(member, to) set(member, math.max(of(member), to)) end
local time = redis.call('time')
local now = time[1] * 1000000 + time[2]
local function new_number() return math.max(now, of('last') + 2) end
local function with(prefix, score)
    local members = {}
    for _, member in ipairs(redis.call('zrangebyscore', KEYS[2], score, score)) do
        local is_one = string.sub(member, 1, #prefix) == prefix
        if is_one then members[#members + 1] = string.sub(member, #prefix + 1) end
    end
    return members
end
redis.call('zremrangebyscore', KEYS[2], '-inf', string.format('%.0f', now - lasts * 1000))
"""
_QUEUE_ANEW = Script(f"""{_COMMON}
local id, same, number = ARGV[3], ARGV[4], new_number()
local of_equals = of('same:' .. same)
if of_equals == of('pending') and of_equals > of('begun') then
    local equals = with('id:', of_equals)
    if equals[1] and now < of('until:' .. same) then return equals[1] end
    for _, other in ipairs(equals) do redis.call('zrem', KEYS[2], 'id:' .. other) end
    if equals[1] then number = of_equals end
end
raise('last', number)
raise('id:' .. id, number)
if same ~= '' then raise('same:' .. same, number) end
value = number
redis.call('pexpire', KEYS[2], lasts)""")
_ARRIVE = Script(f"""{_COMMON}
local id, command, run, begins = ARGV[3], 'sent:' .. ARGV[4], 'held by:' .. ARGV[5], ARGV[6] == 'begins'
local is_newest = carried == -1
-- Whether a task that waits behind this run has numbered the run already.
local was_numbered_by_waiter = begins and is_newest and of(run) > 0

local function number_of_this_task()
    if carried > 0 then return carried end
    local known = is_newest and of(command) or of('id:' .. id)
    if known > 0 then return known end
    if was_numbered_by_waiter then return of(run) end
    local new = new_number()
    -- The run behind which it waits may have no number yet, and is older.
    if not begins and of(run) == 0 then set(run, new - 1) end
    return new
end

local function is_superseded(number)
    -- A run goes before those that wait behind it.
    local newest = was_numbered_by_waiter and of('begun') or math.max(of('begun'), of('pending'))
    local is_beaten = number < newest
    for _, other in ipairs(with('by:', number)) do is_beaten = is_beaten or other ~= id end
    return is_beaten
end

local number = number_of_this_task()
value = is_superseded(number) and 0 or number
raise('last', number)
raise('id:' .. id, number)
if is_newest then raise(command, number) end
if begins and value > 0 then
    raise('begun', number)
    raise('by:' .. id, number)
end
redis.call('pexpire', KEYS[2], lasts)""")
_NOTE_PUBLISHED = Script(f"""{_COMMON}
-- By the server's clock alone, because the sender's may differ.
local unseen = math.min(now - carried, ARGV[4] * 1000)
local trusted_for = math.max(ARGV[3] * 1000, unseen)
raise('pending', carried)
for _, digest in ipairs(with('same:', carried)) do set('until:' .. digest, now + trusted_for) end
value = redis.call('pexpire', KEYS[2], lasts)""")

NEWEST = -1
"""In place of a trigger: that of a task which is newer than all before it, also if its id was used before."""


def arrive(
    call: Call, app: Celery, task_id: str, trigger: int | None, command_id: str, token: str, *, begins: bool
) -> int:
    """Number a task that is received, that has to wait, or that has the key and so supersedes every earlier task.

    Args:
        call: the call that asks for the key.
        app: the task's app.
        task_id: the task's id.
        trigger: its number, if its message carries one; ``NEWEST`` for a new number; None for the number of its id.
        command_id: a random id of this command: if the command arrives twice, it numbers the task once.
        token: the value that is stored at the key, which names the run behind which the task waits, or its own run;
            empty if that is not known, as when a worker receives the task.
        begins: whether it has the key.

    Returns:
        Its number; 0 if a newer task waits, or has begun.
    """
    held_by, what = blake2b(token.encode(), digest_size=16).hexdigest(), "begins" if begins else "waits"
    return int(_send(call, app, _ARRIVE, trigger, task_id, command_id, held_by, what))


def queue_anew(call: Call, app: Celery, task_id: str, digest: str) -> int | bytes:
    """Number a task that is about to be queued.

    Args:
        call: the call that asks for the key.
        app: the task's app.
        task_id: the task's id.
        digest: the digest of its name and arguments, the same for equal calls; empty if they cannot be compared.

    Returns:
        Its number; the id of the pending task if that is the newest, has the same digest, and is trusted to wait.
    """
    reply: int | bytes = _send(call, app, _QUEUE_ANEW, None, task_id, digest)
    return reply


def note_published(call: Call, app: Celery, trigger: int, most: float, eta: Any, *, is_requeued: bool = False) -> None:
    """Note that a task's message is in the queue: it is the pending task from now on, unless a newer one is.

    The task is trusted to wait for a while from when it may begin: equal calls get its result. If its number is older
    than that, it is trusted for as long as the number is old: with a rate limit, it waits behind the earlier tasks with
    its number, which have waited for so long. The number of a requeued task is old for another reason.

    Args:
        call: the call that asks for the key.
        app: the task's app.
        trigger: the task's number.
        most: the most seconds for which it is trusted, as for a task that expires.
        eta: when it may begin: seconds from now, or a time; None for at once.
        is_requeued: whether a worker has requeued it.
    """
    seconds = min(most, longest_wait(app, _TRUSTED_FOR, None, eta))
    _send(call, app, _NOTE_PUBLISHED, trigger, round(seconds * 1000), 0 if is_requeued else round(most * 1000))


def _send(call: Call, app: Celery, script: Script, trigger: int | None, *more: Any) -> Any:
    lasts, beside = round(remembered_for(app) * 1000), (triggers_of(call.key),)
    return drive(call.server.client, evaluate(script, call.key, trigger or 0, lasts, *more, beside=beside))


def triggers_of(key: str) -> str:
    """The name of the sorted set of a key."""
    return f"{{{key}}}:triggers"
