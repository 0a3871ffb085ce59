"""Processes of the world: each is a copy of the package of its own, whose clock, threads and process table are fakes.

The fakes stand in the place of Python's modules while a copy is imported, so the package itself knows nothing of them.
"""

from __future__ import annotations

import builtins
import copy
import importlib
import inspect
import os
import pathlib
import pkgutil
import queue
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import greenlet
import redis.asyncio.client
import redis.asyncio.connection
import redis.client
import redis.connection
import redis.driver_info
import redis.event
import redis.retry
import redis.utils
from celery.utils.dispatch import Signal

from .network import BlockingSocket
from .tracing import handle_signal
from .world import Thread, World

_importing: list[Process] = []
_history: list[World] = []
"""The world of the history that is under way."""


def thread() -> Thread | None:
    """The thread of the world that runs, if there is one."""
    running = greenlet.getcurrent()
    return running if isinstance(running, Thread) else None


def this() -> Any:
    """The process that runs."""
    running = thread()
    return running.process if running else (_importing[-1] if _importing else None)


class Fake(ModuleType):
    """A module with some names of its own; all others are the real module's."""

    def __init__(self, real: ModuleType, **own: Any) -> None:
        super().__init__(real.__name__)
        vars(self).update({**vars(real), **own})


def _now(*_: int) -> float:
    return _history[-1].now if _history else time.monotonic()


def _wall() -> float:
    return _history[-1].wall() if _history else time.time()


def _sleep(seconds: float) -> None:
    _history[-1].sleep(seconds)


def _kill(pid: int, _signal: int) -> None:
    if this().machine.is_dead(pid):
        raise ProcessLookupError


def _urandom(count: int) -> bytes:
    return b"".join(b"%c" % int(256 * _history[-1].draw("urandom")) for _ in range(count))


def _on_fork(*, before: Any = None, after_in_parent: Any = None, after_in_child: Any = None) -> None:
    del after_in_parent  # nothing else runs at that moment
    if before is None:  # else it is a lock, that is held meanwhile
        _importing[-1].after_fork.append(after_in_child)


def _on_exit(do: Callable[[], object]) -> None:
    _importing[-1].at_exit.append(do)


class FakeThread:
    """``threading.Thread`` in the world."""

    _thread: Any = None

    def __init__(self, target: Any, args: tuple[Any, ...] = (), name: str = "", daemon: bool = False) -> None:  # noqa: FBT001, FBT002
        self._target, self._args, self._name, self.daemon = target, args, name, daemon

    def start(self) -> None:
        process, world = this(), _history[-1]
        if process.has_ended or world.fault(f"no thread of {process.name}", process.no_thread):
            msg = "can't start new thread"
            raise RuntimeError(msg)
        self._thread = world.spawn(process, f"{process.name}/{self._name}", self._target, *self._args)

    def join(self) -> None:
        if self._thread is not None and not self._thread.dead:
            _history[-1].wait(self._thread.joined.append, None)


class _Waiting(list[Callable[[Any], None]]):
    """The threads that wait for something."""

    def wait(self, timeout: float | None) -> None:
        _history[-1].wait(self.append, timeout)

    def wake(self) -> None:
        while self:
            self.pop(0)(None)


