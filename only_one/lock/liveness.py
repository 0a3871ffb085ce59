"""Whether the holder of a key is alive or dead, as far as this machine can see."""

import os
from functools import lru_cache

from only_one.clock import now
from only_one.holder import Holder

from .token import active_tokens, process_start, this_process


def is_dead(value: bytes) -> bool:
    """Whether the run that ``value`` encodes has certainly ended without releasing its key, or will never begin.

    It is dead if its process, of this machine, is gone; or if its process is this one, and no such call is under way.
    A holder of another machine, a kept key and an unknown value are not dead.
    """
    if value.startswith(this_process().mark):
        holder = None if value in active_tokens else Holder.parse(value)
        return holder is not None and holder.state == "running"
    holder = Holder.parse(value) if is_gone(value) else None
    return holder is not None and holder.state in {"running", "received"}


def is_gone(value: bytes) -> bool:
    """Whether the process of this machine that ``value`` names is certainly gone.

    Then there is no process with its id, or only one that began at another time.
    """
    holder = Holder.parse(value) if value.startswith(this_process().machine_mark) else None
    if holder is None or holder.pid <= 0:  # `kill` takes such a number for a process group, and no holder has it
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # another user's process, or a number that can be none
        pass
    return not _may_have_begun(holder.pid, holder.process_start, int(now()))


@lru_cache(maxsize=1000)
def _may_have_begun(pid: int, start: int | None, _second: int) -> bool:
    """Whether process ``pid`` may have begun at ``start``: read once a second, so a skip need not pay for it."""
    return start is None or process_start(pid) in {None, start}
