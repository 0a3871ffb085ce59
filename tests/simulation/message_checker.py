"""What must hold in every history of messages, decided by what has happened: messages, runs, outcomes, stored keys."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, pairwise
from math import inf
from typing import Any

_UNIQUE = ("delay", "countdown", "long countdown", "soft limit", "hard limit")
"""Ways to send a unique task by which a duplicate is not published."""
_GIVE_UP_THEIR_KEY = {"replace", "retry unraised", "retry swallowed", "requeue"}
"""Ends of a run after which a message of the task may wait without its key, because other work has the key."""
_WAITS = {"Ignore", "Retry", "None", "requeue"}
"""Outcomes of a delivery that tell nobody of a failure."""
_JUST_NOW = 0.1
_ONE_COMMAND = 0.01
"""The most seconds that a command takes, unless a fault delays it."""
_TRUSTED_FOR = 31.0
"""Seconds after which a call whose equal waits in the queue has a message of its own."""

Problems = Iterator[tuple[str, str]]


class MessageChecker:
    """Finds what must not happen, while it happens and at the end.

    Attributes:
        being_sent: the triggers that producers are sending.
    """

    def __init__(self, history: Any) -> None:
        self.history, self.plan, self.problem = history, history.plan, history.problem
        self.broker = history.broker
        self.being_sent: set[Any] = set()
        self._at_key: dict[str, Any] = {}
        self._took_over: list[dict[str, Any]] = []
        self._killed_with_another_s_key = False

    def at_the_end(self) -> None:
        for invariant in INVARIANTS:
            for kind, text in invariant(self.history, self):
                self.problem(kind, text)

    def last_call(self, trigger: Any) -> None:
        """When all is over, a call runs: nothing that has happened before prevents it."""
        is_duplicate = not trigger.is_sent and self.history.store.get(b"only_one:k") is not None
        if not (trigger.runs or is_duplicate):
            self.problem("the last call did not run", f"{trigger.error!r}")

    def only(self, *kinds: str) -> bool:
        """Whether no other kinds of faults have happened."""
        return {each.partition(" of ")[0].partition("#")[0] for each in self.history.faults} <= set(kinds)

    def had(self, *words: str) -> bool:
        """Whether a fault has happened with one of these words in its name."""
        return any(word in each for each in self.history.faults for word in words)

    @property
    def was_unreachable(self) -> bool:
        """Whether some commands to the server were not answered, or answered late."""
        return self.had("cut", "late", "server away")

    def overran(self, run: Any, now: float) -> bool:
        """Whether a run has lasted until its ``timeout``, so that its key has expired."""
        lasts: float = (run.ended or now) - run.began
        return lasts > (self.plan.timeout or inf) - _JUST_NOW

    @property
    def late_commands(self) -> int:
        """How many commands came late to the server. A late reply is none: it changes nothing at the server."""
        return sum("late of" in fault and " up#" in fault for fault in self.history.faults)

    def may_leave(self, value: bytes) -> bool:
        """Whether a key may name a queued task at the end, because the docs say so.

        That is so if one of these has happened:

        - Both commands of a ``delay()`` were sent twice.
        - The task's worker had acknowledged the message, and was killed; and when the worker received the message,
          another run had the key, such as that of the previous attempt.
        - The task has ended without its key, and its process has ended before it could withdraw the task: the server
          was away, or the process was killed in the moment after.
        """
        triggers = self.history.triggers.values()
        tasks = [each for each in triggers if each.id is not None and each.id.encode() in value]
        works = {each.work for each in self.broker.published if each.id.encode() in value}
        came = {work: at for work, (at, _) in self.broker.dropped.items() if work in works}
        others = [(run, at) for run in self.history.runs for work, at in came.items() if run.work != work]
        late = _ONE_COMMAND + self.history.latest  # its worker's command
        is_killed = any(run.began - late <= at <= (run.ended or inf) + _ONE_COMMAND for run, at in others)
        is_killed &= any(self.outcomes_of(each.name) <= _WAITS for each in tasks)
        runs = [run for each in tasks for run in each.runs if b'"attempt":%d,' % run.work.attempt in value]
        has_had_its_key = runs and self.plan.when_down != "carry_on"
        is_not_withdrawn = self.may_release_nothing and not has_had_its_key
        ended_at = [self.history.ended_at[each.name] for each in tasks if each.name in self.history.ended_at]
        is_cut_off = any(0 <= at - end <= late for at in self.history.killed_at.values() for end in ended_at)
        return self.late_commands > 1 or is_killed or is_not_withdrawn or is_cut_off

    @property
    def may_release_nothing(self) -> bool:
        """Whether a process may have ended with a release that the server, which was away, was yet to be told."""
        return self.had("server away") and bool(self.plan.recycles or self.had("killed", "shutdown"))

    @property
    def may_drop_unstored(self) -> bool:
        """Whether a redelivery may be dropped though its run has stored no result: a key is kept without a marker."""
        return bool(self.plan.at_least) and self.plan.broker == "redis"

    # while it happens

    def run_begins(self, run: Any) -> None:
        for other in self.history.running:
            if other.lock.is_held and run.lock.is_held:
                self.problem("two at once", f"{run.trigger.name} began while {other.trigger.name} runs")

    def changed(self, key: bytes, expiry: float | None, after: Any) -> None:
        """A task that waits to be begun keeps its key, whoever else has had it."""
        if key != b"only_one:k":
            return
        self._note_takeover(after)
        has_expired = expiry is not None and expiry <= self.history.now
        if after is not None or has_expired or not self._keeps_waiting_keys:
            return
        for name in self._waiting():
            self.problem("a queued task has lost its key", name)

    def _note_takeover(self, after: Any) -> None:
        """Note if a run that has taken over a waiting task's key is killed: it cannot store the task's value again."""
        before, self._at_key = self._at_key, json.loads(after or b"{}")
        if before in self._took_over and before["pid"] in self.history.killed_at:
            self._killed_with_another_s_key = True
        was_waiting = before.get("state") in ("queued", "received")
        if was_waiting and self._at_key.get("task_id", before["task_id"]) != before["task_id"]:
            self._took_over.append(self._at_key)

    @property
    def _keeps_waiting_keys(self) -> bool:
        is_calm = self.only("publishing fails", "visibility timeout", "lost connection", "shutdown")
        return self.plan.deduplicates and is_calm and not (self._killed_with_another_s_key or self._may_forget)

    @property
    def _may_forget(self) -> bool:
        """Whether a task may wait without its key.

        A run that was sent past the check may take over a waiting task's key, and keep its own for ``at_least``.
        """
        ways = {each.how for each in self.history.triggers.values()}
        return bool(self.plan.at_least) and not ways <= set(_UNIQUE)

    def _waiting(self) -> set[str]:
        """The unique tasks whose message waits, and has not begun: the first one, or that of a retry."""
        history = self.history
        there = {each.work for each in history.broker.published if not each.is_done}
        begun = {job.work for job in history.broker.jobs if job.child}
        triggers = [history.triggers[work.trigger] for work in there - begun - history.outcomes.keys()]
        triggers = [each for each in triggers if each.is_sent and each.name not in history.begun_and_killed]
        return {each.name for each in triggers if each.how in _UNIQUE and self._keeps_its_key(each)}

    def _keeps_its_key(self, trigger: Any) -> bool:
        is_retried = _GIVE_UP_THEIR_KEY.isdisjoint(trigger.ends) and all(run.end == "Retry" for run in trigger.runs)
        # A signal may have ended a run that had published its retry.
        is_interrupted = "limit" in trigger.how or trigger.name in self._terminated()
        has_lost_it = bool(trigger.runs) and self.overran(trigger.runs[-1], self.history.now)
        return (is_retried and not (is_interrupted or has_lost_it)) or not trigger.runs

    def _terminated(self) -> set[str]:
        return {job.work.trigger for job in self.broker.jobs if job.is_terminated}

    def _holders(self) -> set[str]:
        """The unique tasks that have the key by right: their message waits, or their run holds it."""
        holding = [run.trigger for run in self.history.running if run.lock.is_held]
        return self._waiting() | {each.name for each in holding if each.how in _UNIQUE}

    def _alive(self) -> set[str]:
        """The triggers whose tasks wait or run, or are being sent by another producer."""
        triggers = self.being_sent.union(run.trigger for run in self.history.running)
        return {delivery.work.trigger for delivery in self.broker.alive()} | {each.name for each in triggers}

    @contextmanager
    def sending(self, trigger: Any) -> Iterator[None]:
        """A unique task has no second message. If nothing goes wrong, a duplicate's task waits or runs."""
        before, triggers = self._holders(), self.history.triggers.values()
        self.being_sent.add(trigger)
        yield
        self.being_sent.remove(trigger)
        if self.plan.when_busy == "buffer_one" and not trigger.is_sent and trigger.result is not None:
            calls = [(each.task, each.given) for each in triggers if each.id == trigger.id]
            if any(each != (trigger.task, trigger.given) for each in calls):
                self.problem("a duplicate of another call", trigger.name)
        if getattr(trigger.result, "is_duplicate", not trigger.is_sent) is trigger.is_sent:
            self.problem("a duplicate that is none, or the reverse", trigger.name)
        is_unique = self.plan.deduplicates and trigger.how in _UNIQUE
        if not is_unique or not self.only("publishing fails", "shutdown", "lost connection"):
            return
        others = before & self._holders() - {trigger.name}
        if trigger.is_sent and others and not self._may_forget:
            self.problem("a second message", f"{trigger.name} beside {others}")
        # The key of a run that was killed, or whose process was before it began, may stay for the lease.
        stays = any(killed_at > self.history.now - _TRUSTED_FOR for killed_at in self.history.killed_at.values())
        may_hold = (stays and not self.plan.takeover) or not self.only("publishing fails")
        may_hold |= bool(self.plan.at_least)
        since = trigger.asked - _JUST_NOW
        there = self._alive() | {name for name, ended_at in self.history.ended_at.items() if ended_at > since}
        there |= {run.trigger.name for run in self.history.runs if (run.ended or inf) > since}
        ids = {self.history.triggers[name].id for name in there}  # None while it is being sent
        is_of_one = not ids.isdisjoint((trigger.id, None)) or (ids and trigger.id is None)
        if not (trigger.is_sent or trigger.error or is_of_one or may_hold):
            self.problem("a duplicate of nothing", trigger.name)

    # of what has happened

    def outcomes_of(self, *names: str) -> set[str]:
        """How the deliveries of these triggers have ended for Celery."""
        return {end for work, ends in self.history.outcomes.items() if work.trigger in names for end in ends}

    def is_alone(self, trigger: Any) -> bool:
        """Whether no other task waited, ran or had its key at the same time.

        The key of a run that was killed stays for a lease, and that of a run that has succeeded for ``at_least``.
        """
        stays = _TRUSTED_FOR if self.had("kill", "revoke", "shutdown") or not self.plan.takeover else _JUST_NOW
        stays += self.plan.at_least or 0.0
        ends = {each: self.history.ended_at.get(name, inf) + stays for name, each in self.history.triggers.items()}
        for run in self.history.runs:  # a replacement runs after the task that it replaces has ended
            ends[run.trigger] = max(ends[run.trigger], (run.ended or inf) + stays)
        own = trigger.asked, ends.pop(trigger)
        return all(own[1] < each.asked or end < own[0] for each, end in ends.items())

    def was_lost(self, trigger: Any) -> bool:
        """Whether a message of the trigger was acknowledged by a worker that has not ended it."""
        return any(work.trigger == trigger.name for work in self.broker.dropped)

    def was_redelivered(self, trigger: Any) -> bool:
        return any(work.trigger == trigger.name for work in self.history.broker.last_redelivered_at)


