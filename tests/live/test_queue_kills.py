"""A short run of `benchmarks.queue_kills`: random kills of workers, and of what calls tasks, in the middle of a call.

The whole of it is `make benchmark-queue-kills`. The seed is printed, and is another each time.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 6
QUEUE_TIMEOUT = 5


@pytest.mark.timeout(300)
def test_no_key_stays_behind_kills(tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    command = [sys.executable, "-m", "benchmarks.queue_kills", "--rounds", str(ROUNDS), "--seed", str(seed)]
    command += ["--queue-timeout", str(QUEUE_TIMEOUT), "--log", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert f"seed {seed}" in done.stdout
    assert done.returncode == 0
    for what in (
        r"neither within .* of the kill",
        "runs beside another of their key",
        "keys held .* after the last kill",
        "new calls at the end that were not run",
    ):
        assert re.search(rf"{what}: +0 *$", done.stdout, re.MULTILINE)
