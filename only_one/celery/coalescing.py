"""Coalescing, the latest wins: what `buffer_one` keeps in Redis, so that only the newest of the waiting tasks runs.

Each task with the key is numbered when it first arrives; its message carries the number.
The number is the server's time in microseconds.
A sorted set beside the key knows the latest number, the pending one (published), the begun one, and that of each id.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from only_one.connections.server import Server
from only_one.lock.commands import Script, drive, evaluate

from .broker import remembered_for

# The set forgets what is older than the time for which a message may still be delivered.
_NUMBER = Script("""
local what, id, number, same = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[5]
local function of(member) return tonumber(redis.call('zscore', KEYS[2], member) or 0) end
local function set(member, to) redis.call('zadd', KEYS[2], string.format('%.0f', to), member) end
local function raise(member) set(member, math.max(of(member), number)) end
local time = redis.call('time')
local now = time[1] * 1000000 + time[2]
redis.call('zremrangebyscore', KEYS[2], '-inf', string.format('%.0f', now - ARGV[4] * 1000))
if what == 'pending' then
    raise('pending')
elseif what == 'withdraw' then
    if of('pending') == number then redis.call('zrem', KEYS[2], 'pending') end
else
    if what == 'anew' then
        local like = of('same:' .. same)
        if like == of('pending') and like > of('begun') and now < of('until:' .. same) then
            for _, member in ipairs(redis.call('zrangebyscore', KEYS[2], like, like)) do
                if string.sub(member, 1, 3) == 'id:' then return string.sub(member, 4) end
            end
        end
    elseif number == 0 then
        number = of('id:' .. id)
    end
    if number == 0 then number = math.max(now, of('last') + 1) end
    raise('last')
    raise('id:' .. id)
    if what == 'anew' then
        if same ~= '' then
            raise('same:' .. same)
            set('until:' .. same, now + ARGV[6] * 1000)
        end
    elseif number < math.max(of('pending'), of('begun')) then
        number = 0
    elseif what == 'begin' then
        raise('begun')
    end
end
redis.call('pexpire', KEYS[2], ARGV[4])
value = number""")


def arrive(server: Server, key: str, app: Celery, task_id: str, number: int | None) -> int | None:
    """Number a task that has to wait.

    Args:
        server: where the key is.
        key: the key as it is in Redis.
        app: the task's app.
        task_id: the task's id.
        number: its number, if its message carries one.

    Returns:
        Its number, or None if a newer one waits or has run.
    """
    return _number(server, key, app, "arrive", task_id, number) or None


def arrive_anew(server: Server, key: str, app: Celery, task_id: str, digest: str, seconds: float) -> int | str:
    """Number a task that is about to be queued.

    Args:
        server: where the key is.
        key: the key as it is in Redis.
        app: the task's app.
        task_id: the task's id.
        digest: of its arguments, by which equal calls are known; empty where they cannot be compared.
        seconds: for how long others with the same digest wait for it.

    Returns:
        Its number; or the id of the pending task, if that is the newest and has the same digest.
    """
    reply: int | bytes = _number(server, key, app, "anew", task_id, 0, digest, round(seconds * 1000))
    return reply if isinstance(reply, int) else reply.decode()


def published(server: Server, key: str, app: Celery, number: int) -> None:
    """The task's message is in the queue: from now on it is the pending one, unless a newer one is."""
    _number(server, key, app, "pending", "", number)


def withdraw(server: Server, key: str, app: Celery, number: int) -> None:
    """The task is pending no more, and will not run."""
    _number(server, key, app, "withdraw", "", number)


def begin(server: Server, key: str, app: Celery, task_id: str, number: int | None) -> bool:
    """The task has the key: whether it runs, and supersedes every one before it, or is itself superseded."""
    return bool(_number(server, key, app, "begin", task_id, number))


def _number(
    server: Server, key: str, app: Celery, what: str, task_id: str, number: int | None, *digest: str | int
) -> Any:
    milliseconds, beside = round(remembered_for(app) * 1000), f"{{{key}}}:triggers"
    commands = evaluate(_NUMBER, key, what, task_id, number or 0, milliseconds, *digest, beside=beside)
    return drive(server.client, commands)
