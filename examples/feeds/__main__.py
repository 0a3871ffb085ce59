"""The demo's command line: `python -m examples.feeds --duration 20 --workers 6`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from .demo import MAX_DURATION, MAX_WORKERS, MIN_DURATION, MIN_WORKERS, main

INTERRUPTED = 130


def _between(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            msg = f"{text} is not between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return number


def _picture(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        msg = f"{text} is not a file in a directory that is there"
        raise argparse.ArgumentTypeError(msg)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.feeds",
        description="A feed importer on a schedule shorter than its runs, with one of its processes killed on the way.",
    )
    parser.add_argument(
        "--duration",
        type=_between(float, MIN_DURATION, MAX_DURATION),
        default=20.0,
        metavar="SECONDS",
        help=f"from the first tick to the end, about; {MIN_DURATION:g} to {MAX_DURATION:g} (default: %(default)g)",
    )
    parser.add_argument(
        "--workers",
        type=_between(int, MIN_WORKERS, MAX_WORKERS),
        default=6,
        metavar="N",
        help=f"worker processes, one per feed and two more; {MIN_WORKERS} to {MAX_WORKERS} (default: %(default)s)",
    )
    parser.add_argument(
        "--picture",
        type=_picture,
        metavar="PATH",
        help="write what happened to this file, as SVG",
    )
    return parser


def _run() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us with `&` has it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return main(options.duration, options.workers, options.picture)
    except KeyboardInterrupt:
        print("interrupted: everything that was started has been ended.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(_run())
