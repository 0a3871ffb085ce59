"""Tasks per second of a real worker on a task that does nothing, decorated and bare, side by side.

    python -m benchmarks.throughput [--rounds N] [--tasks N] [--pools NAME ...] [--processes N] [--seed N]

All kinds of tasks are run by the same worker, in blocks that take turns, in an order that is drawn for each round.
The messages of a block are all in the queue before the worker begins to take them, so what is measured is the worker:
until it has done the last of them.
With prefork it is the worker's main process that is busy, and what its children do beside it may cost nothing.
With solo there is one process for everything, and each millisecond counts.
Tasks per second depend on what else the machine does meanwhile; the processor's time that the worker's processes have
taken does much less, and is there where there is a /proc.
"Bare once more" is bare against itself: by so much the figures mean nothing.
"Bare and 0.1 ms" keeps a processor busy for that long: so much would be seen of the decorator if it took that.
"Of one key" is a covered task of which one runs and the others are skipped, or run after it.
The broker, which is also where the keys are, runs on the same machine and takes its share of it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import redis
from celery import Celery
from celery import __version__ as celery_version

from only_one import only_one
from only_one.testing import Guarded, redis_server

Found = dict[str, list[tuple[float, float]]]

LIMIT = 120
"""Seconds that a block may take."""

app = Celery("throughput", set_as_current=False)  # the tasks have names: this module is __main__ and imported, too
app.conf.update(
    broker_url=os.environ.get("THROUGHPUT_URL"),
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=16,
    worker_hijack_root_logger=False,
)


@app.task(name="bare")  # type: ignore[untyped-decorator]  # Celery has no types
def bare(number: int) -> None:
    """Does nothing."""


@app.task(name="burning")  # type: ignore[untyped-decorator]
def burning(_number: int) -> None:
    """Does nothing for 0.1 ms."""
    until = time.perf_counter() + 0.0001
    while time.perf_counter() < until:
        pass


@app.task(name="covered")  # type: ignore[untyped-decorator]
@only_one("{name}:{number}")
def covered(number: int) -> None:
    """Does nothing, under a key of its own."""


@app.task(name="contended")  # type: ignore[untyped-decorator]
@only_one("{name}")
def contended(number: int) -> None:
    """Does nothing, under a key that all of them have."""


@app.task(name="mark")  # type: ignore[untyped-decorator]
def mark(number: int) -> None:
    """Says that the block before it has been done: that its messages are acknowledged does not."""
    with redis.Redis.from_url(os.environ["THROUGHPUT_URL"]) as client:
        client.rpush(f"done-{number}", "")


KINDS = {"bare": bare, "bare once more": bare, "bare and 0.1 ms": burning, "covered": covered, "of one key": contended}


@contextmanager
def worker(url: str, pool: str, processes: int) -> Iterator[int]:
    """Run a worker for the length of a `with` block, whose queue is empty and which has nothing to say.

    Yields:
        Its process id.
    """
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.throughput", "worker", "-l", "ERROR"]
    command += ["-P", pool, "-c", str(processes), "--without-gossip", "--without-mingle", "--without-heartbeat"]
    env = {**os.environ, "THROUGHPUT_URL": url, "ONLY_ONE_REDIS_URL": url}
    with tempfile.TemporaryFile() as log, Guarded(command, env=env, cwd=root(), stdout=log, stderr=log) as process:
        yield process.pid


def busy(pid: int) -> float:
    """Seconds of processor time that a process and its children have had; nan where that cannot be read."""
    try:
        own = sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return math.nan
    return (own or math.nan) + sum(busy(int(child)) for child in children)


def root() -> Path:
    """Where this package is."""
    return Path(__file__).parents[1]


def measure(client: redis.Redis, pid: int, name: str, tasks: int, numbers: Iterator[int]) -> tuple[float, float]:
    """Have the worker do a block of tasks.

    Args:
        client: of the broker.
        pid: the worker.
        name: the kind of task.
        tasks: how many.
        numbers: the tasks' arguments, which are never the same twice.

    Returns:
        Tasks per second, and seconds of the worker's processor time for each.

    Raises:
        RuntimeError: if it does not get through them in time.
    """
    # A worker takes from its queue only, so a block is built in another and given its name when it is complete.
    with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
        for _ in range(tasks):
            KINDS[name].apply_async((next(numbers),), queue="block", producer=producer, retry=False)
        mark.apply_async((number := next(numbers),), queue="block", producer=producer, retry=False)
    before, began = busy(pid), time.perf_counter()
    client.rename("block", "celery")
    if client.blpop([f"done-{number}"], timeout=LIMIT) is None:
        msg = f"the worker has not done {tasks} tasks in {LIMIT:g} s"
        raise RuntimeError(msg)
    return tasks / (time.perf_counter() - began), (busy(pid) - before) / tasks


def report(pool: str, found: Found) -> None:
    """Print the table."""
    print(f"\n{pool:18} {'tasks per second':>27} {'of bare':>9} {'processor, ms':>15} {'of bare':>9}")
    print(f"{'':18} {'least':>9}{'median':>9}{'most':>9} {'':9} {'median':>15}")
    base, base_busy = (statistics.median(column) for column in zip(*found["bare"], strict=True))
    for name, measured in found.items():
        rates, seconds = zip(*measured, strict=True)
        rate, each = statistics.median(rates), statistics.median(seconds)
        speed = f"{min(rates):9.0f}{rate:9.0f}{max(rates):9.0f} {rate / base:9.3f}"
        print(f"{name:18} {speed} {each * 1000:15.3f} {each / base_busy:9.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="blocks of each kind (11)")
    parser.add_argument("--tasks", type=int, default=800, help="in a block (800)")
    parser.add_argument("--pools", nargs="+", default=["prefork", "solo"], help="of the worker (prefork solo)")
    parser.add_argument("--processes", type=int, default=2, help="of prefork (2)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the order of the blocks")
    options = parser.parse_args()
    if options.rounds < 1 or options.tasks < 1 or options.processes < 1:
        parser.error("--rounds, --tasks and --processes: at least 1")
    order = random.Random(options.seed)
    print(
        f"Celery {celery_version}, redis-py {redis.__version__}, {options.rounds} rounds of {options.tasks} tasks",
        end="",
    )
    print(f", {options.processes} processes in prefork, seed {options.seed}")
    for pool in options.pools:
        found = rounds(pool, options.processes, options.rounds, options.tasks, order)
        report(pool, found)


def rounds(pool: str, processes: int, times: int, tasks: int, order: random.Random) -> Found:
    """Measure all kinds in one worker.

    Returns:
        What `measure` gives, of each block.
    """
    numbers = count()
    found: Found = {name: [] for name in KINDS}
    with redis_server() as server, redis.Redis.from_url(server.url, socket_timeout=None) as client:
        app.conf.broker_url = server.url
        with worker(server.url, pool, processes) as pid:
            for name in KINDS:  # once unmeasured: the worker starts, connects and imports
                measure(client, pid, name, tasks, numbers)
            for number in range(1, times + 1):
                for name in order.sample(sorted(KINDS), len(KINDS)):
                    found[name].append(measure(client, pid, name, tasks, numbers))
                if number % 5 == 0 or number == times:
                    print(f"{pool}: {number} of {times}", file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
