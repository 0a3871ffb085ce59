"""What is known of a broker by its URL and its settings, and where a message goes back to."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.local import Proxy
from kombu.entity import Exchange, Queue, binding
from kombu.transport import virtual

from only_one import ConfigurationError
from only_one.celery.broker import (
    longest_countdown,
    marks_redeliveries,
    redelivers_at_any_time,
    refuse_long_countdown,
    remembered_for,
    visibility_timeout,
    way_back,
)

DELAY = ".".join("0" * 27 + "1")
"""A second, as Celery writes it before a routing key."""


class Says:
    """A transport that says after how long it delivers again, as that of SQS does."""

    driver_type = "says"

    class Channel(virtual.Channel):
        default_visibility_timeout = 77


def app_with(**settings: Any) -> Any:
    return Celery("brokers", set_as_current=False, changes=settings)


def test_after_how_long_it_delivers_again() -> None:
    for url in (
        "redis://host",
        "rediss://host",
        "sentinel://host",
        "redis+socket:///path",
        "sentinel://a;sentinel://b",
    ):
        assert visibility_timeout(app_with(broker_url=url)) == 3600, url
    assert visibility_timeout(app_with(broker_url="memory://", broker_read_url="redis://host")) == 3600
    assert visibility_timeout(app_with(broker_url=["redis://a", "redis://b"])) == 3600
    assert visibility_timeout(app_with(broker_url="//host", broker_transport="tests.celery.test_broker:Says")) == 77
    for settings in ({"broker_url": "amqp://host"}, {"broker_url": "memory://"}, {}):
        assert visibility_timeout(app_with(**settings)) == 1800
    options = {"visibility_timeout": 60}
    assert visibility_timeout(app_with(broker_url="redis://host", broker_transport_options=options)) == 60


def test_the_settings_are_read_once_and_again_when_a_function_gets_its_options() -> None:
    app = app_with(broker_url="redis://host", broker_transport_options={"visibility_timeout": 60})
    assert visibility_timeout(app) == 60
    app.conf.broker_transport_options = {"visibility_timeout": 90}
    assert visibility_timeout(app) == 60
    refuse_long_countdown(app, None)
    assert visibility_timeout(app) == 90


def test_the_app_of_a_task_that_is_not_registered_is_a_proxy() -> None:
    app = app_with(broker_url="redis://host")
    proxy: Any = Proxy(lambda: app)
    assert (visibility_timeout(proxy), marks_redeliveries(proxy)) == (3600, True)


def test_what_follows_from_it() -> None:
    for seconds, longest, remembered in [(60, 20, 3600), (3600, 1200, 7200)]:
        app = app_with(broker_url="redis://host", broker_transport_options={"visibility_timeout": seconds})
        assert (longest_countdown(app), remembered_for(app)) == (longest, remembered)
        for countdown in (None, longest):
            refuse_long_countdown(app, countdown)
        with pytest.raises(ConfigurationError, match=f"write at most {longest} seconds"):
            refuse_long_countdown(app, longest + 1)


@pytest.mark.parametrize(
    ("url", "at_any_time", "marked"),
    [
        ("amqp://", True, True),
        ("pyamqp://", True, True),
        ("redis://", False, True),
        ("sentinel://", False, True),
        ("memory://", False, False),
    ],
)
def test_when_it_delivers_again(url: str, *, at_any_time: bool, marked: bool) -> None:
    app = app_with(broker_url=url)
    assert (redelivers_at_any_time(app), marks_redeliveries(app)) == (at_any_time, marked)


def queue(name: str, kind: str, **more: Any) -> Any:
    return Queue(name, Exchange(f"{name}s", type=kind), routing_key=name, **more)  # type: ignore[no-untyped-call]


QUORUM: Any = {"queue_arguments": {"x-queue-type": "quorum"}}


def bound(exchange: str, kind: str) -> Any:
    return binding(Exchange(exchange, type=kind), routing_key="key")  # type: ignore[no-untyped-call]


QUORUM_APP = app_with(
    broker_url="amqp://",
    task_queues=[
        queue("delayed", "topic", **QUORUM),
        queue("direct", "direct"),
        Queue("bound", [bound("media", "direct"), bound("boundary", "topic")]),  # type: ignore[no-untyped-call]
    ],
)


@pytest.mark.parametrize(
    ("exchange", "key", "expected"),
    [
        ("", "delayed", ("delayeds", "topic", "delayed")),
        ("delayeds", "delayed", ("delayeds", "topic", "delayed")),
        ("boundary", "feeds.new", ("boundary", "topic", "feeds.new")),
        ("celery_delayed_delivery", f"{DELAY}.delayed", ("celery_delayed_delivery", "topic", "delayed")),
        ("celery_delayed_0", f"{DELAY}.1.0", ("celery_delayed_0", "topic", "1.0")),
    ],
)
def test_with_quorum_queues_the_broker_delays_what_came_by_a_topic_exchange(
    exchange: str, key: str, expected: tuple[str, str, str]
) -> None:
    (found,) = way_back(QUORUM_APP, {"exchange": exchange, "routing_key": key}).values()
    assert (found.exchange.name, found.exchange.type, found.routing_key) == expected


@pytest.mark.parametrize("exchange", ["directs", "media", "celery.pidbox", "nobody knows it"])
def test_with_quorum_queues_a_worker_delays_what_came_by_another_exchange(exchange: str) -> None:
    way = way_back(QUORUM_APP, {"exchange": exchange, "routing_key": "key"})
    assert way.pop("queue").exchange.type == "direct"  # by which Celery sees that the broker is not to
    assert way == {"exchange": exchange, "routing_key": "key", "declare": []}


@pytest.mark.parametrize("queue", ["direct", "nobody knows it"])
def test_with_quorum_queues_a_worker_delays_what_came_by_the_queue_itself(queue: str) -> None:
    for creates in (True, False):
        QUORUM_APP.conf.task_create_missing_queues = QUORUM_APP.amqp.queues.create_missing = creates
        assert way_back(QUORUM_APP, {"exchange": "", "routing_key": queue}) == {}
        QUORUM_APP.amqp.queues.pop("nobody knows it", None)


@pytest.mark.parametrize(("url", "more"), [("amqp://", {}), ("redis://", QUORUM)])
def test_where_nothing_is_delayed_by_the_broker(url: str, more: Any) -> None:
    app = app_with(broker_url=url, task_queues=[queue("delayed", "topic", **more)])
    assert way_back(app, {"exchange": "delayeds", "routing_key": "delayed"}) == {}


def test_a_call_without_a_countdown_needs_no_transport() -> None:
    refuse_long_countdown(app_with(broker_url="nobody.has.it:Transport://host"), None)
