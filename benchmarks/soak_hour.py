"""An hour of faults: workers, beat, producers and plain processes, of which none may run beside another.

    python -m benchmarks.soak_hour [--minutes N] [--seed N] [--broker redis|classic] [--log FOLDER]

At random times, from the printed seed: processes are killed and paused, workers are shut down, the server of the locks
is restarted, and a proxy in front of it cuts, delays and swallows.
Each run writes lines into a file at its begin, while it holds its key, and at its end; the file does not use the lock.
From the file and the server the soak counts overlaps, keys left and lost tasks. The exit status is 1 if it finds any.
`tests/simulation` searches more kinds of faults and promises; here the servers, workers and processes are real.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.soak_hour_app import BROKER, LOCKS, NAME, PREFIX, QUEUE_TIMEOUT, WITNESS
from only_one import testing
from only_one.clock import now
from only_one.testing import Guarded
from rigs.namespaces import elsewhere
from rigs.proxy import Proxy
from rigs.rabbitmq import rabbitmq_server
from rigs.servers import redis_server
from rigs.waiting import wait_until

ROOT = Path(__file__).parents[1]
CHILDREN = 3
FAULTS = {
    "kill of a child": 8,
    "kill of a worker": 2,
    "kill of a caller": 3,
    "pause": 6,
    "cut": 2,
    "delay": 2,
    "swallowing": 2,
    "restart of the server": 1,
    "warm shutdown": 1,
    "cold shutdown": 1,
    "kill of the broker": 0.3,
}
"""How often each fault is chosen."""

CALM = (0.5, 4.0)
"""The shortest and longest time in seconds between two faults."""

SHORT, LONG = (0.1, 0.8), (3.2, 6.0)
"""Seconds of a pause or a fault of the network: shorter, and longer than every lease."""

SHOWN_EVERY = 12
"""After so many faults, of which there is one in 2 seconds or more, a line is printed."""

STARTS_WITHIN = 60.0
DRAINED_WITHIN = 120.0
PATIENCE = 3.0
"""Seconds after a fault of the network in which a release may still be unconfirmed."""

KINDS = {"below", "early", "above", "again", "newest", "plain", "plain_async"}


@dataclass
class Run:
    """A run, as the witness saw it.

    Attributes:
        held_until: the last time at which it believed that it held its key; its begin if it never did.
        end: "done", "retry", or empty if it was killed.
    """

    id: str
    kind: str
    key: str
    task_id: str
    begun_at: float
    held_until: float
    end: str = ""


class History:
    """All that the witness file tells. It asks neither the locks nor the servers.

    Attributes:
        runs: by their ids.
        sent: time, name and key of each task that was published, by its id.
        ended: how each task has ended, by its id.
        ready: how often each process has started.
        counts: of everything else.
        errors: those that are not ours.
    """

    def __init__(self, path: Path) -> None:
        self.runs: dict[str, Run] = {}
        self.sent: dict[str, tuple[float, str, str]] = {}
        self.ended: dict[str, str] = {}
        self.ready: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        path.touch()
        self._path, self._position = path, 0

    def read(self) -> None:
        """Read the lines that are new; the last one may be half written."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            while (line := file.readline()).endswith(b"\n"):
                self._position = file.tell()
                self._add(*json.loads(line))

    def _add(self, at: float, word: str, *rest: Any) -> None:
        match word, rest:
            case "begin", [run, kind, key, task_id]:
                self.runs[run] = Run(run, kind, key, task_id, at, at)
            case "held", [run]:
                self.runs[run].held_until = at
            case "end", [run, end]:
                self.runs[run].end = end
                if end == "done" and self.runs[run].task_id:
                    self.ended[self.runs[run].task_id] = end
            case "outcome", [task_id, state, result, is_expected]:
                self._add_outcome(task_id, state, result, is_expected=is_expected)
            case "sent", [task_id, task, key]:
                self.sent.setdefault(task_id, (at, task, key))
            case "ready", [name]:
                self.ready[name] += 1
            case _:
                self.counts[f"{word} {rest[-1]}" if word != "lost" else word] += 1

    def _add_outcome(self, task_id: str, state: str, result: Any, *, is_expected: bool) -> None:
        self.counts[f"{state} {result}"] += 1
        # Celery rejects a retry that it cannot publish, because the broker is away.
        ends = {"SUCCESS": "skipped", "FAILURE": "failed", "REJECTED": "rejected by Celery"}
        if state in ends:
            self.ended.setdefault(task_id, ends[state])
        if not is_expected:
            self.errors.append(f"{task_id}: {result}")

    def overlaps(self) -> list[str]:
        """The runs that began while another run held their key."""
        problems = []
        latest: dict[str, Run] = {}
        for run in self._in_order():
            before = latest.setdefault(run.key, run)
            if before is not run and run.begun_at < before.held_until:
                problems.append(f"{before} and {run}")
            if run.held_until > before.held_until:
                latest[run.key] = run
        return problems

    def _in_order(self) -> list[Run]:
        return sorted(self.runs.values(), key=lambda run: run.begun_at)

    def lost(self) -> list[str]:
        """The tasks with late acknowledgement that neither ran, nor were skipped, nor failed with an error of ours."""
        newest = {run.key: run.begun_at for run in self._in_order() if run.end == "done"}
        problems = []
        for task_id, (sent_at, task, key) in self.sent.items():
            end = self.ended.get(task_id)
            has_newer = newest.get(f"{task}:{key}", 0.0) > sent_at
            if end is None and task != "early":
                problems.append(f"{task} {task_id}")
            elif end == "skipped" and task == "newest" and not has_newer:
                problems.append(f"{task} {task_id} was dropped, and no newer one has run")
        return problems


