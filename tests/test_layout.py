"""The house: imports run downwards only, and Celery is imported in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import only_one

ROOT = Path(only_one.__file__).parent

# From the top downwards; a module imports only from those that stand after it.
ORDER = [
    "only_one",
    "only_one.decorator",
    "only_one.__main__",
    "only_one.celery.command",
    "only_one.cli",
    "only_one.inspection",
    "only_one.celery.lazy_tasks",
    "only_one.call.wrapper",
    "only_one.celery.enqueue",
    "only_one.celery.worker_signals",
    "only_one.celery.task_run",
    "only_one.celery.redelivery",
    "only_one.celery.coalescing",
    "only_one.celery.requeue",
    "only_one.celery.app_settings",
    "only_one.celery.broker",
    "only_one.call.driver",
    "only_one.call.locked_call",
    "only_one.call.options",
    "only_one.lock.renewal",
    "only_one.lock.cleanup",
    "only_one.lock.lease",
    "only_one.lock.redis_lock",
    "only_one.settings",
    "only_one.connections.server",
    "only_one.connections.asyncio_client",
    "only_one.connections.cluster",
    "only_one.connections.pinned",
    "only_one.connections.interruptions",
    "only_one.lock.commands",
    "only_one.keys",
    "only_one.keys.template",
    "only_one.keys.fields",
    "only_one.keys.digest",
    "only_one.keys.arguments",
    "only_one.policies",
    "only_one.events",
    "only_one.validation",
    "only_one.testing",
    "only_one.errors",
    "only_one.lock.holder",
    "only_one.clock",
    "only_one.connections",
    "only_one.lock",
    "only_one.call",
    "only_one.celery",
]


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("only_one", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> Iterator[str]:
    """Every module that a file imports from, in functions and under TYPE_CHECKING too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


MODULES = modules()


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted(MODULES) == sorted(ORDER)


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_downwards_only(name: str) -> None:
    below = set(ORDER[ORDER.index(name) + 1 :])
    own = {each for each in imports(name, MODULES[name]) if each in MODULES and each != "only_one"}
    assert own <= below


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("only_one.celery")])
def test_only_its_room_imports_celery(name: str) -> None:
    assert not [each for each in imports(name, MODULES[name]) if each.split(".")[0] in ("celery", "kombu", "billiard")]


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("only_one.keys")])
def test_keys_know_nothing_of_redis(name: str) -> None:
    assert not [each for each in imports(name, MODULES[name]) if each.split(".")[0] == "redis"]
