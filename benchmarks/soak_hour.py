"""An hour of faults: workers, beat, producers and plain processes, of which none may run beside another.

    python -m benchmarks.soak_hour [--minutes N] [--seed N] [--broker redis|classic]

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import redis

from benchmarks.soak_hour_app import BROKER, LOCKS, PREFIX, QUEUE_TIMEOUT, TASKS, WITNESS
from only_one import testing
from only_one.clock import now
from rigs.namespaces import elsewhere
from rigs.programs import Programs, celery_worker
from rigs.proxy import Proxy
from rigs.rabbitmq import rabbitmq_server
from rigs.servers import redis_server
from rigs.waiting import eventually

ROOT = Path(__file__).parents[1]
CALM = (0.5, 4.0)
"""The shortest and longest time in seconds between two faults."""

SHORT, LONG = (0.1, 0.8), (3.2, 6.0)
"""Seconds of a pause or a fault of the network: shorter, and longer than every lease."""

ENDS_WITHIN = 60.0
DRAINED_WITHIN = 120.0
PATIENCE = 3.0
"""Seconds after a fault of the network in which a release may still be unconfirmed."""

APP = "benchmarks.soak_hour_app"
WORKERS = ["here", "there"]
PROGRAMS = ["send_tasks 1", "send_tasks 2", "call_functions 1", "call_functions 2"]
"""What each of them calls, and its number."""

CALLERS = ["beat", *PROGRAMS]

KINDS = {*TASKS, "plain", "plain_async"}


class History:
    """All that the witness file tells. It asks neither the locks nor the servers.

    Attributes:
        runs: what is known of each run, by its id. It believed until `held_until` that it held its key, or never if
            that is missing: it was paused before. Its `end` is "done", "retry", or missing if it was killed.
        tasks: what is known of each task, by its id: when it was published, and how it has ended without a run.
    """

    def __init__(self, path: Path) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        path.touch()
        self._path, self._position = path, 0

    def read(self) -> None:
        """Read the lines that are new; the last one may be half written."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            while (line := file.readline()).endswith(b"\n"):
                self._position = file.tell()
                kind, name, facts = json.loads(line)
                vars(self)[kind].setdefault(name, {}).update(facts)

    def done(self) -> list[dict[str, Any]]:
        """The runs that have done what a task is for, in the order in which they began."""
        done = [run for run in self.runs.values() if run["task"] and run.get("end") == "done"]
        return sorted(done, key=itemgetter("begun_at"))

    def ended(self) -> dict[str, str]:
        """How each task has ended, by its id."""
        ended = {id_: task["end"] for id_, task in self.tasks.items() if "end" in task}
        return ended | {run["task"]: "done" for run in self.done()}

    def errors(self) -> list[str]:
        """The errors that are not ours."""
        return [f"{id_}: {task['error']}" for id_, task in self.tasks.items() if "error" in task]

    def overlaps(self) -> list[str]:
        """The runs that began, and held their key, while another run held it."""
        problems = []
        latest: dict[str, Any] = {}
        have_held = [run for run in self.runs.values() if "held_until" in run]
        for run in sorted(have_held, key=itemgetter("begun_at")):
            before = latest.get(run["key"])
            if before and run["begun_at"] < before["held_until"]:
                problems.append(f"{before} and {run}")
            latest[run["key"]] = max(before or run, run, key=itemgetter("held_until"))
        return problems

    def lost(self) -> list[str]:
        """The tasks with late acknowledgement that neither ran, nor were skipped, nor failed with an error of ours."""
        newest = {run["key"]: run["begun_at"] for run in self.done()}
        ended = self.ended()
        sent = {id_: task for id_, task in self.tasks.items() if "sent_at" in task}
        problems = []
        for id_, task in sent.items():
            has_newer = newest.get(task["key"], 0.0) > task["sent_at"]
            if id_ not in ended and task["name"] != "early":
                problems.append(f"{task['name']} {id_}")
            elif ended.get(id_) == "skipped" and task["name"] == "newest" and not has_newer:
                problems.append(f"{task['name']} {id_} was dropped, and no newer one has run")
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
        ended = history.ended()
        queued = {json.loads(each)["properties"]["delivery_tag"] for each in self._client.lrange("celery", 0, -1)}
        for tag, message in list(self._on_the_way.items()):
            is_needed = tag not in queued and message["headers"]["id"] not in ended
            if is_needed and self._on_the_way.pop(tag, None):
                self.sent_again += 1
                self._client.lpush("celery", json.dumps(message))


