"""The one thread that renews what this process holds, and releases what it may have left behind."""

from __future__ import annotations

import math
import os
import threading
from _queue import Empty, SimpleQueue  # the one in C: a signal handler may put into it
from collections import defaultdict
from contextlib import suppress
from typing import Any

from redis.cluster import RedisCluster
from redis.exceptions import ResponseError

from .clock import now
from .errors import LockLost
from .holder import Holder
from .lock import RAW, give_back
from .protocol import Dialect, outcome, renew_command

RENEWED_EVERY = 1 / 3
"""The part of a lease after which it is renewed."""

_RETRIED_EVERY = 0.1
"""The part of a lease, and seconds at the most below, after which a failed renewal is tried again."""
_RETRIED_AFTER_AT_MOST = 1.0
_CHUNK = 500
_FIRST_RELEASE_AFTER = 0.05


class Lease:
    """One taken key: what a run may know and ask of its lock. None of it costs a round trip.

    Attributes:
        key: the key as it is in Redis.
        token: the value that says that it is ours.
        reason: why it is lost, as in `LockLost`, or None.
        value: what stands under the key since it was lost.
    """

    __slots__ = (
        "begun",
        "client",
        "ends_at",
        "expires_at",
        "key",
        "reason",
        "renew_at",
        "renewer",
        "token",
        "ttl",
        "value",
    )

    def __init__(self, client: Any, key: str, token: bytes, begun: float, ttl: float, limit: float) -> None:
        """A lease that ends at `begun + ttl` unless it is renewed.

        Args:
            client: the sync client to renew with.
            key: the key as it is in Redis.
            token: the value with which it was taken.
            begun: the time before the command that took the key was sent, by `clock.now()`.
            ttl: seconds that the key was taken for, and that each renewal gives.
            limit: seconds after which it is renewed no more; infinity for never.
        """
        self.client = client
        self.key = key
        self.token = token
        self.ttl = ttl
        self.begun = begun
        self.expires_at = begun + ttl
        self.ends_at = begun + limit
        self.renew_at = begun + ttl * RENEWED_EVERY
        self.reason: str | None = None
        self.value = b""
        self.renewer = _renewer

    @property
    def holder(self) -> Holder | None:
        """This run, as the others see it."""
        return Holder.parse(self.token)

    @property
    def expires_in(self) -> float:
        """Seconds until the key expires, unless it is renewed; 0 once it is lost."""
        return max(0.0, self.expires_at - now()) if self.reason is None else 0.0

    @property
    def is_held(self) -> bool:
        """Whether the key is ours, as far as this process can know."""
        return self.reason is None and now() < self.expires_at

    def ensure_held(self) -> None:
        """Stop a run that has lost its key.

        Raises:
            LockLost: if the key is not ours any more.
        """
        lost = self.loss()
        if lost:
            raise lost

    def loss(self) -> LockLost | None:
        """How the key was lost, or None while it is ours."""
        time = now()
        if self.reason is None and time < self.expires_at:
            return None
        reason = self.reason or ("overrun" if time >= self.ends_at else "expired")
        return LockLost(self.key, reason, self.value.decode(errors="backslashreplace"))

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked off in the middle of the run, which stays the parent's."""
        return self.renewer is not _renewer

    def lose(self, reason: str, value: bytes = b"") -> None:
        """Note that the key is lost; what was noted first counts."""
        if self.reason is None:
            self.reason, self.value = reason, value


class _Adrift:
    """A token of unknown fate: the command that sets it may have been carried out, or may still be on its way."""

    __slots__ = ("client", "dialect", "key", "pause", "settled", "token", "try_at", "until")

    def __init__(self, client: Any, dialect: Dialect, key: str, token: bytes, until: float, *, settled: bool) -> None:
        self.client = client
        self.dialect = dialect
        self.key = key
        self.token = token
        self.until = until
        self.settled = settled
        self.pause = _FIRST_RELEASE_AFTER
        self.try_at = now()

    def release(self) -> bool:
        """Try once to release the token; returns whether its fate is known."""
        try:
            give_back(self.client, self.dialect, self.key, self.token)
        except Exception:  # noqa: BLE001 - whatever a client raises, the thread has other keys to see to
            self.pause = min(self.pause * 2, _RETRIED_AFTER_AT_MOST)
        else:
            if self.settled:
                return True
            # Not there is not final: the server may yet carry out what it was sent. It is asked again after twice the
            # time, so that a token that comes late stays no longer than it was late.
            self.pause *= 2
        self.try_at = now() + self.pause
        return self.try_at >= self.until


