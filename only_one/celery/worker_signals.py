"""Celery's signals: keys of tasks that were killed, revoked or never begun, of tasks that a worker has received.

A run that was killed cannot release its key: the worker's main process does, as soon as Celery tells it.
A caller on this machine would take the key over anyhow; on others it would wait for the lease, or for ``timeout``.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from math import inf
from typing import Any
from weakref import ref

from celery import signals
from celery.app.task import Context
from celery.app.trace import task_has_custom
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from only_one.call.effective_options import Decoration, EffectiveOptions
from only_one.call.owed_key import Withdrawal, note_of
from only_one.connections.server import Server
from only_one.events import logger
from only_one.lock.commands import RAW, TROUBLE, drive, evaluate, now, release_now, replace
from only_one.lock.current_lock import Lease
from only_one.lock.holder import Holder, is_dead, is_queued, machine, task_id_of, words_of
from only_one.lock.renewal import finish_cleanups, hold, release_later
from only_one.settings import DEFAULT_LEASE

from . import coalescing, redelivery
from .broker import waits_for
from .requeue import header_of, keep_content_type
from .task_run import caller_from_outside, decorations_of, functions_of, queue_options_of
from .work import work_held_by, work_of

_at_work = threading.Lock()
"""Held while a thread of ours does something: the pool does not fork then, because its new child would inherit every
lock of Python, Celery or redis-py that the thread has acquired, and have nobody to release it.
"""

with suppress(AttributeError):  # where nothing forks
    os.register_at_fork(before=_at_work.acquire, after_in_parent=_at_work.release, after_in_child=_at_work.release)
    os.register_at_fork(after_in_child=lambda: _waiting.clear())  # noqa: PLW0108 - it is made later


@cache
def _warn_once(text: str, kind: str) -> None:  # noqa: ARG001 - they tell one warning from another
    """Log the exception that is handled, because there is nobody to raise it to: the first of its kind."""
    logger.warning(text, exc_info=True)


def _on_failure(sender: Any, task_id: str, exception: Any, args: Any, kwargs: Any, **_: Any) -> None:
    if isinstance(exception, (TimeLimitExceeded, WorkerLostError)):
        _watch(sender, task_id, args, kwargs, _received(task_id))


def _on_revoked(sender: Any, request: Any, terminated: bool, **_: Any) -> None:  # noqa: FBT001
    """The task was revoked, or has expired."""
    if terminated or queue_options_of(sender) is not None:
        _watch(sender, request.id, request.args, request.kwargs, request)


def _watch(task: Any, task_id: str, args: Any, kwargs: Any, request: Any = None) -> None:
    """Release a task's keys as soon as its process is dead, in a thread: the worker has other tasks to serve."""
    for decoration in decorations_of(task):
        given = (task, decoration, task_id, args or (), kwargs or {}, request)
        threading.Thread(target=_release_when_dead, args=given, name="only_one-endings", daemon=True).start()


def _release_when_dead(task: Any, decoration: Decoration, task_id: str, args: Any, kwargs: Any, request: Any) -> None:
    until = now() + 10  # Celery tells that it kills a process before it does it
    keys: list[str | bytes] | None = None
    while keys != [] and now() < until:
        try:
            with _at_work:
                options = decoration.options_for(caller_from_outside(task, decoration))
                if (server := options.server) is None:
                    return
                if keys is None:
                    key = _withdraw(task, request) if request is not None and decoration.task is not None else None
                    keys = [key] if key else _possible_keys(task, decoration, options, server, args, kwargs)
            keys = [key for key in keys if not _is_free(server, key, task_id, takeover=options.takeover)]
        except Exception as error:  # noqa: BLE001 - nobody to raise it to; the key expires by itself
            text = f"a key of {task.name}, whose run was killed or revoked, could not be released"
            _warn_once(text, type(error).__name__)
            if not isinstance(error, TROUBLE):  # of the server, which may be back soon
                return
        time.sleep(0.02)


