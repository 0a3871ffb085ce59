"""Random kills of what queues and what runs: is each task that was queued done, or its key free again soon?

    python -m benchmarks.queue_kills [--rounds N] [--queue-timeout SECONDS] [--seed N] [--log FILE]

Processes call tasks that are covered from queued to finished, with `timeout=3600`, on a few dozen keys all the time;
two workers run them. In each round one of them is killed by SIGKILL: what calls, in the middle of a call; a child of a
worker; or a worker with all of its children, or both workers. The broker delivers again after 3 s what a killed worker
had; what is lost on its way to one, no task can do anything about, but its key is to become free.
For each id that a call has returned, the time runs from the first kill after the last that was heard of it: it is to
reach a final state, or its key is to be free, within 5 s more than the queue's timeout. A key is free when it is gone,
when it has been taken for another task since, or when its holder is a dead process that a call would take it over from.
At the end a new call for each key is to be run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import environ, getloadavg
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from typing import Any

import redis
from celery.states import READY_STATES

from benchmarks import queue_kills_app
from benchmarks.kills import Machine, wait_until
from benchmarks.queue_kills_app import FOLDER, KEYS, POINTS, PREFIX, QUEUE_TIMEOUT, TIMEOUT, URL, ordinary
from only_one.lock.holder import Holder, is_dead
from only_one.testing import Guarded, redis_server

ROOT = Path(__file__).parents[1]
PRODUCERS = 3
KINDS = {"producer": 9, "child": 7, "worker": 4}
"""What is killed, and how often."""

BOTH_KILLED = 0.25
"""How many of the kills of workers are of both."""

LONGEST_PAUSE = 0.8
MARGIN = 5.0
"""Seconds within which, beyond the queue's timeout, all is to be over."""

DIES_WITHIN = 10.0
PROBED_WITHIN = 20.0
LOOKS_EVERY = 0.2


@dataclass
class Known:
    """What is known of an id that was returned.

    Attributes:
        key: the key of its call.
        seen: when something was last heard of it.
        status: its final state, when it has one.
        free: why its key was found free, if it was, after the first kill since.
    """

    key: str
    seen: float
    status: str = ""
    free: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it is still waited for."""
        return not self.status and not self.free


class Watch(threading.Thread):
    """Reads what the processes write down, and asks the server, all the time."""

    def __init__(self, client: Any, witness: Path, limit: float) -> None:
        super().__init__(daemon=True)
        self.kills: list[float] = []
        self.known: dict[str, Known] = {}
        self.returned = 0
        self.ready: set[int] = set()
        self.overlaps: list[str] = []
        self.points: Counter[str] = Counter()
        self.longest = {"final": 0.0, "free": 0.0}
        self.violations: dict[str, str] = {}
        self._client, self._witness, self._limit = client, witness, limit
        self._at = 0
        self._begun: dict[str, float] = {}
        self._is_ended = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Look until told to end."""
        try:
            while not self._is_ended.wait(LOOKS_EVERY):
                self.look()
        except BaseException as error:
            self.problem = error
            raise

    def end(self) -> None:
        """Look no more."""
        self._is_ended.set()
        self.join()
        if self.problem is not None:
            raise self.problem

    def open(self) -> list[str]:
        """The ids that are waited for."""
        return [task_id for task_id, known in list(self.known.items()) if known.is_open]

    def look(self) -> None:
        """See what there is now."""
        self._read()
        waits = [task_id for task_id, known in self.known.items() if not known.status]
        found = self._client.mget([f"celery-task-meta-{task_id}" for task_id in waits]) if waits else []
        for task_id, meta in zip(waits, found, strict=True):
            known, at = self.known[task_id], time.monotonic()
            kill = self._first_kill_after(known.seen)
            status = json.loads(meta)["status"] if meta else ""
            if status in READY_STATES:
                known.status = status
                self._lasted("final", kill, at)
            elif kill is not None and not known.free:
                value = self._client.get(PREFIX + known.key)
                known.free = why_free(value, task_id)
                if known.free:
                    self._lasted("free", kill, at)
                elif at > kill + self._limit:
                    self.violations[task_id] = f"{known.key}, {at - kill:.1f} s after the kill: {value!r}"

    def _read(self) -> None:
        if not self._witness.exists():
            return
        with self._witness.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                at, word, *rest = line.decode().split()
                self._note(float(at), word, *rest)

    def _note(self, at: float, word: str, what: str, key: str = "") -> None:
        if word == "returned":
            self.returned += 1
            self.known.setdefault(what, Known(key, max(at, self._begun.get(what, 0))))
        elif word == "begin":
            self._begun[what] = at
            if known := self.known.get(what):
                known.seen, known.free = at, ""  # it lives, so it is waited for again
        elif word == "overlap":
            self.overlaps.append(f"{key} {what}")
        elif word == "ready":
            self.ready.add(int(what))
        elif word == "dies":
            self.points[POINTS[int(what)]] += 1

    def _first_kill_after(self, moment: float) -> float | None:
        index = bisect_right(self.kills, moment)
        return self.kills[index] if index < len(self.kills) else None

    def _lasted(self, what: str, kill: float | None, at: float) -> None:
        if kill is not None:
            self.longest[what] = max(self.longest[what], at - kill)


