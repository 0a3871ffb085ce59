"""What becomes of a lock: only_one beside celery-singleton, celery-once, celery-heimdall, python-redis-lock, a recipe.

    python -m benchmarks.peers [--only NUMBER ...] [--write]

A real Redis, a real worker and a second one as on another machine. Each check does the same to each library, and says
in a few words what it has seen: a witness in Redis, which uses no lock, has the start and the end of each run. All
libraries go through a check at the same time, each with a database of its own for its locks. It takes some six minutes.
With --write the tables of `docs/comparison.md` are written anew; else they are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from celery import chain

from benchmarks import markdown, peers_app
from benchmarks.peers_app import DEFAULT, EXPIRY, FIXED, PEERS, RENEWED, WITNESS_DB, Peer, app, client
from only_one.testing import redis_server
from rigs.namespaces import elsewhere
from rigs.programs import Logged, Programs, celery_worker
from rigs.waiting import LIMIT, eventually, wait_until

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "comparison.md"

GIVEN_UP_AFTER = 60.0
"""Seconds after a kill in which a lock that is not free is said not to be."""

NOT_EXPECTED_AFTER = 15.0
"""Seconds after which a retry, the rest of a chain or a free lock is not expected any more."""

BETWEEN_CALLS = 0.25
CHILDREN = 24
"""Three at a time for each library."""

APP = "benchmarks.peers_app"
HERE, ELSEWHERE = "here", "elsewhere"
"""The workers; the second one has a queue of its own, of its name."""


def called(call: Callable[[], Any]) -> Any:
    """What a call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return error


class Unit:
    """Calls of one library's task with the same arguments.

    Attributes:
        peer: the library.
        name: the argument that they have.
    """

    _numbers = count()

    def __init__(self, peer: Peer, settings: str = DEFAULT) -> None:
        self.peer, self.name = peer, f"unit-{next(self._numbers)}"
        self.task = peer.task(settings)

    def order(self, *orders: str) -> None:
        """Say what the next runs have to do; see `peers_app.body`."""
        client(WITNESS_DB).rpush(f"orders:{self.name}", *orders)

    def let_go(self, gate: str = "first") -> None:
        """Let the run go on that waits at a gate, or will."""
        client(WITNESS_DB).rpush(f"gate:{self.name}:{gate}", 1)

    def notes(self, word: str) -> list[dict[str, Any]]:
        """What runs have written down, of one kind."""
        lines = map(json.loads, client(WITNESS_DB).lrange(f"notes:{self.name}", 0, -1))
        return [line for line in lines if line["word"] == word]

    def wait_for(self, word: str) -> dict[str, Any]:
        """The first note of a kind, which is waited for."""
        wait_until(lambda: self.notes(word), LIMIT, f"{self.peer.name}, {self.name}: no {word}")
        return self.notes(word)[0]

    def call(self, *more: Any, **options: Any) -> Any:
        """Call the task; returns its result, or the exception that the call raises."""
        return called(lambda: self.task.apply_async((self.name, *more), **options))

    def begin(self, **options: Any) -> dict[str, Any]:
        """Have a run begin that waits at a gate; returns the note of its start."""
        self.order("first")
        self.call(**options)
        return self.wait_for("start")

    def has_run(self, call: Any, first: dict[str, Any]) -> bool:
        """Whether a call comes to a run of its own, beside the first; waits until this is known."""
        if isinstance(call, Exception) or call.id == first["id"]:
            return False

        def run() -> bool:
            return any(note["id"] == call.id for note in self.notes("start"))

        wait_until(lambda: run() or call.ready(), LIMIT, f"{self.peer.name}: neither a run nor an end without one")
        return run()

    def start_after(self, times: int, until: float) -> float | None:
        """Call again and again until so many runs have started; returns when the last of them did, if it has."""

        def starts() -> list[float]:
            first = {note["id"]: note["at"] for note in reversed(self.notes("start"))}  # of each task
            return sorted(first.values())

        while len(starts()) < times and time.monotonic() < until:
            self.call()
            time.sleep(BETWEEN_CALLS)
        # What was queued last may start a little later.
        return starts()[times - 1] if eventually(lambda: len(starts()) >= times, 4 * BETWEEN_CALLS) else None

    def expiry(self) -> str:
        """In how many minutes the library's lock expires that is there."""
        locks = client(self.peer.number)
        lasts = [locks.pttl(key) for key in locks.scan_iter(count=1000)]
        if not lasts:
            return "no lock is left"
        return f"expires in {max(lasts) / 60_000:.0f} min" if min(lasts) >= 0 else "no expiry"

    def freed(self, runs: int) -> str:
        """Whether the next call runs, after so many runs."""
        expiry = self.expiry()  # the calls below may make a new lock
        return "yes" if self.start_after(runs + 1, time.monotonic() + NOT_EXPECTED_AFTER) else f"no; {expiry}"

    def freed_after(self, kill: Callable[[], object]) -> str:
        """How long after the kill of the first run the next one starts."""
        expiry = self.expiry()
        kill()
        killed_at = time.monotonic()
        started = self.start_after(2, killed_at + GIVEN_UP_AFTER)
        return f"{max(0.0, started - killed_at):.1f} s" if started else f"not in {GIVEN_UP_AFTER:g} s; {expiry}"


