"""Development commands: the suite on the built wheel, on each Python that is installed, on the newest and the oldest."""

from __future__ import annotations

import nox

nox.options.sessions = ["tests", "oldest"]
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
OLDEST = ["redis==5.0.1", "celery==5.4.0", "kombu==5.3.4"]


def suite(session: nox.Session, *pinned: str) -> None:
    """Install the wheel with everything that the tests need, and run them where the package's source is not seen."""
    session.install("build")
    session.run("python", "-m", "build", "--wheel", "--outdir", session.create_tmp(), silent=True)
    wheel = next(iter(sorted(__import__("pathlib").Path(session.create_tmp()).glob("*.whl"))))
    session.install(f"{wheel}[tests]", *pinned)
    session.run("python", "-P" if session.python not in ("3.10",) else "-B", "-m", "pytest", *session.posargs)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The newest of everything."""
    suite(session)


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """The oldest versions that setup.cfg declares."""
    suite(session, *OLDEST)
