"""Renewal: the thread of a process that renews its leases, tells runs of lost keys, and sends pending releases."""

import atexit
import logging
import math
import sys
import threading
import time
import traceback
from _queue import Empty, SimpleQueue  # the one in C: a signal handler may put into it
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

import redis

from only_one.clock import now
from only_one.connections.nodes import LONG_TURN, Node
from only_one.connections.server import Server, eviction_warning
from only_one.connections.server_features import is_forbidden, is_of_another_type
from only_one.events import log, logger
from only_one.forks import in_each_child, see_fork
from only_one.threads import start_native_thread

from .commands import RENEW
from .lease import Lease
from .pending_releases import PendingRelease, PendingReleases, send_in_turn

_LOOKED_AT_AGAIN_AFTER = 60.0
"""Seconds until a server that could not be asked for its eviction policy is asked again."""

# Both calls import modules. If a thread imported them later, at the first host name or connection, a child that is
# forked meanwhile would wait for the import for ever.
"".encode("idna")
redis.ConnectionPool().make_connection()  # which does not connect


class _Renewer:
    """The thread of one process, and the leases and pending releases in its care.

    Attributes:
        leases: the leases by token. The references are weak, so an interrupted run, whose lease is collected, is
            renewed no more.
        pending_releases: the releases that the thread repeats.
        not_looked_at: the servers that must be asked for their eviction policy, each with one of its keys.
        woken: the earlier times to wake up that others have asked for, by ``clock.now()``.
        wakes_at: when the thread wakes up by itself, by ``clock.now()``.
        vacancy: empty while a thread runs: of several that start, one pops the item. ``pop`` is atomic, and unlike a
            lock it is the same under gevent and eventlet.
        is_ending: whether the thread must end.
        ended: gets an item when the thread has ended.
        is_finished_by_multiprocessing: whether a child of ``multiprocessing`` calls ``finish_pending_releases``.
    """

    def __init__(self) -> None:
        self.leases: dict[bytes, ref[Lease]] = {}
        self.pending_releases = PendingReleases()
        self.not_looked_at: dict[Server, str] = {}
        self.woken: SimpleQueue[float] = SimpleQueue()
        self.wakes_at = -math.inf
        self.vacancy = {"for": "a thread"}
        self.is_ending = False
        self.ended: SimpleQueue[None] = SimpleQueue()
        self.is_finished_by_multiprocessing = False

    def wake_by(self, due: float) -> None:
        """Have the thread awake at ``due``, for a new lease or pending release."""
        if self.start_thread():
            log(logging.WARNING, "no thread can be started: until one can, no key is renewed, nor released later")
        elif due < self.wakes_at:
            self.woken.put(due)

    def start_thread(self) -> RuntimeError | None:
        """Start the thread, unless it runs; the error if it cannot be started."""
        if not self.vacancy:
            return None
        if sys.modules.keys() & {"gevent.monkey", "eventlet.patcher"}:
            atexit.register(self.end)
        return start_native_thread("only_one-leases", self.run)

    def run(self) -> None:
        if not self.vacancy.pop("for", None):
            return  # another was started at the same time
        while not self.is_ending:
            self.take_turn()
        self.is_ending, self.vacancy = False, {"for": "a thread"}  # from now on another thread is started if needed
        self.ended.put(None)

    def end(self) -> None:
        """End the thread, and wait up to a second for its end.

        Under gevent, a thread that has a hub may crash the process at exit. Under eventlet, a wait for one of the
        thread's locks, as at the end of the process, would never end.
        """
        if not self.vacancy:
            self.is_ending = True
            self.woken.put(-math.inf)
            with suppress(Empty):
                self.ended.get(timeout=1)

    def take_turn(self) -> None:
        """Do all that is due, then sleep. An error in one step does not keep the other steps from their turn.

        A step that leaves something due ends the turn: leases that have become due meanwhile go before that.
        """
        steps = self.renew_due, self.pending_releases.release_due, self.look_at_a_new_server, self.sleep
        for step in steps:
            try:
                if step():
                    return
            except BaseException:  # noqa: BLE001 - all later leases need this thread
                with suppress(Exception):  # there may be no memory for the log either
                    log_beside(logging.ERROR, "the thread that renews goes on after:\n%s", traceback.format_exc())
                time.sleep(LONG_TURN)

    def sleep(self) -> None:
        """Sleep until something is due, including leases and pending releases that are added meanwhile.

        A lease that comes and goes wakes the thread once at most: a wake costs a run more than all else here.
        """
        self.wakes_at = due = self.next_due()
        # A run adds its lease first and then reads `wakes_at`; the thread sets `wakes_at` first and then reads the
        # leases again. So one of the two sees the other.
        self.wakes_at = due = min(due, self.next_due())
        while (pause := due - now()) > 0:
            with suppress(Empty):
                self.wakes_at = due = min(due, self.woken.get_nowait())
                continue
            # The `get_nowait` that found the queue empty has acquired the queue's lock: so this `get` waits for that
            # at once. Else CPython would first acquire it, and wait without a limit if the time was over by then.
            with suppress(Empty):
                self.wakes_at = due = min(due, self.woken.get(timeout=min(pause, threading.TIMEOUT_MAX)))

    def held(self) -> list[Lease]:
        """The leases of the runs that are under way."""
        # The copy is made in one step: until Python 3.11, other threads may run while objects are collected.
        leases = {token: reference() for token, reference in self.leases.copy().items()}
        for token in [token for token, lease in leases.items() if lease is None]:
            self.leases.pop(token, None)
        return [lease for lease in leases.values() if lease is not None and lease.reason is None]

    def next_due(self) -> float:
        """When the next step is due, by ``clock.now()``."""
        dues = [lease.renew_at for lease in self.held()]
        dues += [pending.try_at for pending in list(self.pending_releases.values())]
        return -math.inf if self.not_looked_at else min(dues, default=math.inf)

    def look_at_a_new_server(self) -> None:
        """Log a warning if a new server may evict keys."""
        if not self.not_looked_at:
            return
        server, key = self.not_looked_at.popitem()
        node = server.node_of(key)
        try:
            if warning := eviction_warning(node.client):
                log_beside(logging.WARNING, "%s", warning)
        except Exception:  # noqa: BLE001 - the thread has other keys to see to
            node.fail()
            server.looked_at_from = now() + _LOOKED_AT_AGAIN_AFTER

    def renew_due(self) -> bool:
        """Renew the leases that are due, and note which are lost by the clock; returns whether some are left."""
        moment = now()
        due: list[Lease] = []
        for lease in self.held():
            if moment >= min(lease.expires_at, lease.ends_at):
                self.note_loss(lease)
            # A renewal may come early by a fiftieth of the lease, to go with others in one trip.
            elif lease.renews and lease.renew_at <= moment + lease.ttl / 50:
                due.append(lease)
        return send_in_turn(due, self.renew)

    def renew(self, node: Node, leases: list[Lease]) -> None:
        """Renew leases of one node in one trip, and note the result of each."""
        sent = now()
        ttls = {lease: max(0.001, min(lease.ttl, lease.ends_at - sent)) for lease in leases}
        commands = [
            RENEW.command((each.key,), each.token, round(ttl * 1000), round(each.ttl * 1000))
            for each, ttl in ttls.items()
        ]
        replies = node.send(commands, _pause(leases))
        for (lease, ttl), reply in zip(ttls.items(), replies, strict=True):
            self.note(lease, sent, ttl, reply)

    def note(self, lease: Lease, sent: float, ttl: float, reply: Any) -> None:
        """Note the result of a renewal, by its reply or error."""
        is_trouble = isinstance(reply, Exception) and not is_of_another_type(reply)
        before = _described(lease.trouble)
        lease.trouble = reply.with_traceback(None) if is_trouble else None
        if lease.trouble:
            lease.try_again_at(now() + _pause([lease]))
            if _described(lease.trouble) != before:
                _explain(lease)
        elif isinstance(reply, int):
            lease.note_expiry(sent, ttl)
        else:
            self.note_loss(lease, reply)

    def note_loss(self, lease: Lease, reply: Any = None) -> None:
        """Stop renewing, and tell the run of its loss: in another thread, because the policy is the user's code.

        If no thread can be started, the run is told at its end.

        Args:
            lease: the lease.
            reply: the value that is stored at the key, or the error that it is of another type; None if it is missing.
        """
        reason, value = lease.reason_by(reply), reply if isinstance(reply, bytes) else b""
        # No thread if nobody listens: the run has ended, or a task that was received has begun and taken over its key.
        if lease.lose(reason, value) == reason and lease.on_loss:
            start_native_thread("only_one-lost", lease.tell_loss, lease.loss())


