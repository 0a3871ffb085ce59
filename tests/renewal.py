"""Renewals that come when the test says so: its leases are long, and no test has to be faster than a lease."""

from __future__ import annotations

import math
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