# at the end: each function reads what has happened, and yields the problems


def _no_message_waits(history: Any, _checker: MessageChecker) -> Problems:
    for delivery in (*history.broker.queue, *history.broker.unacked):
        yield "a message waits for ever", str(delivery.work)


def _no_key_without_a_run(history: Any, checker: MessageChecker) -> Problems:
    left = {key: history.store.get(key) for key in list(history.store.keys) if not key.startswith(b"{")}
    for key, value in left.items():
        if value and not (b'"queued"' in value and checker.may_leave(value)):
            yield "a key without a run", f"{key!r} {value!r}"[:200]


def _exceptions_are_documented(history: Any, checker: MessageChecker) -> Problems:
    is_documented = {
        "AlreadyRunning": history.plan.when_busy in ("fail", "retry", "buffer_one"),
        "LockUnavailable": checker.was_unreachable,
        "OperationalError": checker.had("publishing fails"),
    }
    for trigger in history.triggers.values():
        if trigger.error is not None and not is_documented.get(type(trigger.error).__name__):
            yield "an exception that is not documented", f"{trigger.name}: {trigger.error!r}"


def _no_task_is_lost(history: Any, checker: MessageChecker) -> Problems:
    """All work that was published is done, or its failure is known; also later attempts, and work of a used id."""
    published = {each.work: None for each in history.broker.published if each.is_work}
    for work in published:
        trigger, outcomes = history.triggers[work.trigger], set(history.outcomes[work])
        ends = {run.end for run in trigger.runs if run.work == work} - {"killed", "SystemExit"}
        has_ended = bool(ends) and (ends != {"Reject"} or trigger.ends == ("reject",) or not checker.plan.acks_late)
        # A run, or the worker of a killed run, has published later work in its place, which is checked by itself.
        has_ended |= any(each.trigger == work.trigger and each > work for each in published)
        is_known = bool(outcomes - _WAITS) or trigger.id in history.revoked
        was_lost = work in history.broker.dropped  # Celery loses it without us, too
        if not (has_ended or is_known or was_lost or _may_end(history, checker, trigger, outcomes)):
            yield "a task is lost", f"{work}: {history.outcomes[work]}"


