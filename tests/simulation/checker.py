"""What must hold in every history, decided by what has happened: the runs, the outcomes, and what the server stored."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from .history import BodyFails
from .process import Process
from .tracing import Interrupted

_MOST = 60
"""How often a process sends the same command at most: at its end, a release that is refused."""

_TOKEN = re.compile(rb'"pid":(\d+),.*"state":"(\w+)",.*"number":(\d+)\d{6},')
"""The process of a token, its state, and its number."""

EPSILON = 0.0015
"""Seconds: the server counts in milliseconds."""


@dataclass(eq=False)
class Call:
    """A call of a decorated function, and its run, as a witness sees them.

    Attributes:
        asked: when it was made.
        answered: when it had its outcome.
        told_at: when it was told that its key is lost.
        found_at: when it found that by a question.
        lock: what ``current_lock`` gave in the run; None before there is one.
        began: when the run began.
        ended: when the run ended.
        had_key: whether the run began with its key.
        held_to_the_end: whether it had the key when it ended.
        extended: for how many seconds it has got more time.
        lapsed_at: when its key would expire, before an ``extend`` or a renewal whose reply came too late.
        is_excused: whether its key may be another's while it believes to hold it.
    """

    name: str
    process: Any
    key: str
    asked: float
    lock: Any = None
    began: float = inf
    ended: float = inf
    answered: float = inf
    outcome: Any = None
    fence: int | None = None
    told_at: float = inf
    found_at: float = inf
    extended: float = 0
    lapsed_at: float = inf
    is_async = had_key = has_succeeded = held_to_the_end = is_excused = False

    @property
    def is_interrupted(self) -> bool:
        """Whether its outcome is an exception that has come in between."""
        return isinstance(self.outcome, (Interrupted, asyncio.CancelledError))

    @property
    def is_done(self) -> bool:
        """Whether it says that its work is done: by its result, or because the program exits without an error."""
        return self.outcome == "done" or (isinstance(self.outcome, SystemExit) and not self.outcome.code)

    def job_id(self) -> str:
        """The job of which it is an attempt."""
        return "job " + self.name.partition(".")[2]

    @property
    def key_there(self) -> bytes:
        """The key as it is in the server."""
        return b"only_one:" + self.key.encode()


@dataclass
class Stored:
    """A value that was stored at the key, from when until when."""

    value: Any
    since: float
    until: float = inf
    has_expired: bool = False


class Checker:
    """Notes what happens in a history, and finds what must not happen.

    Attributes:
        calls: all calls so far.
        stored: all values so far of each key.
        lost_data_at: when something outside of the lock's power last changed a key.
        set_by_hand: the values that somebody else has stored.
        kept_by_parents: until when a parent that lives on after a fork has its key, by token.
    """

    lost_data_at = -inf
    has_failed_over = False

    def __init__(self, history: Any) -> None:
        self.history, self.store, self.problem = history, history.store, history.problem
        self.at_least: float = history.plan.at_least
        self.calls: list[Call] = []
        self.stored: defaultdict[bytes, list[Stored]] = defaultdict(list)
        self.kept_by_parents: dict[bytes, float] = {}
        self.set_by_hand: list[Any] = []
        self.told: Counter[bytes] = Counter()

    def running(self) -> list[Call]:
        return [call for call in self.calls if call.lock is not None and call.ended == inf and not call.process.is_dead]

    # the server

    def changed(self, key: bytes, expiry: float | None, after: Any) -> None:
        if key.startswith(b"{"):  # one beside a lock's
            return
        now, stored = self.history.now, self.stored[key]
        if stored and stored[-1].until == inf:
            last = stored[-1]
            last.has_expired = expiry is not None and expiry <= now
            is_parents = isinstance(last.value, bytes) and now < self.kept_by_parents.get(last.value, 0.0)
            if is_parents and not last.has_expired and self.lost_data_at < now:
                self.problem("a child has released its parent's key", str(key))
            last.until = min(now, inf if expiry is None else expiry)
        if after is not None:
            stored.append(Stored(after, now))
        self.look()

    def data_is_lost(self) -> None:
        """Something outside of the lock's power changes a key: runs that are under way may believe too much."""
        for call in self.running():
            call.is_excused = True
        self.lost_data_at = self.history.now

    def fail_over(self, lag: float) -> None:
        """Undo what is younger than ``lag`` seconds."""
        now, then = self.history.now, self.history.now - lag
        if lag == 0:
            return
        self.data_is_lost()
        self.has_failed_over = True
        for key, stored in self.stored.items():
            there = next((each for each in stored if each.since <= then < each.until), None)
            self.store.set(key, there.value if there else None, now + 30 if there else None)

    # calls and runs

    def begins(self, process: Any, name: str) -> Call:
        key = self.history.choose(f"key of {name}", self.history.plan.keys)
        call = Call(name, process, key, self.history.now)
        self.calls.append(call)
        self.history.note(name, "calls")
        return call

    def run_begins(self, call: Call, lock: Any) -> None:
        others = [each for each in self.running() if each.key == call.key]
        call.lock, call.began, call.had_key = lock, self.history.now, lock.reason is None
        call.is_excused = self.lost_data_at >= call.asked
        for other in others:
            both_believe = other.lock.is_held and lock.is_held
            if both_believe and not (other.is_excused or call.is_excused):
                self.problem("two at once", f"{call.name} began while {other.name} runs and holds its key")
        if self.at_least and call.had_key and not call.is_excused:
            self._check_at_least(call)
        self.history.note(call.name, "runs", "with its key" if call.had_key else "without its key")
        self.look()

    def _check_at_least(self, call: Call) -> None:
        for other in self.calls:
            since = call.began - other.asked
            is_success = other.key == call.key and other.has_succeeded and other.is_done
            if is_success and since < self.at_least - 0.01 and self._could_keep(other):
                self.problem("at_least", f"{call.name} began {since:.2f} s after {other.name} was asked")

    def _could_keep(self, call: Call) -> bool:
        """Whether the lock had it in its power to keep the key: it was the run's until it ended, and after."""
        if call.lock.reason not in (None, "released") or self.lost_data_at > call.asked:
            return False
        kept = [each for each in self.stored[call.key_there] if _is_kept_of(each.value, call)]
        own = [each for each in self.stored[call.key_there] if each.value == call.lock.token]
        process = call.process
        was_killed = b'"pid":%d,' % process.pid not in call.lock.token or (process.is_dead and not process.has_ended)
        if was_killed and not kept:
            return False  # before its release could be repeated
        return not any(each.has_expired for each in kept + own)

    def run_ends(self, call: Call, *, succeeded: bool) -> None:
        call.ended, call.has_succeeded = self.history.now, succeeded
        call.held_to_the_end = call.had_key and call.lock.is_held
        if not call.held_to_the_end:
            call.lapsed_at = min(call.lapsed_at, call.lock.expires_at)
        is_calm = self.history.is_calm(call.asked)
        limit = (self.history.plan.times[1] or inf) + call.extended
        if call.had_key and is_calm and not call.lock.is_held and call.ended < call.asked + limit:
            self.problem("a loss without a cause", call.name)
        _, expiry = self.store.keys.get(call.key_there, (None, None))
        has_renewed = call.lock.renews and call.lock.is_held and self.history.is_calm(call.ended - call.lock.ttl)
        if has_renewed and expiry is not None and expiry > call.ended + call.lock.ttl + EPSILON:
            self.problem("a key that outlives its lease", f"{call.name}: {expiry - call.ended:.3f} s")
        has_gone_on = call.ended - call.found_at > 0.1 and self.history.is_calm(call.found_at)
        may_be_told = call.had_key and not call.process.no_thread
        if has_gone_on and may_be_told and call.told_at == inf:
            self.problem("told too late", call.name)
        is_cancelled = call.is_async and self.history.plan.when_lost == "fail"
        late = call.ended - call.told_at
        if is_cancelled and late > 0.01 and self.history.is_calm(call.ended - late):
            self.problem("not cancelled", f"{call.name} ran on for {late:.2f} s after its loss")
        self.history.note(call.name, "has run", "and holds its key" if call.lock.is_held else "and has lost its key")

    def ends(self, call: Call, outcome: Any) -> None:
        call.answered, call.outcome = self.history.now, outcome
        shown = f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else outcome
        self.history.note(call.name, "gets", str(shown)[:120])
        package = call.process.package
        documented = (package.AlreadyRunning, package.LockLost, package.LockUnavailable, asyncio.CancelledError)
        is_users = isinstance(outcome, (Interrupted, BodyFails, SystemExit))
        if not (outcome is None or outcome == "done" or is_users or isinstance(outcome, documented)):
            self.problem("an exception that is not documented", f"{call.name}: {outcome!r}")
        if isinstance(outcome, package.LockLost):
            self.check_cause(call, outcome)
            if call.told_at == inf:  # then it was checked
                self._check_loss(call, outcome)
        if isinstance(outcome, asyncio.CancelledError) and not self._may_be_cancelled(call):
            self.problem("cancelled by nobody", call.name)
        if outcome == "done" and not call.has_succeeded:
            self.problem("an outcome without a run", call.name)
        if not call.is_async:
            self._check_over(call)
        self._check_time(call)
        self._check_policies(call)
        keeps = call.is_done and call.held_to_the_end and call.answered < call.asked + self.at_least
        is_there = keeps and self.store.get(call.key_there) == call.lock.token
        is_there &= not self.has_failed_over  # which may bring a token back
        if is_there and call.lock.token not in call.process.modules["only_one.lock.token"].active_tokens:
            self.problem("a key that is kept later looks dead", call.name)
        if call.held_to_the_end and self.history.is_calm(call.ended) and not (call.is_excused or call.is_interrupted):
            self._check_release(call)

    def _may_be_cancelled(self, call: Call) -> bool:
        """Whether the call was, or another call of its task; or the run in which it was made has lost its key."""
        outermost = ".".join(call.name.split(".")[:2])
        cancelled = [each for each in self.history.faults if each.startswith("cancelled")]
        has_lost = [each.told_at < inf for each in self._around(call)]
        return any(has_lost) or any(f" of {outermost}#" in each for each in cancelled)

    def _around(self, call: Call) -> list[Call]:
        """The calls in whose runs it was made."""
        return [each for each in self.calls if call.name.startswith(f"{each.name}.")]

    def _check_policies(self, call: Call) -> None:
        """The outcome is that of a policy, and the policy was asked for a reason."""
        outcome, package, plan = call.outcome, call.process.package, self.history.plan
        stored = [each for each in self.stored[call.key_there] if each.until >= call.asked]
        lease, timeout = plan.times
        is_renewed = lease is not None or timeout is None
        has_thread = not is_renewed or not any("no thread" in each for each in self.history.faults)
        is_text = all(isinstance(each.value, bytes) for each in stored)  # and no list that somebody has put there
        must_be_up = self.history.is_calm(call.asked) and has_thread and is_text
        is_skipped = outcome is None and (must_be_up or plan.when_down != "skip")
        is_own = plan.jobs and call.job_id() in getattr(outcome, "value", "")
        # In a child that goes on with the job of a parent that has ended: another attempt may have that one's key.
        is_in_child = any(each.is_excused for each in self._around(call))
        is_job = plan.jobs and is_text and self.lost_data_at < call.asked and not is_in_child
        runs = {each.lock.token for each in self.calls if each.lock is not None and each.job_id() == call.job_id()}
        if is_job and is_skipped and stored and all(each.value in runs for each in stored):
            self.problem("skipped for its own job", call.name)
        if isinstance(outcome, package.AlreadyRunning) or is_skipped:
            value = getattr(outcome, "value", "").encode()
            if not is_own and self.history.when_busy[call.process] != ("skip" if outcome is None else "fail"):
                self.problem("an outcome of no policy", f"{call.name}: {outcome!r}")
            if not any(not value or each.value == value for each in stored):
                self.problem("skipped for no holder", f"{call.name}: {value[-40:]!r}")
            self._check_holder(call, value)
        if isinstance(outcome, package.LockUnavailable) and (must_be_up or plan.when_down != "fail"):
            self.problem("unavailable for no reason", f"{call.name}: {outcome}")
        if isinstance(outcome, package.LockLost) and plan.when_lost != "fail":
            self.problem("an outcome of no policy", f"{call.name}: {outcome!r}")

    def _check_holder(self, call: Call, value: bytes) -> None:
        """No call is skipped for a run that was dead before: of a process of its machine, or one of its own process."""
        own, machine = call.process, call.process.machine
        dead = {pid for pid, each in machine.processes.items() if getattr(each, "died_at", inf) < call.asked}
        others = [each for each in self.calls if each.process is own and each is not call]
        if not any(each.answered >= call.asked or (self.at_least and each.has_succeeded) for each in others):
            dead.add(own.pid)
        is_holder = b'"running"' in value
        if is_holder and machine.is_known and any(b'"pid":%d,' % pid in value for pid in dead):
            self.problem("skipped for a dead holder", f"{call.name}: {value[-40:]!r}")

    def _check_release(self, call: Call) -> None:
        """When a call returns, its key is released, or kept."""
        value, _ = self.store.keys.get(call.key_there, (None, None))
        keeps_until = call.lock.asked_at + self.at_least if call.has_succeeded else 0.0
        if value == call.lock.token:
            self.problem("a key that is not released", call.name)
        is_kept = _is_kept_of(value, call)
        may_have_waited = self.history.plan.jobs
        if not may_have_waited and is_kept != (keeps_until > call.answered) and abs(keeps_until - call.answered) > 0.01:
            self.problem("a key that is kept, or is not", f"{call.name}: {value!r}")

    def _check_time(self, call: Call) -> None:
        """What the lock adds to a run is at most 2 s before and 2 s after it."""
        if call.process.paused_until > call.asked or self.history.deployment.client:  # a user's time-outs
            return
        # A job that waits for its previous attempt asks each second.
        limit = 2.85 + self.history.plan.jobs
        for begin, end in ((call.asked, min(call.began, call.answered)), (call.ended, call.answered)):
            # Two attempts: each waits 0.5 s for a connection and 0.9 s for a reply. A server that hangs in one of these
            # ways is known in 2 s. One that answers, but slowly, is waited for: for each of its answers by itself.
            answers = [each for host in self.history.hosts.values() if end - begin > limit for each in host.answers]
            moments = [begin, *sorted(at for at, who in answers if who is call.process and begin < at < end), end]
            longest = max(after - before for before, after in pairwise(moments))
            if longest > limit:
                self.problem("too late", f"{call.name} waited {longest:.2f} s")

    def event(self, process: Any, event: Any) -> None:
        kind = type(event).__name__
        if kind in ("Lost", "Reclaimed", "Down"):
            self.history.note(process.name, "event", kind, getattr(event, "reason", ""))
        if kind == "Reclaimed":
            dead = filter(process.machine.is_dead, process.machine.processes)
            if not any(b'"pid":%d,' % pid in event.value for pid in dead):
                self.problem("taken over from nobody", f"{process.name}: {event}")
        if kind != "Lost":
            return
        token = _token_of_the_teller()
        self.told[token] += 1
        if self.told[token] > 1:
            self.problem("told more than once", f"{process.name}: {event}")
        call = next((each for each in self.calls if each.lock is not None and each.lock.token == token), None)
        # A call that is interrupted or cancelled before its run begins may have lost its key, too.
        is_cut_short = any(f" of {process.name}." in each for each in self.history.faults)
        if call is not None:
            self._check_lost(call, event)
        elif not is_cut_short:
            self.problem("a loss of no run", f"{process.name}: {event}")

    def _check_lost(self, call: Call, event: Any) -> None:
        """A run that never had its key does not lose it."""
        if call.lock.is_held or not (call.had_key or call.is_excused):
            self.problem("a loss of no run", f"{call.name}: {event}")
        call.told_at = self.history.now
        self._check_loss(call, event)

    def _check_loss(self, call: Call, told: Any) -> None:
        reason = told.reason
        if self._is_false_loss(call, reason):
            self.problem("told of a loss that was none", f"{call.name}: {reason}")
        values = [each for each in self.stored[call.key_there] if each.until > call.asked]
        # A key that somebody has deleted may be acquired in the same moment.
        gaps = [a for a, b in pairwise(values) if a.until < b.since or b.since == self.lost_data_at]
        was_free = not values or values[-1].until < inf or bool(gaps)
        others = [each.value for each in values if each.value != call.lock.token]
        was_anothers = told.value.encode() in others or any(isinstance(each, list) for each in others)
        own = [each for each in values if each.value == call.lock.token and each.has_expired]
        was_deleted = was_free and not own
        if (reason == "deleted" and not was_deleted) or (reason == "taken" and not was_anothers):
            self.problem("told of another loss", f"{call.name}: {reason}")

    def check_cause(self, call: Call, lost: Any) -> None:
        """The cause of a loss, if it has one, is why the key was not renewed in time."""
        if lost.reason != "expired" and lost.__cause__ is not None:
            self.problem("a cause of another loss", f"{call.name}: {lost.reason}, {lost.__cause__!r}")

    def _is_false_loss(self, call: Call, reason: str) -> bool:
        """Whether a run that is told that its key is lost has not lost it."""
        by_time = ("overrun", "unavailable", "released")
        if call.lock is None or call.is_excused or reason in by_time or call.asked < self.lost_data_at:
            return False
        own = [each for each in self.stored[call.key_there] if each.value == call.lock.token]
        expires_at = min(call.lock.expires_at, call.lapsed_at)
        has_expired = reason == "expired" and self.history.now >= expires_at
        return bool(own) and not has_expired and not any(each.has_expired for each in own)

    def fenced(self, call: Call, fence: int) -> None:
        # The last number may be lost when the clock is set back; and a forked child asks for its parent's run.
        is_excused = call.is_excused or (self.history.was_set_back and self.lost_data_at > 0)
        call.fence = None if is_excused else fence
        for other in self.calls:  # a run may learn its fence late: it was paused meanwhile
            if is_excused or other is call or other.key != call.key or other.fence is None:
                continue
            if (other.began < call.began) != (other.fence < fence):
                self.problem("a fence that is not higher", f"{call.name}: {fence}, and {other.name}: {other.fence}")

    # from inside

    def look(self) -> None:
        """No holder believes longer than the server keeps."""
        for call in self.running():
            if not call.had_key or call.is_excused or not call.lock.is_held:
                continue
            value, expiry = self.store.keys.get(call.key_there, (None, None))
            believed = self.history.now + call.lock.expires_in
            too_long = inf if value != call.lock.token or expiry is None else believed - expiry
            if too_long > EPSILON:
                self.problem("a belief that outlives the key", f"{call.name}: {too_long:.3f} s")
                call.is_excused = True  # it is told once

    def at_the_end(self) -> None:
        for call in self.calls:
            self._check_over(call)
        self._check_commands()
        if not self.has_failed_over:  # else a key may have come back that nobody knows of
            for key in list(self.stored):
                self._check_what_is_left(self.store.get(key), self.store.keys.get(key, (None, None))[1] or inf)

    def _check_over(self, call: Call) -> None:
        """A run that is over holds its key no more, and has been told if it had lost it: a sync call waits for that."""
        is_over = call.had_key and call.answered < inf
        if is_over and call.lock.is_held:
            self.problem("a lock that is held after its call", call.name)
        stored = [each for each in self.stored[call.key_there] if each.since <= call.ended < each.until]
        # Of other values its release may not be certain; that one of another type is not its own, it sees at once.
        is_list = any(isinstance(each.value, list) for each in stored) and self.history.is_calm(call.ended)
        is_told_so = isinstance(call.outcome, call.process.package.LockLost)
        has_lost = is_told_so or is_list or not call.held_to_the_end
        may_be_told = is_over and not call.is_interrupted
        if may_be_told and has_lost and call.told_at == inf:
            self.problem("a loss that nobody was told", f"{call.name}: {call.lock.reason}")

    def _check_commands(self) -> None:
        """No command is sent without a pause, and no script where the server can release without one."""
        executed = [each[3:] for each in self.history.log if each[2] == "executes for"]
        # A command that is sent on to the node that has its slot is one.
        executed = [each[:2] for each in executed if not str(each[2]).startswith(("ASK ", "MOVED "))]
        # Each call of a job may wait for a previous attempt, and asks for its key each second.
        most = _MOST * (self.history.plan.calls if self.history.plan.jobs else 1)
        for (name, command), times in Counter(executed).items():
            if times > most and command[0] not in (b"CLIENT", b"SENTINEL", b"CLUSTER", b"ASKING"):
                self.problem("a command again and again", f"{name} sent {command} {times} times")

    def _check_what_is_left(self, value: Any, expiry: float) -> None:
        left = expiry - self.history.now
        if not _is_ours(value) or value in self.set_by_hand:
            return
        if b'"kept"' in value:
            if left > self.at_least:
                self.problem("a key is kept too long", f"{left:.1f} s")
        # Nobody is left who could release what comes later from a process that is dead, or can start no thread.
        elif not any(b'"pid":%d,' % pid in value for pid in self._that_release_nothing()):
            self.problem("a key without a run", f"{left:.1f} s more: {value[-40:]!r}")

    def when_all_is_over(self) -> None:
        """A process remembers no call that has ended."""
        for process in {call.process for call in self.calls if not call.process.is_dead and not call.process.no_thread}:
            if any(each.startswith(f"interrupted of {process.name}.") for each in self.history.faults):
                continue  # at the very end of a call
            if process.modules["only_one.forks"]._pid != process.pid:
                continue  # a child that C code has forked, and that has made no call
            renewer = process.modules["only_one.lock.renewal"]._renewer
            active_tokens = process.modules["only_one.lock.token"].active_tokens
            if left := [*renewer.pending_releases, *renewer.leases, *active_tokens]:
                self.problem("a call is remembered", f"{process.name}: {left}")

    def _that_release_nothing(self) -> Iterator[int]:
        for process in {call.process for call in self.calls}:
            others = process.machine.processes.items()
            yield from (pid for pid, each in others if each.is_dead or not isinstance(each, Process))  # a forked parent
            if any(each.startswith(f"no thread of {process.name}#") for each in self.history.faults):
                yield process.pid


def _token_of_the_teller() -> bytes:
    """The token of the call that tells of itself: the package emits the event from one of its methods."""
    frame: Any = sys._getframe()
    while not hasattr(teller := frame.f_locals.get("self"), "waits_until_told"):
        frame = frame.f_back
    token: bytes = teller.token
    return token


def _is_ours(value: Any) -> bool:
    return isinstance(value, bytes) and b'"only_one"' in value


def _is_kept_of(value: Any, call: Call) -> bool:
    number = call.lock.token.partition(b'"number":')[2]
    return isinstance(value, bytes) and b'"kept"' in value and number in value


def shown(detail: Any) -> str:
    """A detail of the log, as a timeline shows it: of commands and values only what a reader needs."""
    if isinstance(detail, tuple):  # a command
        return " ".join(map(shown, detail))[:110]
    if not isinstance(detail, bytes):
        return str(detail)
    if token := _TOKEN.search(detail):
        return token.expand(rb"<\1:\3 \2>").decode()
    return "script" if b"\n" in detail else detail[:24].decode(errors="replace")
