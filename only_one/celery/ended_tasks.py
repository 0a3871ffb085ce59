"""Ended tasks: the keys of tasks that were killed, revoked or never begun, and the note that a result is stored.

A caller on this machine would take the key of a killed run over anyhow. On other machines it would wait for the lease,
or for ``timeout``. The renewing thread of the worker's main process sends the commands, because a child that is forked
meanwhile would inherit the locks of any other thread.
"""

import atexit
import os
import sys
from contextlib import suppress
from typing import Any

from celery import signals
from celery.app.task import Context
from celery.exceptions import Reject, TimeLimitExceeded, WorkerLostError
from celery.states import FAILURE, SUCCESS
from redis.exceptions import MovedError, ResponseError

from only_one.call.effective_options import Call, Decoration, EffectiveOptions
from only_one.call.owed_key import Withdrawal, note_of
from only_one.clock import now
from only_one.driver import Command, drive
from only_one.events import warn_once
from only_one.holder import Holder, is_queued, work_held_by
from only_one.lock.commands import evaluate
from only_one.lock.liveness import is_dead
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import finish_pending_releases, log_beside, release_later
from only_one.lock.token import machine, words_of

from . import coalescing, redelivery
from .delivery import Delivery, state_of, unwrapped
from .queue_timeout import longest_wait
from .received_tasks import begun_request
from .requeue import header_of, work_of
from .task_functions import decorations_of, key_of_arguments, key_of_message, task_of_items

_NOT_RELEASED = "a key of %s, whose run was killed or revoked, could not be released"

_LOOKS_AGAIN_AFTER = 0.02

_PATIENCE = 10.0
"""Seconds for which a process may live on. Celery tells us before it kills the process."""

_WAITS_FOR_A_SERVER = 300.0
"""Seconds for which a server that is away is asked again."""

_AT_ONCE = 1000
"""Keys that the server goes through for one reply to ``SCAN``."""


def withdraw(task: Any, request: Any, *, is_retried: bool = False) -> None:
    """Release the key of a unique task that has ended before it began, also if a call has taken its key over.

    In the background, as the server may be away. Nothing is done for a task that has no key.

    Args:
        task: the task.
        request: the task's request.
        is_retried: whether a retry of it waits, to which value and number belong: then only the note is left.
    """
    unique = next((each for each in decorations_of(task) if each.is_unique), None)
    if unique is None:
        return
    header, work, options = header_of(request), work_of(request), unique.options_for(unique.plain)
    key = header.key
    with suppress(Exception):  # of arguments that have no key, either
        # The header has no key if Celery has sent the message again because a process was lost, or if the task's own
        # `apply_async` has given the task another id. If the key holds a value of other work, that is left alone.
        key = key or key_of_arguments(task, unique, options.prefix, request.args, request.kwargs)
    if key is None or options.server is None:
        return
    lasts = longest_wait(task.app, options.queue_timeout, request.expires, request.eta)
    until, note = now() + max(lasts, options.queue_timeout), note_of(key, *work)
    # No value has the name of a note in it, so none is deleted.
    words, number = (note.encode(), None) if is_retried else (words_of(*work), header.trigger)
    triggers = coalescing.triggers_of(key)
    release_later(Withdrawal(options.server, key, words, until, note=note, triggers=triggers, number=number))


def release_when_dead(task: Any, args: Any, kwargs: Any, request: Any) -> None:
    """Release the keys of a run as soon as its process is dead; ``args`` and ``kwargs`` are those of its message."""
    arguments: tuple[Any, Any] | None = (args or (), kwargs or {})
    if name := task_of_items(task, kwargs):
        task, arguments = task.app.tasks.get(name), None  # nobody knows which of the items was under way
    for decoration in decorations_of(task) if task else ():
        try:
            _watch_run(task, decoration, arguments, request)
        except Exception as error:  # noqa: BLE001 - the key expires by itself
            warn_once((task.name, type(error)), _NOT_RELEASED, task.name, exc_info=error)


def _watch_run(task: Any, decoration: Decoration, arguments: tuple[Any, Any] | None, request: Any) -> None:
    """Release the key of one decoration of the task; if ``arguments`` do not give it, search for it by its holder."""
    delivery = Delivery(task, request, decoration=decoration)
    options = decoration.options_for(delivery)
    if options.server is None:
        return
    key = delivery.key
    if key is None and arguments:
        key = key_of_message(task, decoration, options.prefix, *arguments)
    if key is None:
        # A cluster is asked here which nodes it has, with short time-outs; the thread searches them.
        for node in options.server.nodes.all():
            release_later(_SearchOfNode(node, options.prefix, delivery, options))
    else:
        release_later(_KilledRun(options.server, key, delivery, options))


