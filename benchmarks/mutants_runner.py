"""Starts pytest again and again for `benchmarks.mutants`: half of a short test's time is what Python needs to begin.

A process that has imported what no mutant changes forks for each run; the copy of the project is read by the child.
As a program, it reads the runs as lines of JSON, and answers each with the child's process id, and then its status.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

IMPORTED = (
    "pytest", "redis.cluster", "redis.sentinel", "redis.asyncio.cluster", "celery.app.amqp", "celery.app.control",
    "celery.app.trace", "celery.backends.redis", "celery.result", "celery.canvas", "kombu.transport.redis",
)  # fmt: skip


class Runner:
    """The process that forks; it ends when the one that has started it does.

    Args:
        environment: the processes' own, which they keep as long as they live.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout

    def start(self, arguments: list[str], tree: Path, environment: dict[str, str], log: Path) -> int:
        """Begin a run of pytest; returns its process id, which is that of its session."""
        said = {"arguments": arguments, "tree": str(tree), "environment": environment, "log": str(log)}
        self._stdin.write(json.dumps(said) + "\n")
        self._stdin.flush()
        return self._answer()

    def wait(self, seconds: float) -> int | None:
        """The exit status of the run, None if it takes longer."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            return self._answer() if selector.select(seconds) else None

    def _answer(self) -> int:
        return int(self._stdout.readline())


def main() -> None:
    """Fork for each line that is read."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            _run(**json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(arguments: list[str], tree: str, environment: dict[str, str], log: str) -> None:
    import pytest  # noqa: PLC0415 - by this process's parent, in fact

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(tree)
    sys.path[0] = tree
    sys.argv = ["pytest", *arguments]
    sys.exit(pytest.main(arguments))


if __name__ == "__main__":
    main()
