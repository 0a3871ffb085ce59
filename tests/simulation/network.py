"""The network of the world: hosts, and connections whose messages are late or lost, for blocking code and asyncio."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

from .server import Refusal, Store, commands_in, encode
from .world import Thread, World

_RESET = ConnectionResetError(errno.ECONNRESET, "reset")
_DELAYS = [0.3, 0.7, 1.2, 2.5, 6.0]


class Host:
    """A host with a server.

    Attributes:
        store: what its server stores.
        frozen_until: until when it does nothing, as with SIGSTOP.
        down_until: until when it refuses connections.
        refused: the text with which it refuses some commands, and which, until when.
        cut_off: until when a process cannot reach it.
        latest: the most seconds that the network held up a message to or from it.
        loses: how probable it is for each message that the connection is cut instead.
        delays: how probable it is for each message that it is late.
        arrived: called with each command that was executed, the process that sent it, and the reply.
        answered: called when a reply has arrived.
    """

    def __init__(self, world: World, address: tuple[str, int], store: Store) -> None:
        self.world, self.address, self.store = world, address, store
        self.frozen_until = self.down_until = self.latest = self.loses = self.delays = 0.0
        self.refused: tuple[str, tuple[bytes, ...], float] = ("", (), 0.0)
        self.cut_off: dict[Any, float] = {}
        self.links: list[Link] = []
        self.arrived: Callable[[Any, list[bytes], Any], None] = lambda *_: None
        self.answered: Callable[[Any], None] = lambda _: None

    def stop(self, seconds: float) -> None:
        """Let the server end, and begin again later: every connection is reset."""
        self.down_until = self.world.now + seconds
        for link in self.links:
            link.reset()
        self.links.clear()

    def execute(self, command: list[bytes]) -> Any:
        text, commands, until = self.refused
        if until > self.world.now and command[0] in commands:
            return Refusal(text)
        return self.store.execute(command)

    @property
    def calm_from(self) -> float:
        """From when on nothing is wrong with it, but for messages that are late."""
        return max(self.frozen_until, self.down_until, self.refused[2], *self.cut_off.values(), 0.0)


class Link:
    """A connection: in order in each direction; what was sent may arrive long after the client has closed it."""

    host: Any = None

    def __init__(self, world: World, process: Any) -> None:
        super().__init__()
        self.world, self.process = world, process
        self.inbox = bytearray()
        self.is_reset = self.is_closed = False
        self.on_input: Callable[[], None] = lambda: None
        self._buffer = bytearray()
        world.links.append(self)

    def open(self, address: tuple[str, int]) -> float:
        """Connect, and return the seconds that it takes.

        Raises:
            ConnectionRefusedError: if no server listens there.
        """
        world, process = self.world, self.process
        self.host = world.hosts[address]
        if self.host.down_until > world.now:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        self._up, self._down = (
            [f"{what} of {process.name} {way}" for what in ("latency", "cut", "late", "delay")]
            for way in ("up", "down")
        )
        # The system of a frozen server's machine accepts connections for it; a network that is cut accepts nothing.
        seconds: float = self.host.cut_off.get(process, 0.0) - world.now
        return max(0.0, seconds)

    def opened(self) -> None:
        self._up_at = self._down_at = self.world.now
        self.host.links.append(self)

    def send(self, data: bytes) -> None:
        if self.is_reset:
            raise _RESET
        self._buffer += data
        for command in commands_in(self._buffer):
            self._up_at, is_lost = self._journey(self._up, self._up_at)
            self.world.at(self._up_at, self.reset if is_lost else partial(self._arrive, command))

    def _journey(self, labels: list[str], last: float) -> tuple[float, bool]:
        """When a message arrives, and whether the connection is cut instead."""
        world, host = self.world, self.host
        latency, cut, late, delayed = labels
        delay = world.uniform(latency, 0.0002, 0.002)
        is_lost = world.fault(cut, host.loses)
        if world.fault(late, host.delays):
            delay = world.choose(delayed, _DELAYS)
        host.latest = max(host.latest, delay)
        # Later than the last by a moment: what arrives at one time arrives in any order.
        return max(last + 1e-7, world.now + delay, host.cut_off.get(self.process, 0.0)), is_lost

    def _arrive(self, command: list[bytes]) -> None:
        world, host = self.world, self.host
        if host.frozen_until > world.now:
            world.at(host.frozen_until, partial(self._arrive, command))
        elif not self.is_reset:
            reply = host.execute(command)
            host.arrived(self.process, command, reply)
            self._down_at, is_lost = self._journey(self._down, self._down_at)
            world.at(self._down_at, self.reset if is_lost else partial(self._deliver, reply))

    def _deliver(self, reply: Any) -> None:
        if not self.is_closed and not self.is_reset:
            self.host.answered(self.process)
            self.inbox += encode(reply)
            self.on_input()

    def take(self, count: int | None = None) -> bytes:
        """Take what has arrived.

        Raises:
            ConnectionResetError: if nothing has, because the connection is reset.
        """
        data = bytes(self.inbox[:count])
        del self.inbox[:count]
        if not data and self.is_reset:
            raise _RESET
        return data

    def reset(self) -> None:
        self.is_reset = True
        self.on_input()

    def close(self) -> None:
        self.is_closed = True

    def forget(self) -> None:
        """The history is over."""
        self.is_reset, self.on_input = True, lambda: None
        self.world = self.process = self.host = _OVER


_OVER: Any = SimpleNamespace(is_over=True)


def _nothing() -> None: ...


class BlockingSocket(Link):
    """``socket.socket`` in the world."""

    def __init__(self, thread: Thread) -> None:
        super().__init__(thread.world, thread.process)
        self._timeout: float | None = None

    def connect(self, address: tuple[str, int]) -> None:
        seconds, limit = self.open(address[:2]), self._timeout or 1e9
        self.world.sleep(min(seconds + 0.0001, limit))
        if seconds > limit:
            raise TimeoutError
        self.opened()

    def sendall(self, data: bytes) -> None:
        if self.world.is_over:
            raise _RESET
        self.send(data)
        self.world.sleep(0)

    def recv(self, count: int) -> bytes:
        if not self.inbox and not self.is_reset:
            if self._timeout == 0:
                raise BlockingIOError(errno.EWOULDBLOCK, "nothing yet")
            if not self.world.wait(self._wake_on_input, self._timeout):
                raise TimeoutError
        return self.take(count)

    def _wake_on_input(self, wake: Callable[[Any], None]) -> None:
        self.on_input = lambda: wake(True)

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def setsockopt(self, *_: Any) -> None: ...

    def shutdown(self, _how: int) -> None: ...


class Transport(Link, asyncio.Transport):
    """A connection of an event loop."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop.world, loop.process)
        self._loop = loop
        self.protocol: Any = None
        self.on_input = self._on_input

    def _on_input(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        if self.is_closed:
            return
        try:
            if data := self.take():
                self.protocol.data_received(data)
        except ConnectionResetError as error:
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self.is_closed and not self._loop.is_closed():
            self._loop.call_soon(self.protocol.connection_lost, error)
        self.is_closed = True

    def write(self, data: Any) -> None:
        if self._loop.on_write is not _nothing:
            self._loop.call_soon(self._loop.on_write)
            self._loop.on_write = _nothing
        try:
            self.send(bytes(data))
        except ConnectionResetError as error:
            self._lose(error)

    def close(self) -> None:
        self._lose(None)

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed


class _Selector:
    """What an event loop waits for: here, the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.wake: Callable[[Any], None] = lambda _: None

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None or timeout > 0:
            self.world.wait(lambda wake: setattr(self, "wake", wake), timeout)
        return []


class Loop(asyncio.BaseEventLoop):
    """An event loop whose time and connections are the world's."""

    def __init__(self, world: World, process: Any) -> None:
        super().__init__()
        self.world, self.process, self._selector = world, process, _Selector(world)
        self.on_write: Callable[[], object] = _nothing  # called once

    def time(self) -> float:
        return self.world.now

    def _process_events(self, _events: Any) -> None: ...

    def _write_to_self(self) -> None:
        self._selector.wake(None)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        transport = Transport(self)
        await asyncio.sleep(transport.open((host, port)))
        transport.opened()
        transport.protocol = protocol_factory()
        transport.protocol.connection_made(transport)
        return transport, transport.protocol

    def play(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, as ``asyncio.run`` does."""
        try:
            self.run_until_complete(main)
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self.close()
