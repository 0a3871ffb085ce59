"""Clients that a user gives in place of a URL: of a cluster whose slots move, or of Sentinels."""

from __future__ import annotations

from math import inf
from typing import Any

import redis
from redis.cluster import ClusterNode

from .server import Command, Refusal

SLOTS = 2
"""A cluster has 16,384, and its clients make a table of them each time that they look."""

WRITES = (b"SET", b"DELIFEQ", b"DELEX", b"EVAL")
_PATIENCE: dict[str, Any] = {"protocol": 2, "socket_timeout": 0.9, "socket_connect_timeout": 0.5}
_OF_ONE_KEY = [b"set", b"get", b"del", b"delifeq", b"delex", b"pttl"]
_COMMANDS: list[Any] = [[name, -2, [], 1, 1, 1] for name in _OF_ONE_KEY]


def slot_of(key: bytes, _slots: int = SLOTS) -> int:
    """The slot of a key, by the part of it in braces, as in a cluster."""
    return key.partition(b"}")[0][-1] % SLOTS


def _keys_of(command: Command) -> list[bytes]:
    if command[0] == b"EVAL":
        return command[3 : 3 + int(command[2])]
    return command[1:2] if command[0].lower() in _OF_ONE_KEY else []


def _address(name: str) -> list[Any]:
    return [name.encode(), 6379, name.encode()]


class Deployment:
    """Hosts of which each is a server by itself, with the package's own client.

    Attributes:
        OBSERVERS: the names of hosts beside those that have keys.
        client: makes a client as a user makes it; None if the package makes its own.
        is_settled_at: when all know the last change.
    """

    OBSERVERS: tuple[str, ...] = ()
    client: Any = None
    is_settled_at = 0.0

    def __init__(self, history: Any) -> None: ...

    def answer(self, _name: str, _command: Command, *, is_asking: bool) -> Any:
        """What a host answers without executing a command; None if it executes it."""

    def fail_over(self) -> str:
        """Let another host take the place of one that is to stop, and return which one stops."""
        return "server"


class Cluster(Deployment):
    """A cluster of all hosts.

    Attributes:
        owners: the host of each slot.
        target: to which host a slot is moving, by slot.
        moved: the keys that are there already.
    """

    def __init__(self, history: Any) -> None:
        self._history, self._store = history, history.store
        self._names = list(history.hosts)
        self.owners = {slot: history.choose(f"owner of slot {slot}", self._names) for slot in range(SLOTS)}
        self.target: dict[int, str] = {}
        self.moved: set[bytes] = set()

    def client(self) -> Any:
        node: Any = ClusterNode
        return redis.RedisCluster(startup_nodes=[node("server", 6379)], **_PATIENCE)

    def answer(self, name: str, command: Command, *, is_asking: bool) -> Any:
        if command[0] == b"COMMAND":
            return _COMMANDS
        if command[:2] == [b"CLUSTER", b"SLOTS"]:
            return [[slot, slot, _address(owner)] for slot, owner in self.owners.items()]
        if not (keys := _keys_of(command)):
            return None
        slot = slot_of(keys[0])
        owner, target = self.owners[slot], self.target.get(slot)
        is_importing = name == target and is_asking
        if name != owner and not is_importing:
            return Refusal(f"MOVED {slot} {owner}:6379")
        if target is None:
            return None
        here = [self._store.get(key) is not None and (key in self.moved) == is_importing for key in keys]
        if is_importing:
            if len(keys) == 1 or all(here):
                self.moved.update(keys)
                return None
        elif all(here):
            return None
        elif not any(here):
            return Refusal(f"ASK {slot} {target}:6379")
        return Refusal("TRYAGAIN Multiple keys request during rehashing of slot")

    def move(self, slot: int) -> None:
        """Move a slot to another host: its keys go first, and then its owner is another."""
        history, others = self._history, [name for name in self._names if name != self.owners[slot]]
        if slot in self.target:
            return
        seconds = history.choose("seconds of a move", [0.01, 0.3, 2.0])
        self.is_settled_at = max(self.is_settled_at, history.now + seconds)
        self.target[slot] = history.choose("target of a slot", others)
        history.note("cluster", "slot", slot, "moves to", self.target[slot])
        history.after(seconds / 2, self._move_keys, slot)
        history.after(seconds, self.give, slot)

    def _move_keys(self, slot: int) -> None:
        self.moved.update(key for key in self._store.keys if slot_of(key) == slot and slot in self.target)

    def give(self, slot: int, owner: str = "") -> None:
        """Let a slot have another owner from now on."""
        self.owners[slot] = owner or self.target.get(slot, self.owners[slot])
        self.target.pop(slot, None)
        self.moved = {key for key in self.moved if slot_of(key) != slot}
        self._history.note("cluster", "slot", slot, "is now of", self.owners[slot])

    def _slots_of(self, name: str) -> list[int]:
        return [slot for slot, owner in self.owners.items() if owner == name]

    def fail_over(self) -> str:
        name, other = "server", next(each for each in self._names if each != "server")
        for slot in self._slots_of(name):
            self.give(slot, other)
        return name


class Sentinels(Deployment):
    """A master of two hosts, and the Sentinels that know which of them it is.

    Attributes:
        master: the host that takes writes.
    """

    OBSERVERS = ("sentinel", "witness")

    def __init__(self, history: Any) -> None:
        self.master, self._known_from = "server", dict.fromkeys(self.OBSERVERS, -inf)
        self._history = history

    def client(self) -> Any:
        kind: Any = redis.Sentinel
        sentinels = kind([(name, 26379) for name in self._known_from], sentinel_kwargs=_PATIENCE)
        return sentinels.master_for("mymaster", **_PATIENCE)

    def answer(self, name: str, command: Command, *, is_asking: bool) -> Any:  # noqa: ARG002
        if command[0] == b"SENTINEL":
            is_known = self._known_from[name] <= self._history.now
            master = self.master if is_known else self._other()
            state = {"name": "mymaster", "ip": master, "port": 6379, "flags": "master", "num-other-sentinels": 1}
            return [[str(part).encode() for pair in state.items() for part in pair]]
        is_refused = name != self.master and command[0] in WRITES
        return Refusal("READONLY You can't write against a read only replica.") if is_refused else None

    def _other(self) -> str:
        return "other" if self.master == "server" else "server"

    def fail_over(self) -> str:
        """The Sentinels come to know it, one after another."""
        before, self.master = self.master, self._other()
        for name in self._known_from:
            self._known_from[name] = self._history.now + self._history.choose(f"{name} knows", [0.0, 0.05, 0.5])
        self.is_settled_at = max(self._known_from.values())
        self._history.note("sentinel", "the master is", self.master)
        return before
