"""A model of the server: the commands and scripts that only_one sends, with their expiry, as Redis and Valkey do.

``test_server.py`` compares it with real servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from lupa.lua51 import LuaRuntime

_lua: Any = LuaRuntime(encoding=None, unpack_returned_tuples=True)


class SortedSet(dict[bytes, Any]):
    """A sorted set: the score of each member."""


class Refusal(Exception):
    """An error reply."""


class Status(str):
    """A simple reply such as OK."""

    __slots__ = ()


OK = Status("OK")
_SYNTAX = Refusal("ERR syntax error")
WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
Command = list[bytes]


class Store:
    """The keys of one server.

    Attributes:
        kind: which server it is: "valkey" (9), "redis" (8.4), "redis7" (to 8.3) or "redis6".
        keys: the value of each key, and when it expires: bytes, a dict for a hash, a ``SortedSet``, a list.
        changed: called with a key, when its value before would have expired, and its new value.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], kind: str = "valkey") -> None:
        self.kind = kind
        self.keys: dict[bytes, tuple[Any, float | None]] = {}
        self.changed: Callable[[bytes, Any, Any], None] = lambda *_: None
        self._clock, self._wall = clock, wall

    def expires_at(self, key: bytes) -> float | None:
        return self.keys[key][1] if self.get(key) is not None else None

    def get(self, key: bytes, kind: type | None = None) -> Any:
        value, expires = self.keys.get(key, (None, None))
        if expires is not None and expires <= self._clock():
            self.set(key, None)
            return None
        if value is not None and kind is not None and type(value) is not kind:
            raise Refusal(WRONGTYPE)
        return value

    def set(self, key: bytes, value: Any, expires: float | None = None) -> None:
        before, expired = self.keys.pop(key, (None, None))
        if value is not None:
            self.keys[key] = value, expires
        if before != value:
            self.changed(key, expired, value)

    def clear(self) -> None:
        for key in list(self.keys):
            self.set(key, None)

    def execute(self, command: Command) -> Any:
        """Execute a command and return its reply; an error is returned as a ``Refusal``."""
        name = f"do_{command[0].lower().decode()}"
        do = getattr(self, name, None)
        if do is None or name in _UNKNOWN[self.kind]:
            return Refusal(f"ERR unknown command '{command[0].decode()}', with args beginning with: ")
        try:
            return do(*command[1:])
        except Refusal as refusal:
            return refusal.with_traceback(None)  # the traceback would keep the history alive

    # strings

    def do_set(self, key: bytes, value: bytes, *options: bytes) -> Any:
        upper = [each.upper() for each in options]
        if_absent, gets = b"NX" in upper, b"GET" in upper
        if self.kind == "redis6" and if_absent and gets:
            raise _SYNTAX
        before = self.get(key, bytes if gets else None)
        is_set = not if_absent or before is None
        if is_set:
            self.set(key, value, self._clock() + int(options[upper.index(b"PX") + 1]) / 1000)
        return before if gets else (OK if is_set else None)

    def do_get(self, key: bytes) -> Any:
        return self.get(key, bytes)

    def do_delifeq(self, key: bytes, value: bytes) -> int:
        return self.do_del(key) if self.get(key, bytes) == value else 0

    def do_delex(self, key: bytes, _condition: bytes, value: bytes) -> int:
        return self.do_delifeq(key, value)

    def do_del(self, key: bytes) -> int:
        there = self.get(key) is not None
        self.set(key, None)
        return int(there)

    def do_exists(self, key: bytes) -> int:
        return int(self.get(key) is not None)

    def do_pexpire(self, key: bytes, milliseconds: bytes) -> int:
        value = self.get(key)
        if value is None:
            return 0
        expires = self._clock() + int(milliseconds) / 1000
        self.set(key, value if int(milliseconds) > 0 else None, expires)
        return 1

    def do_pttl(self, key: bytes) -> int:
        if self.get(key) is None:
            return -2
        expires = self.expires_at(key)
        return -1 if expires is None else round((expires - self._clock()) * 1000)

    def do_scan(self, _cursor: bytes, _match: bytes, pattern: bytes, *_count: bytes) -> list[Any]:
        begin = pattern.removesuffix(b"*").replace(b"\\", b"")
        return [b"0", [key for key in list(self.keys) if key.startswith(begin) and self.get(key) is not None]]

    # hashes and sorted sets

    def _fields(self, key: bytes, kind: type[dict[bytes, Any]] = dict) -> dict[bytes, Any]:
        fields: dict[bytes, Any] = self.get(key, kind) or {}
        return kind(fields)

    def do_hset(self, key: bytes, *fields: bytes) -> int:
        before = self._fields(key)
        given = dict(zip(fields[::2], fields[1::2], strict=True))
        self.set(key, {**before, **given}, self.expires_at(key))
        return len(given.keys() - before.keys())

    def do_hget(self, key: bytes, field: bytes) -> Any:
        return self._fields(key).get(field)

    def do_hmget(self, key: bytes, *fields: bytes) -> list[Any]:
        return [self._fields(key).get(field) for field in fields]

    def do_zadd(self, key: bytes, score: bytes, member: bytes) -> int:
        members = self._fields(key, SortedSet)
        self.set(key, SortedSet({**members, member: float(score)}), self.expires_at(key))
        return int(member not in members)

    def do_zscore(self, key: bytes, member: bytes) -> Any:
        score = self._fields(key, SortedSet).get(member)
        return None if score is None else _text(score)

    def do_zrem(self, key: bytes, *gone: bytes) -> int:
        members = self._fields(key, SortedSet)
        left = SortedSet({each: score for each, score in members.items() if each not in gone})
        if len(left) < len(members):
            self.set(key, left or None, self.expires_at(key))
        return len(members) - len(left)

    def do_zrangebyscore(self, key: bytes, low: bytes, high: bytes) -> list[bytes]:
        members = self._fields(key, SortedSet)
        found = [(score, each) for each, score in members.items() if float(low) <= score <= float(high)]
        return [member for _, member in sorted(found)]

    def do_zremrangebyscore(self, key: bytes, low: bytes, high: bytes) -> int:
        return self.do_zrem(key, *self.do_zrangebyscore(key, low, high))

    # scripts

    def do_eval(self, text: bytes, count: bytes, *rest: bytes) -> Any:
        keys, args = rest[: int(count)], rest[int(count) :]
        try:
            return _from_lua(_compiled(text)(self._call, _lua.table(*keys), _lua.table(*args)))
        except Refusal as refusal:
            if self.kind != "redis6":
                raise
            msg = f"ERR Error running script (call to f_its_hash): @user_script:2: {refusal}"
            raise Refusal(msg) from None

    def _call(self, *command: Any) -> Any:
        reply = self.execute([each if isinstance(each, bytes) else _text(each) for each in command])
        if isinstance(reply, Refusal):
            raise reply
        if reply is None:
            return False
        if isinstance(reply, list):
            return _lua.table(*[False if each is None else each for each in reply])
        return reply

    # the server itself

    def do_time(self) -> list[bytes]:
        seconds, rest = divmod(self._wall(), 1)
        return [b"%d" % seconds, b"%d" % (rest * 1e6)]

    def do_info(self, *_: bytes) -> bytes:
        return b"# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"

    def do_client(self, *_: bytes) -> Status:
        return OK

    do_asking = do_client


