"""What runs beside another holder after interrupted calls: none may, whichever client sends the commands.

    python -m benchmarks.interruptions [--interruptions N] [--kind KIND]... [--seed N]

A call is interrupted by a signal at a random moment; in event loops half of them are cancelled instead.
Then somebody else's value is put under its key, and it is called twice more: a run is one too many, and so is whatever
is raised. The pool sees no sign of a reply that is yet to come, as on a slow network, where it could not help either.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import redis.asyncio.connection
import redis.connection
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from only_one import LockUnavailable, configure, only_one
from tests.clients import KINDS, Clients, clients

EACH = 200
"""Interruptions of one client: redis-py's pool itself may lose a connection by one."""
WRONG = ["ran beside another", "raised", "LockUnavailable", "waits for ever"]
HANGS_FOR = 2.0


class Interruption(BaseException):
    """What the signal's handler raises."""


def is_in_asyncio(frame: FrameType | None) -> bool:
    """Whether an event loop is at its own work: an exception there may lose a wake-up, and the task waits for ever."""
    return frame is not None and frame.f_globals["__name__"].partition(".")[0] in {"asyncio", "selectors"}


class Alarm:
    """Raises once at a moment, for as long as it is on.

    Attributes:
        times: how often it has.
    """

    def __init__(self) -> None:
        self.times = 0
        self._is_on = False
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, _number: int, frame: FrameType | None) -> None:
        if self._is_on and not is_in_asyncio(frame):
            self._is_on = False
            self.times += 1
            raise Interruption

    def interrupt(self, call: Callable[[], Any], moment: float) -> None:
        """Call, and raise after so many seconds, if it takes that long."""
        with suppress(Interruption):
            try:
                self._is_on = True
                signal.setitimer(signal.ITIMER_REAL, moment)
                call()
            finally:
                self._is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)


class Sync:
    """Calls of a plain function.

    Attributes:
        runs: how often it has run.
    """

    def __init__(self, client: Any, moments: random.Random) -> None:
        self.runs = 0
        self._moments = moments
        self.call = only_one(self._run, key="{which}", timeout=600, redis=client)

    def _run(self, which: str) -> None:
        self.runs += bool(which)

    def interrupt(self, alarm: Alarm, which: str, usual: float) -> bool:
        """Call with an interruption; returns whether there was one."""
        before = alarm.times
        alarm.interrupt(lambda: self.call(which), self._moments.uniform(1e-6, 1.3 * usual))
        return alarm.times > before

    def close(self) -> None:
        """Nothing is open."""


class Async(Sync):
    """Calls of a coroutine function, in an event loop."""

    def __init__(self, client: Any, moments: random.Random) -> None:
        super().__init__(client, moments)
        self._loop = asyncio.new_event_loop()
        covered: Any = only_one(self._run_async, key="{which}", timeout=600, redis=client)
        self._covered = covered
        self.call = lambda which: self._loop.run_until_complete(asyncio.wait_for(covered(which), HANGS_FOR))

    async def _run_async(self, which: str) -> None:
        self.runs += bool(which)

    def interrupt(self, alarm: Alarm, which: str, usual: float) -> bool:
        """Call with an interruption or a cancellation; returns whether there was one."""
        task = self._loop.create_task(self._covered(which))
        moment = self._moments.uniform(1e-6, 1.3 * usual)
        if self._moments.random() < 0.5:  # noqa: PLR2004 - half of them
            self._loop.call_later(moment, task.cancel)
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
            return task.cancelled()
        before = alarm.times
        alarm.interrupt(lambda: self._loop.run_until_complete(task), moment)
        if not task.done():  # before it had begun
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task]))
        return alarm.times > before

    def close(self) -> None:
        """Close the loop, as `asyncio.run` does."""
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def measure(kind: type[Sync], those: Clients, number: int, moments: random.Random, tick: Callable[[], None]) -> Any:
    """Interrupt so many calls; returns how often each of `WRONG` was seen."""
    found: Counter[str] = Counter()
    alarm = Alarm()
    hits = 0
    while hits < number:
        client = those.connect(socket_timeout=0.3)  # an event loop may lose what has come when it is interrupted
        calls = kind(client, moments)
        began = time.perf_counter()
        calls.call("first")
        first = time.perf_counter() - began
        for each in range(10):
            calls.call(f"usual {each}")
        usual = (time.perf_counter() - began - first) / 10
        end = min(number, hits + EACH)
        while hits < end:
            which = str(hits)
            with suppress(LockUnavailable):
                if calls.interrupt(alarm, which, usual):
                    hits += 1
                    tick()
            those.witness.set(f"interruptions:{which}", "somebody else")
            before = calls.runs
            for _ in range(2):
                try:
                    calls.call(which)
                except asyncio.TimeoutError:
                    found["waits for ever"] += 1
                except LockUnavailable:
                    found["LockUnavailable"] += 1
                except Exception as error:  # noqa: BLE001 - it is counted
                    found["raised"] += 1
                    logging.getLogger(__name__).info("%r", error)
            found["ran beside another"] += calls.runs - before
            those.witness.delete(f"interruptions:{which}")
        calls.close()
        client.close()
    return found


def blind() -> None:
    """Have pools see no reply that is yet to come."""

    async def can_read(*_args: Any, **_options: Any) -> bool:
        return False

    sync: Any = redis.connection.AbstractConnection
    twin: Any = redis.asyncio.connection.AbstractConnection
    sync.can_read = lambda *_args, **_options: False
    twin.can_read = twin.can_read_destructive = can_read


def main() -> int:
    """Interrupt calls by each kind of client, and report what has run beside another holder.

    Returns:
        1 if something was wrong, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--interruptions", type=int, default=5000, help="of each kind, sync and async")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of client; all if not given")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    blind()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that an interruption came before
    sys.unraisablehook = lambda _: None  # an interruption in a destructor
    console = Console()
    console.print(f"seed {options.seed}")
    table = Table("client", "", "interrupted", *WRONG)
    wrong = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    chosen = options.kind or KINDS
    with configure(prefix="interruptions:"), Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=2 * len(chosen) * options.interruptions)
        for name in chosen:
            with clients(name) as those:
                for kind in (Sync, Async):
                    progress.update(bar, description=f"{name}, {kind.__name__.lower()}")
                    moments = random.Random(f"{options.seed} {name} {kind.__name__}")
                    found = measure(kind, those, options.interruptions, moments, lambda: progress.advance(bar))
                    wrong += found.total()
                    progress.console.print(f"{name}, {kind.__name__.lower()}: {dict(found)}")
                    counts = [str(found[each]) for each in WRONG]
                    table.add_row(name, kind.__name__.lower(), str(options.interruptions), *counts)
    console.print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
