"""An SMTP server on loopback, in a process of its own: what it has accepted is what counts.

`python -m examples.newsletter.smtp_server FILE [PORT]` prints its port.
Each recipient of a message is written down, in a line of the file, before the message is said to be accepted.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from aiosmtpd.smtp import SMTP, Envelope, Session

from only_one.testing import Guarded

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Attributes:
        address: its host and port.
        process: its process.
    """

    address: str
    process: Guarded


class Recorder:
    """Writes down who has got a message.

    Args:
        path: where to.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802
        """Accept a message."""
        os.write(self._file, "".join(f"{recipient}\n" for recipient in envelope.rcpt_tos).encode())
        return "250 OK"


async def serve(path: str, port: int) -> None:
    """Serve until the process ends.

    Args:
        path: the file to write to.
        port: where to listen; 0 for any that is free.
    """
    recorder, loop = Recorder(path), asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(recorder, hostname="localhost", loop=loop), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def smtp_server(path: Path) -> Iterator[Running]:
    """Run the server for the length of a `with` block.

    Args:
        path: the file that it writes to.

    Yields:
        The server.

    Raises:
        ChildProcessError: it does not start.
    """
    command = [sys.executable, "-m", "examples.newsletter.smtp_server", str(path)]
    with path.with_name("smtp.log").open("ab") as log, Guarded(command, cwd=ROOT, stdout=PIPE, stderr=log) as process:
        if process.stdout is None or not (port := process.stdout.readline()):
            msg = f"the SMTP server does not start; see {log.name}"
            raise ChildProcessError(msg)
        yield Running(f"127.0.0.1:{int(port)}", process)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 0))
