"""Pending releases: releases that are repeated in the background until it is certain that the token is gone."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from only_one.clock import now
from only_one.connections.nodes import LONG_TURN, Node, trips
from only_one.connections.server import Server
from only_one.driver import Command

from .commands import Retained, release_command, replacement
from .token import active_tokens

_FIRST_PAUSE = 0.05
_MOST = 10_000

WAITS_AT_EXIT = 2.0
"""Seconds for which a process that ends repeats its releases. A trip that has begun is waited for."""


@dataclass(eq=False)
class PendingRelease:
    """A release that must still happen, because a token may be stored at a key, or may yet be by a delayed SET.

    Attributes:
        lasts: seconds for which the token may be stored, from now on.
        server: the server that stores the key.
        key: the key as it is in Redis.
        token: the value that may be stored there; another value is left alone. Of releases with one token only the last
            that was added is pending.
        until: when to give up, because the key has expired by itself, by ``clock.now()``.
        no_write_in_flight: whether the server has finished every command that may store the token. Only then is the
            result "gone" final.
        retained: the value to store in place of the token. The key is released if it is None, or has no time left.
    """

    server: Server
    key: str
    token: bytes
    until: float
    no_write_in_flight: bool = True
    retained: Retained | None = None

    def __post_init__(self) -> None:
        self.pause, self.try_at = _FIRST_PAUSE, now()
        self.lasts = self.until - self.try_at
        if self.retained is not None:
            self.until = max(self.until, self.retained.until)

    def try_again_at(self, moment: float) -> None:
        """Try again at ``moment``."""
        self.try_at = moment

    def command(self) -> Command:
        """The command that releases the key, or stores the retained value."""
        if self.retained is None or self.retained.until <= now():
            return release_command(self.server.features, self.key, self.token)
        return replacement(self.key, self.token, self.retained, may_be_missing=True)

    def note_reply(self, command: Command, reply: object) -> bool:
        """Note the reply to the command; returns whether the release has ended."""
        if isinstance(reply, ResponseError) and self.server.features.fall_back(command[0], reply):
            return False  # due at once, by another command
        if self.no_write_in_flight and not isinstance(reply, Exception):
            return True
        moment = now()
        is_unanswered = isinstance(reply, Exception) and not isinstance(reply, ResponseError)
        if is_unanswered and not self.no_write_in_flight:
            # A frozen server may have a SET that it will carry out when it goes on.
            self.until = max(self.until, moment + self.lasts)
        # "Missing" is not final: a delayed SET may still arrive. Each pause is as long as all before it together, so a
        # token that arrives late is released after about as long as it was delayed.
        self.pause *= 2
        if isinstance(reply, Exception):
            self.pause = min(self.pause, 1.0)
        # The last try is the one that was due at `until`, and not the first that ends after it: if the process was
        # paused, a SET may have arrived since an earlier try.
        was_last = self.try_at >= self.until
        self.try_at = min(moment + self.pause, self.until)
        return was_last


def send_in_turn(due: Iterable[Any], send: Callable[[Node, list[Any]], object]) -> bool:
    """Send leases or pending releases that are due, in trips to one node each, for as long as a turn may take.

    Returns:
        Whether some are left for the next turn.
    """
    until = now() + LONG_TURN
    for node, those in trips(due):
        if now() > until:
            return True
        # While a node is down, one trip at a time finds out whether it still is.
        if node.backs_off_until > now():
            for each in those:
                each.try_again_at(node.backs_off_until)
        else:
            send(node, those)
    return False


class PendingReleases(dict[bytes, PendingRelease]):
    """The pending releases of one process, by token."""

    def add(self, pending: PendingRelease) -> None:
        """Add a release. At the limit the oldest is forgotten, because its key is likely to expire first."""
        if len(self) >= _MOST:
            self.end(next(iter([*self.values()]), pending))  # of a copy, because other threads change the dict
        self[pending.token] = pending

    def end(self, pending: PendingRelease) -> None:
        """Remove a release, unless another one for the same token has been added meanwhile.

        The token of a retained value stays active until now, so that no call in this process takes over its key.
        """
        if self.get(pending.token) is pending:
            self.pop(pending.token, None)
            active_tokens.pop(pending.token, None)

    def release_due(self) -> bool:
        """Try the releases that are due; returns whether some are left."""
        moment = now()
        due = [each for each in list(self.values()) if each.try_at <= moment]
        # The longest due come first: else releases that are repeated would keep new ones from their first turn.
        return send_in_turn(sorted(due, key=lambda each: each.try_at), self.release)

    def release(self, node: Node, due: list[PendingRelease]) -> list[PendingRelease]:
        """Try once to release keys of one node, in one trip; returns the releases whose reply was an error."""
        commands = [each.command() for each in due]
        undone = []
        for pending, command, reply in zip(due, commands, node.send(commands), strict=True):
            if pending.note_reply(command, reply):
                self.end(pending)
            if isinstance(reply, Exception):
                undone.append(pending)
        return undone

    def finish(self) -> None:
        """At the end of the process, send the releases that are pending, until ``WAITS_AT_EXIT`` is over."""
        limit = now() + WAITS_AT_EXIT
        left = list(self.values())
        while left and now() < limit:
            left = [pending for node, due in trips(left) for pending in self.release(node, due)]
            if left:
                time.sleep(_FIRST_PAUSE)
        self.clear()  # so that a second call does not wait again
