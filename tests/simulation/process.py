"""Processes of the world: each has a copy of the package, whose clock, threads and process table are fakes.

The fakes stand in for Python's modules while a copy is imported, so the package itself knows nothing of them.
redis-py is changed for good: a Python process that plays histories does nothing else.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import pathlib
import pkgutil
import queue
import random
import secrets  # noqa: F401 - a pool of redis-py imports it while the fakes are in place
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from copy import copy
from functools import lru_cache
from math import inf
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import billiard.einfo
import greenlet
import redis.driver_info
from celery.utils.dispatch import Signal

from .deployments import SLOTS, slot_of
from .network import BlockingSocket
from .world import Thread, World

_importing: list[Process] = []
_playing: list[Any] = [World(0)]


def playing() -> Any:
    """The history that is played."""
    return _playing[-1]


def begin_history(history: Any) -> None:
    _playing[:] = [history]


def thread() -> Thread | None:
    """The thread of the world that runs, if there is one."""
    running = greenlet.getcurrent()
    return running if isinstance(running, Thread) else None


def this() -> Any:
    """The process that runs now, or whose package is being imported."""
    running = thread()
    return running.process if running else (_importing[-1] if _importing else None)


# Python's modules


def _fake(real: ModuleType, **own: Any) -> Any:
    """A module with some names of its own; all others are the real module's."""
    return SimpleNamespace(**{**vars(real), **own})


def _now(*_: int) -> Any:
    return _playing[-1].now


def _sleep(seconds: float) -> None:
    playing().sleep(seconds)


def _kill(pid: int, _signal: int) -> None:
    if this().machine.is_dead(pid):
        raise ProcessLookupError


def _urandom(count: int) -> bytes:
    digest = playing().digest
    return bytes(digest("urandom")[0] for _ in range(count))


def _on_fork(*, before: Any = None, after_in_child: Any = None, **_: Any) -> None:
    if before is None:  # others register a lock that is held during a fork
        _importing[-1].after_fork.append(after_in_child)


def _on_exit(do: Callable[[], object]) -> None:
    this().at_exit.append(do)


class FakeThread:
    """``threading.Thread`` in the world."""

    def __init__(self, target: Any, args: tuple[Any, ...] = (), name: str = "", *, daemon: bool) -> None:
        self._target, self._args, self._name, self._is_daemon = target, args, name, daemon

    def start(self) -> None:
        process = this()
        if process.has_ended or playing().fault(f"no thread of {process.name}", process.no_thread):
            msg = "can't start new thread"
            raise RuntimeError(msg)
        self._thread = playing().spawn(process, f"{process.name}/{self._name}", self._target, *self._args)
        self._thread.is_daemon = self._is_daemon

    def join(self) -> None:
        playing().wait(self._thread.joined.append, None)


