"""Python 3.14 evaluates an annotation when it is asked for: it may name what is defined later, or never."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest

from only_one import only_one, subscribe

pytestmark = pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates them where they are written")

SOURCE = """
def decorated(order: Later, count: int = 1) -> Later: ...
def key_of_order(order: Later, count: int) -> str: return f"order-{order}"
def hook(event: Later) -> None: ...
"""


def run_as_module(source: str) -> dict[str, Any]:
    """The names of a module, without this file's import from the future."""
    names: dict[str, Any] = {"__name__": __name__, "only_one": only_one}
    exec(compile(source, __file__, "exec", dont_inherit=True), names)  # noqa: S102 - it is our own
    return names


def test_a_function_a_key_and_a_hook_may_have_annotations_that_are_defined_later() -> None:
    module = run_as_module(SOURCE)
    decorated = only_one(module["decorated"], key=module["key_of_order"], when_busy=module["hook"])
    subscribe(module["hook"])()
    parameters = inspect.signature(decorated).parameters
    assert list(parameters) == ["order", "count"]
    assert parameters["count"].annotation is int
