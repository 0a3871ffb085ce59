"""A short run of `benchmarks.kills`: random kills of workers and their children, on two machines.

The whole of it is `make benchmark-kills`. The seed is printed, and is another each time.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 8


@pytest.mark.timeout(300)
def test_no_work_is_lost_by_kills(tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    command = [sys.executable, "-m", "benchmarks.kills", "--rounds", str(ROUNDS), "--seed", str(seed)]
    done = subprocess.run([*command, "--log", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert f"seed {seed}" in done.stdout
    assert done.returncode == 0
    for what in ("never done", "successful without being done", "runs beside another of their key"):
        assert re.search(rf"{what}: +0 *$", done.stdout, re.MULTILINE)
