"""Signatures of functions whose annotations may have names that are defined later, or for type checkers only."""

import inspect
import sys
from typing import Any

_OPTIONS: dict[str, Any] = {}
"""From Python 3.14 on, ``inspect.signature`` would evaluate annotations, and raise ``NameError`` for such a name."""

if sys.version_info >= (3, 14):
    from annotationlib import Format

    _OPTIONS["annotation_format"] = Format.FORWARDREF


def signature(function: Any) -> inspect.Signature:
    """The signature of a function; in it, an annotation that cannot be evaluated yet is a ``ForwardRef``.

    Raises:
        TypeError: for an object that cannot be called.
        ValueError: for a builtin without a signature.
    """
    return inspect.signature(function, **_OPTIONS)
