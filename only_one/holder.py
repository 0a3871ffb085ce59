"""The holder of a key: the fields of the value that is stored there, and how the value is read."""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

FORMAT = 1
"""The version of the value's meaning. A value of another version is no known holder, and is left alone.

A new field does not raise it: unknown fields are ignored, and a missing one has its default in ``_ADDED_LATER``.
"""


class Work(NamedTuple):
    """The identity of the work of a Celery task's message. Of two works with one task id, the later is the greater.

    Holder, header and completion marker of a message name the same work; a redelivery has the same work, too.

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


@dataclass(frozen=True)
class Holder:
    """The process and the call that hold a key, without the arguments of the call.

    Attributes:
        id: a random id, another for each acquire.
        state: ``"running"`` while the call runs; ``"kept"`` after it has succeeded, for the rest of
            ``at_least``; ``"queued"`` while a task waits in its queue: then host, pid and the like
            are the producer's; ``"received"`` once a worker has received the task and has not begun
            it: then they are the main process's.
        name: the name of the task or function.
        task_id: the id of the Celery task, or of another queue's job, or the id that ``work_id`` has returned; None
            for any other function.
        attempt: the number of its retries so far; None for a plain function, and where it is not known.
        machine: the host name, boot id, pid and time namespace in one.
        host: the host name.
        pid: the process id.
        process_start: when that process began, in clock ticks since boot; None if that cannot be
            read.
        since: when the key was acquired, or the task queued or received, in seconds since the epoch.
        deadline: when the key is free at the latest, in seconds since the epoch: by ``timeout`` for a
            run, by ``at_least`` for a kept key, by the longest wait for a queued or received task.
            None for a run without a ``timeout``. It does not change when the run calls ``extend``.
        replacement: how often the Celery task was replaced so far, by ``Task.replace``.
        queue: whose job ``task_id`` names: ``"rq"``, ``"dramatiq"``, ``"arq"``, or ``"celery.map"`` for an item of
            that task; None for a Celery task, a plain function, and a job that ``work_id`` names.
    """

    id: str
    state: Literal["running", "kept", "queued", "received"]
    name: str
    task_id: str | None
    attempt: int | None
    machine: str
    host: str
    pid: int
    process_start: int | None
    since: float
    deadline: float | None
    replacement: int = 0
    queue: str | None = None

    @classmethod
    def parse(cls, value: str | bytes) -> "Holder | None":
        """The holder that ``value`` encodes, or None: anybody can store anything at our keys."""
        return _parse(value)

    def __str__(self) -> str:
        task = f" (task {self.task_id})" if self.task_id else ""
        return printable(f"{self.name}{task}, pid {self.pid} on {self.host}")


def work_held_by(holder: Holder | None) -> Work | None:
    """The work of a holder; None if the holder is no message of a Celery task."""
    if holder is None or holder.queue is not None:
        return None
    if holder.task_id is None or holder.attempt is None:
        return None
    return Work(holder.task_id, holder.replacement, holder.attempt)


def task_id_of(value: str | bytes) -> str | None:
    """The id of the Celery task that ``value`` names, or the id that ``work_id`` returned; None if it has neither."""
    holder = Holder.parse(value)
    return holder.task_id if holder and holder.queue is None else None


def printable(text: str) -> str:
    """``text`` with line ends, terminal escapes and the like escaped: anybody can store anything at our keys."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def is_queued(value: bytes) -> bool:
    """Whether the task that ``value`` encodes waits, in its queue or in a worker: then a run may take over its key."""
    holder = Holder.parse(value)
    return holder is not None and holder.state in {"queued", "received"}


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("machine", "host", "process", "state", "name"), str),
    **dict.fromkeys(("pid", "number", "since", "replacement"), int),
    **dict.fromkeys(("process_start", "attempt", "limit"), (int, type(None))),
    **dict.fromkeys(("task_id", "queue"), (str, type(None))),
}
"""The types in the JSON of a value; times are in milliseconds."""

_ADDED_LATER: dict[str, Any] = {"replacement": 0, "queue": None}
"""The fields that the first values of this format did not have, with their defaults."""


@lru_cache(maxsize=1000)
def _parse(value: str | bytes) -> Holder | None:
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.pop("only_one", None) != FORMAT:
        return None
    known = {**_ADDED_LATER, **fields}
    if not known.keys() >= _TYPES.keys() or not all(isinstance(known[name], _TYPES[name]) for name in _TYPES):
        return None
    fields = {name: known[name] for name in _TYPES}
    since, limit = fields["since"], fields.pop("limit")
    # Milliseconds since the epoch; what is later is a number that somebody has made up.
    if max(abs(since), abs(limit or 0)) > 10**14:
        return None
    deadline = None if limit is None else (since + limit) / 1000
    fields.update(id=f"{fields.pop('process')}-{fields.pop('number')}", since=since / 1000, deadline=deadline)
    return Holder(**fields)
