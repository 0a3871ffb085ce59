"""Two beats whose clocks differ are as one; what one beat sends is in `tests/recipes/test_recipe_beat.py`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from only_one.testing import Guarded, redis_server
from rigs.waiting import eventually
from tests.live.workers import ROOT, Witness, celery_worker, environment

NAME = "tests.live.beat_app"
APART = 1.2
"""Seconds between two machines' clocks."""
TICKS = 5


@pytest.mark.soak
def test_a_tick_of_two_beats_whose_clocks_differ_runs_once(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """The key is kept for longer than the clocks are apart, and for less than the interval."""
    witness = Witness(tmp_path / "witness")

    def done() -> dict[str, list[str]]:
        """The ticks that both have sent, and what came of them."""
        times = Counter(tick for tick, *_ in witness.lines("sent"))
        results = {tick: [result for *_, result in witness.lines("seen", tick)] for tick in times if times[tick] == 2}
        return {tick: found for tick, found in results.items() if len(found) == 2}

    with redis_server() as server, ExitStack() as stack:
        env = environment(server.url, witness.path)
        stack.enter_context(celery_worker(NAME, tmp_path / "worker", env))
        for name, clock in (("exact", 0.0), ("behind", -APART)):
            output = stack.enter_context((tmp_path / name).open("wb"))
            command = [sys.executable, "-m", "celery", "-A", NAME, "beat", "-l", "INFO", "--pidfile", ""]
            command += ["--schedule", str(tmp_path / f"schedule of {name}")]
            told = {**env, "LIVE_CLOCK": str(clock)}
            stack.enter_context(Guarded(command, cwd=ROOT, env=told, stdout=output, stderr=output))
        assert eventually(lambda: len(done()) >= 2 * TICKS)
        found = done()
    record_property("ticks", len(found) // 2)
    for tick, outcome in found.items():
        assert sorted(outcome) == (["None", "done"] if tick.startswith("kept") else ["done", "done"])
