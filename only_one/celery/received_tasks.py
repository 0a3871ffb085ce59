"""Received tasks: a worker has them and has not begun them, so it renews their keys, and numbers for ``buffer_one``.

Their keys name the worker's process, which is seen to die.
"""

import atexit
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from logging import WARNING
from math import inf
from typing import Any
from weakref import ref

from celery import signals
from celery.app.task import Context
from redis.exceptions import ResponseError

from only_one.call.effective_options import Call, Decoration
from only_one.call.owed_key import note_of
from only_one.clock import now
from only_one.connections.server import Server
from only_one.driver import RAW, TROUBLE, drive
from only_one.events import log
from only_one.forks import in_each_child
from only_one.holder import Holder, is_queued, task_id_of
from only_one.lock.commands import Retained, release_now, replace
from only_one.lock.lease import Lease
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import hold, release_later
from only_one.policies import BufferOne
from only_one.settings import DEFAULT_LEASE

from .broker import redelivers_at_any_time, remembered_for, waits_for
from .delivery import Delivery
from .redelivery import read_marker
from .requeue import header_of, keep_content_type
from .task_functions import TaskCaller, decorations_of, key_of_arguments, key_of_message, queue_options_of
from .work import Work, work_held_by, work_of

_warned: set[tuple[str, type]] = set()


def warn_once(text: str, error: Exception, log: Callable[..., None] = log) -> None:
    """Log an exception, because there is nobody to raise it to: the first of its kind."""
    if (text, type(error)) not in _warned:
        _warned.add((text, type(error)))
        log(WARNING, text, exc_info=error)


class _WaitingLease(Lease):
    """The lease of a task that waits: if another task's run takes the key over, the run stores our value again.

    It outlives its request: Celery forgets the requests before it tells us that the worker ends.

    Attributes:
        request: gives the task's request; None once Celery has forgotten it.
        message: the task's message, which knows for longer whether it is acknowledged.
        note: the name of the note for a run that has taken the key over.
        may_wait: gives the seconds for which the task may still wait, in whatever queue; 0 or fewer if it has expired.
    """

    server: Server

    def __init__(self, server: Server, key: str, queue_timeout: float, request: Any, work: Work) -> None:
        """``work`` is that of the request's message, which has the key."""
        self.request, self.message, self.note = ref(request), request.message, note_of(key, *work)
        self._queued = work.token_factory(request.task, "queued")
        self.may_wait = partial(waits_for, request.app, queue_timeout, request.expires, request.eta)
        most = self.may_wait()
        # However long it waits, unless it expires: then it does not run.
        limit = most if request.expires else None
        token = work.token_factory(request.task, "received").token(limit)
        super().__init__(server, key, token, now(), min(DEFAULT_LEASE, most), inf if limit is None else limit)

    def queued_again(self) -> Retained:
        """The value of the task in its queue, and until when it would live there; that may be past."""
        until = now() + (left := self.may_wait())
        return Retained(self._queued.token(left), until, self.note)

    def lives_on(self, sent: float, ttl: float) -> None:
        """Note the same, and renew the key no more once the task has ended, or is in its queue again.

        It has ended if its message is acknowledged: Celery remembers for long what had an ``eta``.
        """
        super().lives_on(sent, ttl)
        request = self.request()
        if request is None or request.acknowledged:
            self.renew_at = self.ends_at
        if request is None and not self.message.acknowledged:
            _queue_again(self)

    @property
    def is_over(self) -> bool:
        """Whether the key is lost, or the task has ended: its message is acknowledged, and Celery has forgotten it."""
        return self.reason is not None or (self.request() is None and self.message.acknowledged)

    def lose(self, reason: str, value: bytes = b"") -> str:
        """Note that the key is lost, unless it comes back; until then each renewal finds the other's value."""
        if reason == "taken" and self.is_lent_to(value):
            self.lives_on(now(), self.ttl)
            return ""
        return super().lose(reason, value)

    def is_lent_to(self, value: bytes) -> bool:
        """Whether ``value``, which is stored at the key, is that of a run of other work."""
        return task_id_of(value) != task_id_of(self.token)


