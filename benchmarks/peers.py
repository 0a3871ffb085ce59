"""What becomes of a lock: only_one beside celery-singleton, celery-once, celery-heimdall, python-redis-lock, a recipe.

    python -m benchmarks.peers [--limit SECONDS] [--only NUMBER ...] [--write]

A real Redis, a real worker and a second one as on another machine. Each check does the same to each library, and says
in a few words what it has seen: a witness in Redis, which uses no lock, has the start and the end of each run. All
libraries go through a check at the same time, each with a database of its own for its locks. It takes some six minutes.
With --write the tables of `docs/comparison.md` are written anew; else they are printed.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from celery import chain
from celery.signals import after_task_publish

from benchmarks import peers_app
from benchmarks.peers_app import DEFAULT, EXPIRY, FIXED, RENEWED, WITNESS_DB, Peer, app, client
from only_one.testing import Guarded, redis_server
from rigs.namespaces import elsewhere
from rigs.waiting import wait_until

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"

LIMIT = 120.0
"""Seconds within which comes what has to come, on a slow machine, too."""

SETTLED = 15.0
"""Seconds after which a retry, the rest of a chain or a free lock is not expected any more."""

BETWEEN_CALLS = 0.25
RETRIES = 10
RECIPE_LINES = 6
"""Of the recipe in `peers_app`, beside the task's own."""

CHILDREN = 24
"""Three at a time for each library."""

ELSEWHERE = "elsewhere"
LOUD = ("celery", "kombu", "amqp")
"""The loggers that are not a library's."""

_published = threading.local()
_parsing = threading.Lock()  # Python 3.11 cannot parse in two threads at a time


@after_task_publish.connect  # type: ignore[untyped-decorator]
def _on_publish(headers: dict[str, Any], **_: Any) -> None:
    if hasattr(_published, "ids"):
        _published.ids.append(headers["id"])


@dataclass
class Call:
    """What a call has come to.

    Attributes:
        ids: of the tasks that were published.
        result: what was returned.
        error: what was raised.
    """

    ids: list[str] = field(default_factory=list)
    result: Any = None
    error: Exception | None = None

    @property
    def problem(self) -> str:
        """The error's name."""
        return f"`{type(self.error).__name__}`"


class Unit:
    """Calls of one library's task with the same arguments.

    Attributes:
        name: the argument that they have.
    """

    def __init__(self, peer: Peer, name: str, settings: str) -> None:
        self.peer, self.name = peer, name
        self.task = peer.task(settings)

    def order(self, *orders: str) -> None:
        """Say what the next runs have to do; see `peers_app.obey`."""
        client(WITNESS_DB).rpush(f"orders:{self.name}", *orders)

    def let_go(self, gate: str) -> None:
        """Let the run go on that waits at a gate, or will."""
        client(WITNESS_DB).rpush(f"gate:{self.name}:{gate}", 1)

    def notes(self, word: str) -> list[dict[str, Any]]:
        """What runs have written down, of one kind."""
        lines = map(json.loads, client(WITNESS_DB).lrange(f"notes:{self.name}", 0, -1))
        return [line for line in lines if line["word"] == word]

    def wait_for(self, word: str, times: int = 1) -> dict[str, Any]:
        """The so-manieth note of a kind, which is waited for."""
        wait_until(lambda: len(self.notes(word)) >= times, LIMIT, f"{self.peer.name}: no {times} {word} of {self.name}")
        return self.notes(word)[times - 1]

    def call(self, *more: Any, options: dict[str, Any] | None = None, by_name: bool = False) -> Call:
        """Call the task."""
        arguments: tuple[Any, dict[str, Any]] = ((), {"unit": self.name}) if by_name else ((self.name, *more), {})
        return called(lambda: self.task.apply_async(*arguments, **(options or {})))

    def begin(self, gate: str = "first", **options: Any) -> dict[str, Any]:
        """Have a run begin that waits at a gate; returns the note of its start."""
        self.order(gate)
        call = self.call(options=options)
        if call.error:
            raise call.error
        return self.wait_for("start")

    def has_run(self, call: Call) -> bool:
        """Whether a call comes to a run; waits until this is known."""

        def run() -> bool:
            return any(note["id"] in call.ids for note in self.notes("start"))

        results = [app.AsyncResult(id_) for id_ in call.ids]
        wait_until(lambda: run() or all(each.ready() for each in results), LIMIT, f"{self.name} is neither run nor not")
        return run()

    def start_after(self, times: int, until: float) -> float | None:
        """Call again and again until so many runs have started; returns when the last of them did, if it has."""
        while len(self.starts()) < times and time.monotonic() < until:
            self.call()
            time.sleep(BETWEEN_CALLS)
        with suppress(TimeoutError):  # what was queued last may start a little later
            wait_until(lambda: len(self.starts()) >= times, BETWEEN_CALLS * 4, "")
        starts = self.starts()
        return starts[times - 1] if len(starts) >= times else None

    def starts(self) -> list[float]:
        """When the runs have started, each task's first."""
        first: dict[str, float] = {}
        for each in self.notes("start"):
            first.setdefault(each["id"], each["at"])
        return list(first.values())

    def wait_until_active(self, id_: str) -> None:
        """Wait until the worker knows that a task runs: it has a task run again whose process is killed before."""

        def is_active() -> bool:
            active = app.control.inspect(timeout=5, limit=1).active() or {}
            return any(each["id"] == id_ for tasks in active.values() for each in tasks)

        wait_until(is_active, LIMIT, f"{self.peer.name}: {self.name} is not active")


