"""What becomes of a lock: only_one beside celery-singleton, celery-once, celery-heimdall, python-redis-lock, a recipe.

    python -m benchmarks.peers [--only NUMBER ...] [--write]

A real Redis, a real worker and a second one as on another machine. Each check does the same to each library, and says
in a few words what it has seen: a witness in Redis, which uses no lock, has the start and the end of each run. All
libraries go through a check at the same time, each with a database of its own for its locks. It takes some six minutes.
With --write the tables of `docs/comparison.md` are written anew; else they are printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from celery import chain
from celery.signals import after_task_publish

from benchmarks import markdown, peers_app
from benchmarks.peers_app import DEFAULT, EXPIRY, FIXED, PEERS, RENEWED, WITNESS_DB, Peer, app, client
from only_one.testing import Guarded, redis_server
from rigs.namespaces import elsewhere
from rigs.waiting import eventually, wait_until

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"

LIMIT = 120.0
"""Seconds within which comes what has to come, on a slow machine, too."""

GIVEN_UP_AFTER = 60.0
"""Seconds after a kill in which a lock that is not free is said not to be."""

NOT_EXPECTED_AFTER = 15.0
"""Seconds after which a retry, the rest of a chain or a free lock is not expected any more."""

BETWEEN_CALLS = 0.25
RETRIES = 10
RECIPE_LINES = 6
"""Of the recipe, beside the task's own."""

CHILDREN = 24
"""Three at a time for each library."""

HERE, ELSEWHERE = "here", "elsewhere"
"""The workers, and the queue of the second."""

_published = threading.local()


@after_task_publish.connect  # type: ignore[untyped-decorator]
def _on_publish(headers: dict[str, Any], **_: Any) -> None:
    if hasattr(_published, "ids"):
        _published.ids.append(headers["id"])


class Call(NamedTuple):
    """What a call has come to.

    Attributes:
        ids: of the tasks that were published.
        result: what was returned.
        error: what was raised.
    """

    ids: list[str]
    result: Any = None
    error: Exception | None = None


def called(call: Callable[[], Any]) -> Call:
    """What a call comes to, with what this thread publishes meanwhile."""
    ids: list[str] = []
    _published.ids = ids
    try:
        return Call(ids, call())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        return Call(ids, error=error)


class Unit:
    """Calls of one library's task with the same arguments.

    Attributes:
        name: the argument that they have.
    """

    _numbers = count()

    def __init__(self, peer: Peer, settings: str = DEFAULT) -> None:
        self.name = f"unit-{next(self._numbers)}"
        self.task = peer.task(settings)
        self._peer = peer

    def order(self, *orders: str) -> None:
        """Say what the next runs have to do; see `peers_app.body`."""
        client(WITNESS_DB).rpush(f"orders:{self.name}", *orders)

    def let_go(self, gate: str) -> None:
        """Let the run go on that waits at a gate, or will."""
        client(WITNESS_DB).rpush(f"gate:{self.name}:{gate}", 1)

    def notes(self, word: str) -> list[dict[str, Any]]:
        """What runs have written down, of one kind."""
        lines = map(json.loads, client(WITNESS_DB).lrange(f"notes:{self.name}", 0, -1))
        return [line for line in lines if line["word"] == word]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for what has to come."""
        wait_until(condition, LIMIT, f"{self._peer.name}, {self.name}: no {what}")

    def wait_for(self, word: str) -> dict[str, Any]:
        """The first note of a kind, which is waited for."""
        self.wait(lambda: self.notes(word), word)
        return self.notes(word)[0]

    def call(self, *more: Any, by_name: bool = False, **options: Any) -> Call:
        """Call the task."""
        arguments: tuple[Any, dict[str, Any]] = ((), {"unit": self.name}) if by_name else ((self.name, *more), {})
        return called(lambda: self.task.apply_async(*arguments, **options))

    def begin(self, **options: Any) -> dict[str, Any]:
        """Have a run begin that waits at a gate; returns the note of its start."""
        self.order("first")
        if error := self.call(**options).error:
            raise error
        return self.wait_for("start")

    def has_run(self, call: Call) -> bool:
        """Whether a call comes to a run; waits until this is known."""

        def run() -> bool:
            return any(note["id"] in call.ids for note in self.notes("start"))

        results = [app.AsyncResult(id_) for id_ in call.ids]
        self.wait(lambda: run() or all(each.ready() for each in results), "run, and no end without one")
        return run()

    def start_after(self, times: int, until: float) -> float | None:
        """Call again and again until so many runs have started; returns when the last of them did, if it has."""
        while len(self.starts()) < times and time.monotonic() < until:
            self.call()
            time.sleep(BETWEEN_CALLS)
        # What was queued last may start a little later.
        return self.starts()[times - 1] if eventually(lambda: len(self.starts()) >= times, 4 * BETWEEN_CALLS) else None

    def starts(self) -> list[float]:
        """When the runs have started, each task's first."""
        first: dict[str, float] = {}
        for each in self.notes("start"):
            first.setdefault(each["id"], each["at"])
        return list(first.values())

    def expiry(self) -> str:
        """In how many seconds the library's lock expires that is there."""
        locks = client(self._peer.number)
        lasts = [locks.pttl(key) for key in locks.scan_iter(count=1000)]
        if not lasts:
            return "no lock is left"
        return f"expires in {duration(max(lasts) / 1000)}" if min(lasts) >= 0 else "no expiry"

    def freed(self, runs: int) -> str:
        """Whether the next call runs, after so many runs."""
        expiry = self.expiry()  # the calls below may make a new lock
        return "yes" if self.start_after(runs + 1, time.monotonic() + NOT_EXPECTED_AFTER) else f"no; {expiry}"


