"""A mailing to very many: seconds for making and for sending, messages per second, and whether memory stays flat.

    python -m benchmarks.newsletter [--recipients N] [--beside N]

The same newsletter as `make newsletter`: to a tenth of the recipients first, made with one worker process and with
two, and then to all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEWSLETTER = [sys.executable, "-m", "examples.newsletter", "--json"]
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """What was measured of one step.

    Attributes:
        what: the step.
        messages: how many it was about.
        seconds: what it took.
        peak_mb: the memory of the largest process; None where the system does not tell.
    """

    what: str
    messages: int
    seconds: float
    peak_mb: float | None

    def __str__(self) -> str:
        rate = self.messages / self.seconds
        return (
            f"{self.what:32} {self.messages:8} {self.seconds:9.1f} s {rate:8.0f} /s {self.peak_mb or 'unknown':>8} MB"
        )


def newsletter(*options: str) -> dict[str, Any]:
    """Run it; returns what it says.

    Raises:
        SystemExit: if it has failed.
    """
    done = subprocess.run([*NEWSLETTER, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def made(recipients: int, workers: int, directory: Path) -> Row:
    """Make a mailing."""
    options = [f"--recipients={recipients}", f"--workers={workers}", f"--directory={directory}", "--make-only"]
    found = newsletter(*options)
    return Row(f"making, worker processes: {workers}", found["messages"], found["seconds"], found["peak_mb"])


def sent(directory: Path) -> tuple[Row, dict[str, Any]]:
    """Send a mailing that is made."""
    found = newsletter(f"--directory={directory}")
    return Row("sending", found["accepted"], found["seconds"], found["peak_mb"]), found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipients", type=int, default=500_000, help="(500,000)")
    parser.add_argument("--beside", type=int, help="to how many first (a tenth)")
    options = parser.parse_args()
    beside = options.beside or options.recipients // 10
    if min(options.recipients, beside) < 1:
        parser.error("there must be recipients")
    print(f"{os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(made(beside, 1, Path(folder, "one")), flush=True)
        for number in dict.fromkeys((beside, options.recipients)):
            print(made(number, 2, Path(folder, str(number))), flush=True)
            row, found = sent(Path(folder, str(number)))
            print(row, json.dumps(found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
