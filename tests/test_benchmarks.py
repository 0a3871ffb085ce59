"""What the benchmarks write down, the tables of mutants and the faults that the soak counts, and what queues read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import only_one
from benchmarks import mutants, simulated_mutants
from benchmarks.queues import QUEUES, SENDER, Queue
from benchmarks.soak_hour import History


def test_the_table_names_modules_and_tests_that_exist() -> None:
    with mutants.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    modules = {Path(only_one.__file__).parents[1] / row["module"].removesuffix(" (Lua)") for row in rows}
    tests = {mutants.ROOT / name for row in rows for name in row["tests"].split()}
    assert [each for each in modules | tests if not each.exists()] == []


def test_the_mutants_that_no_history_can_show_are_of_lines_that_exist() -> None:
    code = "".join((Path(only_one.__file__).parent / name).read_text() for name in simulated_mutants.FILES)
    assert [part for part, _ in simulated_mutants.EQUIVALENT if part not in code] == []


@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_the_jobs_of_a_queue_say_how_they_are_installed_started_and_sent(queue: Queue) -> None:
    install, _ = queue.usage("$")
    assert install.startswith("pip install ")
    *setup, send = queue.usage(">>>")
    compile(SENDER.format(setup="\n".join(setup), wrong=queue.wrong, send=send), queue.module, "exec")


Line = tuple[str, str, dict[str, Any]]


def run(name: str, begun_at: float, held_until: float | None, key: str = "shared:a", **more: str) -> Line:
    """A run that believes until `held_until` that it is alone; without an end, it was killed."""
    facts = {"kind": "below", "key": key, "task": f"task-{name}", "begun_at": begun_at}
    return ("runs", name, facts | ({"held_until": held_until} if held_until else {}) | more)


def task(name: str, /, **facts: Any) -> Line:
    return ("tasks", name, facts)


SENT = [task(f"task-{each}", name=each, key=f"{each}:a", sent_at=0) for each in ("below", "early")]
DROPPED = [task("x", name="newest", key="newest:a", sent_at=2), task("x", end="skipped")]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([run("a", 1, 2), run("b", 2, 3)], {}),
        ([run("a", 1, 3), run("b", 2, 2.5), run("c", 2.9, 4)], {"overlaps": 2}),
        ([run("a", 1, 1), ("runs", "a", {"held_until": 3.0}), run("b", 2, 4)], {"overlaps": 1}),
        ([run("a", 1, 3), run("b", 2, None)], {}),
        (SENT, {"lost": 1}),
        ([*SENT, task("task-below", end="failed")], {}),
        ([*SENT, run("below", 1, 2, end="done")], {}),
        ([*SENT, run("below", 1, 2, end="retry")], {"lost": 1}),
        # A newest task that was dropped, and no newer one has run.
        ([*DROPPED, run("a", 1, 2, "newest:a", end="done")], {"lost": 1}),
        ([*DROPPED, run("a", 1, 2, "newest:a", end="done"), run("b", 4, 5, "newest:a", end="done")], {}),
        ([task("x", error="TypeError()")], {"errors": 1}),
    ],
)
def test_what_the_soak_finds_in_a_history(tmp_path: Path, lines: list[Line], expected: dict[str, int]) -> None:
    (tmp_path / "witness").write_text("\n".join([*map(json.dumps, lines), '["runs", ']))  # the last is being written
    history = History(tmp_path / "witness")
    history.read()
    found = {"overlaps": history.overlaps(), "lost": history.lost(), "errors": history.errors()}
    assert {name: len(each) for name, each in found.items() if each} == expected
