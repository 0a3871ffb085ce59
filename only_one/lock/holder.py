"""The holder of a key: the token that is stored there, what it says, and whether its process is alive or dead."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

from .commands import now

FORMAT = 1
"""The version of the value's layout. A value of another version is nobody we know, and is left alone."""


@dataclass(frozen=True)
class Holder:
    """The process and the call that hold a key. It contains no argument of the call.

    Attributes:
        id: random, another for each acquire.
        state: "running" while the call runs, "kept" after it has succeeded, for the rest of `at_least`, "queued" while
            a task waits in its queue; then host, pid and the like are the producer's. "received" once a worker has it
            and has not begun it; then they are those of the worker's main process.
        name: the task's or function's name.
        task_id: the Celery task's id, or None for a plain function.
        attempt: how many times the Celery task has been retried, or None.
        machine: the host name, boot id, pid and time namespace in one.
        host: the host name.
        pid: the process id.
        process_start: when that process began, in clock ticks since boot, or None where that cannot be read.
        since: when the key was acquired, in seconds since the epoch.
        deadline: when the key is free at the latest, in seconds since the epoch; None while it is renewed.
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

    @classmethod
    def parse(cls, value: str | bytes) -> Holder | None:
        """The holder that `value` encodes, or None: anybody can store anything at our keys."""
        try:
            fields = json.loads(value)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or fields.pop("only_one", None) != FORMAT:
            return None
        if fields.keys() != _TYPES.keys() or not all(isinstance(fields[name], _TYPES[name]) for name in _TYPES):
            return None
        since, limit = fields["since"], fields.pop("limit")
        if any(abs(each) > _LATEST for each in (since, limit) if each is not None):
            return None
        deadline = None if limit is None else (since + limit) / 1000
        fields.update(id=f"{fields.pop('process')}-{fields.pop('number')}", since=since / 1000, deadline=deadline)
        return cls(**fields)

    def __str__(self) -> str:
        task = f" (task {self.task_id})" if self.task_id else ""
        return printable(f"{self.name}{task}, pid {self.pid} on {self.host}")


_LATEST = 10**14
"""Milliseconds since the epoch; what is later is a number that somebody has made up."""


def printable(text: str) -> str:
    """`text` with line ends, terminal escapes and the like escaped: anybody can store anything at our keys."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


_TYPES: dict[str, Any] = {
    "machine": str,
    "host": str,
    "pid": int,
    "process_start": (int, type(None)),
    "process": str,
    "state": str,
    "name": str,
    "task_id": (str, type(None)),
    "attempt": (int, type(None)),
    "limit": (int, type(None)),
    "number": int,
    "since": int,
}
"""The JSON of a value, in milliseconds; what changes in each call comes last, so that the rest is serialized once."""


class _Process:
    """What the tokens of one process have in common; serialized once, because that is most of a token's cost."""

    def __init__(self) -> None:
        pid = os.getpid()
        own = machine()
        self.serialized = _serialize(
            only_one=FORMAT,
            machine=own or socket.gethostname(),
            host=socket.gethostname(),
            pid=pid,
            process_start=process_start(pid),
            process=os.urandom(8).hex(),
        )
        # What the values of this process, and of all of this machine, begin with; where that is unknown, no holder's.
        self.mark = f"{{{self.serialized},".encode()
        self.machine_mark = f"{{{_serialize(only_one=FORMAT, machine=own)},".encode()


_process: _Process | None = None

_numbers = itertools.count(1)

active_tokens: set[bytes] = set()
"""The tokens of this process whose calls have not ended; others that are still stored are held by nobody.

In a forked child it is empty: a call that the parent was in the middle of stays the parent's.
"""


def _forget_process() -> None:
    global _process  # noqa: PLW0603 - a forked child is another process, and finds out about itself
    _process = None
    active_tokens.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_process)


def _this_process() -> _Process:
    global _process  # noqa: PLW0603 - made on first use
    if _process is None:
        _process = _Process()
    return _process


class _Head(NamedTuple):
    """What the tokens of one caller have in common, in one process and with one limit."""

    process: _Process
    limit: float | None
    text: bytes