_swept_at = _backs_off_until = 0.0

_waiting: dict[bytes, _WaitingLease] = {}
"""The leases of keys that name this process, or that another's run has taken over, by token. Other leases are lost."""


in_each_child(_waiting.clear)


def _on_received(sender: Any, request: Any, **_: Any) -> None:
    global _swept_at, _backs_off_until  # noqa: PLW0603 - those of the process
    if decorations := decorations_of(request.task):
        keep_content_type(request)
    if now() < _backs_off_until:
        return
    if now() >= _swept_at + DEFAULT_LEASE:  # time to forget what has begun since, or has ended without
        _swept_at = now()
        for lease in list(_waiting.values()):
            if lease.is_over and lease.request() is None:
                _waiting.pop(lease.token, None)  # the renewing thread may have done it meanwhile
    try:
        _receive(sender, request)
        for decoration in decorations:
            _announce_redelivery(decoration, request)
            _number(decoration, request)
    except Exception as error:  # noqa: BLE001 - the task runs all the same; its key expires
        warn_once(f"the key or number of {request.name}, which was received, could not be stored", error)
        if isinstance(error, TROUBLE) and not isinstance(error, ResponseError):
            _backs_off_until = now() + 10  # the worker has other messages to receive


def _receive(consumer: Any, request: Any) -> None:
    """Store this process at the key of a task that was queued with it, while the process lives and the task waits."""
    options = queue_options_of(request.task)
    if options is None or options.server is None:
        return
    context = Context(request.request_dict)
    header, work = header_of(context), work_of(context)
    has_key = header.token or header.attempt  # else it was queued without
    if header.key is None or not has_key:
        return
    lease = _WaitingLease(options.server, header.key, options.queue_timeout, request, work)
    seconds = min(DEFAULT_LEASE + waits_for(request.app, 0, None, request.eta), lease.may_wait())
    if seconds <= 0:  # it has expired
        return
    lease.lives_on(lease.asked_at + seconds - lease.ttl, lease.ttl)  # not renewed before it may begin: many may wait
    queued = header.token.encode() if header.token else b""
    _waiting[lease.token] = lease  # also if the server is away: a task that is killed is withdrawn by its request
    became = drive(options.server.client, replace(header.key, queued, lease.token, seconds))
    held = work_held_by(Holder.parse(became.value))  # a retry, or an earlier worker's
    if held is not None and held.id == work.id:
        if is_queued(became.value) and held == work:
            became = drive(options.server.client, replace(header.key, became.value, lease.token, seconds))
        elif held < work:  # the previous attempt has not ended yet
            consumer.timer.call_after(1, _on_received, (consumer, request))
    # Another run may store our value again at its end, unless it is told that this task has ended before.
    is_lent = became.status == "taken" and lease.is_lent_to(became.value)
    if became.status == "held":
        request.request_dict.update(header._replace(token=lease.token.decode()).as_headers())
        hold(lease)
    elif not is_lent:
        _waiting.pop(lease.token, None)


def _queue_again(lease: _WaitingLease) -> None:
    """Store the value of a task in its queue: Celery forgets what it has received when it loses its connection.

    The broker delivers the message again, soon or late, and perhaps to another worker.
    """
    if _waiting.pop(lease.token, None) is None:  # the worker ends, and has seen to it
        return
    queued = lease.queued_again()
    release_later(PendingRelease(lease.server, lease.key, lease.token, queued.until, retained=queued))


