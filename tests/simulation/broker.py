"""The broker and the workers of the world of messages.

Celery's strategy, requests and tracer are the real ones. The transport below them, the pool and the timer are ours.
"""

from __future__ import annotations

import re
import sys
from base64 import b64decode
from contextlib import suppress
from copy import deepcopy
from datetime import datetime, timezone
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import billiard.einfo
import celery.worker.request
import celery.worker.state
from billiard.einfo import ExceptionInfo
from celery import Celery, signals
from celery.app.trace import trace_task_ret
from celery.backends.cache import CacheBackend
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded, WorkerLostError
from kombu import common
from kombu.exceptions import OperationalError
from kombu.transport import virtual

from .process import FakeQueue, Machine, Process, playing, this
from .tracing import Tracer

_virtual: Any = virtual
_common: Any = common
_common.get_node_id()  # drawn once in a process, and so before the first history, which must draw what later ones do
_PREFETCHED = 4
_SOFT_SHUTDOWN = 1.0
"""Seconds for which a soft shutdown waits for runs (``worker_soft_shutdown_timeout``)."""


class Channel(virtual.Channel):
    """A channel of the broker in the world."""

    def _put(self, queue: Any, message: Any, **_: Any) -> None:  # noqa: ARG002
        playing().broker.put(message)


_RECEIVING = SimpleNamespace(no_ack_consumers=None, decode_body=partial(_virtual.Channel.decode_body, Channel))
"""Stands in for the channel on which a message is received."""

TRANSPORTS: dict[str, Any] = {
    name: type(name, (virtual.Transport,), {"Channel": Channel, "driver_type": name, "driver_name": name})
    for name in ("redis", "amqp")
}
"""By name, the transports with which Celery publishes."""


class Results(CacheBackend):  # type: ignore[misc]
    """A result backend that may take its time to store a result."""

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state == "SUCCESS":
            playing().sleep(playing().choose(f"storing of {this().name}", [0.0, 0.0, 0.0, 0.4]))
        return super().store_result(task_id, result, state, *args, **kwargs)


class Clock(datetime):
    """``datetime`` with the time of the world."""

    @classmethod
    def now(cls, _zone: Any = None) -> Any:
        """The world's time; Celery asks for it in UTC."""
        return datetime.fromtimestamp(playing().wall(), timezone.utc)


class App(Celery):  # type: ignore[misc]
    """An app whose time is the world's."""

    now = Clock.now


celery.worker.request.datetime = Clock
billiard.einfo.Traceback = lambda _: None


class Work(NamedTuple):
    """The identity of a message's work for the checker. It has no task id, because an id may be used again."""

    trigger: str
    replacement: int
    attempt: int


