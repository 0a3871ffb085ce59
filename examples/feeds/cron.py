"""Cron on three machines whose clocks agree: all start the same report at the same time, again and again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

MACHINES = 3
EVERY = 4.0
REPORT = [sys.executable, "-m", "examples.feeds.nightly_report"]


def main() -> None:
    """Start the reports every few seconds until SIGTERM; then wait for those that run."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    reports: list[subprocess.Popen[bytes]] = []
    while not ended.is_set():
        reports += [subprocess.Popen(REPORT) for _ in range(MACHINES)]
        ended.wait(EVERY)
    for report in reports:
        report.wait()


if __name__ == "__main__":
    main()
