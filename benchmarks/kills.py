"""Random kills of workers and their children: is all work done, none called done that was not, none beside another?

    [ONLY_ONE_TEST_BROKER=classic|quorum] python -m benchmarks.kills [--rounds N] [--seed N] [--log FILE]

Two workers, the second on another machine as far as process ids go (pid and UTS namespaces of its own, where they can
be made), take units of work for four keys from a broker: a Redis that delivers again after 3 s, or queues of RabbitMQ.
What that broker loses itself, when a worker is killed while a message is on its way to it, is counted and sent again.
In each round some units are sent, and then at a random moment a child, a whole worker or RabbitMQ is killed by SIGKILL.
The first half of the rounds has a result backend, the second none.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from os import environ, kill, killpg
from pathlib import Path
from signal import SIGKILL
from typing import Any

import redis

from benchmarks import kills_app
from only_one.testing import Guarded, redis_server
from tests.live.brokers import KIND, broker
from tests.live.workers import BROKER

ROOT = Path(__file__).parents[1]
KEYS = ["a", "b", "c", "d"]
CHILDREN = 3
UNITS = 3
"""Sent per round."""

WORKERS_KILLED = 0.25
"""How many of the kills are of a whole worker."""

BROKERS_KILLED = 0.1
"""How many are of the broker, where it keeps its messages."""

RUNS_KILLED = 0.8
"""How many of the kills are of what runs, where something does."""

LONGEST_PAUSE = 0.8
LONGEST_UNIT = 0.5
IDLE = 1.0
"""Seconds between two looks for lost messages."""

QUEUE = "celery"
STARTS_WITHIN = 30.0
DRAINED_WITHIN = 60.0


@dataclass
class Unit:
    """A unit of work that was sent."""

    number: int
    id: str
    has_result: bool


@dataclass
class Witness:
    """What the runs have written down."""

    path: Path
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)
    _at: int = 0

    def read(self) -> None:
        """Read what is new."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if line.endswith(b"\n"):
                    self._at += len(line)
                    word, unit, _ = line.decode().split()
                    self.seen[word, int(unit)] += 1

    def units(self, word: str) -> dict[int, int]:
        """How often each unit has had this said of it."""
        return {unit: times for (its, unit), times in self.seen.items() if its == word}


class Machine:
    """Where a worker runs, which is started again when it is killed."""

    def __init__(
        self,
        name: str,
        inside: Sequence[str],
        environment: dict[str, str],
        log: Path,
        app: str = "benchmarks.kills_app",
    ) -> None:
        self.name = name
        self._inside, self._environment, self._log, self._app = inside, environment, log, app
        self._worker: Guarded | None = None

    def start(self) -> None:
        """Start the worker, and wait until it is ready."""
        celery = [sys.executable, "-m", "celery", "-A", self._app, "worker", "-P", "prefork"]
        quiet = ["--without-gossip", "--without-mingle", "-l", "INFO", "-c", str(CHILDREN), "-n", f"{self.name}@%h"]
        with self._log.open("ab") as log:
            ready_before = self._ready()
            command = [*self._inside, *celery, *quiet]
            self._worker = Guarded(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)
        wait_until(lambda: self._ready() > ready_before, STARTS_WITHIN, f"the worker on {self.name} is not ready")

    def _ready(self) -> int:
        return self._log.read_bytes().count(b" ready.") if self._log.exists() else 0

    def kill(self) -> None:
        """Kill the worker and all of its children."""
        if self._worker is not None:
            with suppress(ProcessLookupError):  # it has ended by itself
                killpg(self._worker.pid, SIGKILL)
            self._worker.wait(STARTS_WITHIN)
            self._worker.close()

    def has_ended(self) -> bool:
        """Whether the worker has ended by itself."""
        return self._worker is not None and self._worker.poll() is not None

    def kill_child(self, choose: random.Random) -> bool:
        """Kill one of the worker's children; returns whether there was one."""
        running = self.running()
        found = running if running and choose.random() < RUNS_KILLED else self._children()
        with suppress(ProcessLookupError, IndexError):
            kill(choose.choice(found), SIGKILL)
            return True
        return False

    def _children(self) -> list[int]:
        if self._worker is None:
            return []
        main = children(self._worker.pid)[:1] if self._inside else [self._worker.pid]
        return [child for parent in main for child in children(parent)]

    def running(self) -> list[int]:
        """Those of the children that run something."""
        return [child for child in self._children() if is_running(child)]

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()


def children(pid: int) -> list[int]:
    """The child processes of one."""
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)  # noqa: S607
    return sorted(map(int, done.stdout.split()))