class Delivery:
    """A delivery of a message: first it waits in the broker, then it is a job of a worker.

    Attributes:
        payload: the message.
        number: the message's number; a redelivery has the same.
        is_work: whether the message's task is decorated.
        is_redelivery: whether the message was delivered before.
        worker: the worker that has received the message.
        received_at: when the worker has received it.
        is_done: whether the message is acknowledged.
        request: Celery's request for the message.
        child: the child that has begun the task.
        thread: the thread in which the child runs the task.
        if_terminated: how the delivery ends if the child is told to exit.
        message: kombu's message, once a worker has received it.
    """

    is_done = is_redelivery = False
    worker: Any = None
    received_at = 0.0
    child: Any = None
    thread: Any = None
    if_terminated = "TaskRevoked"
    is_terminated = False
    message: Any = None
    limits: Any = (None, None)

    def __init__(self, payload: dict[str, Any], number: int) -> None:
        self.payload, self.number = payload, number
        headers = payload["headers"]
        self.id, self.task = headers["id"], headers["task"]
        self.is_work = self.task.endswith("work")
        name, *_ = re.findall(rb'{"(t\d+)"', b64decode(payload["body"]))
        self.work = Work(name.decode(), headers.get("replaced_task_nesting") or 0, headers["retries"])
        self.forget()

    def begin(self, child: Process) -> None:
        self.child, self.began = child, self.worker.world.now
        world = self.worker.world
        self.worker.do(lambda: self.callbacks["accept_callback"](child.pid, 0.0))
        self.thread = running = world.spawn(child, f"{child.name}/task", self._run)
        soft, hard = self.limits
        if soft and world.plan.limited_at == "a time":
            world.after(soft, lambda: setattr(running, "interrupt", SoftTimeLimitExceeded()))
        if hard:
            world.after(hard, lambda: self.worker.do(self._exceeds))

    def _run(self) -> None:
        world = self.worker.world
        app = world.app_of(self.child)
        if self.limits[0] and world.plan.limited_at == "a line":
            tracer = Tracer(world.branches, int(world.uniform(f"line of {self.child.name}", 1, 280)), world)
            tracer.kind, tracer.rooms = SoftTimeLimitExceeded, ("/only_one/celery/", "/only_one/call/")  # lines of ours
            self.thread.tracer = tracer.trace
            sys.settrace(tracer.trace)
        result = has_failed, value, _runtime = trace_task_ret(*self.target, app=app)
        world.ended(self, _name_of_error(value) if has_failed else value.strip("[]"))
        self.worker.do(lambda: self._ready(result))

    def terminate(self, end: str, patience: float | None = None) -> None:
        """Tell the child to exit, by SIGTERM. Kill it if it does not, as in a C call, or not within ``patience``."""
        if self.is_terminated:
            return
        self.is_terminated = True
        world, child, thread = self.worker.world, self.child, self.thread
        stays = world.choose(f"C call in {child.name}", [True, False])
        if thread.dead or stays:
            self._kill(end)
            return
        world.note(child.name, "is told to exit")
        thread.interrupt = SystemExit()
        world.after(0, world.resume, thread, thread.waiting, None)
        world.spawn(child, f"{child.name}/end", self._exit, end, patience)

    def _exit(self, end: str, patience: float | None) -> None:
        if not self.thread.dead:
            self.worker.world.wait(self.thread.joined.append, patience)
        if self.thread.dead:
            signals.worker_process_shutdown.send(sender=None, pid=self.child.pid, exitcode=0)
        self._kill(end)

    def _kill(self, end: str) -> None:
        self.worker.world.kill(self.child)
        self.worker.do(lambda: self.ends(end))

    def _ready(self, result: Any) -> None:
        if self.callbacks:  # else the delivery has ended meanwhile
            self.callbacks["callback"](result)
            self._over()

    def ends(self, how: str) -> None:
        """End the delivery without a result of the child."""
        self.worker.world.ended(self, how)
        self._over()

    def _over(self) -> None:
        with suppress(ValueError):  # the child was killed, or its time limit was over meanwhile
            self.worker.jobs.remove(self)
            self.forget()
            self.worker.recycle(self.child)
            self.worker.assign()
            self.worker.broker.deliver()
            self.worker.do(lambda: None)

    def forget(self) -> None:
        """Drop the request, because no garbage is collected within a history."""
        self.request: Any = None
        self.target: Any = None
        self.callbacks: dict[str, Any] = {}

    def _exceeds(self) -> None:
        """The hard time limit is over: Celery stores the failure, and then kills the child."""
        if self in self.worker.jobs and not self.child.is_dead:
            self._fails(TimeLimitExceeded(self.limits[1]))
            self.callbacks["timeout_callback"](soft=False, timeout=self.limits[1])
            self.terminate("TimeLimitExceeded", 0.1)

    def lost(self) -> None:
        if self in self.worker.jobs:
            self._fails(WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL)"))
            if self.is_done:  # Celery has sent a retry, or a success was stored with this id before
                later = self.work._replace(attempt=self.work.attempt + 1)
                is_retried = any(each.work == later for each in self.worker.broker.published)
                self.worker.world.ended(self, "Retry" if is_retried else "stored")
            self._over()

    def _fails(self, error: Exception) -> None:
        self.callbacks["error_callback"](ExceptionInfo((type(error), error, None)))


