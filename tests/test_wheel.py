"""What is shipped: the wheel, in an environment that has nothing but what it asks for."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROUNDS = 41


def run(*command: str | Path) -> str:
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(part) for part in command], env=apart, check=True, capture_output=True, text=True).stdout


def pip(python: Path, *arguments: str | Path) -> str:
    """Run our pip for an environment that has none, as to put one there takes longer than all the rest."""
    return run(sys.executable, "-m", "pip", "--python", python, *arguments)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment into which the wheel has been installed."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    interpreter = folder / "venv" / "bin" / "python"
    pip(interpreter, "install", "--quiet", "--disable-pip-version-check", wheel)
    return interpreter


def test_it_brings_redis_and_no_celery(python: Path) -> None:
    said = run(python, "-I", "-c", "import only_one, sys; print(only_one.__file__, 'celery' in sys.modules)")
    assert "site-packages" in said
    assert said.endswith("False\n")
    installed = pip(python, "list", "--format", "freeze").lower()
    assert "redis==" in installed
    assert "celery" not in installed


def test_it_brings_its_types_and_its_license(python: Path) -> None:
    files = pip(python, "show", "--files", "only-one")
    assert "only_one/py.typed" in files
    assert "LICENSE" in files
    assert "tests/" not in files
    assert "License: MIT" in files or "License-Expression: MIT" in files


@pytest.mark.soak
def test_importing_it_takes_little_more_than_importing_redis(
    python: Path, record_property: Callable[[str, float], None]
) -> None:
    """Medians of times taken in turn, in processes of their own: a ratio, and no bound on seconds.

    The time is the processor's, as what else is at work on this machine may come between.
    """
    program = "import time; begun = time.process_time(); import {}; print(time.process_time() - begun)"
    times: dict[str, list[float]] = {"redis": [], "only_one": []}
    for _ in range(ROUNDS):
        for name, taken in times.items():
            taken.append(float(run(python, "-I", "-c", program.format(name))))
    ratio = statistics.median(times["only_one"]) / statistics.median(times["redis"])
    record_property("import of only_one / of redis", ratio)
    assert ratio <= 1.2
