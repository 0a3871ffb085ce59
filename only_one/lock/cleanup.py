"""Cleanup: keys that a call may have left behind are released in the background, repeatedly, until they expire."""

import time

from redis.exceptions import ResponseError

from only_one.connections.cluster import LONG, Node, trips
from only_one.connections.server import Server

from .commands import RAW, Command, now

_FIRST_PAUSE = 0.05
_MOST = 10_000


class Cleanup:
    """A key to release if it holds a token: an unconfirmed acquire may have stored the token, or may yet store it."""

    def __init__(self, server: Server, key: str, token: bytes, until: float, *, no_write_in_flight: bool) -> None:
        """See ``renewal.release_later``."""
        self.server = server
        self.key = key
        self.token = token
        self.until = until
        self.no_write_in_flight = no_write_in_flight
        self.pause = _FIRST_PAUSE
        self.try_at = now()

    def is_over(self, command: Command, reply: object) -> bool:
        """Whether the cleanup has ended, by the reply to a command that releases the key."""
        if isinstance(reply, ResponseError) and self.server.features.fall_back_from(command[0], reply):
            return False  # due at once, by another command
        if self.no_write_in_flight and not isinstance(reply, Exception):
            return True
        # "Missing" is not final: a delayed SET may still arrive. Check again after twice the time, so that a token
        # that comes late stays no longer than it was late.
        self.pause *= 2
        if isinstance(reply, Exception):
            self.pause = min(self.pause, 1.0)
        self.try_at = now() + self.pause
        return self.try_at >= self.until


class Cleanups(dict[bytes, Cleanup]):
    """The cleanups of one process, by token."""

    def add(self, cleanup: Cleanup) -> None:
        """Begin a cleanup. At the limit the oldest is forgotten, because its key has the least time left to do harm."""
        if len(self) >= _MOST:
            self.pop(next(iter([*self]), b""), None)  # of a copy: other threads change it
        self[cleanup.token] = cleanup

    def release_due(self) -> None:
        """Try all cleanups that are due, in one trip to each node."""
        moment = now()
        due_now = [each for each in list(self.values()) if each.try_at <= moment]
        # In order, or those that are tried again and again would keep others from their first turn.
        for node, due in trips(sorted(due_now, key=lambda each: each.try_at)):
            # While a node is down, one trip at a time finds out whether it still is.
            if node.backs_off_until > now():
                for cleanup in due:
                    cleanup.try_at = node.backs_off_until
            else:
                self.release(node, due)
            if now() > moment + LONG:
                return

    def release(self, node: Node, due: list[Cleanup]) -> None:
        """Try once to release keys of one node, in one trip."""
        commands = [each.server.features.release_command(each.key, each.token) for each in due]
        for cleanup, command, reply in zip(due, commands, node.send(commands, RAW), strict=True):
            if cleanup.is_over(command, reply):
                self.pop(cleanup.token, None)

    def finish(self) -> None:
        """At the end of the process, release the keys that could not be released at the end of a run."""
        limit = now() + 2  # seconds that the process waits for it at the most
        left = list(self.values())
        while left and now() < limit:
            for node, due in trips(left):
                self.release(node, due)
            left = [each for each in left if each.no_write_in_flight and each.token in self]
            if left:
                time.sleep(_FIRST_PAUSE)
