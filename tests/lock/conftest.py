"""A key, what happens to it, and the ways to its server; and a renewer whose steps a test takes by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_py

from only_one import configure
from only_one.connections import nodes
from only_one.lock import commands, lease, pending_releases, renewal
from tests.lock.watched import Watch
from tests.renewal import Clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The process's own thread may look at it, too, and is woken afterwards: by this clock it would sleep for a day."""
    with pytest.MonkeyPatch.context() as patch:
        yield Clock(patch, renewal, pending_releases, commands, lease, nodes)
    if not renewal._renewer.vacancy:
        renewal._renewer.wake_by(-math.inf)


@pytest.fixture
def watch(clock: Clock, prefix: str, redis: Any) -> Iterator[Watch]:
    watch = Watch(clock, prefix, redis)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renewal, "_renewer", watch.renewer)
        yield watch
    watch.close()


@pytest.fixture
def direct(url: str, prefix: str) -> Iterator[Any]:  # noqa: ARG001 - its settings are put back after ours
    """A client past every proxy; what the test decorates acquires its keys there, unless it says otherwise."""
    with redis_py.Redis.from_url(url) as client, configure(redis=url):
        yield client
