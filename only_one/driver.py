"""The drivers that send the commands of a command generator, sync and async, and the count of unanswered attempts.

A command generator yields one command at a time and is sent its reply, or thrown its error.
So it decides without sending, and one piece of code serves both drivers. The idea is that of httpx's auth flows.
An interruption leaves a generator where it is. So none has a ``finally``: it would run when the generator is collected,
and what a signal handler raises in it then is lost.
"""

import sys
import traceback
from collections.abc import Generator
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar, Union

import redis
from redis.exceptions import RedisClusterException, RedisError

T = TypeVar("T")

Command = tuple[Union[str, bytes, int], ...]

Commands = Generator[Command, Any, T]

TROUBLE = (RedisError, RedisClusterException, OSError)
"""The errors that redis-py raises when the server could not be asked, or refused."""

_TRANSLATORS = ("redis", "only_one", "socket")
"""Packages in whose code an exception is raised in the place of another."""

_KNOWN = frozenset({"redis", "hiredis", "gevent", "eventlet", "only_one", "builtins", *sys.stdlib_module_names})
"""The packages whose code sends a command, and whose errors it raises; a user's own code may be in between."""

RAW = {"NEVER_DECODE": True, "get": True}
"""Options of redis-py: replies come as bytes, also from clients that decode, and SET with GET gives the old value."""


class ServerTimeout(redis.TimeoutError):
    """A time-out after which a command is not sent again, because others before it have timed out, too."""


unanswered: ContextVar[int] = ContextVar("unanswered", default=0)
"""How many attempts to send a command got no answer in this context, whoever has sent the command again.

If the number has grown meanwhile, a command may have been sent twice, and the first of the two may be yet to arrive.
"""


def note_unanswered() -> None:
    """Count an attempt that got no answer."""
    unanswered.set(unanswered.get() + 1)


def _after(
    error: Exception, handled: BaseException | None, commands: Commands[T], command: Command, *, sends_again: bool
) -> tuple[Command, bool]:
    """The command to send after an error, and whether the next one that gets no answer is sent again.

    A command of our own client that got no answer is sent again, once for each generator: so the client knows in the
    time of two attempts that a server is down. Other clients send again by themselves.
    """
    raise_what_signal_handler_raised(error, handled)
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        note_unanswered()
        if sends_again and not isinstance(error, ServerTimeout):
            return command, False
    return commands.throw(error), sends_again


def drive(client: Any, commands: Commands[T]) -> T:
    """Send the commands of a generator, and return the generator's result."""
    sends_again, handled = getattr(client, "sends_again", False), sys.exc_info()[1]
    try:
        command = next(commands)
        while True:
            try:
                reply = client.execute_command(*command, **RAW)
            except Exception as error:  # noqa: BLE001 - the generator says which errors end it
                command, sends_again = _after(error, handled, commands, command, sends_again=sends_again)
            else:
                command = commands.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(client: Any, commands: Commands[T]) -> T:
    """Send the commands of a generator, and return the generator's result."""
    sends_again, handled = getattr(client, "sends_again", False), sys.exc_info()[1]
    try:
        command = next(commands)
        while True:
            try:
                reply = await client.execute_command(*command, **RAW)
            except Exception as error:  # noqa: BLE001 - the generator says which errors end it
                command, sends_again = _after(error, handled, commands, command, sends_again=sends_again)
            else:
                command = commands.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised the exception, or another thread or greenlet; as time limits do."""
    frames = _frames_of(error)
    if any(map(_was_called_by_signal, frames[1:], frames)):
        return True
    # What another thread raises here has no frame of that. But it is none of the errors of the code that has run.
    is_known = type(error).__module__.partition(".")[0] in _KNOWN
    return not is_known and _KNOWN.issuperset(map(_package_of, frames))


def raised_by_signal_handler(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """The exception of a signal handler, or another thread or greenlet, for which an error stands; None without one.

    redis-py raises errors of its own in place of the system's, of which a handler may raise one, such as a
    ``TimeoutError``. A codec of Python's, until 3.11, raises another exception of the same class.

    Args:
        error: what was raised.
        handled: the exception that was being handled before; what led to that is another's.
    """
    seen = {id(handled)}
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if is_of_signal_handler(each):
            return each
        seen.add(id(each))
        # What the user's code has raised in the place of another exception stands for itself.
        is_translated = any(_package_of(frame) in _TRANSLATORS for frame in _frames_of(each)[-1:])
        each = (each.__cause__ or each.__context__) if is_translated else None
    return None


def raise_what_signal_handler_raised(error: BaseException, handled: BaseException | None) -> None:
    """Raise the exception of a signal handler for which an error stands, if there is one."""
    if raised := raised_by_signal_handler(error, handled):
        context = raised.__context__
        try:
            raise raised
        finally:
            raised.__context__ = context  # and not the error that stood for it


def _frames_of(error: BaseException) -> list[FrameType]:
    """The frame of each call in the traceback of an error; the last has raised it."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _was_called_by_signal(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether a function was called as a signal handler is: with the frame that is interrupted as its last argument.

    It is not asked which handlers there are: one may have put another in its place before it has raised.
    """
    if _package_of(frame) in _TRANSLATORS:  # it handles no signals, and to look at its variables keeps them for longer
        return False
    values = map(frame.f_locals.get, frame.f_code.co_varnames)
    return any(each is interrupted for value in values for each in (value[-1:] if type(value) is tuple else (value,)))