class _Waited:
    """An object for which threads wait."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[Any], None]] = []

    def _wait(self, timeout: float | None) -> None:
        playing().wait(self._waiting.append, timeout)

    def _wake(self) -> None:
        while self._waiting:
            self._waiting.pop(0)(None)


class FakeLock(_Waited):
    """``threading.Lock`` in the world."""

    _holder: Thread | None = None
    _times = 0
    _is_reentrant = False

    def acquire(self) -> bool:
        if not (self._is_reentrant and self._holder is thread()):
            while self._holder is not None and self._holder.lives and not self._holder.dead:
                self._wait(1.0)
            self._holder, self._times = thread(), 0
        self._times += 1
        return True

    def release(self, *_: object) -> None:
        self._times -= 1
        if self._times == 0:
            self._holder = None
            self._wake()

    __enter__, __exit__ = acquire, release


class FakeRLock(FakeLock):
    """``threading.RLock`` in the world."""

    _is_reentrant = True


class FakeQueue(_Waited):
    """``SimpleQueue`` in the world."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []

    def put(self, item: Any) -> None:
        self.items.append(item)
        self._wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002
        if block and not self.items:
            self._wait(timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self.items:
            raise queue.Empty
        return self.items.pop(0)


class FakePath(str):
    """``Path``, for the files below /proc by which machines and processes are known."""

    __slots__ = ()

    def readlink(self) -> str:
        if self == "/proc/self":
            if not this().machine.is_known and this().pid % 2:
                raise FileNotFoundError  # /proc is not mounted
            return str(this().pid) if this().machine.is_known else "1"
        return f"{self.rpartition('/')[2]}:[{this().machine.name}]"

    def is_symlink(self) -> bool:
        return True

    def read_bytes(self) -> bytes:
        machine = this().machine
        if self.endswith("boot_id"):
            return str(machine.name).encode()
        pid = int(self.split("/")[2])
        if machine.is_dead(pid):
            raise FileNotFoundError
        return b"1 (x) S " + b"0 " * 18 + b"%d" % machine.processes[pid].started + b" 0 0"


_time = _fake(time, clock_gettime=_now, monotonic=_now, perf_counter=_now, time=lambda: playing().wall(), sleep=_sleep)
vars(_time)["time_ns"] = lambda: round(playing().wall() * 1e9)
_os = _fake(os, kill=_kill, urandom=_urandom, register_at_fork=_on_fork, getpid=lambda: getattr(this(), "pid", 1))
vars(_os)["getppid"] = lambda: this().parent_pid
_socket = _fake(
    socket,
    socket=lambda *_: BlockingSocket(greenlet.getcurrent()),
    getaddrinfo=lambda host, port, *_: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))],
    gethostname=lambda: this().machine.name,
)
_queue = _fake(queue, SimpleQueue=FakeQueue)
_random = SimpleNamespace(uniform=lambda low, high: playing().uniform("random", low, high))
_random.random = lambda: playing().draw("random")
_random.choice = lambda choices: playing().choose("random choice", choices)
_random.shuffle = lambda items: items.sort(key=lambda _: playing().draw("random order"))
FAKES: dict[str, Any] = {
    "time": _time,
    "os": _os,
    "threading": _fake(threading, Thread=FakeThread, Lock=FakeLock),
    "socket": _socket,
    "queue": _queue,
    "_queue": _queue,
    "pathlib": _fake(pathlib, Path=FakePath),
    "random": _fake(random, SystemRandom=lambda: _random),
    "atexit": SimpleNamespace(register=_on_exit),
}


# redis-py

_import = builtins.__import__


