"""The broker: its visibility timeout, the longest countdown, and the way of a message back to its queue."""

import re
from contextlib import suppress
from typing import Any

import kombu
from celery import Celery
from celery.utils.quorum_queues import detect_quorum_queues

from only_one.errors import ConfigurationError

_kombu: Any = kombu  # it has no types


def visibility_timeout(app: Celery) -> float:
    """Seconds after which the broker delivers a message again that was not acknowledged."""
    return _facts(app)[0]


def longest_countdown(app: Celery) -> float:
    """Seconds for which a message may wait in a worker. If it waited longer, the broker might redeliver it.

    That is a third of the time after which it does, which counts from the delivery: after its delay the message may
    wait for a free process, and its run takes time, too.
    """
    return visibility_timeout(app) / 3


def remembered_for(app: Celery) -> float:
    """Seconds after which no redelivery of a message is expected any more."""
    return max(2 * visibility_timeout(app), 3600.0)


def redelivers_at_any_time(app: Celery) -> bool:
    """Whether the broker redelivers a message as soon as the connection on which it came is lost, as AMQP says."""
    return _kind(app) == "amqp"


def way_back(app: Celery, came_by: dict[str, Any]) -> dict[str, Any]:
    """Options that send a message back to where it came from, and nowhere else; none if Celery's own are right.

    With quorum queues, RabbitMQ delays a message that is sent through a topic exchange. A message that came by another
    exchange would be lost, or go to the default queue: it goes back without a delay of RabbitMQ's, and a worker delays
    it.

    Args:
        app: the application.
        came_by: Celery's ``delivery_info`` of the message.

    Raises:
        ConfigurationError: for a message that came by a fanout exchange.
    """
    exchange = came_by.get("exchange") or ""
    # Celery puts the seconds of a delay by RabbitMQ before the routing key: 28 binary digits.
    key = re.sub(r"^(?:[01]\.){28}", "", came_by.get("routing_key") or "")
    known = _exchange_of(app, exchange)
    kind = known and known.type
    if kind == "fanout":
        msg = (
            f"a message of the Broadcast exchange {exchange!r} cannot be requeued, because all workers would get it "
            "again: write a key that each worker has for itself"
        )
        raise ConfigurationError(msg)
    if detect_quorum_queues(app, _kind(app))[0]:
        is_topic = kind == "topic" or exchange.startswith("celery_delayed_")  # RabbitMQ has delayed it before
        return _back_by_exchange(exchange, key, is_topic=is_topic) if exchange else _back_to_queue(app, key)
    # In a child of the pool that has not declared a topic exchange, kombu's Redis takes it for a direct one.
    return {"declare": [known]} if kind == "topic" and _kind(app) != "amqp" else {}


def _back_to_queue(app: Celery, name: str) -> dict[str, Any]:
    """The options for a message that was sent to a quorum queue itself."""
    with suppress(KeyError):  # raised if Celery must not create queues
        queue = app.amqp.queues[name]
        return {} if queue.exchange.type == "direct" else {"queue": queue}
    return {}


def _back_by_exchange(exchange: str, key: str, *, is_topic: bool) -> dict[str, Any]:
    """The options for a message that came to a quorum queue by an exchange."""
    source = _kombu.Exchange(exchange, type="topic" if is_topic else "direct")
    queue = _kombu.Queue(exchange=source, routing_key=key)
    # Celery decides by the option `queue` whether RabbitMQ delays the message, and sends it by the other options.
    return {"queue": queue} if is_topic else {"queue": queue, "exchange": exchange, "routing_key": key, "declare": []}


def _exchange_of(app: Celery, name: str) -> Any:
    """The exchange with this name, of the app's queues; None if they have no such one."""
    exchanges = [each.exchange for queue in app.amqp.queues.values() for each in (queue, *(queue.bindings or ()))]
    return next((each for each in exchanges if each and each.name == name), None) if name else None


def refuse_long_countdown(app: Celery, countdown: float | None) -> None:
    """Refuse a countdown after which the broker would redeliver the message.

    Raises:
        ConfigurationError: for such a countdown; the message says what to write instead.
    """
    vars(app).pop("only_one_broker", None)  # the app may have been configured since
    # A task that is only called needs no transport, so the timeout is not read if there is no countdown.
    if countdown is not None and countdown > (longest := longest_countdown(app)):
        msg = (
            f"countdown={countdown:g} is more than a third of the time after which the broker redelivers a message: "
            f"write at most {longest:g} seconds, or raise broker_transport_options['visibility_timeout'] (with "
            "RabbitMQ to its consumer_timeout, raised too)"
        )
        raise ConfigurationError(msg)


def _kind(app: Celery) -> str:
    """The kind of the broker: "amqp", "redis" or another."""
    return _facts(app)[1]


def _facts(app: Celery) -> tuple[float, str]:
    """The visibility timeout and the kind of transport, read once: reading a setting of Celery's takes long."""
    facts: tuple[float, str] | None = vars(app).get("only_one_broker")
    if facts is None:
        url = app.conf.broker_read_url  # `broker_url`, if not configured
        transport = _kombu.Connection(url, transport=app.conf.broker_transport).get_transport_cls()
        default = getattr(getattr(transport, "Channel", None), "visibility_timeout", None)
        if not isinstance(default, (int, float)):  # that of SQS is a property
            default = 1800  # RabbitMQ's default `consumer_timeout`, and that of SQS
        configured = (app.conf.broker_transport_options or {}).get("visibility_timeout")
        facts = vars(app)["only_one_broker"] = float(configured or default), transport.driver_type
    return facts
