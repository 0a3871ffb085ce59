"""Received tasks, which a worker has and has not begun: it renews their keys, and numbers them for ``buffer_one``.

Their keys name the worker's process: if it dies, its keys do not block.
"""

import atexit
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any
from weakref import ref

from celery import signals
from celery.app.task import Context
from redis.exceptions import ResponseError

from only_one.call.effective_options import Call, EffectiveOptions
from only_one.clock import now
from only_one.connections.server import Server
from only_one.driver import TROUBLE, Commands, drive
from only_one.events import warn_once
from only_one.forks import in_each_child
from only_one.holder import Holder, Work, is_queued, task_id_of, work_held_by
from only_one.lock.commands import ReleaseResult, replace
from only_one.lock.lease import Lease
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import hold, release_at_exit, release_later
from only_one.policies import BufferOne
from only_one.settings import DEFAULT_LEASE

from .broker import redelivers_at_any_time, remembered_for
from .delivery import Delivery
from .queue_timeout import longest_wait
from .redelivery import read_marker
from .requeue import keep_content_type
from .task_functions import TaskCaller, decorations_of, key_of_arguments


class _WaitingLease(Lease):
    """The lease of a unique task that this worker has received.

    If the run of another task takes the key over, that run stores the value of this lease again when it ends.
    When Celery tells us that the worker ends, it has forgotten the requests; the lease still knows the message.

    Attributes:
        request: gives the worker's request of the task; None once Celery has forgotten it.
        message: the task's message.
        may_wait: gives the seconds for which the task may still wait; 0 or fewer if it has expired.
    """

    server: Server

    def __init__(self, server: Server, key: str, queue_timeout: float, request: Any, work: Work) -> None:
        """``work`` is that of the request."""
        self.message = request.message
        # Not the delivery, which has the arguments: many tasks with an `eta` may wait here.
        caller = TaskCaller(request.task)
        self._waiting_value = partial(caller.waiting_value, key, work)
        self.may_wait = partial(longest_wait, request.app, queue_timeout, request.expires, request.eta)
        most = self.may_wait()
        # A task that expires does not run afterwards. For any other the key is renewed however long the task waits.
        limit = most if request.expires else None
        token = caller.tokens(work, "received").token(limit)
        # It does not refer to the lease, which is renewed no more once nobody does.
        self.request = ref(request, lambda _: _end_wait(token))
        super().__init__(server, key, token, now(), min(DEFAULT_LEASE, most), limit or inf)

    def end_of_wait(self) -> PendingRelease:
        """What is to be stored at the key when no worker has the task any more: the value of a task that is queued.

        If the message is acknowledged, the task was given to a child that has not asked for the key yet. The task will
        never run, and its key is released.
        """
        queued = None if self.message.acknowledged else self._waiting_value(self.may_wait())
        return PendingRelease(self.server, self.key, self.token, self.expires_at, retained=queued)

    def note_expiry(self, sent: float, ttl: float) -> None:
        """Note a renewal. The key is renewed no more once the task has ended."""
        super().note_expiry(sent, ttl)
        if self.message.acknowledged:  # Celery does not forget a task with an `eta` when it ends
            self.renew_at = self.ends_at

    def lose(self, reason: str, value: bytes = b"") -> str:
        """Note that the key is lost. Exception: a run of another task has it, and owes it to this one."""
        is_owed = reason == "taken" and task_id_of(value) != task_id_of(self.token)
        if is_owed:
            self.note_expiry(now(), self.ttl)
            return ""
        return super().lose(reason)


_backs_off_until = 0.0
"""Until when no server is asked, because one did not answer."""

_waiting: dict[bytes, _WaitingLease] = {}
"""By token, the leases of tasks that Celery has not forgotten, waiting or begun."""

in_each_child(_waiting.clear)


def _on_received(request: Any, **_: Any) -> None:
    global _backs_off_until  # noqa: PLW0603 - that of the process
    if decorations := decorations_of(request.task):
        keep_content_type(request)
    if now() < _backs_off_until:
        return
    try:
        for decoration in decorations:
            delivery = Delivery(request.task, Context(request.request_dict), decoration=decoration)
            options = decoration.options_for(delivery)
            if (server := options.server) is not None:
                _store_received(delivery, options, server, request)
                _announce_redelivery(delivery, options, server, request)
                _number(delivery, options, server, request)
    except Exception as error:  # noqa: BLE001 - the task runs all the same; its key expires
        text = "the key or number of %s, which was received, could not be stored"
        warn_once((text, request.name, type(error)), text, request.name, exc_info=error)
        if isinstance(error, TROUBLE) and not isinstance(error, ResponseError):
            _backs_off_until = now() + 10  # the worker has other messages to receive


