"""Requeue: publish a task's message again, with the same id and all that it carries; the delay until it returns.

The broker's visibility timeout bounds the delay, and a message goes back by the way by which it came.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import date, datetime
from functools import cache
from random import SystemRandom
from typing import Any, NamedTuple

from celery import Celery, Task
from celery.utils.quorum_queues import detect_quorum_queues
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import entity
from kombu.connection import Connection

from only_one.errors import ConfigurationError

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
        return {HEADER: {**fields, "number": self.times}}  # which workers of earlier versions compare


def header_of(request: Any) -> Header:
    """What the message carries; of another attempt only that counts which is the task's."""
    none = Header(request.id, request.retries)
    try:
        # Others, such as Sentry's SDK, may put headers of their own in the place of those that Celery hands on.
        carried = vars(request).get(HEADER) or request.headers[HEADER]
        header = Header(**{name: carried[name] for name in Header._fields if name in carried})
    except (TypeError, KeyError):  # none, or by somebody else
        return none
    if header.id != request.id:
        return none
    return header if header.attempt == request.retries else none._replace(trigger=header.trigger, key=header.key)


def publish(task: Task, request: Any, header: Header, countdown: float | None) -> int:
    """Publish the message again.

    Args:
        task: the task.
        request: its current request.
        header: what the message has carried until now.
        countdown: seconds until it is delivered, or None for a second that doubles to ten.

    Returns:
        How often it has been requeued now.
    """
    longest = longest_countdown(task.app)
    delay = _delay(header.times, longest) if countdown is None else min(countdown, longest)
    later = header._replace(times=header.times + 1, token=None)
    kept = {name: value for name, value in (request.headers or {}).items() if not name.startswith(_OF_THE_BROKER)}
    way = way_back(task.app, request.delivery_info or {})
    again: Any = task.signature_from_request(
        request,
        countdown=max(1, round(delay)) if way else delay,
        headers={**kept, **later.as_headers()},
        ignore_result=_ignores_result(task, request),  # which Celery itself carries on since 5.7 only
        **way,
    )
    again.apply_async()
    return later.times


def _ignores_result(task: Task, request: Any) -> Any:
    """What the message says, else the task; the request's class says something, too, which nobody has meant."""
    configured = vars(request).get("ignore_result")
    return task.ignore_result if configured is None else configured


def _delay(times: int, longest: float) -> float:
    # Jitter comes last: what is cut off at the longest would all come back at the same time.
    return min(_DELAYS[min(times, len(_DELAYS) - 1)], longest) * _random.uniform(0.5, 1)


# The broker

_entity: Any = entity  # it has no types

_VISIBILITY_TIMEOUT = 1800.0
"""Seconds: how long RabbitMQ waits for an acknowledgement, and for brokers that do not say."""

_DELAYED = "celery_delayed_"
"""What the exchanges begin with by which a message comes that RabbitMQ has delayed."""

_DELAY = re.compile(r"^(?:[01]\.){28}")
"""What Celery puts before the routing key of a message that RabbitMQ delays: the seconds, in binary."""


def visibility_timeout(app: Celery) -> float:
    """Seconds after which the broker delivers a message again that was not acknowledged."""
    configured = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    if configured:
        return float(configured)
    channel: Any = getattr(_transport(app), "Channel", None)
    for name in ("visibility_timeout", "default_visibility_timeout"):  # the second is that of SQS
        if isinstance(default := getattr(channel, name, None), (int, float)):
            return float(default)
    return _VISIBILITY_TIMEOUT


def longest_countdown(app: Celery) -> float:
    """Seconds for which a message may wait in a worker: the broker would redeliver one that waits longer."""
    return visibility_timeout(app) / 3


def remembered_for(app: Celery) -> float:
    """Seconds after which no redelivery of a message is expected any more."""
    return max(2 * visibility_timeout(app), 3600.0)


