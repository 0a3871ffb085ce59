"""Requeue: publish a task's message again, with the same id and all that it carries; the delay until it returns."""

from contextlib import suppress
from random import SystemRandom
from typing import Any, NamedTuple

from celery import Task
from kombu.serialization import registry

from .broker import longest_countdown, way_back
from .work import Work, state_of, work_of

HEADER = "only_one"

_DELAYS = (1.0, 2.0, 4.0, 8.0, 10.0)
"""Seconds of delay by the number of requeues so far; half of it is left to chance."""

_OF_THE_BROKER = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")
"""The beginnings of headers in which RabbitMQ counts; it drops a message that seems to go round in a circle."""

_random = SystemRandom()


class Header(NamedTuple):
    """The header of only_one in a task's message.

    Attributes:
        id: the id of the task for which it was made; other tasks may be sent with copied headers.
        attempt: the attempt that was requeued; for another one of the task, only ``trigger`` and ``key`` count.
        times: how often it was requeued; of the messages of one work only that with the highest number counts.
        replacement: how often the task was replaced, like ``attempt``.
        trigger: its number among the tasks that ``buffer_one`` coalesces.
        key: the key as it is in Redis, of a task that is unique from queued to finished.
        token: the value that was stored there when it was queued.
        lineage: a random id of the message that was requeued first; later work may have the same task id again.
        has_begun: whether a run of it may have begun, because it was a redelivery when it was requeued.
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
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        return {HEADER: {**fields, "number": self.times}}  # for workers of earlier versions


def header_of(request: Any, work: Work | None = None) -> Header:
    """The header in a message, whose work may be known; of the header of other work only what may be this one's."""
    work = work or work_of(request)
    header = none = Header(work.id, work.attempt, _times_in(request), work.replacement)
    # Others, such as Sentry's SDK, may put headers of their own in the place of those that Celery hands on.
    carried = vars(request).get(HEADER) or (request.headers or {}).get(HEADER)
    if carried is None:
        return none
    with suppress(TypeError):  # by somebody else
        header = Header(**{name: carried[name] for name in Header._fields if name in carried})
    if header.id != work.id:
        # Copied; or the task's own `apply_async` has given it another id, and the key has the message's token still.
        return none._replace(token=header.token)
    if (header.replacement, header.attempt) == (work.replacement, work.attempt):
        return header._replace(times=max(header.times, none.times))
    key = header.key if header.replacement == work.replacement else None  # a replacement may have other arguments
    return none._replace(trigger=header.trigger, key=key)


def _times_in(request: Any) -> int:
    """How often the message itself says that it was requeued, whatever header somebody has put into it."""
    mark, _, times = str((vars(request).get("properties") or {}).get("message_id")).partition(":")
    return int(times) if mark == HEADER and times.isdecimal() else 0


def publish(task: Task, request: Any, header: Header, countdown: float | None) -> None:
    """Publish the message again, and note in the request that this was done.

    Args:
        task: the task.
        request: its current request.
        header: the message's header until now.
        countdown: seconds until the message is delivered, or None for a second that doubles to ten.
    """
    longest = longest_countdown(task.app)
    delay = _delay(header.times, longest) if countdown is None else min(countdown, longest)
    way = way_back(task.app, request.delivery_info or {})
    seconds = max(1, round(delay)) if "queue" in way else delay  # RabbitMQ may keep it
    headers = {name: value for name, value in (request.headers or {}).items() if not name.startswith(_OF_THE_BROKER)}
    headers |= header._replace(times=header.times + 1, token=None).as_headers()
    # The message's setting, else the task's; the default of the request's class is nobody's choice.
    # Celery itself carries it on since 5.7 only.
    ignores = vars(request).get("ignore_result")
    ignores = task.ignore_result if ignores is None else ignores
    # A signal handler may hand on the headers of this delivery, and with them an earlier count.
    kept = {"message_id": f"{HEADER}:{header.times + 1}", "compression": vars(request).get("compression")}
    kept |= {name: vars(request).get(name) for name in ("argsrepr", "kwargsrepr")}  # which may hide something
    # Without one it is the app's.
    kept["serializer"] = registry.type_to_name.get((vars(request).get("properties") or {}).get("content_type"))
    again: Any = task.signature_from_request(
        request, countdown=seconds, headers=headers, ignore_result=ignores, **kept, **way
    )
    # Past the task's own `apply_async`, which may take it for new work: celery-once's drops it as a duplicate.
    Task.apply_async(task, again.args, again.kwargs, **again.options)
    state = state_of(request)
    state.requeued, state.withdraws = again, False
    end_delivery(request)


def end_delivery(request: Any) -> None:
    """Let no later call in the delivery run, and no ``self.retry()`` publish: a base may catch the ``Ignore``."""
    state_of(request).is_over = True
    request.called_directly = True  # then `self.retry()` raises its error again


def keep_content_type(request: Any) -> None:
    """Put the content type of a message where its run finds it, in any pool: it is requeued in the same format."""
    properties = {**request.request_dict["properties"], "content_type": request.content_type}
    request.request_dict["properties"] = properties


def _delay(times: int, longest: float) -> float:
    # Jitter comes last: delays cut off at the longest would all end at the same time.
    return min(_DELAYS[min(times, len(_DELAYS) - 1)], longest) * _random.uniform(0.5, 1)
