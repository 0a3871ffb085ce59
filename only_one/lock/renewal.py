"""Renewal: the one thread of a process that renews its leases, tells runs of what they lost, and does the cleanup."""

from __future__ import annotations

import atexit
import codecs
import logging
import math
import os
import sys
import threading
import time
import traceback
from _queue import Empty, SimpleQueue  # the one in C: a signal handler may put into it
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

from redis.exceptions import ResponseError

from only_one.connections.cluster import LONG, Node, trips
from only_one.connections.server import Server, may_evict
from only_one.events import logger

from .cleanup import Cleanup, Cleanups
from .commands import RAW, is_forbidden, now, parse_result, renew_command
from .current_lock import Lease

_RETRIED_EVERY = 0.1
"""The part of a lease, and seconds at the most below, after which a failed renewal is tried again."""
_RETRIED_AFTER_AT_MOST = 1.0
_SOON = 0.02
"""The part of a lease by which a renewal may come early, to go with others in one trip."""
_CONNECTED_BEFORE = 2.0
"""Seconds before the first renewal in a server in which the connection for it is made."""
_LOOKED_AT_AGAIN_AFTER = 60.0


class _Renewer:
    """The thread of one process, and what is in its care."""

    def __init__(self) -> None:
        # By reference only: a lease lives as long as its run, and whatever may interrupt that ends its renewal too.
        self.leases: dict[bytes, ref[Lease]] = {}
        self.cleanups = Cleanups()
        self.unknown: dict[Server, str] = {}
        self.woken: SimpleQueue[float] = SimpleQueue()
        self.wakes_at = -math.inf
        self.is_running = False
        self._claim = [None]

    def see_to_it_by(self, due: float) -> None:
        """Wake the thread in time for something that is new in its care."""
        if not self.is_running:
            # What a connection imports at its first host name: forked while the thread does, a child waits for ever.
            codecs.lookup("idna")
            if not _start_native_thread("only_one-leases", self.run):
                logger.warning("no thread can be started: until one can, no key is renewed, nor released later")
        elif due < self.wakes_at:
            self.woken.put(due)

    def run(self) -> None:
        try:
            self._claim.pop()
        except IndexError:
            return  # another was started at the same time
        self.is_running = True
        while True:
            self.take_turn()

    def take_turn(self) -> None:
        """See to all that is due, and sleep; nothing that goes wrong in one step keeps the others from their turn."""
        for step in (
            self.connect_for_what_is_due_soon,
            self.renew_all_that_is_due,
            self.cleanups.release_due,
            self.look_at_a_new_server,
            self.sleep,
        ):
            try:
                step()
            except BaseException:  # noqa: BLE001 - whatever it is, all later leases need this thread
                with suppress(Exception):  # no memory for that either
                    _log(logging.ERROR, "the thread that renews goes on after:\n%s", traceback.format_exc())
                time.sleep(LONG)

    def sleep(self) -> None:
        """Sleep until something is due, of what comes meanwhile, too.

        What comes and goes again does not wake the thread a second time: a wake costs the run more than all else here.
        """
        self.wakes_at = due = self.next_due()
        # Whoever adds something looks at `wakes_at` after adding it, and we look at what there is after setting it.
        self.wakes_at = due = min(due, self.next_due())
        while (pause := due - now()) > 0:
            with suppress(Empty):
                self.wakes_at = due = min(due, self._woken_within(pause))

    def _woken_within(self, seconds: float) -> float:
        """When something new is due.

        Raises:
            Empty: if nothing new comes in so many seconds.
        """
        with suppress(Empty):
            return self.woken.get_nowait()
        # Its lock is taken now. Were it not, CPython would wait without limit if the time were over before it is.
        return self.woken.get(timeout=min(seconds, threading.TIMEOUT_MAX))

    def held(self) -> list[Lease]:
        """The leases of the runs that are under way."""
        held = []
        for token, reference in list(self.leases.items()):
            lease = reference()
            if lease is None:
                self.leases.pop(token, None)
            elif lease.reason is None:
                held.append(lease)
        return held

    def next_due(self) -> float:
        if self.unknown:
            return -math.inf
        dues = [lease.renew_at for lease in self.held()]
        dues += [cleanup.try_at for cleanup in list(self.cleanups.values())]
        return min(dues, default=math.inf)

    def connect_for_what_is_due_soon(self) -> None:
        moment = now()
        for lease in self.held():
            if lease.server and lease.renews and lease.renew_at - moment < _CONNECTED_BEFORE:
                lease.server.node_of(lease.key).connect(_pause([lease]))
            if now() > moment + LONG:
                return

    def look_at_a_new_server(self) -> None:
        """Have it warned of a server that may evict keys."""
        if not self.unknown:
            return
        server, key = self.unknown.popitem()
        node = server.node_of(key)
        try:
            warning = may_evict(node.client)
        except Exception:  # noqa: BLE001 - whatever a client raises, the thread has other keys to see to
            node.fail()
            server.looked_at_from = now() + _LOOKED_AT_AGAIN_AFTER
            return
        if warning:
            _log(logging.WARNING, "%s", warning)

    def renew_all_that_is_due(self) -> None:
        while self.renew_what_is_due():
            pass

    def renew_what_is_due(self) -> bool:
        """Renew the leases that are due, in one trip to each node.

        Returns:
            Whether some are left, as it has taken long: others have the first turn then.
        """
        moment = now()
        due: list[Lease] = []
        for lease in self.held():
            if moment >= min(lease.expires_at, lease.ends_at):
                self.lost(lease, "overrun" if moment >= lease.ends_at else "expired")
            elif lease.server and lease.renews and lease.renew_at <= moment + lease.ttl * _SOON:
                due.append(lease)
        left = trips(due)
        while left:
            self.renew(*left.pop(0))
            if left and now() > moment + LONG:
                return True
        return False

    def renew(self, node: Node, leases: list[Lease]) -> None:
        """Renew leases of one node in one trip, and note what became of each."""
        sent = now()
        if node.backs_off_until > sent:
            for lease in leases:
                lease.renew_at = min(node.backs_off_until, lease.expires_at)
            return
        ttls = [max(0.001, min(lease.ttl, lease.ends_at - sent)) for lease in leases]
        commands = [
            renew_command(each.key, each.token, round(ttl * 1000)) for each, ttl in zip(leases, ttls, strict=True)
        ]
        replies = node.send(commands, RAW, _pause(leases))
        news: defaultdict[str, list[Lease]] = defaultdict(list)
        for lease, ttl, reply in zip(leases, ttls, replies, strict=True):
            before = repr(lease.trouble)
            self.note(lease, sent, ttl, reply)
            if lease.trouble is not None and repr(lease.trouble) != before:
                news[repr(lease.trouble)].append(lease)
        for those in news.values():
            _explain(those)

    def note(self, lease: Lease, sent: float, ttl: float, reply: Any) -> None:
        """What the reply to a renewal, or its error, means for a lease."""
        if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
            reply = b""  # a list or hash that somebody has put there
        if isinstance(reply, Exception):
            lease.renew_at = min(now() + _pause([lease]), lease.expires_at)
            lease.trouble = reply.with_traceback(None)
            return
        lease.trouble = None
        result = parse_result(reply)
        if result.status == "held":
            lease.lives_on(sent, ttl)
        else:
            self.lost(lease, "deleted" if result.status == "gone" else "taken", result.value)

    def lost(self, lease: Lease, reason: str, value: bytes = b"") -> None:
        """Stop renewing, and have the run told: by another thread, since what it does about it is its own.

        Where none can be started, the run tells of it at its end.
        """
        # Not where its run has ended meanwhile; nor a thread for each task that has begun since a worker received it.
        if lease.lose(reason, value) == reason and lease.on_loss:
            _start_native_thread("only_one-lost", lease.tell_loss, lease.loss())


