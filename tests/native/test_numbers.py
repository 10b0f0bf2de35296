"""Comparing and summarizing elements: the native module against numpy, on values chosen to be hard."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_datastates.engine.native import NumberKind, compare_numbers, summarize_numbers

KINDS = {
    NumberKind.FLOAT64: torch.float64,
    NumberKind.FLOAT32: torch.float32,
    NumberKind.FLOAT16: torch.float16,
    NumberKind.BFLOAT16: torch.bfloat16,
}
BLOCK = 1024  # elements, as in cuda/numbers/numbers.cc
HARD = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    6e-8,
    -5.96e-8,
    65504.0,
    1e-40,
    3e38,
    1e-300,
    1e300,
    math.inf,
    -math.inf,
    math.nan,
]
cases = st.tuples(
    st.sampled_from(list(KINDS)),
    st.sampled_from([0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 3 * BLOCK), st.sampled_from(HARD), st.sampled_from(HARD)), max_size=8),
    st.sampled_from(["equal", "few", "all"]),
)


def make(case) -> tuple[NumberKind, torch.Tensor, torch.Tensor]:
    """Returns two tensors that differ in none, a few or all elements, with hard values at some places."""
    kind, count, seed, places, differing = case
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(count, generator=generator, dtype=torch.float64)
    right = left.clone()
    if differing == "all":
        right = torch.randn(count, generator=generator, dtype=torch.float64)
    if differing == "few":
        right[::701] *= 1.01
    for at, one, other in places:
        if at < count:
            left[at], right[at] = one, other
    return kind, left.to(KINDS[kind]), right.to(KINDS[kind])


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


@given(cases)
@settings(deadline=None, max_examples=300)
def test_a_comparison_is_that_of_numpy_in_float64(case):
    kind, left, right = make(case)
    a, b = left.double().numpy(), right.double().numpy()
    with np.errstate(all="ignore"):
        changed = (a != b) & ~(np.isnan(a) & np.isnan(b))
        finite = changed & np.isfinite(a) & np.isfinite(b)
        gaps, scale = np.abs(a - b)[finite], np.maximum(np.abs(a), np.abs(b))[finite]
        expected = (
            int(changed.sum()),
            gaps.max(initial=0.0),
            (gaps / scale).max(initial=0.0),
            int((changed & ~finite).sum()),
            np.square(gaps).sum(),
            np.square(a[np.isfinite(a)]).sum(),
        )
    assert compare_numbers(kind, raw(left), raw(right)) == pytest.approx(expected, rel=1e-12, abs=0)


@given(cases)
@settings(deadline=None, max_examples=300)
def test_statistics_are_those_of_numpy_in_float64(case):
    kind, values, _ = make(case)
    numbers = values.double().numpy()
    with np.errstate(all="ignore"):
        finite = numbers[np.isfinite(numbers)]
        found = summarize_numbers(kind, raw(values))
        assert found[:2] == (len(finite), int(np.isnan(numbers).sum()))
        assert found[2:4] == ((finite.min(), finite.max()) if len(finite) else (0.0, 0.0))
        assert found[4] == pytest.approx(finite.sum(), rel=1e-9, abs=1e-9 * np.abs(finite).sum())
        assert found[5] == pytest.approx(np.square(finite).sum(), rel=1e-12)


@pytest.mark.parametrize("kind", [NumberKind.FLOAT16, NumberKind.BFLOAT16])
def test_every_half_is_converted_exactly(kind):
    for value in torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(KINDS[kind]).split(1):
        found = summarize_numbers(kind, raw(value))
        number = float(value)
        if math.isfinite(number):
            assert found == (1, 0, number, number, number, number * number)
        else:
            assert found[:2] == (0, int(math.isnan(number)))


def test_a_whole_block_of_each_half_is_converted_as_one_element_is():
    """Blocks take another path than single elements."""
    halves = torch.arange(0x7C00, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    for at in range(0, len(halves) - BLOCK, BLOCK):
        block = halves[at : at + BLOCK]
        assert summarize_numbers(NumberKind.FLOAT16, raw(block))[2:4] == (float(block[0]), float(block[-1]))
        apart = compare_numbers(NumberKind.FLOAT16, raw(block), raw(torch.zeros(BLOCK).half()))
        assert apart[:2] == (int(block.count_nonzero()), float(block[-1]))


def test_unequal_lengths_and_parts_of_elements_are_refused():
    with pytest.raises(ValueError, match="as many bytes"):
        compare_numbers(NumberKind.FLOAT32, np.zeros(4, np.uint8), np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="whole elements"):
        summarize_numbers(NumberKind.FLOAT32, np.zeros(5, np.uint8))