class FakeLock:
    """``threading.Lock`` in the world."""

    def __init__(self) -> None:
        self._holder: Thread | None = None
        self._waiting = _Waiting()

    def acquire(self) -> bool:
        while self._holder is not None and self._holder.lives and not self._holder.dead:
            self._waiting.wait(1.0)
        self._holder = thread()
        return True

    def release(self) -> None:
        self._holder = None
        self._waiting.wake()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class FakeQueue:
    """``SimpleQueue`` in the world."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiting = _Waiting()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiting.wake()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.pop(0)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002
        if block and not self._items:
            self._waiting.wait(timeout)
        return self.get_nowait()


class FakeRandom:
    """``SystemRandom`` in the world."""

    def uniform(self, low: float, high: float) -> float:
        return _history[-1].uniform("random", low, high)


@dataclass(frozen=True)
class FakePath:
    """``Path`` of the files below /proc that tell processes apart."""

    path: str

    def readlink(self) -> Any:
        if self.path == "/proc/self":
            return FakePath(str(this().pid) if this().machine.is_known else "1")
        return f"{self.path.rpartition('/')[2]}:[{this().machine.name}]"

    def is_symlink(self) -> bool:
        return True

    def read_bytes(self) -> bytes:
        machine = this().machine
        if self.path.endswith("boot_id"):
            return str(machine.name).encode()
        pid = int(self.path.split("/")[2])
        if machine.is_dead(pid):
            raise FileNotFoundError
        return b"1 (x) S " + b"0 " * 18 + b"%d" % machine.processes[pid].started + b" 0 0"


_remembered_signature = lru_cache(500)(inspect.signature)


def _signature(function: Any) -> inspect.Signature:
    """The signature of a function; remembered for classes and functions of modules, which outlive a history."""
    is_kept = "<locals>" not in getattr(function, "__qualname__", "<locals>") and not hasattr(function, "__self__")
    return _remembered_signature(function) if is_kept else inspect.signature(function)


_time = Fake(time, clock_gettime=_now, monotonic=_now, perf_counter=_now, time=_wall, sleep=_sleep)
vars(_time)["time_ns"] = lambda: round(_wall() * 1e9)
_os = Fake(os, kill=_kill, urandom=_urandom, register_at_fork=_on_fork, getpid=lambda: getattr(this(), "pid", 1))
_socket = Fake(
    socket,
    socket=lambda *_: BlockingSocket(greenlet.getcurrent()),
    getaddrinfo=lambda host, port, *_: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))],
    gethostname=lambda: this().machine.name,
)
_queues: dict[str, Any] = {"SimpleQueue": FakeQueue, "Empty": queue.Empty, "Full": queue.Full}
FAKES: dict[str, ModuleType] = {
    "time": _time,
    "os": _os,
    "threading": Fake(threading, Thread=FakeThread, Lock=FakeLock),
    "socket": _socket,
    "queue": Fake(queue, **_queues),
    "_queue": Fake(queue, **_queues),
    "pathlib": Fake(pathlib, Path=FakePath),
    "random": Fake(random, SystemRandom=FakeRandom),
    "inspect": Fake(inspect, signature=_signature),
    # The renewing thread formats even the exception that ends a history, which is slow.
    "traceback": Fake(traceback, format_exc=lambda: repr(sys.exc_info()[1])),
    "atexit": Fake(ModuleType("atexit"), register=_on_exit),
}


_import = builtins.__import__


def _import_own(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
    """Functions that import when they are called get the modules of their own copy."""
    if globals is not None and "__process__" in globals and fromlist and name in globals["__process__"].modules:
        return globals["__process__"].modules[name]
    return _import(name, globals, locals, fromlist, level)


_parsed = lru_cache(redis.connection.parse_url)
_dispatcher: Any = vars(redis.event.EventDispatcher())


def _share_dispatcher(dispatcher: Any, *_: Any) -> None:
    dispatcher.__dict__.update(_dispatcher)


_driver = redis.driver_info.resolve_driver_info


def _driver_info(*given: Any) -> Any:
    return _driver(*given) if _history and _history[-1].greets else None


@contextmanager
def patched() -> Iterator[None]:
    """redis-py in the world: its sockets and sleeps are ours while histories run."""
    changes: list[tuple[Any, str, Any]] = [
        (redis.connection, "socket", _socket),
        (redis.connection, "os", _os),
        (redis.asyncio.connection, "os", _os),
        (redis.retry, "sleep", _sleep),
        (uuid, "os", _os),
        (redis.connection, "resolve_driver_info", _driver_info),
        (redis.client, "resolve_driver_info", _driver_info),
        (redis.asyncio.connection, "resolve_driver_info", _driver_info),
        (redis.asyncio.client, "resolve_driver_info", _driver_info),
        # What redis-py computes anew for each client, connection or command, but from constants.
        (redis.utils, "get_lib_version", lambda: "0"),
        (redis.utils, "_get_filterable_args", lambda *_: {}),  # of which it would say that they are deprecated
        (redis.client.CaseInsensitiveDict, "__init__", dict.update),  # a client's replies: all are in upper case
        (redis.event.EventDispatcher, "__init__", _share_dispatcher),
        (redis.connection, "get_default_socket_keepalive_options", dict),
        (redis.connection, "parse_url", lambda url: {**_parsed(url)}),
        (redis.connection, "get_pool_name", lambda _: "pool"),  # for metrics that nobody reads
        (redis.retry.AbstractRetry, "__deepcopy__", lambda retry, _: copy.copy(retry)),  # its back-off has no state
        (builtins, "__import__", _import_own),
        (signal, "valid_signals", lambda: [handle_signal]),  # none of the program that runs the world
        (signal, "getsignal", lambda handler: handler),
    ]
    before = [getattr(module, name, None) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


class Machine:
    """A machine: process ids mean the same to all its processes, if these can know which machine it is."""

    def __init__(self, name: str, *, is_known: bool = True) -> None:
        self.name, self.is_known = name, is_known
        self.processes: dict[int, Process] = {}

    def is_dead(self, pid: int) -> bool:
        return pid not in self.processes or self.processes[pid].is_dead

    def dead(self) -> list[int]:
        return [pid for pid in self.processes if self.is_dead(pid)]


@contextmanager
def _own_signals(process: Process) -> Iterator[None]:
    """Celery's signals reach only the receivers of the process that sends them."""
    original = Signal.connect

    def connect(signal: Any, receiver: Any, **_: Any) -> Any:
        def own(*args: Any, **kwargs: Any) -> Any:
            return receiver(*args, **kwargs) if this() is process else None

        return original(signal, own, weak=False)

    Signal.connect = connect
    try:
        yield
    finally:
        Signal.connect = original


