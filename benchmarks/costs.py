"""What a decorated call costs beside the bare commands that it cannot do without, and beside the peers.

    python -m benchmarks.costs [--rounds N] [--calls N] [--at-a-time] [--write]

Measures everything twice, with redis-py's parser in C (hiredis) and without.
Each figure is a median of ratios within one run, so a busy machine blurs it, and a slow one does not change it.
With --at-a-time the calls of a block are async, share 10 connections, and run at a time: ``make benchmark-async``.
With --write, the table of the documentation is replaced.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from benchmarks import markdown

PAGE = Path(__file__).parents[1] / "docs" / "costs.md"
BEGIN, END = "<!-- begin: make benchmark -->", "<!-- end -->"
WITH, WITHOUT = "with hiredis", "without hiredis"


def measure(parser: str, options: argparse.Namespace) -> dict[tuple[str, str], float]:
    """The medians by group and call with one parser, in a process that has not imported redis-py yet."""
    if parser == WITHOUT:
        sys.modules["hiredis"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    from benchmarks import costs_measured as measured  # noqa: PLC0415 - see above

    rounds = measured.Measure(options.rounds, options.calls, at_a_time=options.at_a_time)
    return measured.measure_groups(rounds, only_many=options.at_a_time)


def main() -> None:
    """Measure, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="blocks of calls of each kind (200)")
    parser.add_argument("--calls", type=int, default=20, help="calls in a block (20)")
    parser.add_argument("--at-a-time", action="store_true", help="async calls, all of a block at a time")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/")
    options = parser.parse_args()
    found = []
    for name in (WITH, WITHOUT):
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found.append(process.submit(measure, name, options).result())
    rows = [[*names, *(f"{each[names]:.2f}" for each in found)] for names in found[0]]
    versions = f"Python {platform.python_version()}, redis-py {version('redis')}, Celery {version('celery')}"
    said = f"{versions}, {os.cpu_count()} processors, {options.rounds} rounds of {options.calls}:"
    text = f"{said}\n\n{markdown.table(['', '', WITH, WITHOUT], rows)}"
    print(text)
    if options.write:
        markdown.write(PAGE, BEGIN, END, text)


if __name__ == "__main__":
    main()
