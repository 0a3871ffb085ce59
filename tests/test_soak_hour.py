"""The soak of an hour: its checker finds faults in a witness file; a short soak is green, or red without locks."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak_hour import History

ROOT = Path(__file__).parents[1]
Lines = list[tuple[Any, ...]]


def run(name: str, begun_at: float, held_until: float, key: str = "shared:a") -> Lines:
    """The lines of a run that is not killed; it believes until `held_until` that it is alone."""
    return [
        (begun_at, "begin", name, "below", key, f"task-{name}"),
        (begun_at, "held", name),
        (held_until, "held", name),
        (held_until, "end", name, "done"),
    ]


def sent(name: str, task: str) -> tuple[Any, ...]:
    return (0, "sent", name, task, "a")


KILLED = [line for line in run("a", 1, 2) if line[1] in {"begin", "held"}]
KNOWS_ITS_LOSS = [*(line for line in run("a", 1, 9) if line[:2] != (9, "held")), (9, "lost", "a")]
DROPPED = [(2, "sent", "x", "newest", "a"), (3, "outcome", "x", "SUCCESS", None, True)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (run("a", 1, 2) + run("b", 2, 3), {}),
        # Runs beside each other, and beside one that knows that it has lost its key, or that was killed.
        (run("a", 1, 3) + run("b", 2, 2.5) + run("c", 2.9, 4), {"overlaps": 2}),
        (KNOWS_ITS_LOSS + run("b", 4, 5), {}),
        (KILLED + run("b", 2.1, 3), {}),
        (KILLED + run("b", 1.9, 3), {"overlaps": 1}),
        ([sent("task-a", "below"), sent("x", "below"), sent("y", "early"), *run("a", 1, 2)], {"lost": 1}),
        # A newest task that was dropped, and no newer one has run.
        (DROPPED + run("a", 1, 2, "newest:a"), {"lost": 1}),
        (DROPPED + run("a", 1, 2, "newest:a") + run("b", 4, 5, "newest:a"), {}),
        ([(1, "outcome", "x", "FAILURE", "TypeError", False)], {"errors": 1}),
    ],
)
def test_what_is_found_in_a_history(tmp_path: Path, lines: Lines, expected: dict[str, int]) -> None:
    ordered = [json.dumps(line) for line in sorted(lines, key=lambda line: line[0])]
    (tmp_path / "witness").write_text("\n".join([*ordered, "[5, "]))  # the last one is being written
    history = History(tmp_path / "witness")
    history.read()
    found = {"overlaps": history.overlaps(), "lost": history.lost(), "errors": history.errors}
    assert {name: len(each) for name, each in found.items() if each} == expected


@pytest.mark.soak
@pytest.mark.parametrize("active", ["1", "0"])
def test_a_short_soak(active: str, tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    command = [sys.executable, "-m", "benchmarks.soak_hour", "--minutes", "0.5", "--seed", str(seed)]
    environment = {**os.environ, "ONLY_ONE_ACTIVE": active}
    done = subprocess.run(
        [*command, "--log", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    has_overlaps = re.search(r"^overlaps: +[1-9]", done.stdout, re.MULTILINE) is not None
    assert (done.returncode, has_overlaps) == ((0, False) if active == "1" else (1, True))
