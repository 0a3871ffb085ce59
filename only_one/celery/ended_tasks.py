"""Ended tasks: the keys of tasks that were killed, revoked or never begun, and the note that a result is stored."""

import atexit
import sys
from contextlib import suppress
from typing import Any

from celery import signals
from celery.app.task import Context
from celery.exceptions import Reject, TimeLimitExceeded, WorkerLostError
from celery.states import FAILURE, SUCCESS

from only_one.call.effective_options import effective_options
from only_one.call.owed_key import Withdrawal, note_of
from only_one.clock import now
from only_one.driver import drive
from only_one.lock.commands import evaluate
from only_one.lock.renewal import finish_pending_releases, release_later
from only_one.lock.token import words_of

from . import coalescing, redelivery
from .app_settings import app_options
from .broker import waits_for
from .delivery import state_of, task_in_context, unwrapped
from .killed_runs import release_when_dead
from .received_tasks import begun_request
from .requeue import header_of, work_of
from .task_functions import decorations_of, key_of_arguments


def withdrawal_of(task: Any, request: Any, app: Any = None) -> Withdrawal | None:
    """The withdrawal of a unique task that has ended before it began, also if a call has taken its key over.

    Args:
        task: the task; None if this version of the code has no such task.
        request: the task's request.
        app: the worker's app, if there is no task.

    Returns:
        The withdrawal; None if the task has no key.
    """
    header, work = header_of(request), work_of(request)
    key, decorations = header.key, decorations_of(task) if task else []
    decoration = next((each for each in decorations if each.is_unique), None)
    # The header has no key if Celery has sent the message again because a process was lost, or if the task's own
    # `apply_async` has given the task another id. The task was queued with the key of these arguments, also if the run
    # would have another; and a value of other work is left alone.
    if decoration is not None and key is None:
        with suppress(Exception):  # of arguments that have no key, either
            prefix = decoration.options_for(decoration.plain).prefix
            key = key_of_arguments(task, decoration, prefix, request.args, request.kwargs)
    if key is None:
        return None
    if decoration is not None:
        options = decoration.options_for(decoration.plain)
    else:  # it is unique in another version of the code; the server that its decorator names is not known here
        options = effective_options({}, *app_options(app or task.app))
    if options.server is None:
        return None
    lasts = waits_for(app or task.app, options.queue_timeout, request.expires, request.eta)
    return Withdrawal(
        options.server,
        key,
        words_of(*work),
        until=now() + max(lasts, options.queue_timeout),
        note=note_of(key, *work),
        triggers=coalescing.triggers_of(key),
        number=header.trigger,
    )


def withdraw(task: Any, request: Any, app: Any = None) -> None:
    """Release the key of a unique task that has ended before it began; in the background, as the server may be away."""
    if withdrawal := withdrawal_of(task, request, app):
        release_later(withdrawal)


def _on_failure(sender: Any, task_id: str, exception: Any, args: Any, kwargs: Any, **_: Any) -> None:
    if isinstance(exception, (TimeLimitExceeded, WorkerLostError)):
        # Older releases of Celery do not give the request here. `begun_request` gives that of a unique task. For any
        # other task, the killed attempt is taken to be the last one.
        request = sender.request if sender.request.id == task_id else begun_request(task_id)
        request = request or Context(id=task_id, retries=sys.maxsize)
        withdraw(sender, request)
        release_when_dead(sender, args, kwargs, request)


def _on_revoked(sender: Any, request: Any, terminated: bool, **_: Any) -> None:  # noqa: FBT001
    """The task was revoked, or has expired."""
    withdraw(sender, request)
    may_have_begun = (request.delivery_info or {}).get("redelivered")  # and its process have been killed
    if terminated or may_have_begun:
        release_when_dead(sender, request.args, request.kwargs, request)


def _on_retry(sender: Any, request: Any, reason: Any = None, **_: Any) -> None:
    """The task is retried; the main process hears of it if a process was lost and Celery has sent the task again."""
    if isinstance(getattr(reason, "exc", None), WorkerLostError):
        retry = sender.signature_from_request(request, countdown=reason.when, retries=request.retries + 1)
        state_of(request).requeued = retry
        if withdrawal := withdrawal_of(sender, request):
            release_later(withdrawal.of_a_retry())
        release_when_dead(sender, request.args, request.kwargs, request)


def _on_unknown(sender: Any, message: Any, **sent: Any) -> None:
    """The worker has no such task, and drops the message: another version of the code has sent it."""
    withdraw(None, Context({**(message.headers or {}), "id": sent["id"]}), sender.app)


def _on_end(sender: Any, task: Any, state: Any = None, **_: Any) -> None:
    """Note that the result is stored, or withdraw a task that never began.

    Celery drops an exception that is raised here, as by a soft time limit, and calls the next receiver. So this
    function is connected twice: the second call does what the first one has left.
    """
    request, error = task.request, sys.exc_info()[1]
    delivery_state = state_of(request)
    for server, key, marker in delivery_state.markers if _is_stored(task, state, error) else ():
        with redelivery.unless_down(request.id):
            drive(server.client, evaluate(redelivery.STORED, key, beside=(marker,)))
    # A signal handler, `before_start` or a base class may have prevented the run. An eager task was never queued.
    if delivery_state.withdraws and not request.is_eager:
        withdraw(unwrapped(sender), request)
    delivery_state.markers, delivery_state.withdraws = [], False
    task_in_context.set((None, None))


def _is_stored(task: Any, state: Any, error: BaseException | None) -> bool:
    """Whether no redelivery will do the work: the result is stored, or the message is acknowledged without.

    The result is not stored if the process was told to exit before, as by SIGTERM. If storing it has failed, the task
    counts as failed.
    """
    if error is not None and not isinstance(error, Exception):
        return False
    has_failed = state == FAILURE or (state == SUCCESS and error is not None and not isinstance(error, Reject))
    return not has_failed or redelivery.acks_failures(task)


signals.task_failure.connect(_on_failure)
signals.task_unknown.connect(_on_unknown)
signals.task_retry.connect(_on_retry)
signals.task_revoked.connect(_on_revoked)
signals.task_postrun.connect(_on_end)
signals.task_postrun.connect(_on_end, dispatch_uid="only_one: once more")
# In a child of the pool, Python does not call the functions that are registered with `atexit`.
signals.worker_process_shutdown.connect(lambda **_: finish_pending_releases(), weak=False)
# The last one that is registered is called first. When SIGHUP restarts a worker, Celery has registered a function that
# becomes the new worker, and never returns.
signals.worker_shutdown.connect(lambda **_: atexit.register(finish_pending_releases), weak=False)
