"""The arguments of a call by parameter, defaults applied: `f(1)`, `f(a=1)` and `f(1, b=<default>)` are one call."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import BoundArguments, Parameter, Signature
from typing import Any

BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Arguments:
    """Reads the calls of one signature. `Signature.bind` is slow, so it is used only where nothing else is right.

    Attributes:
        call: the signature.
    """

    def __init__(self, call: Signature) -> None:
        self.call = call
        parameters = list(call.parameters.values())
        positions = sum(each.kind in BY_POSITION for each in parameters)
        self._others = [_others(parameters[given:]) for given in range(positions + 1)]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundArguments:
        """The call with every default applied.

        Raises:
            TypeError: if the function could not be called so.
        """
        bound = self.call.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Every parameter's value, in the order of the signature.

        Raises:
            TypeError: if the function could not be called so.
        """
        if len(args) < len(self._others):
            names, defaults, required, allowed = self._others[len(args)]
            if required <= kwargs.keys() <= allowed:
                return [*args, *map(kwargs.get, names, defaults)]
        return list(self.bind(args, kwargs).arguments.values())


def _others(parameters: list[Parameter]) -> tuple[list[str], list[Any], frozenset[str], frozenset[str]]:
    """The names and defaults of parameters that are not given by position, and which must, and may, be given by name.

    `*args` and `**kwargs` must be, but may not: calls of a function that has them are bound.
    """
    required = frozenset(each.name for each in parameters if each.default is Parameter.empty)
    allowed = frozenset(each.name for each in parameters if each.kind in BY_NAME)
    return [each.name for each in parameters], [each.default for each in parameters], required, allowed
