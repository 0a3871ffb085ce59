"""Inherited locks: a thread may have acquired one that a forked child does not have, so the child makes new ones.

Else redis-py would wait for it for ever. A cluster's is acquired for as long as a look for the slots takes.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

from only_one.forks import in_each_child

_owners: WeakSet[Any] = WeakSet()

_SLOTS = {"slots_cache", "_owners"}
"""Tables of a cluster with 16384 rows each; the nodes in these are known elsewhere, too."""


def renew_locks_in_children(owner: Any) -> None:
    """Have all that is redis-py's or ours behind ``owner`` get new locks in each forked child."""
    _owners.add(owner)


def _renew_locks() -> None:
    makers: dict[type, Callable[[], Any]] = {type(make()): make for make in (threading.Lock, threading.RLock)}
    new: dict[Any, Any] = {}  # one lock may be that of several
    seen: set[int] = set()
    left: list[Any] = [*_owners]
    while left:
        if id(each := left.pop()) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            locks = {name: lock for name, lock in each.items() if type(lock) in makers}
            each.update({name: new.setdefault(lock, makers[type(lock)]()) for name, lock in locks.items()})
            left += [part for name, part in each.items() if name not in _SLOTS]
        elif _has_locks(each.__class__) and hasattr(each, "__dict__"):
            left.append(vars(each))  # which a guarded client has in common with the original


@cache
def _has_locks(kind: type) -> bool:
    """Whether a class is redis-py's or ours, or is made of one."""
    return any(base.__module__.startswith(("redis.", "only_one.")) for base in kind.__mro__)


in_each_child(_renew_locks)
