"""An SMTP server on loopback, in a process of its own: what it has accepted is what counts.

`python -m examples.newsletter.smtp_server FILE` prints its port.
The recipient of a message is written down, in a line of the file, before the message is said to be accepted.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

from aiosmtpd.smtp import SMTP, Envelope, Session

from only_one.testing import Guarded

ROOT = Path(__file__).parents[2]


class Recorder:
    """Writes down who has got a message.

    Args:
        path: where to.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802
        """Accept a message."""
        os.write(self._file, f"{envelope.rcpt_tos[0]}\n".encode())
        return "250 OK"


async def serve(path: str) -> None:
    """Serve until the process ends.

    Args:
        path: the file to write to.
    """
    recorder, loop = Recorder(path), asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(recorder, hostname="localhost", loop=loop), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def smtp_server(path: Path) -> Iterator[tuple[str, Guarded]]:
    """Run the server for the length of a `with` block.

    Args:
        path: the file that it writes to.

    Yields:
        Its address and its process.
    """
    command = [sys.executable, "-m", "examples.newsletter.smtp_server", str(path)]
    with Guarded(command, cwd=ROOT, stdout=PIPE) as process:
        port = process.stdout.readline() if process.stdout else b""
        yield f"127.0.0.1:{int(port)}", process


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
