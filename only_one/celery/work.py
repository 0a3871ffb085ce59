"""The work of a task's message: its identity, and the state of a delivery, which the calls in it share.

Holder, header and completion marker of a message name the same work; a redelivery has the same work, too.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from only_one.call.effective_options import Decoration
from only_one.connections.server import Server
from only_one.holder import Holder
from only_one.lock.token import TokenFactory

STATE = "only_one_delivery"
"""The attribute of Celery's request that has the state of its delivery."""


class Work(NamedTuple):
    """The identity of a message's work. Of two works with one task id, the later is the greater.

    Attributes:
        id: the id of the task.
        replacement: how often the task was replaced so far, by Celery's ``replaced_task_nesting``; a task that comes
            after a replaced one in its chain has the same number. A replacement has the task's id, and begins with
            attempt 0.
        attempt: the number of retries so far.
    """

    id: str
    replacement: int
    attempt: int

    def token_factory(self, task: Any, state: str = "running") -> TokenFactory:
        """Return what makes the tokens with which ``task`` acquires a key for this work."""
        return TokenFactory(task.name, self.id, self.attempt, state, self.replacement)


def work_of(request: Any) -> Work:
    """The work of the message that Celery's request is about."""
    # The id may be a `uuid.UUID`.
    return Work(str(request.id), vars(request).get("replaced_task_nesting") or 0, request.retries)


def work_held_by(holder: Holder | None) -> Work | None:
    """The work of a holder; None if the holder is no task's message."""
    if holder is None or holder.queue is not None:
        return None
    if holder.task_id is None or holder.attempt is None:
        return None
    return Work(holder.task_id, holder.replacement, holder.attempt)


@dataclass(eq=False)
class DeliveryState:
    """What has become of a delivery so far: the calls in it tell each other, and ``ended_tasks`` at its end.

    A base's ``__call__`` may call the task's function more than once in a delivery.

    Attributes:
        runs: by key, the decoration whose run holds the key; None once that run is over.
        markers: server, key and name of the completion markers of these runs, in which the stored result is noted.
        requeued: the signature by which the message was published again; None if it was not.
        withdraws: whether a unique task's key is withdrawn at the end, because no run has begun and no message waits.
        is_over: whether the message was requeued or dropped, so that no later call runs.
    """

    runs: dict[str, Decoration | None] = field(default_factory=dict)
    markers: list[tuple[Server, str, str]] = field(default_factory=list)
    requeued: Any = None
    withdraws: bool = True
    is_over: bool = False


def state_of(request: Any) -> DeliveryState:
    """The state of the delivery that Celery's request is about. Celery's copies of the request have the same one."""
    # The request gets headers, because Celery makes headers of unknown attributes when it copies a request without any:
    # the next message would carry the state, which cannot be serialized.
    request.headers = request.headers or {}
    state: DeliveryState = vars(request).setdefault(STATE, DeliveryState())
    return state
