"""Histories of both worlds, in a process of their own, and those that were red once; `make simulate` plays others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONCE_RED = {
    (): "103 344 395 425 449 474 475 478 501 506 507 557 591 622 656 676 696 784 956 1161 1506 5009",
    ("--messages",): "64 74 81 153 161 173 273 406 450 480 508 596 670 1057 1059 1187 1345 1761 1867 2370 "
    "30000555 40000277 40000575 40000691 40000776",
}
"""Seeds of histories that showed a defect, by the arguments for their world."""


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", "--jobs", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("world", "histories"), [((), 600), (("--messages",), 80)])
def test_histories_keep_every_promise(world: tuple[str, ...], histories: int) -> None:
    """The same ones each time: `make simulate` plays fresh ones, and still finds some that are red."""
    played = play(*world, "--begin", "0", "--histories", str(histories))
    assert played.returncode == 0, played.stdout


@pytest.mark.parametrize("world", ONCE_RED)
def test_histories_that_were_red_once_keep_every_promise(world: tuple[str, ...]) -> None:
    played = play(*world, "--seeds", *ONCE_RED[world].split())
    assert played.returncode == 0, played.stdout


def test_a_history_is_the_same_each_time() -> None:
    assert play("--seed", "7", "--whole").stdout == play("--seed", "7", "--whole").stdout
