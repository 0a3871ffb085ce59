"""Who holds a key: the value that stands in Redis, which is the lock's token and what people see."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
"""The version of the value's layout. A value of another version is nobody we know, and is left alone."""


@dataclass(frozen=True)
class Holder:
    """The process and the call that hold a key. No argument of the call is in it.

    Attributes:
        id: random, one per attempt to take the key.
        state: "running" while the call runs.
        name: the task's or function's name.
        task_id: the Celery task's id, or None for a plain function.
        attempt: how many times the Celery task has been retried, or None.
        machine: the host name, boot id and pid namespace in one.
        host: the host name.
        pid: the process id.
        process_start: when that process began, in clock ticks since boot, or None where that cannot be read.
        since: when the key was taken, in seconds since the epoch.
        deadline: when the key is free at the latest, in seconds since the epoch; None while it is renewed.
    """

    id: str
    state: Literal["running"]
    name: str
    task_id: str | None
    attempt: int | None
    machine: str
    host: str
    pid: int
    process_start: int | None
    since: float
    deadline: float | None

    @classmethod
    def parse(cls, value: str | bytes) -> Holder | None:
        """The holder that `value` spells, or None: anybody can write anything under our keys."""
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.pop("only_one", None) != FORMAT:
            return None
        if found.keys() != _TYPES.keys() or not all(isinstance(found[name], _TYPES[name]) for name in _TYPES):
            return None
        deadline = found["deadline"]
        found.update(since=found["since"] / 1000, deadline=deadline and deadline / 1000)
        return cls(**found)

    def __str__(self) -> str:
        task = f" (task {self.task_id})" if self.task_id else ""
        return f"{self.name}{task}, pid {self.pid} on {self.host}"


_TYPES: dict[str, Any] = {
    **dict.fromkeys((field.name for field in fields(Holder)), str),
    "task_id": (str, type(None)),
    "attempt": (int, type(None)),
    "pid": int,
    "process_start": (int, type(None)),
    "since": int,
    "deadline": (int, type(None)),
}


class _Process:
    """What the tokens of one process have in common; spelt once, as it is most of what a token costs."""

    def __init__(self) -> None:
        pid = os.getpid()
        self.stem = os.urandom(8).hex() + "-"
        self.numbers = itertools.count()
        self.spelling = _spell(machine=machine(), host=socket.gethostname(), pid=pid, process_start=process_start(pid))


_process: _Process | None = None


def _forget_process() -> None:
    global _process  # noqa: PLW0603 - a forked child is another process, and finds out about itself
    _process = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_process)


def _this_process() -> _Process:
    global _process  # noqa: PLW0603 - made on first use
    if _process is None:
        _process = _Process()
    return _process


class Identity:
    """Who calls, as a token spells it: made once for a function, and anew for each run of a task."""

    __slots__ = ("_head", "_process", "_spelling")

    def __init__(self, name: str, task_id: str | None = None, attempt: int | None = None) -> None:
        """See `Holder` for what the arguments are."""
        self._spelling = _spell(name=name, task_id=task_id, attempt=attempt)
        self._process: _Process | None = None
        self._head = ""

    def token(self, deadline_in: float | None) -> bytes:
        """The value with which this process takes a key.

        Args:
            deadline_in: seconds after which the key is free at the latest, or None if it will be renewed.

        Returns:
            Compact ASCII JSON that `Holder.parse` reads; no two are alike.
        """
        process = _process or _this_process()
        if self._process is not process:
            self._head = (
                f'{{"only_one":{FORMAT},"state":"running",{self._spelling},{process.spelling},"id":"{process.stem}'
            )
            self._process = process
        # Whole milliseconds: a float takes longer to spell than the rest of the token.
        since = time.time_ns() // 1_000_000
        deadline = "null" if deadline_in is None else since + round(deadline_in * 1000)
        return f'{self._head}{next(process.numbers)}","since":{since},"deadline":{deadline}}}'.encode()


def _spell(**values: object) -> str:
    """JSON of an object, without its braces."""
    return json.dumps(values, separators=(",", ":"))[1:-1]


def machine() -> str:
    """This machine as far as process ids mean something in it: host, boot and pid namespace."""
    boot = namespace = "?"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()}/{boot}/{namespace}"


def process_start(pid: int) -> int | None:
    """When process `pid` began, in clock ticks since boot, or None where that cannot be read."""
    try:
        # The command's name, second in the line, is in parentheses and may hold anything, blanks included.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
