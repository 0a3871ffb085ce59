"""Development commands: the suite on the built wheel, on each Python, on the newest of everything and the oldest."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["tests", "oldest"]
nox.options.error_on_missing_interpreters = True

HERE = Path(__file__).parent
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
OLDEST = ["redis==5.2.0", "celery==5.5.0", "kombu==5.5.2"]  # later kombus want a later redis-py
BESIDE_THE_PACKAGE = [
    "tests",
    "examples",
    "benchmarks",
    "rigs",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    "conftest.py",
    "pyproject.toml",
]


def suite(session: nox.Session, *pinned: str) -> None:
    """Install the wheel with all that the tests need, and run them where the package's source is not seen."""
    away = Path(session.create_tmp(), "away").resolve()
    shutil.rmtree(away, ignore_errors=True)
    away.mkdir()
    session.install("build")
    # The wheel is made of the sdist, and not beside what an earlier build has left here.
    session.run("python", "-m", "build", "--outdir", str(away), str(HERE), silent=True)
    (wheel,) = away.glob("*.whl")
    session.install(f"{wheel}[tests]", *pinned)
    for name in BESIDE_THE_PACKAGE:
        source, target = HERE / name, away / name
        _ = shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    session.chdir(away)
    pytest = ["python", "-m", "pytest", "--ignore=tests/test_wheel.py"]
    # What raises out of nowhere leaves Python's own state behind, so it has a process for itself, as in `make test`.
    together = ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not interrupts and not soak"]
    session.run(*pytest, *together, *session.posargs)
    session.run(*pytest, "-m", "interrupts")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The newest of everything."""
    suite(session)


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """The oldest versions that setup.cfg declares."""
    suite(session, *OLDEST)