class Postman:
    """Sees by MONITOR which messages a Redis broker has lost, and sends those again.

    Celery's Redis transport takes a message out of its queue and writes it down as unacknowledged in two steps: a
    message that is between the two when its worker is killed is lost. No task can do anything about that.
    """

    def __init__(self, url: str) -> None:
        self.sent_again = 0
        self._client: Any = redis.Redis.from_url(url, socket_timeout=None)
        self._on_the_way: dict[str, Any] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Read the commands until the broker ends."""
        with suppress(redis.RedisError), self._client.monitor() as monitor:
            for command in monitor.listen():
                name, _, rest = command["command"].partition(" ")
                key, _, rest = rest.partition(" ")
                if name in {"LPUSH", "RPUSH"} and key == "celery":
                    message = json.loads(rest.replace("\\\\", "\\"))  # redis-py leaves backslashes escaped
                    self._on_the_way[message["properties"]["delivery_tag"]] = message
                elif name == "HSET" and key == "unacked":
                    self._on_the_way.pop(rest.partition(" ")[0], None)

    def send_again(self, history: History) -> None:
        """Send lost messages again; no worker may be killed or paused meanwhile, and none is being delivered."""
        queued = {json.loads(each)["properties"]["delivery_tag"] for each in self._client.lrange("celery", 0, -1)}
        for tag, message in list(self._on_the_way.items()):
            is_needed = tag not in queued and message["headers"]["id"] not in history.ended
            if is_needed and self._on_the_way.pop(tag, None):
                self.sent_again += 1
                self._client.lpush("celery", json.dumps(message))


class Part:
    """A process of the soak, which is started again when it has ended.

    Args:
        name: what it is called in the witness file.
        arguments: of Python.
        environment: its variables.
        log: the file for what it prints.
        inside: the command that starts it on another machine; empty for this machine.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], environment: dict[str, str], log: Path, inside: Sequence[str] = ()
    ) -> None:
        self.name = name
        self._command = [*inside, sys.executable, *arguments]
        self._is_inside = bool(inside)
        self._environment = {**os.environ, **environment, NAME: name}
        self._log = log
        self.start()

    def start(self) -> None:
        """Start the process."""
        with self._log.open("ab") as log:
            self.process = Guarded(self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def pid(self) -> int:
        """The process id of the program itself; 0 if it has ended."""
        pids = children_of(self.process.pid) if self._is_inside else [self.process.pid]
        return pids[0] if pids and self.process.poll() is None else 0

    def close(self) -> None:
        """End the process, and the rest of its group."""
        self.process.close()

    def kill(self) -> None:
        """Kill the process and its children, all at once."""
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.close()


def children_of(pid: int) -> list[int]:
    """The child processes of a process."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def send_signal(number: int, *pids: int) -> None:
    """Send a signal to processes, if they are there."""
    for pid in filter(None, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Soak:
    """The servers and processes, and the faults that they meet."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.faults: Counter[str] = Counter()
        self.history = History(folder / "witness")
        self.keys_left: list[str] = []
        self.inside = elsewhere() or []
        self._random = random.Random(options.seed)
        self._ends: list[tuple[float, Callable[[], None]]] = []
        persistence = ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(folder)]
        self._locks = stack.enter_context(redis_server(*persistence))
        self._client: Any = stack.enter_context(redis.Redis.from_url(self._locks.url))
        self._proxy = stack.enter_context(Proxy(self._locks.url))
        self.postman, self._rabbitmq = None, None
        self._weights = dict(FAULTS)
        if options.broker == "redis":
            del self._weights["kill of the broker"]  # it keeps its messages in memory
            url = stack.enter_context(testing.redis_server()).url
            self.postman = Postman(url)
        else:
            self._rabbitmq = stack.enter_context(rabbitmq_server())
            url = self._rabbitmq.make_place()
        environment = {LOCKS: self._proxy.url, BROKER: url, WITNESS: str(folder / "witness")}

        def part(name: str, *arguments: str, inside: Sequence[str] = ()) -> Part:
            made = Part(name, arguments, environment, folder / f"log-{name}", inside)
            stack.callback(made.close)
            return made

        def caller(name: str, method: str) -> Part:
            code = "from benchmarks.soak_hour_app import Caller"
            return part(name, "-c", f"{code}; Caller({self._random.randrange(1_000_000)}).{method}()")

        celery = ["-m", "celery", "-A", "benchmarks.soak_hour_app"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "INFO"]
        worker = [*celery, "worker", "-P", "prefork", "-c", str(CHILDREN), *quiet]
        self._workers = [
            part("worker-here", *worker, "-n", "here@%h"),
            part("worker-there", *worker, "-n", "there@%h", inside=self.inside),
        ]
        self._callers = [
            part("beat", *celery, "beat", "-S", "celery.beat:Scheduler", "--pidfile="),
            *(caller(f"producer-{number}", "send_tasks") for number in (1, 2)),
            *(caller(f"plain-{number}", "call_functions") for number in (1, 2)),
        ]
        self._parts = [*self._workers, *self._callers]
        for each in self._parts:
            self._wait_for_start(each, 0)

    def run(self, seconds: float) -> None:
        """Let everything run for so long, with a fault every few seconds; then let it end, and look for what is left.

        Raises:
            TimeoutError: if a process does not start.
        """
        ends_at = now() + seconds
        while now() < ends_at:
            next_at = min(now() + self._random.uniform(*CALM), ends_at)
            while now() < next_at:
                self._end_faults()
                time.sleep(0.1)
            self._restart_ended(self._parts)
            fault = self._random.choices(list(self._weights), list(self._weights.values()))[0]
            self._cause(fault)
            self.faults[fault] += 1
            if self.faults.total() % SHOWN_EVERY == 0:
                self.history.read()
                print(len(self.history.runs), "runs;", len(self.history.overlaps()), "overlaps", flush=True)
        self._finish()

    # The faults

    def _cause(self, fault: str) -> None:
        worker, caller = self._random.choice(self._workers), self._random.choice(self._callers)
        seconds = self._random.uniform(*self._random.choice([SHORT, LONG]))
        match fault:
            case "kill of a child":
                send_signal(signal.SIGKILL, *self._a_child(worker))
            case "kill of a worker":
                self._restart(worker, worker.kill)
            case "kill of a caller":
                self._restart(caller, caller.kill)
            case "pause":
                self._pause(seconds)
            case "cut" | "delay" | "swallowing":
                self._disturb(fault, seconds)
            case "restart of the server":
                self._locks.kill()
                self._locks.start()
            case "warm shutdown" | "cold shutdown":
                how = signal.SIGTERM if fault == "warm shutdown" else signal.SIGQUIT
                self._restart(worker, lambda: self._shut_down(worker, how))
            case _ if self._rabbitmq:
                self._rabbitmq.crash()

    def _a_child(self, worker: Part) -> list[int]:
        children = children_of(worker.pid())
        return [self._random.choice(children)] if children else []

    def _pause(self, seconds: float) -> None:
        """Stop one process, or a worker with all of its children, and continue it later."""
        part = self._random.choice([*self._workers, *self._workers, *self._callers])
        pids = [part.pid()]
        if part in self._workers:
            is_whole = self._random.random() < 1 / 3
            pids = [*pids, *children_of(part.pid())] if is_whole else self._a_child(part)
        send_signal(signal.SIGSTOP, *pids)
        self._ends.append((now() + seconds, lambda: send_signal(signal.SIGCONT, *pids)))

    def _disturb(self, fault: str, seconds: float) -> None:
        """Have the proxy cut, delay or swallow for a while."""
        proxy, disturbed = self._proxy, ExitStack()
        faults = {"cut": proxy.cut(), "delay": proxy.slow(SHORT[1]), "swallowing": proxy.black_hole(forwards=True)}
        disturbed.enter_context(faults[fault])
        self._ends.append((now() + seconds, disturbed.close))

    def _shut_down(self, worker: Part, how: int) -> None:
        """End a worker in order: a warm shutdown (SIGTERM) waits for its runs, and a cold one (SIGQUIT) does not."""
        send_signal(how, worker.pid())
        try:
            self._wait(lambda: worker.process.poll() is not None, STARTS_WITHIN, "it does not end")
        except TimeoutError:
            self.faults["kill of a worker that did not shut down"] += 1
            worker.kill()

    def _restart(self, part: Part, end: Callable[[], None]) -> None:
        """End a process in some way, and start it again."""
        before = self.history.ready[part.name]
        end()
        part.close()
        part.start()
        self._wait_for_start(part, before)

    def _restart_ended(self, parts: list[Part]) -> None:
        """Start again what has ended by itself, as Celery's workers do when a child dies while the broker is away."""
        for part in parts:
            if part.process.poll() is not None:
                self.faults["processes that ended by themselves"] += 1
                self._restart(part, part.close)

    def _wait_for_start(self, part: Part, before: int) -> None:
        def is_ready() -> bool:
            self.history.read()
            return self.history.ready[part.name] > before

        self._wait(is_ready, STARTS_WITHIN, f"{part.name} does not start")

    def _wait(self, condition: Callable[[], object], limit: float, problem: str) -> None:
        """Wait for a condition, and meanwhile end the faults whose time is over."""

        def holds() -> object:
            self._end_faults()
            return condition()

        wait_until(holds, limit, problem, pause=0.1)

    def _end_faults(self) -> None:
        for fault in [fault for fault in self._ends if fault[0] <= now()]:
            self._ends.remove(fault)
            fault[1]()

    # The end

    def _finish(self) -> None:
        """End all calls, let the workers do the rest, end them, and look for keys that stay."""
        self._wait(lambda: not self._ends, 2 * LONG[1], "a fault does not end")
        for caller in self._callers:
            caller.close()
        time.sleep(PATIENCE)  # or the postman would send again what is being delivered

        def is_drained() -> bool:
            self._restart_ended(self._workers)
            self.history.read()
            if self.postman:
                self.postman.send_again(self.history)
            return not self.history.lost()

        def is_empty() -> bool:
            self.keys_left = [key.decode() for key in self._client.scan_iter(f"{PREFIX}*")]
            return not self.keys_left

        with suppress(TimeoutError):  # the report names what is left
            wait_until(is_drained, DRAINED_WITHIN, "tasks are left", pause=PATIENCE)
        for worker in self._workers:
            self._shut_down(worker, signal.SIGTERM)
        with suppress(TimeoutError):
            wait_until(is_empty, QUEUE_TIMEOUT + PATIENCE, "keys are left", pause=0.2)
        # What is kept beside the keys, such as completion markers, has an expiry.
        self.keys_left += [key.decode() for key in self._client.scan_iter() if self._client.pttl(key) == -1]
        self.history.read()

    def report(self) -> bool:
        """Print what was found; returns whether all is well."""
        history, runs = self.history, Counter(run.kind for run in self.history.runs.values())
        figures = {
            "runs": f"{runs.total()}, {dict(runs)}",
            "runs cut short by a fault": sum(not run.end for run in history.runs.values()),
            "tasks sent": f"{len(history.sent)}, {dict(Counter(history.ended.values()))}",
            "lines of other kinds": dict(sorted(history.counts.items())),
            "faults": f"{self.faults.total()}, {dict(self.faults)}",
            "lost by the Redis transport, sent again": self.postman.sent_again if self.postman else 0,
        }
        findings = {
            "overlaps": history.overlaps(),
            "keys left": self.keys_left,
            "tasks lost": history.lost(),
            "unexpected errors": history.errors,
            "kinds that never ran": sorted(KINDS - set(runs)),
        }
        for name, figure in [*figures.items(), *((name, len(problems)) for name, problems in findings.items())]:
            print(f"{name + ':':45}{figure}")
        for name, problems in findings.items():
            for problem in problems[:5]:
                print(f"{name}: {problem}")
        return not any(findings.values())


def main() -> None:
    """Let it run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="with faults (60)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of all that is random")
    parser.add_argument("--broker", choices=["redis", "classic"], default="redis", help="classic is RabbitMQ")
    parser.add_argument("--log", type=Path, help="where to put the logs and the witness file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"{options.minutes:g} minutes, seed {options.seed}, broker {options.broker}", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="only_one-soak-")))
        if options.log:
            stack.callback(shutil.copytree, folder, options.log, dirs_exist_ok=True)
        soak = Soak(options, folder, stack)
        print("two workers,", "each on a machine of its own" if soak.inside else "on one machine", flush=True)
        try:
            soak.run(options.minutes * 60)
        finally:
            is_well = soak.report()
    print(f"seed {options.seed}: {'all is well' if is_well else 'NOT WELL'}")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
