"""The server features: which commands a server knows and allows its user, learnt from its refusals."""

from logging import DEBUG, WARNING
from typing import Literal

from redis.exceptions import ResponseError


class Features:
    """The commands that one server knows and allows; at first all.

    Attributes:
        sets_and_gets: whether it knows ``SET NX GET`` (from Redis 7.0, and Valkey).
        release: how it compares and deletes: ``DELIFEQ`` (Valkey 9), ``DELEX`` (Redis 8.4), or a script (all).
    """

    sets_and_gets = True
    release: Literal["DELIFEQ", "DELEX", "EVAL"] = "DELIFEQ"

    def fall_back(self, refused: object, error: ResponseError) -> bool:
        """Release with another command from now on, if the error is the refusal of a command that releases.

        Returns:
            Whether there is another command, and the release is to be sent again.
        """
        has_other = refused in ("DELIFEQ", "DELEX") and is_forbidden(error)
        if has_other and refused == self.release:
            self.release = "DELEX" if refused == "DELIFEQ" else "EVAL"
        return has_other


def is_of_another_type(error: object) -> bool:
    """Whether the error says that a key holds no string, but a list or hash that somebody has put there."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


_FORBIDDEN = ("permission", "can't run this command", "unknown command", "unsupported command", "not available")
"""Parts of an error's text which say that the user lacks a right, or that the server has no such command.

The last two are of servers that speak Redis's protocol and have words of their own: Envoy and Pika, and Upstash.
"""


def is_forbidden(error: object) -> bool:
    """Whether the error says that this user may not call a command on this server, itself or in a script."""
    return isinstance(error, ResponseError) and any(each in str(error).lower() for each in _FORBIDDEN)


def level_of(error: object) -> int:
    """The level at which an error that is not raised is logged: WARNING if somebody must give the user a right."""
    return WARNING if is_forbidden(error) else DEBUG