def _possible_keys(
    task: Any, decoration: Decoration, options: EffectiveOptions, server: Server, args: Any, kwargs: Any
) -> list[str | bytes]:
    """The key that the message's arguments give; or all keys, if the run may have had other arguments.

    What may change them (pydantic, a base's ``__call__``, a function in between) is the user's, and is not called here.
    """
    caller = caller_from_outside(task, decoration)
    is_innermost = decoration.task is not None or [*functions_of(task)][1:2] == [decoration.function]
    if is_innermost and not task_has_custom(task, "__call__"):
        return [options.prefix + decoration.make_key(caller, (task, *args) if caller.bound else tuple(args), kwargs)]
    pattern = "".join(f"\\{each}" for each in options.prefix) + "*"  # the prefix has no wildcards
    return [*server.client.scan_iter(match=pattern, count=1000, NEVER_DECODE=True)]


def _is_free(server: Server, key: str | bytes, task_id: str, *, takeover: bool) -> bool:
    """Release the key if its process is dead; whether nothing of the task is left to release at it."""
    with _at_work:
        value = server.client.execute_command("GET", key, **RAW) or b""
        holder = Holder.parse(value)
        if holder is None or holder.task_id != task_id or not (takeover or is_queued(value)):
            return True
        # A task that is queued may just have begun: then its process is waited for.
        is_over = is_queued(value) or is_dead(value) or _has_ended(holder)
        return is_over and release_now(server.client, server.features, key, value).status == "held"


def _has_ended(holder: Holder) -> bool:
    """Whether it is a child of ours that has ended; it seems alive until Celery waits for it, which may take 5 s."""
    with suppress(ChildProcessError, AttributeError):  # another's; or macOS, Python < 3.13
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return holder.machine == machine() and os.waitid(os.P_PID, holder.pid, options) is not None
    return False


def _on_end(sender: Any, task: Any, **_: Any) -> None:
    """The result is stored; or a signal handler, ``before_start`` or a base class has kept the task from running."""
    for server, key, marker in vars(task.request).get("only_one_markers", ()):
        with redelivery.unless_down(task.request.id):
            drive(server.client, evaluate(redelivery.STORED, key, beside=(marker,)))
    if not vars(task.request).get("only_one_has_begun"):
        _withdraw(sender, task.request)


def _received(task_id: str) -> Context | None:
    """The request of a task that this worker has received, unless it has begun long ago."""
    requests = [lease.request() for lease in list(_waiting)]
    return next((Context(each.request_dict) for each in requests if each is not None and each.id == task_id), None)


def _withdraw(task: Any, request: Any) -> str | None:
    """Release the key of a unique task that has ended without having begun, also if a call has taken the key over.

    Returns:
        The key; None if the task has none.
    """
    options, header, work = queue_options_of(task), header_of(request), work_of(request)
    key: str | None = vars(request).get("only_one_key", header.key)
    if options is None or (server := options.server) is None or key is None:
        return None
    withdrawal = Withdrawal(
        server,
        key,
        words_of(*work),
        until=now() + options.queue_timeout,
        no_write_in_flight=True,
        note=note_of(key, *work),
        triggers=coalescing.triggers_of(key),
        number=header.trigger,
    )
    try:
        server.client.execute_command(*withdrawal.command(), **RAW)
    except Exception as error:  # noqa: BLE001 - nobody to raise it to
        _warn_once(f"a key of {task.name}, which did not run, could not be released, and will be", type(error).__name__)
        release_later(withdrawal)
    return key


# Tasks that a worker has received and has not begun: their keys name the worker's process, which is seen to die

_swept_at = _backs_off_until = 0.0


class _WaitingLease(Lease):
    """The lease of a task that waits: if another task's run takes the key over, the run stores our value again.

    Attributes:
        request: gives the task's request; None once Celery has forgotten it.
    """

    def __init__(self, request: Any, *lease: Any) -> None:
        """See ``Lease`` for the other arguments."""
        self.request = ref(request)
        super().__init__(*lease)

    def lives_on(self, sent: float, ttl: float) -> None:
        """Note the same; a task whose request is forgotten has ended, or is in its queue again: its key may expire."""
        super().lives_on(sent, ttl)
        if self.request() is None:
            self.renew_at = self.ends_at

    def lose(self, reason: str, value: bytes = b"") -> str:
        """Note that the key is lost, unless it comes back; until then each renewal finds the other's value."""
        if reason == "taken" and task_id_of(value) != task_id_of(self.token):
            self.lives_on(now(), self.ttl)
            return ""
        return super().lose(reason, value)