def called(call: Callable[[], Any]) -> Call:
    """What a call comes to, with what this thread publishes meanwhile."""
    found = Call(_published_here())
    try:
        found.result = call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        found.error = error
    return found


def _published_here() -> list[str]:
    _published.ids = []
    ids: list[str] = _published.ids
    return ids


class Stage:
    """The servers and the workers.

    Attributes:
        peers: the libraries that go through a check.
        limit: seconds after which a lock is said never to be free.
        log: what the worker says.
    """

    def __init__(self, peers: Sequence[Peer], limit: float, folder: Path) -> None:
        self.peers, self.limit, self._folder = peers, limit, folder
        self.log = folder / "worker.log"
        self.inside = elsewhere()
        self._number = 0
        self._lock = threading.Lock()

    def unit(self, peer: Peer, settings: str = DEFAULT) -> Unit:
        """A unit of work that nobody has called yet."""
        with self._lock:
            self._number += 1
            return Unit(peer, f"unit-{self._number}", settings)

    @contextmanager
    def worker(self, name: str, *options: str, inside: Sequence[str] = ()) -> Iterator[Guarded]:
        """A worker for the length of a `with` block."""
        log = self._folder / f"{name}.log"
        command = [*inside, sys.executable, "-m", "celery", "-A", "benchmarks.peers_app", "worker", "-P", "prefork"]
        command += ["-l", "INFO", "--without-gossip", "--without-mingle", "-n", f"{name}@%h", *options]
        with log.open("wb") as output, Guarded(command, cwd=ROOT, stdout=output, stderr=output) as process:
            wait_until(lambda: b" ready." in log.read_bytes(), LIMIT, f"no worker: {log.read_text()[-2000:]}")
            yield process

    def run(self, check: Check) -> dict[str, str]:
        """Put all libraries through a check; returns what was seen of each."""
        for peer in self.peers:
            client(peer.number).flushdb()
        with ExitStack() as stack:
            state = stack.enter_context(check.setting(self)) if check.setting else None
            pool = stack.enter_context(ThreadPoolExecutor(len(self.peers)))
            found = [pool.submit(check.measure, Probe(self, peer, state)) for peer in self.peers]
            try:
                return {peer.name: each.result() for peer, each in zip(self.peers, found, strict=True)}
            finally:
                self._let_all_go()

    def _let_all_go(self) -> None:
        for number in range(1, self._number + 1):
            for gate in ("first", "second"):
                client(WITNESS_DB).rpush(f"gate:unit-{number}:{gate}", 1)


