"""Inherited locks: a forked child replaces the locks in redis-py's objects and ours by new ones.

At the fork, a thread of the parent may have acquired such a lock. The child does not have that thread, and would wait
for the lock for ever. A cluster's lock is acquired for as long as a look for the slots takes.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

from only_one.forks import in_each_child

_owners: WeakSet[Any] = WeakSet()

_SLOTS = {"slots_cache", "_owners"}
"""Tables with a cluster's 16384 slots. They are not searched: their nodes are reached through other attributes."""


def renew_locks_in_children(owner: Any) -> None:
    """In each forked child, replace the locks of ``owner``, and of all objects of redis-py and ours behind it."""
    _owners.add(owner)


def _renew_locks() -> None:
    makers: dict[type, Callable[[], Any]] = {type(make()): make for make in (threading.Lock, threading.RLock)}
    new: dict[Any, Any] = {}  # by the inherited lock, which several objects may share
    seen: set[int] = set()
    left: list[Any] = [*_owners]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            locks = {name: lock for name, lock in each.items() if type(lock) in makers}
            each.update({name: new.setdefault(lock, makers[type(lock)]()) for name, lock in locks.items()})
            left += [part for name, part in each.items() if name not in _SLOTS]
        elif _is_searched(each.__class__) and hasattr(each, "__dict__"):
            left.append(vars(each))  # one dict for a guarded client and its original, so it is seen once


@cache
def _is_searched(kind: type) -> bool:
    """Whether the objects of a class are searched for locks: it is redis-py's or ours, or a subclass of one."""
    return any(base.__module__.startswith(("redis.", "only_one.")) for base in kind.__mro__)


in_each_child(_renew_locks)
