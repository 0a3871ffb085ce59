"""The network of the world: hosts, and connections whose messages are late or lost, for blocking code and asyncio."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from .server import Refusal, Status, Store, commands_in, encode
from .world import World


class Host:
    """A host with a server.

    Attributes:
        store: what its server stores.
        frozen_until: until when it does nothing, as with SIGSTOP.
        down_until: until when it refuses connections.
        refuses: gives the error reply to a command, or None.
        latest: the most seconds that a message to or from it was late.
    """

    def __init__(self, world: World, address: tuple[str, int], store: Store) -> None:
        self.world, self.address, self.store = world, address, store
        self.frozen_until = self.down_until = self.refuses_until = self.latest = 0.0
        self.links: list[Link] = []
        self.cut_off: dict[Any, float] = {}  # until when a process cannot reach it
        self.refuses: Callable[[list[bytes]], Refusal | None] = lambda _: None
        self.answered: Callable[[Any], None] = lambda _: None
        self.arrived: Callable[[Any, list[bytes], Any], None] = lambda *_: None
        self.loses = self.delays = 0.0  # how probable it is for each message

    def stop(self, seconds: float) -> None:
        """Let the server end, and begin again later: every connection is reset."""
        self.down_until = self.world.now + seconds
        for link in self.links:
            link.reset()
        self.links.clear()


class Link:
    """A connection: in order in each direction; what was sent may arrive long after the client has closed it."""

    def __init__(self, world: World, process: Any, host: Host) -> None:
        self.world, self.process, self.host = world, process, host
        self.inbox = bytearray()
        self.is_reset = self.is_closed = False
        self.on_input: Callable[[], None] = lambda: None
        self._buffer = bytearray()
        self._up = self._down = world.now
        host.links.append(self)
        world.links.append(self)

    def send(self, data: bytes) -> None:
        if self.is_reset:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        self._buffer += data
        for command in commands_in(self._buffer):
            # Of a command that is not the lock's, such as CLIENT SETINFO, nothing is told.
            self._up, is_lost = self._journey("up", self._up)
            if is_lost:
                self.world.at(self._up, self.reset)
            else:
                self.world.at(self._up, lambda command=command: self._arrive(command))  # type: ignore[misc]

    def _journey(self, way: str, last: float) -> tuple[float, bool]:
        """When a message arrives, and whether the connection is cut instead."""
        world, host, label = self.world, self.host, f"of {self.process.name} {way}"
        delay = world.uniform(f"latency {label}", 0.0002, 0.002)
        is_lost = world.fault(f"cut {label}", host.loses)
        if world.fault(f"late {label}", host.delays):
            delay = world.choose(f"delay {label}", [0.3, 0.7, 1.2, 2.5, 6.0])
        # Later than the last by a moment: what arrives at one time arrives in any order.
        arrival = max(last + 1e-7, world.now + delay, host.cut_off.get(self.process, 0.0))
        host.latest = max(host.latest, arrival - world.now)
        return arrival, is_lost

    def _arrive(self, command: list[bytes]) -> None:
        world, host = self.world, self.host
        if host.frozen_until > world.now:
            host.latest = max(host.latest, host.frozen_until - world.now)
            world.at(host.frozen_until, lambda: self._arrive(command))
            return
        if self.is_reset:
            return
        reply = host.refuses(command)
        if reply is None:
            reply = host.store.execute(command)
        host.arrived(self.process, command, reply)
        self._down, is_lost = self._journey("down", self._down)
        world.at(self._down, self.reset if is_lost else lambda: self._deliver(encode(reply)))

    def _deliver(self, data: bytes) -> None:
        if not self.is_closed and not self.is_reset:
            self.host.answered(self.process)
            self.inbox += data
            self.on_input()

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


def resolve(world: World, process: Any, address: tuple[str, int]) -> tuple[Host, float]:
    """The host of an address, and the seconds that connecting to it takes.

    Raises:
        ConnectionRefusedError: if no server listens there.
    """
    host: Host = world.hosts[address]
    if host.down_until > world.now:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    # The system of a frozen server's machine accepts connections for it; a network that is cut accepts nothing.
    return host, max(0.0, host.cut_off.get(process, 0.0) - world.now)


class BlockingSocket:
    """``socket.socket`` in the world."""

    def __init__(self, thread: Callable[[], Any], *_: Any) -> None:
        self._thread = thread
        self._timeout: float | None = None
        self._link: Any = None

    def connect(self, address: tuple[str, int]) -> None:
        running = self._thread()
        world = running.world
        host, seconds = resolve(world, running.process, address[:2])
        world.sleep(min(seconds + 0.0001, self._timeout or 1e9))
        if seconds > (self._timeout or 1e9):
            raise TimeoutError
        self._link = Link(world, running.process, host)

    def sendall(self, data: bytes) -> None:
        world = self._link.world
        if world.is_over:
            raise ConnectionResetError(errno.ECONNRESET, "the world has ended")
        self._link.send(data)
        world.sleep(0)

    def recv(self, count: int) -> bytes:
        link, world = self._link, self._link.world
        if not link.inbox and not link.is_reset:
            if self._timeout == 0:
                raise BlockingIOError(errno.EWOULDBLOCK, "nothing yet")

            def begin(wake: Callable[[Any], None]) -> None:
                link.on_input = lambda: wake(True)

            if not world.wait(begin, self._timeout):
                raise TimeoutError
        if link.inbox:
            data = bytes(link.inbox[:count])
            del link.inbox[:count]
            return data
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def setsockopt(self, *_: Any) -> None: ...

    def shutdown(self, _how: int) -> None: ...

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


class FakeSocketModule(ModuleType):
    """The module ``socket`` as redis-py sees it."""

    def __init__(self, real: ModuleType, thread: Callable[[], Any]) -> None:
        super().__init__("socket")
        self._real = real
        self.socket = lambda *args: BlockingSocket(thread, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @staticmethod
    def getaddrinfo(host: str, port: int, *_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]


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
        self._world, self._process, self._selector = world, process, _Selector(world)

    @property
    def asyncgen_hooks(self) -> tuple[Any, Any]:
        untyped: Any = self
        return untyped._asyncgen_firstiter_hook, untyped._asyncgen_finalizer_hook

    def time(self) -> float:
        return self._world.now

    def _process_events(self, _events: Any) -> None: ...

    def _write_to_self(self) -> None:
        self._selector.wake(None)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        found, seconds = resolve(self._world, self._process, (host, port))
        await asyncio.sleep(seconds)
        protocol = protocol_factory()
        transport = _Transport(self, Link(self._world, self._process, found), protocol)
        protocol.connection_made(transport)
        return transport, protocol


class _Transport(asyncio.Transport):
    def __init__(self, loop: Loop, link: Link, protocol: Any) -> None:
        super().__init__()
        self._loop, self._link, self._protocol = loop, link, protocol
        self._is_closing = False
        link.on_input = self._on_input

    def _on_input(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        if self._is_closing:
            return
        if self._link.inbox:
            data = bytes(self._link.inbox)
            self._link.inbox.clear()
            self._protocol.data_received(data)
        elif self._link.is_reset:
            self._lose(ConnectionResetError(errno.ECONNRESET, "reset"))

    def _lose(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._link.close()
            if not self._loop.is_closed():
                self._loop.call_soon(self._protocol.connection_lost, error)

    def write(self, data: Any) -> None:
        try:
            self._link.send(bytes(data))
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        self._lose(None)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, *_: Any, **__: Any) -> None: ...


__all__ = ["BlockingSocket", "FakeSocketModule", "Host", "Link", "Loop", "Status"]
