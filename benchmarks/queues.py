"""Real workers of other queues on two machines, of which one is killed in the middle of a run: is the job done?

    python -m benchmarks.queues [--rounds N] [NAME ...]

Each queue has a virtual environment of its own below `.venv-queues`, from PyPI.
The jobs are those of `examples/queues`, which `docs/queues.md` shows, and which say how they are used.
A round: one machine begins a job; the same work is asked for again, and skipped; the machine is killed at a random
time; the queue gives the job to the other machine, or, if it never does, the work is asked for again.
The witness is a file to which each run appends its ticks. It uses no lock.
Each round is played with the default lease, and with `timeout=300`.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from only_one.testing import redis_server
from rigs.namespaces import elsewhere
from rigs.programs import Programs
from rigs.servers import free_ports
from rigs.waiting import LIMIT, eventually, wait_until

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "examples" / "queues"
ENVIRONMENTS = ROOT / ".venv-queues"
LONG = 300
AT_ONCE = 10
"""Rounds at a time; each has two workers and a server."""

DONE_WITHIN = {None: 200.0, LONG: 700.0}
"""Seconds within which a job must be done after the kill, by the `timeout`."""


@dataclass(frozen=True)
class Queue:
    """What a queue does by itself, and the module of its jobs, which says how it is used.

    Attributes:
        module: in its docstring, `$` is what to install, and the command of a worker; `>>>` is Python, of which the
            last line sends the job of `day`.
        options: more of the worker's command.
        wrong: what its decorator makes of a function; only_one above that must refuse it, except for RQ.
        redelivers: whether it redelivers what a killed worker had begun; else the work is asked for again.
        is_noisy: whether it looks for such jobs only when others arrive.
        is_up: what its log says once a worker is up.
        dies_at: whether the process of the run dies before its machine, so the worker gives the job back.
    """

    module: str
    options: str = ""
    wrong: str = "report"
    redelivers: bool = True
    is_noisy: bool = False
    is_up: str = ""
    dies_at: bool = False

    def usage(self, sign: str) -> list[str]:
        """What the module says behind this sign."""
        text = ast.get_docstring(ast.parse((JOBS / f"{self.module}.py").read_text())) or ""
        return re.findall(rf"(?m)^ *{re.escape(sign)} (.*)", text)


RQ = Queue("rq_jobs", wrong="rq.decorators.job(queue, connection=queue.connection)(function)", is_up="Listening on")
QUEUES = {
    "RQ, work horse": replace(RQ, dies_at=True),
    "RQ, releasing worker": replace(RQ, options=" --worker-class rq_worker.ReleasingWorker", dies_at=True),
    "RQ, machine": RQ,
    "Dramatiq": Queue("dramatiq_jobs"),
    "arq": Queue("arq_jobs", wrong="arq.func(arq_jobs.report)"),
    "taskiq": Queue("taskiq_jobs", is_noisy=True),
    "procrastinate": Queue("procrastinate_jobs"),
    "Dask": Queue("dask_jobs", wrong="dask.delayed(function)"),
    "Huey": Queue("huey_jobs", redelivers=False),
    "Django Tasks": Queue("django_jobs", redelivers=False),
    "APScheduler": Queue(
        "apscheduler_jobs", wrong="scheduler.scheduled_job('interval', seconds=9)(function)", redelivers=False
    ),
}

SENDER = """import asyncio, os, sys
from only_one import ConfigurationError, only_one
run = asyncio.new_event_loop().run_until_complete
{setup}
def function(): ...
try:
    only_one("k")({wrong})
    print("works", flush=True)
except ConfigurationError as error:
    print("refused" if "only_one cannot decorate" in str(error) else error, flush=True)
for line in sys.stdin:
    day = int(line)
    {send}
