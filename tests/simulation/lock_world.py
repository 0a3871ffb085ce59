"""The world of the lock: processes that call decorated functions, and everything that may go wrong meanwhile."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import inf
from typing import Any, ClassVar

from .checker import Call, Checker
from .deployments import WRITES, Cluster, Deployment, Sentinels
from .history import BodyFails, History
from .network import Loop
from .process import Machine, Process, playing, this, thread
from .tracing import Interrupted, Tracer
from .world import Thread

_DEPLOYED_FROM = 335_000_000
"""Of eight seeds from here on two have a client of the user's; so earlier ones play what they have played."""

_DEPLOYMENTS: dict[int, Any] = {3: Cluster, 11: Cluster, 14: Sentinels}

_REFUSALS = [
    ("OOM command not allowed when used memory > 'maxmemory'.", (b"SET",)),
    ("READONLY You can't write against a read only replica.", WRITES),
    ("NOPERM User default has no permissions to run the 'eval' command", (b"EVAL",)),
    ("BUSY Redis is busy running a script.", WRITES),
    ("LOADING Redis is loading the dataset in memory", WRITES),
]


def fails(_error: object) -> None:
    raise BodyFails


# What the package looks at is the same in all histories: it takes a third of a call to read a function's signature.


def _goes_on(_error: object) -> None: ...


def _hears(event: object) -> None:
    playing().checker.event(this(), event)


def _body(call: Call) -> Any:
    return playing().body(call)


async def _async_body(call: Call) -> Any:
    return await playing().async_body(call)


_WIDE_PLAN: dict[str, list[Any]] = {
    "threads": [1, 1, 2],  # of a process, each of which makes some of its calls; an async one has a loop of its own
    "forks": [0.03, 0.3],
    "parent_lives": [False, True, True],  # after a fork
}