def duration(seconds: float) -> str:
    """A time in words, roughly: the lock has been there for some seconds."""
    minutes = round(seconds / 60)
    if minutes < 3:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes % 60 else f"{minutes // 60} h"


class Stage:
    """The workers: one here, and one on another machine, as far as anybody here can know.

    Attributes:
        other: the worker elsewhere; None where there can be none.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.killed_at = 0.0
        self._folder = folder
        inside = elsewhere()
        stack.enter_context(self._worker(HERE, "-c", str(CHILDREN)))
        other = self._worker(ELSEWHERE, "-Q", ELSEWHERE, "-c", str(len(PEERS)), inside=inside) if inside else None
        self.other = stack.enter_context(other) if other else None
        self.all_have_begun = threading.Barrier(len(PEERS), self._kill_other)

    @contextmanager
    def _worker(self, name: str, *options: str, inside: Sequence[str] = ()) -> Iterator[Guarded]:
        log = self._folder / f"{name}.log"
        command = [*inside, sys.executable, "-m", "celery", "-A", "benchmarks.peers_app", "worker", "-P", "prefork"]
        command += ["-l", "INFO", "--without-gossip", "--without-mingle", "-n", f"{name}@peers", *options]
        with log.open("wb") as output, Guarded(command, cwd=ROOT, stdout=output, stderr=output) as process:
            wait_until(lambda: b" ready." in log.read_bytes(), LIMIT, f"no worker: {log.read_text()[-2000:]}")
            yield process

    def _kill_other(self) -> None:
        if self.other:
            os.killpg(self.other.pid, signal.SIGKILL)
            self.other.wait(LIMIT)
        self.killed_at = time.monotonic()

    def run(self, measure: Measure) -> dict[str, str]:
        """Put all libraries through a check; returns what was seen of each."""
        for peer in PEERS:
            client(peer.number).flushdb()
        with ThreadPoolExecutor(len(PEERS)) as pool:
            found = [pool.submit(measure, self, peer) for peer in PEERS]
        gates = [key.replace(b"notes:", b"gate:") for key in client(WITNESS_DB).scan_iter("notes:*")]
        for gate in gates:
            client(WITNESS_DB).rpush(gate + b":first", 1)
        return {peer.name: each.result() for peer, each in zip(PEERS, found, strict=True)}


Measure = Callable[[Stage, Peer], str]
"""Does something to one library, and says what was seen."""


# A holder that is killed


def _after_kill(unit: Unit, killed: float, expiry: str) -> str:
    started = unit.start_after(2, killed + GIVEN_UP_AFTER)
    return f"{max(0.0, started - killed):.1f} s" if started else f"not in {GIVEN_UP_AFTER:g} s; {expiry}"


def killed_child(settings: str) -> Measure:
    """The process of a run gets SIGKILL; the worker goes on."""

    def measure(_: Stage, peer: Peer) -> str:
        unit = Unit(peer, settings)
        first = unit.begin()
        inspect = app.control.inspect([f"{HERE}@peers"], timeout=5)
        # The worker has a task run again whose process is killed before the worker knows that it runs.
        unit.wait(lambda: first["id"] in json.dumps(inspect.active(), default=str), "task that is active")
        expiry = unit.expiry()
        os.kill(first["pid"], signal.SIGKILL)
        return _after_kill(unit, time.monotonic(), expiry)

    return measure


def killed_worker(stage: Stage, peer: Peer) -> str:
    """A worker on another machine gets SIGKILL, with all its processes; the next call is run by another worker."""
    if stage.other is None:
        return "not measured: no process namespaces here"
    unit = Unit(peer)
    unit.begin(queue=ELSEWHERE)
    expiry = unit.expiry()
    stage.all_have_begun.wait(LIMIT)
    return _after_kill(unit, stage.killed_at, expiry)


# A run that is longer than the expiry


def overrun(_: Stage, peer: Peer) -> str:
    """Does the next run begin beside one that takes longer than the expiry? With renewal, where there is any."""
    said = _overrun(peer, RENEWED)
    if said == "no" and peer.package:
        said = f"no; not renewed: {_overrun(peer, FIXED)}"
    return said


def _overrun(peer: Peer, settings: str) -> str:
    unit = Unit(peer, settings)
    began = unit.begin()["at"]
    second = unit.start_after(2, began + 3 * EXPIRY)
    is_beside = second and not any(note["at"] < second for note in unit.notes("end"))
    unit.let_go("first")
    return f"yes, after {second - began:.1f} s" if second and is_beside else "no"


def late_end(_: Stage, peer: Peer) -> str:
    """A run ends after its lock has expired and a second run has begun: does a third begin beside the second?"""
    unit = Unit(peer, FIXED)
    unit.order("first", "second")
    late = app.AsyncResult(unit.call().ids[0])
    second = unit.start_after(2, unit.wait_for("start")["at"] + LIMIT)
    if second is None:
        return "no second run began"
    unit.let_go("first")
    unit.wait_for("end")
    third = unit.start_after(3, second + EXPIRY / 2)
    unit.let_go("second")
    unit.wait(late.ready, "result of the late run")
    said = "yes" if third and third < second + EXPIRY else "no"
    return f"{said}; it fails with `{type(late.result).__name__}`" if late.failed() else said


# What a task can end by


def retried(_: Stage, peer: Peer) -> str:
    """Tasks call `self.retry()` once."""
    units = [Unit(peer) for _ in range(RETRIES)]
    for unit in units:
        unit.order("retry")
        unit.call()
    for unit in units:
        unit.wait_for("end")
    expiry = units[0].expiry()

    def ran() -> int:
        return sum(any(note["attempt"] == 1 for note in unit.notes("start")) for unit in units)

    have_all = eventually(lambda: ran() == RETRIES, NOT_EXPECTED_AFTER)
    return f"{ran()} of {RETRIES}" + ("" if have_all else f"; {expiry}")


def ended_by(order: str) -> Measure:
    """A run ends in the way that is ordered: does the next call run?"""

    def measure(_: Stage, peer: Peer) -> str:
        unit = Unit(peer)
        unit.order(order)
        unit.call()
        unit.wait_for("end")
        return unit.freed(1)

    return measure


def revoked(_: Stage, peer: Peer) -> str:
    """A task is revoked while it waits in its queue: does the next call run?"""
    unit, queue = Unit(peer), f"later-{peer.number}"
    (id_,) = unit.call(queue=queue).ids
    here = {"destination": [f"{HERE}@peers"], "reply": True, "timeout": 5}
    unit.wait(lambda: app.control.revoke(id_, **here), "worker that answers")
    client(peers_app.BROKER_DB).lmove(queue, "celery")
    unit.wait(lambda: app.AsyncResult(id_).state == "REVOKED", "task that is revoked")
    return unit.freed(0)


def unpublished(_: Stage, peer: Peer) -> str:
    """The broker refuses the connection when a task is published: does the next call run?"""
    unit = Unit(peer)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}/0"
        with app.connection_for_write(url, transport_options={"max_retries": 1}) as connection:
            if unit.call(connection=connection, retry=False).error is None:
                return "the call raises nothing"
    said = unit.freed(0)
    return said if peer.at_enqueue else f"{said}: not locked yet"


# Which calls are the same, and what a duplicate comes to


def one_key(_: Stage, peer: Peer) -> str:
    """f(1) runs: do f(a=1) and f(1, default) run beside it?"""
    unit = Unit(peer)
    unit.begin()
    named, defaulted = ("no" if unit.has_run(call) else "yes" for call in (unit.call(by_name=True), unit.call(0)))
    unit.let_go("first")
    return named if named == defaulted else f"`f(a=1)`: {named}; `f(1, default)`: {defaulted}"


def chained(*before: Any) -> Measure:
    """A chain has a duplicate of a task that runs, at its head or behind it: what becomes of the chain's tail?"""

    def measure(_: Stage, peer: Peer) -> str:
        unit = Unit(peer)
        unit.begin()
        call = called(chain(*before, unit.task.si(unit.name), peers_app.tail.s(unit.name)).apply_async)
        if call.error:
            unit.let_go("first")
            return f"raises `{type(call.error).__name__}`"
        duplicate = call.result.parent
        for limit in (NOT_EXPECTED_AFTER / 3, NOT_EXPECTED_AFTER):  # while the first run goes on, and after it
            eventually(lambda: bool(unit.notes("tail")) or duplicate.failed(), limit)
            unit.let_go("first")
        if given := unit.notes("tail"):
            return f"the tail gets `{given[0]['given']}`"
        if duplicate.failed():
            return f"fails: `{type(duplicate.result).__name__}`"
        return f"the tail stays `{call.result.state}`"

    return measure