def _may_end(history: Any, checker: MessageChecker, trigger: Any, outcomes: set[str]) -> bool:
    """Whether a task may end without a run, because the docs say so."""
    plan = history.plan
    if trigger.how == "hard limit" and checker.had("killed worker"):
        return True  # Celery acknowledges the message before it stores the failure
    # One decorator has skipped the task, the other one keeps its key, and the child was killed before None was stored.
    has_two = plan.placement in ("both", "two below")
    if checker.may_drop_unstored and has_two and trigger.name in history.begun_and_killed:
        return True
    # A redelivery of the message is taken for that of an earlier message with this id. Or earlier work with this id
    # holds the key: the key is kept, its run was killed, its release was lost, or a command came late.
    # A rule that tells the two apart could cost a result.
    may_be_ignored = checker.was_redelivered(trigger) or bool(plan.at_least or checker.late_commands)
    have_run = [run for run in history.runs if run.trigger.id == trigger.id and run.trigger is not trigger]
    may_be_ignored |= bool(have_run) and checker.may_release_nothing
    may_be_ignored |= any(run.end == "killed" and run.trigger.id == trigger.id for run in history.runs)
    killed = [history.triggers[name] for name in history.begun_and_killed]  # perhaps before its run began
    may_be_ignored |= any(each.id == trigger.id and each is not trigger for each in killed)
    if trigger.how == "id" and outcomes <= {"Ignore", "requeue", "Retry"} and may_be_ignored:
        return True
    is_skipped = plan.when_busy in ("skip", "buffer_one") or (plan.when_busy == "default" and not trigger.runs)
    is_skipped |= plan.when_down == "skip" and checker.was_unreachable
    return is_skipped and "None" in outcomes


