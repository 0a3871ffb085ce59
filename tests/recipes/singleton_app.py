"""The application of examples/singleton.py, in which a run that outlives its timeout waits for the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from examples import singleton
from tests.live.workers import wait_at

example: Any = singleton
app = example.app
example.time = SimpleNamespace(sleep=lambda _seconds: wait_at("poll"))
