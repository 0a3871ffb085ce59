"""Histories: what those of both worlds have in common, and the processes in which they are played."""

from __future__ import annotations

import gc
import logging
import multiprocessing.util
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from .deployments import SLOTS, Cluster, Deployment
from .network import Host
from .process import Machine, Process, begin_history, playing
from .server import Store
from .tracing import Interrupted
from .world import World


class BodyFails(Exception):
    """Raised by a decorated function, and by policies."""


class History(World):
    """A history: one server, some processes, and what they do.

    Attributes:
        PLAN: the options of a history; of the values of each, the seed chooses one. ``trouble`` is how probable it is
            for each message that its connection is cut, and that it is late.
        FAULTS: the faults that happen in some histories, and how probable each is, once, twice and so on. Each has a
            method with its name.
        SINCE: more options and faults, which only some seeds have: the first seed that has them, the remainder of these
            seeds by four, the options and the faults.
        whose: the process in whose message a fault happens; None if the fault happens at a time.
        deployment: what the hosts are together, such as a cluster.
        greets: whether each connection begins with redis-py's name. These two messages would be half of all.
    """

    PLAN: ClassVar[dict[str, list[Any]]]
    FAULTS: ClassVar[dict[str, list[float]]]
    SINCE: ClassVar[list[tuple[int, set[int], dict[str, list[Any]], dict[str, list[float]]]]]

    def __init__(self, processes: list[Process], seed: int, left_out: frozenset[str] = frozenset()) -> None:
        super().__init__(seed, left_out)
        self.processes = processes
        self.plan = SimpleNamespace(**{name: self.choose(f"plan {name}", values) for name, values in self.PLAN.items()})
        self.possible = dict(self.FAULTS)
        for first, rests, plan, faults in self.SINCE:
            has_them = seed >= first and seed % 4 in rests
            for name, values in plan.items():
                vars(self.plan)[name] = self.choose(f"plan {name}", values if has_them else values[:1])
            self.possible.update(faults if has_them else {})
        self.store = Store(lambda: self.now, self.wall, self.plan.server)
        self.hosts = {name: Host(self, self.store, name) for name in ("server", "other")}
        self.host = self.hosts["server"]
        for each in self.hosts.values():
            each.loses, each.delays = self.plan.trouble
        self.greets = self.draw("plan greets") < 1 / 8
        self.pids = count(101)
        self.whose: Process | None = None

    def deploy(self, kind: type[Deployment]) -> None:
        self.deployment: Any = kind(self)
        self.hosts.update({name: Host(self, self.store, name) for name in self.deployment.OBSERVERS})

    def stop_a_host(self, seconds: float) -> None:
        """Stop the server. In a deployment, another server takes its place at once."""
        self.hosts[self.deployment.fail_over()].stop(seconds)

    def _slot_moves(self) -> None:
        self.deployment.move(self.choose("slot that moves", list(range(SLOTS))))

    def plan_faults(self, seconds: float) -> None:
        of_clusters = {"slot moves": [0.5, 0.3, 0.1]} if type(self.deployment) is Cluster else {}
        for label, probabilities in [*self.possible.items(), *of_clusters.items()]:
            do = getattr(self, f"_{label.replace(' ', '_')}")
            for probability in probabilities:
                if self.fault(label, probability):
                    self.after(self.uniform(f"time of {label}", 0, seconds), self._trouble, do)
            if self.fault(f"{label} of a message", 0.03):  # at the moment when a message is sent
                self.host.at_message[int(self.uniform(f"message of {label}", 1, 80))] = partial(self._trouble, do)

    def _trouble(self, do: Callable[[], None], whose: Process | None = None) -> None:
        if not self.quiet:
            self.whose = whose
            self.troubled_at = self.now
            do()

    def trouble_ends(self) -> float:
        """The time from which all hosts and processes are neither stopped nor cut off, and refuse nothing."""
        hosts = [max(each.frozen_until, each.down_until, each.refused[2]) for each in self.hosts.values()]
        processes = [max(each.paused_until, each.cut_off_until) for each in self.processes]
        is_settled_at: float = self.deployment.is_settled_at
        return max(*hosts, *processes, is_settled_at)

    @property
    def latest(self) -> float:
        return max(each.latest for each in self.hosts.values())

    def is_calm(self, since: float) -> bool:
        """Whether nothing has gone wrong since then, and no earlier fault has a late effect."""
        return max(self.trouble_ends(), self.troubled_at + self.latest) < since

    def start(self, process: Process, name: str, machine: Machine) -> None:
        process.begin(machine, next(self.pids), name)

    def kill(self, process: Process) -> None:
        """``kill -9``."""
        process.is_dead, process.died_at = True, self.now
        self.note(process.name, "is killed")

    def end_in_order(self, process: Process) -> None:
        """Wait for the threads of a process that are no daemons, and call the functions registered with ``atexit``."""
        for each in self.threads:
            if each.process is process and each.lives and not (each.is_daemon or each.dead):
                self.wait(each.joined.append, None)
        process.has_ended = True
        for do in reversed(process.at_exit):
            do()
        process.is_dead = True


_SLIPS = (AttributeError, LookupError, NameError, TypeError)
"""Errors that no server gives, and no user of the worlds raises: mistakes of our own, which only a log shows."""


class _Errors(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if any(isinstance(each, _SLIPS) for each in record.args or ()):
            playing().problem("a slip in the log", record.getMessage()[-300:])
        if record.levelno < logging.ERROR:
            return
        if record.exc_info and isinstance(record.exc_info[1], (Interrupted, BodyFails)):
            return  # a user's hook or policy has raised the error, and it is only logged
        playing().problem("an error in the log", record.getMessage()[-300:])


logging.getLogger("only_one").addHandler(_Errors())
# Nobody reads where something was logged, and to find it takes time.
logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
vars(logging)["_srcfile"] = None
logging.getLogger("only_one").setLevel(logging.DEBUG)


class Histories:
    """Plays histories, one after another, in the same processes.

    Attributes:
        greets: whether connections begin with redis-py's name in each history; if not, in one of eight.
    """

    def __init__(self, kind: Any, processes: int, package: Path, *, greets: bool = False) -> None:
        self.processes = [Process(package) for _ in range(processes)]
        self.kind, self.greets = kind, greets
        # Python and asyncio complain about the garbage of a history, because its tasks have not ended.
        sys.unraisablehook = lambda _: None
        logging.getLogger("asyncio").disabled = True
        warnings.simplefilter("ignore")
        gc.disable()  # leases are weakly referenced, and must not end by chance
        gc.collect()
        gc.freeze()  # collections between histories need not look at objects that outlive all histories

    def play(self, seed: int, left_out: frozenset[str] = frozenset(), branches: Any = None) -> Any:
        history = self.kind(self.processes, seed, left_out)
        history.branches = branches
        history.greets |= self.greets
        begin_history(history)
        history.play()
        vars(multiprocessing.util)["_finalizer_registry"].clear()  # else this process would call them at its own end
        return history
