"""What covering a queue costs, and whether it holds: many processes call one task with a few sets of arguments.

    python -m benchmarks.queueing [--calls N] [--rounds N] [--block N] [--without] [--seed N]

First 10,000 calls with short pauses, from 8 processes over 50 sets of arguments, while a worker runs what is queued.
A witness that uses no lock counts messages and runs; `benchmarks.queueing_app` says what exactly. That it can see
overlaps is seen from a task without a lock, and with --without, which switches the locking off, from ours.
Then the same without pauses, beside celery-singleton, celery-once and celery-heimdall, in blocks that take turns, in an
order that is drawn for each round. The broker, the results and the witness are on one server, and the locks of all on
another, where there is nothing else, so that this server counts their commands by themselves. "Sent" are those that a
client has sent, as MONITOR shows them; those that a script runs are commands, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import redis

from benchmarks import queueing_app
from benchmarks.queueing_app import BARE, BROKER, LOCKS, OURS, beside
from only_one.testing import Guarded, redis_server
from rigs.waiting import wait_until

ROOT = Path(__file__).parents[1]
PRODUCERS = 8
SETS = 50
CHILDREN = 4
LIMIT = 60.0
"""Seconds within which all is ready, or done."""

LONGEST_BLOCK = 5.0
"""Seconds after which a block of calls ends, however many there were."""

GIVEN_BACK_WITHIN = 5.0
BEGINS_IN = 0.05
LONGEST_PAUSE = 0.01
NO_LIMIT = 1e9
OTHER_QUEUE = "idle"
OWN = {"config", "config|resetstat", "info", "dbsize", "scan", "monitor", "flushdb", "echo"}
"""What this program sends to the server of the locks."""

PACKAGES = ["celery-singleton", "celery-once", "celery-heimdall"]


@dataclass
class Block:
    """What was found about some calls of one task."""

    calls: int
    seconds: float
    published: int
    commands: int
    overlaps: int
    left: list[str]
    never_run: int
    unknown: int
    raised: Counter[str]

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.calls / self.seconds if self.seconds else 0.0

    @property
    def is_well(self) -> bool:
        """Whether all is as it should be."""
        return not (self.overlaps or self.left or self.never_run or self.unknown or self.raised)


class Stage:
    """The servers, the worker, and the processes that call.

    Attributes:
        locks: a client of the server where nothing is but locks.
    """

    def __init__(self, broker: str, locks: str, choose: random.Random) -> None:
        self.locks: Any = redis.Redis.from_url(locks, socket_timeout=None)
        self._broker: Any = redis.Redis.from_url(broker)
        self._beside: Any = redis.Redis.from_url(beside(broker), socket_timeout=None)
        self._choose = choose

    def wait_for_producers(self) -> None:
        """Wait until all of them can be told what to do."""
        wait_until(lambda: self._beside.llen("ready") == PRODUCERS, LIMIT, "the processes that call are not ready")

    def block(self, name: str, calls: int, longest: float = NO_LIMIT, pause: float = 0) -> Block:
        """Have all processes call a task at the same time, and wait until all that they have queued is done."""
        self.locks.config_resetstat()
        before = self._counts(name)
        at = time.monotonic() + BEGINS_IN
        for number in range(PRODUCERS):
            share = calls // PRODUCERS + (number < calls % PRODUCERS)
            arguments = [self._choose.randrange(SETS) for _ in range(share)]
            self._order(number, name, arguments, at=at, until=at + longest, pause=pause)
        answers = [json.loads(self._beside.blpop(["done"])[1]) for _ in range(PRODUCERS)]
        self._drain(name)
        commands = sum(self._commands().values())
        left = sorted(key.decode(errors="backslashreplace") for key in self.locks.scan_iter(count=1000))
        self.locks.flushdb()  # what somebody has left behind is not to be in the way of the next
        known = {each.decode() for each in self._beside.smembers(f"ids:{name}")}
        after = self._counts(name)
        return Block(
            calls=sum(answer["calls"] for answer in answers),
            seconds=max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers),
            published=after["published"] - before["published"],
            commands=commands,
            overlaps=after["overlaps"] - before["overlaps"],
            left=left,
            never_run=after["published"] - after["ended"] - before["published"] + before["ended"],
            unknown=len({each for answer in answers for each in answer["ids"]} - known),
            raised=sum((Counter(answer["raised"]) for answer in answers), Counter()),
        )

    def _order(self, number: int, name: str, arguments: list[int], **options: Any) -> None:
        order = {"at": 0, "until": NO_LIMIT, "pause": 0, "queue": "", "seed": self._choose.random(), **options}
        self._beside.rpush(f"orders-{number}", json.dumps({**order, "name": name, "arguments": arguments}))

    def _counts(self, name: str) -> Counter[str]:
        fields = ("published", "begun", "ended", "overlaps")
        return Counter({field: int(self._beside.hget(field, name) or 0) for field in fields})

    def _commands(self) -> Counter[str]:
        stats = self.locks.info("commandstats")
        counted = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}
        return Counter({name: calls for name, calls in counted.items() if name not in OWN})

    def _drain(self, name: str) -> None:
        """Wait until all that was published is done, and its keys have been given back, if they ever are."""

        def is_done() -> bool:
            counts = self._counts(name)
            return counts["published"] == counts["ended"]

        with suppress(TimeoutError):  # what is missing is reported
            wait_until(is_done, LIMIT, "it is not drained")
        with suppress(TimeoutError):
            wait_until(lambda: not self.locks.dbsize(), GIVEN_BACK_WITHIN, "keys are left")

    def steps(self, name: str) -> list[str]:
        """What a first call, a duplicate and the run cost, in commands; each is done once before it is counted."""

        def call() -> None:
            self._order(0, name, [SETS], queue=OTHER_QUEUE)
            self._beside.blpop(["done"])

        def run() -> None:
            self._broker.rename(OTHER_QUEUE, "celery")
            self._drain(name)

        for step in (call, call, run):
            step()
        return [self._sent(step) for step in (call, call, run)]

    def _sent(self, step: Callable[[], None]) -> str:
        with self.locks.monitor() as monitor:
            step()
            self.locks.echo("end")
            sent, inside = Counter[str](), 0
            while True:
                seen = monitor.next_command()
                name = seen["command"].partition(" ")[0].lower()
                if name == "echo":
                    break
                if seen["client_type"] == "lua":
                    inside += 1
                elif name not in OWN and name not in {"client", "hello"}:
                    sent[name] += 1
        said = ", ".join(f"{count} {name}" for name, count in sorted(sent.items())) or "nothing"
        return f"{said} (running {inside})" if inside else said


@contextmanager
def stage(choose: random.Random, *, is_locking: bool = True) -> Iterator[Stage]:
    """Servers, a worker and producers for the length of a `with` block."""
    with ExitStack() as stack:
        broker, locks = (stack.enter_context(redis_server()).url for _ in range(2))
        told = {**os.environ, BROKER: broker, LOCKS: locks, "ONLY_ONE_ACTIVE": "1" if is_locking else "0"}
        log = stack.enter_context(tempfile.TemporaryFile())
        worker = [sys.executable, "-m", "celery", "-A", "benchmarks.queueing_app", "worker", "-P", "prefork"]
        worker += ["-c", str(CHILDREN), "-l", "ERROR", "--without-gossip", "--without-mingle"]
        produce = "import sys; from benchmarks.queueing_app import produce; produce(int(sys.argv[1]))"
        producers = [[sys.executable, "-c", produce, str(number)] for number in range(PRODUCERS)]
        for command in (worker, *producers):
            stack.enter_context(Guarded(command, cwd=ROOT, env=told, stdout=log, stderr=log))
        stack.callback(show_troubles, log)
        found = Stage(broker, locks, choose)
        found.wait_for_producers()
        found.block(BARE, SETS)  # the worker is ready when it has done this
        yield found


def show_troubles(log: IO[bytes]) -> None:
    """Print what the worker and the others have said, if there was an exception."""
    log.seek(0)
    said = log.read().decode(errors="replace")
    if "Traceback" in said:
        print(said, file=sys.stderr)


def show_progress(done: int, of: int, what: str) -> None:
    """Print a bar, or now and then a line."""
    bar = f"[{'#' * (30 * done // of):30}]"
    print(f"{bar} {what}", file=sys.stderr)


def report_trial(trial: Block, name: str) -> None:
    """Print what was found about all calls of a task."""
    print(f"\n{name}: {trial.calls:,} calls from {PRODUCERS} processes over {SETS} sets of arguments")
    print(f"  published, and got the one that was there: {trial.published:6,} {trial.calls - trial.published:7,}")
    print(f"  calls per second, pauses of up to {LONGEST_PAUSE * 1000:.0f} ms:   {trial.rate:6,.0f}")
    print(f"  commands per call on the locks' server:    {trial.commands / max(trial.calls, 1):6.2f}")
    print(f"  beside another of their set (the witness): {trial.overlaps:6,}")
    print(f"  published and never run to the end:        {trial.never_run:6,}")
    print(f"  ids returned that were never published:    {trial.unknown:6,}")
    print(f"  keys left at the end:                      {len(trial.left):6,}  {trial.left[:3] or ''}")
    for error, times in trial.raised.items():
        print(f"  calls that raised {error}: {times:,}")


def report_peers(found: dict[str, list[Block]], steps: dict[str, list[str]]) -> None:
    """Print the tables."""
    print(f"\n{'':25} {'calls per second':>24} {'published':>10} {'commands':>9} {'':>9} {'never':>6} {'keys':>5}")
    print(
        f"{'':25} {'least':>8}{'median':>8}{'most':>8} {'of calls':>10} {'per call':>9} overlaps {'run':>7} {'left':>5}"
    )
    for name, blocks in found.items():
        rates = [block.rate for block in blocks]
        published = statistics.median(block.published / max(block.calls, 1) for block in blocks)
        commands = statistics.median(block.commands / max(block.calls, 1) for block in blocks)
        speed = f"{min(rates):8.0f}{statistics.median(rates):8.0f}{max(rates):8.0f}"
        wrong = f"{sum(each.overlaps for each in blocks):8} {sum(each.never_run for each in blocks):7}"
        left = sum(len(block.left) for block in blocks)
        print(f"{name:25} {speed} {published:10.1%} {commands:9.2f} {wrong} {left:5}")
        for error, times in sum((block.raised for block in blocks), Counter[str]()).items():
            print(f"{'':25} raised {error}: {times:,} times")
    print(f"\n{'sent by':25} {'the first call':30} {'a duplicate':40} the run")
    for name, each in steps.items():
        print(f"{name:25} {each[0]:30} {each[1]:40} {each[2]}")
    for name, error in queueing_app.errors.items():
        print(f"{name:25} does not work here: {error}")


def versions() -> str:
    """What is measured."""
    found = [f"Celery {importlib.metadata.version('celery')}, redis-py {redis.__version__}"]
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def compare(here: Stage, options: argparse.Namespace, choose: random.Random) -> bool:
    """Measure ours beside the others; returns whether all is as it should be."""
    found: dict[str, list[Block]] = defaultdict(list)
    names = queueing_app.variants
    for name in names:  # once unmeasured: scripts are loaded, connections made
        here.block(name, SETS, LONGEST_BLOCK)
    for number in range(1, options.rounds + 1):
        for name in choose.sample(names, len(names)):
            found[name].append(here.block(name, options.block, LONGEST_BLOCK))
        show_progress(number, options.rounds, f"round {number} of {options.rounds}")
    steps = {name: here.steps(name) for name in names if name != BARE}
    report_peers({name: found[name] for name in names}, steps)
    print()
    print(f"A block of calls ends after {LONGEST_BLOCK:g} s.", end=" ")
    print(f"{queueing_app.HEIMDALL} waits for 1 s at each key that is taken, in its own runs, too.")
    seen = sum(block.overlaps for block in found[BARE])
    print(f"The witness can see overlaps: there were {seen:,} of the task without a lock.")
    return bool(seen) and all(block.is_well for block in found[OURS])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="of ours, watched by the witness (10000)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of calls of each (5)")
    parser.add_argument("--block", type=int, default=2_000, help="calls in a block, if 5 s are enough (2000)")
    parser.add_argument("--without", action="store_true", help="switch our locking off, to see the witness fail it")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the arguments and the order")
    options = parser.parse_args()
    if options.calls < PRODUCERS or options.rounds < 1 or options.block < PRODUCERS:
        parser.error(f"--calls and --block: at least {PRODUCERS}; --rounds: at least 1")
    choose = random.Random(options.seed)
    began = time.monotonic()
    print(f"{versions()}, seed {options.seed}, load {os.getloadavg()[0]:.1f} at the beginning")
    with stage(choose, is_locking=not options.without) as here:
        trial = here.block(OURS, options.calls, pause=LONGEST_PAUSE)
        report_trial(trial, f"{OURS} with its locking off" if options.without else OURS)
        is_well = trial.is_well
        if not options.without:
            is_well &= compare(here, options, choose)
    print(f"{time.monotonic() - began:.0f} s: {'all is well' if is_well else 'NOT WELL'}")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