def _import_own(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
    """Import the modules of the same copy in functions that import when they are called."""
    if globals is not None and "__process__" in globals and fromlist and name in globals["__process__"].modules:
        return globals["__process__"].modules[name]
    return _import(name, globals, locals, fromlist, level)


_parsed = lru_cache(redis.connection.parse_url)
_dispatcher: Any = vars(redis.event.EventDispatcher())
_driver = redis.driver_info.resolve_driver_info


def _driver_info(*given: Any) -> Any:
    return _driver(*given) if getattr(playing(), "greets", False) else None  # no history plays when a process begins


_CHANGES: list[tuple[Any, str, Any]] = [
    (redis.connection, "socket", _socket),
    *[(each, "os", _os) for each in (redis.connection, redis.asyncio.connection, uuid)],
    *[(each, "resolve_driver_info", _driver_info) for each in (redis.connection, redis.client)],
    *[(each, "resolve_driver_info", _driver_info) for each in (redis.asyncio.connection, redis.asyncio.client)],
    (redis.retry, "sleep", _sleep),
    *[(each, "random", _random) for each in (redis.backoff, redis.cluster)],
    (redis.cluster, "time", _time),
    (redis.cluster, "key_slot", slot_of),
    (redis.cluster, "REDIS_CLUSTER_HASH_SLOTS", SLOTS),
    (redis.cluster, "threading", _fake(threading, Lock=FakeLock, RLock=FakeRLock)),
    (redis.retry.AbstractRetry, "__deepcopy__", lambda retry, _: copy(retry)),  # a retry has no other state of its own
    # Faster: redis-py computes these for each call, client, connection or command, from constants.
    (inspect, "signature", lru_cache(inspect.signature)),
    (redis.utils, "get_lib_version", lambda: "0"),
    (redis.utils, "_get_filterable_args", lambda *_: {}),  # for warnings of deprecated arguments
    (redis.client.CaseInsensitiveDict, "__init__", dict.update),  # a client's replies: all are in upper case
    (redis.event.EventDispatcher, "__init__", lambda dispatcher, *_: dispatcher.__dict__.update(_dispatcher)),
    (redis.connection, "parse_url", lambda url: {**_parsed(url)}),
    (redis.connection, "get_pool_name", lambda _: "pool"),  # for metrics that nobody reads
    (redis.connection, "get_default_socket_keepalive_options", dict),
    (billiard.einfo, "traceback", SimpleNamespace(format_exception=lambda *_: ())),  # a text that nobody reads
    (builtins, "__import__", _import_own),
]
for _module, _name, _value in _CHANGES:
    setattr(_module, _name, _value)


# the processes


class Machine:
    """A machine. Its processes have one table of process ids, if they can know which machine it is."""

    def __init__(self, name: str, *, is_known: bool = True) -> None:
        self.name, self.is_known = name, is_known
        self.processes: dict[int, Any] = {}

    def is_dead(self, pid: int) -> bool:
        return pid not in self.processes or self.processes[pid].is_dead


_CONSTANTS = (FunctionType, ModuleType, type)
_CONTAINERS: Any = (dict, set, list, WeakSet, WeakKeyDictionary, WeakValueDictionary)
_connect = Signal.connect


def _connect_own(signal: Any, receiver: Any, **_: Any) -> Any:
    """Connect a receiver to a signal of Celery's, but only to signals that its own process sends."""
    process = this()

    def own(*args: Any, **kwargs: Any) -> Any:
        return receiver(*args, **kwargs) if this() is process else None

    return _connect(signal, own, weak=False)


class Process:
    """A process with a copy of the package.

    Attributes:
        package: the copy of ``only_one``.
        modules: the modules of the copy, by name.
        at_exit: the functions that are called when the process ends in order.
        after_fork: the functions that are called in a forked child.
    """

    def __init__(self, path: Path) -> None:
        self.at_exit: list[Callable[[], object]] = []
        self.after_fork: list[Callable[[], object]] = []
        self.machine = Machine("none")
        self.pid, self.name, self.life = 1, "none", 0
        self.modules = self._import(path)
        self.package = self.modules["only_one"]
        own = [vars(module) for module in self.modules.values()]
        for names in own:
            names["__process__"] = self
        items = [item for names in own for item in names.items() if item[0][:2] != "__"]
        may_change = [[each for each in names.items() if not isinstance(each[1], _CONSTANTS)] for names in own]
        self._at_first = list(zip(own, map(dict, may_change), strict=True))
        values = {id(value): value for _, value in items}.values()
        remembering = [value for value in values if hasattr(value, "cache_clear")]
        self._remembering: list[Any] = [each for each in remembering if each.__module__ in self.modules]
        containers = [self.at_exit, *(value for value in values if isinstance(value, _CONTAINERS))]
        self._contents = [(each, getattr(each, "extend", None) or each.update, each.copy()) for each in containers]

    def _import(self, path: Path) -> dict[str, ModuleType]:
        own_modules, own_path = patch.dict(sys.modules, FAKES), patch.object(sys, "path", [str(path), *sys.path])
        _importing.append(self)
        with own_modules, own_path, patch.object(Signal, "connect", _connect_own):
            importlib.import_module("only_one.inspection")
            celery = importlib.import_module("only_one.celery")  # the package itself would import this room later
            for module in pkgutil.iter_modules(celery.__path__, "only_one.celery."):
                importlib.import_module(module.name)
            own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "only_one"}
        _importing.pop()
        return own

    def begin(self, machine: Machine, pid: int, name: str) -> None:
        """Begin anew as a process that has just been started."""
        self.machine, self.name = machine, name
        self.is_dead = self.has_ended = False
        self.paused_until = self.cut_off_until = self.no_thread = 0.0
        self.died_at = inf
        self.life += 1
        for values, first in self._at_first:
            values.update(first)
        for remembers in self._remembering:
            remembers.cache_clear()
        for container, refill, content in self._contents:
            container.clear()
            refill(content)
        self._begin_as_child(pid, self.after_fork)

    def fork(self, pid: int, *, by_c: bool) -> Any:
        """Go on as a child with another id and with the parent's state; returns what others see as the parent.

        Of a fork by C code Python knows nothing, and calls no function in the child.
        """
        parent = self.machine.processes[self.pid] = SimpleNamespace(is_dead=True, started=self.started)
        self.parent_pid = self.pid
        self._begin_as_child(pid, [] if by_c else self.after_fork)
        return parent

    def _begin_as_child(self, pid: int, calls: list[Callable[[], object]]) -> None:
        self.machine.processes[pid], self.pid, self.started = self, pid, pid
        _importing.append(self)
        for do in calls:
            do()
        _importing.pop()
