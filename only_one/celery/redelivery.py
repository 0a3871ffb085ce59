"""Redelivery: the broker delivers a task's message again, while its run is under way or after it has ended.

A redelivery waits for the run, is dropped when the run has ended, and does the work if the run was killed.
It learns this from the completion marker, a hash in Redis beside the key: the redelivery asks, the release answers.
The result backend is not asked: there may be none, and it is written after the release.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from celery.exceptions import Ignore, Reject, Retry

from only_one.lock.commands import Commands, MarkerUpdate, Script, evaluate
from only_one.lock.holder import is_gone

from .broker import marks_redeliveries, redelivers_at_any_time, remembered_for, visibility_timeout
from .requeue import Header

_STORES_WITHIN = 30
"""Seconds within which a run that has ended has stored its result, or never does, if nobody can see its process."""

_READ = Script("""
if tonumber(ARGV[1]) > 0 then
    redis.call('hset', KEYS[2], 'asked', 1)
    redis.call('pexpire', KEYS[2], ARGV[1])
end
local found = redis.call('hmget', KEYS[2], 'number', 'ended', 'stored', 'ended_at')
value = {found[1] or 0, found[2] or '', found[3] or 0, redis.call('time')[1] - (found[4] or 0)}""")
# Who was to store the result is of no interest by then, and takes most of the memory.
_STORED = Script("value = redis.call('exists', KEYS[2]) == 1 and redis.call('hset', KEYS[2], 'stored', 1, 'ended', '')")
_NUMBER = Script("""
if tonumber(redis.call('hget', KEYS[2], 'number') or 0) < tonumber(ARGV[1]) then
    redis.call('hset', KEYS[2], 'number', ARGV[1])
    redis.call('pexpire', KEYS[2], ARGV[2])
end""")


class CompletionMarker(NamedTuple):
    """What is known of the messages of one attempt of a task.

    Attributes:
        number: how often the latest of them was requeued; the others do not count.
        ended: the token of the run that has ended, if redeliveries waited for it; else empty.
        is_stored: its result is stored, and what comes after it is published.
        age: seconds since it ended.
    """

    number: int
    ended: bytes
    is_stored: bool
    age: int

    def reason_to_drop(self, times: int) -> str | None:
        """Why a delivery ends without a run, if it does and its message was requeued so many times."""
        if self.is_stored:
            return "its run has ended"
        return "a later copy of it waits" if times < self.number else None

    @property
    def may_be_stored_yet(self) -> bool:
        """Whether the run that has ended may still store its result."""
        return self.age < _STORES_WITHIN and not is_gone(self.ended)


def read_marker(key: str, marker: str, waits: float = 0) -> Commands[CompletionMarker]:
    """What is known of the messages of one attempt.

    Args:
        key: the key as it is in Redis.
        marker: the name of the marker.
        waits: seconds for which the run that holds the key is told that a redelivery waits for its end; 0 if none does.

    Returns:
        What the marker says.
    """
    number, ended, stored, age = yield from evaluate(_READ, key, round(waits * 1000), beside=marker)
    return CompletionMarker(int(number), ended, bool(int(stored)), int(age))


def note_requeued(key: str, marker: str, number: int, seconds: float) -> Commands[None]:
    """Note how often the message was requeued that has just been published."""
    yield from evaluate(_NUMBER, key, number, round(seconds * 1000), beside=marker)


def mark_stored(key: str, marker: str) -> Commands[None]:
    """Note that the result of the run that has ended is stored."""
    yield from evaluate(_STORED, key, beside=marker)


def may_be_redelivery(task: Any, header: Header, *, is_redelivered: bool) -> bool:
    """Whether a message may have been delivered, or published, before.

    Args:
        task: the task.
        header: what the message carries for us.
        is_redelivered: whether the broker says that it has delivered the message before.
    """
    return bool(header.times or is_redelivered or (task.acks_late and not marks_redeliveries(task.app)))


def marker_update(task: Any, marker: str, ended_by: BaseException | None, seconds: float) -> MarkerUpdate | None:
    """The completion marker that the release sets, if the run has ended, and with acks_late.

    A run that was rejected, ignored or interrupted by a signal has not ended: a redelivery does its work.
    Nor has one that failed, if its message is not acknowledged then: it may come back by a dead-letter queue.

    Args:
        task: the task.
        marker: the name of the marker.
        ended_by: what the run has raised.
        seconds: how long the run has taken.
    """
    if not task.acks_late or not _has_ended(task, ended_by):
        return None
    # There may be a redelivery that could not ask, because it waits for a free place in a worker.
    may_be_unseen = redelivers_at_any_time(task.app) or seconds > visibility_timeout(task.app) / 2
    return MarkerUpdate(marker, round(1000 * remembered_for(task.app)) if may_be_unseen else 0)


def _has_ended(task: Any, ended_by: BaseException | None) -> bool:
    if ended_by is None or isinstance(ended_by, Retry):
        return True
    if not isinstance(ended_by, Exception) or isinstance(ended_by, (Ignore, Reject)):
        return False
    is_acknowledged = getattr(task, "acks_on_failure", None)  # since Celery 5.7
    return bool(task.acks_on_failure_or_timeout if is_acknowledged is None else is_acknowledged)
