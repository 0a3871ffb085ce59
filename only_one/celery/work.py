"""The identity of a task's message: the same for its holder, its header, its completion marker and its redeliveries."""

from typing import Any, NamedTuple

from only_one.holder import Holder
from only_one.lock.token import TokenFactory


class Work(NamedTuple):
    """The work of a message. Of the works of one task the later is the greater; a redelivery has the same work.

    Attributes:
        id: the id of the task.
        replacement: how often the task was replaced so far: a replacement has its id, and begins again with attempt 0.
        attempt: the number of retries so far.
    """

    id: str
    replacement: int
    attempt: int

    def token_factory(self, task: Any, state: str = "running") -> TokenFactory:
        """Makes the tokens with which ``task`` acquires a key for this work."""
        return TokenFactory(task.name, self.id, self.attempt, state, self.replacement)

    def marker(self, key: str, lineage: str | None) -> str:
        """The name of the completion marker of this work for ``key``; see ``Header`` for ``lineage``."""
        replacement = f".{self.replacement}" if self.replacement else ""
        name = f"{{{key}}}:copy:{self.id}:{self.attempt}{replacement}"
        return f"{name}:{lineage}" if lineage else name


def work_of(request: Any) -> Work:
    """The work of a message, by Celery's request, whose id may be a ``uuid.UUID``."""
    return Work(str(request.id), vars(request).get("replaced_task_nesting") or 0, request.retries)


def work_held_by(holder: Holder | None) -> Work | None:
    """The work whose message holds a key; None if no task's message does."""
    if holder is None or holder.queue is not None:
        return None
    if holder.task_id is None or holder.attempt is None:
        return None
    return Work(holder.task_id, holder.replacement, holder.attempt)