class _Renewer:
    """The thread of one process, and what is in its care."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.adrift: dict[bytes, _Adrift] = {}
        self.woken: SimpleQueue[float] = SimpleQueue()
        self.wakes_at = -math.inf
        self.thread: threading.Thread | None = None

    def see_to_it_by(self, due: float) -> None:
        """Wake the thread in time for something that is new in its care."""
        thread = self.thread
        if thread is None:
            self.thread = thread = threading.Thread(target=self.run, name="only_one-leases", daemon=True)
            with suppress(RuntimeError):  # the interpreter is shutting down: what is held expires by itself
                thread.start()
        elif due < self.wakes_at:
            self.woken.put(due)

    def run(self) -> None:
        while True:
            self.renew_what_is_due()
            self.release_what_is_adrift()
            self.sleep_until(self.next_due())

    def sleep_until(self, due: float) -> None:
        """Sleep until `due`, or until what comes meanwhile is due.

        What comes and goes again does not wake the thread a second time: a wake costs the run more than all else here.
        """
        self.wakes_at = due
        # Whoever adds something looks at `wakes_at` after adding it, and we look at what there is after setting it.
        self.wakes_at = due = min(due, self.next_due())
        while (pause := due - now()) > 0:
            with suppress(Empty):
                self.wakes_at = due = min(due, self.woken.get(timeout=min(pause, threading.TIMEOUT_MAX)))

    def next_due(self) -> float:
        dues = [lease.renew_at for lease in list(self.leases.values())]
        dues += [adrift.try_at for adrift in list(self.adrift.values())]
        return min(dues, default=math.inf)

    def release_what_is_adrift(self) -> None:
        for token, adrift in list(self.adrift.items()):
            if adrift.try_at <= now() and adrift.release():
                self.adrift.pop(token, None)

    def renew_what_is_due(self) -> None:
        soon = now()
        by_client: defaultdict[int, list[Lease]] = defaultdict(list)
        for lease in list(self.leases.values()):
            if soon >= min(lease.expires_at, lease.ends_at):
                self.leases.pop(id(lease), None)
                lease.lose("overrun" if soon >= lease.ends_at else "expired")
            elif lease.renew_at <= soon:
                by_client[id(lease.client)].append(lease)
        for leases in by_client.values():
            for start in range(0, len(leases), _CHUNK):
                self.renew(leases[start : start + _CHUNK])

    def renew(self, leases: list[Lease]) -> None:
        """Renew leases of one server in one trip, and note what became of each."""
        sent = now()
        ttls = [min(lease.ttl, lease.ends_at - sent) for lease in leases]
        commands = [
            renew_command(lease.key, lease.token, max(1, round(ttl * 1000)))
            for lease, ttl in zip(leases, ttls, strict=True)
        ]
        for lease, ttl, reply in zip(leases, ttls, _replies(leases[0].client, commands), strict=True):
            if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
                reply = b""  # noqa: PLW2901 - a list or hash that somebody has put there
            if isinstance(reply, Exception):
                lease.renew_at = now() + min(lease.ttl * _RETRIED_EVERY, _RETRIED_AFTER_AT_MOST)
                continue
            fate, value = outcome(reply)
            if fate == "held":
                lease.expires_at = sent + ttl
                lease.renew_at = min(sent + ttl * RENEWED_EVERY, lease.ends_at)
                if lease.expires_at >= lease.ends_at:
                    lease.renew_at = lease.ends_at
            else:
                self.leases.pop(id(lease), None)
                lease.lose("deleted" if fate == "gone" else "taken", value)


def _replies(client: Any, commands: list[Any]) -> list[Any]:
    """The reply to each command, or its error; one trip but in a cluster."""
    if isinstance(client, RedisCluster):
        return [_reply(client, command) for command in commands]
    try:
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command, **RAW)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
    except Exception as error:  # noqa: BLE001 - whatever a client raises, the thread has other keys to see to
        return [error] * len(commands)
    return replies


def _reply(client: Any, command: Any) -> Any:
    try:
        return client.execute_command(*command, **RAW)
    except Exception as error:  # noqa: BLE001 - whatever a client raises, the thread has other keys to see to
        return error


_renewer = _Renewer()


def _begin_anew_in_child() -> None:
    global _renewer  # noqa: PLW0603 - the parent's keys are not the child's to renew, and threads do not survive a fork
    _renewer = _Renewer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew_in_child)


def hold(lease: Lease) -> None:
    """Renew `lease` from now on, until `let_go`."""
    _renewer.leases[id(lease)] = lease
    _renewer.see_to_it_by(lease.renew_at)


def let_go(lease: Lease) -> None:
    """Renew `lease` no more."""
    _renewer.leases.pop(id(lease), None)


def release_later(client: Any, dialect: Dialect, key: str, token: bytes, until: float, *, settled: bool) -> None:
    """Release a token of unknown fate, in the background, again and again.

    Args:
        client: the sync client to release with.
        dialect: what its server knows.
        key: the key as it is in Redis.
        token: the value that may stand there.
        until: when to give up, as the key has expired by itself, by `clock.now()`.
        settled: the server has done with every command that may set the token, so that "gone" is final.
    """
    adrift = _Adrift(client, dialect, key, token, until, settled=settled)
    _renewer.adrift[token] = adrift
    _renewer.see_to_it_by(adrift.try_at)