def _store_received(delivery: Delivery, options: EffectiveOptions, server: Server, request: Any) -> None:
    """Store the value of a received task at the key with which it was queued, and renew it while the task waits."""
    key, header = delivery.key, delivery.header
    was_queued_with_key = header.token or header.attempt  # else it was queued without, or its message was requeued
    if key is None or not was_queued_with_key:
        return
    lease = _WaitingLease(server, key, options.queue_timeout, request, delivery.work)
    until_it_may_begin = longest_wait(request.app, 0, None, request.eta)
    seconds = min(until_it_may_begin + DEFAULT_LEASE, lease.may_wait())
    if seconds <= 0:  # it has expired
        return
    # Many tasks with an `eta` may wait here: none is renewed before it may begin.
    lease.note_expiry(lease.asked_at + seconds - lease.ttl, lease.ttl)
    # Also if the server is away: `begun_request` looks for the request of a killed run here.
    _waiting[lease.token] = lease
    replaced = drive(server.client, _replace_queued(key, delivery, lease.token, seconds))
    if replaced.status == "held":
        delivery.header = header._replace(token=lease.token.decode())
        request.request_dict.update(delivery.header.as_headers())
        hold(lease)
        return
    if lease.lose(replaced.status, replaced.value):
        _waiting.pop(lease.token, None)


def _replace_queued(key: str, delivery: Delivery, token: bytes, seconds: float) -> Commands[ReleaseResult]:
    """Store a token in place of a task's queued value: of that which its message has, or of that which is there."""
    replaced = yield from replace(key, delivery.queued or b"", token, seconds)
    is_of_this_task = work_held_by(Holder.parse(replaced.value)) == delivery.work
    if is_of_this_task and is_queued(replaced.value):  # it was stored by a retry, or by an earlier worker
        replaced = yield from replace(key, replaced.value, token, seconds)
    return replaced


def _end_wait(token: bytes, release: Callable[[PendingRelease], None] = release_later) -> None:
    """Forget a task that has ended, or that no worker has any more: this is stored in the background.

    No worker has it if Celery ends, or has lost its connection to the broker. The broker delivers the message again,
    soon or late, and perhaps to another worker.
    """
    lease = _waiting.pop(token, None)
    if lease is None or lease.reason is not None:  # this was done, or the key is lost
        return
    has_ended = lease.request() is None and lease.message.acknowledged
    if not has_ended:
        release(lease.end_of_wait())


def _announce_redelivery(delivery: Delivery, options: EffectiveOptions, server: Server, request: Any) -> None:
    """Tell the run of a message that a redelivery waits for its end: perhaps no child is free to ask before that.

    Redis delivers a message again while its run goes on in a worker that has lost its connection.
    With RabbitMQ a run says in any case that it has ended.
    """
    may_come_during_run = request.task.acks_late and not redelivers_at_any_time(delivery.app)
    if not (delivery.header.has_begun and may_come_during_run):
        return
    if key := _key_of(delivery, options, request):
        drive(server.client, read_marker(key, delivery.marker(key), waits=remembered_for(delivery.app)))


def _number(delivery: Delivery, options: EffectiveOptions, server: Server, request: Any) -> None:
    """Number a task that ``buffer_one`` coalesces, before it waits here for a free process, or is redelivered.

    A task with an ``eta`` is sent for a later time, and is numbered when it begins.
    """
    has_number = request.eta or delivery.header.trigger is not None
    if has_number or not isinstance(options.when_busy, BufferOne):
        return
    if key := _key_of(delivery, options, request):
        with suppress(ResponseError):  # a server that refuses this refuses the run's number, too, and the run says so
            trigger = delivery.arrive(Call(options, server, key), "", begins=False)
            request.request_dict.update(delivery.header._replace(trigger=trigger).as_headers())


def _key_of(delivery: Delivery, options: EffectiveOptions, request: Any) -> str | None:
    """The key of the call that a message will make, as far as the message tells it; else None.

    If it is not the run's, what is done with it does no harm.
    """
    given = request.args, request.kwargs
    with suppress(Exception):  # of arguments that have no key, perhaps until they are changed on their way to the run
        return delivery.key or key_of_arguments(request.task, delivery.decoration, options.prefix, *given)
    return None


def _on_shutdown(release: Callable[[PendingRelease], None] = release_later, **_: Any) -> None:
    """Store that the tasks which have not begun are in their queue again, and no worker's."""
    for token in list(_waiting):
        _end_wait(token, release)


def begun_request(task_id: str) -> Context | None:
    """The request of a unique task's latest attempt that has begun in this worker; None if none has.

    A retry has the same id: it may have been received meanwhile, and not begun.
    """
    requests = [lease.request() for lease in reversed(list(_waiting.values()))]
    begun = (each for each in requests if each is not None and each.time_start is not None)
    return next((Context(each.request_dict) for each in begun if each.id == task_id), None)


# At a cold shutdown Celery sends no signal when it has restored the messages.
atexit.register(partial(_on_shutdown, release_at_exit))
signals.task_received.connect(_on_received)
signals.worker_shutdown.connect(_on_shutdown)