def _described(error: Exception | None) -> str:
    """The type and the text of an error: redis-py's errors have no text in their ``repr``."""
    return f"{type(error).__name__}: {error}"


def _explain(lease: Lease) -> None:
    """Log why a lease could not be renewed."""
    if is_forbidden(lease.trouble):
        advice = "give it what docs/access-rights.md lists, or write timeout= and no lease="
        text = "%s cannot be renewed, and will be lost, as the server refuses a command to its user: %s: %s"
        log_beside(logging.WARNING, text, lease.key, lease.trouble, advice)
    else:
        text = "%s could not be renewed, and will be tried again: %s"
        log_beside(logging.DEBUG, text, lease.key, _described(lease.trouble))


def _pause(leases: list[Lease]) -> float:
    """Seconds until a failed renewal is tried again: a tenth of the lease, but at most one second."""
    return min(1.0, 0.1 * min(lease.ttl for lease in leases))


def log_beside(level: int, message: str, *args: object, **options: Any) -> None:
    """Log in another thread, because a handler is the user's code, and may take long."""
    if logger.isEnabledFor(level):
        start_native_thread("only_one-log", partial(log, **options), level, message, *args)


_renewer = _Renewer()

# A forked child renews none of the parent's keys, and has none of its threads.
in_each_child(lambda: _Renewer.__init__(_renewer))


