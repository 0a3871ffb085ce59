"""Run the tests that measure times or run long, one at a time, and report what they measured.

    python -m benchmarks.soak [--seed N] [arguments of pytest, such as a file or -k NAME]

These are the tests marked `soak`, which `make test` leaves out.
Nothing else should run on the machine meanwhile.
A test that is random reads its seed from the environment, `ONLY_ONE_SOAK_SEED`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SEED = "ONLY_ONE_SOAK_SEED"


@dataclass
class Result:
    """The result of one test: its outcome, its duration in seconds, and the figures that it recorded."""

    outcome: str = "passed"
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, report: pytest.TestReport) -> None:
        """Add the report of the test's setup, of the test itself, or of its teardown."""
        self.seconds += report.duration
        self.figures |= dict(report.user_properties)
        if not report.passed:
            self.outcome = report.outcome


class Soak:
    """A plugin of pytest: a progress bar in place of its dots, and a table at the end.

    Args:
        seed: of the tests that are random.
        progress: the bar.
    """

    def __init__(self, seed: int, progress: Progress) -> None:
        self.results: dict[str, Result] = {}
        self._seed = seed
        self._progress = progress
        self._bar = progress.add_task("collecting", total=None)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Now the number of tests is known."""
        self._progress.update(self._bar, total=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Show which test runs."""
        self._progress.update(self._bar, description=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what became of it."""
        self.results.setdefault(report.nodeid, Result()).add(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Print it above the bar, which a log does not show."""
        result = self.results[nodeid]
        self._progress.console.print(f"{result.outcome:7} {result.seconds:7.1f} s  {nodeid}")
        self._progress.advance(self._bar)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[str, str, Any], tuple[str, str, Any]]:
        """Print no dot.

        Returns:
            The category of an outcome, its letter, which is none, and its word.
        """
        category, _, word = yield
        return category, "", word

    def pytest_terminal_summary(self) -> None:
        """Print the table after the output of what failed."""
        self._progress.stop()
        table = Table(title=f"seed {self._seed}", title_justify="left")
        for heading in ("test", "outcome", "seconds", "figures"):
            table.add_column(heading, justify="right" if heading == "seconds" else "left", overflow="fold")
        for name, result in self.results.items():
            figures = ", ".join(f"{name} {_number(value)}" for name, value in result.figures.items())
            table.add_row(name, result.outcome, f"{result.seconds:.1f}", figures)
        Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run them, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of all that is random")
    options, rest = parser.parse_known_args()
    os.environ[SEED] = str(options.seed)
    print(f"seed {options.seed}", flush=True)
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    # pytest captures what is written to the standard streams while a test runs, so the bar has a line of its own.
    with TextIOWrapper(os.fdopen(os.dup(2), "wb", 0), write_through=True) as line:
        progress = Progress(*columns, console=Console(file=line, markup=False, soft_wrap=True), transient=True)
        with progress:
            arguments = ["-m", "soak", "-q", "-o", "console_output_style=classic", *rest]
            status = pytest.main(arguments, plugins=[Soak(options.seed, progress)])
    sys.exit(status)


if __name__ == "__main__":
    main()
