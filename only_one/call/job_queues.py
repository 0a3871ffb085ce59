"""The identity of a job in queues other than Celery (RQ, Dramatiq, arq), and how a call meets its own previous attempt.

A worker is killed, and its queue gives the job to another machine, where the key still names the dead attempt.
That key is no reason to skip the job; but the first attempt may yet be alive, so its key is not taken over either.
"""

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from logging import INFO
from typing import Any, NamedTuple

from only_one.clock import now
from only_one.events import log
from only_one.forks import in_each_child
from only_one.holder import Holder
from only_one.lock.lease import current
from only_one.lock.token import TokenFactory, active_tokens, this_process
from only_one.policies import fail
from only_one.settings import DEFAULT_LEASE

from .effective_options import Args, Call, Caller, Decoration, Kwargs, Policy

_SLACK = 1.0
"""Seconds of waiting beyond the lease, within which the key of a dead holder has certainly expired."""

_ASKS_EVERY = 1.0
"""Seconds between two questions for the key: the holder may be alive, and release it at any time."""


class Job(NamedTuple):
    """A job of a queue.

    Attributes:
        id: its id, the same in each attempt.
        attempt: the number of its retries so far; None if that is not known.
        requeue: makes the error by which its queue requeues the job, after so many seconds; None if there is
            no such error.
        start: an object that each start of the job has anew, also that of a redelivery; None if the queue has none.
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
    # RQ does not count the retries of a job that has a `Retry`, but those that are left.
    attempt = (job.number_of_retries or 0) if job.retries_left is None else None
    # To requeue a job with a delay needs a scheduler, which may not run.
    return Job(job.id, attempt, start=job)


def _job_of_dramatiq(dramatiq: Any, _args: Args) -> Job | None:
    message = dramatiq.middleware.CurrentMessage.get_current_message()  # None without that middleware
    if message is None:
        return None
    return Job(
        message.message_id,
        message.options.get("retries", 0),
        lambda seconds: dramatiq.errors.Retry("a previous attempt holds the key", delay=round(seconds * 1000)),
        message,
    )


def _job_of_arq(arq: Any, args: Args) -> Job | None:
    context = args[0] if args and isinstance(args[0], dict) else {}
    if "job_id" not in context or "job_try" not in context:
        return None
    job_id, attempt = context["job_id"], context["job_try"]  # arq counts redeliveries, too
    start = sys.intern(f"{job_id} {attempt}")  # the same for a copy of the context
    return Job(job_id, attempt, lambda seconds: arq.Retry(defer=seconds), start)


_QUEUES = {"rq": _job_of_rq, "dramatiq": _job_of_dramatiq, "arq": _job_of_arq}
"""By the module that a worker of the queue has imported; we import none."""


def _current_job(args: Args) -> Job | None:
    for name, job_of in _QUEUES.items():
        if name in sys.modules:
            with suppress(AttributeError):  # it is being imported, or is another's module with that name
                if job := job_of(sys.modules[name], args):
                    return job._replace(queue=name)
    return None


_inherited: tuple[object, int | None] = None, None
"""The start of the job that has forked this process, and the job's process id."""


def _job_pid(start: object) -> int | None:
    """The process id of a job, if it has forked this process, or the one that has; else None."""
    return _inherited[1] if _inherited[0] is start else None


def _note_inherited() -> None:
    global _inherited  # noqa: PLW0603 - that of the process
    job = _current_job(())
    start = job and job.start
    _inherited = start, None if start is None else _job_pid(start) or os.getppid()


in_each_child(_note_inherited)


def _is_in_event_loop() -> bool:
    """Whether this thread runs an event loop, whose other tasks would stand still while we wait."""
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
    return JobCaller(decoration.name, job, is_async=inspect.iscoroutinefunction(decoration.function))


class JobCaller(Caller):
    """The call of a function by a job: never skipped because of a previous attempt of the same job."""

    def __init__(self, name: str, job: Job, *, is_async: bool = False, bound: bool = False) -> None:
        self._job_pid = _job_pid(job.start)
        factory = TokenFactory(name, job.id, job.attempt, queue=job.queue, job_pid=self._job_pid)
        super().__init__(name, factory, bound=bound)
        self._job = job
        self.start = job.start
        self._is_async = is_async
        self._left = 0.0
        self._waits_until: float | None = None

    def is_held_by_own(self, value: bytes) -> bool:
        """Whether ``value`` is that of another attempt of this job, this one or an earlier one.

        A later attempt makes this one out of date, or belongs to other work with an id that is used again.
        A call that the run itself makes is no attempt, nor is another call of the same start, nor one in a child that
        the job has forked: all have the job's identity.
        """
        holder, process = Holder.parse(value), this_process()
        if holder is None or holder.state != "running":
            return False
        is_later = (holder.attempt or 0) > (self._job.attempt or 0)
        if holder.task_id != self._job.id or is_later:
            return False
        lease = current.get()
        if lease is not None and lease.token == value:  # also in a child that was forked inside of the run
            return False
        if value.startswith(process.mark):
            return self.start is None or getattr(active_tokens.get(value), "start", None) is not self.start
        return holder.machine != process.machine or not self._is_beside(holder)

    def _is_beside(self, holder: Holder) -> bool:
        """Whether the job itself runs in this machine's process ``holder.pid``, or has forked it, in this attempt."""
        pids = (holder.job_pid,) if self._job_pid is None else (holder.job_pid, holder.pid)
        return holder.attempt == self._job.attempt and (self._job_pid or os.getpid()) in pids

    def waits(self, call: Call, left: float) -> float:
        """Seconds until the key is asked for again; 0 if the job is requeued, or has waited for as long as it may."""
        self._left = max(left, 0.01)
        would_block = not self._is_async and _is_in_event_loop()
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
        """The policy for a key that holds ``value``; whatever ``when_busy`` is, no own attempt makes the job skip.

        Raises:
            Exception: the error by which the queue requeues the job.
        """
        if not self.is_held_by_own(value):
            return super().on_busy(call, value)
        if self._job.requeue:
            log(INFO, "%s requeues job %s: a previous attempt holds %s", self.name, self._job.id, call.key)
            raise self._job.requeue(self._left)
        return fail
