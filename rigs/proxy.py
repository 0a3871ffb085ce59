"""A TCP proxy between redis-py and a real server, that can lose what is sent and what is answered.

It reads the protocol: one command at a time is taken from the client, forwarded, and its reply handed back, so that a
fault hits exactly the command that it was made for, and no test has to wait for the right moment. It knows nothing of
published messages, which come without a command.

```python
with Proxy(server.url) as proxy:
    proxy.lose_reply("SET")          # the server carries out the next SET, and the client never hears of it
    redis.Redis.from_url(proxy.url).set("a", 1)
```
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from typing_extensions import Self

Then = Literal["close", "hang"]
"""What comes after a loss: the connection is closed, or stays open and says nothing more."""

_LINES = b"+-:_,#("
_BULKS = b"$=!"
_AGGREGATES = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
_GREETINGS = {"HELLO", "AUTH", "CLIENT", "SELECT"}


class Fault:
    """What is to happen to the next commands of some names.

    Attributes:
        names: the commands.
        forwards: whether the server gets to see them.
        answers: whether the client gets to see the reply.
        then: what comes after a loss.
        left: how many commands it is still to meet.
        met: set once it has met one.
    """

    def __init__(
        self, names: tuple[str, ...], times: int, *, forwards: bool, answers: bool, then: Then = "close"
    ) -> None:
        self.names = frozenset(names)
        self.forwards = forwards
        self.answers = answers
        self.then = then
        self.left = times
        self.met = threading.Event()
        self._goes_on = threading.Event()
        if not answers:
            self.let_go()

    def wait(self) -> None:
        """Wait until what was held up may go on."""
        self._goes_on.wait()

    def let_go(self) -> None:
        """Let what is held up go on to the server, also if its client has given up."""
        self._goes_on.set()


class _Closed(Exception):
    """One of the two ends has closed the connection."""


class Proxy(AbstractContextManager["Proxy"]):
    """Forwards connections to a server on this machine, and breaks them as it is told.

    Attributes:
        port: where it listens on 127.0.0.1; the same for as long as it lives.
    """

    def __init__(self, server_url: str, tls: ssl.SSLContext | None = None) -> None:
        """Made, and not yet listening.

        Args:
            server_url: where the server is, with whatever credentials and database clients are to use.
            tls: how clients are to encrypt what they send, for a server that knows nothing of it.
        """
        self._delay = 0.0
        self._parts = urlsplit(server_url)
        self._tls = tls
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._commands: list[str] = []
        self._lines: set[socket.socket] = set()
        self._handlers: list[threading.Thread] = []
        self._closed = False
        self._cut = False
        self._silence: Fault | None = None
        self._wakes, self._woken = socket.socketpair()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        """Where clients connect: the server's URL with another address."""
        credentials, at, _ = self._parts.netloc.rpartition("@")
        return self._parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self.port}").geturl()

    def lead_to(self, server_url: str) -> None:
        """Forward new connections to another server, as a name does that has moved; those that are open stay."""
        with self._lock:
            self._parts = urlsplit(server_url)

    def __enter__(self) -> Self:
        self._acceptor = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._wakes.send(b".")
        self._acceptor.join()
        self._listener.close()
        self._wakes.close()
        self._woken.close()
        for fault in self._faults:
            fault.let_go()
        self._drop_connections()
        for handler in self._handlers:
            handler.join()

    # What has been sent

    @property
    def commands(self) -> list[str]:
        """The names of the commands that clients have sent so far, without those that begin a connection."""
        with self._lock:
            return [name for name in self._commands if name not in _GREETINGS]

    def forget_commands(self) -> None:
        """Begin `commands` anew."""
        with self._lock:
            self._commands.clear()

    # What is to be lost

    def lose_reply(self, *names: str, times: int = 1, then: Then = "close") -> Fault:
        """Have the server carry out the next commands of these names, and swallow its replies.

        Args:
            names: commands, such as `"SET"`.
            times: how many commands.
            then: whether the connection is closed, or left open without a word.
        """
        return self._add(Fault(names, times, forwards=True, answers=False, then=then))

    def lose_request(self, *names: str, times: int = 1, then: Then = "close") -> Fault:
        """Swallow the next commands of these names, so that the server never sees them.

        Args:
            names: commands, such as `"SET"`.
            times: how many commands.
            then: whether the connection is closed, or left open without a word.
        """
        return self._add(Fault(names, times, forwards=False, answers=False, then=then))

    def hold_up(self, *names: str, times: int = 1) -> Fault:
        """Keep the next commands of these names on their way until `let_go()`, whatever their client does meanwhile.

        Args:
            names: commands, such as `"SET"`.
            times: how many commands.
        """
        return self._add(Fault(names, times, forwards=True, answers=True))

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    # What breaks for a while

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Close all connections, and each new one as soon as it is made."""
        self._set(cut=True)
        self._drop_connections()
        try:
            yield
        finally:
            self._set()

    @contextmanager
    def black_hole(self, *, forwards: bool = False) -> Iterator[None]:
        """Accept connections and swallow all commands, those of open connections too; at the end all are closed.

        Args:
            forwards: whether the server carries out the first command of each connection, and the reply is swallowed.
        """
        self._set(silence=Fault((), 1, forwards=forwards, answers=False, then="hang"))
        try:
            yield
        finally:
            self._set()
            self._drop_connections()

    @contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Keep each command on its way for so long."""
        self._delay = seconds
        try:
            yield
        finally:
            self._delay = 0.0

    refused = cut
    """To a client it is the same whether a connection is refused or closed at once."""

    def _set(self, *, cut: bool = False, silence: Fault | None = None) -> None:
        with self._lock:
            self._cut, self._silence = cut, silence

    def _drop_connections(self) -> None:
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    # The work

    def _accept(self) -> None:
        while self._woken not in select.select([self._listener, self._woken], [], [])[0]:
            client = self._listener.accept()[0]
            if self._tls:
                client = self._tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                if self._cut:
                    client.close()
                    continue
                self._lines.add(client)
            handler = threading.Thread(target=self._serve, args=(client,), name="proxy", daemon=True)
            self._handlers.append(handler)
            handler.start()

    def _serve(self, client: socket.socket) -> None:
        address = (self._parts.hostname or "127.0.0.1", self._parts.port or 6379)
        try:
            with client, socket.create_connection(address) as server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._lines.add(server)
                with client.makefile("rb") as asks, server.makefile("rb") as answers, suppress(_Closed, OSError):
                    while True:
                        self._serve_one(client, server, asks, answers)
                with self._lock:
                    self._lines.discard(server)
        except OSError:
            pass  # the server is down: the client finds its connection closed
        finally:
            with self._lock:
                self._lines.discard(client)

    def _serve_one(self, client: socket.socket, server: socket.socket, asks: BinaryIO, answers: BinaryIO) -> None:
        command, raw = _read_command(asks)
        fault = self._note(command)
        time.sleep(self._delay)
        if fault is not None:
            fault.wait()
        if self._closed:
            raise _Closed
        if fault is not None and not fault.answers:
            if fault.forwards:
                _forward(server, answers, raw)
            if fault.then == "close":
                raise _Closed
            _swallow(asks)
        client.sendall(_forward(server, answers, raw))

    def _note(self, command: list[bytes]) -> Fault | None:
        """Write down a command, and find the fault that it meets."""
        name = command[0].decode().upper()
        with self._lock:
            self._commands.append(name)
            if self._silence:
                return self._silence
            fault = next((each for each in self._faults if each.left and name in each.names), None)
            if fault is not None:
                fault.left -= 1
                fault.met.set()
            return fault


