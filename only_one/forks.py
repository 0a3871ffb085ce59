"""Forks: a forked child begins anew, also if C code has forked it without Python's knowledge, as uWSGI does."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

_in_each_child: list[Callable[[], object]] = []
_pid = os.getpid()
_one_at_a_time = threading.RLock()  # for its owner no obstacle if a signal handler raises just after it was acquired


def in_each_child(do: Callable[[], object]) -> None:
    """Have ``do`` called in each forked child, before its first call or look at a key."""
    _in_each_child.append(do)


def see_fork() -> None:
    """Begin anew if C code has forked this process, which has not begun anew yet."""
    if _pid != os.getpid():
        with _one_at_a_time:
            if _pid != os.getpid():  # else another thread has just done so
                _begin_anew()


def _begin_anew() -> None:
    global _pid  # noqa: PLW0603 - that of the process
    for do in _in_each_child:
        do()
    _pid = os.getpid()


with suppress(AttributeError):  # on a system without forks
    # Process ids are not compared here, because a child in a new pid namespace may have the id of its parent.
    os.register_at_fork(after_in_child=_begin_anew)
