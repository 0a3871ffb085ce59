"""A server that a test kills, pauses, and starts again on the port that it had."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory

from only_one import testing


def free_ports(number: int) -> list[int]:
    """Ports on which nobody listens, below those that systems give to outgoing connections."""
    with ExitStack() as stack:
        free: list[int] = []
        while len(free) < number:
            port, probe = SystemRandom().choice(testing.PORTS), stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                free.append(port)
        return free


@contextmanager
def redis_server(*options: str, binary: str | None = None) -> Iterator[RedisServer]:
    """Run a server as `only_one.testing.redis_server` does; see there for the arguments."""
    with TemporaryDirectory(prefix="only_one-", ignore_cleanup_errors=True) as directory:
        server = RedisServer(options, binary, Path(directory))
        try:
            server.start()
            yield server
        finally:
            server.stop()


class RedisServer:
    """A server of a test's own.

    Attributes:
        port: its TCP port on 127.0.0.1, the same after a restart.
        url: where clients connect, database 0.
        unix_socket: the path of its Unix socket, another one after a restart.
        process: the running server.
    """

    port: int
    url: str
    unix_socket: Path
    process: testing.Guarded

    def __init__(self, options: Sequence[str], binary: str | None, directory: Path) -> None:
        self._options = ["--dir", str(directory), *options]
        self._binary = binary
        self._running = ExitStack()

    def start(self) -> None:
        """Start the server, or start it again on the port that it had; return when it answers."""
        server = self._running.enter_context(testing.redis_server(*self._options, binary=self._binary))
        if not hasattr(self, "port"):
            self.port, self.url = server.port, server.url
            self._options += ["--port", str(self.port)]
        self.unix_socket, self.process = server.unix_socket, server.process

    @property
    def pid(self) -> int:
        """The process id of the server itself."""
        return self.process.pid

    def stop(self) -> None:
        """End the server; nothing happens if it has ended."""
        self._running.close()

    def kill(self) -> None:
        """End the server as a crash does, by SIGKILL."""
        self.process.kill()
        self.stop()

    def crash(self) -> None:
        """End it by SIGKILL, and start it again, with what it has written down."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze the server by SIGSTOP: connections are accepted, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        self.process.send_signal(signal.SIGCONT)