def _forward(server: socket.socket, answers: BinaryIO, command: bytes) -> bytes:
    """Send a command on, and return the reply to it."""
    server.sendall(command)
    return _read_reply(answers)


def _read_command(source: BinaryIO) -> tuple[list[bytes], bytes]:
    """One command, in pieces and as it was sent: an array of strings, as all clients send it."""
    head = _line(source)
    raw, pieces = [head], []
    for _ in range(int(head[1:])):
        length = _line(source)
        piece = _exactly(source, int(length[1:]) + 2)
        raw += [length, piece]
        pieces.append(piece[:-2])
    return pieces, b"".join(raw)


def _read_reply(source: BinaryIO) -> bytes:
    """One reply as the server sent it, with the pushes and attributes in front of it."""
    head = _line(source)
    kind = head[:1]
    if kind in _LINES:
        return head
    size = int(head[1:])
    if kind in _BULKS:
        return head if size < 0 else head + _exactly(source, size + 2)
    reply = head + b"".join(_read_reply(source) for _ in range(size * _AGGREGATES[kind]))
    return reply + _read_reply(source) if kind in b">|" else reply


def _line(source: BinaryIO) -> bytes:
    line = source.readline()
    if not line.endswith(b"\r\n"):
        raise _Closed
    return line


def _exactly(source: BinaryIO, size: int) -> bytes:
    found = source.read(size)
    if len(found) < size:
        raise _Closed
    return found


def _swallow(source: BinaryIO) -> None:
    """Read until the client closes the connection."""
    while source.read(1):
        pass
    raise _Closed
