"""A call to its key: key templates and callables, their fields, and the MD5 of arguments. Nothing of Redis."""

from .fields import MakeKey
from .template import compile_key, has_field

__all__ = ["MakeKey", "compile_key", "has_field"]
