"""The tokens with which this process acquires keys: how they are made, and which of them are active.

A token names the machine and the process, by which others see whether the process lives.
"""

import itertools
import json
import os
import socket
import time
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from pathlib import Path

from only_one.forks import in_each_child
from only_one.holder import FORMAT


class _Process:
    """This process, as its tokens name it. It is serialized once, which is most of a token's cost.

    Attributes:
        machine: the name of the machine in its tokens; the host's name if the machine is unknown.
        serialized: the JSON that its tokens have in common.
        mark: the beginning of all its tokens.
        machine_mark: the beginning of all tokens of this machine; if the machine is unknown, no token begins so.
        numbers: the numbers of its tokens.
    """

    def __init__(self) -> None:
        own, host, pid = machine(), socket.gethostname(), os.getpid()
        self.machine = own or host
        fields = {"only_one": FORMAT, "machine": self.machine, "host": host, "pid": pid}
        self.serialized = _serialize(**fields, process_start=process_start(pid), process=os.urandom(8).hex())
        self.mark = f"{{{self.serialized},".encode()
        self.machine_mark = f"{{{_serialize(only_one=FORMAT, machine=own)},".encode()
        self.numbers = itertools.count(1)


_made: dict[str, _Process] = {}


def this_process() -> _Process:
    """The one ``_Process`` of this process, made on first use, and anew in a forked child."""
    process = _made.get("this")
    if process is None:
        process = _made.setdefault("this", _Process())  # atomic: if two threads come first, both get the same
    return process


active_tokens: dict[bytes, object] = {}
"""The tokens of this process whose calls have not ended, or whose retained values are yet to be stored, with callers.

A token of this process that is not among them is held by no run, and its key may be taken over.

A forked child begins without any: a call that was under way at the fork stays the parent's.
"""

in_each_child(_made.clear)
in_each_child(active_tokens.clear)


def _task_fields(task_id: str | None, attempt: int | None, replacement: int, queue: str | None = None) -> str:
    """The JSON of the fields that name the work, in the order in which scripts look for them: see ``words_of``.

    A field that was added later is there only if it is needed, so a worker of the first version, which refuses unknown
    fields, can read all other values.
    """
    # The encoder of `json.dumps` gives the same in less time.
    task = "null" if task_id is None else encode_basestring_ascii(task_id)
    fields = f'"task_id":{task},"attempt":{"null" if attempt is None else attempt},'
    added = {"replacement": replacement or None, "queue": queue}
    return fields + "".join(f'"{name}":{json.dumps(value)},' for name, value in added.items() if value is not None)


def words_of(task_id: str, replacement: int, attempt: int) -> bytes:
    """The part of a value that names this work of a task, and is in no value of other work. A script looks for it."""
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
        queue: str | None = None,
    ) -> None:
        """See ``Holder`` for the arguments."""
        task = _task_fields(task_id, attempt, replacement, queue)
        self._serialized = f"{_serialize(state=state, name=name)},{task}"
        # The last beginning of a token, after the process and the deadline for which it was made; at first none.
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
        process = this_process()
        if made_by is not process or limit != deadline_in:
            milliseconds = "null" if deadline_in is None else round(deadline_in * 1000)
            # The parts that change in each call come last, so the rest is serialized once.
            head = f'{{{process.serialized},{self._serialized}"limit":{milliseconds},"number":'.encode()
            self._head = process, deadline_in, head
        # In whole milliseconds: a float takes longer to serialize than the rest of the token. The nanoseconds that are
        # left go into the number: in a clone of the virtual machine, this process counts the same numbers.
        since, left = divmod(time.time_ns(), 1_000_000)
        return head + b'%d%06d,"since":%d}' % (next(process.numbers), left, since)


@lru_cache(maxsize=1024)
def _serialize(**values: object) -> str:
    """JSON of an object, without its braces; remembered, because the names of functions are few and tokens many."""
    return json.dumps(values, separators=(",", ":"))[1:-1]


def machine() -> str | None:
    """The name of this machine, in which a process id has one meaning: host, boot, pid namespace and time namespace.

    None if it cannot be read, or if /proc is not this process's own, as in a container that sees its host's.
    """
    try:
        if Path("/proc/self").readlink() != Path(str(os.getpid())):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().decode().strip()
        # In another time namespace, a process seems to have begun at another time. Older kernels have none.
        links = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "time")]
        namespaces = [str(link.readlink()) if link.is_symlink() else "" for link in links]
        return "/".join([socket.gethostname(), boot, *namespaces])
    except OSError:
        return None


def process_start(pid: int) -> int | None:
    """When process ``pid`` began, in clock ticks since boot; None if that cannot be read."""
    try:
        # Split after the command's name, the second field: it is in parentheses, and may have blanks.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def kept(value: bytes, at_least: float) -> bytes:
    """The value for a key that is kept after a successful run, until ``at_least`` seconds after it was acquired."""
    fields = {**json.loads(value), "state": "kept", "limit": round(at_least * 1000)}
    return json.dumps(fields, separators=(",", ":")).encode()
