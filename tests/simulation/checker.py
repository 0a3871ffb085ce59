"""What must hold in every history, decided by what has happened: the runs, the outcomes, and what the server stored."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import inf
from typing import Any

from .server import Store
from .world import World

EPSILON = 0.0015
"""Seconds: the server counts in milliseconds."""


@dataclass(eq=False)
class Call:
    name: str
    process: Any
    key: str
    asked: float = 0.0
    run: Run | None = None
    ended: float | None = None
    outcome: Any = None


@dataclass(eq=False)
class Run:
    """A run, as the witness sees it.

    Attributes:
        excused: why this run's key may be another's while it believes to hold it, if so.
    """

    call: Call
    lock: Any
    began: float
    has_key: bool
    ended: float | None = None
    succeeded: bool = False
    excused: str | None = None
    told: list[tuple[float, str]] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        return b"only_one:" + self.call.key.encode()


@dataclass
class Stored:
    """A value that was stored at the key, from when until when."""

    value: Any
    since: float
    until: float = inf
    how: str = ""


class Checker:
    """Notes what happens in a history, and finds what must not happen."""

    def __init__(self, world: World, store: Store, plan: Any) -> None:
        self.world, self.store, self.plan = world, store, plan
        self.problems: list[tuple[str, str]] = []
        self.calls: list[Call] = []
        self.runs: list[Run] = []
        self.stored: defaultdict[bytes, list[Stored]] = defaultdict(list)
        self.fence: Counter[str] = Counter()
        self.replies: list[tuple[float, Any]] = []
        self.ghosts_from = -inf
        self._doing: str = ""

    def problem(self, kind: str, text: str) -> None:
        self.problems.append((kind, text))
        self.world.note("checker", kind.upper(), text)

    # the server

    def arrived(self, process: Any, command: list[bytes], reply: Any) -> None:
        shown = reply if not isinstance(reply, bytes) else _token(reply)
        self.world.note("server", "executes for", process.name, _short(command), shown)

    def changed(self, key: bytes, expiry: float | None, after: Any) -> None:
        if key.startswith(b"{"):  # one beside a lock's
            return
        now, stored = self.world.now, self.stored[key]
        if stored and stored[-1].until == inf:
            last = stored[-1]
            last.until = min(now, expiry) if expiry is not None else now
            last.how = "expired" if expiry is not None and expiry <= now else "changed"
        if after is not None:
            stored.append(Stored(after, now))
        self.look()

    def data_is_lost(self) -> None:
        """Something outside of the lock's power changes the key: runs that are under way may believe too much."""
        for run in self.running():
            run.excused = "data was lost"
        self.lost_data_at = self.world.now

    lost_data_at = -inf

    def fail_over(self, lag: float) -> None:
        """Undo what is younger than ``lag`` seconds."""
        then = self.world.now - lag
        if lag == 0:
            return
        self.data_is_lost()
        self.ghosts_from = self.world.now
        for key, stored in self.stored.items():
            there = next((each for each in stored if each.since <= then < each.until), None)
            self.store.set(key, there.value if there else None, self.world.now + 30 if there else None)

    # calls and runs

    def begins(self, call: Call) -> Call:
        call.asked = self.world.now
        self.calls.append(call)
        self.world.note(call.name, "calls")
        return call

    def running(self) -> list[Run]:
        return [run for run in self.runs if run.ended is None and not run.call.process.is_dead]

    def run_begins(self, call: Call, lock: Any) -> Run:
        run = Run(call, lock, self.world.now, has_key=lock.reason is None)
        if self.lost_data_at >= call.asked:
            run.excused = "data was lost"
        call.run = run
        for other in self.runs:
            runs = other.key == run.key and other.ended is None and not other.call.process.is_dead
            if runs and other.lock.is_held and lock.is_held and not (other.excused or run.excused):
                self.problem("two at once", f"{call.name} began while {other.call.name} runs and holds its key")
        if self.plan.at_least and run.has_key:
            self._check_at_least(run)
        self.runs.append(run)
        self.world.note(call.name, "runs", "with its key" if run.has_key else "without its key")
        self.look()
        return run

    def _check_at_least(self, run: Run) -> None:
        for other in self.runs:
            since = run.began - other.call.asked
            if (
                other.key != run.key
                or not (other.succeeded and other.has_key and other.call.ended is not None)
                or other.excused
            ):
                continue
            if since < self.plan.at_least - 0.01 and other.call.outcome == "done" and self._was_kept(other):
                self.problem("at_least", f"{run.call.name} began {since:.2f} s after {other.call.name} was asked")

    def _was_kept(self, run: Run) -> bool:
        """Whether the lock had it in its power to keep the key: it was the run's until it ended, and after."""
        if run.lock.reason not in (None, "released") or self.lost_data_at > run.call.asked:
            return False
        of_run = [each for each in self.stored[run.key] if each.value == run.lock.token or _is_kept_of(each.value, run)]
        process = run.call.process
        was_killed = b'"pid":%d,' % process.pid not in run.lock.token or (process.is_dead and not process.has_ended)
        if was_killed and not any(_is_kept_of(each.value, run) for each in of_run):
            return False  # before its release could be repeated
        return not any(each.how == "expired" for each in of_run)

    def run_ends(self, run: Run, *, succeeded: bool) -> None:
        run.ended, run.succeeded = self.world.now, succeeded
        self.world.note(run.call.name, "has run", "and holds its key" if run.lock.is_held else "and has lost its key")
        run.told_at_end = run.lock.is_held  # type: ignore[attr-defined]

    def ends(self, call: Call, outcome: Any) -> None:
        call.ended, call.outcome = self.world.now, outcome
        shown = f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else outcome
        self.world.note(call.name, "gets", str(shown)[:120])
        self._check_outcome(call)
        self._check_time(call)

    def _check_outcome(self, call: Call) -> None:
        outcome, package = call.outcome, call.process.package
        documented = (package.AlreadyRunning, package.LockLost, package.LockUnavailable, asyncio.CancelledError)
        if outcome is None or outcome == "done" or isinstance(outcome, documented):
            pass
        elif type(outcome).__name__ not in ("Interrupted", "BodyFails"):
            self.problem("an exception that is not documented", f"{call.name}: {outcome!r}")
        if isinstance(outcome, package.LockLost):
            self.lost(call, outcome.reason)
        if outcome == "done" and (call.run is None or not call.run.succeeded):
            self.problem("an outcome without a run", call.name)

    def _check_time(self, call: Call) -> None:
        """What the lock adds to a run is at most 2 s before and 2 s after it."""
        process = call.process
        if getattr(process, "was_paused", False):
            return
        ended = call.ended or 0.0
        spans = [(call.asked, ended if call.run is None else call.run.began)]
        if call.run is not None and call.run.ended is not None:
            spans.append((call.run.ended, ended))
        for begun, over in spans:
            answered = any(process is who and begun < at < over for at, who in self.replies)
            # Two attempts: each waits 0.5 s for a connection and 0.9 s for a reply. A server that hangs in one of these
            # ways is known in 2 s. One that answers, but slowly, is waited for: for each of its answers by itself.
            if over - begun - self._paused(call) > (4.0 if answered else 2.85):
                self.problem("too late", f"{call.name} waited {over - begun:.2f} s")

    def _paused(self, call: Call) -> float:
        return 1000.0 if call.process.paused_until > call.asked else 0.0

    def killed(self, process: Any) -> int:
        """Note that a process is killed, and return how many of its calls had ended."""
        for run in self.runs:
            if run.call.process is process and run.ended is None:
                run.ended = self.world.now
        return sum(call.process is process and call.ended is not None for call in self.calls)

    def event(self, process: Any, event: Any) -> None:
        kind = type(event).__name__
        if kind in ("Lost", "Reclaimed", "Down"):
            self.world.note(process.name, "event", kind, getattr(event, "reason", ""))
        if kind == "Lost":
            runs = [run for run in self.runs if run.call.process is process and not run.told and run.has_key]
            runs = [run for run in runs if run.lock.key == event.key]
            # A loss that is seen at the end of a run is told before it stands in the lock.
            likely: Any = {"released": 0, None: 1, event.reason: 2}
            found = [run for run in runs if run.lock.reason in likely and not run.lock.is_held]
            for run in sorted(found, key=lambda run: int(likely[run.lock.reason]))[-1:]:
                run.told.append((self.world.now, event.reason))
                self.lost(run.call, event.reason)

    def lost(self, call: Call, reason: str) -> None:
        """A run is told that its key is lost: was it?"""
        run = call.run
        if run is None or run.excused or reason in ("overrun", "unavailable", "released"):
            return
        token = run.lock.token
        mine = [each for each in self.stored[run.key] if each.value == token]
        if reason == "expired" and self.world.now >= run.lock.expires_at:
            return
        if any(each.how == "expired" for each in mine) or not mine:
            return
        if run.call.asked < self.lost_data_at:
            return
        self.problem("told of a loss that was none", f"{call.name}: {reason}")

    def fenced(self, run: Run, fence: int) -> None:
        if (
            fence <= self.fence[run.call.key]
            and run.excused is None
            and self.world.wall_step == 0
            and self.lost_data_at < 0
        ):
            self.problem("a fence that is not higher", f"{run.call.name}: {fence}")
        self.fence[run.call.key] = max(self.fence[run.call.key], fence)

    # from inside

    def look(self) -> None:
        """No holder believes longer than the server keeps."""
        for run in self.running():
            value, expiry = self.store.keys.get(run.key, (None, None))
            if not run.has_key or run.excused or run.lock.reason is not None or not run.lock.is_held:
                continue
            if value != run.lock.token or expiry is None:
                self.problem("a belief without a key", f"{run.call.name} believes for {run.lock.expires_in:.3f} s more")
                run.excused = "told already"
            elif run.lock.expires_at > expiry + EPSILON:
                self.problem("a belief that outlives the key", f"{run.call.name}: {run.lock.expires_at - expiry:.3f} s")
                run.excused = "told already"

    def at_the_end(self) -> None:
        for key in list(self.stored):
            self._check_what_is_left(self.store.get(key), self.store.keys.get(key, (None, None))[1])

    def _check_what_is_left(self, value: Any, expiry: float | None) -> None:
        if value is None:
            return
        if self.ghosts_from > -inf and self.lost_data_at > -inf:
            return
        if isinstance(value, bytes) and b'"kept"' in value:
            if expiry is not None and expiry > self.world.now + self.plan.at_least:
                self.problem("a key is kept too long", f"{expiry - self.world.now:.1f} s")
            return
        if any(b'"pid":%d,' % pid in value for call in self.calls for pid in call.process.machine.dead()):
            return  # nobody is left who could release what comes later; to its machine it is a dead holder's
        if (isinstance(value, bytes) and b"only_one" not in value) or isinstance(value, list):
            return
        left = inf if expiry is None else expiry - self.world.now
        self.problem("a key without a run", f"{left:.1f} s more: {value[-40:]!r}")


def _is_kept_of(value: Any, run: Run) -> bool:
    number = run.lock.token.partition(b'"number":')[2]
    return isinstance(value, bytes) and b'"kept"' in value and number in value


def _short(command: list[bytes]) -> str:
    name, *rest = command
    shown = [_token(each) for each in rest]
    return f"{name.decode()} {' '.join(shown)}"[:110]


def _token(value: bytes) -> str:
    """A word for a value: of a token the process and the number."""
    if b'"only_one"' not in value:
        return "script" if b"\n" in value else value[:24].decode(errors="replace")
    fields = json.loads(value)
    state = "" if fields["state"] == "running" else f"({fields['state']})"
    return f"<{fields['pid']}:{fields['number'] // 1000000}{state}>"