class Probe:
    """One library in one check."""

    def __init__(self, stage: Stage, peer: Peer, state: Any) -> None:
        self.stage, self.peer, self.state = stage, peer, state

    def unit(self, settings: str = DEFAULT) -> Unit:
        """A unit of work that nobody has called yet."""
        return self.stage.unit(self.peer, settings)

    def expiry(self) -> str:
        """In how many seconds the lock expires that is there."""
        lasts = [client(self.peer.number).pttl(key) for key in client(self.peer.number).scan_iter(count=1000)]
        if not lasts:
            return "no lock is left"
        if min(lasts) < 0:
            return "the lock has no expiry"
        return f"the lock expires after {duration(max(lasts) / 1000)}"

    def freed(self, unit: Unit, before: int = 1) -> str:
        """Whether the next call runs, after so many runs."""
        expiry = self.expiry()  # the calls below may make a new lock
        ran = unit.start_after(before + 1, time.monotonic() + SETTLED)
        return "yes" if ran else f"no; {expiry}"


def duration(seconds: float) -> str:
    """A time in words, roughly: the lock has been there for some seconds."""
    rough = (60 * round(seconds / 60)) if seconds > 150 else round(seconds)  # noqa: PLR2004
    for size, unit in ((3600, "h"), (60, "min")):
        if rough and rough % size == 0:
            return f"{rough // size} {unit}"
    return f"{rough} s"


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        title: as it is headed.
        measure: does it to one library, and says what was seen.
        setting: what all of them need meanwhile.
    """

    title: str
    measure: Callable[[Probe], str]
    setting: Callable[[Stage], Any] | None = None


# A holder that is killed


def _after_kill(probe: Probe, unit: Unit, killed: float, expiry: str, limit: float) -> str:
    started = unit.start_after(2, killed + limit)
    return f"{max(0.0, started - killed):.1f} s" if started else f"not within {probe.stage.limit:g} s; {expiry}"


def killed_child(probe: Probe, settings: str = DEFAULT) -> str:
    """The process of a run gets SIGKILL; the worker goes on."""
    unit = probe.unit(settings)
    first = unit.begin()
    unit.wait_until_active(first["id"])
    expiry = probe.expiry()
    os.kill(first["pid"], signal.SIGKILL)
    return _after_kill(probe, unit, time.monotonic(), expiry, probe.stage.limit)


def killed_child_with_expiry(probe: Probe) -> str:
    """The same with an expiry that the task's author has written."""
    return killed_child(probe, RENEWED)


@contextmanager
def worker_elsewhere(stage: Stage) -> Iterator[Kill | None]:
    """A worker on another machine, as far as anybody here can know, which is killed once all libraries have a run."""
    if stage.inside is None:
        yield None
        return
    with stage.worker(ELSEWHERE, "-Q", ELSEWHERE, "-c", str(len(stage.peers)), inside=stage.inside) as worker:
        yield Kill(worker, len(stage.peers))


class Kill:
    """The end of a worker, for which several wait.

    Attributes:
        at: when it came.
    """

    def __init__(self, worker: Guarded, parties: int) -> None:
        self.at = 0.0
        self._worker = worker
        self._barrier = threading.Barrier(parties, self._kill)

    def wait(self) -> None:
        """Wait until all have come here, and the worker is killed."""
        self._barrier.wait(LIMIT)

    def _kill(self) -> None:
        os.killpg(self._worker.pid, signal.SIGKILL)
        self._worker.wait(LIMIT)
        self.at = time.monotonic()


def killed_worker(probe: Probe) -> str:
    """A worker on another machine gets SIGKILL, with all its processes; the next call is run by another worker."""
    kill = probe.state
    if kill is None:
        return "not measured: no process namespaces here"
    unit = probe.unit()
    unit.begin(queue=ELSEWHERE)
    expiry = probe.expiry()
    kill.wait()
    return _after_kill(probe, unit, kill.at, expiry, probe.stage.limit)


# A run that is longer than the expiry


def overrun(probe: Probe) -> str:
    """Does the next run begin beside one that takes longer than the expiry? With renewal, where there is any."""
    said = _overrun(probe, RENEWED)
    if said.startswith("no") and probe.peer.package:
        said = f"no: the lock is renewed; with a fixed expiry: {_overrun(probe, FIXED)}"
    return said


def _overrun(probe: Probe, settings: str) -> str:
    unit = probe.unit(settings)
    began = unit.begin()["at"]
    second = unit.start_after(2, began + 3 * EXPIRY)
    beside = second and not any(note["at"] < second for note in unit.notes("end"))
    unit.let_go("first")
    return f"yes, after {second - began:.1f} s" if second and beside else "no"


