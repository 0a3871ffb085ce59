"""Forks: a forked child begins anew, also if C code has forked it without Python's knowledge, as uWSGI does."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakSet

_in_each_child: list[Callable[[], object]] = []
_pid = os.getpid()
_one_at_a_time = threading.Lock()


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
    _renew_locks()
    for do in _in_each_child:
        do()
    _pid = os.getpid()


with suppress(AttributeError):  # on a system without forks
    # Process ids are not compared here, because a child in a new pid namespace may have the id of its parent.
    os.register_at_fork(after_in_child=_begin_anew)


# Inherited locks: at the fork, a thread of the parent may have acquired a lock in redis-py's objects or ours. The child
# does not have that thread, and would wait for the lock for ever. A cluster's is acquired for as long as a look for the
# slots takes.

_have_locks: WeakSet[Any] = WeakSet()

_SLOTS = {"slots_cache", "owners"}
"""Tables with a cluster's 16384 slots. They are not searched: their nodes are reached through other attributes."""


def renew_locks_in_children(owner: Any) -> None:
    """In each forked child, unlock the locks of ``owner``, and of all objects of redis-py and ours behind it."""
    _have_locks.add(owner)


def _renew_locks() -> None:
    seen: set[int] = set()
    left: list[Any] = [*_have_locks]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if hasattr(type(each), "_at_fork_reinit"):
            each._at_fork_reinit()  # noqa: SLF001 - as the standard library does with its locks
        elif isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            left += [part for name, part in each.items() if name not in _SLOTS]
        elif _is_searched(each.__class__) and hasattr(each, "__dict__"):
            left.append(vars(each))  # one dict for a guarded client and its original, so it is seen once


@cache
def _is_searched(kind: type) -> bool:
    """Whether the objects of a class are searched for locks: it is redis-py's or ours, or a subclass of one."""
    return any(base.__module__.startswith(("redis.", "only_one.")) for base in kind.__mro__)