def told(_: Stage, peer: Peer) -> str:
    """A duplicate is called: what is the caller told?"""
    unit = Unit(peer)
    first = unit.begin()
    call = unit.call()
    has_run = bool(call.ids) and unit.has_run(call)
    unit.let_go("first")
    if has_run:
        return "the duplicate runs"
    if call.error:
        return f"`{type(call.error).__name__}`"
    if call.ids:
        result = app.AsyncResult(call.ids[0])
        return f"`{result.result}`, as `{result.state}`"
    is_same = getattr(call.result, "id", None) == first["id"]
    return "the first one's result" if is_same else f"`delay()` returns `{call.result}`"


# The package


def size(_: Stage, peer: Peer) -> str:
    """Lines of code of the package: without comments, docstrings and blank lines."""
    if peer.package is None:
        return f"{RECIPE_LINES} in each task"
    module = {"python-redis-lock": "redis_lock"}.get(peer.package, peer.package.replace("-", "_"))
    analyze = importlib.import_module("radon.raw").analyze
    files = [path for folder in importlib.import_module(module).__path__ for path in Path(folder).rglob("*.py")]
    return f"{sum(analyze(path.read_text()).sloc for path in files):,}"


CHECKS: dict[str, Measure] = {
    "`kill -9` of a run's process: the next call runs after": killed_child(DEFAULT),
    f"the same, with an expiry of {EXPIRY} s": killed_child(RENEWED),
    "`kill -9` of a worker on another machine": killed_worker,
    f"two run, if one takes longer than {EXPIRY} s": overrun,
    "a late end frees the next run's lock": late_end,
    "`self.retry()` runs": retried,
    "free after an exception": ended_by("fail"),
    "free after `Ignore`": ended_by("ignore"),
    "free after `Reject`": ended_by("reject"),
    "free after `revoke`": revoked,
    "free after publishing failed": unpublished,
    "`f(1)`, `f(a=1)`, `f(1, default)` are one": one_key,
    "a duplicate heads a chain": chained(),
    "a duplicate within a chain": chained(peers_app.head.si()),
    "a duplicate's caller gets": told,
    "lines of code": size,
}
"""The rows of the tables, and what each measures."""

