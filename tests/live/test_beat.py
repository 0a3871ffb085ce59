"""Two beats whose clocks differ are as one; what one beat sends is in `tests/recipes/test_recipes_of_celery.py`."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from rigs.programs import Logged
from rigs.waiting import eventually
from tests.live.workers import ROOT, World

NAME = "tests.live.beat_app"
APART = 1.2
"""Seconds between two machines' clocks."""
TICKS = 5


@pytest.mark.soak
def test_a_tick_of_two_beats_whose_clocks_differ_runs_once(place: World, tmp_path: Path) -> None:
    """The key is kept for longer than the clocks are apart, and for less than the interval."""

    def of_both() -> list[str]:
        """The ticks that both have sent, and a worker has seen to."""
        times = Counter(note.rest[0] for note in place.witness.notes("seen"))
        return [tick for tick in times if times[tick] == 2]

    with ExitStack() as stack:
        stack.enter_context(place.worker(module=NAME))
        for name, clock in (("exact", 0.0), ("behind", -APART)):
            command = [sys.executable, "-m", "celery", "-A", NAME, "beat", "-l", "INFO", "--pidfile", ""]
            command += ["--schedule", str(tmp_path / f"schedule of {name}")]
            told = {**place.environment, "LIVE_CLOCK": str(clock)}
            stack.enter_context(Logged(command, tmp_path / name, cwd=ROOT, env=told))
        assert eventually(lambda: len(of_both()) >= TICKS)
        ticks = of_both()
    print(len(ticks), "ticks")
    assert {tick: len(place.notes("run", tick)) for tick in ticks} == dict.fromkeys(ticks, 1)
