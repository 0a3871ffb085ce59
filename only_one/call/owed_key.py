"""The key of a queued task that a call has taken over: the call owes it to the task, and stores its value again.

A task may end meanwhile without a run: it is revoked, or finds its key busy or the server away. Then it withdraws: its
value is deleted, and a note beside the key tells the call that nothing is owed to it.
The note may also have a value, which the call stores then: a worker that ends leaves it there if the task is queued
again.
"""

import time
from dataclasses import dataclass

from only_one.clock import now
from only_one.driver import Command, Commands
from only_one.holder import Holder, is_queued, task_id_of
from only_one.lock.commands import WAITS_NO_MORE, Retained, Script
from only_one.lock.pending_releases import PendingRelease
from only_one.settings import DEFAULT_LEASE

# Only the value of a waiting task is deleted, because a run releases its key itself.
_WITHDRAW = Script(f"""
local function has(text) return value and string.find(value, text, 1, true) end
redis.call('set', KEYS[2], {WAITS_NO_MORE}, 'PX', ARGV[2])
local pending = tonumber(redis.call('zscore', KEYS[3], 'pending'))
if pending == tonumber(ARGV[3]) then redis.call('zrem', KEYS[3], 'pending') end
local waits = has('"state":"queued"') or has('"state":"received"')
if waits and has(ARGV[1]) then return redis.call('del', KEYS[1]) end""")


@dataclass(eq=False, kw_only=True)
class Withdrawal(PendingRelease):
    """A withdrawal that must still be sent to the server: a task waits for its key no more.

    Attributes:
        note: the name of the note that tells a call that nothing is owed to the task.
        triggers: the name of the sorted set in which ``buffer_one`` numbers tasks.
        number: the task's number there; None if it has none.
    """

    note: str
    triggers: str
    number: int | None

    def command(self) -> Command:
        """The command that deletes the value that has ``token`` in it, see ``words_of``, and leaves the note.

        The note is kept for as long as the value might have lived.
        """
        keys = (self.key, self.note, self.triggers)
        return _WITHDRAW.command(keys, self.token, round(self.lasts * 1000), self.number or 0)


def note_of(key: str, task_id: str | None, replacement: int, attempt: int | None) -> str:
    """The name of the note with news of this work of a task, for a call that has taken its key over."""
    return f"{{{key}}}:withdrawn:{task_id}:{replacement}.{attempt}"


def owed_to(key: str, value: bytes, token: bytes) -> Commands[Retained | None]:
    """What is owed if ``token`` takes a key over from ``value``; None unless ``value`` names another, queued task."""
    holder = Holder.parse(value) if is_queued(value) else None
    if holder is None or holder.task_id == task_id_of(token):
        return None
    note = note_of(key, holder.task_id, holder.replacement, holder.attempt)
    return Retained(value, now() + (yield ("PTTL", key)) / 1000, note)


def to_store(owed: Retained) -> Retained:
    """The value to store again at the end of the call, for at least the default lease, or until the task's deadline.

    A worker needs that time to receive the task or to renew its key, and a producer to lengthen it once it is
    published: they could not do so during the call.
    """
    holder, seconds = Holder.parse(owed.value), DEFAULT_LEASE
    if holder is not None and holder.deadline is not None:
        seconds = min(seconds, holder.deadline - time.time())
    return owed._replace(until=max(owed.until, now() + seconds))