def finish_pending_releases() -> None:
    """At the end of the process, send the releases that are pending; a forked child has none of its parent's."""
    see_fork()
    _renewer.pending_releases.finish()


atexit.register(finish_pending_releases)


def start_thread() -> RuntimeError | None:
    """Start the renewing thread, unless it runs; the error if it cannot be started, and so would renew no key."""
    return _renewer.start_thread()


def hold(lease: Lease) -> None:
    """Renew ``lease`` from now on, until ``let_go``, and tell its run when it is lost."""
    _renewer.leases[lease.token] = ref(lease)
    lease.renewer = _renewer
    server = lease.server
    if server is not None and server.looked_at_from <= lease.asked_at:
        server.looked_at_from = math.inf
        _renewer.not_looked_at[server] = lease.key
    _renewer.wake_by(lease.asked_at if _renewer.not_looked_at else lease.renew_at)


def let_go(lease: Lease) -> None:
    """Renew ``lease`` no more."""
    _renewer.leases.pop(lease.token, None)


def release_at_exit(pending: PendingRelease) -> None:
    """Release a key when the process exits, which it is about to do: no thread should be started any more."""
    # Not by `add`, which would forget the oldest: a worker may have received more tasks with an `eta` than its limit.
    _renewer.pending_releases[pending.token] = pending


def is_to_be_released(token: bytes) -> bool:
    """Whether the key of a call that has failed is to be released in the background."""
    pending = _renewer.pending_releases.get(token)
    return pending is not None and pending.retained is None


def release_later(pending: PendingRelease) -> None:
    """Release a key in the background, repeatedly: its acquire is unconfirmed, or the server may be away."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _renewer.is_finished_by_multiprocessing:
        _renewer.is_finished_by_multiprocessing = True
        util.Finalize(None, finish_pending_releases, exitpriority=0)  # its children end without `atexit`
    _renewer.pending_releases.add(pending)
    _renewer.wake_by(pending.try_at)
