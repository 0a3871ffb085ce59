"""The network of the world: a host, and connections whose messages are late or lost, for blocking code and asyncio."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

from .server import Refusal, Store, commands_in, encode
from .world import Thread, World

_DELAYS = [0.3, 0.7, 1.2, 2.5, 6.0]


class Host:
    """A host with a server.

    Attributes:
        store: the keys that the server stores.
        frozen_until: until when the server does nothing, as with SIGSTOP.
        down_until: until when the server refuses connections.
        refused: the text with which the server refuses some commands, these commands, and until when.
        latest: the most seconds for which the network held up a message to or from the host.
        loses: how probable it is for each message that the connection is cut instead.
        delays: how probable it is for each message that it is late.
        answers: when a reply, or the end of a connection, reached a process, and the process.
        messages: how many messages were sent, to the host and by it.
        at_message: by a message's number, what happens to the message's process when it is sent.
    """

    def __init__(self, world: Any, store: Store, name: str) -> None:
        self.world, self.store, self.name = world, store, name
        self.frozen_until = self.down_until = self.latest = self.loses = self.delays = 0.0
        self.refused: tuple[str, tuple[bytes, ...], float] = ("", (), 0.0)
        self.answers: list[tuple[float, Any]] = []
        self.links: list[Link] = []
        self.messages, self.at_message = 0, dict[int, Callable[[Any], None]]()

    def stop(self, seconds: float) -> None:
        """Let the server end, and begin again later: every connection is reset."""
        self.down_until = self.world.now + seconds
        for link in self.links:
            link.reset()
        self.links.clear()

    def execute(self, link: Link, command: list[bytes]) -> Any:
        text, commands, until = self.refused
        is_refused = until > self.world.now and command[0] in commands
        reply = self.world.deployment.answer(self.name, command, is_asking=link.is_asking)
        link.is_asking = command[0] == b"ASKING"
        if reply is None:
            reply = Refusal(text) if is_refused else self.store.execute(command)
        self.world.note(self.name, "executes for", link.process.name, tuple(command), reply)
        return reply


class Link:
    """A connection, which keeps the order in each direction. A message may arrive long after the client's close."""

    def __init__(self, world: Any, process: Any) -> None:
        super().__init__()
        self.world, self.process, self.host = world, process, world.host
        self.inbox = bytearray()
        self.is_reset = self.is_closed = self.is_asking = self.is_inherited = False
        self._buffer = bytearray()
        self._last = {"up": 0.0, "down": 0.0, "frozen": 0.0}

    def open(self, host: str) -> float:
        """Connect to a host, and return the seconds that the connecting takes.

        Raises:
            ConnectionRefusedError: if no server listens.
        """
        self.host = self.world.hosts[host]
        if self.host.down_until > self.world.now:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        # The system of a frozen server's machine accepts connections for it; a network that is cut accepts nothing.
        seconds: float = self.process.cut_off_until - self.world.now
        return max(0.0, seconds)

    def send(self, data: bytes) -> None:
        if self.is_inherited:
            self.world.problem("a child uses its parent's connection", self.process.name)
        if self.is_reset:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        self._buffer += data
        for command in commands_in(self._buffer):
            self._travel("up", self._arrive, command)

    def _travel(self, way: str, arrive: Callable[..., None], what: Any) -> None:
        """Let a message arrive, now or late, or the connection be cut instead."""
        world, host, whose = self.world, self.host, f"of {self.process.name} {way}"
        host.messages += 1
        if happens := host.at_message.get(host.messages):
            world.after(0, happens, self.process)
        delay = world.uniform(f"latency {whose}", 0.0002, 0.002)
        is_lost = world.fault(f"cut {whose}", host.loses)
        if world.fault(f"late {whose}", host.delays):
            delay = world.choose(f"delay {whose}", _DELAYS)
        host.latest = max(host.latest, delay)
        # Later than the last message by a moment, because events of one time happen in any order.
        self._last[way] = max(self._last[way] + 1e-7, world.now + delay, self.process.cut_off_until)
        world.at(self._last[way], self.reset if is_lost else arrive, what)

    def _arrive(self, command: list[bytes]) -> None:
        if self.host.frozen_until > self.world.now:
            # In the order in which the commands have arrived.
            self._last["frozen"] = max(self._last["frozen"] + 1e-7, self.host.frozen_until)
            self.world.at(self._last["frozen"], self._arrive, command)
        elif not self.is_reset:
            self._travel("down", self._deliver, self.host.execute(self, command))

    def _deliver(self, reply: Any) -> None:
        if not self.is_closed and not self.is_reset:
            self.host.answers.append((self.world.now, self.process))
            self.inbox += encode(reply)
            self.on_input()

    def on_input(self) -> None:
        """Called when something has arrived, or the connection is reset."""
        raise NotImplementedError

    def take(self, count: int | None = None) -> bytes:
        """Take the bytes that have arrived.

        Raises:
            ConnectionResetError: if none have arrived, because the connection is reset.
        """
        data = bytes(self.inbox[:count])
        del self.inbox[:count]
        if not data and self.is_reset:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        return data

    def reset(self, _what: object = None) -> None:
        if not self.is_closed:
            self.host.answers.append((self.world.now, self.process))
        self.is_reset = True
        self.on_input()

    def close(self) -> None:
        self.is_closed = True


