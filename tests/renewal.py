"""Renewals and deadlines that come when the test says so: its leases are long, and no test has to be faster than one.

They work in the process that calls them; one that a test has started calls them at a signal.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from only_one.clock import now
from only_one.connections import server as servers
from only_one.lock import renewal
from rigs.waiting import eventually

if TYPE_CHECKING:
    import pytest  # which live workers, who import this, would take long for

MOMENT = 128.0
"""When a `Clock` begins: of few bits, as other numbers that tests add to it, so that nothing is rounded."""


class Clock:
    """A clock that stands still until a test puts it forward.

    Attributes:
        moment: what it shows.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        """It is the one of these modules until the test ends."""
        self.moment = MOMENT
        for module in modules:
            monkeypatch.setattr(module, "now", self)

    def __call__(self) -> float:
        return self.moment


def renew_now(*locks: Any) -> float:
    """Have the thread that renews see to these leases at once, as if a third of each had gone by; returns when."""
    moment = now()
    for lock in locks:
        lock.renew_at = moment
    renewal._renewer.wake_by(-math.inf)
    return moment


def is_renewed(lock: Any) -> bool:
    """Whether a lease is renewed when it is its turn."""
    before = lock.expires_at
    renew_now(lock)
    return eventually(lambda: lock.expires_at > before)


def fails_to_renew(lock: Any) -> bool:
    """Whether it is tried in vain when it is its turn, and is to be tried again."""
    expires_at = lock.expires_at
    due = renew_now(lock)  # not read from the lock, which may have been tried by then
    return eventually(lambda: lock.renew_at > due) and lock.expires_at == expires_at


def is_awaited(lock: Any) -> bool:
    """Whether the thread that renews sleeps, and no longer than until it is the turn of this lease."""
    thread: Any = renewal  # whose clock `later` puts forward
    return eventually(lambda: thread.now() < thread._renewer.wakes_at <= lock.renew_at)


def is_idle() -> bool:
    """Whether the thread that renews comes to have seen to all that was due, a new server that it looks at included."""
    thread: Any = renewal._renewer
    return eventually(lambda: not thread.not_looked_at and now() < thread.wakes_at)


@contextmanager
def later(seconds: float) -> Iterator[None]:
    """Put the clock of deadlines forward, as if so much time had gone by, and have the thread that renews see to it."""
    modules: list[Any] = [sys.modules[name] for name in list(sys.modules) if name.startswith("only_one.")]
    those = [module for module in modules if getattr(module, "now", None) is now]
    for module in those:
        module.now = lambda: now() + seconds
    renewal._renewer.wake_by(-math.inf)
    try:
        yield
    finally:
        for module in those:
            module.now = now
        _wait_no_longer()


def _wait_no_longer() -> None:
    """What was put off until the clock that was ahead would say so is due by this one."""
    every = [*servers._from_urls.values(), *servers._from_clients.values()]
    nodes = [node for each in every for node in getattr(each._nodes, "_nodes", {0: each._nodes}).values() if node]
    for node in nodes:
        node.backs_off_until = min(node.backs_off_until, now())
    for pending in list(renewal._renewer.pending_releases.values()):
        pending.try_at = min(pending.try_at, now())
    renewal._renewer.wake_by(-math.inf)


def wait_for_another_attempt(key: str) -> None:
    """To release the key in the background, which fails, or is put off while the server is known to be away."""
    pending = next(each for each in renewal._renewer.pending_releases.values() if each.key == key)
    before = pending.try_at
    assert eventually(lambda: pending.try_at != before)
