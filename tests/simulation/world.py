"""The world: one clock, one seed, and threads that run one at a time and change places wherever they wait.

A choice is drawn by (seed, label, number), so a fault that is left out shifts no other choice.
The idea of a world in one thread is FoundationDB's simulation; that of leaving faults out until few are left is
Zeller's delta debugging.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import greenlet

from .tracing import Interrupted, Tracer, handle_signal

T = TypeVar("T")
WALL = 1_700_000_000.0
"""Seconds by which the wall clock is ahead of the clock of the world."""

_swap_current_task: Any = getattr(asyncio.tasks, "_swap_current_task", lambda *_: None)
"""From Python 3.14 on, a thread of the system has one current task, and not one for each of its event loops."""


class Thread(greenlet.greenlet):  # type: ignore[misc]
    """A thread of a process in the world.

    Attributes:
        life: the life of the process when the thread began.
        interrupt: the exception that is raised when the thread goes on; None if none is.
        waiting: counts the thread's waits, so that a late wake is known.
        is_daemon: whether the thread's process ends without waiting for it.
        joined: functions, each of which wakes a thread that waits for the end of this one.
    """

    interrupt: BaseException | None = None
    waiting = 0
    is_daemon = True

    def __init__(self, world: World, process: Any, name: str, do: Callable[[], object]) -> None:
        super().__init__(self._run, world.hub)
        self.world, self.process, self.name, self._do = world, process, name, do
        self.life = process.life
        self.tracer: Any = Tracer(world.branches).trace if world.branches is not None else None
        self.joined: list[Callable[[Any], object]] = []

    @property
    def lives(self) -> bool:
        """Whether the thread's process lives: it was not killed, and no other process has begun in its place."""
        return self.life == self.process.life and not self.process.is_dead

    def _run(self, *_: object) -> None:
        sys.settrace(self.tracer)
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the thread sees that it has ended
            self.world.note(self.name, "died", repr(error))
            if isinstance(error, Exception) and not isinstance(error, Interrupted):
                self.world.problem("a thread died", f"{self.name}: {error!r}")
        finally:
            sys.settrace(None)
            for wake in self.joined:
                wake(None)


class World:
    """What happens in one history, and when.

    Attributes:
        now: the seconds of the clock that nobody sets.
        log: what has happened: the time, who, what, and details.
        faults: the names of the faults that have happened: label and number.
        steps: the names of other things that can be left out.
        met: how often each kind of thing has happened.
        branches: how often each branch was taken; None if branches are not counted.
        quiet: whether no fault happens any more.
        problems: what has happened and must not: the kind, and a text.
        troubled_at: when the last fault happened.
    """

    troubled_at = 0.0

    def __init__(self, seed: int, left_out: frozenset[str] = frozenset()) -> None:
        self.seed, self.left_out = seed, left_out
        self.now, self.wall_step = 1000.0, 0.0
        self.hub = greenlet.getcurrent()
        self.threads: list[Thread] = []
        self.log: list[tuple[Any, ...]] = []
        self.faults: list[str] = []
        self.steps: list[str] = []
        self.met: Counter[str] = Counter()
        self.branches: Counter[tuple[str, int, int]] | None = None
        self.quiet = False
        self.problems: list[tuple[str, str]] = []
        self._events: list[tuple[float, bytes, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._seeded = blake2b(f"{seed}/".encode(), digest_size=7)

    # choices

    def draw(self, label: str) -> float:
        """A number from 0 to 1, the same for each (seed, label, number)."""
        return int.from_bytes(self.digest(label), "big") / 2**56

    def digest(self, label: str) -> bytes:
        """The same as ``draw``, in bytes."""
        self._numbers[label] += 1
        drawn = self._seeded.copy()
        drawn.update(f"{label}#{self._numbers[label]}".encode())
        return drawn.digest()

    def choose(self, label: str, choices: list[T]) -> T:
        return choices[int(self.draw(label) * len(choices))]

    def uniform(self, label: str, low: float, high: float) -> float:
        return low + (high - low) * self.draw(label)

    def fault(self, label: str, probability: float) -> bool:
        """Whether a fault happens now; a shrunk history leaves some out."""
        if probability <= 0 or self.quiet or self.draw(label) >= probability:
            return False
        name = f"{label}#{self._numbers[label]}"
        if name in self.left_out:
            return False
        self.faults.append(name)
        if not label.startswith("no thread"):  # a fault by which no key may be lost
            self.troubled_at = self.now
        self.met[f"fault: {label.partition(' of ')[0]}"] += 1
        return True

    def is_left_out(self, step: str) -> bool:
        """Whether a step that is no fault is left out."""
        self.steps.append(step)
        return step in self.left_out

    # time

    def at(self, time: float, do: Callable[..., object], *args: Any) -> None:
        """Let something happen at a time. Among events of one time, the seed chooses the order."""
        heapq.heappush(self._events, (max(time, self.now), self.digest("order"), do, args))

    def after(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        self.at(self.now + seconds, do, *args)

    def wall(self) -> float:
        return WALL + self.wall_step + self.now

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen until a time, or until ``done``."""
        events = self._events
        while not done():
            if not events or events[0][0] > until:
                self.now = max(self.now, until)
                return
            self.now, _, do, args = heapq.heappop(events)
            do(*args)

    # threads

    def spawn(self, process: Any, name: str, function: Callable[..., Any], *args: Any) -> Thread:
        thread = Thread(self, process, name, partial(function, *args))
        self.threads.append(thread)
        self.after(0, self.resume, thread, thread.waiting, None)
        return thread

    def resume(self, thread: Thread, waiting: int, value: object) -> None:
        """Let a thread go on, unless its wait is over or its process is killed; later, if its process stands still."""
        if thread.dead or thread.waiting != waiting or not thread.lives:
            return
        if thread.process.paused_until > self.now:
            self.at(thread.process.paused_until, self.resume, thread, waiting, value)
            return
        thread.switch(value)

    def wait(self, begin: Callable[[Callable[[Any], None]], object], timeout: float | None) -> Any:
        """Let others go on until ``begin``'s argument is called with a value, or until the time is over: then None."""
        waiting = greenlet.getcurrent().waiting + 1
        begin(partial(self.after, 0, self.resume, greenlet.getcurrent(), waiting))
        return self.sleep(timeout)

    def sleep(self, seconds: float | None) -> Any:
        """Let others go on until the time is over, or the thread is resumed with a value."""
        thread: Any = greenlet.getcurrent()
        thread.waiting += 1
        if seconds is not None:
            self.after(seconds, self.resume, thread, thread.waiting, None)
        sys.settrace(None)
        value = self.hub.switch() if (loop := asyncio._get_running_loop()) is None else self._switch_from(loop)
        thread.waiting += 1
        if thread.interrupt is not None:
            error, thread.interrupt = thread.interrupt, None
            handle_signal(error, sys._getframe())
        sys.settrace(thread.tracer)
        return value

    def _switch_from(self, loop: Any) -> Any:
        """Let others go on, without this event loop's entries in Python's state of the system's thread."""
        hooks, task = sys.get_asyncgen_hooks(), _swap_current_task(loop, None)
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(None, None)
        value = self.hub.switch()
        asyncio._set_running_loop(loop)
        _swap_current_task(loop, task)
        sys.set_asyncgen_hooks(*hooks)
        return value

    def note(self, who: str, what: str, *details: Any) -> None:
        self.log.append((self.now - 1000, who, what, *details))

    def problem(self, kind: str, text: str) -> None:
        self.problems.append((kind, text))
        self.note("checker", kind.upper(), text)