class BlockingSocket(Link):
    """``socket.socket`` in the world."""

    def __init__(self, thread: Thread) -> None:
        super().__init__(thread.world, thread.process)
        self._timeout: float | None = None
        self._wake: Callable[[object], None] = lambda _: None

    def connect(self, address: tuple[str, int]) -> None:
        seconds, limit = self.open(address[0]), self._timeout or 1e9
        self.world.sleep(min(seconds + 0.0001, limit))
        if seconds > limit:
            raise TimeoutError
        self.host.links.append(self)

    def sendall(self, data: bytes) -> None:
        self.send(data)
        self.world.sleep(0)

    def recv(self, count: int) -> bytes:
        if not self.inbox and not self.is_reset:
            if self._timeout == 0:
                raise BlockingIOError(errno.EWOULDBLOCK, "nothing yet")
            if not self.world.wait(lambda wake: setattr(self, "_wake", wake), self._timeout):
                raise TimeoutError
        return self.take(count)

    def on_input(self) -> None:
        self._wake(True)

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def setsockopt(self, *_: Any) -> None: ...

    shutdown = setsockopt


class Transport(Link, asyncio.Transport):
    """A connection of an event loop."""

    def __init__(self, loop: Loop, protocol: Any) -> None:
        super().__init__(loop.world, loop.process)
        self._loop, self._protocol = loop, protocol

    def on_input(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        if self.is_closed:
            return
        try:
            self._protocol.data_received(self.take())
        except ConnectionResetError as error:
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self.is_closed and not self._loop.is_closed():
            self._loop.call_soon(self._protocol.connection_lost, error)
        self.is_closed = True

    def write(self, data: Any) -> None:
        if self._loop.on_write is not None:
            self._loop.call_soon(self._loop.on_write)
            self._loop.on_write = None
        try:
            self.send(bytes(data))
        except ConnectionResetError as error:
            self._lose(error)

    def close(self) -> None:
        self._lose(None)

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed


class Loop(asyncio.BaseEventLoop):
    """An event loop whose time and connections are the world's."""

    def __init__(self, world: World, process: Any) -> None:
        super().__init__()
        self.world, self.process = world, process
        self.on_write: Callable[[], object] | None = None  # called once
        self._selector = self
        self._wake: Callable[[object], None] = lambda _: None

    def time(self) -> float:
        return self.world.now

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for the world, as for a selector's files."""
        if timeout is None or timeout > 0:
            self.world.wait(lambda wake: setattr(self, "_wake", wake), timeout)
        return []

    def _process_events(self, _events: Any) -> None: ...

    def _write_to_self(self) -> None:
        self._wake(None)

    async def create_connection(self, protocol_factory: Any, host: Any = None, *_: Any, **__: Any) -> Any:
        protocol = protocol_factory()
        transport = Transport(self, protocol)
        await asyncio.sleep(transport.open(host))
        transport.host.links.append(transport)
        protocol.connection_made(transport)
        return transport, protocol
