"""The holder of a key: the token that is stored there, its fields, and whether its process is alive or dead."""

import itertools
import json
import os
import socket
import time
from dataclasses import dataclass
from functools import cache, lru_cache
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Literal

from .commands import now

FORMAT = 1
"""The version of the value's meaning. A value of another version is no known holder, and is left alone.

A new field does not raise it: unknown fields are ignored, and a missing one has its default in ``_ADDED_LATER``.
"""


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
        task_id: the id of the Celery task; None for a plain function.
        attempt: the number of retries of the Celery task so far; None for a plain function.
        machine: the host name, boot id, pid and time namespace in one.
        host: the host name.
        pid: the process id.
        process_start: when that process began, in clock ticks since boot; None if that cannot be
            read.
        since: when the key was acquired, in seconds since the epoch.
        deadline: when the key is free at the latest, in seconds since the epoch; None without a
            ``timeout``. It does not change when the run calls ``extend``.
        replacement: how often the Celery task was replaced so far, by ``Task.replace``.
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

    @classmethod
    def parse(cls, value: str | bytes) -> "Holder | None":
        """The holder that ``value`` encodes, or None: anybody can store anything at our keys."""
        return (_parse if len(value) <= _LONGEST_REMEMBERED else _parse.__wrapped__)(value)

    def __str__(self) -> str:
        task = f" (task {self.task_id})" if self.task_id else ""
        return printable(f"{self.name}{task}, pid {self.pid} on {self.host}")


def task_id_of(value: str | bytes) -> str | None:
    """The id of the Celery task that ``value`` names; None if it names none."""
    holder = Holder.parse(value)
    return holder.task_id if holder else None


def printable(text: str) -> str:
    """``text`` with line ends, terminal escapes and the like escaped: anybody can store anything at our keys."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("machine", "host", "process", "state", "name"), str),
    **dict.fromkeys(("pid", "number", "since", "replacement"), int),
    **dict.fromkeys(("process_start", "attempt", "limit"), (int, type(None))),
    "task_id": (str, type(None)),
}
"""The types in the JSON of a value; times are in milliseconds."""

_ADDED_LATER: dict[str, Any] = {"replacement": 0}
"""The fields that the first values of this format did not have, with what a value without them means."""

_LONGEST_REMEMBERED = 2000
_MOST_REMEMBERED = 1000


@lru_cache(maxsize=_MOST_REMEMBERED, typed=True)
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


class _Process:
    """This process, as its tokens name it: serialized once, because it is most of a token's cost.

    Attributes:
        serialized: the part that its tokens have in common.
        mark: the beginning of its values.
        machine_mark: the beginning of the values of this machine; of no value if the machine is unknown.
        numbers: the numbers of its tokens.
    """

    def __init__(self) -> None:
        own, host, pid = machine(), socket.gethostname(), os.getpid()
        fields = {"only_one": FORMAT, "machine": own or host, "host": host, "pid": pid}
        self.serialized = _serialize(**fields, process_start=process_start(pid), process=os.urandom(8).hex())
        self.mark = f"{{{self.serialized},".encode()
        self.machine_mark = f"{{{_serialize(only_one=FORMAT, machine=own)},".encode()
        self.numbers = itertools.count(1)


_this_process = cache(_Process)
"""The one ``_Process`` of this process, made on first use, and anew in a forked child."""

active_tokens: set[bytes] = set()
"""The tokens of this process whose calls have not ended; its other tokens that are still stored are held by nobody.

