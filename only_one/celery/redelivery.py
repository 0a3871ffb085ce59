"""Redelivery: the broker delivers a task's message again, while its run is under way or after the run has ended.

A redelivery waits for the run, is dropped when the run has ended, and does the work if the run was killed.
It learns this from the completion marker, a hash in Redis beside the key: the redelivery asks, the release answers.
The result backend cannot tell: there may be none, and the result is stored there after the release.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, NamedTuple

from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from only_one.connections.server_features import level_of
from only_one.driver import TROUBLE, Commands
from only_one.events import log
from only_one.lock.commands import MarkerUpdate, Script, evaluate

from .broker import redelivers_at_any_time, remembered_for, visibility_timeout

STORES_WITHIN = 30
"""Seconds after a run's end after which a redelivery no longer waits for its result, and does the work again.

If the process of the run is seen to be gone, the redelivery does the work at once.
"""

_READ = Script("""
if tonumber(ARGV[1]) > 0 then
    redis.call('hset', KEYS[2], 'asked', 1)
    redis.call('pexpire', KEYS[2], ARGV[1])
end
local fields = redis.call('hmget', KEYS[2], 'number', 'ended', 'stored', 'ended_at')
value = {fields[1] or 0, fields[2] or '', fields[3] or 0, redis.call('time')[1] - (fields[4] or 0)}""")
# The token of the run takes most of the memory, and is not needed once the result is stored.
STORED = Script("value = redis.call('exists', KEYS[2]) == 1 and redis.call('hset', KEYS[2], 'stored', 1, 'ended', '')")
"""Notes that the result of the run that has ended is stored."""
REQUEUED = Script("""
if tonumber(redis.call('hget', KEYS[2], 'number') or 0) <= tonumber(ARGV[1]) then
    redis.call('hset', KEYS[2], 'number', ARGV[1])
    redis.call('pexpire', KEYS[2], ARGV[2])
end""")
"""Stores how often the message just published was requeued; the marker lives for ARGV[2] milliseconds from now on."""


class CompletionMarker(NamedTuple):
    """What the completion marker says of the messages of one work.

    Attributes:
        times: how often the latest of them was requeued; the others do not count.
        ended: the token of the run that has ended; empty if none has, or once the result of the run is stored.
        is_stored: whether its result is stored, and the tasks after it are published.
        age: seconds since it ended.
    """

    times: int
    ended: bytes
    is_stored: bool
    age: int


def read_marker(key: str, marker: str, waits: float) -> Commands[CompletionMarker]:
    """Read the completion marker of one work.

    Args:
        key: the key as it is in Redis.
        marker: the name of the marker.
        waits: seconds for which the marker tells the run that a redelivery waits for its end; 0 if none does.

    Returns:
        The fields of the marker.
    """
    times, ended, stored, age = yield from evaluate(_READ, key, round(waits * 1000), beside=(marker,))
    return CompletionMarker(int(times), ended, bool(int(stored)), int(age))


def marker_update(task: Any, marker: str, ended_by: BaseException | None, seconds: float) -> MarkerUpdate | None:
    """The completion marker that the release of a task with acks_late sets, if the run has ended.

    A run has ended if it has returned. It has also ended if it is retried or replaced, because its next message is
    published.
    It has not ended if it was rejected, ignored or interrupted by a signal: a redelivery does its work. If it has
    failed, that depends on whether its message is acknowledged then.

    Args:
        task: the task.
        marker: the name of the marker.
        ended_by: the exception that the run has raised, or None.
        seconds: how long the run has taken.
    """
    has_ended: Any = ended_by is None or isinstance(ended_by, Retry) or _is_replaced(ended_by)
    if isinstance(ended_by, Exception) and not isinstance(ended_by, (Ignore, Reject, Retry)):
        has_ended = acks_failures(task)
    if not has_ended:
        return None
    # A redelivery may not have asked yet, because it waits for a free process of a worker.
    may_be_unseen = redelivers_at_any_time(task.app) or seconds > visibility_timeout(task.app) / 2
    return MarkerUpdate(marker, round(1000 * remembered_for(task.app)) if may_be_unseen else 0)


def acks_failures(task: Any) -> bool:
    """Whether the message of a run that has failed is acknowledged. Else a dead-letter queue may bring it back."""
    # A task has `acks_on_failure` since Celery 5.7.
    return bool(getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout))


def _is_replaced(ended_by: BaseException) -> bool:
    """Whether Celery has raised the exception because the task is replaced; only its traceback tells it from others."""
    replaces = Task.on_replace.__code__
    return isinstance(ended_by, Ignore) and any(f.f_code is replaces for f, _ in walk_tb(ended_by.__traceback__))


@contextmanager
def suppress_trouble(task_id: str) -> Iterator[None]:
    """A block that is left with a log line if the server does not answer, or refuses: the caller goes on without it."""
    try:
        yield
    except TROUBLE as error:
        log(level_of(error), "the completion marker or number of %s cannot be read or written: %s", task_id, error)
