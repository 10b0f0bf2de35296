"""Compares two checkpoints tensor by tensor and layer by layer, with few elements in memory at a time.

Objects (random generator states, arguments, the common state) are not compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_datastates.convert.parts import choose_keys, group_of, is_weight, parts_of
from megatron_datastates.convert.sinks.target import publish_on_exit
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.errors import MissingPackageError, UnsupportedFormatError
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import cut_box

# Memory for one element of both tensors: as stored, as float64, their differences and masks.
_BYTES_PER_ELEMENT = 64
_EXACT_INTEGERS = 1 << 53  # float64 holds every integer up to here
_AT_A_TIME = 1 << 16  # elements that are Python integers at a time


@dataclasses.dataclass
class Drift:
    """How far apart elements are: the ones that are finite in both checkpoints, unless stated otherwise."""

    changed: int = 0  # elements; NaN equals NaN, and 0 equals -0
    largest_absolute: float = 0.0  # |a - b|
    largest_relative: float = 0.0  # |a - b| / max(|a|, |b|): from 0 to 2
    not_finite: int = 0  # changed elements that are NaN or infinite in at least one checkpoint
    squares_apart: float = 0.0  # sum of |a - b| squared
    squares_first: float = 0.0  # sum of |a| squared over all finite elements, changed or not

    @property
    def distance(self) -> float:
        """Returns |a - b| / |a| with the elements as one vector; infinite where a is zero and b is not."""
        if not self.squares_apart:
            return 0.0
        return math.sqrt(self.squares_apart / self.squares_first) if self.squares_first else math.inf

    def add(self, other: Drift) -> None:
        """Adds the result of comparing other elements."""
        self.changed += other.changed
        self.largest_absolute = max(self.largest_absolute, other.largest_absolute)
        self.largest_relative = max(self.largest_relative, other.largest_relative)
        self.not_finite += other.not_finite
        self.squares_apart += other.squares_apart
        self.squares_first += other.squares_first


@dataclasses.dataclass
class Difference:
    """The result of a comparison. Layers are (stack, number), such as `("decoder.layers", 3)`."""

    removed: list[str] = dataclasses.field(default_factory=list)  # keys that only the first has
    added: list[str] = dataclasses.field(default_factory=list)  # keys that only the second has
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    retyped: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    tensors: dict[str, Drift] = dataclasses.field(default_factory=dict)  # all tensors that were compared
    groups: dict[str, Drift] = dataclasses.field(default_factory=dict)
    layers: dict[str, dict[tuple[str, int], Drift]] = dataclasses.field(default_factory=dict)  # by group
    # Layers of the model with tensors that were not compared: removed, added or reshaped.
    layers_apart: set[tuple[str, int]] = dataclasses.field(default_factory=set)

    @property
    def equal(self) -> bool:
        """Returns whether keys, shapes, dtypes and elements are the same."""
        apart = self.removed or self.added or self.reshaped or self.retyped
        return not apart and not any(drift.changed for drift in self.tensors.values())

    @property
    def first_layer(self) -> tuple[str, int] | None:
        """Returns the model's lowest layer with a change or with an element that only one checkpoint has."""
        changed = {layer for layer, drift in self.layers.get("model", {}).items() if drift.changed}
        changed |= self.layers_apart
        return min(changed, key=lambda layer: (layer[1], layer[0]), default=None)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Requested keys, by which of the two checkpoints has them."""

    both: list[str]
    removed: list[str]
    added: list[str]
    bytes: int  # of the first checkpoint's tensors under `both`


def choose_comparison(first: Source, second: Source, patterns: Sequence[str] = ()) -> Comparison:
    """Chooses the tensors to compare.

    Raises:
        MissingKeyError: a pattern matches nothing in either checkpoint.
    """
    where = f"{first.directory} or {second.directory}"
    chosen = choose_keys({*first.tensors, *second.tensors}, patterns, where)
    both = [key for key in chosen if key in first.tensors and key in second.tensors]
    sizes = (
        math.prod(first.tensors[key].global_shape) * element_bytes(first.tensors[key].dtype) for key in both
    )
    removed = [key for key in chosen if key not in second.tensors]
    return Comparison(both, removed, [key for key in chosen if key not in first.tensors], sum(sizes))


def diff(
    first: Source,
    second: Source,
    comparison: Comparison,
    *,
    memory_bytes: int = 1 << 30,
    progress: Callable[[int], None] = lambda bytes_done: None,
) -> Difference:
    """Compares all elements of tensors whose shapes agree, and lists the others. Raises what reading raises.

    Args:
        memory_bytes: upper limit of the memory for elements.
        progress: called with the number of bytes of the first checkpoint compared since the last call.
    """
    found = Difference(removed=comparison.removed, added=comparison.added)
    for source, keys in ((first, found.removed), (second, found.added)):
        for key in keys:
            found.layers_apart |= _layers_of_model(key, source.tensors[key].global_shape)
    for key in comparison.both:
        one, other = first.tensors[key], second.tensors[key]
        if one.dtype != other.dtype:
            found.retyped[key] = (one.dtype, other.dtype)
        if one.global_shape != other.global_shape:
            found.reshaped[key] = (one.global_shape, other.global_shape)
            for shape in found.reshaped[key]:
                found.layers_apart |= _layers_of_model(key, shape)
            progress(math.prod(one.global_shape) * element_bytes(one.dtype))
            continue
        _compare_tensor(first, second, key, found, max(memory_bytes // _BYTES_PER_ELEMENT, 1), progress)
    return found


def _layers_of_model(key: str, global_shape: Sequence[int]) -> set[tuple[str, int]]:
    if not is_weight(key):
        return set()
    return {part.layer for part in parts_of(key, global_shape) if part.layer is not None}


def _compare_tensor(
    first: Source,
    second: Source,
    key: str,
    found: Difference,
    most_elements: int,
    progress: Callable[[int], None],
) -> None:
    group = group_of(key)
    whole = found.tensors.setdefault(key, Drift())
    for part in parts_of(key, first.tensors[key].global_shape):
        drift = Drift()
        for offset, shape in cut_box(part.offset, part.shape, most_elements):
            left = first.read_tensor(key, offset, shape)
            drift.add(compare(left, second.read_tensor(key, offset, shape)))
            progress(left.nbytes)
        whole.add(drift)
        if part.layer is not None:
            layers = found.layers.setdefault(group, {})
            layers.setdefault(part.layer, Drift()).add(drift)
    found.groups.setdefault(group, Drift()).add(whole)


def compare(left: torch.Tensor, right: torch.Tensor) -> Drift:
    """Compares two tensors of the same shape as numbers, also if their dtypes differ.

    Raises:
        UnsupportedFormatError: elements differ, and torch cannot convert their dtype to float64.
    """
    if left.dtype == right.dtype and torch.equal(_raw(left), _raw(right)):
        with contextlib.suppress(UnsupportedFormatError):  # equal bits need no numbers
            return Drift(squares_first=_squares(_numbers(left)))
        return Drift()
    one, other = _numbers(left).reshape(-1), _numbers(right).reshape(-1)
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
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
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


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedFormatError(
            f"tensors of {tensor.dtype} differ, and torch cannot convert them to numbers: "
            "exclude them with --keys"
        ) from error


def require_plotting() -> Any:
    """Returns the module matplotlib.figure. Raises MissingPackageError if matplotlib is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingPackageError(
            f"a plot needs matplotlib, which cannot be imported ({error}): "
            "pip install 'megatron-datastates[plot]'"
        ) from error


def plot_drift(found: Difference, target: Path) -> None:
    """Writes a PNG of how far apart each layer is: distance and largest difference, by group and stack.

    Raises:
        MissingPackageError: matplotlib is not installed.
        StorageError: the target exists.
        OSError: the target cannot be written.
    """
    figure = require_plotting().Figure(figsize=(8, 7), layout="constrained")
    distance, absolute = figure.subplots(2, 1, sharex=True)
    for group, layers in found.layers.items():
        for stack in sorted({stack for stack, _ in layers}):
            numbers = sorted(number for name, number in layers if name == stack)
            drifts = [layers[stack, number] for number in numbers]
            distance.plot(numbers, [d.distance for d in drifts], marker=".", label=f"{group}, {stack}")
            absolute.plot(numbers, [d.largest_absolute for d in drifts], marker=".")
    distance.set_ylabel("|a - b| / |a|, of a layer's elements as one vector")
    absolute.set_ylabel("largest |a - b| of an element")
    absolute.set_xlabel("layer")
    absolute.xaxis.get_major_locator().set_params(integer=True)
    if found.layers:
        distance.legend()
    with publish_on_exit(target) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