A forked child begins without any: a call that was under way at the fork stays the parent's.
"""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_this_process.cache_clear)
    os.register_at_fork(after_in_child=active_tokens.clear)


def _task_fields(task_id: str | None, attempt: int | None, replacement: int) -> str:
    task = encode_basestring_ascii(task_id) if type(task_id) is str else json.dumps(task_id)  # the same, sooner
    fields = f'"task_id":{task},"attempt":{"null" if attempt is None else attempt},'
    # Only if needed: a worker of the first version, which refuses unknown fields, reads the other values, too.
    return f'{fields}"replacement":{replacement},' if replacement else fields


def words_of(task_id: str, replacement: int, attempt: int) -> bytes:
    """The words that all values have that name this work of a task, and no other values; a script looks for them."""
    return f'{_task_fields(task_id, attempt, replacement)}"limit":'.encode()


class TokenFactory:
    """Makes the tokens of one caller: one factory for a function, and a new one for each run of a task."""

    __slots__ = ("_head", "_serialized")

    def __init__(
        self,
        name: str,
        task_id: str | None = None,
        attempt: int | None = None,
        state: str = "running",
        replacement: int = 0,
    ) -> None:
        """See ``Holder`` for the arguments."""
        self._serialized = f"{_serialize(state=state, name=name)},{_task_fields(task_id, attempt, replacement)}"
        # The common beginning of tokens, and the process and limit for which it was made: at first none.
        self._head: tuple[_Process | None, float | None, bytes] = (None, None, b"")

    def token(self, deadline_in: float | None) -> bytes:
        """The value with which this process acquires a key.

        Args:
            deadline_in: seconds after which the key is free at the latest, or None without a
                ``timeout``.

        Returns:
            Compact ASCII JSON that ``Holder.parse`` reads; no two are alike.
        """
        made_by, limit, head = self._head
        process = _this_process()
        if made_by is not process or limit != deadline_in:
            milliseconds = "null" if deadline_in is None else round(deadline_in * 1000)
            # Parts that change in each call come last, so the rest is serialized once.
            head = f'{{{process.serialized},{self._serialized}"limit":{milliseconds},"number":'.encode()
            self._head = process, deadline_in, head
        # Whole milliseconds: a float takes longer to serialize than the rest of the token. The nanoseconds that are
        # left tell it from that of a clone of this process, in a virtual machine that was cloned: it counts as we do.
        since, left = divmod(time.time_ns(), 1_000_000)
        return head + b'%d%06d,"since":%d}' % (next(process.numbers), left, since)


@lru_cache(maxsize=1024, typed=True)
def _serialize(**values: object) -> str:
    """JSON of an object, without its braces; remembered, because the names of functions are few and tokens many."""
    return json.dumps(values, separators=(",", ":"))[1:-1]


def machine() -> str | None:
    """This machine, as far as process ids mean the same in it: host, boot, pid and time namespace.

    None if that cannot be read, or belongs to others, as in a container that sees its host's /proc.
    """
    try:
        if Path("/proc/self").readlink() != Path(str(os.getpid())):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().decode().strip()
        # The namespace of time shifts when a process seems to have begun; older kernels have none.
        links = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "time")]
        namespaces = [str(link.readlink()) if link.is_symlink() else "" for link in links]
        return "/".join([socket.gethostname(), boot, *namespaces])
    except OSError:
        return None


def process_start(pid: int) -> int | None:
    """When process ``pid`` began, in clock ticks since boot; None if that cannot be read."""
    try:
        # The command's name, second in the line, is in parentheses and may hold anything, blanks included.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def is_dead(value: bytes) -> bool:
    """Whether the run that ``value`` encodes has certainly ended without releasing its key, or will never begin.

    Either its process, of this machine, is gone; or its process is this one, and no such call is
    under way here.
    A holder of another machine, a kept key and an unknown value are not dead.
    """
    process = _this_process()
    if value.startswith(process.mark):
        holder = None if value in active_tokens else Holder.parse(value)
        return holder is not None and holder.state == "running"
    holder = Holder.parse(value) if value.startswith(process.machine_mark) else None
    return holder is not None and holder.state in {"running", "received"} and _has_gone(holder)


def is_gone(value: bytes) -> bool:
    """Whether the process of this machine that ``value`` names is certainly gone."""
    holder = Holder.parse(value) if value.startswith(_this_process().machine_mark) else None
    return holder is not None and _has_gone(holder)


def is_queued(value: bytes) -> bool:
    """Whether the task that ``value`` encodes waits, in its queue or in a worker: then a run may take over its key."""
    if b'"state":"queued"' not in value and b'"state":"received"' not in value:  # cheaper than parsing
        return False
    holder = Holder.parse(value)
    return holder is not None and holder.state in {"queued", "received"}


def _has_gone(holder: Holder) -> bool:
    """Whether there is no process with the holder's id, or only one that began at another time."""
    try:
        if holder.pid > 0:  # else it would be a process group, and no holder has such an id
            os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # not ours to ask
        pass
    return not _may_have_begun(holder.pid, holder.process_start, int(now()))


@lru_cache(maxsize=_MOST_REMEMBERED)
def _may_have_begun(pid: int, start: int | None, _second: int) -> bool:
    """Whether process ``pid`` may have begun at ``start``: read once a second, so a skip need not pay for it."""
    return start is None or process_start(pid) in {None, start}


def kept(value: bytes, at_least: float) -> bytes:
    """The value for a key that is kept after a successful run, until ``at_least`` seconds after it was acquired."""
    fields = {**json.loads(value), "state": "kept", "limit": round(at_least * 1000)}
    return json.dumps(fields, separators=(",", ":")).encode()
