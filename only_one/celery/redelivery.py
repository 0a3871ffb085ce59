"""Redelivery: the broker delivers a task's message again, while its run is under way or after it has ended.

A redelivery waits for the run, is dropped when the run has ended, and does the work if the run was killed.
It learns this from the completion marker, a hash in Redis beside the key: the redelivery asks, the release answers.
The result backend is not asked: there may be none, and it is written after the release.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from celery.exceptions import Ignore, Reject, Retry

from only_one.connections.server import Server
from only_one.events import logger
from only_one.lock.commands import TROUBLE, Commands, MarkerUpdate, ReleaseResult, Script, drive, evaluate, now
from only_one.lock.holder import TokenFactory, is_gone

from .app_settings import TaskCaller
from .broker import marks_redeliveries, redelivers_at_any_time, remembered_for, visibility_timeout
from .requeue import header_of

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


class Delivery(TaskCaller):
    """One delivery of a task's message, among the others with the same task id and attempt.

    Attributes:
        id: the task's id.
        attempt: how many times the task has been retried.
        header: what the message carries for us.
        covers_queue: whether the task is unique from queued to finished, through its waits for a retry, too.
        is_superseded: whether it has the key, but a newer one that `buffer_one` coalesces does the work.
    """

    def __init__(self, task: Any, request: Any, *, bound: bool, is_unique_in_queue: bool) -> None:
        super().__init__(task, TokenFactory(task.name, request.id, request.retries), bound=bound)
        self.id = request.id
        self.attempt = request.retries
        self.header = header_of(request)
        self.is_unique_in_queue = is_unique_in_queue
        self.is_superseded = False
        self._request = request
        self._began = now()
        self._has_marker = False

    @property
    def is_redelivered(self) -> bool:
        """Whether the broker says that it has delivered the message before."""
        return bool((self._request.delivery_info or {}).get("redelivered"))

    @contextmanager
    def unless_down(self, doing: str = "told apart") -> Iterator[None]:
        """Go on where the server cannot be asked: the message is requeued, or the work done, all the same."""
        try:
            yield
        except TROUBLE as error:
            logger.debug("copies of %s cannot be %s: %s", self.id, doing, error)

    def check_not_ended(self, server: Server, key: str) -> None:
        """Ask the run that holds the key to tell of its end.

        Raises:
            Ignore: if it has ended: this delivery is dropped.
        """
        with self.unless_down("asked for"):
            commands = read_marker(key, self.marker(key), waits=remembered_for(self.app))
            if drive(server.client, commands).is_stored:
                raise self.drop(key, "its run has ended")

    def check_latest(self, server: Server, key: str) -> CompletionMarker:
        """Look for a message of this attempt that was requeued more often.

        Raises:
            Ignore: if there is one: this delivery is dropped.
        """
        found = drive(server.client, read_marker(key, self.marker(key)))
        if self.header.times < found.number:
            raise self.drop(key, "a later copy of it waits")
        return found

    def note_requeued(self, server: Server, key: str, times: int) -> None:
        """Note that the message was published again."""
        drive(server.client, note_requeued(key, self.marker(key), times, remembered_for(self.app)))

    @property
    def may_be_another(self) -> bool:
        """Whether the message may have been delivered, or published, before."""
        seen = self.header.times or self.is_redelivered
        return bool(seen or (self._task.acks_late and not marks_redeliveries(self.app)))

    def must_wait(self, server: Server, key: str) -> bool:
        """Whether a run of this attempt has ended, and may still store its result; the key is ours.

        Raises:
            Ignore: if the result is stored, or a later message waits: this delivery is dropped.
        """
        found = self.check_latest(server, key)
        if found.is_stored:
            raise self.drop(key, "its run has ended")
        if found.age < _STORES_WITHIN and not is_gone(found.ended):
            return True
        if found.ended:
            logger.info("%s[%s] is run again: its run has ended, but stored no result", self._task.name, self.id)
        return False

    def marker_update(self, key: str, ended_by: BaseException | None) -> MarkerUpdate | None:
        """The completion marker that the release sets, if the run has ended, and with acks_late.

        A run that was rejected, ignored or interrupted by a signal has not ended: a redelivery does its work.
        Nor has one that failed, if its message is not acknowledged then: it may come back by a dead-letter queue.
        """
        has_ended = ended_by is None or isinstance(ended_by, Retry)
        if isinstance(ended_by, Exception) and not isinstance(ended_by, (Ignore, Reject)):
            has_ended = has_ended or self._is_acknowledged_on_failure
        # Where nothing has run, a redelivery finds that out, too, and stores the result that this one may not store.
        if not self._task.acks_late or not has_ended or self.is_superseded:
            return None
        self._has_marker = True
        # There may be a redelivery that could not ask, because it waits for a free place in a worker.
        may_be_unseen = redelivers_at_any_time(self.app) or now() - self._began > visibility_timeout(self.app) / 2
        return MarkerUpdate(self.marker(key), round(1000 * remembered_for(self.app)) if may_be_unseen else 0)

    @property
    def _is_acknowledged_on_failure(self) -> bool:
        configured = getattr(self._task, "acks_on_failure", None)  # since Celery 5.7
        return bool(self._task.acks_on_failure_or_timeout if configured is None else configured)

    def on_release(self, server: Server, key: str, outcome: ReleaseResult | None) -> None:
        """The marker is set if `outcome` says so; when the result is stored, `worker_signals` notes that, too."""
        if self._has_marker and outcome is not None and (outcome.has_redeliveries or outcome.status != "held"):
            self._request.only_one_stored = partial(self._mark_stored, server, key)

    def _mark_stored(self, server: Server, key: str) -> None:
        with self.unless_down("told"):
            drive(server.client, mark_stored(key, self.marker(key)))

    def marker(self, key: str) -> str:
        """The name of the completion marker."""
        return f"{{{key}}}:copy:{self.id}:{self.attempt}"

    def drop(self, key: str, reason: str) -> Ignore:
        """Log that this delivery ends without a run; returns what it ends with."""
        logger.info("a copy of %s[%s] was dropped: %s", self._task.name, self.id, reason, extra={"only_one_key": key})
        return Ignore(reason)
