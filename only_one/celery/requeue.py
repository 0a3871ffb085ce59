"""Requeue: publish a task's message again, with the same id and all that it carries; the delay until it returns."""

from contextlib import suppress
from random import SystemRandom
from typing import Any, NamedTuple

from celery import Task

from .broker import longest_countdown, way_back

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
        attempt: the attempt of the task that was requeued; for another attempt the rest does not count.
        times: how often it was requeued; of the messages of one attempt only that with the highest number counts.
        trigger: its number among the tasks that ``buffer_one`` coalesces.
        key: the key as it is in Redis, of a task that is unique from queued to finished.
        token: the value that was stored there when it was queued.
    """

    id: str
    attempt: int
    times: int = 0
    trigger: int | None = None
    key: str | None = None
    token: str | None = None

    def as_headers(self) -> dict[str, Any]:
        """The header as the message carries it."""
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        return {HEADER: {**fields, "number": self.times}}  # for workers of earlier versions


def header_of(request: Any) -> Header:
    """The header in a message; of another attempt's header only the fields that are the task's."""
    header = none = Header(request.id, request.retries)
    # Others, such as Sentry's SDK, may put headers of their own in the place of those that Celery hands on.
    carried = vars(request).get(HEADER) or (request.headers or {}).get(HEADER)
    if carried is None:
        return none
    with suppress(TypeError):  # by somebody else
        header = Header(**{name: carried[name] for name in Header._fields if name in carried})
    if header.id != request.id:
        return none
    return header if header.attempt == request.retries else none._replace(trigger=header.trigger, key=header.key)


def publish(task: Task, request: Any, header: Header, countdown: float | None) -> None:
    """Publish the message again.

    Args:
        task: the task.
        request: its current request.
        header: the message's header until now.
        countdown: seconds until the message is delivered, or None for a second that doubles to ten.
    """
    longest = longest_countdown(task.app)
    delay = _delay(header.times, longest) if countdown is None else min(countdown, longest)
    way = way_back(task.app, request.delivery_info or {})
    seconds = max(1, round(delay)) if way else delay
    headers = {name: value for name, value in (request.headers or {}).items() if not name.startswith(_OF_THE_BROKER)}
    headers |= header._replace(times=header.times + 1, token=None).as_headers()
    # The message's setting, else the task's; the default of the request's class is nobody's choice.
    # Celery itself carries it on since 5.7 only.
    ignores = vars(request).get("ignore_result")
    ignores = task.ignore_result if ignores is None else ignores
    again: Any = task.signature_from_request(request, countdown=seconds, headers=headers, ignore_result=ignores, **way)
    again.apply_async()


def _delay(times: int, longest: float) -> float:
    # Jitter comes last: delays cut off at the longest would all end at the same time.
    return min(_DELAYS[min(times, len(_DELAYS) - 1)], longest) * _random.uniform(0.5, 1)
