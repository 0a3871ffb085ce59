"""The newsletter's command line: `python -m examples.newsletter --recipients 20000 --workers 2 --json`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from .house import RECIPIENTS, Options, main

INTERRUPTED = 130
MOST = 10_000_000
MOST_WORKERS = 64


def _between(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            msg = f"{text} is not between {low} and {high}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.newsletter",
        description="A mailing that is made in parallel chunks, and sent once, when all of them are made.",
    )
    parser.add_argument(
        "--recipients", type=_between(1, MOST), metavar="N", help=f"how many people get it (default: {RECIPIENTS})"
    )
    parser.add_argument(
        "--workers", type=_between(1, MOST_WORKERS), default=2, metavar="N", help="worker processes (default: 2)"
    )
    parser.add_argument(
        "--chunk", type=_between(1, MOST), default=10_000, metavar="N", help="ids per chunk (default: 10000)"
    )
    parser.add_argument(
        "--directory", type=Path, help="where to keep everything, to go on there later (default: nowhere)"
    )
    parser.add_argument("--make-only", action="store_true", help="make the messages, and do not send them")
    parser.add_argument("--json", action="store_true", help="print the summary as one line for a machine")
    return parser


def _run() -> int:
    options = Options(**vars(_parser().parse_args()))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us with `&` has it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return main(options)
    except KeyboardInterrupt:
        print("interrupted: everything that was started has been ended.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(_run())
