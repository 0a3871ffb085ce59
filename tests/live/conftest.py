"""A world of each module's own, and for each test a scene in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from only_one import configure
from rigs.waiting import eventually
from tests.live.app import app
from tests.live.workers import PREFIX, Scene, World, world


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """What a module's application is told."""
    return {}


@pytest.fixture(scope="module")
def place(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server and a broker, without a worker; what this process decorates takes its keys there."""
    folder = tmp_path_factory.mktemp("world")
    with (
        world(app, folder, **settings) as found,
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
