"""Histories of both worlds, in a process of their own, and those that were red once; `make simulate` plays others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONCE_RED = {
    (): [103, 297, 425, 449, 475, 478, 501, 506, 591, 676, 696],
    ("--messages",): [22, 56, 62, 64, 74, 107, 161, 228, 296, 317, 339, 438, 450, 1622],
}
"""Seeds of histories that showed a defect, by the arguments for their world."""


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", "--jobs", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("world", "histories"), [((), 600), (("--messages",), 60)])
def test_histories_keep_every_promise(world: tuple[str, ...], histories: int) -> None:
    played = play(*world, "--begin", "0", "--histories", str(histories))
    assert played.returncode == 0, played.stdout


@pytest.mark.parametrize("world", ONCE_RED)
def test_histories_that_were_red_once_keep_every_promise(world: tuple[str, ...]) -> None:
    played = play(*world, "--seeds", *map(str, ONCE_RED[world]))
    assert played.returncode == 0, played.stdout


def test_a_history_is_the_same_each_time() -> None:
    assert play("--seed", "7", "--whole").stdout == play("--seed", "7", "--whole").stdout
