"""The world of messages: producers, a broker and workers; Celery is the real one above its transport and its pool."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import celery.worker.state
from billiard.einfo import ExceptionInfo
from celery import Celery, _state, chain, chord, signals
from celery.app.trace import trace_task_ret
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import (
    Ignore,
    Reject,
    SoftTimeLimitExceeded,
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.worker.strategy import default as strategy_of
from kombu.exceptions import OperationalError
from kombu.transport import virtual

from .network import Host
from .process import Machine, Process, this, thread
from .server import Store
from .world import World

_untyped: Any = virtual
_worlds: list[MessageWorld] = []
"""The world that is played: Celery makes its transports and backends by the name of their class."""


class Channel(virtual.Channel):
    """A channel of the broker in the world."""

    def _put(self, queue: Any, message: Any, **_: Any) -> None:  # noqa: ARG002
        _worlds[-1].broker.put(message)

    def _has_queue(self, *_: Any, **__: Any) -> bool:
        return True

    def _size(self, _queue: str) -> int:
        return 0


class Transport(virtual.Transport):
    """The transport by which Celery publishes. Its messages say that they are redelivered, as Redis's do."""

    Channel = Channel
    driver_type = driver_name = "redis"


class Backend(KeyValueStoreBackend):  # type: ignore[misc]
    """Results of the world."""

    implements_incr = True

    def get(self, key: Any) -> Any:
        return _worlds[-1].results.get(_text(key))

    def mget(self, keys: list[Any]) -> list[Any]:
        return [self.get(key) for key in keys]

    def set(self, key: Any, value: Any) -> None:
        _worlds[-1].results[_text(key)] = value

    def delete(self, key: Any) -> None:
        _worlds[-1].results.pop(_text(key), None)

    def incr(self, key: Any) -> int:
        number = int(self.get(key) or 0) + 1
        self.set(key, number)
        return number

    def expire(self, *_: Any) -> None: ...


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key


class App(Celery):  # type: ignore[misc]
    """An app whose time is the world's."""

    def now(self) -> datetime:
        return datetime.fromtimestamp(_worlds[-1].world.wall(), timezone.utc)


@dataclass(eq=False)
class Delivery:
    """A message in the broker."""

    payload: dict[str, Any]
    number: int
    worker: Any = None
    is_done: bool = False

    @property
    def trigger(self) -> str:
        """The name of the trigger, its first argument; a tail has two."""
        names: list[str] = re.findall(r"'(t\d+)'", self.payload["headers"]["argsrepr"])
        return names[-1]