def late_end(probe: Probe) -> str:
    """A run ends after its lock has expired and a second run has begun: does a third begin beside the second?"""
    unit = probe.unit(FIXED)
    unit.order("first", "second")
    first = unit.call()
    began = unit.wait_for("start")["at"]
    second = unit.start_after(2, began + LIMIT)
    if second is None:
        return "no second run began"
    unit.let_go("first")
    unit.wait_for("end")
    third = unit.start_after(3, second + EXPIRY / 2)
    is_beside = bool(third and third < second + EXPIRY)
    unit.let_go("second")
    late = app.AsyncResult(first.ids[0])
    wait_until(late.ready, LIMIT, f"{probe.peer.name}: the late run has no result")
    said = "yes: a third run began beside the second" if is_beside else "no"
    return f"{said}; the late run fails with `{type(late.result).__name__}`" if late.failed() else said


# What a task can end by


def retried(probe: Probe) -> str:
    """Tasks call `self.retry()` once."""
    units = [probe.unit() for _ in range(RETRIES)]
    for unit in units:
        unit.order("retry")
        unit.call()

    def ran() -> int:
        return sum(any(note["attempt"] == 1 for note in unit.notes("start")) for unit in units)

    for unit in units:
        unit.wait_for("end")
    expiry = probe.expiry()
    with suppress(TimeoutError):
        wait_until(lambda: ran() == RETRIES, SETTLED, "")
    said = f"{ran()} of {RETRIES} run"
    return said if ran() == RETRIES else f"{said}; {expiry}"


def ended_by(order: str) -> Callable[[Probe], str]:
    """A run ends in the way that is ordered: does the next call run?"""

    def measure(probe: Probe) -> str:
        unit = probe.unit()
        unit.order(order)
        unit.call()
        unit.wait_for("end")
        return probe.freed(unit)

    return measure


def revoked(probe: Probe) -> str:
    """A task is revoked while it waits in its queue: does the next call run?"""
    unit = probe.unit()
    queue = f"later-{probe.peer.number}"
    call = unit.call(options={"queue": queue})
    (id_,) = call.ids
    wait_until(lambda: app.control.revoke(id_, reply=True, timeout=5, limit=1), LIMIT, "no worker answers")
    client(peers_app.BROKER_DB).lmove(queue, "celery")
    wait_until(lambda: app.AsyncResult(id_).state == "REVOKED", LIMIT, f"{probe.peer.name}: not revoked")
    return probe.freed(unit, before=0)


def unpublished(probe: Probe) -> str:
    """The broker refuses the connection when a task is published: does the next call run?"""
    unit = probe.unit()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}/0"
        with app.connection_for_write(url, transport_options={"max_retries": 1}) as connection:
            call = unit.call(options={"connection": connection, "retry": False})
    if call.error is None:
        return "the call raises nothing"
    said = probe.freed(unit, before=0)
    return said if probe.peer.at_enqueue else f"{said}: nothing is locked before the run"


# Which calls are the same, and what a duplicate comes to


def one_key(probe: Probe) -> str:
    """f(1) runs: do f(a=1) and f(1, default) run beside it?"""
    unit = probe.unit()
    unit.begin()
    named, defaulted = (unit.has_run(call) for call in (unit.call(by_name=True), unit.call(0)))
    unit.let_go("first")
    if named == defaulted:
        return "no" if named else "yes"
    return f"`f(a=1)`: {'no' if named else 'yes'}; `f(1, default)`: {'no' if defaulted else 'yes'}"


