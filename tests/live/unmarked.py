"""A transport that does not say that it delivers a message again, as that of SQS: Redis without the mark."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis, virtual


class Message(virtual.Message):
    """Has no mark when it is received."""

    def __init__(self, payload: Any, *args: Any, **options: Any) -> None:
        payload["headers"].pop("redelivered", None)
        payload["properties"]["delivery_info"].pop("redelivered", None)
        parent: Any = super()
        parent.__init__(payload, *args, **options)


class Channel(redis.Channel):
    """Gives such messages."""

    Message = Message


class Transport(redis.Transport):
    """Has such channels."""

    Channel = Channel
    driver_type = "unmarked"