class Broker:
    """Delivers each message to a worker, and again if that worker loses its connection."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.queue: list[Delivery] = []
        self.unacked: list[Delivery] = []
        self.workers: list[Worker] = []
        self.published: list[Delivery] = []

    def put(self, payload: dict[str, Any]) -> None:
        headers = payload["headers"]
        if headers["task"] == "work" and self.world.fault(f"publishing fails of {_name()}", 0.02):
            msg = "the broker is away"
            raise OperationalError(msg)
        delivery = Delivery(payload, len(self.published))
        self.published.append(delivery)
        ours = headers.get("only_one") or {}
        shown = f"id={headers['id'][:8]} retries={headers['retries']} times={ours.get('times', 0)}"
        self.world.note(_name(), "publishes", f"#{delivery.number}", delivery.trigger, shown)
        self.world.after(self.world.uniform("publishing", 0.001, 0.01), lambda: self._arrive(delivery))
        self.world.sleep(0)

    def _arrive(self, delivery: Delivery) -> None:
        self.queue.append(delivery)
        self.deliver()

    def deliver(self) -> None:
        """Give messages to workers that have room."""
        while self.queue and (ready := [each for each in self.workers if each.has_room()]):
            delivery = self.queue.pop(0)
            worker = self.world.choose("worker of a message", ready)
            delivery.worker = worker
            self.unacked.append(delivery)
            worker.receive(delivery)
            if self.world.fault("visibility timeout", 0.05):
                self.world.after(self.world.choose("seconds unseen", [0.5, 2.0, 6.0]), partial(self.again, delivery))

    def again(self, delivery: Delivery) -> None:
        """Deliver a message once more, which its worker may still have."""
        if not delivery.is_done and delivery in self.unacked:
            self.unacked.remove(delivery)
            payload = {**delivery.payload, "headers": {**delivery.payload["headers"], "redelivered": True}}
            properties = payload["properties"]
            info = {**properties["delivery_info"], "redelivered": True}
            payload["properties"] = {**properties, "delivery_info": info}
            copy = Delivery(payload, delivery.number)
            self.world.note("broker", "redelivers", f"#{delivery.number}")
            self._arrive(copy)

    def ack(self, delivery: Delivery) -> None:
        self.published[delivery.number].is_done = delivery.is_done = True
        for each in (self.unacked, self.queue):  # by its tag: also the copy
            each[:] = [other for other in each if other.number != delivery.number]
        self.world.note(_name(), "acknowledges", f"#{delivery.number}")
        self.deliver()

    def reject(self, delivery: Delivery, *, requeue: bool) -> None:
        self.world.note(_name(), "rejects", f"#{delivery.number}", "requeue" if requeue else "")
        if requeue:
            self.again(delivery)
        else:
            self.ack(delivery)

    def restore(self, worker: Worker) -> None:
        for delivery in [each for each in self.unacked if each.worker is worker]:
            self.again(delivery)


def _part(name: str) -> str:
    return name


def _name() -> str:
    running = thread()
    return running.process.name if running else "broker"


class Worker:
    """A worker: its main process, and the children of its prefork pool."""

    def __init__(self, owner: MessageWorld, name: str, machine: Machine, processes: list[Process]) -> None:
        self.owner, self.world, self.name, self.machine = owner, owner.world, name, machine
        self.main, *self.children = processes
        self.jobs: list[Job] = []
        self.inbox: list[Callable[[], None]] = []
        self._wake: Callable[[Any], None] | None = None
        self.consumes = True
        self.begin()

    def begin(self) -> None:
        for number, process in enumerate([self.main, *self.children]):
            self.owner.start(process, f"{self.name}.{number}" if number else self.name, self.machine)
        self.app = self.owner.apps[self.main]
        self.jobs, self.inbox, self.consumes = [], [], True
        self.strategies: dict[str, Any] = {}
        self.world.spawn(self.main, f"{self.name}/main", self._serve)

    @property
    def is_dead(self) -> bool:
        return self.main.is_dead

    def has_room(self) -> bool:
        return self.consumes and not self.is_dead and len(self.jobs) < 4

    # the main process: one thing after another

    def do(self, job: Callable[[], None]) -> None:
        self.inbox.append(job)
        if self._wake is not None:
            wake, self._wake = self._wake, None
            wake(None)

    def _serve(self) -> None:
        while self.consumes or self.jobs or self.inbox:
            if not self.inbox:
                self.world.wait(lambda wake: setattr(self, "_wake", wake), None)
            while self.inbox:
                self.inbox.pop(0)()

    def receive(self, delivery: Delivery) -> None:
        self.jobs.append(Job(self, delivery))
        self.do(self.jobs[-1].receive)

    def kill(self) -> None:
        """``kill -9`` of the main process and all children; the broker notices the lost connection."""
        self.world.note(self.name, "is killed")
        for process in (self.main, *self.children):
            process.is_dead = True
            self.owner.killed(process)
        self.jobs.clear()
        self.world.after(self.world.choose("seconds until a lost worker is seen", [0.1, 1.0, 5.0]), self._lost)

    def _lost(self) -> None:
        self.owner.broker.restore(self)
        self.begin()
        self.owner.broker.deliver()

    def shut_down(self, *, cold: bool) -> None:
        self.consumes = False
        self.world.note(self.name, "shuts down", "cold" if cold else "warm")
        self.do(lambda: self._shut_down(cold=cold))

    def _shut_down(self, *, cold: bool) -> None:
        signals.worker_shutting_down.send(sender=self.name, sig="SIGTERM", how="Cold" if cold else "Warm", exitcode=0)
        while not cold and any(job.child for job in self.jobs):
            self.world.sleep(0.1)
            while self.inbox:
                self.inbox.pop(0)()
        for child in self.children:
            child.is_dead = True
            self.owner.killed(child)
        self.owner.broker.restore(self)
        if not cold:
            signals.worker_shutdown.send(sender=self)
        self.main.has_ended = True
        for do in reversed(self.main.at_exit):
            do()
        self.main.is_dead = True
        self.world.after(1, self.begin)
        self.world.after(1.1, self.owner.broker.deliver)

    # what Celery's strategy needs of a consumer

    @property
    def consumer(self) -> Any:
        def at(when: float, do: Any, args: Any = (), **_: Any) -> None:
            life = self.main.life
            self.world.at(when - self.world.wall() + self.world.now, lambda: self._if_alive(life, do, args))

        return _Consumer(
            app=self.app, hostname=self.name, connection_errors=(), event_dispatcher=None, disable_rate_limits=True,
            pool=SimpleNamespace(apply_async=self._apply_async), task_buckets=defaultdict(lambda: None),
            qos=SimpleNamespace(increment_eventually=lambda: None, decrement_eventually=lambda: None),
            timer=SimpleNamespace(call_at=at, call_after=lambda s, *given: at(self.world.wall() + s, *given)),
            apply_eta_task=self._execute, on_task_request=self._execute, _limit_task=None, _limit_post_eta=None,
            controller=SimpleNamespace(state=celery.worker.state),
        )  # fmt: skip

    def _if_alive(self, life: int, do: Any, args: Any) -> None:
        if self.main.life == life and not self.is_dead and (self.consumes or do != self._execute):
            self.do(lambda: do(*args))

    def _execute(self, request: Any) -> None:
        try:
            request.execute_using_pool(None)
        except TaskRevokedError:
            next(job for job in self.jobs if job.request is request).over()

    def _apply_async(
        self, _target: Any, args: Any, correlation_id: str, soft_timeout: Any, timeout: Any, **callbacks: Any
    ) -> Any:
        del correlation_id
        job = next(each for each in self.jobs if each.request is not None and each.request.request_dict is args[2])
        job.target, job.callbacks, job.limits = args, callbacks, (soft_timeout, timeout)
        self.assign()

    def assign(self) -> None:
        """Give jobs to children that are free."""
        free = [child for child in self.children if all(job.child is not child for job in self.jobs)]
        for job in [job for job in self.jobs if job.target and not job.child][: len(free)]:
            child = free.pop(0)
            if child.is_dead:
                self.owner.start(child, f"{self.name}.{1 + self.children.index(child)}", self.machine)
            job.begin(child)

    def kill_child(self, child: Process) -> None:
        job = next((job for job in self.jobs if job.child is child), None)
        if job is not None and not self.is_dead and not child.is_dead:
            self.world.note(child.name, "is killed")
            child.is_dead = True
            self.owner.killed(child)
            self.world.after(self.world.choose("until a lost child is seen", [0.01, 0.5]), lambda: self.do(job.lost))


class _Consumer:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Job:
    """One delivery in a worker."""

    def __init__(self, worker: Worker, delivery: Delivery) -> None:
        self.worker, self.delivery = worker, delivery
        self.request: Any = None
        self.target: Any = None
        self.child: Any = None
        self.callbacks: dict[str, Any] = {}
        self.limits: Any = (None, None)
        self._is_over = False

    def receive(self) -> None:
        """As the worker's consumer does with a message: the strategy of Celery decides."""
        worker = self.worker
        message = _untyped.Message(
            self.delivery.payload, channel=SimpleNamespace(no_ack_consumers=None, decode_body=_decode)
        )
        name = message.headers["task"]
        if name not in worker.strategies:
            worker.strategies[name] = strategy_of(worker.app.tasks[name], worker.app, worker.consumer)
        _receiving.append(self)
        worker.strategies[name](
            message, None, self._ack, self._reject, [], to_timestamp=lambda eta, *_: eta.timestamp()
        )
        _receiving.pop()
        if self.request is not None and self.request._already_revoked:
            self.over()

    def _ack(self, *_: Any) -> None:
        self.worker.owner.broker.ack(self.delivery)

    def _reject(self, _logger: Any, _errors: Any, requeue: bool) -> None:  # noqa: FBT001
        self.worker.owner.broker.reject(self.delivery, requeue=requeue)

    def over(self) -> None:
        if not self._is_over:
            self._is_over = True
            with suppress(ValueError):
                self.worker.jobs.remove(self)
            self.worker.assign()
            self.worker.owner.broker.deliver()
            self.worker.do(lambda: None)

    def begin(self, child: Process) -> None:
        self.child = child
        world = self.worker.world
        self.worker.do(lambda: self.callbacks["accept_callback"](child.pid, 0.0))
        running = world.spawn(child, f"{child.name}/task", self._run)
        soft, hard = self.limits
        if soft:
            world.after(soft, lambda: setattr(running, "interrupt", SoftTimeLimitExceeded()))
        if hard:
            world.after(hard, lambda: self.worker.do(self._exceeds))

    def _run(self) -> None:
        result = trace_task_ret(*self.target, app=self.worker.owner.apps[self.child])
        error = getattr(result[1], "exception", None)
        error = getattr(error, "exc", error)
        end = type(error).__name__ if result[0] else result[1]
        end = getattr(error, "exc_cls_name", end)
        self.worker.world.note(self.child.name, "ends", self.delivery.trigger, end)
        if self.delivery.payload["headers"]["task"] == "work":
            self.worker.owner.triggers[self.delivery.trigger].ends.append(end)
        self.worker.do(lambda: self._ready(result))

    def _ready(self, result: Any) -> None:
        self.callbacks["callback"](result)
        self.over()

    def _exceeds(self) -> None:
        """The hard time limit is over: Celery stores the failure, and then kills the child."""
        if self in self.worker.jobs and not self.child.is_dead:
            self.worker.owner.triggers[self.delivery.trigger].ends.append("TimeLimitExceeded")
            self._fails(TimeLimitExceeded(self.limits[1]))
            self.callbacks["timeout_callback"](soft=False, timeout=self.limits[1])
            self.worker.world.note(self.child.name, "is killed at its time limit")
            self.child.is_dead = True
            self.worker.owner.killed(self.child)
            self.over()

    def lost(self) -> None:
        if self in self.worker.jobs:
            self._fails(WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL)"))
            self.over()

    def _fails(self, error: Exception) -> None:
        try:
            _raise(error)
        except type(error):
            self.callbacks["error_callback"](ExceptionInfo())  # of the exception that is handled


