"""Inside pytest, for `benchmarks.mutants`: runs the tests that were chosen, and notes what each did, and what it ran.

The context of coverage is the test. A process that is started learns it from the environment; one that a fixture of a
module starts is for all tests of that file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHOICE = "ONLY_ONE_MUTANTS_CHOICE"
"""The file that names the tests to run, in their order; all are run where there is none."""

NOTES = "ONLY_ONE_MUTANTS_NOTES"
"""The file to which a line is added for all that happens."""

CONTEXT = "ONLY_ONE_MUTANTS_CONTEXT"
"""What a process that is started runs for."""

ALL = "*"
"""Stands for all tests of a file."""

_is_controller = False


def pytest_configure(config: pytest.Config) -> None:
    """Whether tests run in this process, or in others that pytest-xdist starts."""
    global _is_controller  # noqa: PLW0603 - a plugin is a module
    _is_controller = config.pluginmanager.has_plugin("dsession")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave those that were chosen."""
    if CHOICE in os.environ:
        order = {name: place for place, name in enumerate(json.loads(Path(os.environ[CHOICE]).read_bytes()))}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Say for which test all that follows runs."""
    interrupts = item.get_closest_marker("interrupts") is not None
    _note(test=item.nodeid, interrupts=interrupts)
    _run_for(item.nodeid)
    result = yield
    _run_for("")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """Say that what a fixture of several tests starts runs for all of the file."""
    test = os.environ.get(CONTEXT, "")
    if fixturedef.scope != "function" and test:
        _run_for(f"{test.partition('::')[0]}::{ALL}")
    try:
        return (yield)
    finally:
        _run_for(test)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what has become of a part of a test, and how long it took."""
    if not _is_controller:
        _note(done=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be read."""
    if report.failed:
        _note(uncollected=report.nodeid)


def _note(**what: Any) -> None:
    if path := os.environ.get(NOTES):
        with Path(path).open("a") as file:
            file.write(json.dumps(what) + "\n")


def _run_for(context: str) -> None:
    os.environ[CONTEXT] = context
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage  # noqa: PLC0415 - only where it measures

        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(context)