_waiting: dict[_WaitingLease, tuple[Server, bytes, Callable[[], float]]] = {}
"""The leases of keys that name this process. A lease that another has is lost.

With each its server, the value before, and the seconds for which that would be stored now.
A lease outlives its request: Celery forgets the requests before it tells us that the worker ends.
"""


def _on_received(sender: Any, request: Any, **_: Any) -> None:
    global _waiting, _swept_at, _backs_off_until  # noqa: PLW0603 - those of the process
    if decorations_of(request.task):
        keep_content_type(request)
    if now() < _backs_off_until:
        return
    if now() >= _swept_at + DEFAULT_LEASE:  # time to forget what has begun since, or has ended without
        _swept_at = now()
        _waiting = {each: its for each, its in _waiting.items() if each.reason is None and each.request() is not None}
    try:
        _receive(sender, request)
    except Exception as error:  # noqa: BLE001 - the task runs all the same; its key expires
        _warn_once(f"a key of {request.name}, which was received, could not be renewed", type(error).__name__)
        _backs_off_until = now() + 10  # the worker has other messages to receive


def _receive(consumer: Any, request: Any) -> None:
    """Store this process at the key of a task that was queued with it, while the process lives and the task waits."""
    options = queue_options_of(request.task)
    if options is None or options.server is None:
        return
    context = Context(request.request_dict)
    header, work = header_of(context), work_of(context)
    begins_in = waits_for(request.app, 0, None, request.eta)
    queued_for = partial(waits_for, request.app, options.queue_timeout, request.expires, request.eta)
    limit = queued_for()
    if header.key is None or not (header.token or header.attempt) or limit <= 0:
        return
    token = work.token_factory(request.task, "received").token(limit if request.expires else None)
    # However long it waits, unless it expires: then it does not run.
    ends_in = limit if request.expires else inf
    lease = _WaitingLease(request, options.server, header.key, token, now(), min(DEFAULT_LEASE, limit), ends_in)
    seconds = min(DEFAULT_LEASE + begins_in, limit)
    lease.lives_on(lease.begun + seconds - lease.ttl, lease.ttl)  # not renewed before it may begin: many may wait
    queued = header.token.encode() if header.token else b""
    became = drive(options.server.client, replace(header.key, queued, token, seconds))
    held = work_held_by(Holder.parse(became.value))  # a retry, or an earlier worker's
    if held is not None and held.id == work.id:
        if is_queued(became.value) and held == work:
            became = drive(options.server.client, replace(header.key, became.value, token, seconds))
        elif held < work:  # the previous attempt has not ended yet
            consumer.timer.call_after(1, _on_received, (consumer, request))
    if became.status == "held":
        request.request_dict.update(header._replace(token=token.decode()).as_headers())
        queued = queued or work.token_factory(request.task, "queued").token(limit)
        _waiting[lease] = options.server, queued, queued_for
        hold(lease)


def _on_shutdown(**_: Any) -> None:
    """Note that the tasks that have not begun are in their queue again, and no worker's.

    A task whose message is acknowledged was given to a child, which has not asked for its key yet: it will never run.
    """
    while _waiting:
        lease, (server, queued, queued_for) = _waiting.popitem()
        request, left = lease.request(), queued_for() if lease.reason is None else 0
        try:
            if request is not None and request.acknowledged:
                _withdraw(request.task, Context(request.request_dict))
            # Asked, because the queued value may be there: by a command that was sent twice, after the task's end.
            elif left > 0 and server.client.execute_command("GET", lease.key, **RAW) == lease.token:
                drive(server.client, replace(lease.key, lease.token, queued, left))
        except Exception as error:  # noqa: BLE001 - the next worker that receives it says so
            _warn_once("keys of tasks that are queued again could not be lengthened", type(error).__name__)
            return


atexit.register(_on_shutdown)  # at a cold shutdown Celery sends no signal when it has restored the messages

signals.task_failure.connect(_on_failure)
signals.task_revoked.connect(_on_revoked)
signals.task_postrun.connect(_on_end)
signals.task_received.connect(_on_received)
signals.worker_shutdown.connect(_on_shutdown)
# A child of the pool ends without calling what is registered with `atexit`.
signals.worker_process_shutdown.connect(lambda **_: finish_cleanups(), weak=False)
