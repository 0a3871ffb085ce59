"""The drivers that send the commands of a command generator, sync and async, and the count of unanswered attempts.

A command generator yields one command at a time and is sent its reply, or thrown its error.
So it decides without sending, and one piece of code serves both drivers. The idea is that of httpx's auth flows.
No command generator has a ``finally``. An interruption leaves a generator unfinished, and its ``finally`` would run
when it is collected: an exception that a signal handler raises there is lost.
"""

import sys
import traceback
from collections.abc import Callable, Generator
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar, Union

import redis
from redis.exceptions import RedisClusterException, RedisError

T = TypeVar("T")

Command = tuple[Union[str, bytes, int], ...]

Commands = Generator[Command, Any, T]

TROUBLE = (RedisError, RedisClusterException, OSError)
"""The errors that redis-py raises if the server could not be asked, or has refused."""

_HANDLE_NO_SIGNALS = ("redis", "only_one", "socket")
"""The packages in whose functions no signal is handled."""

_KNOWN = frozenset({"redis", "hiredis", "gevent", "eventlet", "only_one", "builtins", *sys.stdlib_module_names})
"""The packages whose code sends a command and raises its errors. Another package in a traceback is the user's code."""

RAW = {"NEVER_DECODE": True, "get": True}
"""Options of redis-py: replies come as bytes, also from clients that decode, and SET with GET gives the old value."""


class ServerTimeout(redis.TimeoutError):
    """A time-out after which the driver does not send the command again: others before it have timed out, too."""


unanswered: ContextVar[int] = ContextVar("unanswered", default=0)
"""How many attempts of a driver to send a command got no answer in this context.

If the number has grown meanwhile, a command may have been sent twice, and the first of the two may be yet to arrive.
"""


def _after(error: Exception, commands: Commands[T], command: Command, *, sends_again: bool) -> tuple[Command, bool]:
    """The command to send after an error, and whether the next one that gets no answer is sent again.

    A command that got no answer is sent again, but only one for each generator: so it takes no longer than two attempts
    to know that a server is down. A client of redis-py's, as of ``Lock``, sends again by itself.
    """
    error = as_trouble(error)
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        unanswered.set(unanswered.get() + 1)
        if sends_again and not isinstance(error, ServerTimeout):
            return command, False
    return commands.throw(error), sends_again


def as_trouble(error: Exception) -> Exception:
    """The error if it is redis-py's, the system's or a signal handler's, else a ``ConnectionError`` caused by it.

    The user's code that connects, such as a provider of credentials, may raise any exception.
    """
    if isinstance(error, TROUBLE) or is_of_signal_handler(error):
        return error
    trouble = redis.ConnectionError(f"{type(error).__name__}: {error}")
    trouble.__cause__ = error
    return trouble


def raw_sender(client: Any) -> Callable[[Command], Any]:
    """The function that sends one command by a client and returns its reply in bytes; to be awaited in asyncio.

    Our own clients have such a method, because redis-py's takes options by name, which cost a hundredth of a command.
    """
    return getattr(client, "send_raw", None) or (lambda command: client.execute_command(*command, **RAW))


def drive(client: Any, commands: Commands[T]) -> T:
    """Send the commands of a generator, and return the generator's result."""
    sends_again, send = getattr(client, "sends_again", False), raw_sender(client)
    try:
        command = next(commands)
        while True:
            try:
                reply = send(command)
            except Exception as error:  # noqa: BLE001 - the generator says which errors end it
                command, sends_again = _after(error, commands, command, sends_again=sends_again)
            else:
                command = commands.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(client: Any, commands: Commands[T]) -> T:
    """Send the commands of a generator, and return the generator's result."""
    sends_again, send = getattr(client, "sends_again", False), raw_sender(client)
    try:
        command = next(commands)
        while True:
            try:
                reply = await send(command)
            except Exception as error:  # noqa: BLE001 - the generator says which errors end it
                command, sends_again = _after(error, commands, command, sends_again=sends_again)
            else:
                command = commands.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised the exception, or another thread or greenlet, as time limits do."""
    frames = _frames_of(error)
    if any(map(_was_called_by_signal, frames[1:], frames)):
        return True
    # An exception that another thread raises here has no frame of its own. It is recognized by its class, which is of
    # no known package. If a frame is of another package, too, that code, such as the user's, may have raised it.
    is_known = type(error).__module__.partition(".")[0] in _KNOWN
    return not is_known and _KNOWN.issuperset(map(_package_of, frames))


def _frames_of(error: BaseException) -> list[FrameType]:
    """The frame of each call in the traceback of an error; the last has raised it."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _was_called_by_signal(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether a function was called as a signal handler is: with the interrupted frame as its last argument.

    The handlers that are installed are not asked: a handler may have installed another before it raised.
    """
    if _package_of(frame) in _HANDLE_NO_SIGNALS:  # a look at their variables would keep these alive
        return False
    values = [frame.f_locals.get(name) for name in frame.f_code.co_varnames]
    values += [value[-1] for value in values if type(value) is tuple and value]  # the handler may take `*args`
    return any(value is interrupted for value in values)
