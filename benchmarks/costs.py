"""What a decorated call costs beside the bare commands that it cannot do without, and beside the peers.

    python -m benchmarks.costs [--rounds N] [--calls N] [--write]

Measures everything twice, with redis-py's parser in C (hiredis) and without.
Each figure is a median of ratios within one run, so a busy machine blurs it, and a slow one does not change it.
With --write, the table and the chart of the documentation are replaced.
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
CHART = PAGE.with_suffix(".svg")
STYLE = """
text{font:11px sans-serif;fill:#222;text-anchor:end}.group{font-weight:bold;text-anchor:start}.page{fill:#fff}
.ours{fill:#2a7f62}.theirs{fill:#a4abb5}line{stroke:#222;stroke-dasharray:3 3}
@media(prefers-color-scheme:dark){
text{fill:#ddd}.page{fill:#131416}.ours{fill:#4db58f}.theirs{fill:#6b7280}line{stroke:#ddd}
}"""
WITH, WITHOUT = "with hiredis", "without hiredis"


def measure(parser: str, options: argparse.Namespace) -> dict[tuple[str, str], float]:
    """The medians by group and call with one parser, in a process that has not imported redis-py yet."""
    if parser == WITHOUT:
        sys.modules["hiredis"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    from benchmarks import costs_measured as measured  # noqa: PLC0415 - see above

    return measured.measure_groups(measured.Measure(options.rounds, options.calls))


def summary(found: dict[tuple[str, str], float]) -> str:
    """The figures that help to choose, as the page has them: a row for each group."""
    rows: dict[str, list[str]] = {}
    for (group, name), ratio in found.items():
        row = rows.setdefault(group, [group, "", ""])
        if name.startswith("only_one"):
            row[1] = row[1] or f"{ratio:.2f}"
        elif "bare" not in name:
            row[2] += f"{', ' * bool(row[2])}{name} {ratio:.2f}"
    return markdown.table(["", "only_one", "others"], rows.values())


def chart(found: dict[tuple[str, str], float]) -> str:
    """The figures as bars; a phone shows it in its own size, and dark mode has other colours."""
    bars, y, drawn = [], 24, ""
    for (group, name), ratio in found.items():
        if group != drawn:
            y += 10
            bars.append(f'<text x="4" y="{y + 12}" class="group">{group}</text>')
            y, drawn = y + 20, group
        kind = "ours" if name.startswith("only_one") else "theirs"
        bars.append(f'<text x="196" y="{y + 11}">{name}</text><text x="228" y="{y + 11}">{ratio:.2f}</text>')
        bars.append(f'<rect x="234" y="{y}" width="{min(ratio, 3.1) * 40:.0f}" height="13" class="{kind}"/>')
        y += 18
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="468" height="{y * 1.3:.0f}" viewBox="0 0 360 {y}">'
        f"<title>What a call costs, over the bare commands</title><style>{STYLE}</style>"
        f'<rect width="360" height="{y}" class="page"/><text x="336" y="13">1.00: bare commands</text>'
        f'{"".join(bars)}<line x1="274" x2="274" y1="18" y2="{y}"/></svg>\n'
    )


def main() -> None:
    """Measure, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="blocks of calls of each kind (200)")
    parser.add_argument("--calls", type=int, default=20, help="calls in a block (20)")
    parser.add_argument("--write", action="store_true", help="replace the table and the chart in docs/")
    options = parser.parse_args()
    found = []
    for name in (WITH, WITHOUT):
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found.append(process.submit(measure, name, options).result())
    rows = [[*names, *(f"{each[names]:.2f}" for each in found)] for names in found[0]]
    versions = f"Python {platform.python_version()}, redis-py {version('redis')}, Celery {version('celery')}"
    said = f"{versions}, {os.cpu_count()} processors, {options.rounds} rounds of {options.calls}:"
    print(f"{said}\n\n{markdown.table(['', '', WITH, WITHOUT], rows)}")
    if options.write:
        markdown.write(PAGE, f"{said}\n\n{summary(found[0])}")
        CHART.write_text(chart(found[1]))


if __name__ == "__main__":
    main()