def _explain(leases: list[Lease]) -> None:
    """Log why leases could not be renewed, all for the same reason."""
    keys = f"{leases[0].key} and {len(leases) - 1} others" if len(leases) > 1 else leases[0].key
    if is_forbidden(leases[0].trouble):
        advice = "give it what docs/access-rights.md lists, or write timeout= and no lease="
        text = "%s cannot be renewed, and will be lost, as the server's user lacks a right: %s: %s"
        _log(logging.WARNING, text, keys, leases[0].trouble, advice)
    else:
        _log(logging.DEBUG, "%s could not be renewed, and will be tried again: %r", keys, leases[0].trouble)


def _pause(leases: list[Lease]) -> float:
    """Seconds after which a renewal that has failed is tried again."""
    return min(min(lease.ttl for lease in leases) * _RETRIED_EVERY, _RETRIED_AFTER_AT_MOST)


def _start_native_thread(name: str, run: Callable[..., None], *args: object) -> bool:
    """Start a daemon thread of the system, under gevent and eventlet too: work that does not wait starves a greenlet.

    Returns:
        Whether it could be started; not at a limit of threads, nor while the interpreter shuts down.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    try:
        if gevent is not None and gevent.is_module_patched("threading"):
            gevent.get_original("_thread", "start_new_thread")(run, args)
        elif eventlet is not None and eventlet.is_monkey_patched("thread"):
            eventlet.original("_thread").start_new_thread(run, args)
        else:
            threading.Thread(target=run, args=args, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def _log(level: int, message: str, *args: object) -> None:
    """Log by another thread, as a handler may take long, and is the user's."""
    if logger.isEnabledFor(level):
        _start_native_thread("only_one-log", logger.log, level, message, *args)


_renewer = _Renewer()


def _begin_anew_in_child() -> None:
    global _renewer  # noqa: PLW0603 - the parent's keys are not the child's to renew, and threads do not survive a fork
    _renewer = _Renewer()


with suppress(AttributeError):  # where nothing forks
    os.register_at_fork(after_in_child=_begin_anew_in_child)


@atexit.register
def _finish() -> None:
    _renewer.cleanups.finish()


def hold(lease: Lease) -> None:
    """Renew `lease` from now on, until `let_go`, and tell its run when it is lost."""
    _renewer.leases[lease.token] = ref(lease)
    server = lease.server
    if server is not None and server.looked_at_from <= lease.begun:
        server.looked_at_from = math.inf
        _renewer.unknown[server] = lease.key
        _renewer.see_to_it_by(lease.begun)
    else:
        _renewer.see_to_it_by(lease.renew_at)


def let_go(lease: Lease) -> None:
    """Renew `lease` no more: its run is over."""
    _renewer.leases.pop(lease.token, None)


def release_later(server: Server, key: str, token: bytes, until: float, *, no_write_in_flight: bool) -> None:
    """Release a key in the background, again and again: its acquire is unconfirmed, or its release has failed.

    Args:
        server: where the key is.
        key: the key as it is in Redis.
        token: the value that may be stored there; another is left alone.
        until: when to give up, because the key has expired by itself, by `commands.now()`.
        no_write_in_flight: the server has done with every command that may set the token, so that "gone" is final.
    """
    cleanup = Cleanup(server, key, token, until, no_write_in_flight=no_write_in_flight)
    _renewer.cleanups.add(cleanup)
    _renewer.see_to_it_by(cleanup.try_at)
