"""What a decorated call costs beside the bare commands that it cannot do without, and beside the peers.

    python -m benchmarks.costs [--rounds N] [--calls N] [--seed N] [--write]

Measures everything twice, with redis-py's parser in C (hiredis) and without.
Each figure is a median of ratios within one run, so a busy machine blurs it, and a slow one does not change it.
With --write, the table and the chart of the documentation are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks import costs_measured as m
from benchmarks import markdown

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv" / "peers"
PAGE = ROOT / "docs" / "costs.md"
CHART = ROOT / "docs" / "costs.svg"
BEGIN, END = "<!-- begin: make benchmark -->", "<!-- end -->"
WITH, WITHOUT = "with hiredis", "without"

Found = dict[str, dict[str, m.Medians]]
"""By group, and with or without hiredis: the medians by call."""

REACH: dict[tuple[str, str], tuple[float, float]] = {
    (m.RUN, m.ONE): (0.85, 0.80),
    (m.SKIP, m.OURS): (0.90, 0.88),
    (m.ASYNC_RUN, m.OURS): (0.95, 0.95),
    (m.ASYNC_SKIP, m.OURS): (0.95, 0.95),
    (m.TASK, m.ONE): (0.95, 0.95),
    (m.TASK, m.ALL): (1.00, 1.00),
    (m.TASK, m.LATE): (1.10, 1.10),
    (m.DUPLICATE, m.OURS): (1.3, 1.3),
    (m.QUEUED, m.OURS): (1.15, 1.15),
    (m.KEY, m.OURS): (0.5, 0.5),
}
"""The figures that are to be reached, with hiredis and without."""


def measure(options: argparse.Namespace) -> Found:
    """Run both measurements, each in a process of its own."""
    found: Found = {}
    for parser, flags in ((WITH, []), (WITHOUT, ["--without-hiredis"])):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.costs_measured", *flags]
        command += [f"--{name}={getattr(options, name)}" for name in ("rounds", "calls", "seed")]
        path = os.pathsep.join([str(ROOT), str(PEERS), os.environ.get("PYTHONPATH", "")])
        print(f"measuring {parser} ...", file=sys.stderr, flush=True)
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.PIPE)
        for group, medians in json.loads(done.stdout).items():
            found.setdefault(group, {})[parser] = medians
    return found


def table(found: Found) -> str:
    """The figures as a Markdown table."""
    rows = []
    for group, by_parser in found.items():
        for name, ratio in by_parser[WITH].items():
            reach, reach_without = REACH.get((group, name), (None, None))
            figures = (ratio, reach, by_parser[WITHOUT].get(name), reach_without)
            rows.append([group, name, *("" if each is None else f"{each:.2f}" for each in figures)])
    return markdown.table(["", "", WITH, "reach", WITHOUT, "reach"], rows)


def summary(found: Found) -> str:
    """The figures with hiredis that help to choose, as the page has them."""
    rows = []
    for group, by_parser in found.items():
        ours = [f"{ratio:.2f}" for name, ratio in by_parser[WITH].items() if is_ours(name)]
        is_other = {name: not is_ours(name) and "bare" not in name for name in by_parser[WITH]}
        others = [f"{name} {ratio:.2f}" for name, ratio in by_parser[WITH].items() if is_other[name]]
        rows.append([group, ours[0], ", ".join(others)])
    return markdown.table(["", "only_one", "others"], rows)


def is_ours(name: str) -> bool:
    """Whether a call is decorated by only_one."""
    return name.startswith("only_one")


def chart(found: Found) -> str:
    """The figures without hiredis as bars; a phone shows it in its own size, and dark mode has other colours."""
    bars: list[str] = []
    y = 24
    for group, by_parser in found.items():
        bars.append(f'<text x="4" y="{y + 12}" class="group">{group}</text>')
        y += 20
        for name, ratio in by_parser[WITHOUT].items():
            kind = "ours" if is_ours(name) else "theirs"
            bars.append(f'<text x="196" y="{y + 11}">{name}</text><text x="228" y="{y + 11}">{ratio:.2f}</text>')
            bars.append(f'<rect x="234" y="{y}" width="{min(ratio, 3.1) * 40:.0f}" height="13" class="{kind}"/>')
            y += 18
        y += 10
    style = (
        "text{font:11px sans-serif;fill:#222;text-anchor:end}.group{font-weight:bold;text-anchor:start}.page{fill:#fff}"
        ".ours{fill:#2a7f62}.theirs{fill:#a4abb5}line{stroke:#222;stroke-dasharray:3 3}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.page{fill:#131416}.ours{fill:#4db58f}.theirs{fill:#6b7280}"
        "line{stroke:#ddd}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="468" height="{y * 1.3:.0f}" viewBox="0 0 360 {y}">'
        f"<title>What a call costs, over the bare commands</title><style>{style}</style>"
        f'<rect width="360" height="{y}" class="page"/><text x="336" y="13">1.00: bare commands</text>'
        f'{"".join(bars)}<line x1="274" x2="274" y1="18" y2="{y - 6}"/></svg>\n'
    )


def main() -> None:
    """Measure, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="blocks of calls of each kind (200)")
    parser.add_argument("--calls", type=int, default=20, help="calls in a block (20)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the order of the blocks")
    parser.add_argument("--write", action="store_true", help="replace the table and the chart in docs/")
    options = parser.parse_args()
    found = measure(options)
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"Python {python}, redis-py {version('redis')}, Celery {version('celery')}"
    said = f"{versions}, {os.cpu_count()} processors, {options.rounds} rounds of {options.calls}, seed {options.seed}:"
    print(f"{said}\n\n{table(found)}")
    if options.write:
        markdown.write(PAGE, BEGIN, END, f"{said}\n\n{summary(found)}")
        CHART.write_text(chart(found))


if __name__ == "__main__":
    main()