_workers: dict[str, Logged] = {}
"""By their names."""

_all_have_begun = threading.Barrier(len(PEERS))


def seen(measure: Callable[[Unit], str]) -> dict[str, str]:
    """Put all libraries through a check; returns what was seen of each."""
    for peer in PEERS:
        client(peer.number).flushdb()
    with ThreadPoolExecutor(len(PEERS)) as pool:
        found = list(pool.map(measure, map(Unit, PEERS)))
    for key in client(WITNESS_DB).scan_iter("notes:*"):
        client(WITNESS_DB).rpush(key.replace(b"notes:", b"gate:") + b":first", 1)
    return {peer.name: each for peer, each in zip(PEERS, found, strict=True)}


# A holder that is killed


def killed_child(unit: Unit) -> str:
    """The process of a run gets SIGKILL; the worker goes on."""
    first = unit.begin()
    inspect = app.control.inspect([f"{HERE}@peers"], timeout=5)
    # The worker has a task run again whose process is killed before the worker knows that it runs.
    wait_until(lambda: first["id"] in json.dumps(inspect.active(), default=str), LIMIT, "no task that is active")
    return unit.freed_after(lambda: os.kill(first["pid"], signal.SIGKILL))


def killed_worker(unit: Unit) -> str:
    """A worker on another machine gets SIGKILL, with all its processes; the next call is run by another worker."""
    unit.begin(queue=ELSEWHERE)

    def kill() -> None:
        _all_have_begun.wait(LIMIT)
        _workers[ELSEWHERE].kill_all()  # each library does, at the same time

    return unit.freed_after(kill)


# A run that is longer than the expiry


def overrun(unit: Unit) -> str:
    """Does the next run begin beside one that takes longer than the expiry? With renewal, where there is any."""
    said = _overrun(Unit(unit.peer, RENEWED))
    return f"no; not renewed: {_overrun(Unit(unit.peer, FIXED))}" if said == "no" and unit.peer.package else said


def _overrun(unit: Unit) -> str:
    began = unit.begin()["at"]
    second = unit.start_after(2, began + 3 * EXPIRY)
    is_beside = second and not any(note["at"] < second for note in unit.notes("end"))
    unit.let_go()
    return f"yes, after {second - began:.1f} s" if second and is_beside else "no"


def late_end(unit: Unit) -> str:
    """A run ends after its lock has expired and a second run has begun: does a third begin beside the second?"""
    unit = Unit(unit.peer, FIXED)
    unit.order("first", "second")
    late = unit.call()
    second = unit.start_after(2, unit.wait_for("start")["at"] + LIMIT)
    if second is None:
        return "no second run began"
    unit.let_go()
    unit.wait_for("end")
    third = unit.start_after(3, second + EXPIRY / 2)
    unit.let_go("second")
    wait_until(late.ready, LIMIT, "no result of the late run")
    said = "yes" if third and third < second + EXPIRY else "no"
    return f"{said}; it fails with `{type(late.result).__name__}`" if late.failed() else said


# What a task can end by


def retried(unit: Unit) -> str:
    """A task calls `self.retry()` once: does that run?"""
    unit.order("retry")
    unit.call()
    unit.wait_for("end")
    expiry = unit.expiry()
    runs = eventually(lambda: any(note["attempt"] == 1 for note in unit.notes("start")), NOT_EXPECTED_AFTER)
    return "yes" if runs else f"no; {expiry}"


def ended_by(unit: Unit, order: str) -> str:
    """A run ends in the way that is ordered: does the next call run?"""
    unit.order(order)
    unit.call()
    unit.wait_for("end")
    return unit.freed(1)


def revoked(unit: Unit) -> str:
    """A task is revoked while it waits in its queue: does the next call run?"""
    queue = f"later-{unit.peer.number}"
    task = unit.call(queue=queue)
    here = {"destination": [f"{HERE}@peers"], "reply": True, "timeout": 5}
    wait_until(lambda: app.control.revoke(task.id, **here), LIMIT, "no worker that answers")
    client(peers_app.BROKER_DB).lmove(queue, app.conf.task_default_queue)
    wait_until(lambda: task.state == "REVOKED", LIMIT, "no task that is revoked")
    return unit.freed(0)


def unpublished(unit: Unit) -> str:
    """The broker refuses the connection when a task is published: does the next call run?"""
    nobody = "redis://127.0.0.1:1/0"
    with app.connection_for_write(nobody, transport_options={"max_retries": 1}) as connection:
        if not isinstance(unit.call(connection=connection, retry=False), Exception):
            return "the call raises nothing"
    said = unit.freed(0)
    return said if unit.peer.at_enqueue else f"{said}: not locked yet"


# Which calls are the same, and what a duplicate comes to