class LockWorld(History):
    """One history of the lock."""

    PLAN: ClassVar[dict[str, list[Any]]] = {
        "times": [(None, None), (1.0, None), (3.0, None), (3.0, 8.0), (None, 4.0), (30.0, None)],  # lease and timeout
        "at_least": [0.0, 0.0, 0.0, 2.0, 4.0],
        "server": ["valkey", "valkey", "redis", "redis7", "redis6"],
        "processes": [2, 3, 3, 4],
        "calls": [2, 3, 4],
        "async": [False, False, True],
        "when_lost": ["fail", "carry_on", "callable", "fails"],
        "when_down": ["fail", "fail", "skip", "carry_on", "fails"],
        "keys": [["k"], ["k"], ["k", "n"]],
        "trouble": [(0.0, 0.0), (0.0, 0.0), (0.01, 0.01), (0.03, 0.05), (0.08, 0.15)],
        "jobs": [False, False, False, True],  # whether calls with one number are attempts of one job
    }
    FAULTS: ClassVar[dict[str, list[float]]] = {
        "freeze": [0.15, 0.05],
        "restart with data": [0.05],
        "restart without data": [0.05],
        "delete": [0.05],
        "overwrite": [0.04, 0.06],
        "failover": [0.06],
        "refusal": [0.08],
        "cut off": [0.1],
        "pause": [0.1, 0.05],
        "kill": [0.1, 0.05],
        "clock": [0.05],
    }

    SINCE: ClassVar[list[Any]] = [
        (362_000_000, {3}, _WIDE_PLAN, {}),
        (404_000_000, {3}, {"forks_by": ["Python", "Python", "C code"]}, {}),
    ]

    def __init__(self, processes: list[Process], seed: int, left_out: frozenset[str] = frozenset()) -> None:
        super().__init__(processes, seed, left_out)
        self.processes = processes[: self.plan.processes]
        self.machines = [Machine("alpha", is_known=self.draw("plan known") < 0.95), Machine("beta")]
        self.is_async: bool = getattr(self.plan, "async")
        self.plan.threads = 1 if self.plan.jobs else self.plan.threads  # the attempts of a job are one after another
        # One connection, for which the calls of an event loop wait.
        self.query = "protocol=2" + "&max_connections=1" * (self.is_async and self.draw("plan connections") < 0.5)
        self.checker = Checker(self)
        self.store.changed = self.checker.changed
        self.left: set[Thread] = set()  # whose calls have not all ended
        self.was_set_back = False  # the wall clock
        self.functions: dict[tuple[Process, str], Callable[..., Any]] = {}  # of each key
        self.host_of = {"k": "server", "n": "other" if self.draw("plan other server") < 0.5 else "server"}
        self.when_busy: dict[Process, str] = {}
        self.deploy(_DEPLOYMENTS.get(seed % 16, Deployment) if seed >= _DEPLOYED_FROM else Deployment)

    def play(self) -> None:
        for number, process in enumerate(self.processes):
            self._start(process, f"p{number}", self.choose("plan machine", self.machines))
        self.plan_faults(8)
        self.run(self.now + 600, lambda: not self.left)
        if self.left:
            self.problem("a call never ended", f"{len(self.left)} threads wait")
        self.quiet = True
        self.run(max(self.now, self.trouble_ends()) + 2 * self.latest + 3)
        self.checker.at_the_end()
        self.run(self.now + 60)
        self.checker.when_all_is_over()

    # processes and their calls

    def _start(self, process: Process, name: str, machine: Machine) -> None:
        self.start(process, name, machine)
        self.when_busy[process] = self.choose(f"plan when_busy of {name}", ["fail", "skip", "fails"])
        process.no_thread = self.choose(f"plan no_thread of {name}", [0.0] * 9 + [0.3])
        for key in self.plan.keys:
            self.functions[process, key] = self._decorated(process, key)
        process.package.subscribe(_hears)
        for number in range(self.plan.threads):
            running = self.spawn(process, f"{name}/{number or 'main'}", self._run, process, number)
            running.is_daemon = not number
            self.left.add(running)

    def _run(self, process: Process, number: int) -> None:
        running: Any = thread()
        if self.is_async:
            with closing(Loop(self, process)) as loop:  # as ``asyncio.run``
                loop.run_until_complete(self._call_all(process, number))
                self.left.discard(running)
                loop.run_until_complete(loop.shutdown_asyncgens())
        else:
            self._run_calls(process, number)
            self.left.discard(running)
        if number == 0 and self.draw(f"ends {process.name}") < 0.5:
            self.end_in_order(process)
            self.note(process.name, "ended")

    def _decorated(self, process: Process, key: str) -> Callable[..., Any]:
        plan, package = self.plan, process.package
        policies = {"fail": package.fail, "carry_on": package.carry_on, "skip": package.skip, "fails": fails}
        lease, timeout = plan.times
        work_id = Call.job_id if plan.jobs else None
        options = {"lease": lease, "timeout": timeout, "at_least": plan.at_least, "work_id": work_id}
        decorate = package.only_one(
            "{call.key}",
            when_busy=policies[self.when_busy[process]],
            when_down=policies[plan.when_down],
            when_lost=policies.get(plan.when_lost, _goes_on),
            redis=self.deployment.client or f"redis://{self.host_of[key]}:6379/0?{self.query}",
            **{option: value for option, value in options.items() if value},
        )
        decorated: Callable[..., Any] = decorate(_async_body if self.is_async else _body)
        return decorated

    def _calls_of(self, process: Process, thread_number: int) -> Iterator[tuple[str, float]]:
        """The names of the calls of a thread of a process, and the seconds before each."""
        for number in range(thread_number, self.plan.calls, self.plan.threads):
            name = f"{process.name}.{number}"
            if not self.is_left_out(f"call {name}"):
                yield name, self.choose(f"pause before {name}", [0.0, 0.001, 0.5, 1.0, 3.0])

    def _run_calls(self, process: Process, number: int) -> None:
        running: Any = thread()
        for name, pause in self._calls_of(process, number):
            self.sleep(pause)
            counting, tracer = running.tracer, None
            if self.fault(f"interrupted of {name}", 0.1):  # by an exception at some line, as of a signal handler
                lines = self.choose(f"lines before {name}", [30, 300, 1000]) * self.draw(f"line of {name}")
                tracer = Tracer(self.branches, int(lines), self)
                running.tracer = tracer.trace
                sys.settrace(running.tracer)
            outcome = self._call_and_check(process, name)
            if tracer and tracer.raised not in (None, outcome):
                self.problem("an interruption is lost", f"{name} gets {outcome!r}")
            running.tracer = counting
            sys.settrace(counting)
            if self.fault(f"fork of {process.name}", self.plan.forks):
                self._fork(process)

    def _call_and_check(self, process: Process, name: str) -> Any:
        call = self.checker.begins(process, name)
        try:
            outcome: Any = self.functions[process, call.key](call)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the checker says which are allowed
            outcome = error
        sys.settrace(None)  # what the checker asks of the package is not interrupted
        self.checker.ends(call, outcome)
        sys.settrace(getattr(thread(), "tracer", None))
        if isinstance(outcome, Interrupted) and "." in name.partition(".")[2]:  # it is the outer call's, too
            raise outcome
        return outcome

    def _fork(self, process: Process) -> None:
        """Go on as a forked child, which has no other thread; the parent's keys and connections are not the child's.

        The parent is killed, or does nothing more, and its keys expire.
        """
        sys.settrace(None)  # Python prints an exception that comes while it forks, and goes on
        parent = process.fork(next(self.pids), by_c=self.plan.forks_by == "C code")
        sys.settrace(getattr(thread(), "tracer", None))
        for call in self.checker.running():
            if call.process is process:
                value, expiry = self.store.keys.get(call.key_there, (None, None))
                if self.plan.parent_lives and call.had_key and value == call.lock.token:
                    self.checker.kept_by_parents[value] = expiry or inf
                call.is_excused, call.had_key = True, False
        parent.is_dead = not self.plan.parent_lives
        for each in self.threads:
            if each.process is process and each is not thread():
                each.life = -1
                self.left.discard(each)
        for link in [link for host in self.hosts.values() for link in host.links if link.process is process]:
            link.is_inherited = True
        self.note(process.name, "goes on as a forked child")

    async def _call_all(self, process: Process, number: int) -> None:
        await asyncio.gather(*[self._call_async(process, *each) for each in self._calls_of(process, number)])

    async def _call_async(self, process: Process, name: str, pause: float, *, is_nested: bool = False) -> None:
        await asyncio.sleep(pause)
        call = self.checker.begins(process, name)
        call.is_async = True
        running = self.functions[process, call.key](call)
        if not is_nested:
            running = task = asyncio.ensure_future(running)
            if self.fault(f"cancelled of {name}", 0.15):
                after = self.choose(f"cancelled after {name}", [0.0005, 0.001, 0.003, 0.1, 1.0])
                task.get_loop().call_later(after, task.cancel)
            if self.fault(f"cancelled at a command of {name}", 0.05):
                loop: Any = task.get_loop()
                loop.on_write = task.cancel
        try:
            outcome: Any = await running
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            outcome = error
        self.checker.ends(call, outcome)
        if is_nested and isinstance(outcome, asyncio.CancelledError):
            raise outcome  # it is the outer call's, too

    # what a run does

    @contextmanager
    def _witnessed(self, call: Call) -> Iterator[float]:
        """A run, of so many seconds, that fails at its end perhaps."""
        self.checker.run_begins(call, call.process.package.current_lock())
        try:
            yield self.choose(f"length of {call.name}", [0.001, 0.05, 0.5, 2.0, 5.0])
            if self.draw(f"fails {call.name}") < 0.1:
                fails(call)
            if not self.is_async and self.draw(f"exits {call.name}") < 0.05:
                sys.exit(self.choose(f"code of {call.name}", [0, 1]))
        except BaseException as error:
            self.checker.run_ends(call, succeeded=isinstance(error, SystemExit) and not error.code)
            raise
        self.checker.run_ends(call, succeeded=True)

    def body(self, call: Call) -> str:
        with self._witnessed(call) as seconds:
            self._look_around(call)
            asks_after = seconds / 2 if self.draw(f"asks meanwhile {call.name}") < 0.05 else 0.0
            if asks_after:
                self.sleep(asks_after)
                with self._asks(call):
                    self.checker.fenced(call, call.lock.fence)
            if call.name.count(".") == 1 and self.fault(f"fork of {call.process.name}", self.plan.forks / 3):
                self._fork(call.process)
            self.sleep(seconds - asks_after)
            self._look_around(call)
            if self.draw(f"nested in {call.name}") < 0.1:
                self._call_and_check(call.process, f"{call.name}.0")
        return "done"

    async def async_body(self, call: Call) -> str:
        with self._witnessed(call) as seconds:
            await asyncio.sleep(seconds)
            if self.draw(f"nested in {call.name}") < 0.1:
                await self._call_async(call.process, f"{call.name}.0", 0.0, is_nested=True)
        return "done"

    @contextmanager
    def _asks(self, call: Call) -> Iterator[None]:
        """A question of the run about its lock, which may be that it is lost."""
        package = call.process.package
        try:
            yield
        except package.LockLost as lost:
            self.checker.check_cause(call, lost)
            call.found_at = min(call.found_at, self.now)
        except Interrupted:
            raise
        except (package.OnlyOneError, *call.process.modules["only_one.driver"].TROUBLE):
            pass

    def _look_around(self, call: Call) -> None:
        """Use what a run can ask of its lock."""
        if self.draw(f"fence {call.name}") < 0.2:
            with self._asks(call):
                self.checker.fenced(call, call.lock.fence)
        if self.draw(f"extend {call.name}") < 0.1:
            seconds = self.choose(f"more for {call.name}", [2.0, 2.0, 20.0])
            with self._asks(call):
                call.lapsed_at = call.lock.expires_at
                call.lock.extend(seconds)
                call.extended += seconds
                if call.lock.reason is not None:
                    self.problem("a lost key was extended", f"{call.name}: {call.lock.reason}")
            if call.lock.is_held:
                call.lapsed_at = inf

    # faults: each happens at some time in some histories

    def _until(self, what: str, choices: list[float]) -> float:
        return self.now + self.choose(f"seconds of {what}", choices)

    def _freeze(self) -> None:
        self.host.frozen_until = max(self.host.frozen_until, self._until("freeze", [0.5, 1.5, 4.0, 40.0]))
        self.note("server", "is frozen for", self.host.frozen_until - self.now)

    def _restart_with_data(self) -> None:
        self.note("server", "restarts")
        self.host.stop(self.choose("seconds of restart", [0.01, 1.0, 5.0]))

    def _restart_without_data(self) -> None:
        self._restart_with_data()
        self.note("server", "has lost its data")
        self.checker.data_is_lost()
        self.store.clear()

    def _delete(self) -> None:
        self._set_by_hand(self.choose("deleted", self.plan.keys), None)

    def _overwrite(self) -> None:
        key = self.choose("overwritten", self.plan.keys)
        there = self.store.keys.get(b"only_one:" + key.encode(), (None,))[0]
        token = there if isinstance(there, bytes) else b""
        foreign = [b"somebody else's", [b"a list"], b"{}", b'{"only_one":1}']
        foreign.append(re.sub(rb'"pid":\d+', b'"pid":0', token))
        value = self.choose("foreign value", foreign)
        self._set_by_hand(key, b"somebody's" if value == token else value)

    def _set_by_hand(self, key: str, value: Any) -> None:
        self.note("somebody", "deletes" if value is None else "overwrites", key)
        self.checker.data_is_lost()
        self.checker.set_by_hand.append(value)
        self.store.set(b"only_one:" + key.encode(), value, self.now + 2)

    def _failover(self) -> None:
        lag = self.choose("lag of failover", [0.0, 0.01, 0.5, 2.0])
        self.note("server", "fails over, and loses what is younger than", lag)
        self.stop_a_host(self.choose("seconds of failover", [0.01, 1.0]))
        self.checker.fail_over(lag)

    def _refusal(self) -> None:
        text, commands = self.choose("refusal", _REFUSALS)
        self.host.refused = text, commands, self._until("refusal", [0.1, 1.0, 5.0])
        self.note("server", "refuses with", text)

    def _process(self, what: str) -> Process:
        return self.whose or self.choose(what, self.processes)

    def _cut_off(self) -> None:
        process = self._process("cut off")
        process.cut_off_until = self._until("cut", [0.5, 2.0, 6.0, 40.0])
        self.note(process.name, "is cut off from the server")

    def _pause(self) -> None:
        process = self._process("paused")
        process.paused_until = max(process.paused_until, self._until("pause", [0.2, 1.5, 5.0, 40.0]))
        self.note(process.name, "is paused")

    def _kill(self) -> None:
        process = self._process("killed")
        if not process.is_dead:
            self.kill(process)
            self.left = {each for each in self.left if each.process is not process}

    def _clock(self) -> None:
        step = self.choose("step of the clock", [-3600.0, 3600.0])
        self.wall_step += step
        self.was_set_back |= step < 0