class Soak:
    """The servers and processes, and the faults that they meet."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.faults: Counter[str] = Counter()
        self.history = History(folder / "witness")
        self.keys_left: list[str] = []
        self._random = random.Random(options.seed)
        self._ends: list[threading.Timer] = []
        persistence = ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(folder)]
        self._locks = stack.enter_context(redis_server(*persistence))
        self._client: Any = stack.enter_context(redis.Redis.from_url(self._locks.url))
        self._proxy = stack.enter_context(Proxy(self._locks.url))
        self.postman = self._rabbitmq = None
        if options.broker == "redis":
            url = stack.enter_context(testing.redis_server()).url
            self.postman = Postman(url)
        else:
            self._rabbitmq = stack.enter_context(rabbitmq_server())
            url = self._rabbitmq.make_place()
        self._commands = commands(self._random)
        environment = {**os.environ, LOCKS: self._proxy.url, BROKER: url, WITNESS: str(folder / "witness")}
        self._programs = stack.enter_context(Programs(self._commands, folder, cwd=ROOT, env=environment))

    def run(self, seconds: float) -> None:
        """Let everything run for so long, with a fault every few seconds; then let it end, and look for what is left.

        Raises:
            TimeoutError: if a process does not start.
        """
        self._programs.start(*self._commands)
        ends_at = now() + seconds
        while now() < ends_at:
            time.sleep(self._random.uniform(*CALM))
            self._restart_ended(*self._commands)
            fault = self._cause_a_fault()
            self.faults[fault] += 1
            self.history.read()
            print(f"{len(self.history.runs)} runs; {len(self.history.overlaps())} overlaps; {fault}", flush=True)
        self._finish()

    # The processes

    def _restart(self, worker: str, how: int) -> None:
        self._shut_down(worker, how)
        self._programs.start(worker)

    def _restart_ended(self, *names: str) -> None:
        """Start again what has ended by itself, as Celery's workers do when a child dies while the broker is away."""
        for name in filter(self._has_ended, names):
            self.faults["processes that ended by themselves"] += 1
            self._programs.start(name)

    def _has_ended(self, name: str) -> bool:
        return self._programs.running[name].poll() is not None

    def _program(self, name: str) -> list[int]:
        """The program's process, if it is there: the child of what has made its namespaces, if it has any."""
        pid = self._programs.running[name].pid
        return [pid] if self._commands[name][0] == sys.executable else children_of(pid)[:1]

    def _a_child(self, name: str) -> list[int]:
        children = [child for pid in self._program(name) for child in children_of(pid)]
        return [self._random.choice(children)] if children else []

    # The faults

    def _cause_a_fault(self) -> str:
        """Choose a fault, and cause it; returns its name."""
        worker, caller = self._random.choice(WORKERS), self._random.choice(CALLERS)
        # The weight of each fault, and what it does.
        faults: dict[str, tuple[float, Callable[[], object]]] = {
            "kill of a child": (8, lambda: send_signal(signal.SIGKILL, self._a_child(worker))),
            "kill of a worker": (2, lambda: self._programs.crash(worker)),
            "kill of a caller": (3, lambda: self._programs.crash(caller)),
            "pause": (6, lambda: self._for_a_while(self._paused())),
            "cut": (2, lambda: self._for_a_while(self._proxy.cut())),
            "delay": (2, lambda: self._for_a_while(self._proxy.slow(SHORT[1]))),
            "swallowing": (2, lambda: self._for_a_while(self._proxy.black_hole(forwards=True))),
            "restart of the server": (1, self._locks.crash),
            "warm shutdown": (1, lambda: self._restart(worker, signal.SIGTERM)),
            "cold shutdown": (1, lambda: self._restart(worker, signal.SIGQUIT)),
        }
        if self._rabbitmq:  # a Redis keeps its messages in memory
            faults["kill of the broker"] = (0.3, self._rabbitmq.crash)
        name = self._random.choices(list(faults), [weight for weight, _ in faults.values()])[0]
        faults[name][1]()
        return name

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Stop one process, or a worker with all of its children, and continue it at the end of the block."""
        name = self._random.choice([*WORKERS, *WORKERS, *CALLERS])
        is_a_child = name in WORKERS and self._random.random() < 2 / 3
        pids = self._a_child(name) if is_a_child else [-self._programs.running[name].pid]
        send_signal(signal.SIGSTOP, pids)
        yield
        send_signal(signal.SIGCONT, pids)

    def _for_a_while(self, disturbance: AbstractContextManager[None]) -> None:
        disturbed = ExitStack()
        disturbed.enter_context(disturbance)
        seconds = self._random.uniform(*self._random.choice([SHORT, LONG]))
        timer = threading.Timer(seconds, disturbed.close)
        timer.daemon = True
        timer.start()
        self._ends.append(timer)

    def _shut_down(self, worker: str, how: int) -> None:
        """End a worker in order: a warm shutdown (SIGTERM) waits for its runs, and a cold one (SIGQUIT) does not."""
        send_signal(how, self._program(worker))
        if not eventually(lambda: self._has_ended(worker), ENDS_WITHIN, pause=0.1):
            self.faults["worker that did not shut down"] += 1

    # The end

    def _finish(self) -> None:
        """End all calls, let the workers do the rest, end them, and look for keys that stay."""
        for end in self._ends:
            end.join()
        self._programs.close(*CALLERS)
        time.sleep(PATIENCE)  # or the postman would send again what is being delivered

        def is_drained() -> bool:
            self._restart_ended(*WORKERS)
            self.history.read()
            if self.postman:
                self.postman.send_again(self.history)
            return not self.history.lost()

        def is_empty() -> bool:
            self.keys_left = [key.decode() for key in self._client.scan_iter(f"{PREFIX}*")]
            return not self.keys_left

        eventually(is_drained, DRAINED_WITHIN, pause=PATIENCE)  # the report names what is left
        for worker in WORKERS:
            self._shut_down(worker, signal.SIGTERM)
        eventually(is_empty, QUEUE_TIMEOUT + PATIENCE, pause=0.2)
        # What is kept beside the keys, such as completion markers, has an expiry.
        self.keys_left += [key.decode() for key in self._client.scan_iter() if self._client.pttl(key) == -1]
        self.history.read()

    def report(self) -> bool:
        """Print what was found; returns whether all is well."""
        history, runs = self.history, Counter(run["kind"] for run in self.history.runs.values())
        print("runs:", runs.total(), dict(runs))
        print("runs cut short by a fault:", sum("end" not in run for run in history.runs.values()))
        print("tasks sent:", len(history.tasks), dict(Counter(history.ended().values())))
        print("faults:", self.faults.total(), dict(self.faults))
        print("lost by the Redis transport, sent again:", self.postman.sent_again if self.postman else 0)
        findings = {
            "overlaps": history.overlaps(),
            "keys left": self.keys_left,
            "tasks lost": history.lost(),
            "unexpected errors": history.errors(),
            "kinds that never ran": sorted(KINDS - set(runs)),
        }
        for name, problems in findings.items():
            print(f"{name}: {len(problems)}", *problems[:5], sep="\n    ")
        return not any(findings.values())


def commands(dice: random.Random) -> dict[str, list[str]]:
    """How each program is started; one worker is on a machine of its own, where that is permitted."""
    inside = elsewhere() or []
    print("two workers,", "each on a machine of its own" if inside else "on one machine", flush=True)
    here, there = (celery_worker(APP, "-n", f"{name}@%h") for name in WORKERS)
    beat = [sys.executable, "-m", "celery", "-A", APP, "beat", "-S", "celery.beat:Scheduler", "--pidfile="]
    calls = {name: f"{name.split()[0]}({dice.randrange(1_000_000)})" for name in PROGRAMS}
    programs = {name: [sys.executable, "-c", f"import {APP} as app; app.{call}"] for name, call in calls.items()}
    return {"here": here, "there": [*inside, *there], **programs, "beat": beat}


def children_of(pid: int) -> list[int]:
    """The child processes of a process."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def send_signal(number: int, pids: list[int]) -> None:
    """Send a signal to processes, if they are there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> None:
    """Let it run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="with faults (60)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of all that is random")
    parser.add_argument("--broker", choices=["redis", "classic"], default="redis", help="classic is RabbitMQ")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="only_one-soak-"))
    print(f"{options.minutes:g} minutes, seed {options.seed}, broker {options.broker}, logs in {folder}", flush=True)
    with ExitStack() as stack:
        soak = Soak(options, folder, stack)
        try:
            soak.run(options.minutes * 60)
        finally:
            is_well = soak.report()
    print(f"seed {options.seed}: {'all is well' if is_well else 'NOT WELL'}")
    if is_well:
        shutil.rmtree(folder)
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