_GONE: Any = SimpleNamespace(is_dead=True)
_CONTAINERS: Any = (dict, set, list, WeakSet, WeakKeyDictionary, WeakValueDictionary)
_ROOMS = ("call", "lock", "connections", "keys", "events", "celery")
_ROOT = Path(__file__).parents[2]


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "only_one"


def _rebound_in(module: ModuleType) -> dict[str, Any]:
    """The variables of a module that its functions bind anew, with their values at first."""
    names = re.findall(r"^ +global ([\w, ]+)", inspect.getsource(module), re.MULTILINE)
    return {name: vars(module)[name] for line in names for name in line.replace(",", " ").split()}


class Process:
    """A process with a copy of the package.

    Attributes:
        package: the copy of ``only_one``.
        modules: its modules by name.
        at_exit: what it does when it ends in order.
        after_fork: what it does when it finds itself to be a forked child.
    """

    def __init__(self, package_path: Path | None = None) -> None:
        self.at_exit: list[Callable[[], object]] = []
        self.after_fork: list[Callable[[], object]] = []
        self.machine = Machine("none")
        self.pid, self.name, self.life = 1, "none", 0
        self.modules = self._import(package_path or _ROOT)
        self.package = self.modules["only_one"]
        for module in self.modules.values():
            vars(module)["__process__"] = self
        self._at_first = [(vars(module), _rebound_in(module)) for module in self.modules.values()]
        values = [item for module in self.modules.values() for item in vars(module).items() if item[0][:2] != "__"]
        self._remembering: list[Any] = [value for _, value in values if hasattr(value, "cache_clear")]
        self._contents = [(value, value.copy()) for _, value in values if isinstance(value, _CONTAINERS)]

    def _import(self, path: Path) -> dict[str, ModuleType]:
        before = dict(sys.modules)
        for name in filter(_is_ours, before):
            del sys.modules[name]
        sys.modules.update(FAKES)
        sys.path.insert(0, str(path))
        _importing.append(self)
        try:
            package = importlib.import_module("only_one")
            with _own_signals(self):
                importlib.import_module("only_one.celery.lazy_tasks")
                importlib.import_module("only_one.celery.app_settings")
            for module in pkgutil.walk_packages(package.__path__, "only_one."):
                if module.name.split(".")[1] in _ROOMS:
                    importlib.import_module(module.name)
            own = {name: module for name, module in sys.modules.items() if _is_ours(name)}
        finally:
            _importing.pop()
            sys.path.remove(str(path))
            for name in [*filter(_is_ours, sys.modules)]:
                del sys.modules[name]
            sys.modules.update(before)
        return own

    def begin(self, machine: Machine, pid: int, name: str, started: int) -> None:
        """Begin anew, as a process that has just been started."""
        self.machine, self.pid, self.name, self.started = machine, pid, name, started
        self.is_dead = self.has_ended = False
        self.paused_until, self.no_thread = 0.0, 0.0
        self.life += 1
        machine.processes[pid] = self
        for values, first in self._at_first:
            if first:
                values.update(first)
        for remembers in self._remembering:
            remembers.cache_clear()
        for container, content in self._contents:
            container.clear()
            getattr(container, "update", getattr(container, "extend", print))(content)
        self._begin_as_child()

    def fork(self, pid: int) -> None:
        """Go on as a child with another id, and with all that the parent knows; the parent is gone."""
        self.machine.processes[self.pid] = _GONE
        self.machine.processes[pid], self.pid, self.started = self, pid, pid
        self._begin_as_child()

    def _begin_as_child(self) -> None:
        _importing.append(self)
        for do in self.after_fork:
            do()
        _importing.pop()


@contextmanager
def history_of(world: World) -> Iterator[None]:
    """Let the fakes show this world."""
    _history.append(world)
    try:
        yield
    finally:
        _history.pop()
