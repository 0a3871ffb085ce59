"""A broker that soon delivers again what was not acknowledged, by workers that were killed or are slow.

Kombu 5.5 looks for such messages every 100 s, whatever its options say; those who import this have it look as often as
the options of later ones say.
"""

from __future__ import annotations

from typing import Any

from celery.signals import worker_ready
from kombu.transport.redis import Channel

KOMBU_CAN = hasattr(Channel, "unacked_restore_throttle")


def soon(visibility: float) -> dict[str, Any]:
    """Transport options by which a message is delivered again within a second or so after `visibility` seconds."""
    return {"visibility_timeout": visibility, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}


@worker_ready.connect(weak=False)  # type: ignore[untyped-decorator]
def sweep(sender: Any, **_: Any) -> None:
    """Look for messages at the interval that the worker's options name; a consumer that begins anew is ready anew."""
    interval = sender.app.conf.broker_transport_options.get("unacked_restore_interval")
    if interval is None or KOMBU_CAN:
        return

    def look() -> None:
        channel = sender.task_consumer.channel
        channel.qos.restore_visible(num=channel.unacked_restore_limit, interval=1)

    sender.timer.call_repeatedly(interval, look)
