"""The world of the lock: processes that call decorated functions, and everything that may go wrong meanwhile."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checker import Call, Checker, Run
from .network import Host, Loop
from .process import Machine, Process, history_of, patched, this, thread
from .server import Store
from .tracing import Interrupted, Tracer
from .world import Thread, World

MOST_PROCESSES = 4
_FAULTS_UNTIL = 1008.0


class BodyFails(Exception):
    """Raised by a decorated function, and by policies."""


def fails(_error: object) -> None:
    raise BodyFails


@dataclass
class Plan:
    """What a history is made of; each value is drawn from the seed."""

    lease: float | None
    timeout: float | None
    at_least: float
    kind: str
    processes: int
    calls: int
    is_async: bool
    when_lost: str
    when_down: str
    keys: list[str]


def plan_of(world: World) -> Plan:
    choose = world.choose
    lease, timeout = choose(
        "plan times", [(None, None), (1.0, None), (3.0, None), (3.0, 8.0), (None, 4.0), (30.0, None)]
    )
    at_least = choose("plan at_least", [0.0, 0.0, 0.0, 2.0, 4.0])
    return Plan(
        lease=lease,
        timeout=timeout,
        at_least=at_least,
        kind=choose("plan server", ["valkey", "valkey", "redis", "redis7", "redis6"]),
        processes=choose("plan processes", [2, 3, 3, 4]),
        calls=choose("plan calls", [2, 3, 4]),
        is_async=choose("plan async", [False, False, True]),
        when_lost=choose("plan when_lost", ["fail", "carry_on", "callable", "fails"]),
        when_down=choose("plan when_down", ["fail", "fail", "skip", "carry_on", "fails"]),
        keys=choose("plan keys", [["k"], ["k"], ["k", "n"]]),
    )


class LockWorld:
    """One history of the lock."""

    def __init__(self, processes: list[Process], seed: int, left_out: frozenset[str] = frozenset()) -> None:
        self.world = world = World(seed, left_out)
        self.plan = plan = plan_of(world)
        self.store = Store(lambda: world.now, world.wall, plan.kind)
        self.host = Host(world, ("server", 6379), self.store)
        world.hosts = {self.host.address: self.host}
        self.checker = Checker(world, self.store, plan)
        self.host.arrived = self.checker.arrived
        self.host.answered = lambda process: self.checker.replies.append((world.now, process))
        self.store.changed = self.checker.changed
        self.machines = [Machine("alpha"), Machine("beta")]
        self.processes = processes[: plan.processes]
        self.pids = 100
        self.calls_left = 0
        self.unended: dict[Process, int] = {}
        self.functions: dict[Process, Callable[..., Any]] = {}

    def play(self) -> Checker:
        """Let the history happen."""
        world = self.world
        trouble = world.choose("plan trouble", [0, 0, 1, 2, 3])
        self.host.loses = [0.0, 0.01, 0.03, 0.08][trouble]
        self.host.delays = [0.0, 0.01, 0.05, 0.15][trouble]
        for number, process in enumerate(self.processes):
            self._start(process, f"p{number}", world.choose("plan machine", self.machines))
        for label, probability, do in self._faults():
            if world.fault(label, probability):
                world.at(world.uniform(f"time of {label}", 1000, _FAULTS_UNTIL), do)
        world.run(world.now + 600, lambda: self.calls_left == 0)
        if self.calls_left:
            self.checker.problem("a call never ended", f"{self.calls_left} calls")
        world.run(max(world.now, _FAULTS_UNTIL))
        world.quiet = True
        self.host.loses = self.host.delays = 0.0
        host = self.host
        calm = max([world.now, host.calm_from, *(process.paused_until for process in self.processes)])
        world.run(calm + 2 * self.host.latest + 3)
        self.checker.at_the_end()
        world.end()
        return self.checker

    # processes and their calls

    def _start(self, process: Process, name: str, machine: Machine) -> None:
        self.pids += 1
        process.begin(machine, self.pids, name, self.pids)
        process.no_thread = self.world.choose(f"plan no_thread of {name}", [0.0] * 9 + [0.3])
        function = self.functions[process] = self._decorated(process)
        self.calls_left += self.plan.calls
        self.unended[process] = self.plan.calls
        if self.plan.is_async:
            self.world.spawn(process, f"{name}/loop", self._run_loop, process, function)
        else:
            self.world.spawn(process, f"{name}/main", self._run_calls, process)

    def _call_ended(self, process: Process) -> None:
        self.calls_left -= 1
        self.unended[process] -= 1

    def _decorated(self, process: Process) -> Callable[..., Any]:
        plan, package = self.plan, process.package
        policies = {"fail": package.fail, "carry_on": package.carry_on, "skip": package.skip, "fails": fails}
        given: dict[str, Any] = {"at_least": plan.at_least} if plan.at_least else {}
        given.update({name: value for name in ("lease", "timeout") if (value := getattr(plan, name)) is not None})
        given["when_lost"] = policies.get(plan.when_lost, lambda _error: None)
        if given.get("timeout") and plan.at_least > given["timeout"]:
            del given["at_least"]
        url = "redis://server:6379/0?protocol=2"
        body = self._async_body if plan.is_async else self._body
        when_busy = self.world.choose(f"plan when_busy of {process.name}", [package.fail, package.skip, fails])
        process.package.subscribe(lambda event: self.checker.event(process, event))
        decorate = package.only_one(
            "{call.key}", when_busy=when_busy, when_down=policies[plan.when_down], redis=url, **given
        )
        return decorate(body)  # type: ignore[no-any-return]

    def _run_calls(self, process: Process) -> None:
        world = self.world
        for number in range(self.plan.calls):
            name = f"{process.name}.{number}"
            if world.is_left_out(f"call {name}"):
                self._call_ended(process)
                continue
            world.sleep(world.choose(f"pause before {name}", [0.0, 0.001, 0.5, 1.0, 3.0]))
            with self._perhaps_interrupted(name):
                self._call(process, name)
            self._call_ended(process)
            if world.fault(f"fork of {process.name}", 0.03):
                self._fork(process)
        self._end(process)

    def _call(self, process: Process, name: str) -> None:
        call = self.checker.begins(Call(name, process, self.world.choose(f"key of {name}", self.plan.keys)))
        try:
            outcome: Any = self.functions[process](call)
        except Exception as error:  # noqa: BLE001 - the checker says which are allowed
            outcome = error
        sys.settrace(None)  # what the checker asks of the package is not interrupted
        self.checker.ends(call, outcome)
        sys.settrace(getattr(thread(), "tracer", None))
        if isinstance(outcome, Interrupted) and "." in name.partition(".")[2]:  # it is the outer call's, too
            raise outcome

    def _fork(self, process: Process) -> None:
        """Go on as a forked child, which has no other thread; the parent is killed."""
        self.pids += 1
        process.fork(self.pids)
        for each in self.world.threads:
            if each.process is process and each is not thread():
                each.life = -1
        self.world.note(process.name, "goes on as a forked child")

    def _end(self, process: Process) -> None:
        """End in order: what is registered for the end of a process is done."""
        if self.world.draw(f"ends {process.name}") < 0.5:
            process.has_ended = True
            for do in reversed(process.at_exit):
                do()
            process.is_dead = True
            self.world.note(process.name, "ended")

    def _run_loop(self, process: Process, function: Callable[..., Any]) -> None:
        world, running = self.world, thread()
        loop = Loop(world, process)
        running.loop = loop  # type: ignore[union-attr]

        async def one(number: int) -> None:
            name = f"{process.name}.{number}"
            if world.is_left_out(f"call {name}"):
                self._call_ended(process)
                return
            await asyncio.sleep(world.choose(f"pause before {name}", [0.0, 0.001, 0.5, 1.0, 3.0]))
            call = self.checker.begins(Call(name, process, world.choose(f"key of {name}", self.plan.keys)))
            task = asyncio.ensure_future(function(call))
            if world.fault(f"cancelled of {name}", 0.15):
                loop.call_later(world.choose(f"cancelled after {name}", [0.0005, 0.001, 0.003, 0.1, 1.0]), task.cancel)
            try:
                outcome: Any = await task
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                outcome = error
            self.checker.ends(call, outcome)
            self._call_ended(process)

        async def everything() -> None:
            await asyncio.gather(*[one(number) for number in range(self.plan.calls)])

        try:
            running.loop = None  # type: ignore[union-attr]
            main = loop.create_task(everything())
            running.loop = loop  # type: ignore[union-attr]
            asyncio._set_running_loop(None)
            loop.run_until_complete(main)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            running.loop = None  # type: ignore[union-attr]
            loop.close()
        self._end(process)

    # what a run does

    def _body(self, call: Call) -> str:
        world, run = self.world, self._begin(call)
        try:
            seconds = self._seconds(call)
            self._look_around(call, run)
            world.sleep(seconds)
            if world.draw(f"nested in {call.name}") < 0.1:
                self._call(call.process, f"{call.name}.0")
            self._perhaps_fail(call)
        except BaseException:
            self.checker.run_ends(run, succeeded=False)
            raise
        self.checker.run_ends(run, succeeded=True)
        return "done"

    async def _async_body(self, call: Call) -> str:
        run = self._begin(call)
        try:
            seconds = self._seconds(call)
            await asyncio.sleep(seconds)
            self._perhaps_fail(call)
        except BaseException:
            self.checker.run_ends(run, succeeded=False)
            raise
        self.checker.run_ends(run, succeeded=True)
        return "done"

    def _begin(self, call: Call) -> Run:
        return self.checker.run_begins(call, call.process.package.current_lock())

    def _seconds(self, call: Call) -> float:
        return self.world.choose(f"length of {call.name}", [0.001, 0.05, 0.5, 2.0, 5.0])

    def _look_around(self, call: Call, run: Run) -> None:
        """Use what a run can ask of its lock."""
        package = call.process.package
        errors = (package.LockLost, package.OnlyOneError, OSError, *_redis_errors())
        if self.world.draw(f"fence {call.name}") < 0.2:
            with suppress(*errors):
                self.checker.fenced(run, run.lock.fence)
        if self.world.draw(f"extend {call.name}") < 0.1:
            with suppress(*errors):
                run.lock.extend(2)

    def _perhaps_fail(self, call: Call) -> None:
        if self.world.draw(f"fails {call.name}") < 0.1:
            raise BodyFails

    @contextmanager
    def _perhaps_interrupted(self, name: str) -> Iterator[None]:
        """Perhaps let an exception be raised at some line, as a signal handler does."""
        running = thread()
        if running is None or not self.world.fault(f"interrupted of {name}", 0.1):
            yield
            return
        left = int(self.world.choose(f"lines before {name}", [30, 300, 1000]) * self.world.draw(f"line of {name}"))
        before, running.tracer = running.tracer, Tracer(self.world.branches, left).trace
        sys.settrace(running.tracer)
        try:
            yield
        finally:
            running.tracer = before
            sys.settrace(before)

    # faults

    def _faults(self) -> Iterator[tuple[str, float, Callable[[], None]]]:  # noqa: C901, PLR0915 - a table
        world, host, processes = self.world, self.host, self.processes
        choose = world.choose

        def freeze() -> None:
            seconds = choose("seconds of freeze", [0.5, 1.5, 4.0, 40.0])
            host.frozen_until = world.now + seconds
            world.note("server", "is frozen for", seconds)

        def restart(*, keeps: bool) -> None:
            seconds = choose("seconds of restart", [0.01, 1.0, 5.0])
            world.note("server", "restarts", "with its data" if keeps else "empty")
            host.stop(seconds)
            self.store.known.clear()
            if not keeps:
                self.checker.data_is_lost()
                for key in list(self.store.keys):
                    self.store.set(key, None)

        def delete() -> None:
            key = choose("deleted", self.plan.keys)
            world.note("somebody", "deletes", key)
            self.checker.data_is_lost()
            self.store.set(b"only_one:" + key.encode(), None)

        def overwrite() -> None:
            key = choose("overwritten", self.plan.keys)
            world.note("somebody", "overwrites", key)
            self.checker.data_is_lost()
            value: Any = choose("foreign value", [b"somebody else's", [b"a list"]])
            self.store.set(b"only_one:" + key.encode(), value, world.now + 2)

        def fail_over() -> None:
            lag = choose("lag of failover", [0.0, 0.01, 0.5, 2.0])
            world.note("server", "fails over, and loses what is younger than", lag)
            host.stop(choose("seconds of failover", [0.01, 1.0]))
            self.checker.fail_over(lag)

        def flush_scripts() -> None:
            self.store.known.clear()

        def refuse() -> None:
            text, commands = choose("refusal", _REFUSALS)
            host.refused = text, commands, world.now + choose("seconds of refusal", [0.1, 1.0, 5.0])
            world.note("server", "refuses with", text)

        def cut_off() -> None:
            process = choose("cut off", processes)
            host.cut_off[process] = world.now + choose("seconds of cut", [0.5, 2.0, 6.0, 40.0])
            world.note(process.name, "is cut off from the server")

        def pause() -> None:
            process = choose("paused", processes)
            until = world.now + choose("seconds of pause", [0.2, 1.5, 5.0, 40.0])
            process.paused_until = max(process.paused_until, until)
            world.note(process.name, "is paused")

        def kill() -> None:
            process = choose("killed", processes)
            if process.is_dead:
                return
            process.is_dead = True
            world.note(process.name, "is killed")
            self.checker.killed(process)
            self.calls_left -= self.unended[process]
            self.unended[process] = 0

        def step_clock() -> None:
            world.wall_step += choose("step of the clock", [-3600.0, 3600.0])

        yield "freeze", 0.15, freeze
        yield "freeze", 0.05, freeze
        yield "restart with data", 0.05, lambda: restart(keeps=True)
        yield "restart without data", 0.05, lambda: restart(keeps=False)
        yield "delete", 0.05, delete
        yield "overwrite", 0.04, overwrite
        yield "failover", 0.06, fail_over
        yield "flush scripts", 0.1, flush_scripts
        yield "refusal", 0.08, refuse
        yield "cut off", 0.1, cut_off
        yield "pause", 0.1, pause
        yield "pause", 0.05, pause
        yield "kill", 0.1, kill
        yield "kill", 0.05, kill
        yield "clock", 0.05, step_clock


_SCRIPTS = (b"EVAL", b"EVALSHA")
_WRITES = (b"SET", b"DELIFEQ", b"DELEX", *_SCRIPTS)
_REFUSALS = [
    ("OOM command not allowed when used memory > 'maxmemory'.", (b"SET",)),
    ("READONLY You can't write against a read only replica.", _WRITES),
    ("NOPERM User default has no permissions to run the 'eval' command", _SCRIPTS),
    ("BUSY Redis is busy running a script.", _WRITES),
    ("LOADING Redis is loading the dataset in memory", _WRITES),
]


def _redis_errors() -> tuple[type[Exception], ...]:
    import redis.exceptions  # noqa: PLC0415

    return (redis.exceptions.RedisError,)


class Histories:
    """The processes in which histories are played, one history after another."""

    def __init__(self, package_path: Path | None = None, kind: Any = None, processes: int = MOST_PROCESSES) -> None:
        self.processes = [Process(package_path) for _ in range(processes)]
        self.kind: Any = kind or LockWorld
        # What is collected after a history, Python and asyncio complain about: its tasks have not ended.
        sys.unraisablehook = lambda _: None
        logging.getLogger("asyncio").disabled = True
        gc.disable()  # leases are weakly referenced: when they end must not be left to chance
        gc.collect()
        gc.freeze()  # what outlives all histories is not looked at between them
        self.played = 0

    def play(self, seed: int, left_out: frozenset[str] = frozenset(), branches: Any = None) -> Any:
        self.played += 1
        if self.played % 20 == 0:
            gc.collect(0)
        with warnings.catch_warnings(), patched():
            warnings.simplefilter("ignore")
            history = self.kind(self.processes, seed, left_out)
            history.world.branches = branches
            handler = _Errors(getattr(history, "checker", history))
            logger = logging.getLogger("only_one")
            logger.addHandler(handler)
            try:
                with history_of(history.world):
                    return history.play()
            finally:
                logger.removeHandler(handler)


class _Errors(logging.Handler):
    def __init__(self, checker: Checker) -> None:
        super().__init__(logging.ERROR)
        self.checker = checker

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], (Interrupted, BodyFails)):
            return  # it was raised in a user's hook or policy, whose errors are logged
        self.checker.problem("an error in the log", record.getMessage()[-300:])


__all__ = ["Histories", "LockWorld", "Thread", "this"]