class TokenFactory:
    """Makes the tokens of one caller: once for a function, and anew for each run of a task."""

    __slots__ = ("_head", "_serialized", "attempt", "task_id")

    def __init__(
        self, name: str, task_id: str | None = None, attempt: int | None = None, state: str = "running"
    ) -> None:
        """See `Holder` for what the arguments are."""
        self.task_id = task_id
        self.attempt = attempt
        self._serialized = _serialize(state=state, name=name, task_id=task_id, attempt=attempt)
        self._head: _Head | None = None

    def token(self, deadline_in: float | None) -> bytes:
        """The value with which this process acquires a key.

        Args:
            deadline_in: seconds after which the key is free at the latest, or None if it will be renewed.

        Returns:
            Compact ASCII JSON that `Holder.parse` reads; no two are alike.
        """
        head = self._head
        if head is None or head.process is not _process or head.limit != deadline_in:
            head = self._head = self._make_head(deadline_in)
        # Whole milliseconds: a float takes longer to serialize than the rest of the token. The nanoseconds that are
        # left tell it from that of a clone of this process, in a virtual machine that was cloned: it counts as we do.
        milliseconds, left = divmod(time.time_ns(), 1_000_000)
        return head.text + b'%d%06d,"since":%d}' % (next(_numbers), left, milliseconds)

    def _make_head(self, deadline_in: float | None) -> _Head:
        process = _this_process()
        limit = "null" if deadline_in is None else round(deadline_in * 1000)
        text = f'{{{process.serialized},{self._serialized},"limit":{limit},"number":'.encode()
        return _Head(process, deadline_in, text)


def _serialize(**values: object) -> str:
    """JSON of an object, without its braces."""
    return json.dumps(values, separators=(",", ":"))[1:-1]


def machine() -> str | None:
    """This machine as far as process ids mean something in it: host, boot, pid and time namespace.

    None where that cannot be read, or is that of others, as in a container that sees its host's /proc.
    """
    try:
        if Path("/proc/self").readlink() != Path(str(os.getpid())):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().decode().strip()
        namespaces = [_namespace("pid"), _namespace("time")]  # the latter shifts when a process seems to have begun
        return "/".join([socket.gethostname(), boot, *namespaces])
    except OSError:
        return None


def _namespace(kind: str) -> str:
    path = Path(f"/proc/self/ns/{kind}")
    return str(path.readlink()) if path.is_symlink() else ""


def process_start(pid: int) -> int | None:
    """When process `pid` began, in clock ticks since boot, or None where that cannot be read."""
    try:
        # The command's name, second in the line, is in parentheses and may hold anything, blanks included.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


_LOOKED_AT_AGAIN_AFTER = 1.0
"""Seconds after which it is read anew whether a living process is still the holder's, and not another with its id."""

_MOST_REMEMBERED = 1000


class _Seen(NamedTuple):
    """A process that was alive when it was looked at."""

    pid: int
    until: float


_alive: dict[bytes, _Seen] = {}
"""Holders that were alive when looked at, with their process and when to look again; a skip must not pay each time."""


def is_dead(value: bytes) -> bool:
    """Whether the run that `value` encodes has certainly ended without releasing its key, or will never begin.

    Either its process, of this machine, is gone; or it was one of this process, where no such call is under way.
    A holder of another machine, one that is kept, and one of which nothing can be known, is not dead.
    """
    process = _this_process()
    if value.startswith(process.mark):
        return value not in active_tokens and _has_process(Holder.parse(value), "running")
    if not value.startswith(process.machine_mark):
        return False
    seen = _alive.get(value)
    if seen is not None and seen.until > now():
        return not _exists(seen.pid)
    holder = Holder.parse(value)
    if not _has_process(holder, "running", "received"):
        return False
    if _has_gone(holder):
        return True
    if len(_alive) >= _MOST_REMEMBERED:
        _alive.clear()
    _alive[value] = _Seen(holder.pid, now() + _LOOKED_AT_AGAIN_AFTER)
    return False


def is_gone(value: bytes) -> bool:
    """Whether the process of this machine that `value` names is certainly gone."""
    if not value.startswith(_this_process().machine_mark):
        return False
    holder = Holder.parse(value)
    return holder is not None and _has_gone(holder)


def is_queued(value: bytes) -> bool:
    """Whether the task that `value` encodes waits, in its queue or in a worker, so that a run may take its key."""
    if b'"state":"queued"' not in value and b'"state":"received"' not in value:  # a skip must not pay for parsing
        return False
    return _has_process(Holder.parse(value), "queued", "received")


def _has_process(holder: Holder | None, *states: str) -> TypeGuard[Holder]:
    return holder is not None and holder.state in states


def _has_gone(holder: Holder) -> bool:
    """Whether there is no process with its id, or another one."""
    if not _exists(holder.pid):
        return True
    start = process_start(holder.pid)
    return None not in (start, holder.process_start) and start != holder.process_start


def _exists(pid: int) -> bool:
    if pid <= 0:  # would be a process group, and no holder has such an id
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # not ours to ask
        return True
    return True


def kept(value: bytes, at_least: float) -> bytes:
    """The value of a run that has succeeded, and whose key is kept until `at_least` seconds after it was acquired."""
    fields = {**json.loads(value), "state": "kept", "limit": round(at_least * 1000)}
    return f"{{{_serialize(**fields)}}}".encode()