def is_running(pid: int) -> bool:
    """Whether a child has the file open that a run has; False where that cannot be seen."""
    with suppress(OSError):
        return any(kills_app.ALONE in str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def namespaces() -> list[str]:
    """The command that starts another as if on a machine of its own; empty where that is not permitted."""
    program = shutil.which("unshare")
    for user in ([], ["--user", "--map-root-user"]):
        command = [program or "unshare", *user, "--fork", "--kill-child", "--pid", "--uts", "--mount-proc"]
        if program and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return []


def wait_until(condition: Callable[[], object], limit: float, problem: str) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: if it does not come to hold in time.
    """
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(0.02)


class Postman:
    """Sees by MONITOR which messages are put into the queue and which arrive, and sends those again that got lost.

    Celery's Redis transport takes a message out of its queue and writes it down as unacknowledged in two steps: one
    that is on its way to a worker while that is killed is nowhere any more. No task can do anything about that.
    """

    def __init__(self, url: str) -> None:
        self.lost = 0
        self._url = url
        self._under_way: dict[str, tuple[float, Any]] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        client: Any = redis.Redis.from_url(self._url, socket_timeout=None)
        with suppress(redis.RedisError), client.monitor() as monitor:
            for seen in monitor.listen():
                name, _, rest = seen["command"].partition(" ")
                key, _, rest = rest.partition(" ")
                if name in {"LPUSH", "RPUSH"} and key == QUEUE:
                    message = json.loads(rest)
                    self._under_way[message["properties"]["delivery_tag"]] = time.monotonic(), message
                elif name == "HSET" and key == "unacked":
                    self._under_way.pop(rest.partition(" ")[0], None)

    def send_again(self, client: Any) -> None:
        """Send again what was taken from the queue, and has not arrived."""
        queued = {json.loads(each)["properties"]["delivery_tag"] for each in client.lrange(QUEUE, 0, -1)}
        for tag, (sent, message) in list(self._under_way.items()):
            if tag not in queued and time.monotonic() > sent + IDLE and tag in self._under_way:
                del self._under_way[tag]
                self.lost += 1
                client.lpush(QUEUE, json.dumps(message))


class Trial:
    """What is sent, killed and found."""

    def __init__(self, url: str, folder: Path, seed: int, rounds: int) -> None:
        self.kills: Counter[str] = Counter()
        self.units: list[Unit] = []
        self.witness = Witness(folder / "witness")
        self.drained_after = 0.0
        self.left = 0
        self._url, self._folder, self._rounds = url, folder, rounds
        self._random = random.Random(seed)
        self._round = 0
        self._results: dict[int, dict[str, Any]] = {}

    def run(self, inside: list[str]) -> None:
        """All rounds, with a result backend and without."""
        with redis.Redis.from_url(self._url) as client, broker(client, self._url, kills_app.app) as self._broker:
            self.postman = Postman(self._url)
            kills_app.app.conf.update({"broker_url": self._broker.url, **self._broker.settings})
            for rounds, results in [(self._rounds - self._rounds // 2, True), (self._rounds // 2, False)]:
                kills_app.app.conf.update(result_backend=self._url if results else "disabled://")
                with self._machines(inside, results=results) as machines:
                    for _ in range(rounds):
                        self._one_round(machines, results=results)
                    self._drain(client, machines)
            self._results = {
                unit.number: json.loads(client.get(f"celery-task-meta-{unit.id}") or "{}")
                for unit in self.units
                if unit.has_result
            }

    @contextmanager
    def _machines(self, inside: list[str], *, results: bool) -> Iterator[list[Machine]]:
        told = {
            kills_app.URL: self._url,
            kills_app.RESULTS: self._url if results else "disabled://",
            kills_app.FOLDER: str(self._folder),
            BROKER: self._broker.url,
        }
        with ExitStack() as stack:
            machines = [
                Machine(name, where, {**environ, **told}, self._folder / f"log-{name}")
                for name, where in [("here", []), ("there", inside)]
            ]
            for each in machines:
                stack.callback(each.close)
                each.start()
            yield machines

    def _one_round(self, machines: list[Machine], *, results: bool) -> None:
        choose = self._random
        self._start_again(machines)
        for _ in range(UNITS):
            task = choose.choice([kills_app.loud, kills_app.silent])
            number, retries = len(self.units), choose.choice([0, 0, 1, 2])
            answer = task.apply_async((choose.choice(KEYS), number, choose.uniform(0, LONGEST_UNIT), retries))
            self.units.append(Unit(number, answer.id, has_result=results and task is kills_app.loud))
            with (self._folder / "sent").open("a", encoding="ascii") as file:
                file.write(f"{number} {answer.id}\n")
        time.sleep(choose.uniform(0, LONGEST_PAUSE))
        machine = choose.choice(machines)
        if choose.random() < RUNS_KILLED:
            with suppress(TimeoutError):
                wait_until(machine.running, LONGEST_PAUSE, "nothing runs")
            time.sleep(choose.uniform(0, LONGEST_UNIT / 2))
        what = choose.random()
        if what < BROKERS_KILLED and self._broker.crash():
            self.kills["brokers"] += 1
        elif what < BROKERS_KILLED + WORKERS_KILLED:
            machine.kill()
            self.kills["workers"] += 1
            machine.start()
        elif machine.kill_child(choose):
            self.kills["children"] += 1
        self._round += 1
        self._show(f"round {self._round} of {self._rounds}")

    def _start_again(self, machines: list[Machine]) -> None:
        """Start the workers again that have ended: Celery's do when a child ends while the broker is away."""
        for machine in machines:
            if machine.has_ended():
                machine.close()
                machine.start()
                self.kills["ended"] += 1

    def _drain(self, client: Any, machines: list[Machine]) -> None:
        """Wait until nothing is left to be done."""
        began = looked = time.monotonic()

        def is_drained() -> bool:
            nonlocal looked
            self._start_again(machines)
            self.witness.read()
            are_done = self._done() == len(self.units)
            # RabbitMQ's command takes a second to answer, so it is asked at the end only.
            self.left = self._broker.messages() if are_done or KIND == "redis" else -1
            if KIND == "redis" and not self.left and time.monotonic() > looked + IDLE:
                looked = time.monotonic()
                self.postman.send_again(client)
            return are_done and not self.left

        with suppress(TimeoutError):  # what is missing is reported
            wait_until(is_drained, DRAINED_WITHIN, "it is not drained")
        self.drained_after = max(self.drained_after, time.monotonic() - began)
        self._show("drained")

    def _done(self) -> int:
        return len(self.witness.units("done"))

    def _show(self, what: str) -> None:
        if not sys.stderr.isatty() and self._round % 10 and what != "drained":
            return
        self.witness.read()
        bar = f"[{'#' * (30 * self._round // self._rounds):30}]"
        print(f"{bar} {what}, {self._done()} of {len(self.units)} units done", file=sys.stderr)

    def report(self) -> bool:
        """Print what was found; returns whether all is as it should be."""
        done, overlaps = self.witness.units("done"), self.witness.units("overlap")
        begun, ended = self.witness.units("begin"), self.witness.units("end")
        retried = self.witness.units("retry")
        undone = [unit.number for unit in self.units if unit.number not in done]
        states = Counter(result.get("status", "none") for result in self._results.values())
        successes = {
            unit: result["result"] for unit, result in self._results.items() if result.get("status") == "SUCCESS"
        }
        wrong = [unit for unit, result in successes.items() if unit not in done or result != unit]
        hit = sum(begun.values()) - sum(ended.values()) - sum(retried.values())
        print(
            f"kills: {self.kills['children']} of children, {self.kills['workers']} of workers, "
            f"{self.kills['brokers']} of the broker; runs hit by them: {hit}; "
            f"workers that Celery ended itself: {self.kills['ended']}"
        )
        print(f"units of work: {len(self.units)}, on {len(KEYS)} keys; runs: {sum(begun.values())}")
        print(f"  retried at least once:            {len(retried):6}")
        print(f"  done once:                        {sum(times == 1 for times in done.values()):6}")
        print(f"  done again after a kill:          {sum(times > 1 for times in done.values()):6}")
        print(f"  lost by Celery's transport, resent: {self.postman.lost:4}")
        print(f"  messages left:                    {self.left:6}")
        print(f"  never done:                       {len(undone):6}  {undone[:10] or ''}")
        print(f"  successful without being done:    {len(wrong):6}  {wrong[:10] or ''}")
        print(f"  runs beside another of their key: {sum(overlaps.values()):6}  {list(overlaps)[:10] or ''}")
        print(f"results: {dict(states)}; the last was done {self.drained_after:.1f} s after the last kill")
        return not undone and not wrong and not overlaps and not self.left and set(states) <= {"SUCCESS"}


def main() -> None:
    """Kill, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="kills (200)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of all that is random")
    parser.add_argument("--log", type=Path, help="where to put what the workers have said, and the witness")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    inside = namespaces()
    print(f"{options.rounds} rounds, seed {options.seed}, broker {KIND}")
    print(
        f"two workers, {'each on a machine of its own' if inside else 'on one machine: no namespaces can be made here'}"
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, redis_server() as server:
        trial = Trial(server.url, Path(folder), options.seed, options.rounds)
        try:
            trial.run(inside)
            is_well = trial.report()
        finally:
            if options.log:
                shutil.copytree(folder, options.log, dirs_exist_ok=True)
    print(f"{time.monotonic() - began:.0f} s: {'all is well' if is_well else 'NOT WELL'}")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
