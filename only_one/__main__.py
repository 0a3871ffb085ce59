"""The command line that lists, shows and releases keys: ``python -m only_one``, or ``celery -A proj only-one``."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from redis.exceptions import RedisClusterException, RedisError

from .errors import OnlyOneError
from .holder import printable
from .inspection import Held, _configured, held, held_key, release_key
from .settings import configure

_COLUMNS = ("key", "state", "task", "id", "host", "pid", "since", "age", "free_by", "process")

_ESCAPED = r"\\([tnr]|x[0-9a-f]{2}|u[0-9a-f]{4}|U00(0[0-9a-f]|10)[0-9a-f]{4})"
"""What ``printable`` makes of line ends, terminal escapes, and blanks such as that of Chinese and Japanese."""


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m only_one", app: Any = None) -> int:
    """Run one command.

    Args:
        arguments: the arguments after the program's name; by default those of this process.
        program: the program's name in the help.
        app: the Celery app whose settings apply, too.

    Returns:
        The exit status: 0 if all was done, 1 if a key was not freed or not found, 2 for wrong use and trouble.
    """
    given = _parser(program).parse_args(arguments, argparse.Namespace(redis=..., prefix=...))
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()  # closed, as by `>&-`
    out: Any = sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="backslashreplace")  # for characters that a terminal cannot show
    try:
        with configure(redis=given.redis, prefix=given.prefix):
            try:
                return _COMMANDS[given.command](given, app)
            except (RedisError, RedisClusterException) as error:
                problem = _configured(None, app)[0].describe(error)
    except (OnlyOneError, UnicodeError, OSError) as error:  # half of a surrogate pair is in no key
        problem = f"{type(error).__name__}: {error}"
    _print(f"{program}: {problem}", is_problem=True)
    return 2


def _print(*lines: str, is_problem: bool = False) -> None:
    """Print lines. If the reader has closed the pipe, as ``head`` does, go on without output."""
    out = sys.stderr if is_problem else sys.stdout
    try:
        for line in lines:
            print(line, file=out, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _parser(program: str) -> argparse.ArgumentParser:
    # These options may stand before the command or after it. They have no default, because the default of the command's
    # parser would replace a value that stands before the command.
    everywhere = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    add = everywhere.add_argument
    add("--redis", metavar="URL", help="the server, if it is another than the configured one")
    add("--prefix", help="what the keys begin with, if it is not what is configured")
    about = "Look at the keys that only_one holds, and free them."
    parser = argparse.ArgumentParser(program, description=about, parents=[everywhere])
    commands = parser.add_subparsers(required=True, dest="command", metavar="|".join(_COMMANDS))

    about = "the keys that are held, and by whom"
    add = commands.add_parser("list", help=about, parents=[everywhere]).add_argument
    add("--match", default="*", metavar="PATTERN", help="a pattern of keys without the prefix: *, ?, [abc]")
    add("--json", action="store_true", help="one line of JSON for each key")

    add = commands.add_parser("show", help="all that is known of a key", parents=[everywhere]).add_argument
    add("key", help="the key, with or without the prefix")
    add("--json", action="store_true", help="one line of JSON")

    about = "release keys; the runs that hold them go on, and learn it"
    release = commands.add_parser("release", help=about, parents=[everywhere])
    add = release.add_mutually_exclusive_group(required=True).add_argument
    add("keys", nargs="*", default=[], metavar="key", help="a key, with or without the prefix")
    add("--dead", action="store_true", help="all keys whose holder is certainly dead, seen from here")
    queued = "all keys whose task has been queued for longer than this and is in no worker: 600, 90m, 2h, 1d"
    add("--queued", type=_seconds, metavar="OLDER_THAN", help=queued)
    release.add_argument("--match", default="*", metavar="PATTERN", help="with these two: only keys of this pattern")
    release.add_argument("--force", action="store_true", help="also where the holder is not known to be dead")
    return parser


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(text: str) -> float:
    """Seconds of a text such as ``90m``; without a unit it is seconds."""
    written = re.fullmatch(r"(\d+(?:\.\d*)?)([smhd]?)", text)
    if written is None:
        msg = f"{text!r} is no time: write seconds, or a number with s, m, h or d, such as 600, 90m, 2h or 1d"
        raise argparse.ArgumentTypeError(msg)
    return float(written[1]) * _UNITS[written[2]]


def _list(given: argparse.Namespace, app: Any) -> int:
    facts = [_facts(each) for each in sorted(held(given.match, app=app))]
    if not facts and not given.json:
        server, prefix = _configured(None, app)
        _print(printable(f"no key is like {prefix}{given.match} in {server.database}"), is_problem=True)
    rows = [[_cell(each[name], name) for name in _COLUMNS] for each in facts]
    if given.json:
        lines = [json.dumps(each) for each in facts]
    elif sys.stdout.isatty():
        rows.insert(0, [name.replace("_", " ") for name in _COLUMNS])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    else:
        lines = ["\t".join(row) for row in rows]
    _print(*lines)
    return 0


def _show(given: argparse.Namespace, app: Any) -> int:
    entry = _find(given.key, app)
    if entry is None:
        server, prefix = _configured(None, app)
        _print(printable(f"{given.key} is free, with the prefix {prefix} in {server.database}"), is_problem=True)
        return 1
    facts = _facts(entry)
    lines = [f"{name.replace('_', ' ') + ':':<12} {_cell(value, name)}" for name, value in facts.items()]
    _print(*[json.dumps(facts)] if given.json else lines)
    return 0


def _release(given: argparse.Namespace, app: Any) -> int:
    def is_meant(entry: Held) -> bool:
        if given.dead:
            return entry.process == "dead"
        facts = _facts(entry)
        return facts["state"] == "queued" and bool(facts["age"] > given.queued)

    if given.keys:
        return max([_free(key, _find(key, app), app, force=given.force) for key in given.keys])
    meant = [each for each in held(given.match, app=app) if is_meant(each)]
    if not meant:
        kind = "a dead process" if given.dead else "a task that is queued for so long"
        _print(f"no key of {kind} is held, and none was freed", is_problem=True)
    return max([_free(each.key, each, app, force=given.force) for each in meant], default=0)


def _find(key: str, app: Any) -> Held | None:
    """Look at a key, whose name is given as it is in Redis or as ``list`` prints it."""
    unescaped = re.sub(_ESCAPED, lambda escaped: escaped[0].encode().decode("unicode_escape"), key)
    return held_key(key, app=app) or (held_key(unescaped, app=app) if unescaped != key else None)


def _free(key: str, entry: Held | None, app: Any, *, force: bool) -> int:
    """Free a key, unless its holder may live or is not ours, and print the outcome; returns the exit status."""
    if entry is None:
        reason = "it is free"
    elif not entry.value:
        reason = "it holds a value of another type, which cannot be compared; redis-cli deletes it"
    elif entry.holder is None and not force:
        reason = f"it is not a key of only_one, but holds {_cell(_value(entry))}; --force frees it all the same"
    elif entry.process in _NOT_DEAD and not force:
        reason = f"{entry.holder} is {_NOT_DEAD[entry.process]}; --force frees it all the same"
    elif release_key(entry.key, entry.value, app=app):
        _print(f"{printable(entry.key)} was freed, held by {entry.holder or _cell(_value(entry))}")
        return 0
    else:
        key, reason = entry.key, "it has another holder now, or none"
    _print(f"{printable(key)} was not freed: {reason}", is_problem=True)
    return 1


_COMMANDS = {"list": _list, "show": _show, "release": _release}
_NOT_DEAD = {"alive": "alive", "unknown": "not known to be dead"}


def _facts(entry: Held) -> dict[str, Any]:
    """The facts about a key, None if unknown."""
    holder: dict[str, Any] = vars(entry.holder) if entry.holder else {"state": "foreign"}
    shown = {"state": "state", "task": "name", "id": "task_id", "host": "host", "pid": "pid"}
    since = holder.get("since")
    return {
        "key": entry.key,
        **{column: holder.get(name) for column, name in shown.items()},
        "since": _time(since),
        "age": None if since is None else max(0, round(time.time() - since)),
        "free_by": _time(_free_by(entry)),
        "process": entry.process,
        "attempt": holder.get("attempt"),
        "expires_in": entry.expires_in,
        "value": _value(entry),
    }


def _free_by(entry: Held) -> float | None:
    """When a key is free at the latest, in seconds since the epoch; None if nobody knows."""
    if entry.expires_in is None:
        return None
    expires_at = time.time() + entry.expires_in
    if entry.process in (None, "dead"):  # nobody renews it
        return expires_at
    # A living process may renew the key until the deadline. If that has passed, the run has called `extend`.
    deadline = entry.holder and entry.holder.deadline
    return max(expires_at, deadline) if deadline and deadline >= time.time() else None


def _value(entry: Held) -> str:
    return entry.value.decode(errors="backslashreplace") if entry.value else "a value of another type"


def _time(moment: Any) -> str | None:
    """A time in this machine's zone, with the offset from UTC; None for None, and a number that cannot be a time."""
    with suppress(TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(moment, timezone.utc).astimezone().isoformat(timespec="seconds")
    return None


_LONGEST_CELL = 200


def _cell(value: Any, name: str = "") -> str:
    """A text that is safe in a terminal: anybody can store anything at our keys. Only keys, to copy, are not cut."""
    text = "-" if value is None else printable(str(value))
    return text if name == "key" or len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


with suppress(ImportError):  # click comes with Celery
    import click

    _AS_GIVEN = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # `--` too, before a key like `-x`

    @click.command("only-one", add_help_option=False, context_settings=_AS_GIVEN)
    @click.argument("arguments", nargs=-1)
    @click.pass_context
    def celery_command(context: Any, arguments: tuple[str, ...]) -> None:
        """Look at the keys that are held, and free them."""
        sys.exit(main(arguments, program="celery only-one", app=context.obj.app))


# Celery loads this command in a worker's main process, too. The import connects our handlers to Celery's signals there.
if "celery" in sys.modules:
    from .celery import ended_tasks  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
