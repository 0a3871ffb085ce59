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

import socket
import ssl
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from typing_extensions import Self

Then = Literal["close", "hang"]
"""What comes after a loss: the connection is closed, or stays open and says nothing more."""

_BULKS = b"$=!"
_AGGREGATES = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
_GREETINGS = {"HELLO", "AUTH", "CLIENT", "SELECT"}


@dataclass(eq=False)
class Fault:
    """What is to happen to the next commands of some names.

    Attributes:
        names: the commands.
        left: how many commands it is still to meet.
        forwards: whether the server gets to see them.
        answers: whether the client gets to see the reply.
        then: what comes after a loss.
        met: set once it has met one.
        goes_on: set once what is held up may go on.
    """

    names: Collection[str] = ()
    left: int = 1
    forwards: bool = True
    answers: bool = False
    then: Then = "close"
    met: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def let_go(self) -> Self:
        """Let what is held up go on to the server, also if its client has given up."""
        self.goes_on.set()
        return self


_NO_FAULT = Fault(answers=True).let_go()


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
        socket.create_connection(("127.0.0.1", self.port)).close()  # which wakes the acceptor
        self._acceptor.join()
        self._listener.close()
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
        return self._add(Fault(names, times, then=then).let_go())

    def lose_request(self, *names: str, times: int = 1, then: Then = "close") -> Fault:
        """Swallow the next commands of these names, so that the server never sees them.

        Args:
            names: commands, such as `"SET"`.
            times: how many commands.
            then: whether the connection is closed, or left open without a word.
        """
        return self._add(Fault(names, times, forwards=False, then=then).let_go())

    def hold_up(self, *names: str, times: int = 1) -> Fault:
        """Keep the next commands of these names on their way until `let_go()`, whatever their client does meanwhile.

        Args:
            names: commands, such as `"SET"`.
            times: how many commands.
        """
        return self._add(Fault(names, times, answers=True))

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
        self._set(silence=Fault(forwards=forwards, then="hang").let_go())
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
        while True:
            client = self._listener.accept()[0]
            if self._closed:
                client.close()
                return
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
        # Where the server is down, the client finds its connection closed.
        with client, suppress(_Closed, OSError), socket.create_connection(address) as server:
            for line in (client, server):
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._lines.add(server)
            with client.makefile("rb") as asks, server.makefile("rb") as answers:
                while True:
                    self._serve_one(client, server, asks, answers)

    def _serve_one(self, client: socket.socket, server: socket.socket, asks: BinaryIO, answers: BinaryIO) -> None:
        command = _read(asks)
        fault = self._note(command)
        time.sleep(self._delay)
        fault.goes_on.wait()
        if self._closed:
            raise _Closed
        reply = b""
        if fault.forwards:
            server.sendall(command)
            reply = _read(answers)
        if fault.answers:
            client.sendall(reply)
        elif fault.then == "close":
            raise _Closed
        else:
            _swallow(asks)

    def _note(self, command: bytes) -> Fault:
        """Write down a command, and find the fault that it meets."""
        name = command.split(b"\r\n", 3)[2].decode().upper()
        with self._lock:
            self._commands.append(name)
            if self._silence:
                return self._silence
            fault = next((each for each in self._faults if each.left and name in each.names), _NO_FAULT)
            if fault is not _NO_FAULT:
                fault.left -= 1
                fault.met.set()
            return fault


def _read(source: BinaryIO) -> bytes:
    """One command or reply as it was sent, with the pushes and attributes in front of it."""
    head = source.readline()
    if not head.endswith(b"\r\n"):
        raise _Closed
    kind = head[:1]
    if kind in _BULKS and head[1:2] != b"-":
        return head + _exactly(source, int(head[1:]) + 2)
    parts = int(head[1:]) * _AGGREGATES[kind] if kind in _AGGREGATES else 0
    whole = head + b"".join(_read(source) for _ in range(parts))
    return whole + _read(source) if kind in b">|" else whole


def _exactly(source: BinaryIO, size: int) -> bytes:
    text = source.read(size)
    if len(text) < size:
        raise _Closed
    return text


def _swallow(source: BinaryIO) -> None:
    """Read until the client closes the connection."""
    while source.read(1):
        pass
    raise _Closed