def _raise(error: Exception) -> None:
    raise error


_receiving: list[Job] = []


def _decode(body: Any, encoding: Any = None) -> Any:
    return _untyped.Channel.codecs[encoding].decode(body) if encoding else body


def _on_received(request: Any = None, **_: Any) -> None:
    if _receiving:
        _receiving[-1].request = request


signals.task_received.connect(_on_received, weak=False)


# what is played


@dataclass
class Plan:
    placement: str
    when_busy: str
    acks_late: bool
    lease: float | None
    at_least: float
    workers: int
    triggers: int


@dataclass(eq=False)
class Trigger:
    """One call of a producer."""

    name: str
    what: str
    how: str
    id: str | None = None
    asked: float = 0.0
    result: Any = None
    error: Any = None
    published: int = 0
    ends: list[str] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)


_WHAT = [*["done"] * 5, "fail", *["retry"] * 2, *["replace"] * 2, "ignore", "reject", "retry without throw"]
_HOW = [*["delay"] * 4, "id", "id", "chain", "chord", "countdown", "soft limit", "hard limit"]
_OPTIONS = {"countdown": {"countdown": 1}, "soft limit": {"soft_time_limit": 1}, "hard limit": {"time_limit": 1}}
_UNIQUE = ("delay", "countdown", "soft limit", "hard limit")
_MAY_GIVE_UP = ("replace", "retry without throw")
"""Of which a message may wait without its key: other work has it by then."""

