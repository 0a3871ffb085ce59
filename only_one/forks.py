"""Forks: a child begins anew, also if C code has forked it, as uWSGI does, and Python knows of no fork."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

_begin_anew: list[Callable[[], object]] = []
_pid = os.getpid()
_one_at_a_time = threading.Lock()


def in_each_child(do: Callable[[], object]) -> None:
    """Have ``do`` called in each forked child, before its first call of a decorated function."""
    _begin_anew.append(do)


def see_fork() -> None:
    """Begin anew if this is a child that has not done so yet."""
    if _pid != os.getpid():
        with _one_at_a_time:
            _after_fork()


def _after_fork() -> None:
    global _pid  # noqa: PLW0603 - that of the process
    if _pid != os.getpid():
        for do in _begin_anew:
            do()
        _pid = os.getpid()


with suppress(AttributeError):  # where nothing forks
    os.register_at_fork(after_in_child=_after_fork)