def _no_task_that_can_wait_is_refused(history: Any, _checker: MessageChecker) -> Problems:
    published = Counter(each.work for each in history.broker.published)
    for work, outcomes in history.outcomes.items():
        trigger = history.triggers[work.trigger]
        is_at_limit = published[work] > history.plan.retry.get("max_retries", inf)
        if history.plan.when_busy == "retry" and "AlreadyRunning" in outcomes and not is_at_limit:
            yield "a task was refused", f"{work} of {trigger.how}"


def _duplicates_have_a_result(history: Any, checker: MessageChecker) -> Problems:
    """A duplicate gets the result of a task that was published."""
    triggers, published = history.triggers.values(), {each.id for each in history.broker.published}
    if not checker.had("publishing fails"):  # of that which had the key meanwhile
        # Of a call that took longer than a command, a reply was late or lost. Its SET may have come late, and is gone
        # after at most as long again.
        failed = [each for each in triggers if not each.is_sent and each.answered - each.asked > _ONE_COMMAND]
        had_key = [(each.asked, max(each.answered, each.asked + 2 * history.latest)) for each in failed]
        for trigger in [each for each in triggers if each.result is not None and not each.is_sent]:
            # Another process had acquired the key, and did not know it yet.
            is_of_failed = any(asked <= trigger.answered and trigger.asked < gone for asked, gone in had_key)
            if trigger.id not in published and not is_of_failed:
                yield "a duplicate without a result", f"{trigger.name}: {trigger.id}"