def chained(*, behind: bool) -> Callable[[Probe], str]:
    """A chain has a duplicate of a task that runs, at its head or behind it: what becomes of the chain's tail?"""

    def measure(probe: Probe) -> str:
        unit = probe.unit()
        unit.begin()
        parts = [*([peers_app.head.si()] if behind else []), unit.task.si(unit.name), peers_app.tail.s(unit.name)]
        call = called(chain(*parts).apply_async)
        if call.error:
            unit.let_go("first")
            return f"the call raises {call.problem}; nothing is published"
        member = call.result.parent

        def is_known() -> bool:
            return bool(unit.notes("tail")) or member.failed()

        for limit in (SETTLED / 3, SETTLED):  # while the first run goes on, and after it
            with suppress(TimeoutError):
                wait_until(is_known, limit, "")
            unit.let_go("first")
        if given := unit.notes("tail"):
            return f"the tail runs, with `{given[0]['given']}`"
        if member.failed():
            return f"the duplicate fails with `{type(member.result).__name__}`; the tail does not run"
        before = f"; the head: `{member.parent.state}`" if behind and member.parent.state != "SUCCESS" else ""
        return f"the tail does not run; its result stays `{call.result.state}`, without an error{before}"

    return measure


class Records(logging.Handler):
    """What a thread of this process logs."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if record.thread == self._thread:
            self.lines.append(f"{record.name}|{record.levelname}|{record.getMessage()}")


def skip_seen(probe: Probe) -> str:
    """A duplicate is called: what is logged, and what is the caller told?"""
    unit = probe.unit()
    first = unit.begin()
    before = probe.stage.log.stat().st_size
    records = Records()
    logging.getLogger().addHandler(records)
    try:
        call = unit.call()
        ran = unit.has_run(call) if call.ids else False
    finally:
        logging.getLogger().removeHandler(records)
    lines = records.lines + probe.stage.log.read_bytes()[before:].decode(errors="replace").splitlines()
    unit.let_go("first")
    if ran:
        return "the duplicate runs"
    return f"{_logged(lines, unit, first)}; {_told(call, first)}"


def _logged(lines: Sequence[str], unit: Unit, first: dict[str, Any]) -> str:
    holder = {"task id": first["id"], "process": str(first["pid"]), "host": socket.gethostname()}
    ours = [unit.name, unit.task.name, first["id"]]
    for line in lines:
        name, _, rest = line.partition("|")
        level, _, message = rest.partition("|")
        if not message or name.startswith(LOUD) or not any(each in message for each in ours):
            continue
        known = [what for what, text in holder.items() if re.search(rf"\b{re.escape(text)}\b", message)]
        return f"logged at {level} with the holder's {', '.join(known)}" if known else f"logged at {level}, no holder"
    return "not logged"


def _told(call: Call, first: dict[str, Any]) -> str:
    if call.error:
        return f"`delay()` raises {call.problem}"
    if call.ids:
        result = app.AsyncResult(call.ids[0])
        return f"the duplicate ends as `{result.state}` with `{result.result}`"
    same = getattr(call.result, "id", None) == first["id"]
    return "`delay()` returns the running task's result" if same else f"`delay()` returns `{call.result}`"


# What is no task


def plain(probe: Probe) -> str:
    """A plain function is called twice at a time: does it run once?"""
    if probe.peer.plain is None:
        return "no"
    runs, begun, go = [], threading.Event(), threading.Event()

    def function() -> None:
        runs.append(1)
        begun.set()
        go.wait(LIMIT)

    run = probe.peer.plain(function)
    first = threading.Thread(target=run)
    first.start()
    begun.wait(LIMIT)
    second = threading.Thread(target=run)
    second.start()
    wait_until(lambda: not second.is_alive() or len(runs) > 1, LIMIT, "the second call neither runs nor ends")
    go.set()
    for thread in (first, second):
        thread.join(LIMIT)
    return "yes" if len(runs) == 1 else "no"


def asynchronous(probe: Probe) -> str:
    """An `async def` function is called twice at a time: does it run once?"""
    if probe.peer.asynchronous is None:
        return "no"
    return "yes" if asyncio.run(_async_runs(probe.peer.asynchronous)) == 1 else "no"


async def _async_runs(decorate: Callable[[Any], Any]) -> int:
    runs, begun, go = [], asyncio.Event(), asyncio.Event()

    async def function() -> None:
        runs.append(1)
        begun.set()
        await go.wait()

    run = decorate(function)
    first = asyncio.create_task(run())
    await begun.wait()
    second = asyncio.create_task(run())
    deadline = time.monotonic() + LIMIT
    while not second.done() and len(runs) == 1 and time.monotonic() < deadline:  # noqa: ASYNC110 - for any of several
        await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(first, second)
    return len(runs)


def size(probe: Probe) -> str:
    """Lines of code of the package: without comments, docstrings and blank lines."""
    if probe.peer.package is None:
        return f"{RECIPE_LINES} in each task"
    module = {"python-redis-lock": "redis_lock"}.get(probe.peer.package, probe.peer.package.replace("-", "_"))
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec else None
    return f"{sum(code_lines(path) for folder in folders or () for path in Path(folder).rglob('*.py')):,}"


def code_lines(path: Path) -> int:
    """How many lines of a file are code."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in NO_CODE]
    counted = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    with _parsing:
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            counted -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(counted)


NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

CHECKS = [
    Check("`kill -9` of the process of a run, default settings: the next call runs after", killed_child),
    Check(f"the same, with an expiry of {EXPIRY} s", killed_child_with_expiry),
    Check(
        "`kill -9` of a whole worker on another machine, default settings: the next call runs after",
        killed_worker,
        worker_elsewhere,
    ),
    Check(f"a run longer than an expiry of {EXPIRY} s: a second run begins beside it", overrun),
    Check("a run that ends after its lock has expired deletes the lock of the next run", late_end),
    Check("`self.retry()`: the retry runs", retried),
    Check("the lock is free after an exception", ended_by("fail")),
    Check("the lock is free after `Ignore`", ended_by("ignore")),
    Check("the lock is free after `Reject`", ended_by("reject")),
    Check("the lock is free after `revoke` of a task that waits", revoked),
    Check("the lock is free after publishing has failed", unpublished),
    Check("`f(1)`, `f(a=1)` and `f(1, default)` are one call", one_key),
    Check("a duplicate at the head of a chain", chained(behind=False)),
    Check("a duplicate behind the head of a chain", chained(behind=True)),
    Check("what is seen of a duplicate", skip_seen),
    Check("plain functions", plain),
    Check("`async def` functions", asynchronous),
    Check("lines of code", size),
]


# The report

TABLES = {
    True: "Unique from queued to finished",
    False: "A lock around the run",
}


def versions(peers: Sequence[Peer]) -> str:
    """What was measured, and when."""
    packages = ["celery", "redis", *dict.fromkeys(peer.package for peer in peers if peer.package)]
    info = client(WITNESS_DB).info("server")
    server = info.get("server_name", "redis").capitalize()
    found = [f"Python {platform.python_version()}", f"{server} {info.get('valkey_version', info['redis_version'])}"]
    found += [f"{'redis-py' if name == 'redis' else name} {importlib.metadata.version(name)}" for name in packages]
    return f"Measured on {datetime.now(timezone.utc):%Y-%m-%d} with {', '.join(found)}."


def tables(peers: Sequence[Peer], found: dict[str, dict[str, str]]) -> str:
    """What was seen, in Markdown."""
    parts = [versions(peers)]
    for at_enqueue, title in TABLES.items():
        columns = [peer for peer in peers if peer.at_enqueue is at_enqueue]
        rows = [[check, *(cells[peer.name] for peer in columns)] for check, cells in found.items()]
        lines = [["", *(peer.name for peer in columns)], ["---"] * (len(columns) + 1), *rows]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def write(page: Path, text: str) -> None:
    """Put the tables between the marks of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a lock is given up (60)")
    parser.add_argument("--only", type=int, nargs="+", help=f"rows of the table, from 1 to {len(CHECKS)}")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} anew")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write: with all rows")
    checks = [CHECKS[number - 1] for number in options.only or range(1, len(CHECKS) + 1)]
    with redis_server() as server, tempfile.TemporaryDirectory() as folder:
        peers_app.connect(server.url.removesuffix("/0"))
        for name, error in peers_app.errors.items():
            parser.error(f"{name} is not installed ({error}): use make benchmark-peers")
        stage = Stage(peers_app.peers, options.limit, Path(folder))
        found = {}
        logging.getLogger("only_one").setLevel(logging.INFO)
        with stage.worker("worker", "-c", str(CHILDREN)):
            for number, check in enumerate(checks):
                print(f"[{'#' * (30 * number // len(checks)):30}] {check.title}", file=sys.stderr)
                found[check.title] = stage.run(check)
        text = tables(stage.peers, found)
    if options.write:
        write(PAGE, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
