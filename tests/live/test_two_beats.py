"""One schedule on two machines whose clocks differ by seconds: a tick of both runs once.

This file is also the application: `celery -A tests.live.test_two_beats beat`.
The witness is a file that is opened to append, and knows nothing of the lock.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from celery import Celery
from celery.schedules import schedstate, schedule
from celery.signals import before_task_publish

from only_one import configure, only_one
from only_one.testing import guarded, redis_server
from tests.waiting import LIMIT, eventually

INTERVAL = 3.0
APART = 1.2
"""Seconds between the two machines' clocks."""
AT_LEAST = 2.1
"""Longer than the clocks are apart, and shorter than the interval."""
TICKS = 3

ROOT = Path(__file__).parents[2]
NAME = "tests.live.test_two_beats"

app = Celery("two beats")


def note(*words: object) -> None:
    """Append a line to the witness's file, which other processes do, too."""
    with Path(os.environ["BEATS_WITNESS"]).open("ab", buffering=0) as file:
        file.write(" ".join(map(str, words)).encode() + b"\n")


def ticks_until(moment: float) -> float:
    """How many ticks there have been, by this machine's clock."""
    return (moment + float(os.environ["BEATS_CLOCK"])) / INTERVAL


class EveryTick(schedule):  # type: ignore[misc]  # Celery has no types
    """Due whenever this machine's clock shows a multiple of the interval, as a crontab is, but for the minutes."""

    def is_due(self, last_run_at: datetime) -> Any:
        passed = ticks_until(time.time())
        due = int(passed) > int(ticks_until(last_run_at.timestamp()))
        return schedstate(is_due=due, next=(1 - passed % 1) * INTERVAL)


@app.task(bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
@only_one("{name}", lease=5, at_least=AT_LEAST)
def kept(self: Any) -> None:
    note("kept", self.request.headers["tick"], os.getpid())


@app.task(bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
@only_one("{name}", lease=5)
def released(self: Any) -> None:
    note("released", self.request.headers["tick"], os.getpid())


if "BEATS_WITNESS" in os.environ:  # in a beat or the worker
    app.conf.broker_url = os.environ["BEATS_URL"]
    app.conf.broker_connection_retry_on_startup = True
    app.conf.beat_schedule = {
        task.name: {"task": task.name, "schedule": EveryTick(INTERVAL, app=app)} for task in (kept, released)
    }
    configure(redis=os.environ["BEATS_URL"])

    def number(sender: str, headers: dict[str, Any], **_: Any) -> None:
        """Write down what a beat sends, and have the message say which tick it is of."""
        tick = int(ticks_until(time.time()))
        headers.setdefault("headers", {})["tick"] = tick
        headers["tick"] = tick
        note("sent", sender.rpartition(".")[2], tick)

    before_task_publish.connect(number, weak=False)


def seen(witness: Path) -> tuple[Counter[str], Counter[str]]:
    """How often each tick was sent, and run."""
    lines = [line.split() for line in witness.read_text().splitlines()] if witness.exists() else []
    sent = Counter(f"{name} {tick}" for kind, name, tick in lines if kind == "sent")
    return sent, Counter(f"{name} {tick}" for name, tick, _ in lines if name != "sent")


def test_a_tick_of_two_beats_runs_once(tmp_path: Path) -> None:
    witness, log = tmp_path / "witness", tmp_path / "log"
    celery = [sys.executable, "-m", "celery", "-A", NAME]
    with redis_server() as server, log.open("wb") as output, ExitStack() as stack:
        environment = {**os.environ, "BEATS_URL": server.url, "BEATS_WITNESS": str(witness)}
        for clock in (0.0, -APART):
            command = [*celery, "beat", "--schedule", str(tmp_path / f"schedule{clock}"), "--pidfile", ""]
            env = {**environment, "BEATS_CLOCK": str(clock)}
            stack.enter_context(guarded(command, cwd=ROOT, env=env, stdout=output, stderr=output))
        worker = [*celery, "worker", "-P", "prefork", "-c", "2", "--without-gossip", "--without-mingle"]
        env = {**environment, "BEATS_CLOCK": "0"}
        stack.enter_context(guarded(worker, cwd=ROOT, env=env, stdout=output, stderr=output))
        # The first tick may have been sent before the worker was there, and have waited for it.
        assert eventually(lambda: seen(witness)[1], LIMIT), log.read_text()[-2000:]
        skipped = set(seen(witness)[0])

        def counted() -> Counter[str]:
            """The ticks that both have sent since then, each for two tasks."""
            return Counter({tick: n for tick, n in seen(witness)[0].items() if n == 2 and tick not in skipped})

        assert eventually(lambda: len(counted()) >= 2 * TICKS, LIMIT), log.read_text()[-2000:]
        ticks = counted()
        assert eventually(lambda: all(seen(witness)[1][tick] == 2 for tick in ticks if tick.startswith("released")))
        runs = seen(witness)[1]
    print(sorted(runs.items()))
    assert {tick: runs[tick] for tick in ticks} == {tick: 1 if tick.startswith("kept") else 2 for tick in ticks}