def _what_follows_is_called(history: Any, checker: MessageChecker) -> Problems:
    for trigger in history.triggers.values():
        failed = "ValueError" if "autoretry_for" not in history.plan.options else None
        expected = {"chain": "done", "chord": "done", "link": "done", "link_error": failed}.get(trigger.how)
        # A chord's body is called with all results; another task of its header is called, too.
        received = [each for each in trigger.received if trigger.how != "chord" or isinstance(each, list)]
        ends = {run.end for run in trigger.runs}
        if received or expected not in ends:
            continue
        # Another delivery or attempt of the task has failed. It could not be requeued; or it was a redelivery, of which
        # the first delivery cannot know, and the server was away or the key was busy.
        # Or the child was killed when its success was stored already: then all is done for Celery.
        failures = {"OperationalError", "stored", "ConnectionRefusedError"}
        if checker.was_redelivered(trigger):
            failures |= {"LockUnavailable", "AlreadyRunning", "Reject", "requeue"}
        has_failed = bool(checker.outcomes_of(trigger.name) & failures)
        has_failed |= checker.may_drop_unstored and any(_was_killed(history, run, history.now) for run in trigger.runs)
        # A chord fails with the first failure of a task in its header, such as a rejection. And Celery
        # counts returns: a task that returns twice, as after a redelivery, counts for another task.
        own = [end for work, ends in history.outcomes.items() if work.trigger == trigger.name for end in ends]
        results = [end for end in own if end not in ("Ignore", "Retry")]
        is_whole = len(results) == 1 and history.beside[trigger.name] == ["'other'"]
        # A return may be counted though its child is killed before it calls the body, or before its delivery ends.
        returned = [run for run in trigger.runs if run.end == "done"]
        is_cut_off = any(_was_killed(history, run, run.ended + 1) for run in returned)
        has_failed |= trigger.how == "chord" and (is_cut_off or not is_whole)
        if not (trigger.id in history.revoked or checker.was_lost(trigger) or has_failed):
            yield "what follows was not called", f"{trigger.name} was sent with {trigger.how}"


def _results_are_stored(history: Any, checker: MessageChecker) -> Problems:
    """If a run has returned and was killed before it stored its result, its redelivery stores one."""
    if not history.plan.acks_late or checker.may_drop_unstored:
        return
    app = next(iter(history.apps.values()))
    for trigger in history.triggers.values():
        has_run = any(run.end == "done" for run in trigger.runs) and trigger.id is not None
        is_asked = has_run and not checker.was_lost(trigger) and trigger.how != "id"
        state = app.AsyncResult(trigger.id).state if is_asked else "SUCCESS"
        if state in ("PENDING", "RETRY"):
            yield "a result was not stored", f"{trigger.name}: {state}"


def _no_work_runs_twice(history: Any, checker: MessageChecker) -> Problems:
    for work, count in Counter(run.work for run in history.runs).items():
        trigger = history.triggers[work.trigger]
        may_run_again = trigger.ends == ("requeue",) or (trigger.how == "hard limit" and not history.acks_failures)
        if count > 1 and not may_run_again and checker.only("publishing fails"):
            yield "a run too many", f"{work} ran {count} times"
    # If the marker could not be asked, a redelivery may run.
    if not history.plan.acks_late or checker.was_unreachable:
        return
    # A message that begins after the run's end stores no result over the run's, either.
    others = [(run, each) for run in history.runs for each in history.not_run if each.began > (run.ended or inf)]
    for first, later in [*combinations(history.runs, 2), *others]:
        is_again = first.work == later.work and first.trigger.name not in history.broker.redelivered_before_a_run
        # Celery sends a retry for a redelivery whose child was killed, also while the first run goes on. That run sends
        # a retry, too.
        is_killed = first.trigger.name in history.begun_and_killed
        is_again &= not (is_killed and "retry_on_worker_lost" in history.plan.options)
        is_replaced = first.end == "Ignore" and str(first.trigger.action_for(first)).startswith("replace")
        has_ended = is_replaced or first.end in ("done", "Retry")
        # Celery has rejected it, because it could not publish a retry or store a result.
        is_rejected = "Reject" in history.outcomes[first.work]
        has_ended |= first.end == "ValueError" and history.acks_failures and not is_rejected
        until_then = [each for each in history.runs if each.trigger is first.trigger and each.began <= first.began]
        may_run_again = any(_may_run_again(history, checker, each, later.began) for each in until_then)
        if is_again and has_ended and not may_run_again:
            yield "a run too many", f"{first.work} ran again after {first.end}: {later.end}"


def _may_run_again(history: Any, checker: MessageChecker, run: Any, until: float) -> bool:
    """Whether a redelivery does a run's work again, and sends again what that run has sent.

    That is so if the run was killed or has lost its key. With Redis, a message that comes back while its result is
    being stored runs as if it were new.
    """
    comes_late = history.broker.last_redelivered_at.get(run.work, -inf) > run.ended - _ONE_COMMAND
    is_new = history.plan.broker == "redis" and comes_late
    return is_new or checker.overran(run, until) or _was_killed(history, run, until)


