"""How far apart the elements of two tensors are.

Floating-point elements are compared by the native module in one pass; the rest, and pairs of different
dtypes, by torch: a dozen passes over float64 copies take ten times as long as reading from a disk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.engine.native import NumberKind, compare_numbers

_EXACT_INTEGERS = 1 << 53  # float64 holds every integer up to here
_AT_A_TIME = 1 << 16  # elements that are Python integers at a time
KINDS = {
    torch.float64: NumberKind.FLOAT64,
    torch.float32: NumberKind.FLOAT32,
    torch.float16: NumberKind.FLOAT16,
    torch.bfloat16: NumberKind.BFLOAT16,
}


@dataclasses.dataclass
class Drift:
    """How far apart elements are: the ones that are finite in both checkpoints, unless stated otherwise.

    Where elements have a dtype that torch cannot convert to numbers, `squares_first` is NaN, and where these
    changed, all but the counts.
    """

    changed: int = 0  # elements; NaN equals NaN, and 0 equals -0
    largest_absolute: float = 0.0  # |a - b|
    largest_relative: float = 0.0  # |a - b| / max(|a|, |b|): from 0 to 2
    not_finite: int = 0  # changed elements that are NaN or infinite in at least one checkpoint
    squares_apart: float = 0.0  # sum of |a - b| squared
    squares_first: float = 0.0  # sum of |a| squared over all finite elements, changed or not

    @property
    def distance(self) -> float:
        """Returns |a - b| / |a| with the elements as one vector; infinite where a is zero and b is not."""
        if not self.squares_apart or math.isnan(self.squares_apart):
            return self.squares_apart
        return math.sqrt(self.squares_apart / self.squares_first) if self.squares_first else math.inf

    @property
    def norm(self) -> float:
        """Returns |a - b| with the elements as one vector."""
        return math.sqrt(self.squares_apart)

    def add(self, other: Drift) -> None:
        self.changed += other.changed
        self.largest_absolute = _larger(self.largest_absolute, other.largest_absolute)
        self.largest_relative = _larger(self.largest_relative, other.largest_relative)
        self.not_finite += other.not_finite
        self.squares_apart += other.squares_apart
        self.squares_first += other.squares_first


def _larger(one: float, other: float) -> float:
    """Returns the maximum; NaN if one is, wherever it stands."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def compare(left: torch.Tensor, right: torch.Tensor) -> Drift:
    """Compares two tensors of the same shape as numbers, also if their dtypes differ.

    Where torch cannot convert a dtype to float64, elements are compared by their bytes; those of different
    dtypes all count as changed then.
    """
    if left.dtype == right.dtype and left.dtype in KINDS:
        return Drift(*compare_numbers(KINDS[left.dtype], raw_bytes(left), raw_bytes(right)))
    one = _numbers(left)
    if one is not None and left.dtype == right.dtype and np.array_equal(raw_bytes(left), raw_bytes(right)):
        return Drift(squares_first=_squares(one))
    other = _numbers(right)
    if one is None or other is None:
        squares_first = _squares(one) if one is not None else math.nan if left.numel() else 0.0
        return dataclasses.replace(_compare_bytes(left, right), squares_first=squares_first)
    apart, changed = (one - other).abs(), _are_different(one, other)
    where, gaps = _rounded(left, right, one, other)
    apart[where], changed[where] = gaps, gaps != 0
    squares_first = _squares(one)
    finite = changed & one.isfinite() & other.isfinite()
    one, other, apart = one[finite], other[finite], apart[finite]
    relative = apart / torch.maximum(one.abs(), other.abs())
    count = int(changed.sum())
    return Drift(
        count,
        float(apart.max()) if apart.numel() else 0.0,
        float(relative.max()) if apart.numel() else 0.0,
        count - apart.numel(),
        float(apart.square().sum()),
        squares_first,
    )


def compare_all(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[Drift]:
    """Compares tensors pair by pair."""
    return [compare(*pair) for pair in zip(left, right, strict=True)]


def _compare_bytes(left: torch.Tensor, right: torch.Tensor) -> Drift:
    changed = left.numel()
    if left.dtype == right.dtype:
        one, other = (raw_bytes(side).reshape(-1, side.itemsize) for side in (left, right))
        changed = int((one != other).any(axis=1).sum())
    return Drift(changed, math.nan, math.nan, squares_apart=math.nan) if changed else Drift()


def _are_different(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns which elements differ. NaN equals NaN, for complex numbers in each component."""
    if one.is_complex() or other.is_complex():
        halves = (torch.view_as_real(numbers.to(torch.complex128)) for numbers in (one, other))
        return _are_different(*halves).any(dim=-1)
    return (one != other) & ~(one.isnan() & other.isnan())


def _rounded(
    left: torch.Tensor, right: torch.Tensor, one: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where float64 may have rounded integers, and |a - b| computed exactly there."""
    if one.is_complex() or other.is_complex() or not (_is_integer(left) or _is_integer(right)):
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(
            0, dtype=torch.float64, device="cpu"
        )
    large = torch.maximum(one.abs(), other.abs()) >= _EXACT_INTEGERS
    (where,) = (large & one.isfinite() & other.isfinite()).nonzero(as_tuple=True)
    # A float beside such an integer is an integer, or so much smaller that its fraction is negligible.
    sides = [tensor.reshape(-1).numpy() if _is_integer(tensor) else numbers.numpy()
             for tensor, numbers in ((left, one), (right, other))]  # fmt: skip
    if left.dtype == right.dtype:
        where = where[torch.from_numpy((sides[0] != sides[1])[where.numpy()])]
    places = (where[at : at + _AT_A_TIME].numpy() for at in range(0, len(where), _AT_A_TIME))
    pairs = (pair for at in places for pair in zip(*(side[at].tolist() for side in sides), strict=True))
    gaps = np.fromiter((abs(int(a) - int(b)) for a, b in pairs), np.float64, len(where))
    return where, torch.from_numpy(gaps)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _squares(numbers: torch.Tensor) -> float:
    """Returns the sum of the squares of finite elements."""
    return float(torch.where(numbers.isfinite(), numbers.abs(), 0).square().sum())


def raw_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Returns the bytes of a tensor's elements in row-major order, without a copy if they lie so."""
    found: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _numbers(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the elements on one axis, in float64 or complex128; None if torch cannot convert them."""
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).reshape(-1)
    except (RuntimeError, NotImplementedError):  # torch's, of dtypes that it can only store
        return None
