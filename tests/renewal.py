"""Renewals and deadlines that come when the test says so: its leases are long, and no test has to be faster than one.

They work in the process that calls them; one that a test has started calls them at a signal, as `programs.Holder` does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from only_one import leases
from only_one.clock import now
from tests.waiting import eventually


def renew_now(*locks: Any) -> None:
    """Have the thread that renews see to these leases at once, as if a third of each had gone by."""
    for lock in locks:
        lock.renew_at = now()
    leases._renewer.see_to_it_by(-math.inf)


def is_renewed(lock: Any) -> bool:
    """Whether a lease is renewed when it is its turn."""
    before = lock.expires_at
    renew_now(lock)
    return eventually(lambda: lock.expires_at > before)


def fails_to_renew(lock: Any) -> bool:
    """Whether it is tried in vain when it is its turn, and is to be tried again."""
    renew_now(lock)
    before, expires_at = lock.renew_at, lock.expires_at
    return eventually(lambda: lock.renew_at > before) and lock.expires_at == expires_at


def is_awaited(lock: Any) -> bool:
    """Whether the thread that renews sleeps, and no longer than until it is the turn of this lease."""
    return eventually(lambda: now() < leases._renewer.wakes_at <= lock.renew_at)


@contextmanager
def later(seconds: float) -> Iterator[None]:
    """Put the clock of deadlines forward, as if so much time had gone by, and have the thread that renews see to it."""
    modules: list[Any] = [sys.modules[name] for name in list(sys.modules) if name.startswith("only_one.")]
    those = [module for module in modules if getattr(module, "now", None) is now]
    for module in those:
        module.now = lambda: now() + seconds
    leases._renewer.see_to_it_by(-math.inf)
    try:
        yield
    finally:
        for module in those:
            module.now = now
