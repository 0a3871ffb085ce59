"""Requeue: publish a task's message again, with the same id and all that it carries, after a delay."""

from contextlib import suppress
from random import SystemRandom
from typing import Any, NamedTuple

from celery import Task
from kombu.serialization import registry

from only_one.holder import Work

from .broker import longest_countdown, way_back

HEADER = "only_one"

_DELAYS = (1.0, 2.0, 4.0, 8.0, 10.0)
"""Seconds of delay by the number of requeues so far; half of it is left to chance."""

_OF_THE_BROKER = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")
"""The beginnings of headers in which RabbitMQ counts. By them it drops a message that seems to go in circles."""

_random = SystemRandom()


class Header(NamedTuple):
    """The header of only_one in a task's message.

    Attributes:
        id: the id of the task for which the header was made. Other tasks may be sent with copied headers.
        attempt: the attempt of the message. For another attempt of the task, only ``trigger`` and ``key`` count.
        times: how often the message was requeued. Of all messages of one work, only the one requeued most often counts.
        replacement: how often the task was replaced. For another replacement, only ``trigger`` counts, because the
            arguments may have another key.
        trigger: the number of the task among those that ``buffer_one`` coalesces.
        key: the key as it is in Redis, of a task that is unique from queued to finished.
        token: the value that was stored at the key when the task was queued.
        lineage: a random id that the first requeue gives to all later messages, because later work may have the same
            task id.
        has_begun: whether a run of the work may have begun, because a redelivery of it was requeued.
    """

    id: str
    attempt: int
    times: int = 0
    replacement: int = 0
    trigger: int | None = None
    key: str | None = None
    token: str | None = None
    lineage: str | None = None
    has_begun: bool | None = None

    def as_headers(self) -> dict[str, Any]:
        """The header as the message carries it."""
        return {HEADER: {name: value for name, value in self._asdict().items() if value is not None}}


def work_of(request: Any) -> Work:
    """The work of the message that Celery's request is about."""
    # The id may be a `uuid.UUID`.
    return Work(str(request.id), vars(request).get("replaced_task_nesting") or 0, request.retries)


def header_of(request: Any) -> Header:
    """The header in a message. Of a header that was made for other work, only what holds for this one is kept."""
    work = work_of(request)
    header = without = Header(work.id, work.attempt, _times_in(request), work.replacement)
    # Others, such as Sentry's SDK, may put headers of their own in the place of those that Celery hands on.
    carried = vars(request).get(HEADER) or (request.headers or {}).get(HEADER)
    if carried is None:
        return without
    with suppress(TypeError):  # somebody else's header
        header = Header(**{name: carried[name] for name in Header._fields if name in carried})
    if header.id != work.id:
        # The header may be copied from another task. Or the task's own `apply_async` has given this task another id:
        # then the header's token is stored at the key, until `Publication` has lengthened the key's expiry.
        return without._replace(token=header.token)
    if (header.replacement, header.attempt) == (work.replacement, work.attempt):
        return header._replace(times=max(header.times, without.times))
    key = header.key if header.replacement == work.replacement else None  # a replacement may have other arguments
    return without._replace(trigger=header.trigger, key=key)


def _times_in(request: Any) -> int:
    """How often the message was requeued by its AMQP properties, in which nobody puts another task's headers."""
    mark, _, times = str((vars(request).get("properties") or {}).get("message_id")).partition(":")
    return int(times) if mark == HEADER and times.isdecimal() else 0


def publish(task: Task, request: Any, header: Header, countdown: float | None) -> Any:
    """Publish the message again.

    Args:
        task: the task.
        request: the task's current request.
        header: the message's header until now.
        countdown: seconds until the message is delivered; None for one second, doubled by each requeue up to ten.

    Returns:
        The signature by which it was published.
    """
    longest = longest_countdown(task.app)
    delay = _delay(header.times, longest) if countdown is None else min(countdown, longest)
    way = way_back(task.app, request.delivery_info or {})
    seconds = max(1, round(delay)) if "queue" in way else delay  # RabbitMQ may delay it, in whole seconds
    headers = {name: value for name, value in (request.headers or {}).items() if not name.startswith(_OF_THE_BROKER)}
    headers |= header._replace(times=header.times + 1, token=None).as_headers()
    # The message decides, else the task. `request.ignore_result` may be the default of its class, which nobody chose.
    # Celery carries the option on by itself since 5.7 only.
    ignores = vars(request).get("ignore_result")
    ignores = task.ignore_result if ignores is None else ignores
    # A signal handler may hand on the headers of this delivery, and with them an earlier count.
    kept = {"message_id": f"{HEADER}:{header.times + 1}", "compression": vars(request).get("compression")}
    # The representations that the sender gave may hide secrets of the arguments.
    kept |= {name: vars(request).get(name) for name in ("argsrepr", "kwargsrepr")}
    # None is the app's serializer.
    kept["serializer"] = registry.type_to_name.get((vars(request).get("properties") or {}).get("content_type"))
    again: Any = task.signature_from_request(
        request, countdown=seconds, headers=headers, ignore_result=ignores, **kept, **way
    )
    # The task's own `apply_async` may take the message for new work: that of celery-once drops it as a duplicate.
    Task.apply_async(task, again.args, again.kwargs, **again.options)
    return again


def keep_content_type(request: Any) -> None:
    """Put the content type of a message where its run finds it in any pool, so that a requeue keeps the format."""
    properties = {**request.request_dict["properties"], "content_type": request.content_type}
    request.request_dict["properties"] = properties


def _delay(times: int, longest: float) -> float:
    # Jitter comes last: if delays were cut off at the longest after it, many would end at the same time.
    return min(_DELAYS[min(times, len(_DELAYS) - 1)], longest) * _random.uniform(0.5, 1)
