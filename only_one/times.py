"""Times as people write them, checked."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Union

from .errors import ConfigurationError

Seconds = Union[float, timedelta]

_LONGEST = 10 * 365 * 24 * 3600


def seconds(name: str, value: object, instead: str) -> float:
    """A time in seconds.

    Args:
        name: what the option is called, to say in an error.
        value: seconds, or a timedelta.
        instead: what to write for "no limit", to say in an error.

    Returns:
        Seconds, at least a thousandth and at most ten years.

    Raises:
        ConfigurationError: for anything else.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name}={value!r}: write seconds, such as {name}=300, or a timedelta, such as timedelta(minutes=5)"
        raise ConfigurationError(msg)
    if value > _LONGEST:
        msg = f"{name} is longer than ten years: write at most ten years, in seconds; {instead}"
        raise ConfigurationError(msg)
    if math.isnan(value) or value < 0.001:  # noqa: PLR2004 - Redis counts in milliseconds
        msg = f"{name}={value!r}: write at least 0.001 seconds; {instead}"
        raise ConfigurationError(msg)
    return float(value)