def why_free(value: bytes | None, task_id: str) -> str:
    """Why a key, under which there is `value`, is free for others than a task; empty if it is not."""
    if value is None:
        return "gone"
    if is_dead(value):
        return "of a dead process"
    holder = Holder.parse(value)
    return "another's since" if holder is None or holder.task_id != task_id else ""


def close_all(producers: list[Guarded]) -> None:
    """End all that call."""
    for producer in producers:
        producer.close()


class Trial:
    """What is called, killed and found."""

    def __init__(self, url: str, folder: Path, options: argparse.Namespace) -> None:
        self._client: Any = redis.Redis.from_url(url)
        self._folder = folder
        self._rounds = options.rounds
        self._limit = options.queue_timeout + MARGIN
        self._random = random.Random(options.seed)
        self._kills: Counter[str] = Counter()
        self._watch = Watch(self._client, folder / "witness", self._limit)
        self._environment = {**environ, URL: url, FOLDER: str(folder), QUEUE_TIMEOUT: str(options.queue_timeout)}
        self._held: dict[str, bytes] = {}
        self._not_run: list[str] = []
        queue_kills_app.use(url, options.queue_timeout)

    def run(self) -> None:
        """All rounds, and what is to come of them."""
        with ExitStack() as stack:
            names, app = ("first", "second"), "benchmarks.queue_kills_app"
            machines = [Machine(name, [], self._environment, self._folder / f"log-{name}", app) for name in names]
            for machine in machines:
                stack.callback(machine.close)
                machine.start()
            producers = [self._producer() for _ in range(PRODUCERS)]
            stack.callback(close_all, producers)
            self._watch.start()
            self._wait(lambda: self._watch.returned >= PRODUCERS, DIES_WITHIN, "nothing is called")
            for number in range(1, self._rounds + 1):
                self._one_round(machines, producers)
                self._show(number, f"round {number} of {self._rounds}")
            for producer in producers:
                producer.send_signal(SIGTERM)
            for producer in producers:
                producer.wait(DIES_WITHIN)
            self._see_the_end()
            self._probe()
            self._watch.end()

    def _producer(self) -> Guarded:
        call = "import sys; from benchmarks.queue_kills_app import Producer; Producer(int(sys.argv[1])).run()"
        command = [sys.executable, "-c", call, str(self._random.randrange(1_000_000))]
        with (self._folder / "log-producers").open("ab") as log:
            return Guarded(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def _one_round(self, machines: list[Machine], producers: list[Guarded]) -> None:
        choose = self._random
        time.sleep(choose.uniform(0, LONGEST_PAUSE))
        kind = choose.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "producer":
            index = choose.randrange(PRODUCERS)
            self._kill_producer(producers[index])
            producers[index] = self._producer()
        elif kind == "child":
            self._kills["children of workers"] += choose.choice(machines).kill_child(choose)
            self._killed()
        else:
            killed = machines if choose.random() < BOTH_KILLED else [choose.choice(machines)]
            for machine in killed:
                machine.kill()
                self._killed()
            self._kills["workers"] += len(killed)
            for machine in killed:
                machine.start()

    def _kill_producer(self, producer: Guarded) -> None:
        """Have it killed in the middle of a call, when it has begun to call."""
        self._wait(lambda: producer.pid in self._watch.ready, DIES_WITHIN, "a process does not begin to call")
        producer.send_signal(SIGUSR1)
        self._wait(lambda: producer.poll() is not None, DIES_WITHIN, "a process that calls is not killed")
        self._killed()
        producer.close()
        self._kills["processes that call"] += 1

    def _killed(self) -> None:
        self._watch.kills.append(time.monotonic())

    def _see_the_end(self) -> None:
        """Wait until all is over, as long as it may take after the last kill."""
        until = self._watch.kills[-1] + self._limit
        ends = time.monotonic()

        def is_over() -> bool:
            self._held = self._keys_held()
            return time.monotonic() > ends + 2 * LOOKS_EVERY and not self._held and not self._watch.open()

        self._show(self._rounds, "waiting for the rest")
        with suppress(TimeoutError):  # what is left is reported
            self._wait(is_over, max(0.0, until - time.monotonic()), "something is left")
        for task_id in self._watch.open():
            self._watch.violations.setdefault(task_id, f"{self._watch.known[task_id].key}, at the end")

    def _keys_held(self) -> dict[str, bytes]:
        """The keys that are there, and are not those of dead processes."""
        keys = list(self._client.scan_iter(f"{PREFIX}*", count=1000))
        found = zip(keys, self._client.mget(keys) if keys else [], strict=True)
        return {key.decode(): value for key, value in found if value is not None and not is_dead(value)}

    def _probe(self) -> None:
        """Call a task for each key."""
        called = {ordinary.delay(f"k{number}", 0, 0).id: f"k{number}" for number in range(KEYS)}

        def not_run() -> list[str]:
            found = self._client.mget([f"celery-task-meta-{task_id}" for task_id in called])
            return [
                key
                for (task_id, key), meta in zip(called.items(), found, strict=True)
                if task_id in self._watch.known or not meta or json.loads(meta)["status"] != "SUCCESS"
            ]

        with suppress(TimeoutError):
            self._wait(lambda: not not_run(), PROBED_WITHIN, "a new call is not run")
        self._not_run = not_run() + [f"k{number}" for number in range(KEYS) if f"k{number}" not in called.values()]

    def _wait(self, condition: Any, limit: float, problem: str) -> None:
        def holds() -> object:
            if self._watch.problem is not None:
                raise self._watch.problem
            return condition()

        wait_until(holds, limit, problem)

    def _show(self, number: int, what: str) -> None:
        if not sys.stderr.isatty() and number % 10 and number != self._rounds:
            return
        bar = f"[{'#' * (30 * number // self._rounds):30}]"
        waits = f"{len(self._watch.known)} ids returned, {len(self._watch.open())} are waited for"
        print(f"{bar} {what}, {waits}", file=sys.stderr)

    def report(self) -> bool:
        """Print what was found; returns whether all is as it should be."""
        watch, known = self._watch, self._watch.known.values()
        states = Counter(each.status for each in known if each.status)
        free = Counter(each.free for each in known if not each.status and each.free)
        limit = f"{self._limit:g} s"
        print(f"kills: {', '.join(f'{times} of {what}' for what, times in sorted(self._kills.items()))}")
        print(f"  of a call: {', '.join(f'{watch.points[point]} {point}' for point in POINTS)}")
        print(f"calls that returned an id: {watch.returned}, of {len(known)} tasks, on {KEYS} keys")
        print(f"  reached a final state:                  {sum(states.values()):6}  {dict(states)}")
        print(f"  did not, but their key was free:        {sum(free.values()):6}  {dict(free) or ''}")
        print(f"  neither within {limit} of the kill:         {len(watch.violations):6}")
        print(f"  runs beside another of their key:       {len(watch.overlaps):6}  {watch.overlaps[:5] or ''}")
        print(f"keys held {limit} after the last kill:       {len(self._held):6}  {list(self._held)[:5] or ''}")
        print(f"new calls at the end that were not run:   {len(self._not_run):6}  {self._not_run[:5] or ''}")
        print(
            f"at the longest it took {watch.longest['final']:.1f} s from the kill to a final state, "
            f"and {watch.longest['free']:.1f} s until a key was free"
        )
        for task_id, what in list(watch.violations.items())[:10]:
            print(f"  {task_id}: {what}")
        return not (watch.violations or watch.overlaps or self._held or self._not_run)


def main() -> None:
    """Kill, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="kills (100)")
    parser.add_argument("--queue-timeout", type=float, default=60.0, help="seconds (60)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of all that is random")
    parser.add_argument("--log", type=Path, help="where to put what the workers have said, and the witness")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    print(f"{options.rounds} rounds, seed {options.seed}, load {getloadavg()[0]:.1f} at the beginning")
    print(f"timeout={TIMEOUT}, queue_timeout={options.queue_timeout:g}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, redis_server() as server:
        trial = Trial(server.url, Path(folder), options)
        try:
            trial.run()
            is_well = trial.report()
        finally:
            if options.log:
                shutil.copytree(folder, options.log, dirs_exist_ok=True)
    print(f"{time.monotonic() - began:.0f} s: {'all is well' if is_well else 'NOT WELL'}")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
