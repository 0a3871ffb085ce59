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
from collections import defaultdict

import pytest
from rich.console import Console
from rich.table import Table

SEED = "ONLY_ONE_SOAK_SEED"


class Soak:
    """A plugin of pytest: a table at the end.

    Args:
        seed: of the tests that are random.
    """

    def __init__(self, seed: int) -> None:
        self._reports: dict[str, list[pytest.TestReport]] = defaultdict(list)
        self._seed = seed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a test's setup, of the test itself, or of its teardown."""
        self._reports[report.nodeid].append(report)

    def pytest_terminal_summary(self) -> None:
        """Print the table after the output of what failed."""
        table = Table(title=f"seed {self._seed}", title_justify="left")
        for heading in ("test", "outcome", "seconds", "figures"):
            table.add_column(heading, justify="right" if heading == "seconds" else "left", overflow="fold")
        for name, reports in self._reports.items():
            outcome = next((each.outcome for each in reports if not each.passed), "passed")
            seconds = sum(each.duration for each in reports)
            figures = ", ".join(f"{name} {_number(value)}" for name, value in reports[-1].user_properties)
            table.add_row(name, outcome, f"{seconds:.1f}", figures)
        Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run them, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of all that is random")
    options, rest = parser.parse_known_args()
    os.environ[SEED] = str(options.seed)
    print(f"seed {options.seed}", flush=True)
    sys.exit(pytest.main(["-m", "soak", "-v", *rest], plugins=[Soak(options.seed)]))


if __name__ == "__main__":
    main()