"""


def environment_of(queue: Queue) -> Path:
    """The virtual environment of a queue, which is made if it is not there."""
    packages = shlex.split(queue.usage("$ pip install")[0])
    folder = ENVIRONMENTS / re.sub(r"\W", "-", " ".join(packages))
    if not (folder / "complete").exists():
        print("installing", *packages, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
        (folder / "complete").touch()
    return folder


class Round:
    """One round of one queue: a server, two machines, a witness."""

    def __init__(self, queue: Queue, timeout: int | None, stack: ExitStack) -> None:
        self.queue, self.limit, self.stack = queue, DONE_WITHIN[timeout], stack
        self.kill_at = random.uniform(0.5, 4)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self.witness = folder / "witness"
        server, self.home = stack.enter_context(redis_server()), environment_of(queue)
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{JOBS}:{ROOT}",
            "REDIS_URL": server.url,
            "PORT": str(free_ports(1)[0]),
            "ONLY_ONE_REDIS_URL": server.url,
            "WITNESS": str(self.witness),
            "DATABASE": str(folder / "database"),
            "DATABASE_URL": f"postgresql://postgres:@/postgres?host={folder / 'database'}",
            "DJANGO_SETTINGS_MODULE": "django_settings",
            "IDLE_SECONDS": "310" if timeout else "8",  # of a message of taskiq
            **({"TIMEOUT": str(timeout)} if timeout else {}),
            **({"DIES_AT": str(int(self.kill_at * 10))} if queue.dies_at else {}),
        }
        worker = ["sh", "-c", queue.usage("$")[1] + queue.options]
        commands = {name: [*(elsewhere(name) or ()), *worker] for name in ("machine-1", "machine-2")}
        self.machines = stack.enter_context(Programs(commands, folder, grace=1, env=self.env, cwd=JOBS))

    def sender(self) -> tuple[Any, str]:
        """A process that sends the job of each day that is written to it, and what it says of the wrong order."""
        *setup, send = self.queue.usage(">>>")
        program = SENDER.format(setup="\n".join(setup), wrong=self.queue.wrong, send=send)
        pipes: dict[str, Any] = {"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [str(self.home / "bin" / "python"), "-c", program]
        sender: Any = subprocess.Popen(command, env=self.env, cwd=JOBS, **pipes)
        self.stack.enter_context(sender)  # it ends when nothing more is written to it
        return sender.stdin, sender.stdout.readline().strip()

    def lines(self) -> list[list[str]]:
        """The run, the machine and the tick of each line of the witness."""
        return [line.split() for line in self.witness.read_text().splitlines()] if self.witness.exists() else []

    def has_ended(self) -> bool:
        """Whether a run has noted its end."""
        return any(line[-1] == "end" for line in self.lines())

    def log(self) -> str:
        """The output of the workers."""
        return "".join(each.text for each in self.machines.running.values())

    def play(self) -> dict[str, Any]:
        """Play it; returns what was seen.

        Raises:
            TimeoutError: no run has begun.
        """
        days, wrong_order = self.sender()

        def send(day: int = 1) -> None:
            print(day, file=days, flush=True)

        self.machines.start("machine-1", "machine-2", words=self.queue.is_up)
        send()
        wait_until(self.lines, LIMIT, "no run has begun")
        send()  # it finds the key busy
        time.sleep(self.kill_at)
        _, machine, _ = self.lines()[0]
        if self.queue.dies_at:  # of which its worker is to tell the queue
            eventually(lambda: "terminated unexpectedly" in self.log(), pause=0.1)
            time.sleep(1)
        self.machines.running[machine].kill_all()
        was_killed = not self.has_ended()
        killed_at = time.monotonic()

        def is_done() -> bool:
            if not self.queue.redelivers or self.queue.is_noisy:
                send(0 if self.queue.is_noisy else 1)
            return self.has_ended()

        eventually(is_done, self.limit, pause=1)
        runs = [line[0] for line in self.lines()]
        changes = sum(run != before for run, before in zip(runs[1:], runs, strict=False))
        outcome = "done" if self.has_ended() else "told" if "AlreadyRunning" in self.log() else "LOST"
        return {
            "outcome": outcome if was_killed else "ended before the kill",
            "seconds": round(time.monotonic() - killed_at),
            "overlaps": changes - (len(set(runs)) - 1),
            "elsewhere": self.lines()[-1][1] != machine,
            "seen": "did not run" in self.log(),
            "above": wrong_order,
        }


def play(name: str, timeout: int | None) -> tuple[str, str]:
    """Play one round of a queue, and print what was seen, with the log if anything is wrong; returns how it ended."""
    killed_with = f"{name}, {timeout or 'default lease'}"
    with ExitStack() as stack:
        a_round = Round(QUEUES[name], timeout, stack)
        try:
            result = a_round.play()
        except OSError as error:  # the other rounds go on
            result = {"outcome": f"{error!r}"}
        if result["outcome"] != "done" or not result["seen"]:
            print(a_round.log()[-3000:])
        print(f"{killed_with}: {result}", flush=True)
    return killed_with, "OVERLAPS" if result.get("overlaps") else result["outcome"]


def main() -> int:
    """Play all rounds, and print how many came out how; returns whether a job was lost."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=10, help="of each queue, with each time")
    options.add_argument("names", nargs="*", help="of the queues, such as arq")
    given = options.parse_args()
    if elsewhere() is None:
        sys.exit("a machine of its own needs unshare, as root or with user namespaces: neither is permitted here")
    wanted = [name.lower() for name in given.names]
    chosen = [name for name in QUEUES if not wanted or name.lower().split(",")[0] in wanted]
    for name in chosen:
        environment_of(QUEUES[name])
    rounds = list(product(chosen, DONE_WITHIN)) * given.rounds
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = Counter(pool.map(play, *zip(*rounds, strict=True)))
    for (killed_with, outcome), number in sorted(outcomes.items()):
        print(f"{number} of {given.rounds} {killed_with}: {outcome}")
    return int(any(outcome not in {"done", "told"} for _, outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
