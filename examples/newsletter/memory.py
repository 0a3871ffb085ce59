"""The memory that processes have needed, as Linux tells it of each."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def peak() -> int | None:
    """The memory of the largest process so far: this one, or one of those that it has started and that still run.

    `getrusage` is no help: its figure is inherited, also over `exec`, so it may be that of whoever started this one.

    Returns:
        Bytes; None where there is no /proc to read them from.
    """
    if not (PROC / "self" / "status").exists():
        return None
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for file in PROC.glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended meanwhile
            fields = dict(re.findall(r"^(PPid|VmHWM):\s+(\d+)", file.read_text(errors="replace"), re.MULTILINE))
            parents[int(file.parent.name)] = int(fields["PPid"])
            peaks[int(file.parent.name)] = int(fields.get("VmHWM", 0)) * 1024  # what has ended has none
    return max(size for pid, size in peaks.items() if os.getpid() in _line(pid, parents))


def _line(pid: int, parents: dict[int, int]) -> list[int]:
    """A process, and those that it descends from."""
    line = [pid]
    while (parent := parents.get(line[-1], 0)) not in {0, *line}:
        line.append(parent)
    return line