_JUST_NOW = 0.1
_RUNS = {"retry": 2, "retry without throw": 2, "replace": 3}


class MessageWorld:
    """One history of messages."""

    def __init__(self, processes: list[Process], seed: int, left_out: frozenset[str] = frozenset()) -> None:
        self.world = world = World(seed, left_out)
        choose = world.choose
        self.plan = Plan(
            placement=choose("plan placement", ["below", "below", "above", "above", "two below", "both"]),
            when_busy=choose("plan when_busy", ["default", "retry", "buffer_one", "skip", "fail"]),
            acks_late=choose("plan acks_late", [True, False]),
            lease=choose("plan lease", [None, 3.0]),
            at_least=choose("plan at_least", [0.0, 0.0, 3.0]),
            workers=choose("plan workers", [1, 2]),
            triggers=choose("plan triggers", [2, 3, 4, 6]),
        )
        if self.plan.placement in ("above", "both") and self.plan.when_busy == "retry":
            self.plan.when_busy = "default"
        self.store = Store(lambda: world.now, world.wall, "valkey")
        self.host = Host(world, ("server", 6379), self.store)
        world.hosts = {self.host.address: self.host}
        self.results: dict[str, Any] = {}
        self.apps: dict[Process, Any] = {}
        self.problems: list[tuple[str, str]] = []
        self.machines = [Machine("alpha"), Machine("beta")]
        self.processes = processes
        self.pids = 100
        self.triggers: dict[str, Trigger] = {}
        self.running: list[Any] = []
        self.broker = Broker(world)
        self.is_calm = False

    def problem(self, kind: str, text: str) -> None:
        self.problems.append((kind, text))
        self.world.note("checker", kind.upper(), text)

    def alias(self, task_id: str) -> str:
        found = [each.name for each in self.triggers.values() if each.id == task_id]
        return found[-1] if found else task_id[:8]

    def play(self) -> MessageWorld:
        _worlds.append(self)
        finalizers = set(_state._on_app_finalizers)
        self.host.arrived = self._arrived
        try:
            self._play()
        finally:
            _worlds.pop()
            _state._on_app_finalizers.intersection_update(finalizers)
            celery.worker.state.reset_state()
        return self

    def _play(self) -> None:
        world, plan = self.world, self.plan
        trouble = world.choose("plan trouble", [0, 0, 0, 1])
        self.host.loses, self.host.delays = [0.0, 0.02][trouble], [0.0, 0.03][trouble]
        producer = self.processes[0]
        self.start(producer, "producer", self.machines[0])
        for number in range(plan.workers):
            machine = world.choose("plan machine", self.machines)
            given = self.processes[1 + 3 * number : 4 + 3 * number]
            self.broker.workers.append(Worker(self, f"w{number}", machine, given))
        done: list[bool] = []
        world.spawn(producer, "producer/main", self._produce, done)
        self._plan_faults()
        world.run(world.now + 200, lambda: bool(done))
        world.run(world.now + 15)
        world.quiet = True
        self.host.loses = self.host.delays = 0.0
        world.run(world.now + 120, self._is_drained)
        world.run(world.now + 35 + plan.at_least)
        if not done:
            self.problem("a call never ended", "the producer waits")
        self._check()
        world.end()

    def _is_drained(self) -> bool:
        return not self.broker.queue and not self.broker.unacked and not self.running

    def _plan_faults(self) -> None:  # noqa: C901 - a table
        world = self.world
        workers = self.broker.workers

        def each(label: str, probability: float, do: Callable[[], None]) -> None:
            if world.fault(label, probability):
                world.after(world.uniform(f"time of {label}", 0, 12), do)

        def one() -> Worker:
            return world.choose("which worker", workers)

        def kill_child() -> None:
            worker = one()
            worker.kill_child(world.choose("which child", worker.children))

        def kill() -> None:
            if not (worker := one()).is_dead:
                worker.kill()

        def shut_down() -> None:
            worker = one()
            if worker.consumes and not worker.is_dead:
                worker.shut_down(cold=world.draw("cold") < 0.5)

        def revoke() -> None:
            ids = [trigger.id for trigger in self.triggers.values() if trigger.id]
            if ids:
                revoked = world.choose("which revoked", ids)
                world.note("somebody", "revokes", self.alias(revoked))
                self.revoked.add(revoked)
                celery.worker.state.revoked.add(revoked)

        self.revoked: set[str] = set()
        for _ in range(2):
            each("kill of child", 0.15, kill_child)
        each("kill of worker", 0.1, kill)
        each("shutdown", 0.15, shut_down)
        each("revoke", 0.08, revoke)

    # processes, apps and tasks

    def start(self, process: Process, name: str, machine: Machine) -> None:
        self.pids += 1
        process.begin(machine, self.pids, name, self.pids)
        self.apps[process] = self._app(process)

    def killed(self, process: Process) -> None:
        for run in [run for run in self.running if run.process is process]:
            self.running.remove(run)
            run.end = "killed"

    def _app(self, process: Process) -> Any:
        plan, package = self.plan, process.package
        here = __name__
        app = App("world", broker="sim://", backend=f"{here}:Backend", set_as_current=False)
        app.conf.update(broker_transport=f"{here}:Transport", broker_transport_options={"visibility_timeout": 60},
                        task_acks_late=plan.acks_late, task_reject_on_worker_lost=plan.acks_late,
                        task_publish_retry=False, only_one_redis="redis://server:6379/0?protocol=2")  # fmt: skip
        app.finalize()
        policies: dict[str, Any] = {"retry": package.retry(), "buffer_one": package.buffer_one(),
                                    "skip": package.skip, "fail": package.fail}  # fmt: skip
        given: dict[str, Any] = {} if plan.when_busy == "default" else {"when_busy": policies[plan.when_busy]}
        given |= {} if plan.lease is None else {"lease": plan.lease}
        given |= {"at_least": plan.at_least} if plan.at_least else {}

        def work(task: Any, name: str, what: str) -> str:
            return self._body(task, name, what)

        _state._task_stack  # noqa: B018
        function: Any = work
        if plan.placement in ("below", "two below", "both"):
            function = package.only_one("inner" if plan.placement != "below" else "k", **given)(function)
        if plan.placement == "two below":
            function = package.only_one("k", **given)(function)
        task = app.task(bind=True, name="work", shared=False)(function)
        if plan.placement in ("above", "both"):
            task = package.only_one("k", **given)(task)

        def tail(result: Any, name: str) -> Any:
            self.triggers[name].tail = result  # type: ignore[attr-defined]
            self.world.note(_name(), "tail gets", result, name)
            return result

        app.task(name="tail", shared=False)(tail)
        app.task(name="part", shared=False)(_part)
        return app

    # producing

    def _produce(self, done: list[bool]) -> None:
        world, app = self.world, self.apps[self.processes[0]]
        task = app.tasks["work"]
        for number in range(self.plan.triggers):
            name = f"t{number}"
            world.sleep(world.choose(f"pause before {name}", [0.0, 0.01, 1.0, 3.0]))
            if world.is_left_out(f"call {name}"):
                continue
            what, how = world.choose(f"what of {name}", _WHAT), world.choose(f"how of {name}", _HOW)
            trigger = self.triggers[name] = Trigger(name, what, how, asked=world.now)
            world.note("producer", "sends", name, what, how)
            before = self._alive()
            try:
                if how == "id":
                    trigger.id = "same-id"
                    self._wait_for_the_last_with_that_id(trigger)
                    trigger.result = task.apply_async((name, what), task_id="same-id")
                elif how == "chain":
                    trigger.result = chain(task.s(name, what), app.tasks["tail"].s(name)).apply_async().parent
                elif how == "chord":
                    parts = [task.s(name, what), app.tasks["part"].s(name)]
                    trigger.result = chord(parts)(app.tasks["tail"].s(name)).parent.results[0]
                elif how in _OPTIONS:
                    trigger.result = task.apply_async((name, what), **_OPTIONS[how])
                else:
                    trigger.result = task.delay(name, what)
            except Exception as error:  # noqa: BLE001 - the checker says which are allowed
                trigger.error = error
            trigger.id = trigger.result.id if hasattr(trigger.result, "id") else trigger.id
            trigger.published = sum(each.trigger == name for each in self.broker.published)
            shown = "published" if trigger.published else f"duplicate {trigger.error or ''}"
            world.note("producer", "has sent", name, shown)
            self._check_unique(trigger, before)
        done.append(True)

    def _alive(self) -> set[str]:
        """The triggers whose tasks wait or run."""
        there = [delivery for delivery in self.broker.published if not delivery.is_done]
        there += [job.delivery for worker in self.broker.workers for job in worker.jobs]
        return {delivery.trigger for delivery in there} | {run.trigger.name for run in self.running}

    def _check_unique(self, new: Trigger, before: set[str]) -> None:
        """Where nothing goes wrong, a task has no second message, and a duplicate is one of a task that is alive."""
        is_unique = self.plan.placement in ("above", "both") and self.plan.when_busy != "buffer_one"
        is_calm = all(each.startswith("publishing fails") for each in self.world.faults)
        if not is_unique or not is_calm or new.how not in _UNIQUE:
            return
        after = self._alive() - {new.name}
        keep_their_keys = {
            name for name, each in self.triggers.items() if each.how in _UNIQUE and each.what not in _MAY_GIVE_UP
        }
        if new.published and (others := before & after & keep_their_keys):
            self.problem("a second message", f"{new.name} beside {others}")
        ended = [run.at or -inf for each in self.triggers.values() for run in each.runs]
        was_alive = before or after or any(self.world.now - at < _JUST_NOW for at in ended)
        if not (new.published or new.error or was_alive or self.plan.at_least):
            self.problem("a duplicate of nothing", new.name)

    def _wait_for_the_last_with_that_id(self, new: Trigger) -> None:
        """An id is used again for new work when the work before has ended."""

        def is_waiting() -> bool:
            jobs = [job.delivery for worker in self.broker.workers for job in worker.jobs]
            there = [*jobs, *(each for each in self.broker.published if not each.is_done)]
            return any(each.payload["headers"]["id"] == new.id for each in there)

        for _ in range(900):
            if not is_waiting():
                return
            self.world.sleep(0.1)

    # a run

    def _body(self, task: Any, name: str, what: str) -> str:
        world, trigger = self.world, self.triggers[name]
        process = this()
        lock = process.package.current_lock()
        for other in self.running:
            if other.lock.is_held and lock.is_held:
                self.problem("two at once", f"{name} began while {other.trigger.name} runs")
        run = SimpleNamespace(trigger=trigger, lock=lock, process=process, began=world.now, end=None, at=None)
        trigger.runs.append(run)
        self.running.append(run)
        world.note(process.name, "runs", name, f"attempt {task.request.retries}")
        try:
            world.sleep(world.choose(f"length of {name}", [0.01, 0.5, 2.0, 4.0]))
            run.end = self._end_of(task, trigger, name, what)
        except BaseException as error:
            run.end = type(error).__name__
            raise
        finally:
            run.at = world.now
            if run in self.running:
                self.running.remove(run)
            world.note(process.name, "has run", name, run.end)
        return f"done {name}"

    def _end_of(self, task: Any, trigger: Trigger, name: str, what: str) -> str:
        if what == "fail":
            msg = "the body fails"
            raise ValueError(msg)
        if what == "ignore":
            raise Ignore
        if what == "reject":
            raise Reject(requeue=False)
        again = len([run for run in trigger.runs if run.end in ("Retry", "Ignore", "Replaced", "done")])
        if what == "retry" and task.request.retries == 0:
            raise task.retry(countdown=self.world.choose(f"countdown of {name}", [0.1, 1.0]))
        if what == "retry without throw" and task.request.retries == 0:
            task.retry(countdown=0.1, throw=False)
            trigger.wants = 2  # type: ignore[attr-defined]
        if what == "replace" and again < 2:
            raise task.replace(task.s(name, what))
        return "done"

    def _arrived(self, process: Any, command: list[bytes], reply: Any) -> None:
        from .checker import _short, _token  # noqa: PLC0415

        shown = reply if not isinstance(reply, bytes) else _token(reply)
        self.world.note("server", "executes for", process.name, _short(command), shown)

    # what must hold

    def _check(self) -> None:
        if self.broker.queue or self.broker.unacked:
            waiting = [self.alias(each.payload["headers"]["id"]) for each in (*self.broker.queue, *self.broker.unacked)]
            self.problem("a message waits for ever", " ".join(waiting))
        for trigger in self.triggers.values():
            self._check_trigger(trigger)
        for key in list(self.store.keys):
            value = self.store.get(key)
            if value is not None and not key.startswith(b"{"):
                self.problem("a key without a run", f"{key!r} {value!r}"[:200])
        self._check_newest()

    def _check_trigger(self, trigger: Trigger) -> None:  # noqa: C901 - each way in which a task may end
        allowed = ("AlreadyRunning", "LockUnavailable", "OperationalError")
        if trigger.error is not None and type(trigger.error).__name__ not in allowed:
            self.problem("an exception that is not documented", f"{trigger.name}: {trigger.error!r}")
        if not trigger.published:
            return
        ends, runs = [run.end for run in trigger.runs], len(trigger.runs)
        if "ValueError" in ends or (trigger.what == "ignore" and "Ignore" in ends):
            return
        if "done" in ends:
            was_revoked = trigger.id in self.revoked  # a retry of it, which has the rest of the chain
            was_told = was_revoked or self._may_lose_messages()
            if trigger.how in ("chain", "chord") and not hasattr(trigger, "tail") and not was_told:
                self.problem("a chain lost its tail", trigger.name)
            if runs > _RUNS.get(trigger.what, 1) and not self.world.faults:
                self.problem("a run too many", f"{trigger.name} ran {runs} times")
            return
        if trigger.id in self.revoked or set(trigger.ends) - {"Ignore", "Retry", "None"}:
            return  # it was told
        if hasattr(trigger, "tail"):
            return  # its result was stored, and passed on, before its child was killed
        if self.plan.at_least and trigger.how == "id" and {*trigger.ends} == {"Ignore"}:
            return  # the key is kept, by a task with the same id: to tell the two apart could cost a result
        if "None" in trigger.ends and self._may_be_skipped(trigger):
            return
        if self._may_lose_messages() or (trigger.how == "id" and any("kill" in each for each in self.world.faults)):
            return  # Celery finds the earlier success of this id, and takes it for that of the child that was killed
        self.problem("a task is lost", f"{trigger.name}: {trigger.ends}")

    def _may_lose_messages(self) -> bool:
        """Whether a message may be acknowledged whose task has not begun or not ended, as Celery has it."""
        return not self.plan.acks_late and any("kill" in each or "shutdown" in each for each in self.world.faults)

    def _may_be_skipped(self, trigger: Trigger) -> bool:
        """Whether None may stand for the result of a task that found its key busy."""
        if self.plan.when_busy == "buffer_one":
            return True  # see `_check_newest`
        was_begun = bool(trigger.runs)
        return self.plan.when_busy == "skip" or (self.plan.when_busy == "default" and not was_begun)

    def _check_newest(self) -> None:
        if self.plan.when_busy != "buffer_one":
            return
        sent = [each for each in self.triggers.values() if each.error is None and each.what != "ignore"]
        runs = [run for each in self.triggers.values() for run in each.runs]
        has_run = not sent or any(run.began >= sent[-1].asked or run.trigger is sent[-1] for run in runs)
        may_be_lost = self._may_lose_messages()
        was_told = self.revoked or (sent and set(sent[-1].ends) - {"Ignore", "Retry", "None"})
        if not (has_run or may_be_lost or was_told):
            self.problem("the newest did not run", sent[-1].name)


logging.getLogger("celery").setLevel(logging.CRITICAL)
