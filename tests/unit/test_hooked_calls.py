"""Arguments of hooked calls by name: the same as inspect's, for functions of any signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.mcore.hooks.calls import Parameters


def plain(a: Any, b: Any, c: Any = 3, d: Any = None) -> tuple[Any, ...]:
    return a, b, c, d


def named(a: Any, c: Any = 3, *, b: Any, d: Any = 4) -> tuple[Any, ...]:
    return a, b, c, d


def rest(a: Any, *more: Any, b: Any = 2, **others: Any) -> tuple[Any, ...]:
    return a, b, more, others


def by_position(a: Any, /, b: Any = 2) -> tuple[Any, ...]:
    return a, b


def nothing() -> tuple[Any, ...]:
    return ()


FUNCTIONS = [plain, named, rest, by_position, nothing]


@given(
    st.sampled_from(FUNCTIONS),
    st.lists(st.integers(10, 99), max_size=5),
    st.dictionaries(st.sampled_from("abcde"), st.integers(10, 99), max_size=4),
)
def test_arguments_are_those_that_inspect_finds(
    function: Callable[..., Any], args: list[int], kwargs: dict[str, int]
) -> None:
    parameters, signature = Parameters(function), inspect.signature(function)
    try:
        expected = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        with pytest.raises(TypeError) as caught:
            parameters.of_call(tuple(args), kwargs)
        assert str(caught.value) == str(error)
        return
    assert parameters.of_call(tuple(args), kwargs) == expected


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {}), ((1,), {"b": 2}), ((), {"b": 2, "a": 1})])
@pytest.mark.parametrize(("name", "expected"), [("b", (1, 7, 3, None)), ("d", (1, 2, 3, 7))])
def test_one_argument_is_replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], name: str, expected: tuple[Any, ...]
) -> None:
    before = dict(kwargs)
    others, named_others = Parameters(plain).replaced(args, kwargs, name, 7)
    assert plain(*others, **named_others) == expected
    assert kwargs == before
