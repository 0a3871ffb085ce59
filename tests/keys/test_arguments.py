"""A call has the same key however its arguments are given, and another one where they differ."""

from __future__ import annotations

from typing import Any

import pytest

from only_one import OnlyOneError
from tests.keys.calls import importer, maker


@pytest.mark.parametrize("template", ["{md5}", "{a:md5}:{rest:md5}:{others:md5}"])
def test_every_kind_of_parameter(template: str) -> None:
    def mixed(a: int, /, b: int = 2, *rest: int, c: int, d: int = 4, **others: int) -> None: ...

    key = maker(template, mixed)
    assert key(1, c=3) == key(1, 2, c=3, d=4) == key(1, b=2, d=4, c=3)
    assert key(1, 2, 5, c=3, x=1, y=2) == key(1, 2, 5, y=2, x=1, c=3)
    calls = [key(1, c=3), key(2, c=3), key(1, 2, 5, c=3), key(1, 2, 5, 6, c=3), key(1, c=3, x=1), key(1, c=3, y=1)]
    calls += [key(1, c=3, a=1), key(1, c=3, x=1, y=2)]
    assert len(set(calls)) == len(calls)
    key = maker("{md5}", lambda a, b: (a, b))
    assert key(1, 2) == key(b=2, a=1) != key(2, 1)


def test_a_positional_only_name_may_come_again_as_keyword() -> None:
    def mixed(a: int = 0, /, **others: int) -> None: ...

    key = maker("{a}:{others[a]}", mixed)
    assert key(1, a=2) == "1:2"
    assert maker("{a}", mixed)(a=2) == "0"
    with pytest.raises(TypeError):
        maker("{md5}", lambda a, /: a)(a=2)
    with pytest.raises(TypeError):
        maker("{md5}", lambda a, *, b=2, c=3: (a, b, c))(1, 2)


@pytest.mark.parametrize("template", ["{a}", "{a:md5}", "{a.real}:{name}"])
def test_a_key_of_one_parameter_does_not_look_at_the_rest(template: str) -> None:
    key = maker(template, lambda a, b, *rest, **others: (a, b, rest, others))
    assert key(1, object(), object(), x=object()) == key(1, 2) == key(1) == key(a=1)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((), {"b": 1}), ((1, 2, 3, 4), {}), ((1,), {"nope": 1}), ((1,), {"a": 1})], ids=repr
)
def test_a_call_that_could_not_be_made_has_no_key(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError, match=r": the decorated function takes \(a, b, c, d\)$") as raised:
        maker("{md5}", importer)(*args, **kwargs)
    assert not isinstance(raised.value, OnlyOneError)
