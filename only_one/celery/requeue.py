"""Requeue: publish a task's message again, with the same id and all that it carries; the delay until it returns."""

from contextlib import suppress
from random import SystemRandom
from typing import Any, NamedTuple

from celery import Task

from .broker import longest_countdown, way_back

HEADER = "only_one"

_DELAYS = (1.0, 2.0, 4.0, 8.0, 10.0)
"""Seconds until a message that was requeued so many times is delivered again, of which half is left to chance."""

_OF_THE_BROKER = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")
"""What the headers begin with in which RabbitMQ counts; it drops a message that seems to go round in a circle."""

_random = SystemRandom()


class Header(NamedTuple):
    """What a message carries for us beside the task's own.

    Attributes:
        id: the id of the task that it was made for; others may be sent with copied headers.
        attempt: the attempt of the task that was requeued; for another the rest does not count.
        times: how often it was requeued; of the messages of one attempt only that with the highest counts.
        trigger: its number among those that `buffer_one` coalesces.
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
        """As the message carries it."""
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        return {HEADER: {**fields, "number": self.times}}  # for workers of earlier versions


def header_of(request: Any) -> Header:
    """What the message carries; of another attempt only that counts which is the task's."""
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
        header: what the message has carried until now.
        countdown: seconds until it is delivered, or None for a second that doubles to ten.
    """
    longest = longest_countdown(task.app)
    delay = _delay(header.times, longest) if countdown is None else min(countdown, longest)
    way = way_back(task.app, request.delivery_info or {})
    seconds = max(1, round(delay)) if way else delay
    headers = {name: value for name, value in (request.headers or {}).items() if not name.startswith(_OF_THE_BROKER)}
    headers |= header._replace(times=header.times + 1, token=None).as_headers()
    # What the message says, else the task; the request's class says something, too, which nobody has meant.
    # Celery itself carries it on since 5.7 only.
    ignores = vars(request).get("ignore_result")
    ignores = task.ignore_result if ignores is None else ignores
    again: Any = task.signature_from_request(request, countdown=seconds, headers=headers, ignore_result=ignores, **way)
    again.apply_async()


def _delay(times: int, longest: float) -> float:
    # Jitter comes last: what is cut off at the longest would all come back at the same time.
    return min(_DELAYS[min(times, len(_DELAYS) - 1)], longest) * _random.uniform(0.5, 1)
