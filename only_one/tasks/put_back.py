"""Put a task's message back into its queue: the same id, and all that it carries."""

from __future__ import annotations

from random import SystemRandom
from typing import Any, NamedTuple

from celery import Celery, Task

from only_one.errors import ConfigurationError

HEADER = "only_one"

_DELAYS = (1.0, 2.0, 4.0, 8.0, 10.0)
"""Seconds until what was put back so many times is delivered again, of which half is left to chance."""

_VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "redis+socket": 3600.0}
_VISIBILITY_TIMEOUT = 1800.0
"""Seconds: that of SQS, and how long RabbitMQ waits for an acknowledgement."""

_random = SystemRandom()


class Header(NamedTuple):
    """What a message carries for us beside the task's own.

    Attributes:
        id: the id of the task that it was made for; others may be sent with copied headers.
        attempt: the attempt of the task that was put back; for another the rest does not count.
        times: how often it was put back.
        number: rises with each time; of the copies that a broker makes only the latest counts.
        trigger: which one it is among those of `buffer_one`.
        key: the key as it is in Redis, of a task that was covered when it was queued.
        token: the value with which it was taken then.
    """

    id: str
    attempt: int
    times: int = 0
    number: int = 0
    trigger: int | None = None
    key: str | None = None
    token: str | None = None

    def as_headers(self) -> dict[str, Any]:
        """As the message carries it."""
        return {HEADER: {name: value for name, value in self._asdict().items() if value is not None}}


def header_of(request: Any) -> Header:
    """What the message carries; of another attempt only that counts which is the task's."""
    none = Header(request.id, request.retries)
    try:
        # Others, such as Sentry's SDK, may put headers of their own in the place of those that Celery hands on.
        found = Header(**(vars(request).get(HEADER) or request.headers[HEADER]))
    except (TypeError, KeyError):  # none, or by somebody else
        return none
    if found.id != request.id:
        return none
    return found if found.attempt == request.retries else none._replace(trigger=found.trigger, key=found.key)


def publish(task: Task, request: Any, header: Header, countdown: float | None) -> int:
    """Publish the message again.

    Args:
        task: the task.
        request: its current request.
        header: what the message has carried until now.
        countdown: seconds until it is delivered, or None for a second that doubles to ten.

    Returns:
        The number that the message carries now.
    """
    longest = longest_countdown(task.app)
    delay = _delay(header.times, longest) if countdown is None else min(countdown, longest)
    later = header._replace(times=header.times + 1, number=header.number + 1, token=None)
    headers = {**(request.headers or {}), **later.as_headers()}
    again: Any = task.signature_from_request(
        request,
        countdown=delay,
        headers=headers,
        ignore_result=_ignores_result(task, request),  # which Celery itself carries on since 5.7 only
    )
    again.apply_async()
    return later.number


def _ignores_result(task: Task, request: Any) -> Any:
    """What the message says, else the task; the request's class says something, too, which nobody has meant."""
    said = vars(request).get("ignore_result")
    return task.ignore_result if said is None else said


def _delay(times: int, longest: float) -> float:
    # Jitter comes last: what is cut off at the longest would all come back at the same time.
    return min(_DELAYS[min(times, len(_DELAYS) - 1)], longest) * _random.uniform(0.5, 1)


def visibility_timeout(app: Celery) -> float:
    """Seconds after which the broker delivers a message again that was not acknowledged."""
    said = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    if said:
        return float(said)
    url = app.conf.broker_read_url or app.conf.broker_url
    return _VISIBILITY_TIMEOUTS.get(str(url).partition("://")[0], _VISIBILITY_TIMEOUT)


def longest_countdown(app: Celery) -> float:
    """Seconds for which a message may wait in a worker: longer, and the broker would deliver copies of it."""
    return visibility_timeout(app) / 3


def remembered_for(app: Celery) -> float:
    """Seconds after which no copy of a message is to be expected any more."""
    return max(2 * visibility_timeout(app), 3600.0)


def check_countdown(app: Celery, countdown: float | None) -> None:
    """Refuse a countdown for which the broker would deliver copies.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    longest = longest_countdown(app)
    if countdown is not None and countdown > longest:
        msg = (
            f"countdown={countdown:g} is more than a third of the broker's visibility timeout, and it would deliver "
            f"copies: write at most {longest:g} seconds, or raise broker_transport_options['visibility_timeout']"
        )
        raise ConfigurationError(msg)
