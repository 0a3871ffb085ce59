"""The server features: which commands a server knows, and lets its user call, learnt from its refusals."""

from logging import DEBUG, WARNING
from typing import Literal

from redis.exceptions import ResponseError


class Features:
    """The server features: which commands one server knows, learnt from its refusals.

    Attributes:
        sets_and_gets: whether it knows ``SET NX GET`` (from Redis 7.0, and Valkey).
        release: how it compares and deletes: ``DELIFEQ`` (Valkey 9), ``DELEX`` (Redis 8.4), or a script (all).
    """

    sets_and_gets = True
    release: Literal["DELIFEQ", "DELEX", "EVAL"] = "DELIFEQ"

    def fall_back(self, refused: object, error: ResponseError) -> bool:
        """Release with another command from now on, if this one was refused; returns whether there is another."""
        has_other = refused in ("DELIFEQ", "DELEX") and is_forbidden(error)
        if has_other and refused == self.release:
            self.release = "DELEX" if refused == "DELIFEQ" else "EVAL"
        return has_other


def is_of_another_type(error: object) -> bool:
    """Whether the error says that a key holds no string, but a list or hash that somebody has put there."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


_FORBIDDEN = ("permission", "can't run this command", "unknown command")
"""In the texts of errors: this user lacks a right, for a command or in a script; or the server has no such command."""


def is_forbidden(error: object) -> bool:
    """Whether the error says that this user may not call a command on this server, itself or in a script."""
    return isinstance(error, ResponseError) and any(each in str(error).lower() for each in _FORBIDDEN)


def level_of(error: object) -> int:
    """The level at which an error is logged that is not raised: a right that is missing must be given by somebody."""
    return WARNING if is_forbidden(error) else DEBUG
