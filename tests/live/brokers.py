"""The brokers of the live tests, and what the tests ask of one behind Celery's back.

`ONLY_ONE_TEST_BROKER` says which it is: "classic" or "quorum" for RabbitMQ and a kind of its queues, else Redis.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from uuid import uuid4

import amqp
from kombu.connection import Connection

from rigs.rabbitmq import RabbitMQ, rabbitmq_server
from rigs.waiting import LIMIT, eventually

KIND = os.environ.get("ONLY_ONE_TEST_BROKER", "redis")
QUORUM = {
    "task_default_queue_type": "quorum",
    "task_default_exchange": "tasks",
    "task_default_exchange_type": "topic",  # the broker delays none that goes through a direct one
    "task_create_missing_queue_type": "quorum",
    "task_create_missing_queue_exchange_type": "topic",
}


def settings_of(kind: str) -> dict[str, Any]:
    """What an application is told for a kind of broker."""
    # Without confirmation a message is lost that was on its way to a broker when that was killed.
    confirmed: dict[str, Any] = {"broker_transport_options": {"confirm_publish": True}}
    return {"redis": {}, "classic": confirmed, "quorum": confirmed | QUORUM}[kind]


def consumed() -> dict[str, Any]:
    """What to say to `add_consumer` of a queue that Celery has made itself."""
    if KIND != "quorum":
        return {}
    return {"exchange_type": "topic", "options": {"queue_arguments": {"x-queue-type": "quorum"}}}


class RedisBroker:
    """What tests ask of a broker: of Redis.

    Messages are in lists, and in a hash from when they are delivered until they are acknowledged.

    Attributes:
        url: where it is.
        settings: what its applications are told.
    """

    def __init__(self, client: Any, url: str, app: Any) -> None:
        self.url = url
        self.settings: dict[str, Any] = {}
        self._client, self._app = client, app

    def messages(self) -> int:
        """How many there are for the usual queue: in it, on their way to it, or delivered and not acknowledged."""
        return int(self._client.llen("celery") + self._client.hlen("unacked"))

    def move(self, source: str, target: str) -> None:
        """Take a message, if there is one, from the head of a queue to that of another."""
        self._client.lmove(source, target, "RIGHT", "LEFT")

    def copy_of(self, task_id: str) -> str:
        """The message of a task that was delivered and is not acknowledged."""

        def found() -> list[str]:
            kept = [raw.decode() for raw in self._client.hvals("unacked")]
            return [raw for raw in kept if json.loads(raw)[0]["headers"]["id"] == task_id]

        assert eventually(found), f"no message of {task_id}"
        return found()[0]

    def deliver_again(self, copy: str) -> None:
        """Have a message delivered once more, as when its visibility timeout is over."""
        # Under a name of its own, which no worker removes in between as it acknowledges the message.
        name = f"copy-{uuid4().hex}"
        self._client.hset("unacked", name, copy)
        with self._app.connection_for_write() as connection:
            connection.default_channel.qos.restore_by_tag(name)


class RabbitBroker:
    """The same of RabbitMQ, which gives us a copy of what it delivers."""

    def __init__(self, server: RabbitMQ, kind: str, url: str, connection: Any) -> None:
        self.url = url
        self.settings = settings_of(kind)
        self._server, self._connection, self._place = server, connection, connection.virtual_host
        self._channel: Any = connection.default_channel
        self._copies = self._channel.queue_declare("", exclusive=True).queue
        self._channel.queue_bind(self._copies, "amq.rabbitmq.trace", "deliver.#")
        self._delivered: dict[str, Any] = {}

    def messages(self) -> int:
        table = self._server.control("list_queues", "-p", self._place, "--no-table-headers", "name", "messages")
        counts = dict(line.split("\t") for line in table.splitlines())
        return sum(int(number) for queue, number in counts.items() if queue != self._copies)

    def move(self, source: str, target: str) -> None:
        if (message := self._channel.basic_get(source, no_ack=True)) is not None:
            self._channel.basic_publish(message, self.settings.get("task_default_exchange", ""), target)

    def copy_of(self, task_id: str) -> Any:
        def is_found() -> bool:
            while (message := self._channel.basic_get(self._copies, no_ack=True)) is not None:
                of = message.headers["properties"].get("headers", {}).get("id")
                self._delivered.setdefault(of, message)
            return task_id in self._delivered

        assert eventually(is_found), f"no message of {task_id}"
        return self._delivered[task_id]

    def deliver_again(self, copy: Any) -> None:
        """Have a message delivered once more, as when a connection is lost.

        It has been with a consumer, who did not acknowledge it.
        """
        properties = dict(copy.headers["properties"])
        message = amqp.Message(copy.body, application_headers=properties.pop("headers"), **properties)
        queue = copy.delivery_info["routing_key"].removeprefix("deliver.")
        taken: list[Any] = []
        with self._connection.channel() as channel:
            channel.basic_consume(queue, callback=taken.append, arguments={"x-priority": 10})  # before any worker
            channel.basic_publish(message, copy.headers["exchange_name"], copy.headers["routing_keys"][0])
            while all(each.headers["id"] != message.headers["id"] for each in taken):
                self._connection.drain_events(timeout=LIMIT)
        # What was taken goes back as the channel is closed.


Broker = RedisBroker | RabbitBroker


@cache
def _rabbitmq() -> RabbitMQ:
    """One for all tests of this process; it ends with it."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(rabbitmq_server())


@contextmanager
def broker(client: Any, url: str, app: Any, kind: str = KIND) -> Iterator[Broker]:
    """The broker of a test: the Redis of its locks and results, or a RabbitMQ.

    Args:
        client: of that Redis.
        url: where that is.
        app: who sends to the broker.
        kind: "redis", "classic" or "quorum".
    """
    if kind == "redis":
        yield RedisBroker(client, url, app)
        return
    server = _rabbitmq()
    url = server.make_place()
    with Connection(url) as connection:  # type: ignore[no-untyped-call]
        yield RabbitBroker(server, kind, url, connection)
