"""What beats send: one runs at a time, ticks meanwhile are skipped, nothing piles up, and two beats are as one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from only_one.holder import Holder
from only_one.testing import Guarded, redis_server
from rigs.waiting import LIMIT, eventually
from tests.live.beat_app import MEANWHILE
from tests.live.workers import ROOT, Witness, celery_worker, environment

NAME = "tests.live.beat_app"
JOBS = 2
"""Of each schedule, that are waited for."""
APART = 1.2
"""Seconds between two machines' clocks."""
TICKS = 5


@contextmanager
def beats(folder: Path, *kinds: dict[str, str]) -> Iterator[tuple[Witness, redis.Redis, Callable[[], None]]]:
    """A worker and beats of these kinds, which the function that is given ends."""
    witness, log = Witness(folder / "witness"), folder / "beats"
    with redis_server() as server, redis.Redis.from_url(server.url) as client, log.open("wb") as output:
        env = environment(server.url, witness.path)
        with celery_worker(NAME, folder / "worker", env), ExitStack() as stack:
            for number, kind in enumerate(kinds):
                command = [sys.executable, "-m", "celery", "-A", NAME, "beat", "-l", "INFO", "--pidfile", ""]
                scheduler = ["--scheduler", "django"] if "LIVE_DATABASE" in kind else []
                command += scheduler or ["--schedule", str(folder / f"schedule{number}")]
                stack.enter_context(Guarded(command, cwd=ROOT, env={**env, **kind}, stdout=output, stderr=output))
            try:
                yield witness, client, stack.close
            finally:
                print(log.read_text()[-3000:])


def sent(witness: Witness, *schedule: str) -> set[str]:
    """What the beats have sent, as far as they came to write it down."""
    return {line[-2] for line in witness.lines("sent", *schedule)}


def results(witness: Witness, schedule: str) -> dict[str, str]:
    """What has become of it."""
    return dict(witness.lines("seen", schedule))


def judge(witness: Witness, schedule: str) -> None:
    """One job runs at a time; it is done, and whatever was sent meanwhile gives None."""
    marks = [line for line in witness.lines() if line[0] in {"begin", "end"} and line[1] == schedule]
    assert [mark[0] for mark in marks] == ["begin", "end"] * (len(marks) // 2)
    ran = [mark[2] for mark in marks[::2]]
    assert ran == [mark[2] for mark in marks[1::2]]
    found = results(witness, schedule)
    assert {task_id for task_id, result in found.items() if result == "done"} == set(ran)
    skipped = [task_id for task_id, result in found.items() if result == "None"]
    assert len(skipped) + len(ran) == len(found)
    assert sent(witness, schedule) <= set(found) <= {line[0] for line in witness.lines("about", schedule)}
    assert len(skipped) >= (MEANWHILE - 1) * JOBS


def test_schedules_that_are_shorter_than_their_jobs(tmp_path: Path) -> None:
    """A job ends when ticks that came meanwhile have been done with, so it shows that they do not wait for it."""
    with beats(tmp_path, {}, {}, {"LIVE_DATABASE": str(tmp_path / "database")}) as (witness, client, end):

        def are_at_it() -> bool:
            """Whether both of Celery's beats, and Django's, have sent their schedules."""
            senders = {schedule: {line[-1] for line in witness.lines("sent", schedule)} for schedule in expected}
            return {schedule: len(found) for schedule, found in senders.items()} == expected

        expected = {"celery": 2, "kept": 2, "django": 1}
        assert eventually(are_at_it)
        ended = {schedule: len(witness.lines("end", schedule)) for schedule in ("celery", "django")}
        for schedule, before in ended.items():
            assert eventually(lambda: len(witness.lines("end", schedule)) >= before + JOBS, 2 * LIMIT)  # noqa: B023 - called at once
        end()
        witness.append("over")  # as ticks do not come any more
        assert eventually(lambda: sent(witness) <= {line[1] for line in witness.lines("seen")})
        assert eventually(lambda: client.llen("celery") + client.hlen("unacked") == 0)
        holder = Holder.parse(client.get("live:kept") or b"")
        assert list(client.scan_iter("live:*")) == [b"live:kept"]

    for schedule in ended:
        judge(witness, schedule)
    # Both of Celery's beats have sent it, and it has ended each time before the next came.
    (ran,) = [task_id for task_id, result in results(witness, "kept").items() if result == "done"]
    assert holder is not None
    assert (holder.state, holder.task_id) == ("kept", ran)


@pytest.mark.soak
def test_a_tick_of_two_beats_whose_clocks_differ_runs_once(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """The key is kept for longer than the clocks are apart, and for less than the interval."""
    with beats(tmp_path, {"LIVE_CLOCK": "0"}, {"LIVE_CLOCK": str(-APART)}) as (witness, _, _):

        def ticks() -> Counter[str]:
            """How often each was sent."""
            return Counter(line[0] for line in witness.lines("sent"))

        def done() -> dict[str, list[str]]:
            """Those that both have sent, and what came of them."""
            both = [tick for tick, times in ticks().items() if times == 2]
            return {tick: found for tick in both if len(found := list(results(witness, tick).values())) == 2}

        assert eventually(lambda: len(done()) >= 2 * TICKS)
        found = done()
    record_property("ticks", len(found) // 2)
    for tick, outcome in found.items():
        assert sorted(outcome) == (["None", "done"] if tick.startswith("kept") else ["done", "done"])
