"""Jobs of queues other than Celery (RQ, Dramatiq, arq): their identity, and a key that a previous attempt holds.

If a worker is killed, its queue may give the job to another machine, while the key still names the dead attempt.
Such a key must not make the job skip. It is not taken over either, because the previous attempt may be alive.
"""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from logging import INFO
from typing import Any, NamedTuple

from only_one.clock import now
from only_one.events import log
from only_one.holder import Holder
from only_one.lock.lease import current
from only_one.lock.token import TokenFactory, active_tokens
from only_one.policies import fail
from only_one.settings import DEFAULT_LEASE

from .effective_options import Args, Call, Caller, Decoration, Kwargs, Policy
from .locked_call import AsyncLockedCall

_SLACK = 1.0
"""Seconds of waiting beyond the lease, within which the key of a dead holder has certainly expired."""

_ASKS_EVERY = 1.0
"""Seconds between two questions for the key: the holder may be alive, and release it at any time."""


class Job(NamedTuple):
    """A job of a queue.

    Attributes:
        id: its id, the same in each attempt.
        attempt: the number of its retries so far; None if that is not known.
        requeue: makes the error by which the queue requeues the job after so many seconds; None if there is no such
            error.
        start: an object that is new at each start of the job, also at that of a redelivery; None if the queue has none.
        queue: see ``Holder``.
    """

    id: str
    attempt: int | None = None
    requeue: Callable[[float], Exception] | None = None
    start: object = None
    queue: str | None = None


def _job_of_rq(rq: Any, _args: Args) -> Job | None:
    job = rq.get_current_job()
    if job is None:
        return None
    # Of a job with a `Retry`, RQ knows only the retries that are left.
    attempt = (job.number_of_retries or 0) if job.retries_left is None else None
    # There is no `requeue`, because a delay needs RQ's scheduler, which may not run.
    return Job(job.id, attempt, start=job)


def _job_of_dramatiq(dramatiq: Any, _args: Args) -> Job | None:
    message = dramatiq.middleware.CurrentMessage.get_current_message()  # None without that middleware
    if message is None:
        return None

    def requeue(seconds: float) -> Any:
        return dramatiq.errors.Retry("a previous attempt holds the key", delay=round(seconds * 1000))

    return Job(message.message_id, message.options.get("retries", 0), requeue, message)


def _job_of_arq(arq: Any, args: Args) -> Job | None:
    context = args[0] if args and isinstance(args[0], dict) else {}
    if "job_id" not in context or "job_try" not in context:
        return None
    job_id, attempt = context["job_id"], context["job_try"]  # `job_try` counts redeliveries, too
    start = sys.intern(f"{job_id} {attempt}")  # one object, also for a copy of the context
    return Job(job_id, attempt, lambda seconds: arq.Retry(defer=seconds), start)


_QUEUES = {"rq": _job_of_rq, "dramatiq": _job_of_dramatiq, "arq": _job_of_arq}
"""By the name of the queue's module. A worker has imported it; we never do."""


def _current_job(args: Args) -> Job | None:
    """The job that is under way here; None if there is none."""
    for name, job_of in _QUEUES.items():
        if name in sys.modules:
            with suppress(AttributeError):  # the module is being imported, or is another one with that name
                if job := job_of(sys.modules[name], args):
                    return job._replace(queue=name)
    return None


def _is_in_event_loop() -> bool:
    """Whether this thread runs an event loop: its other tasks would stand still while a call waits."""
    with suppress(RuntimeError):
        return asyncio.get_running_loop() is not None
    return False


def caller_of(decoration: Decoration, args: Args, kwargs: Kwargs, *, detects: bool) -> Caller:
    """The caller of a function: the job that ``work_id`` names, else the one that is under way here, if there is any.

    Args:
        decoration: the function's.
        args: the positional arguments of the call.
        kwargs: the others.
        detects: whether to look for a job; none is inside of a Celery task, which has an identity of its own.
    """
    job = _current_job(args) if detects else None
    if decoration.work_id is not None:
        work_id = decoration.work_id(args, kwargs)
        job = None if work_id is None else Job(str(work_id), None, job and job.requeue, job and job.start)
    if job is None:
        return decoration.plain
    caller = JobCaller(decoration.name, job)
    caller.app = decoration.plain.app  # of a unique task that is called directly
    return caller


class JobCaller(Caller):
    """The call of a function by a job: never skipped because of a previous attempt of the same job."""

    def __init__(self, name: str, job: Job, *, bound: bool = False) -> None:
        super().__init__(name, TokenFactory(name, job.id, job.attempt, queue=job.queue), bound=bound)
        self._job = job
        self.start = job.start
        self._left = 0.0
        self._waits_until: float | None = None

    def is_held_by_own(self, value: bytes) -> bool:
        """Whether ``value`` is that of a previous attempt of this job, or of a redelivery of this attempt.

        A later attempt does not count: it makes this one out of date, or is other work whose id is used again.
        The other calls of the same start do not count, though they have the job's identity: calls that its run makes,
        also in a child that was forked in it, and calls beside it in the same process.
        """
        holder = Holder.parse(value)
        if holder is None or holder.state != "running":
            return False
        is_later = (holder.attempt or 0) > (self._job.attempt or 0)
        if holder.task_id != self._job.id or is_later:
            return False
        lease = current.get()
        if lease is not None and lease.token == value:  # the call is made inside of that run, or in a child of it
            return False
        return self.start is None or getattr(active_tokens.get(value), "start", None) is not self.start

    def asks_again_in(self, call: Call, left: float) -> float:
        """Seconds until the key is asked for again; 0 if ``on_busy`` decides now.

        It decides if the queue can requeue the job, if a wait would block an event loop, if the key lives for longer
        than the lease, or if the job has waited for that long.
        """
        self._left = max(left, 0.01)
        would_block = not isinstance(call, AsyncLockedCall) and _is_in_event_loop()
        if self._job.requeue or would_block:
            return 0
        if self._waits_until is None:
            limit = call.options.lease or DEFAULT_LEASE
            if left > limit:
                return 0
            self._waits_until = now() + limit + _SLACK
            log(INFO, "%s waits for the key of a previous attempt of job %s", self.name, self._job.id)
        return min(self._left, _ASKS_EVERY) if now() < self._waits_until else 0

    def on_busy(self, call: Call, value: bytes) -> Policy:
        """The policy for a key that holds ``value``: ``fail`` if that is a previous attempt, whatever ``when_busy`` is.

        Raises:
            Exception: the error by which the queue requeues the job.
        """
        if not self.is_held_by_own(value):
            return super().on_busy(call, value)
        if self._job.requeue:
            log(INFO, "%s requeues job %s: a previous attempt holds %s", self.name, self._job.id, call.key)
            raise self._job.requeue(self._left)
        return fail