_UNKNOWN = {"valkey": ["do_delex"], "redis": ["do_delifeq"]}
_UNKNOWN["redis7"] = _UNKNOWN["redis6"] = ["do_delex", "do_delifeq"]


@cache
def _compiled(text: bytes) -> Any:
    """A script as a function of three: what executes a command, the keys, and the arguments."""
    return _lua.execute(b"return function(call, KEYS, ARGV) local redis = {call = call} " + text + b" end")


def _text(number: float) -> bytes:
    return b"%d" % number if number == int(number) else repr(number).encode()


def _from_lua(reply: Any) -> Any:
    if reply is None or reply is False:
        return None
    if isinstance(reply, bytes):
        return reply
    if isinstance(reply, (int, float)):  # or True, which is 1
        return int(reply)
    return [_from_lua(each) for each in reply.values()]


def encode(reply: Any) -> bytes:
    """A reply as it is sent, in RESP2."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))
    sign = {Refusal: "-", Status: "+"}.get(type(reply), ":")
    return f"{sign}{reply}\r\n".encode()


def commands_in(buffer: bytearray) -> Iterator[Command]:
    """Take the complete commands out of a buffer. No part of a command contains the end of a line."""
    lines = bytes(buffer).split(b"\r\n")
    begin = 0
    while lines[begin] and len(lines) > (end := begin + 1 + 2 * int(lines[begin][1:])):
        yield lines[begin + 2 : end : 2]
        begin = end
    buffer[:] = b"\r\n".join(lines[begin:])
