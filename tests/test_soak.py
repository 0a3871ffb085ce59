"""`make soak` runs what is marked `soak`, and nothing else, and tells what came of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import os, pytest

pytestmark = pytest.mark.soak

def test_measured(record_property):
    record_property("seed", os.environ["ONLY_ONE_SOAK_SEED"])
    record_property("ratio", 1.23456)

@pytest.fixture
def broken():
    yield
    raise OSError

def test_that_leaves_something(broken):
    print("what the test said")
"""


def test_it_reports_outcomes_and_figures(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_other(): raise AssertionError")
    command = [sys.executable, "-m", "benchmarks.soak", "--seed", "77", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [(name, outcome, figures) for _, name, outcome, _, figures, _ in rows] == [
        ("test_it.py::test_measured", "passed", "seed 77, ratio 1.23"),
        ("test_it.py::test_that_leaves_something", "failed", ""),
    ]
    assert "what the test said" in done.stdout
