"""The run of a covered function in a Celery process: whose it is, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery import Task
from celery._state import get_current_task

from only_one.holder import Holder, Identity, is_queued
from only_one.lease import Lease
from only_one.lock import RAW
from only_one.plan import Args, Call, Cover, Kwargs
from only_one.protocol import TROUBLE
from only_one.run import current_lease, run, run_async

from . import endings as endings  # which listens from now on
from . import results as results
from .delivery import Delivery, Predecessor
from .task_call import TaskCall, call_from_outside
from .wrapping import functions_of

_PATIENCE = 5.0
"""Seconds for which a retry waits for the attempt before it, which is cleaning up; then it is put back."""

_LOOKS_FIRST_AFTER = 0.02
_LOOKS_EVERY = 0.2


def run_task(cover: Cover, wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Run a function that may be that of the current task, if its key is free."""
    call = call_of(cover, wrapper, args)
    if call.key is not None and call.identity.attempt and not _is_kept(cover, call, args, kwargs):
        call.key = None
    waited, pause = 0.0, _LOOKS_FIRST_AFTER
    while True:
        try:
            return run(cover, call, args, kwargs)
        except Predecessor as predecessor:
            if waited >= _PATIENCE:
                return predecessor.put_back()
        # A retry is never skipped behind the clean-up of the attempt before it, and its worker has nothing else for it.
        time.sleep(pause)
        waited += pause
        pause = min(2 * pause, _LOOKS_EVERY)


async def run_task_async(cover: Cover, wrapper: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The same in an event loop, where nothing waits."""
    try:
        return await run_async(cover, call_of(cover, wrapper, args), args, kwargs)
    except Predecessor as predecessor:
        return predecessor.put_back()


def call_of(cover: Cover, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """Who calls `wrapper`: the current task where that is its run, else a plain function.

    A function that is called directly, or from another task's run, is none of that task's.
    """
    covers_queue = cover.task is not None
    bound = bool(args) and isinstance(args[0], Task) and runs(args[0], wrapper)
    task = get_current_task()
    if task is None or task.request.called_directly or not runs(task, wrapper):
        if covers_queue:
            return call_from_outside(cover.task, cover)
        return cover.plain_bound if bound else cover.plain
    request = task.request
    if _is_within(current_lease(), request.id, request.retries):
        return TaskCall(task, Identity(task.name, request.id, request.retries), bound=bound)
    if covers_queue:
        request.only_one_has_begun = True
    return Delivery(task, request, bound=bound, covers_queue=covers_queue)


def _is_kept(cover: Cover, call: Call, args: Args, kwargs: Kwargs) -> bool:
    """Whether the key that has come with the message is this retry's, which may have other arguments by now."""
    plan = cover.plan_for(call)
    if plan.server is None or call.key == plan.prefix + cover.make_key(call, args, kwargs):
        return True
    try:
        value = plan.server.client.execute_command("GET", call.key, **RAW) or b""
    except TROUBLE:
        return False
    holder = Holder.parse(value)
    return holder is not None and is_queued(value) and holder.task_id == call.identity.task_id


def runs(task: Task, wrapper: Callable[..., Any]) -> bool:
    """Whether `wrapper` is the task's `run`, under whatever Celery has put around it."""
    return any(found is wrapper for found in functions_of(task))


def _is_within(lease: Lease | None, task_id: str, attempt: int) -> bool:
    """Whether this is called from inside of the run itself."""
    holder = lease.holder if lease else None
    return holder is not None and (holder.task_id, holder.attempt) == (task_id, attempt)
