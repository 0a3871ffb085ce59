"""A RabbitMQ of the tests' own: the program of the system's package, without root, with folders, ports and a name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import amqp
from amqp.exceptions import AMQPError
from typing_extensions import Self

from only_one.testing import Guarded
from rigs.programs import Logged
from rigs.servers import free_ports
from rigs.waiting import eventually

PROGRAMS = Path("/usr/lib/rabbitmq/bin")
"""Where Debian has them; those on PATH want to be root, or its user."""

STARTS_WITHIN = 120.0


def is_installed() -> bool:
    """Whether there is one on this machine."""
    return (PROGRAMS / "rabbitmq-server").exists()


class RabbitMQ:
    """A running broker.

    Attributes:
        port: where it listens.
    """

    def __init__(self, folder: Path) -> None:
        self.port, distribution, names = free_ports(3)
        self._names = names
        self._node = f"only_one_{uuid4().hex}@localhost"
        self._env = {
            **os.environ,
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_ALLOW_INPUT": "1",  # or a shell would stand between us and it
            "RABBITMQ_CONFIG_FILE": str(folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none.conf"),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
        }
        self._log = folder / "log"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # What tells Erlang's nodes of one another: the broker would start one that outlives it.
        self._stack.enter_context(Guarded(["epmd", "-port", str(self._names)], env=self._env))
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()
        self._stack.close()

    def _start(self) -> None:
        command = [str(PROGRAMS / "rabbitmq-server"), "-noinput"]
        self._process = Logged(command, self._log, grace=STARTS_WITHIN, env=self._env)
        try:
            assert eventually(lambda: self._answers() or self._process.poll() is not None, STARTS_WITHIN)
            assert self._process.poll() is None
        except BaseException:
            print(self._process.text[-5000:])
            self._process.close()
            raise

    def crash(self) -> None:
        """End it by SIGKILL, and start it again, with what it has written down."""
        self._process.send_signal(signal.SIGKILL)
        self._process.close()
        self._start()

    def _answers(self) -> bool:
        with suppress(OSError, AMQPError), amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=1):
            return True
        return False

    def control(self, *arguments: str) -> str:
        """What its own command answers."""
        command = [str(PROGRAMS / "rabbitmqctl"), "--quiet", "-n", self._node, *arguments]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=True)
        return done.stdout

    def make_place(self) -> str:
        """A virtual host of one's own, of whose deliveries copies are made; returns its URL."""
        name = uuid4().hex
        self.control("add_vhost", name)
        self.control("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        self.control("trace_on", "-p", name)
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{name}"


@contextmanager
def rabbitmq_server() -> Iterator[RabbitMQ]:
    """Start one for the length of a `with` block."""
    with TemporaryDirectory(prefix="only_one-", ignore_cleanup_errors=True) as folder, RabbitMQ(Path(folder)) as server:
        yield server


if __name__ == "__main__":
    if is_installed():
        print("classic quorum")
    else:
        print("RabbitMQ is missing, so its tests do not run: sudo apt-get install rabbitmq-server", file=sys.stderr)
