"""The place of each test of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from only_one.testing import redis_server
from tests.recipes.place import Place


@pytest.fixture(autouse=True)
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """That of the examples, as of what is started there, instead of one that is configured for the test."""
    for variable in ("ONLY_ONE_REDIS_URL", "ONLY_ONE_ACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    return "only_one:"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with redis_server() as server, Redis.from_url(server.url) as client:
        yield Place(server.url, client, tmp_path)