def waits_for(app: Celery, queue_timeout: float, expires: Any, until: Any) -> float:
    """Seconds for which a task that is queued now keeps its key.

    Args:
        app: the task's app.
        queue_timeout: seconds for a task that does not expire, from when it may begin.
        expires: when the worker no longer begins it, as Celery takes it; or None.
        until: when it may begin, in seconds or as a time; None for at once.

    Returns:
        The seconds; none are left, or less, for a task that has expired.
    """
    if expires is not None:
        return _seconds_until(app, expires)
    return queue_timeout + max(0.0, _seconds_until(app, until or 0))


def _seconds_until(app: Celery, when: Any) -> float:
    if isinstance(when, date) and not isinstance(when, datetime):
        when = datetime.combine(when, datetime.min.time())
    if not isinstance(when, (str, datetime)):
        return float(when)
    time: Any = maybe_iso8601(when)
    return float((maybe_make_aware(time, app.timezone) - app.now()).total_seconds())


def redelivers_at_any_time(app: Celery) -> bool:
    """Whether the broker delivers a message again as soon as the connection is lost on which it came, as AMQP says."""
    return bool(_transport(app).driver_type == "amqp")


def marks_redeliveries(app: Celery) -> bool:
    """Whether a message says that it was delivered before; that of SQS does not."""
    return _transport(app).driver_type in {"amqp", "redis"}


def way_back(app: Celery, came_by: dict[str, Any]) -> dict[str, Any]:
    """The options with which a message goes back to where it came from, if the broker may delay it: with quorum queues.

    RabbitMQ delays what is sent through a topic exchange. It would lose what comes by another one, or give it to the
    default queue: such a message goes back without its help, and a worker keeps the delay.

    Args:
        app: the application.
        came_by: what Celery says of the message's delivery.

    Returns:
        Options of `apply_async`; none where Celery's own are right.
    """
    if not detect_quorum_queues(app, _transport(app).driver_type)[0]:
        return {}
    exchange, key = came_by["exchange"], _DELAY.sub("", came_by["routing_key"])
    if not exchange:  # it was sent to the queue itself
        with suppress(KeyError):  # which Celery raises where it is not to create queues
            if (queue := app.amqp.queues[key]).exchange.type != "direct":
                return {"queue": queue}
        return {}
    kinds = {each.name: each.type for queue in app.amqp.queues.values() for each in _exchanges_of(queue)}
    if exchange.startswith(_DELAYED) or kinds.get(exchange) == "topic":
        return {"queue": _queue(exchange, "topic", key)}
    # Celery asks a queue whether the broker is to delay it, and sends through what is said beside it.
    return {"queue": _queue(exchange, "direct", key), "exchange": exchange, "routing_key": key, "declare": []}


def _exchanges_of(queue: Any) -> list[Any]:
    return [each for each in (queue.exchange, *(binding.exchange for binding in queue.bindings or ())) if each]


def _queue(exchange: str, kind: str, key: str) -> Any:
    return _entity.Queue(exchange=_entity.Exchange(exchange, type=kind), routing_key=key)


def check_countdown(app: Celery, countdown: float | None) -> None:
    """Refuse a countdown after which the broker would redeliver the message.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    # Not before there is one: a task that is only called needs no transport.
    if countdown is not None and countdown > (longest := longest_countdown(app)):
        msg = (
            f"countdown={countdown:g} is more than a third of the broker's visibility timeout, and it would deliver "
            f"copies: write at most {longest:g} seconds, or raise broker_transport_options['visibility_timeout']"
        )
        raise ConfigurationError(msg)


def _transport(app: Celery) -> Any:
    url = app.conf.broker_read_url  # which is `broker_url` where nothing else is said
    return _transport_of(tuple(url) if isinstance(url, list) else url, app.conf.broker_transport)


@cache
def _transport_of(url: str | tuple[str, ...] | None, name: str | None) -> Any:
    return Connection(url, transport=name).get_transport_cls()  # type: ignore[no-untyped-call]
