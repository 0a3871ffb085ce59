"""The soak of an hour: its checker finds faults in a witness file; a short soak is green, or red without locks."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak_hour import History

ROOT = Path(__file__).parents[1]
LEASE = 2.0
KEY = "spaced:a"

Lines = list[tuple[Any, ...]]


def run(name: str, begun_at: float, held_until: float, *, kind: str = "below", fence: int | None = None) -> Lines:
    """The lines of a run that is not killed, and of its outcome; it believes until `held_until` that it is alone."""
    fences = [] if fence is None else [(begun_at, "fence", name, fence)]
    return [
        (begun_at, "begin", name, kind, KEY, f"task-{name}", begun_at, LEASE, "worker", 7),
        *fences,
        (begun_at, "held", name),
        (held_until, "held", name),
        (held_until, "end", name, "done", True),
        (held_until, "outcome", f"task-{name}", "SUCCESS", "done", True, name),
    ]


@pytest.fixture
def history(tmp_path: Path) -> Callable[[Lines], History]:
    """Makes a history of lines, in the order of their times."""

    def made(lines: Lines) -> History:
        path = tmp_path / "witness"
        ordered = sorted(lines, key=lambda line: line[0])
        path.write_text("".join(f"{json.dumps(line)}\n" for line in ordered) + "[5, ")  # the last is being written
        found = History(path)
        found.read()
        return found

    return made


def problems(history: History) -> dict[str, int]:
    found = {**history.violations(), "tasks lost": history.lost(), **history.problems}
    return {name: len(each) for name, each in found.items() if each}


def test_runs_one_after_the_other(history: Callable[[Lines], History]) -> None:
    assert problems(history(run("a", 1, 2, fence=10) + run("b", 2, 3, fence=11))) == {}


def test_runs_beside_each_other(history: Callable[[Lines], History]) -> None:
    assert problems(history(run("a", 1, 3) + run("b", 2, 2.5) + run("c", 2.9, 4))) == {"overlaps": 2}


def test_a_run_that_knows_that_it_has_lost_its_key(history: Callable[[Lines], History]) -> None:
    paused = [line for line in run("a", 1, 9) if line[:2] != (9, "held")]
    assert problems(history([*paused, (9, "lost", "a"), *run("b", 4, 5)])) == {}


def test_a_run_that_is_killed_holds_its_key_until_its_last_line(history: Callable[[Lines], History]) -> None:
    killed = [line for line in run("a", 1, 2) if line[1] in {"begin", "held"}]
    assert problems(history(killed + run("b", 2.1, 3))) == {}
    assert problems(history(killed + run("b", 1.9, 3))) == {"overlaps": 1}


@pytest.mark.parametrize(("held_until", "expected"), [(4.4, "overlaps, excused"), (4.6, "overlaps")])
def test_a_restart_without_data_excuses_an_overlap_for_one_lease(
    history: Callable[[Lines], History], held_until: float, expected: str
) -> None:
    lost_data = (2.5, "data lost", 2.4)
    assert problems(history([*run("a", 1, held_until), lost_data, *run("b", 3, 3.5)])) == {expected: 1}


def test_a_restart_excuses_no_run_that_began_before_it(history: Callable[[Lines], History]) -> None:
    assert problems(history([*run("a", 1, 3), (2.9, "data lost", 2.8), *run("b", 2, 2.5)])) == {"overlaps": 1}


def test_a_run_within_at_least_of_a_success(history: Callable[[Lines], History]) -> None:
    first, second = run("a", 1, 1.5, kind="spaced"), run("b", 2.9, 3, kind="spaced")
    early = "runs within at_least of a success"
    assert problems(history(first + second)) == {early: 1}
    assert problems(history([*first, (1.6, "outage", 1.4), *second])) == {f"{early}, excused": 1}
    assert problems(history(first + run("b", 3, 3.1, kind="spaced"))) == {}
    killed_before_its_release = first[:-1]
    assert problems(history(killed_before_its_release + second)) == {}


@pytest.mark.parametrize("fence", [9, 10])
def test_fences_that_do_not_rise(history: Callable[[Lines], History], fence: int) -> None:
    assert problems(history(run("a", 1, 2, fence=10) + run("b", 2, 3, fence=fence))) == {"fences that do not rise": 1}


def test_tasks_that_are_lost(history: Callable[[Lines], History]) -> None:
    sent = [(0, "sent", "task-a", "below", "a"), (0, "sent", "x", "below", "a"), (0, "sent", "y", "early", "a")]
    assert history([*sent, *run("a", 1, 2)]).lost() == ["below x"]


def test_the_newest_trigger_that_is_dropped(history: Callable[[Lines], History]) -> None:
    def of_buffer_one(lines: Lines) -> Lines:
        return [(line[0], *("newest:a" if each == KEY else each for each in line[1:])) for line in lines]

    dropped = [(2, "sent", "x", "newest", "a"), (3, "outcome", "x", "SUCCESS", None, True, "")]
    before, after = of_buffer_one(run("a", 1, 2)), of_buffer_one(run("b", 4, 5))
    assert history([*dropped, *before]).lost() == ["newest x was dropped, and no newer one has run"]
    assert history([*dropped, *before, *after]).lost() == []


def test_an_error_that_is_not_ours(history: Callable[[Lines], History]) -> None:
    assert problems(history([(1, "outcome", "x", "FAILURE", "TypeError", False, "")])) == {"unexpected errors": 1}


@pytest.mark.soak
@pytest.mark.parametrize("active", ["1", "0"])
def test_a_short_soak(active: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    seed = random.randrange(1_000_000)
    command = [sys.executable, "-m", "benchmarks.soak_hour", "--minutes", "0.5", "--seed", str(seed)]
    environment = {**os.environ, "ONLY_ONE_ACTIVE": active}
    done = subprocess.run(
        [*command, "--log", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    record_property("seed", seed)
    record_property("report", done.stdout)
    print(done.stdout, done.stderr)
    has_overlaps = re.search(r"^overlaps: +[1-9]", done.stdout, re.MULTILINE) is not None
    assert (done.returncode, has_overlaps) == ((0, False) if active == "1" else (1, True))
