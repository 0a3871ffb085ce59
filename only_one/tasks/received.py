"""What a worker says of a task that it has received and has not begun: its key names a process that is seen to die."""

from __future__ import annotations

from math import inf
from typing import Any

from celery import signals
from celery.app.task import Context

from only_one.clock import now
from only_one.events import logger
from only_one.holder import Holder, Identity, is_queued
from only_one.lease import Lease
from only_one.leases import hold
from only_one.lock import drive
from only_one.protocol import replace
from only_one.servers import Server
from only_one.settings import DEFAULT_LEASE

from .put_back import header_of
from .task_call import call_from_outside
from .waiting import waits_for
from .wrapping import queue_cover_of

_LOOKS_AGAIN_AFTER = 1.0
"""Seconds after which a retry is looked at again whose attempt before it has not ended yet."""

_RESTS = 10.0
"""Seconds for which nothing is said where the server did not answer: the worker has messages to receive."""

_waiting: dict[Lease, tuple[Server, bytes]] = {}
"""The keys that name this process, where they are, and what stood there before; what others have by now is lost."""

_swept_at = _rests_until = -inf


def _on_received(sender: Any, request: Any, **_: Any) -> None:
    global _rests_until  # noqa: PLW0603 - that of the process
    if now() < _rests_until:
        return
    try:
        _receive(sender, request)
    except Exception as error:  # noqa: BLE001 - the task runs all the same, and its key expires by itself
        logger.debug("%s[%s] is received, which its key does not say: %s", request.name, request.id, error)
        _rests_until = now() + _RESTS


def _receive(consumer: Any, request: Any) -> None:
    """Put this process under the key of a task that was queued with it, for as long as it lives and the task waits."""
    cover = queue_cover_of(request.task)
    if cover is None:
        return
    header = header_of(Context(request.request_dict))
    if header.key is None or not (header.token or header.attempt):
        return
    plan = cover.plan_for(call_from_outside(request.task, cover))
    begins_in = waits_for(request.app, 0, None, request.eta)
    limit = waits_for(request.app, plan.queue_timeout, request.expires, request.eta)
    if plan.server is None or limit <= 0:
        return
    token = _identity(request, header.attempt, "received").token(limit)
    lease = Lease(plan.server, header.key, token, now(), min(DEFAULT_LEASE, limit), limit)
    # It is not renewed before it may begin: any number may wait for that.
    lease.expires_at += begins_in
    lease.renew_at += begins_in
    milliseconds = round(min(DEFAULT_LEASE + begins_in, limit) * 1000)
    queued = header.token.encode() if header.token else b""
    became = drive(plan.server.client, replace(header.key, queued, token, milliseconds))
    if became.fate == "taken":  # by a retry, or by the worker that had the message before this one
        holder = Holder.parse(became.value)
        if holder is None or holder.task_id != request.id or holder.attempt is None:
            return
        if is_queued(became.value) and holder.attempt == header.attempt:
            became = drive(plan.server.client, replace(header.key, became.value, token, milliseconds))
        elif holder.attempt < header.attempt:
            consumer.timer.call_after(_LOOKS_AGAIN_AFTER, _on_received, (consumer, request))
    if became.fate == "held":
        request.request_dict.update(header._replace(token=token.decode()).as_headers())
        _sweep()
        _waiting[lease] = plan.server, queued or _identity(request, header.attempt, "queued").token(limit)
        hold(lease)


def _identity(request: Any, attempt: int, state: str) -> Identity:
    return Identity(request.task.name, request.id, attempt, state)


def _sweep() -> None:
    """Forget what has begun since."""
    global _swept_at  # noqa: PLW0603 - that of the process
    if now() >= _swept_at + DEFAULT_LEASE:
        _swept_at = now()
        for lease in [each for each in _waiting if each.reason is not None]:
            del _waiting[lease]


def _on_shutdown(**_: Any) -> None:
    """What has not begun is in its queue again, and no worker's."""
    while _waiting:
        lease, (server, queued) = _waiting.popitem()
        left = round((lease.ends_at - now()) * 1000)
        if lease.reason is not None or left <= 0:
            continue
        try:
            drive(server.client, replace(lease.key, lease.token, queued, left))
        except Exception as error:  # noqa: BLE001 - the next worker that receives it says so
            logger.debug("%s is queued again, which it does not say: %s", lease.key, error)
            return


signals.task_received.connect(_on_received)
signals.worker_shutdown.connect(_on_shutdown)
