"""A world of each module's own, and for each test a scene in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from only_one import configure
from rigs.waiting import eventually
from tests.live.app import app
from tests.live.brokers import KIND
from tests.live.workers import PREFIX, Scene, World, world


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server and a broker, without a worker; what this process decorates takes its keys there.

    A requeue waits for a third of the module's `VISIBILITY` at the longest. The workers do not look for messages to be
    delivered again: the tests have them delivered.
    """
    seconds = getattr(request.module, "VISIBILITY", 3600)
    options = {"visibility_timeout": seconds, "unacked_restore_limit": 0} if KIND == "redis" else {}
    with (
        world(app, tmp_path_factory.mktemp("world"), broker_transport_options=options) as found,
        configure(redis=found.server.url, prefix=PREFIX),
    ):
        yield found


@pytest.fixture
def scene(place: World) -> Iterator[Scene]:
    """A key of the test's own, of which nothing is left at its end."""
    with configure(redis=place.server.url, prefix=PREFIX):
        found = Scene(place)
        yield found
        assert eventually(lambda: not found.keys()), found.keys()