class _KilledRun(PendingRelease):
    """The release of a killed run's key: the renewing thread asks for the holder until its process is dead.

    Attributes:
        token: no value, but a name of the run and its key: whoever tells of a killed run twice has it watched once.
        delivery: the delivery whose run it was.
        options: the effective options of the run.
    """

    def __init__(self, server: Any, key: Any, delivery: Delivery, options: EffectiveOptions) -> None:
        name = f"{delivery.work} {key!r} {id(server)}"
        super().__init__(server, key, name.encode(), now() + _PATIENCE)
        self.delivery, self.options = delivery, options
        self._gives_up = now() + _WAITS_FOR_A_SERVER

    def command(self) -> Command:
        """The command that asks for the holder."""
        return ("GET", self.key)

    def note_reply(self, command: Command, reply: Any) -> bool:  # noqa: ARG002
        """Act on the reply; returns whether nothing is left to do, or the time for it is over."""
        self.try_at = now() + _LOOKS_AGAIN_AFTER
        if isinstance(reply, Exception):
            if not isinstance(reply, MovedError):  # after which the next command goes to the node that has the slot
                name = self.delivery.name
                warn_once((name, type(reply)), _NOT_RELEASED, name, exc_info=reply, log=log_beside)
            if not isinstance(reply, ResponseError):  # the server is away, and may be back soon
                self.until = min(now() + _PATIENCE, self._gives_up)
        elif self.act_on(reply):
            return True
        return now() >= self.until

    def act_on(self, reply: Any) -> bool:
        """Release the key if its process is dead, or store the value of a retry that Celery has sent since.

        Returns:
            Whether nothing is left to do.
        """
        value: bytes = reply or b""
        holder = Holder.parse(value)
        if holder is None or holder.task_id != self.delivery.work.id:
            return True
        held = work_held_by(holder)
        if held is not None and held > self.delivery.work:  # a retry, which the run had published before it was killed
            return True
        if not self.options.takeover and not is_queued(value):
            return True
        has_ended = is_queued(value) or is_dead(value) or _is_unreaped(holder)
        if not has_ended:
            return False
        for_retry = self.delivery.retained_value(Call(self.options, self.server, self.key))
        until = now() + max(self.options.ttl, self.options.queue_timeout)
        release_later(PendingRelease(self.server, self.key, value, until, retained=for_retry))
        # The task that waits may begin between the reply and the release. Then its process is waited for.
        return for_retry is not None


class _SearchOfNode(_KilledRun):
    """A search for the key of a killed run whose message does not give the key; its ``key`` is the prefix of all keys.

    Its ``server`` is a node: each node of a cluster is searched.
    """

    _cursor = 0

    def command(self) -> Command:
        """The command that gives more of the keys at which a string is stored."""
        pattern = "".join(f"\\{each}" for each in self.key) + "*"  # the prefix has no wildcards
        return ("SCAN", self._cursor, "MATCH", pattern, "COUNT", _AT_ONCE, "TYPE", "string")

    def act_on(self, reply: Any) -> bool:
        """Release each of the keys if it is the run's; returns whether these keys were the last."""
        cursor, keys = reply
        for key in keys:
            release_later(_KilledRun(self.options.server, key, self.delivery, self.options))
        self._cursor = int(cursor)
        return not self._cursor


def _is_unreaped(holder: Holder) -> bool:
    """Whether the holder is a child of ours that has ended, though Celery waits for it only after up to 5 s."""
    with suppress(ChildProcessError, AttributeError):  # it is no child of ours; macOS before Python 3.13
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return holder.machine == machine() and os.waitid(os.P_PID, holder.pid, options) is not None
    return False


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
        withdraw(sender, request, is_retried=True)
        release_when_dead(sender, request.args, request.kwargs, request)


def _on_end(sender: Any, task: Any, state: Any = None, **_: Any) -> None:
    """Note that the result is stored, or withdraw a task that never began.

    Celery drops an exception that is raised here, as by a soft time limit, and calls the next receiver. So this
    function is connected twice: the second call does what the first one has left.
    """
    request, error = task.request, sys.exc_info()[1]
    delivery_state = state_of(request)
    for server, key, marker in delivery_state.markers if _is_stored(task, state, error) else ():
        with redelivery.suppress_trouble(request.id):
            drive(server.client, evaluate(redelivery.STORED, key, beside=(marker,)))
    # A signal handler, `before_start` or a base class may have prevented the run. An eager task was never queued.
    if delivery_state.withdraws and not request.is_eager:
        withdraw(unwrapped(sender), request)
    delivery_state.markers, delivery_state.withdraws = [], False


def _is_stored(task: Any, state: Any, error: BaseException | None) -> bool:
    """Whether no redelivery will do the work: the result is stored, or the message is acknowledged without.

    The result is not stored if the process was told to exit before, as by SIGTERM. If storing it has failed, the task
    counts as failed.
    """
    if error is not None and not isinstance(error, Exception):
        return False
    storing_failed = error is not None and not isinstance(error, Reject)
    has_failed = storing_failed if state == SUCCESS else state == FAILURE
    return not has_failed or redelivery.acks_failures(task)


signals.task_failure.connect(_on_failure)
signals.task_retry.connect(_on_retry)
signals.task_revoked.connect(_on_revoked)
signals.task_postrun.connect(_on_end)
signals.task_postrun.connect(_on_end, dispatch_uid="only_one: once more")
# In a child of the pool, Python does not call the functions that are registered with `atexit`.
signals.worker_process_shutdown.connect(lambda **_: finish_pending_releases(), weak=False)
# The last one that is registered is called first. When SIGHUP restarts a worker, Celery has registered a function that
# becomes the new worker, and never returns.
signals.worker_shutdown.connect(lambda **_: atexit.register(finish_pending_releases), weak=False)