TABLES = {True: "Unique from queued to finished", False: "A lock around the run"}


# The report


def versions() -> str:
    """What was measured, and when."""
    packages = ["celery", "redis", *dict.fromkeys(peer.package for peer in PEERS if peer.package)]
    info = client(WITNESS_DB).info("server")
    server = info.get("server_name", "redis").capitalize()
    found = [f"Python {platform.python_version()}", f"{server} {info.get('valkey_version', info['redis_version'])}"]
    found += [f"{'redis-py' if name == 'redis' else name} {importlib.metadata.version(name)}" for name in packages]
    return f"Measured on {datetime.now(timezone.utc):%Y-%m-%d} with {', '.join(found)}."


def tables(found: dict[str, dict[str, str]]) -> str:
    """What was seen, in Markdown."""
    parts = [versions()]
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
    if options.write and options.only:
        parser.error("--write: with all rows")
    titles = [list(CHECKS)[number - 1] for number in options.only or range(1, len(CHECKS) + 1)]
    with ExitStack() as stack:
        peers_app.connect(stack.enter_context(redis_server()).url.removesuffix("/0"))
        stage = Stage(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        found = {}
        for number, title in enumerate(titles, 1):
            print(f"{number} of {len(titles)}: {title}", file=sys.stderr)
            found[title] = stage.run(CHECKS[title])
        text = tables(found)
    if options.write:
        markdown.write(PAGE, BEGIN, END, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
