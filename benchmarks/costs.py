"""What a decorated call costs beside the bare commands that it cannot do without, and beside the peers.

    python -m benchmarks.costs [--rounds N] [--calls N] [--seed N] [--at-a-time] [--write]

Measures everything twice, with redis-py's parser in C (hiredis) and without.
Each figure is a median of ratios within one run, so a busy machine blurs it, and a slow one does not change it.
With --at-a-time the calls of a block are async, share 10 connections, and run at a time: ``make benchmark-async``.
With --write, the table and the chart of the documentation are replaced.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from io import StringIO
from multiprocessing import get_context
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "costs.md"
CHART = ROOT / "docs" / "costs.svg"
BEGIN, END = "<!-- begin: make benchmark -->", "<!-- end -->"
WITH, WITHOUT = "with hiredis", "without hiredis"
LONGEST_BAR = 3.1
"""The ratio at which a bar ends; what is longer is cut off."""

Found = dict[str, dict[str, dict[str, float]]]
"""By group, and with or without hiredis: the medians by call."""


def measure(parser: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The medians of all groups with one parser, in a process that has not imported redis-py yet."""
    if parser == WITHOUT:
        sys.modules["hiredis"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    from benchmarks import costs_measured as measured  # noqa: PLC0415 - see above

    rounds = measured.Measure(options.rounds, options.calls, options.seed, at_a_time=options.at_a_time)
    return measured.measure_groups(rounds, only_many=options.at_a_time)


def table(found: Found) -> str:
    """The figures as a Markdown table."""
    rows = []
    for group, by_parser in found.items():
        for name, ratio in by_parser[WITH].items():
            rows.append([group, name, f"{ratio:.2f}", f"{by_parser[WITHOUT][name]:.2f}"])
    return markdown.table(["", "", WITH, WITHOUT], rows)


def summary(found: Found) -> str:
    """The figures with hiredis that help to choose, as the page has them."""
    rows = []
    for group, by_parser in found.items():
        ratios = by_parser[WITH]
        ours = next(ratio for name, ratio in ratios.items() if name.startswith("only_one"))
        others = [name for name in ratios if "only_one" not in name and "bare" not in name]
        rows.append([group, f"{ours:.2f}", ", ".join(f"{name} {ratios[name]:.2f}" for name in others)])
    return markdown.table(["", "only_one", "others"], rows)


def chart(found: Found) -> None:
    """Draw the figures without hiredis as bars."""
    bars = Table(box=None, expand=True, show_header=False)
    bars.add_column(no_wrap=True)
    for group, by_parser in found.items():
        bars.add_row(Text(f"\n{group}", "bold"))
        for name, ratio in by_parser[WITHOUT].items():
            color = "green" if name.startswith("only_one") else "bright_black"
            bars.add_row(name, f"{ratio:.2f}", Bar(LONGEST_BAR, 0, ratio, color=color))
    console = Console(record=True, width=58, file=StringIO(), force_terminal=True)
    console.print(bars)
    console.save_svg(str(CHART), title="1.00: bare commands, without hiredis")


def main() -> None:
    """Measure, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="blocks of calls of each kind (200)")
    parser.add_argument("--calls", type=int, default=20, help="calls in a block (20)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the order of the blocks")
    parser.add_argument("--at-a-time", action="store_true", help="async calls, all of a block at a time")
    parser.add_argument("--write", action="store_true", help="replace the table and the chart in docs/")
    options = parser.parse_args()
    if options.write and options.at_a_time:
        parser.error("--write: without --at-a-time")
    found: Found = {}
    for name in (WITH, WITHOUT):
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            for group, medians in process.submit(measure, name, options).result().items():
                found.setdefault(group, {})[name] = medians
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"Python {python}, redis-py {version('redis')}, Celery {version('celery')}"
    said = f"{versions}, {os.cpu_count()} processors, {options.rounds} rounds of {options.calls}, seed {options.seed}:"
    print(f"{said}\n\n{table(found)}")
    if options.write:
        markdown.write(PAGE, BEGIN, END, f"{said}\n\n{summary(found)}")
        chart(found)


if __name__ == "__main__":
    main()
