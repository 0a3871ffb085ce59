"""The world of messages: producers, a broker and workers; Celery is the real one above its transport and its pool.

A history is planned here: how tasks are sent, how their runs end, and what goes wrong meanwhile.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import celery.worker.state
from celery import Task, _state, chain, chord
from celery.app.trace import build_tracer
from celery.backends import cache
from celery.exceptions import Ignore, Reject, Retry

from tests.wrapped_task import Wrapped

from .broker import TRANSPORTS, App, Broker, Delivery, Work, Worker
from .deployments import Deployment
from .history import History
from .message_checker import MessageChecker
from .process import Machine, Process, playing, this

Given = dict[str, Any]
"""The argument of a task. Its first key is the name of the trigger, so equal calls differ in the order of keys alone.
The last item is the key of the lock.
"""


def _limit() -> Any:
    """A time limit. Most are over while a task begins or ends.

    If a failed task comes back, its limit must let it end at some time.
    """
    return playing().choose("limit", [0.002, 0.004, 0.008, 0.016, 0.032, 1] if playing().acks_failures else [1])


HOW: dict[str, Callable[[Any, Any, Given], Any]] = {
    "delay": lambda work, _tail, given: work.delay(given),
    "id": lambda work, _tail, given: work.apply_async((given,), task_id="same-id"),
    "countdown": lambda work, _tail, given: work.apply_async((given,), countdown=1),
    "long countdown": lambda work, _tail, given: work.apply_async((given,), countdown=4),
    "expires": lambda work, _tail, given: work.apply_async((given,), expires=2 * _limit()),
    "soft limit": lambda work, _tail, given: work.apply_async((given,), soft_time_limit=_limit()),
    "hard limit": lambda work, _tail, given: work.apply_async((given,), time_limit=_limit()),
    "chain": lambda work, tail, given: chain(work.s(given), tail.s(given)).apply_async().parent,
    "chord": lambda work, tail, given: (
        chord([work.s(given), tail.si("other", given)], tail.s(given)).apply_async().parent.results[0]
    ),
    "link": lambda work, tail, given: work.apply_async((given,), link=tail.s(given)),
    "link_error": lambda work, tail, given: work.apply_async((given,), link_error=tail.si("failed", given)),
    "by name": lambda work, _tail, given: work.app.send_task(work.name, (given,)),
}
"""How a task is sent."""
_HOW = [*[each for each in HOW if each != "chord"], *["delay"] * 9, *["id"] * 3, "chain", "soft limit", "hard limit"]

_ENDS = [
    *[()] * 10,
    *[("fail",), ("ignore",), ("replace", "replace"), ("retry unraised",)] * 2,
    *[("retry",), ("retry soon",), ("retry", "retry soon"), ("retry soon", "replace")],
    *[("reject",), ("requeue",), ("replace",), ("retry swallowed",)],
    *[()] * 4,
]
"""How the runs of a task end: the first run, the second, and so on. Later runs return."""


_LOST = {"reject_on_worker_lost": False}
_AUTORETRY = {"autoretry_for": (ValueError,), "retry_kwargs": {"countdown": 0.1}}
_TASKS = ("work", "other work")
_PLACES = ["below", "below", "above", "above", "two below", "both"]
_POLICIES = ["default", "retry", "buffer_one", "skip", "fail"]
_URL = "redis://server:6379/0?protocol=2"


def _end(action: str, task: Any, trigger: Trigger) -> None:
    """End a run of a task other than by returning."""
    if action == "fail":
        msg = "the body fails"
        raise ValueError(msg)
    if action == "ignore":
        raise Ignore
    if action in ("reject", "requeue"):
        raise Reject(requeue=action == "requeue")
    if action == "replace":
        raise task.replace(task.s(trigger.given))
    if action in ("retry", "retry soon"):
        raise task.retry(countdown=1.0 if action == "retry" else 0.1)
    with suppress(Retry):
        task.retry(countdown=0.1, throw=action != "retry unraised")


@dataclass(eq=False)
class Trigger:
    """One call of a producer.

    Attributes:
        given: the task's argument.
        ends: how the task's runs end.
        how: how the task is sent.
        error: the exception that the call has raised.
        answered: when the call has returned or raised; 0 before that.
        result: the result that the call has returned.
        is_sent: whether the call has returned, and has published a message.
        received: the arguments with which the next task of the chain, or the linked task, was called.
        runs: the runs of the call's messages.
    """

    name: str
    task: str
    given: Given
    ends: tuple[str, ...]
    how: str
    asked: float
    id: str | None = None
    error: Any = None
    answered: float = 0.0
    result: Any = None
    is_sent: bool = False
    received: list[Any] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def action_for(self, run: Run) -> str | None:
        """How a run ends; None if it returns."""
        step = list(dict.fromkeys(each.work for each in self.runs)).index(run.work)
        action = self.ends[step] if step < len(self.ends) else None
        return None if action == "requeue" and len(self.runs) > 1 else action


@dataclass(eq=False)
class Run:
    trigger: Trigger
    work: Work
    lock: Any
    pid: int
    began: float
    end: str | None = None
    ended: float | None = None


_WIDE: dict[str, list[Any]] = {
    "timeout": [None, None, 10.0, 3.5],
    "takeover": [True, False],
    "retry": [{}, {"countdown": 0.2}, {"max_retries": 2}],
    "when_down": ["default", "retry", "carry_on", "skip"],
    "recycles": [False, False, True],  # whether a child ends when it has ended a task
}


class MessageWorld(History):
    """One history of messages."""

    PLAN: ClassVar[dict[str, list[Any]]] = {
        "placement": _PLACES,
        "when_busy": _POLICIES,
        "acks_late": [True, False],
        "options": [{}, _LOST, {"acks_on_failure_or_timeout": False}, {"retry_on_worker_lost": True}, _AUTORETRY],
        "lease": [None, 3.0],
        "at_least": [None, None, 3.0],
        "workers": [1, 2],
        "cancels": [False, False, True],  # whether a worker cancels unacknowledged runs if it loses its connection
        "limited_at": ["a time", "a time", "a line"],  # when, or where, a soft time limit comes
        "triggers": [2, 3, 4, 6],
        "broker": ["redis", "amqp"],
        "has_beat": [False, False, True],
        "has_agent": [False, False, False, True],
        "trouble": [(0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.02, 0.03)],
        "server": ["valkey"],
        "tasks": [_TASKS[:1], _TASKS[:1], _TASKS],
        "calls": ["different", "equal"],
        "kind": [*["function"] * 5, *["class"] * 3],
    }
    FAULTS: ClassVar[dict[str, list[float]]] = {
        "killed child": [0.15, 0.15],
        "killed worker": [0.1],
        "shutdown": [0.15],
        "lost connection": [0.1],
        "revoke": [0.08],
    }
    SINCE: ClassVar[list[Any]] = [
        (320_000_000, {0}, _WIDE, {"server away": [0.2, 0.1], "other work": [0.15, 0.15]}),
        (356_000_000, {0}, {"chords": [0.0, 0.2]}, {}),  # how probable it is that a task is one of a chord's header
    ]

    def __init__(self, processes: list[Process], seed: int, left_out: frozenset[str] = frozenset()) -> None:
        super().__init__(processes, seed, left_out)
        self.deploy(Deployment)
        plan = self.plan
        self.acks_failures = "acks_on_failure_or_timeout" not in plan.options
        plan.is_unique = plan.placement in ("above", "both")
        if plan.is_unique and plan.when_busy == "retry":  # which is refused there
            plan.when_busy = "default"
        plan.deduplicates = plan.is_unique and plan.when_busy != "buffer_one"
        self.apps: dict[tuple[Process, int], Any] = {}
        self.machines = [Machine("alpha"), Machine("beta")]
        self.triggers: dict[str, Trigger] = {}
        self.outcomes: defaultdict[Work, list[str]] = defaultdict(list)
        self.ended_at: dict[str, float] = {}
        self.arrived_at: dict[str, float] = {}
        self.runs: list[Run] = []
        self.not_run: list[Run] = []
        self.beside: defaultdict[str, list[str]] = defaultdict(list)  # how the other tasks of a trigger have ended
        self.revoked: Any = celery.worker.state.revoked  # of all workers
        self.begun_and_killed: set[str] = set()
        self.killed_at: dict[int, float] = {}  # by process id
        self.broker = Broker(self, self.plan.broker)
        self.checker = MessageChecker(self)
        self.store.changed = self.checker.changed

    def play(self) -> None:
        cache._DUMMY_CLIENT_CACHE.clear()  # the results
        celery.worker.state.reset_state()
        finalizers = set(_state._on_app_finalizers)
        plan, given = self.plan, iter(self.processes)
        producers = ["producer", "beat"][: 1 + plan.has_beat]
        left = list(producers)
        for number, name in enumerate(producers):
            process = next(given)
            self.start(process, name, self.machines[0])
            names = [f"t{each}" for each in range(plan.triggers) if each % len(producers) == number]
            self.spawn(process, f"{name}/main", self._produce, name, names, left)
        for number in range(plan.workers):
            machine = self.choose("plan machine", self.machines)
            own = [process for _, process in zip(range(3), given, strict=False)]
            self.broker.workers.append(Worker(self, f"w{number}", machine, own))
        self.plan_faults(12)
        self.run(self.now + 300, lambda: not left)
        self.run(self.now + 15)
        self.quiet = True
        self.run(self.now + 1000, lambda: not (self.broker.alive() or self.running))
        self.run(max(self.now, *(each.down_until for each in self.hosts.values())) + 35 + (plan.at_least or 0.0))
        if left:
            self.problem("a call never ended", f"{left} wait")
        self.checker.at_the_end()
        last = f"t{plan.triggers}"
        self.spawn(self.processes[0], "producer/last", self.send, "producer", last, "delay")
        self.run(self.now + 35)
        self.checker.last_call(self.triggers[last])
        _state._on_app_finalizers.intersection_update(finalizers)

    @property
    def running(self) -> list[Run]:
        return [run for run in self.runs if run.ended is None]

    # faults: each happens in some histories

    def _worker(self) -> Any:
        return self.choose("which worker", self.broker.workers)

    def _killed_child(self) -> None:
        worker = self._worker()
        worker.kill_child(self.choose("which child", worker.children))

    def _killed_worker(self) -> None:
        self._worker().kill()

    def _shutdown(self) -> None:
        how = self.choose("how", ["Warm", "Soft", "Cold"])
        self._worker().shut_down(how)

    def _lost_connection(self) -> None:
        self._worker().lose_connection()

    def _other_work(self) -> None:
        self._worker().occupy(self.choose("seconds occupied", [0.5, 3.0, 8.0]))

    def _server_away(self) -> None:
        self.stop_a_host(seconds := self.choose("seconds away", [0.5, 3.0, 20.0]))
        self.note("server", "is away for", seconds)

    def _revoke(self) -> None:
        ids = [trigger.id for trigger in self.triggers.values() if trigger.id]
        if not ids:
            return
        revoked = self.choose("which revoked", ids)
        terminates = self.draw("terminates") < 0.5
        self.note("somebody", "revokes", revoked[:8], "and terminates" if terminates else "")
        self.revoked.add(revoked)
        jobs = [job for job in self.broker.jobs if terminates and job.request]
        for job in [job for job in jobs if job.request.id == revoked]:
            # The job may have ended by then.
            job.worker.do(lambda job=job: job.request and job.request.terminate(job.worker))

    # processes, apps and tasks

    def kill(self, process: Process) -> None:
        super().kill(process)
        self.killed_at.setdefault(process.pid, self.now)  # a shutdown kills dead ones, too
        for run in self.running:
            if run.pid == process.pid:
                run.end, run.ended = "killed", self.now
        self.begun_and_killed |= {job.work.trigger for job in self.broker.jobs if job.child is process}

    def app_of(self, process: Process) -> Any:
        """The app of a process. When a process asks for the first time, its tasks are decorated."""
        key = process, process.life
        if key in self.apps:
            return self.apps[key]
        plan, package = self.plan, process.package
        app = self.apps[key] = _app(process, plan.broker, acks_late=plan.acks_late)
        app.conf.maps[0]["only_one_redis"] = _URL
        # A direct call has the settings of its process's only app. Here all processes' apps are in one process.
        vars(process.modules["only_one.celery.app_settings"])["current_app"] = lambda: app
        policies = {"retry": package.retry(**plan.retry), "buffer_one": package.buffer_one(), "default": None}
        policies |= {each: getattr(package, each) for each in ("skip", "fail", "carry_on")}
        given = {name: getattr(plan, name) for name in ("lease", "at_least", "timeout", "takeover")}
        given |= {name: policies[getattr(plan, name)] for name in ("when_busy", "when_down")}
        given = {name: value for name, value in given.items() if value is not None}

        def body(task: Any, given: Given) -> str:
            return playing().body(task, next(iter(given)))  # type: ignore[no-any-return] # the app outlives this history

        for name in plan.tasks:
            app.tasks.pop(name, None)
            function: Any = body
            if plan.placement != "above":
                function = package.only_one("{given[key]}" if plan.placement == "below" else "inner", **given)(function)
            if plan.placement == "two below":
                function = package.only_one("{given[key]}", **given)(function)
            task = _task_of(app, name, function, plan.kind, default_retry_delay=1, **plan.options)
            if plan.is_unique:
                package.only_one("{given[key]}", **given)(task)
            if plan.has_agent:
                task.__trace__ = build_tracer(name, Wrapped(task), app=app)
        return app

    # producing

    def _produce(self, producer: str, names: list[str], left: list[str]) -> None:
        for name in names:
            self.sleep(self.choose(f"pause before {name}", [0.0, 0.01, 1.0, 3.0]))
            if not self.is_left_out(f"call {name}"):
                ends, how = self.choose(f"ends of {name}", _ENDS), self.choose(f"how of {name}", _HOW)
                if self.draw(f"chord of {name}") < self.plan.chords:
                    how = "chord"
                self.send(producer, name, how, ends)
        left.remove(producer)

    def send(self, producer: str, name: str, how: str, ends: tuple[str, ...] = ()) -> None:
        while how == "id" and any(each.id == "same-id" for each in (*self.broker.alive(), *self.checker.being_sent)):
            self.sleep(0.1)  # only when the last work with an id has ended, the id is used again for new work
        self.met[f"sent: {how}"] += 1
        self.met[f"ends: {', '.join(ends)}"] += 1
        equals = [f"t{number}" for number in range(self.plan.triggers)] if self.plan.calls == "equal" else []
        given = {**dict.fromkeys([name, *equals], 0), "key": "k"}
        task, task_id = self.choose(f"task of {name}", self.plan.tasks), "same-id" if how == "id" else None
        trigger = self.triggers[name] = Trigger(name, task, given, ends, how, self.now, task_id)
        self.note(producer, "sends", name, how, *ends)
        with self.checker.sending(trigger):
            try:
                tasks = self.app_of(this()).tasks
                trigger.result = HOW[how](tasks[task], tasks["tail"], given)
                trigger.id = getattr(trigger.result, "id", trigger.id)
            except Exception as error:  # noqa: BLE001 - the checker says which are allowed
                trigger.error = error
            trigger.answered = self.now
            trigger.is_sent = any(each.work.trigger == name for each in self.broker.published)
            self.note(producer, "has sent", name, "published" if trigger.is_sent else f"duplicate {trigger.error}")

    # a run

    def body(self, task: Any, name: str) -> str:
        """Run the decorated function."""
        trigger, process = self.triggers[name], this()
        work = Work(name, task.request.replaced_task_nesting, task.request.retries)
        run = Run(trigger, work, process.package.current_lock(), process.pid, self.now)
        self.checker.run_begins(run)
        trigger.runs.append(run)
        self.runs.append(run)
        self.arrived_at.setdefault(name, self.now)
        self.note(process.name, "runs", *work)
        try:
            self.sleep(self.choose(f"length of {name}", [0.01, 0.5, 2.0, 4.0]))
            if action := trigger.action_for(run):
                _end(action, task, trigger)
            run.end = "done"
        except BaseException as error:
            run.end = type(error).__name__
            raise
        finally:
            run.ended = run.ended or self.now
            self.note(process.name, "has run", name, run.end)
        return f"done {name}"

    def received(self, delivery: Delivery) -> None:
        """Note that a worker has received a task. If the task has an ``eta``, it is not numbered by then."""
        if delivery.is_work and not delivery.payload["headers"]["eta"]:
            self.arrived_at.setdefault(delivery.work.trigger, self.now)

    def ended(self, delivery: Delivery, end: str) -> None:
        """Note how a delivery has ended for Celery."""
        self.note(this().name, "ends", *delivery.work, end)
        if not delivery.is_work:
            self.beside[delivery.work.trigger].append(end)
        if delivery.is_work:
            self.outcomes[delivery.work].append(end)
            if end in ("None", "AlreadyRunning", "LockUnavailable"):  # the key is busy, or the server cannot be asked
                trigger = self.triggers[delivery.work.trigger]
                self.not_run.append(Run(trigger, delivery.work, None, delivery.child.pid, delivery.began, end))
            if end != "Retry":  # after which the task goes on
                self.ended_at[delivery.work.trigger] = self.now
            # If its child was killed, its function was perhaps not called.
            if delivery.work.trigger not in self.begun_and_killed:
                self.arrived_at.setdefault(delivery.work.trigger, self.now)


@functools.cache
def _app(_process: Process, broker: str, *, acks_late: bool) -> Any:
    """The app of a process, made once, because that takes longer than a history."""
    app = App("world", broker="sim://", backend=f"{__package__}.broker:Results+memory://", set_as_current=False)
    app.conf.update(
        broker_transport=TRANSPORTS[broker],
        broker_transport_options={"visibility_timeout": 60},
        task_acks_late=acks_late,
        task_reject_on_worker_lost=acks_late,
        task_publish_retry=False,
    )
    app.finalize()
    app.conf.__dict__["maps"] = [dict(app.conf)]  # faster: Celery would look in several maps for each setting

    def tail(result: Any, given: Given) -> Any:
        playing().triggers[next(iter(given))].received.append(result)
        return result

    app.task(name="tail", shared=False)(tail)
    return app


def _task_of(app: Any, name: str, function: Callable[..., Any], kind: str, **options: Any) -> Any:
    """The task that runs a function: made of the function, or of a class whose ``run`` it is."""
    if kind == "function":
        return app.task(bind=True, name=name, shared=False, **options)(function)
    return app.register_task(type("Work", (Task,), {"name": name, **options, "run": function})())


logging.getLogger("celery").setLevel(logging.CRITICAL)
