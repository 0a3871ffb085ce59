"""The server features: which commands a server knows, and which rights its user has, learnt from its refusals."""

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
        # The server does not know the command, or does not let this user call it.
        is_unknown = "unknown command" in str(error).lower() or is_forbidden(error)
        has_other = refused in ("DELIFEQ", "DELEX") and is_unknown
        if has_other and refused == self.release:
            self.release = "DELEX" if refused == "DELIFEQ" else "EVAL"
        return has_other


def is_of_another_type(error: object) -> bool:
    """Whether the error says that a key holds no string, but a list or hash that somebody has put there."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


def is_forbidden(error: object) -> bool:
    """Whether the error says that this user lacks a right, for a command or in a script."""
    text = str(error).lower()
    return isinstance(error, ResponseError) and ("permission" in text or "can't run this command" in text)


def level_of(error: object) -> int:
    """The level at which an error is logged that is not raised: a right that is missing must be given by somebody."""
    return WARNING if is_forbidden(error) else DEBUG
