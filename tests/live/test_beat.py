"""A schedule that is shorter than its job: one runs, the ticks meanwhile are skipped, and nothing piles up."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from only_one.testing import guarded, redis_server
from tests.live.beat_app import MEANWHILE
from tests.live.crew import ROOT, Witness, celery_worker, environment
from tests.waiting import LIMIT, eventually

NAME = "tests.live.beat_app"
JOBS = 3


def beat(folder: Path, number: int, *options: str) -> list[str]:
    """The command of a beat."""
    command = [sys.executable, "-m", "celery", "-A", NAME, "beat", "-l", "INFO", "--pidfile", ""]
    return command + ([*options] if options else ["--schedule", str(folder / f"schedule{number}")])


def run(folder: Path, beats: int, *options: str, **more: str) -> None:
    """Have beats and a worker at work until some jobs are done, and judge what the witness has seen."""
    witness, log = Witness(folder / "witness"), folder / "beats"
    with redis_server() as server, redis.Redis.from_url(server.url) as client, log.open("wb") as output:
        env = environment(server.url, witness.path)
        with celery_worker(NAME, folder / "worker", env, size=4):
            with ExitStack() as stack:
                for number in range(beats):
                    command = beat(folder, number, *options)
                    stack.enter_context(guarded(command, cwd=ROOT, env={**env, **more}, stdout=output, stderr=output))
                done = eventually(lambda: len(witness.lines("end")) >= JOBS, 2 * LIMIT)
                assert done, log.read_text()[-3000:]
                waiting = client.llen("celery")
            # The beats have ended, and the last job may wait for more ticks than it got.
            for _ in range(MEANWHILE):
                with witness.path.open("ab", buffering=0) as file:
                    file.write(b"sent by-the-test\n")
            assert eventually(lambda: sent(witness) <= seen(witness), LIMIT)
            assert eventually(lambda: client.llen("celery") + client.hlen("unacked") == 0, LIMIT)
            assert not list(client.scan_iter("live:*"))
    print(
        f"{len(seen(witness))} ticks, {len(witness.lines('begin'))} jobs, {waiting} waiting when the beats were ended"
    )
    judge(witness, beats, waiting)


def sent(witness: Witness) -> set[str]:
    """What the beats have sent, as far as they came to write it down."""
    return {line[0] for line in witness.lines("sent")} - {"by-the-test"}


def seen(witness: Witness) -> set[str]:
    """What the worker has done with."""
    return {line[0] for line in witness.lines("seen")}


def judge(witness: Witness, beats: int, waiting: Any) -> None:
    """One runs at a time; it is done, and whatever was sent meanwhile gives None."""
    marks = [line for line in witness.lines() if line[0] in {"begin", "end"}]
    assert [mark[0] for mark in marks] == ["begin", "end"] * (len(marks) // 2)
    ran = [mark[1] for mark in marks[::2]]
    assert ran == [mark[1] for mark in marks[1::2]]
    assert len(ran) >= JOBS
    results = {line[0]: line[1] for line in witness.lines("seen")}
    assert {task_id for task_id, result in results.items() if result == "done"} == set(ran)
    skipped = [task_id for task_id, result in results.items() if result == "None"]
    assert len(skipped) + len(ran) == len(results)
    assert sent(witness) <= set(results) <= {line[0] for line in witness.lines("about")}
    assert len(skipped) >= (MEANWHILE - 1) * JOBS
    assert waiting <= 2 * beats  # that were sent this moment


@pytest.mark.parametrize("beats", [1, 2])
def test_a_schedule_that_is_shorter_than_its_job(tmp_path: Path, beats: int) -> None:
    run(tmp_path, beats)


def test_the_database_scheduler_of_django(tmp_path: Path) -> None:
    more = {"LIVE_DATABASE": str(tmp_path / "database")}
    env = environment("redis://127.0.0.1:1/0", tmp_path / "none", **more)
    program = f"import {NAME} as app; app.prepare_database()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, timeout=LIMIT, check=True)
    # The schedule stands in the database alone, so nothing would be sent by another scheduler.
    run(tmp_path, 1, "--scheduler", "django", **more)
