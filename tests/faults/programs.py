"""Decorated runs in processes and threads of their own, for tests that stop and kill them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from only_one import current_lock, only_one
from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually

if TYPE_CHECKING:
    from typing_extensions import Self

HOLDER = """
import json, signal, sys
import only_one

url, prefix, key, options = json.loads(sys.argv[1])
only_one.configure(redis=url, prefix=prefix)

@only_one.only_one(key, **options)
def hold():
    print(json.dumps(only_one.current_lock().token.decode()), flush=True)
    while True:
        signal.pause()

hold()
"""


class Program(AbstractContextManager["Program"]):
    """A program that reports by lines of JSON, or of anything else.

    Attributes:
        process: the process, which ends with the block.
        pid: its process id.
    """

    def __init__(self, source: str, *arguments: str, inside: Sequence[str] = ()) -> None:
        """Start it.

        Args:
            source: the program in Python.
            arguments: its `sys.argv[1:]`.
            inside: a command that starts it, such as `unshare`.
        """
        # Forking beside a thread, which some of them do on purpose, warns.
        python = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source, *arguments]
        self.process = Guarded([*inside, *python], stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self._lines: Any = self.process.stdout

    def line(self) -> str:
        """What it says next, or nothing if it has ended, by itself or by a signal, and not by an error."""
        line: str = self._lines.readline().strip()
        assert line or self.process.wait(LIMIT) != 1, "the program has failed"
        return line

    def says(self) -> Any:
        """The next of its reports."""
        return json.loads(self.line())

    def kill(self) -> None:
        """End it by `kill -9`; it is gone, and no zombie, on return."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(LIMIT) == -signal.SIGKILL

    def stop(self) -> None:
        """Have it stand still; it does on return."""
        self.process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: _state(Path(f"/proc/{self.pid}/stat")) in {"T", None})

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def all_sleep(self) -> bool:
        """Whether its threads come to sleep all at once, so that none of them waits for Python's lock."""
        threads = Path(f"/proc/{self.pid}/task")
        return eventually(lambda: {_state(each / "stat") for each in threads.glob("*")} <= {"S"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.process.__exit__(*details)


class Holder(Program):
    """A process that holds a key for as long as it lives.

    Attributes:
        token: what is stored at the key.
    """

    def __init__(self, url: str, prefix: str, *, key: str = "k", inside: Sequence[str] = (), **options: Any) -> None:
        """Start it; it holds the key on return.

        Args:
            url: the server.
            prefix: what the key begins with.
            key: the key.
            inside: a command that starts it, such as `unshare`.
            options: other options of the decorator.
        """
        super().__init__(HOLDER, json.dumps([url, prefix, key, options]), inside=inside)
        try:
            self.token: bytes = self.says().encode()
        except BaseException:
            self.process.close()
            raise


def _state(path: Path) -> str | None:
    """The state of a process or thread, such as T for stopped, or None where that cannot be read."""
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


class Running(AbstractContextManager["Running"]):
    """A decorated run in a thread of its own, until the end of the block, which fails if the run has.

    Attributes:
        lock: what `current_lock()` gave it.
        finish: set it, and the run ends.
        told: the reasons of its losses, as it was told of them, unless the test gives `when_lost`.
        result: what it returned or raised; at the end of the block "done", unless the test says how it `ends`.
    """

    lock: Any

    def __init__(self, key: str = "k", *, ends: Callable[[], object] | None = None, **options: Any) -> None:
        self.finish = threading.Event()
        self.result: Any = None
        self.told: list[str] = []
        self._is_to_be_done = ends is None
        self._ends = ends or (lambda: "done")
        self._started = threading.Event()
        self._call = self._decorated(key, {"when_lost": lambda lost: self.told.append(lost.reason), **options})
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _decorated(self, key: str, options: dict[str, Any]) -> Callable[[], Any]:
        @only_one(key, **options)
        def work() -> object:
            self._begin()
            self.finish.wait()
            return self._ends()

        return work

    def _begin(self) -> None:
        self.lock = current_lock()
        self._started.set()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.result = error
        finally:
            self._started.set()

    def join(self) -> Any:
        """What the run has returned or raised, once it has ended."""
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        return self.result

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(LIMIT)
        assert hasattr(self, "lock"), f"it did not run: {self.result!r}"
        return self

    def __exit__(self, *details: object) -> None:
        self.finish.set()
        self.join()
        if self._is_to_be_done and not any(details):
            assert self.result == "done", self.result


class RunningAsync(Running):
    """The same in an event loop of its own, where it can be cancelled."""

    def _decorated(self, key: str, options: dict[str, Any]) -> Callable[[], Any]:
        @only_one(key, **options)
        async def work() -> object:
            self._begin()
            while not self.finish.is_set():  # noqa: ASYNC110 - it is set in another thread
                await asyncio.sleep(0.005)
            return self._ends()

        return lambda: asyncio.run(work())
