"""No two calls share a key by accident, whatever a template has between its fields and a callable returns."""

from __future__ import annotations

import inspect

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from only_one.keys.template import compile_key
from tests.keys.calls import NAME, as_it_is, maker

NASTY = "%:{}-_/ab AFf01235789"
separators = st.text(NASTY, min_size=1, max_size=3).filter(lambda text: text[0] not in "%{}")
nasty_values = st.text(NASTY, max_size=4)


@settings(max_examples=200)
@given(separators, nasty_values, nasty_values, nasty_values, nasty_values)
@example(":", "%3A", "", ":", "")
@example("2", "%", "5", "%25", "")
@example("5", "%2", "", "%", "")
@example("::", "a:", "b", "a", ":b")
@example("A", "A", "3", "", "3A")
@example(":", "{", "", "%7B", "")
def test_no_two_calls_share_a_key(between: str, a: str, b: str, c: str, d: str) -> None:
    make = maker("{a}" + between.replace("{", "{{").replace("}", "}}") + "{b}", lambda a, b: (a, b))
    # Tricks are made of a text that is shifted over the separator.
    for first, second in [((a, b), (c, d)), ((a + between + b, c), (a, b + between + c))]:
        assert (make(*first) == make(*second)) == (first == second)
        assert not set("{}") & set(make(*first))


@given(nasty_values, nasty_values, nasty_values, nasty_values)
def test_the_name_is_kept_apart_from_the_values(name: str, value: str, other_name: str, other_value: str) -> None:
    make = compile_key("{name}:{a}", inspect.signature(lambda a: a))
    same = make(name, (value,), {}) == make(other_name, (other_value,), {})
    assert same == ((name, value) == (other_name, other_value))


@given(nasty_values, nasty_values)
@example("{", "%7B")
@example("%7B", "%257B")
@example("\ud800", "\ud801")
def test_what_a_callable_returns_is_kept_apart_and_can_be_sent(first: str, second: str) -> None:
    assume(first and second)
    make = maker(as_it_is, lambda a: a)
    assert (make(first) == make(second)) == (first == second)
    assert not set("{}") & set(make(first))
    make(first).encode()  # as redis-py does


def test_a_template_can_be_sent_whatever_it_is_written_with() -> None:
    make = compile_key("report-\udce9{{}}:{a}:\ud800", inspect.signature(lambda a: a))
    assert make(NAME, (1,), {}).encode() == b"report-%ED%B3%A9%7B%7D:1:%ED%A0%80"


def test_the_name_may_begin_a_key_of_several_fields() -> None:
    make = compile_key("{name}:{a}:{b}", inspect.signature(lambda a, b: (a, b)))
    assert make("work", (1, 2), {}) == "work:1:2"


def test_a_callable_gets_all_arguments_by_their_names() -> None:
    def key(a: int, b: int = 0, *rest: int, c: int, **others: int) -> str:
        return f"{a} {b} {rest} {c} {others}"

    def function(a: int, b: int = 2, *rest: int, c: int = 3, **others: int) -> None: ...

    make = maker(key, function)
    assert make(1) == make(a=1) == make(1, 2) == "1 2 () 3 %7B%7D"
    assert make(1, 2, 9, c=4, x=5) == "1 2 (9,) 4 %7B'x': 5%7D"
    assert maker(lambda *, b, a: f"{a}{b}", lambda a, b: (a, b))(1, 2) == "12"


def test_a_callable_that_has_other_names_gets_them_in_their_order() -> None:
    assert maker(lambda x, y: f"{x}{y}", lambda a, b: (a, b))(b=2, a=1) == "12"
    assert maker(hex, lambda number: number)(number=255) == "0xff"  # whose parameter has no name for a caller
    assert maker(max, lambda a, b: (a, b))("x", b="y") == "y"  # whose parameters nobody knows
