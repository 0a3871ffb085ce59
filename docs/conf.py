"""Sphinx's configuration of the documentation site: Markdown pages, and the API page from the docstrings."""

# ruff: noqa: INP001 - Sphinx reads this file, and no package contains it

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

project = "only_one"
copyright = "the maintainers of only_one"  # noqa: A001 - Sphinx reads this name

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "only_one"
html_copy_source = False
html_extra_path = ["timeline.svg"]  # at the address at which PyPI shows it, in README
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = ["tables.js"]

myst_heading_anchors = 3  # `page.md#a-heading` works for headings of three levels, as on GitHub

default_role = "code"  # docstrings have single backticks around code
add_module_names = False  # the sections of the API page say where to import a name from
autodoc_member_order = "bysource"

nitpicky = True
# Types in signatures that have no entry on the API page.
nitpick_ignore_regex = [
    # Those of Python and redis-py: their sites are not asked, so the build needs no network.
    ("py:.*", r"(collections|contextlib|datetime|os|pathlib|redis|typing)\..*"),
    # What policies return or raise for only_one itself.
    ("py:.*", r"(only_one\.policies\.)?(Retry|BufferOne|CarryOn)"),
]

# The API page shows one signature of `only_one`, for people. Its overloads are for type checkers.
_decorator = ModuleAnalyzer.for_module("only_one.decorator")
_decorator.analyze()
_decorator.overloads.clear()


def read_docstring(app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Turn the sections of a Google docstring into fields, as the extension `sphinx.ext.napoleon` does.

    The extension would read no sections of a property, and the words before a colon in its first line as a type.
    So a property is read like a function.
    """
    like = "function" if what in {"property", "attribute", "data"} else what
    lines[:] = GoogleDocstring(lines, Config(napoleon_use_ivar=True), app, like, name, documented, options).lines()


def hide_constructor(
    _app: Sphinx, what: str, name: str, _documented: Any, _options: Any, signature: str | None, _returned: str | None
) -> tuple[str, str] | None:
    """Show no parameters of a class: only_one makes the objects, except the commands of `only_one.testing`."""
    is_hidden = what in {"class", "exception"} and name != "only_one.testing.Guarded"
    return ("", "") if signature and is_hidden else None


def setup(app: Sphinx) -> None:
    """Listen to autodoc; Sphinx calls this function."""
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", hide_constructor)