class Broker:
    """Delivers each message to a worker, and again if that worker loses its connection.

    Attributes:
        dropped: the work of messages that were acknowledged, and that their worker has not ended; when the worker has
            received each, and when the worker itself ended.
    """

    def __init__(self, world: Any, kind: str) -> None:
        self.world, self.kind = world, kind
        self.queue: list[Delivery] = []
        self.unacked: list[Delivery] = []
        self.published: list[Delivery] = []
        self.last_redelivered_at: dict[Work, float] = {}
        self.redelivered_before_a_run: set[str] = set()
        self.dropped: dict[Work, tuple[float, float]] = {}
        self.workers: list[Any] = []

    def put(self, payload: dict[str, Any]) -> None:
        delivery = Delivery(payload, len(self.published))
        if delivery.is_work and self.world.fault(f"publishing fails of {this().name}", 0.02):
            msg = "the broker is away"
            raise OperationalError(msg)
        self.published.append(delivery)
        times = (payload["headers"].get("only_one") or {}).get("times", 0)
        shown = f"{delivery.task} id={delivery.id[:8]} times={times}"
        self.world.note(this().name, "publishes", f"#{delivery.number}", *delivery.work, shown)
        self.world.after(self.world.uniform("publishing", 0.001, 0.01), lambda: self._arrive(delivery))
        self.world.sleep(0)

    def _arrive(self, delivery: Delivery) -> None:
        self.queue.append(delivery)
        self.deliver()

    def deliver(self) -> None:
        """Give messages to workers that have room for them."""
        while self.queue and (ready := [each for each in self.workers if each.has_room()]):
            delivery = self.queue.pop(0)
            delivery.worker = self.world.choose("worker of a message", ready)
            self.unacked.append(delivery)
            self.world.met["deliveries"] += 1
            if delivery.is_redelivery or delivery.payload["headers"].get("redelivered"):
                self.last_redelivered_at[delivery.work] = self.world.now
            delivery.worker.receive(delivery)
            if self.world.fault("visibility timeout", 0.05):
                self.world.after(self.world.choose("seconds unseen", [0.5, 2.0, 6.0]), partial(self.again, delivery))

    def again(self, delivery: Delivery) -> None:
        """Deliver a message once more. Its worker may still have it."""
        if delivery not in self.unacked:
            return
        self.unacked.remove(delivery)
        if all(run.work != delivery.work for run in self.world.runs):
            self.redelivered_before_a_run.add(delivery.work.trigger)
        payload = deepcopy(delivery.payload)
        payload["headers"]["redelivered"] = payload["properties"]["delivery_info"]["redelivered"] = True
        self.world.note("broker", "redelivers", f"#{delivery.number}")
        again = Delivery(payload, delivery.number)
        again.is_redelivery = True
        self._arrive(again)

    def ack(self, delivery: Delivery, *_: Any) -> None:
        # Redis knows a message by its tag, and a redelivery has the same tag. AMQP knows it by its connection.
        known_by_tag = delivery.number if self.kind == "redis" else None
        self.unacked = [each for each in self.unacked if each is not delivery and each.number != known_by_tag]
        self.published[delivery.number].is_done = delivery.is_done = True
        delivery.message._state = "ACK"
        self.world.note(this().name, "acknowledges", f"#{delivery.number}")
        self.deliver()

    def reject(self, delivery: Delivery, _logger: Any, _errors: Any, requeue: bool) -> None:  # noqa: FBT001
        self.world.note(this().name, "rejects", f"#{delivery.number}", "requeue" if requeue else "")
        if requeue:
            self.again(delivery)
        else:
            self.ack(delivery)

    def restore(self, worker: Any) -> None:
        """Redeliver all messages that a worker has not acknowledged, because its connection is lost."""
        for delivery in [each for each in self.unacked if each.worker is worker]:
            self.again(delivery)

    @property
    def jobs(self) -> list[Delivery]:
        """The deliveries that workers have."""
        return [job for worker in self.workers for job in worker.jobs]

    def alive(self) -> list[Delivery]:
        """The deliveries that wait, or that a worker has."""
        in_workers = [job for worker in self.workers if not worker.main.is_dead for job in worker.jobs]
        return [*(each for each in self.published if not each.is_done), *self.queue, *self.unacked, *in_workers]