def _was_killed(history: Any, run: Any, until: float) -> bool:
    return bool(history.killed_at.get(run.pid, inf) <= until)


def _no_call_is_skipped_for_its_own_delivery(history: Any, checker: MessageChecker) -> Problems:
    """A task is skipped for other work only."""
    if checker.was_unreachable:  # an own key may stay for a while
        return
    for work, outcomes in history.outcomes.items():
        is_alone = checker.is_alone(history.triggers[work.trigger])
        if is_alone and any("None" in each or each == "AlreadyRunning" for each in outcomes):
            yield "a task is skipped for its own lock", f"{work}: {outcomes}"


def _the_newest_runs(history: Any, checker: MessageChecker) -> Problems:
    if history.plan.when_busy != "buffer_one":
        return
    sent = [each for each in history.triggers.values() if each.id and each.error is None]
    if not sent or any(run.began >= sent[-1].asked for run in history.runs):
        return
    # A duplicate has the result of the task that waits.
    same = [each for each in history.triggers.values() if each.id == sent[-1].id]
    same = sent[-1:] if sent[-1].is_sent else same
    ends_itself = {"ignore"} if history.plan.acks_late else {"ignore", "requeue"}
    if any(not ends_itself.isdisjoint(each.ends[:1]) for each in same):
        return  # the tasks before it were dropped for it
    # Tasks are numbered as they arrive, so one that was sent before may be the newest: if no child was free for it.
    arrived_at = {name: history.arrived_at.get(name, each.asked) for name, each in history.triggers.items()}
    newest = [name for name, at in arrived_at.items() if at > sent[-1].asked - _JUST_NOW]
    newest += [each.name for each in same]
    outcomes = checker.outcomes_of(*newest)
    at_once = [name for name, at in history.ended_at.items() if at >= sent[-1].asked]
    others = checker.outcomes_of(*at_once) & {"LockUnavailable", "OperationalError", "TaskRevoked"}
    # A number whose reply was lost may be drawn after the newest. And `_may_end` says what may befall a used id.
    may_be_overtaken = checker.had("cut") and checker.had("late")
    may_be_overtaken |= sent[-1].how == "id" and checker.was_redelivered(sent[-1])
    may_be_overtaken |= history.plan.when_down == "skip" and checker.was_unreachable
    is_known = history.revoked or outcomes - _WAITS or others
    # A task that has ended without a run, which nobody could know, is trusted to wait.
    limited = [name for name, each in history.triggers.items() if each.how == "hard limit" and not each.runs]
    lost_at = [history.ended_at.get(name, -inf) for name in limited]
    lost_at += [ended_at for _, ended_at in history.broker.dropped.values()]
    may_be_lost = any(each > sent[-1].asked - _TRUSTED_FOR for each in lost_at)
    if not (may_be_lost or may_be_overtaken or is_known):
        yield "the newest did not run", sent[-1].name


def _none_runs_after_a_newer_one(history: Any, checker: MessageChecker) -> Problems:
    """A task that had begun, or had a delivery that has ended, when another was sent does not run after that one."""
    # If the command for its number gets no answer, a task goes on without a number.
    if history.plan.when_busy != "buffer_one" or checker.was_unreachable:
        return
    for newer, older in combinations(history.runs, 2):
        arrived_at = history.arrived_at[older.trigger.name]
        if arrived_at < newer.trigger.asked:
            yield "an older one ran after a newer", f"{older.work} after {newer.work}"


def _at_least(history: Any, checker: MessageChecker) -> Problems:
    """After a success no run begins until the time is over."""
    if not history.plan.at_least or checker.was_unreachable:
        return
    for run, later in pairwise(history.runs):
        # A time limit or a kill may have come before the release.
        was_interrupted = "limit" in run.trigger.how or _was_killed(history, run, later.began)
        is_due = run.end == "done" and not was_interrupted
        if is_due and later.began - run.began < history.plan.at_least - _JUST_NOW:
            yield "at_least", f"{later.work} began {later.began - run.began:.2f} s after {run.work}"


INVARIANTS: list[Callable[[Any, MessageChecker], Problems]] = [
    _no_message_waits,
    _no_task_is_lost,
    _no_key_without_a_run,
    _exceptions_are_documented,
    _no_task_that_can_wait_is_refused,
    _duplicates_have_a_result,
    _what_follows_is_called,
    _results_are_stored,
    _no_work_runs_twice,
    _no_call_is_skipped_for_its_own_delivery,
    _the_newest_runs,
    _none_runs_after_a_newer_one,
    _at_least,
]
