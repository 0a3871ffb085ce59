"""What is shipped: the wheel, in an environment that has nothing but what it asks for."""

from __future__ import annotations

import json
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


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment into which the wheel has been installed.

    The wheel is built by our own setuptools, as to bring one takes longer than all the rest; and it is installed by our
    own pip.
    """
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    interpreter = folder / "venv" / "bin" / "python"
    options = ["--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", *options, wheel)
    return interpreter


LOOKS = """
import json, only_one
from importlib.metadata import distribution, distributions

ours = distribution("only-one")
print(json.dumps({
    "place": only_one.__file__,
    "installed": sorted({each.metadata["Name"].lower() for each in distributions()}),
    "files": [str(file) for file in ours.files],
    "license": ours.metadata["License-Expression"] or ours.metadata["License"],
}))
"""


def test_it_brings_redis_and_no_celery_its_types_and_its_license(python: Path) -> None:
    found = json.loads(run(python, "-I", "-c", LOOKS))
    assert "site-packages" in found["place"]
    assert {"only-one", "redis"} <= {*found["installed"]}
    assert "celery" not in found["installed"]
    assert "only_one/py.typed" in found["files"]
    assert any(file.endswith("/LICENSE") for file in found["files"])
    assert not any(file.startswith("tests/") for file in found["files"])
    assert found["license"] == "MIT"


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
