"""Short runs of `benchmarks.kills` and `benchmarks.queue_kills`: random kills of workers, and of what calls tasks.

The whole of them is `make benchmark-kills` and `make benchmark-queue-kills`; each kind of kill has a test of its own.
The seed is printed, and is another each time.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = {
    "kills": ["--rounds", "8"],
    "queue_kills": ["--rounds", "6", "--queue-timeout", "5"],
}
NONE_OF_THESE = {
    "kills": ["never done", "successful without being done", "runs beside another of their key"],
    "queue_kills": [
        r"neither within .* of the kill",
        "runs beside another of their key",
        "keys held .* after the last kill",
        "new calls at the end that were not run",
    ],
}


@pytest.mark.soak
@pytest.mark.parametrize("program", SHORT)
def test_nothing_is_lost_by_kills(program: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    seed = random.randrange(1_000_000)
    command = [sys.executable, "-m", f"benchmarks.{program}", *SHORT[program], "--seed", str(seed)]
    done = subprocess.run([*command, "--log", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    record_property("seed", seed)
    record_property("report", done.stdout)
    print(done.stdout, done.stderr)
    assert f"seed {seed}" in done.stdout
    assert done.returncode == 0
    for what in NONE_OF_THESE[program]:
        assert re.search(rf"{what}: +0 *$", done.stdout, re.MULTILINE)