class Worker:
    """A worker: its main process, and the children of its prefork pool.

    For Celery's strategy it is the consumer, with its pool, its timer and its QoS.
    """

    connection_errors = ()
    event_dispatcher = None
    disable_rate_limits = True
    task_buckets: ClassVar[dict[str, Any]] = {}
    _limit_task = _limit_post_eta = None
    controller = SimpleNamespace(state=celery.worker.state)

    def __init__(self, world: Any, name: str, machine: Machine, processes: list[Process]) -> None:
        self.world, self.broker = world, world.broker
        self.hostname, self.machine = name, machine
        self.main, *self.children = processes
        self.pool = self.timer = self.qos = self
        self.apply_eta_task = self.on_task_request = self._execute
        self.receiving: Any = None
        self.begin()

    def begin(self) -> None:
        self.world.start(self.main, self.hostname, self.machine)
        for number, child in enumerate(self.children, 1):
            self.world.start(child, f"{self.hostname}.{number}", self.machine)
        self.app = self.world.app_of(self.main)
        self.consumes = True
        self.ending: set[Process] = set()
        self.occupied_until = 0.0
        self.jobs: list[Delivery] = []
        self._inbox = FakeQueue()
        self.do = self._inbox.put
        self._strategy = cache(lambda name: self.app.tasks[name].start_strategy(self.app, self))
        self.world.spawn(self.main, f"{self.hostname}/main", self._serve)
        self.broker.deliver()

    def has_room(self) -> bool:
        return self.consumes and not self.main.is_dead and len(self.jobs) < _PREFETCHED

    # the main process: one thing after another

    def _serve(self) -> None:
        while self.consumes or self.jobs or self._inbox.items:
            self._inbox.get()()

    def receive(self, job: Delivery) -> None:
        self.jobs.append(job)
        self.do(lambda: self._receive(job))

    def _receive(self, job: Delivery) -> None:
        """Hand a message to Celery's strategy, as the worker's consumer does."""
        if job not in self.jobs:
            return  # the connection on which it came was lost
        job.received_at = self.world.now
        job.message = message = _virtual.Message(job.payload, channel=_RECEIVING)
        self.receiving, receive = job, self._strategy(job.task)
        acknowledge, reject = partial(self.broker.ack, job), partial(self.broker.reject, job)
        receive(message, None, acknowledge, reject, [], to_timestamp=lambda eta, *_: eta.timestamp())
        self.receiving = None
        if job not in self.jobs:  # the connection was lost meanwhile: the worker sees that after this message
            self._forget(job)
        elif job.request is None:  # the task is revoked: Celery sends no signal that it was received
            job.ends("TaskRevoked")
        else:
            self.world.received(job)

    # how a worker ends

    def kill(self) -> None:
        """``kill -9`` of the main process and all children. The broker notices the lost connection later."""
        if self.main.is_dead:
            return
        self.world.note(self.hostname, "is killed")
        for process in (self.main, *self.children):
            self.world.kill(process)
        self._drop_jobs()
        self.world.after(self.world.choose("seconds until a lost worker is seen", [0.1, 1.0, 5.0]), self._lost)

    def _lost(self) -> None:
        self.broker.restore(self)
        self.begin()

    def _drop_jobs(self) -> None:
        self.broker.dropped |= {job.work: (job.received_at, self.world.now) for job in self.jobs if job.is_done}
        self.jobs.clear()

    def lose_connection(self) -> None:
        """Lose the connection to the broker: the worker drops the jobs that have not begun, and goes on with others."""
        if self.consumes and not self.main.is_dead:
            self.world.note(self.hostname, "loses its connection to the broker")
            for job in [job for job in self.jobs if not job.child]:
                self.jobs.remove(job)
                self._forget(job)
            if self.world.plan.cancels:
                self.do(self._cancel)
            self.broker.restore(self)

    def _forget(self, job: Delivery) -> None:
        celery.worker.state.requests.pop(job.id, None)  # as the worker's consumer does
        job.forget()

    def _cancel(self) -> None:
        """Cancel the runs whose message is not acknowledged; at a shutdown, also those acknowledged at their begin."""
        for job in [job for job in self.jobs if job.child]:
            is_late = job.request.task.acks_late
            comes_again = is_late and not job.request.acknowledged
            if comes_again or not (is_late or self.consumes):
                job.if_terminated = "Retry"
                job.request.cancel(self, emit_retry=self.consumes or not is_late)

    def shut_down(self, how: str) -> None:
        if self.consumes and not self.main.is_dead:
            self.consumes = False
            self.world.note(self.hostname, "shuts down", how)
            self.do(lambda: self._shut_down(how))

    def _shut_down(self, how: str) -> None:
        signals.worker_shutting_down.send(sender=self.hostname, sig="SIGTERM", how=how, exitcode=0)
        patience = {"Warm": 1e9, "Soft": _SOFT_SHUTDOWN, "Cold": 0.0}[how]
        gives_up = self.world.now + patience
        while any(job.child for job in self.jobs) and self.world.now < gives_up:
            self.world.sleep(0.1)
            while self._inbox.items:
                self._inbox.get()()
        if how != "Warm":
            self._cancel()
            while any(job.is_terminated and not job.child.is_dead for job in self.jobs):
                self.world.sleep(0.1)
        for child in self.children:
            if how == "Warm" and not child.is_dead:
                self._let_end(child)
            self.world.kill(child)
        self.broker.restore(self)
        if how == "Warm":
            signals.worker_shutdown.send(sender=self)
        self.world.end_in_order(self.main)
        self._drop_jobs()  # the worker does nothing more
        self._inbox.items.clear()
        self.world.after(1, self.begin)

    def _let_end(self, child: Process) -> None:
        end = partial(signals.worker_process_shutdown.send, sender=None, pid=child.pid, exitcode=0)
        ending = self.world.spawn(child, f"{child.name}/end", end)
        self.world.wait(ending.joined.append, 10.0)

    # the timer, the QoS and the pool, as Celery calls them

    def call_at(self, when: float, do: Any, args: Any = (), **_: Any) -> None:
        self.call_after(when - self.world.wall(), do, args)

    def call_after(self, seconds: float, do: Any, args: Any = (), **_: Any) -> None:
        life = self.main.life

        def call() -> None:
            begins = self.consumes or do != self._execute
            if self.main.life == life and not self.main.is_dead and begins:
                self.do(lambda: do(*args))

        self.world.after(seconds, call)

    def increment_eventually(self) -> None: ...

    decrement_eventually = increment_eventually

    def _execute(self, request: Any) -> None:
        job = next((job for job in self.jobs if job.request is request), None)
        if job is None:
            return  # the job was dropped when the connection was lost
        try:
            request.execute_using_pool(self)
        except TaskRevokedError:
            job.ends("TaskRevoked")

    def apply_async(self, _target: Any, args: Any, soft_timeout: Any, timeout: Any, **callbacks: Any) -> None:
        job = next(job for job in self.jobs if job.request is not None and job.request.request_dict is args[2])
        job.target, job.callbacks = args, callbacks
        job.limits = soft_timeout, timeout
        self.assign()

    def assign(self) -> None:
        """Give jobs to free children."""
        if self.world.now < self.occupied_until:
            return
        busy = {job.child for job in self.jobs} | self.ending
        free = [child for child in self.children if child not in busy]
        waiting = [job for job in self.jobs if job.target and not job.child]
        for job, child in zip(waiting, free, strict=False):
            if child.is_dead:
                self.world.start(child, child.name, self.machine)
            job.begin(child)

    def occupy(self, seconds: float) -> None:
        """Let other work occupy all children as soon as they are free: received tasks wait for that long."""
        self.world.note(self.hostname, "has no free child for", seconds)
        self.occupied_until = self.world.now + seconds
        self.world.after(seconds, lambda: self.do(self.assign))

    def recycle(self, child: Process | None) -> None:
        """End a child that has ended a task, as with ``max_tasks_per_child=1``."""
        if not (self.world.plan.recycles and self.consumes and child) or child.is_dead:
            return

        def end() -> None:
            signals.worker_process_shutdown.send(sender=None, pid=child.pid, exitcode=0)
            self.world.note(child.name, "is recycled")
            child.is_dead = True
            self.ending.discard(child)
            self.do(self.assign)

        self.ending.add(child)
        self.world.spawn(child, f"{child.name}/end", end)

    def terminate_job(self, pid: int, _signal: int) -> None:
        for job in [job for job in self.jobs if job.child and job.child.pid == pid]:
            job.terminate(job.if_terminated)

    def kill_child(self, child: Process) -> None:
        """``kill -9`` of a child that has a task. The main process notices it later."""
        job = next((job for job in self.jobs if job.child is child), None)
        if job is not None and not self.main.is_dead and not child.is_dead:
            self.world.kill(child)
            self.world.after(self.world.choose("until a lost child is seen", [0.01, 0.5]), lambda: self.do(job.lost))


def _name_of_error(info: Any) -> str:
    error = info.exception
    error = getattr(error, "exc", error)  # retries, and errors with a remote traceback, wrap another error
    if getattr(error, "requeue", False):
        return "requeue"
    return getattr(error, "exc_cls_name", type(error).__name__)


def _on_received(sender: Any = None, request: Any = None, **_: Any) -> None:
    sender.receiving.request = request


signals.task_received.connect(_on_received, weak=False)