def one_key(unit: Unit) -> str:
    """f(1) runs: do f(a=1) and f(1, default) run beside it?"""
    first = unit.begin()
    calls = [called(lambda: unit.task.delay(unit=unit.name)), unit.call(0)]
    named, defaulted = ("no" if unit.has_run(call, first) else "yes" for call in calls)
    unit.let_go()
    return named if named == defaulted else f"`f(a=1)`: {named}; `f(1, default)`: {defaulted}"


def chained(unit: Unit, *before: Any) -> str:
    """A chain has a duplicate of a task that runs, at its head or behind it: what becomes of the chain's tail?"""
    unit.begin()
    last = called(chain(*before, unit.task.si(unit.name), peers_app.tail.s(unit.name)).apply_async)
    if isinstance(last, Exception):
        unit.let_go()
        return f"raises `{type(last).__name__}`"
    duplicate = last.parent
    for limit in (NOT_EXPECTED_AFTER / 3, NOT_EXPECTED_AFTER):  # while the first run goes on, and after it
        eventually(lambda: bool(unit.notes("tail")) or duplicate.failed(), limit)
        unit.let_go()
    if given := unit.notes("tail"):
        return f"the tail gets `{given[0]['given']}`"
    if duplicate.failed():
        return f"fails: `{type(duplicate.result).__name__}`"
    return f"the tail stays `{last.state}`"


def told(unit: Unit) -> str:
    """A duplicate is called: what is the caller told?"""
    first, call = unit.begin(), unit.call()
    has_run = unit.has_run(call, first)
    unit.let_go()
    if has_run:
        return "the duplicate runs"
    if isinstance(call, Exception):
        return f"`{type(call).__name__}`"
    return "the first one's result" if call.id == first["id"] else f"`{call.result}`, as `{call.state}`"


CHECKS: dict[str, Callable[[Unit], str]] = {
    "`kill -9` of a run's process: the next call runs after": killed_child,
    f"the same, with an expiry of {EXPIRY} s": lambda unit: killed_child(Unit(unit.peer, RENEWED)),
    "`kill -9` of a worker on another machine": killed_worker,
    f"two run, if one takes longer than {EXPIRY} s": overrun,
    "a late end frees the next run's lock": late_end,
    "`self.retry()` runs": retried,
    "free after an exception": partial(ended_by, order="fail"),
    "free after `Ignore`": partial(ended_by, order="ignore"),
    "free after `Reject`": partial(ended_by, order="reject"),
    "free after `revoke`": revoked,
    "free after publishing failed": unpublished,
    "`f(1)`, `f(a=1)`, `f(1, default)` are one": one_key,
    "a duplicate heads a chain": chained,
    "a duplicate within a chain": lambda unit: chained(unit, peers_app.tail.si("", "another")),
    "a duplicate's caller gets": told,
}
"""The rows of the tables, and what each measures."""

TABLES = {True: "Unique from queued to finished", False: "A lock around the run"}


# The report


def tables(found: dict[str, dict[str, str]]) -> str:
    """What was measured, and when, and what was seen, in Markdown."""
    info = client(WITNESS_DB).info("server")
    server = f"{info.get('server_name', 'redis').capitalize()} {info.get('valkey_version', info['redis_version'])}"
    packages = dict.fromkeys(["celery", "redis", *(peer.package for peer in PEERS if peer.package)])
    versions = f"{server}, {markdown.versions(*packages)}"
    parts = [f"Measured on {datetime.now(timezone.utc):%Y-%m-%d} with {versions}."]
    for at_enqueue, title in TABLES.items():
        columns = [peer.name for peer in PEERS if peer.at_enqueue is at_enqueue]
        rows = [[check, *(cells[name] for name in columns)] for check, cells in found.items()]
        rows = [row for row in rows if len({*row[1:]}) > 1]  # what all do alike helps nobody to choose
        parts.append(f"## {title}\n\n{markdown.table(['', *columns], rows)}")
    return "\n\n".join(parts)


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help=f"rows of the table, from 1 to {len(CHECKS)}")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} anew")
    options = parser.parse_args()
    if (inside := elsewhere()) is None:
        sys.exit("another machine needs unshare, as root or with user namespaces: neither is permitted here")
    here = celery_worker(APP, "-n", f"{HERE}@peers", size=CHILDREN)
    there = celery_worker(APP, "-n", f"{ELSEWHERE}@peers", "-Q", ELSEWHERE, size=len(PEERS))
    found = {}
    with redis_server() as server, tempfile.TemporaryDirectory() as folder:
        peers_app.connect(server.url.removesuffix("/0"))
        with Programs({HERE: here, ELSEWHERE: [*inside, *there]}, Path(folder), cwd=ROOT) as workers:
            workers.start(HERE, ELSEWHERE)
            _workers.update(workers.running)
            for number, (title, measure) in enumerate(CHECKS.items(), 1):
                if number in (options.only or [number]):
                    print(f"{number}: {title}", file=sys.stderr)
                    found[title] = seen(measure)
        text = tables(found)
    print(text)
    if options.write and not options.only:
        markdown.write(PAGE, text)


if __name__ == "__main__":
    main()