def _announce_redelivery(decoration: Decoration, request: Any) -> None:
    """Tell the run of a message that a redelivery waits for its end: perhaps no child is free to ask before that.

    Redis delivers again what runs in a worker that has lost its connection. With RabbitMQ a run tells in any case.
    """
    task, app = request.task, request.app
    is_redelivery = task.acks_late and request.delivery_info["redelivered"]
    if not is_redelivery or redelivers_at_any_time(app):
        return
    delivery = Delivery(task, Context(request.request_dict), decoration=decoration)
    options = decoration.options_for(delivery)
    given = (task, decoration, options.prefix, request.args, request.kwargs)
    key = delivery.key or key_of_message(*given)
    if key is None:
        with suppress(Exception):  # of arguments that are changed on their way
            key = key_of_arguments(*given)  # if they are not, it is the run's; else nobody reads this marker
    if key is not None and options.server is not None:
        drive(options.server.client, read_marker(key, delivery.marker(key), waits=remembered_for(app)))


def _number(decoration: Decoration, request: Any) -> None:
    """Number a task that ``buffer_one`` coalesces, before it waits here for a free process, or is redelivered.

    One with an ``eta`` is sent for a later time, and is numbered when it begins.
    """
    options = decoration.options_for(TaskCaller(request.task))
    if request.eta or not isinstance(options.when_busy, BufferOne):
        return
    delivery = Delivery(request.task, Context(request.request_dict), decoration=decoration)
    if delivery.header.trigger is not None or options.server is None:
        return
    key = delivery.key
    with suppress(Exception):  # of arguments that have no key: the run says so
        key = key or key_of_message(request.task, decoration, options.prefix, request.args, request.kwargs)
    if key is not None:
        with suppress(ResponseError):  # a server that refuses this refuses the run's, which says so
            trigger = delivery.arrive(Call(options, options.server, key), "", begins=False)
            request.request_dict.update(delivery.header._replace(trigger=trigger).as_headers())


def _on_shutdown(**_: Any) -> None:
    """Note that the tasks that have not begun are in their queue again, and no worker's.

    A server that does not answer is asked about one task only: a second time when the process exits.
    """
    away: set[Server] = set()
    for token, lease in list(_waiting.items()):
        if lease.server in away:
            continue
        if _waiting.pop(token, None) is None or lease.is_over:
            continue
        try:
            _note_queued_again(lease)
        except Exception as error:  # noqa: BLE001 - the next worker that receives it says so
            warn_once("keys of tasks that are queued again could not be lengthened", error)
            away.add(lease.server)


def _note_queued_again(lease: _WaitingLease) -> None:
    """Store the value of a task in its queue; or a note, for the run that has taken its key over.

    A task whose message is acknowledged was given to a child, which has not asked for its key yet: it will never run.
    """
    client, request, queued = lease.server.client, lease.request(), lease.queued_again()
    left = queued.until - now()
    # Asked, because the task may have begun, or ended, or been requeued, and Celery still have its request.
    value = client.execute_command("GET", lease.key, **RAW)
    if value is None:
        return
    if request is not None and request.acknowledged:
        if value == lease.token:
            release_now(client, lease.server.features, lease.key, lease.token)
    elif value == lease.token and left > 0:
        drive(client, replace(lease.key, lease.token, queued.value, left))
    elif left > 0 and lease.is_lent_to(value):
        # The other run would store the value of this process, which is dead by then.
        client.execute_command("SET", lease.note, queued.value, "NX", "PX", round(left * 1000))


def begun_request(task_id: str) -> Context | None:
    """The request of the latest attempt of a unique task that a process of this worker has begun; None if none has.

    A retry has the same id, and may have been received by now.
    """
    requests = [lease.request() for lease in reversed(list(_waiting.values()))]
    begun = (each for each in requests if each is not None and each.time_start is not None)
    return next((Context(each.request_dict) for each in begun if each.id == task_id), None)


atexit.register(_on_shutdown)  # at a cold shutdown Celery sends no signal when it has restored the messages
signals.task_received.connect(_on_received)
signals.worker_shutdown.connect(_on_shutdown)
