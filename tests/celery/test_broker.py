"""What is known of a broker by its URL and its settings, and where a message goes back to."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.local import Proxy
from kombu.common import Broadcast
from kombu.entity import Exchange, Queue, binding
from kombu.transport import virtual

from only_one import ConfigurationError
from only_one.celery.broker import (
    longest_countdown,
    redelivers_at_any_time,
    refuse_long_countdown,
    remembered_for,
    visibility_timeout,
    way_back,
)

DELAY = ".".join("0" * 27 + "1")
"""A second, as Celery writes it before a routing key."""


class LikeSqs:
    """A transport with a property, as that of SQS has one."""

    driver_type = "sqs"

    class Channel(virtual.Channel):
        visibility_timeout = property(lambda _: 77)


def app_with(**settings: Any) -> Any:
    return Celery("brokers", set_as_current=False, changes=settings)


REDIS, AMQP = (3600, False), (1800, True)
BROKERS: list[tuple[Any, tuple[float, bool]]] = [
    ({"broker_url": "redis://host"}, REDIS),
    ({"broker_url": "redis+socket:///path"}, REDIS),
    ({"broker_url": "sentinel://a;sentinel://b"}, REDIS),
    ({"broker_url": ["redis://a", "redis://b"]}, REDIS),
    ({"broker_url": "memory://", "broker_read_url": "redis://host"}, REDIS),
    ({"broker_url": "redis://host", "broker_transport_options": {"visibility_timeout": 60}}, (60, False)),
    ({"broker_url": "amqp://host"}, AMQP),
    ({}, AMQP),
    ({"broker_url": "memory://"}, (1800, False)),
    ({"broker_url": "//host", "broker_transport": "tests.celery.test_broker:LikeSqs"}, (1800, False)),
]


@pytest.mark.parametrize(("settings", "expected"), BROKERS, ids=str)
def test_when_a_broker_redelivers(settings: Any, expected: tuple[float, bool]) -> None:
    app = app_with(**settings)
    # The app of a task that is not registered is a proxy.
    for each in (app, Proxy(lambda: app_with(**settings))):
        assert (visibility_timeout(each), redelivers_at_any_time(each)) == expected


def test_the_settings_are_read_once_and_again_when_a_function_gets_its_options() -> None:
    app = app_with(broker_url="redis://host", broker_transport_options={"visibility_timeout": 60})
    assert visibility_timeout(app) == 60
    app.conf.broker_transport_options = {"visibility_timeout": 90}
    assert visibility_timeout(app) == 60
    refuse_long_countdown(app, None)
    assert visibility_timeout(app) == 90


@pytest.mark.parametrize(("seconds", "longest", "remembered"), [(60, 20, 3600), (3600, 1200, 7200)])
def test_what_follows_from_the_visibility_timeout(seconds: int, longest: int, remembered: int) -> None:
    app = app_with(broker_url="redis://host", broker_transport_options={"visibility_timeout": seconds})
    assert (longest_countdown(app), remembered_for(app)) == (longest, remembered)
    refuse_long_countdown(app, longest)
    refuse_long_countdown(app_with(broker_url="nobody.has.it:Transport://host"), None)  # no transport is needed
    advice = "raise broker_transport_options['visibility_timeout'] (with RabbitMQ to its consumer_timeout, raised too)"
    for each, most in ((app, longest), (app_with(broker_url="amqp://host"), 600)):
        with pytest.raises(ConfigurationError) as raised:
            refuse_long_countdown(each, most + 1)
        assert str(raised.value).endswith(f"redelivers a message: write at most {most} seconds, or {advice}")


def queue(name: str, kind: str, **more: Any) -> Any:
    return Queue(name, Exchange(f"{name}s", type=kind), routing_key=name, **more)  # type: ignore[no-untyped-call]


def bound(exchange: str, kind: str) -> Any:
    return binding(Exchange(exchange, type=kind), routing_key="key")  # type: ignore[no-untyped-call]


QUORUM: Any = {"queue_arguments": {"x-queue-type": "quorum"}}


@pytest.fixture
def quorum_app() -> Any:
    bindings = [bound("media", "direct"), bound("boundary", "topic")]
    both: Any = Queue("bound", bindings)  # type: ignore[no-untyped-call]
    queues = [queue("delayed", "topic", **QUORUM), queue("direct", "direct"), both]
    return app_with(broker_url="amqp://", task_queues=queues)


BY_THE_BROKER: dict[tuple[str, str], tuple[str, str]] = {
    ("", "delayed"): ("delayeds", "delayed"),
    ("delayeds", "delayed"): ("delayeds", "delayed"),
    ("boundary", "feeds.new"): ("boundary", "feeds.new"),
    ("celery_delayed_delivery", f"{DELAY}.delayed"): ("celery_delayed_delivery", "delayed"),
    ("celery_delayed_0", f"{DELAY}.1.0"): ("celery_delayed_0", "1.0"),
}


@pytest.mark.parametrize("creates", [True, False])
def test_with_quorum_queues_the_broker_delays_what_came_by_a_topic_exchange(quorum_app: Any, *, creates: bool) -> None:
    """And a worker what came by another exchange, or by the queue itself."""
    quorum_app.conf.task_create_missing_queues = quorum_app.amqp.queues.create_missing = creates
    for (exchange, key), expected in BY_THE_BROKER.items():
        ((option, way),) = way_back(quorum_app, {"exchange": exchange, "routing_key": key}).items()
        assert (option, way.exchange.name, way.routing_key, way.exchange.type) == ("queue", *expected, "topic")
    for exchange in ("directs", "media", "celery.pidbox", "nobody knows it"):
        way = way_back(quorum_app, {"exchange": exchange, "routing_key": "key"})
        assert way.pop("queue").exchange.type == "direct"  # by which Celery sees that the broker must not
        assert way == {"exchange": exchange, "routing_key": "key", "declare": []}
    for key in ("direct", "nobody knows it"):
        assert way_back(quorum_app, {"exchange": "", "routing_key": key}) == {}


@pytest.mark.parametrize(
    ("url", "more", "declared"), [("amqp://", {}, []), ("redis://", QUORUM, [("delayeds", "topic")])]
)
def test_without_quorum_queues_nothing_is_delayed_by_the_broker(url: str, more: Any, declared: Any) -> None:
    app = app_with(broker_url=url, task_queues=[queue("delayed", "topic", **more)])
    assert way_back(app, {"exchange": "", "routing_key": "delayed"}) == {}
    # A child of a worker with Redis takes an exchange that it has not declared for a direct one.
    way = way_back(app, {"exchange": "delayeds", "routing_key": "delayed"})
    assert [(each.name, each.type) for each in way.pop("declare", [])] == declared
    assert not way


@pytest.mark.parametrize("more", [{}, QUORUM])
@pytest.mark.parametrize("url", ["amqp://", "redis://"])
def test_what_came_by_a_fanout_exchange_is_not_sent_to_all_workers_again(url: str, more: Any) -> None:
    queues = [queue("delayed", "topic", **more), Broadcast("news", queue="of this worker")]  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match=r"'news' cannot be requeued, .* a key that each worker has"):
        way_back(app_with(broker_url=url, task_queues=queues), {"exchange": "news", "routing_key": "any"})
