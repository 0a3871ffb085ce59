"""The arguments of a call by parameter, defaults applied: `f(1)`, `f(a=1)` and `f(1, b=<default>)` are one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from inspect import BoundArguments, Parameter, Signature
from typing import Any

_MISSING: Any = object()
_GATHERING = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

Get = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class Arguments:
    """Reads the calls of one signature. `Signature.bind` is right and slow, so it is asked only where it must be.

    Attributes:
        call: the signature.
        names: the parameters, in order.
        gathers: there is a `*args` or a `**kwargs` among them.
    """

    def __init__(self, call: Signature) -> None:
        parameters = list(call.parameters.values())
        self.call = call
        self.names = [parameter.name for parameter in parameters]
        self.gathers = any(parameter.kind in _GATHERING for parameter in parameters)
        self._positions = sum(parameter.kind in _BY_POSITION for parameter in parameters)
        self._index = {each.name: index for index, each in enumerate(parameters) if each.kind in _BY_NAME}
        self._defaults = [_MISSING if each.default is Parameter.empty else each.default for each in parameters]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundArguments:
        """The call with every default applied.

        Raises:
            TypeError: if the function could not be called so.
        """
        bound = self.call.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def example(self) -> BoundArguments:
        """A call that gives every parameter, to try against another signature."""
        bound = self.call.bind_partial()
        bound.arguments = {name: None for name in self.names if self.call.parameters[name].kind not in _GATHERING}
        return bound

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Every parameter's value, in the order of the signature.

        Raises:
            TypeError: if the function could not be called so.
        """
        given = len(args)
        if not self.gathers and given <= self._positions:
            values = self._defaults.copy()
            values[:given] = args
            for name, value in kwargs.items():
                index = self._index.get(name)
                if index is None or index < given:
                    break
                values[index] = value
            else:
                if not any(value is _MISSING for value in values):
                    return values
        return list(self.bind(args, kwargs).arguments.values())

    def position(self, name: str) -> int:
        """Where a parameter stands among the positional arguments; further than any stands if it never does."""
        return self.names.index(name) if self.call.parameters[name].kind in _BY_POSITION else sys.maxsize

    def getter(self, name: str) -> Get:
        """A function that gives one parameter's value and looks at no other."""
        position = self.names.index(name)
        kind = self.call.parameters[name].kind
        default = self._defaults[position]
        if kind in _GATHERING:
            return lambda args, kwargs: self.bind(args, kwargs).arguments[name]
        in_order, by_name = kind in _BY_POSITION, kind in _BY_NAME

        def get(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if in_order and position < len(args):
                return args[position]
            value = kwargs.get(name, default) if by_name else default
            return self.bind(args, kwargs).arguments[name] if value is _MISSING else value

        return get
