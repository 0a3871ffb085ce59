"""The broker: its visibility timeout, the longest countdown, how long a message waits, and its way back to a queue."""

import re
from contextlib import suppress
from typing import Any

import kombu
from celery import Celery
from celery.utils.quorum_queues import detect_quorum_queues
from celery.utils.time import maybe_iso8601, maybe_make_aware

from only_one.errors import ConfigurationError
from only_one.option_values import LONGEST

_kombu: Any = kombu  # it has no types


def visibility_timeout(app: Celery) -> float:
    """Seconds after which the broker delivers a message again that was not acknowledged."""
    return _facts(app)[0]


def longest_countdown(app: Celery) -> float:
    """Seconds for which a message may wait in a worker. If it waited longer, the broker might redeliver it."""
    return visibility_timeout(app) / 3


def remembered_for(app: Celery) -> float:
    """Seconds after which no redelivery of a message is expected any more."""
    return max(2 * visibility_timeout(app), 3600.0)


def waits_for(app: Celery, queue_timeout: float, expires: Any, eta: Any) -> float:
    """Seconds for which a task that is queued now keeps its key.

    Args:
        app: the task's app.
        queue_timeout: seconds for a task that does not expire, from when it may begin.
        expires: when the worker no longer begins it: seconds from now, a time or its ISO 8601 text; None for never.
        eta: when it may begin: seconds from now, or a time; None for at once.

    Returns:
        The seconds, at most ten years, also if it expires in the year 9999; 0 or fewer for a task that has expired.
    """
    if expires is not None:
        return min(_seconds_until(app, expires), LONGEST)
    return min(queue_timeout + max(0.0, _seconds_until(app, eta or 0)), LONGEST)


def _seconds_until(app: Celery, when: Any) -> float:
    if not isinstance(when, str) and not hasattr(when, "isoformat"):
        return float(when)
    time: Any = maybe_iso8601(when if isinstance(when, str) else when.isoformat())
    # By timestamps: the difference of two times of one zone leaves out that its clocks change.
    return float(maybe_make_aware(time).timestamp() - app.now().timestamp())


def redelivers_at_any_time(app: Celery) -> bool:
    """Whether the broker redelivers a message as soon as the connection on which it came is lost, as AMQP says."""
    return _facts(app)[1] == "amqp"


def marks_redeliveries(app: Celery) -> bool:
    """Whether a redelivered message says so. A message of SQS does not."""
    return _facts(app)[1] in {"amqp", "redis"}


def way_back(app: Celery, came_by: dict[str, Any]) -> dict[str, Any]:
    """Options that send a message back to where it came from, and nowhere else; none if Celery's own are right.

    With quorum queues, RabbitMQ delays a message that is sent through a topic exchange. A message that came by another
    exchange would be lost, or go to the default queue: it goes back without a delay of RabbitMQ's, and a worker delays
    it.
    A message that came by a fanout exchange goes back to this worker's queue, or each worker would get it once more.

    Args:
        app: the application.
        came_by: Celery's ``delivery_info`` of the message.

    Raises:
        ConfigurationError: for a message of a fanout exchange of Redis, which has no queue of this worker's.
    """
    # Celery puts the seconds of a delay by RabbitMQ before the routing key: 28 binary digits.
    exchange, key = came_by.get("exchange") or "", re.sub(r"^(?:[01]\.){28}", "", came_by.get("routing_key") or "")
    kind = _facts(app)[1]
    own = _own_queue(app, exchange, key)
    if own and kind == "redis":
        msg = (
            f"a message of the Broadcast queue {own!r} cannot be requeued with Redis, because all workers would get it "
            "again: write a key that each worker has for itself, or use RabbitMQ"
        )
        raise ConfigurationError(msg)
    if own:
        return {"queue": _kombu.Queue(own), "declare": []}
    exchanges = [each.exchange for queue in app.amqp.queues.values() for each in (queue, *(queue.bindings or ()))]
    topics = {each.name: each for each in exchanges if each and each.type == "topic"}
    if not detect_quorum_queues(app, kind)[0]:
        # In a child of the pool that has not declared a topic exchange, kombu's Redis takes it for a direct one.
        return {"declare": [topics[exchange]]} if exchange in topics and kind != "amqp" else {}
    if not exchange:  # it was sent to the queue itself
        with suppress(KeyError):  # raised if Celery must not create queues
            if (queue := app.amqp.queues[key]).exchange.type != "direct":
                return {"queue": queue}
        return {}
    is_topic = exchange in topics or exchange.startswith("celery_delayed_")  # RabbitMQ has delayed it before
    # Celery decides by the option `queue` whether RabbitMQ delays the message, and sends it by the other options.
    beside: dict[str, Any] = {} if is_topic else {"exchange": exchange, "routing_key": key, "declare": []}
    source = _kombu.Exchange(exchange, type="topic" if is_topic else "direct")
    return {"queue": _kombu.Queue(exchange=source, routing_key=key), **beside}


def _own_queue(app: Celery, exchange: str, key: str) -> str | None:
    """The name of this worker's queue of a fanout exchange, if a message came by the two; None for other messages."""
    fanouts = [
        each for each in app.amqp.queues.consume_from.values() if each.exchange and each.exchange.type == "fanout"
    ]
    # A message that was sent to the queue itself has no exchange.
    names = [str(each.name) for each in fanouts if (each.exchange.name == exchange if exchange else each.name == key)]
    return names[0] if names else None


def refuse_long_countdown(app: Celery, countdown: float | None) -> None:
    """Refuse a countdown after which the broker would redeliver the message.

    Raises:
        ConfigurationError: for such a countdown; the message says what to write instead.
    """
    vars(app).pop("only_one_broker", None)  # the app may have been configured since
    # A task that is only called needs no transport, so the timeout is not read if there is no countdown.
    if countdown is not None and countdown > (longest := longest_countdown(app)):
        msg = (
            f"countdown={countdown:g} is more than a third of the broker's visibility timeout, "
            f"and the broker would redeliver the message: write at most {longest:g} seconds, "
            "or raise broker_transport_options['visibility_timeout']"
        )
        raise ConfigurationError(msg)


def _facts(app: Celery) -> tuple[float, str]:
    """The visibility timeout and the kind of transport, read once: reading a setting of Celery's takes long."""
    facts: tuple[float, str] | None = vars(app).get("only_one_broker")
    if facts is None:
        url = app.conf.broker_read_url  # `broker_url`, if not configured
        transport = _kombu.Connection(url, transport=app.conf.broker_transport).get_transport_cls()
        channel = getattr(transport, "Channel", None)
        # SQS has the second name.
        defaults = [getattr(channel, name, None) for name in ("visibility_timeout", "default_visibility_timeout")]
        # 1800 is RabbitMQ's default `consumer_timeout`, and stands in for the timeout of brokers that do not say it.
        default = next((each for each in defaults if isinstance(each, (int, float))), 1800)
        configured = (app.conf.broker_transport_options or {}).get("visibility_timeout")
        facts = vars(app)["only_one_broker"] = float(configured or default), transport.driver_type
    return facts
