"""Compares two checkpoints tensor by tensor and layer by layer, with few elements in memory at a time.

Objects (random generator states, arguments, the common state) are not compared.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_datastates.convert.drift import Drift, compare
from megatron_datastates.convert.parts import Part, choose_parts, group_of, is_weight, parts_of
from megatron_datastates.convert.sinks.target import publish_on_exit
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.errors import MissingPackageError
from megatron_datastates.format.values import element_bytes
from megatron_datastates.plan.boxes import cut_box

# Memory for one element of both tensors: as stored, as float64, their differences and masks.
_BYTES_PER_ELEMENT = 64


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
    parts: dict[str, list[Part]]  # of the first checkpoint's tensors, by key: those to compare
    bytes: int  # of these parts of tensors under `both`


def choose_comparison(first: Source, second: Source, patterns: Sequence[str] = ()) -> Comparison:
    """Chooses the tensors to compare.

    Raises:
        MissingKeyError: a pattern matches nothing in either checkpoint.
    """
    where = f"{first.directory} or {second.directory}"

    def shape_of(key: str) -> Sequence[int]:
        return (first if key in first.tensors else second).tensors[key].global_shape

    chosen = choose_parts({*first.tensors, *second.tensors}, shape_of, patterns, where)
    both = [key for key in chosen if key in first.tensors and key in second.tensors]
    parts = {key: choice.parts for key, choice in chosen.items()}
    total = sum(_bytes_of(first, key, parts[key]) for key in both)
    removed = [key for key in chosen if key not in second.tensors]
    return Comparison(both, removed, [key for key in chosen if key not in first.tensors], parts, total)


def _bytes_of(source: Source, key: str, parts: Sequence[Part]) -> int:
    return sum(math.prod(part.shape) for part in parts) * element_bytes(source.tensors[key].dtype)


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
            progress(_bytes_of(first, key, comparison.parts[key]))
            continue
        most = max(memory_bytes // _BYTES_PER_ELEMENT, 1)
        _compare_tensor(first, second, key, comparison.parts[key], found, most, progress)
    return found


def _layers_of_model(key: str, global_shape: Sequence[int]) -> set[tuple[str, int]]:
    if not is_weight(key):
        return set()
    return {part.layer for part in parts_of(key, global_shape) if part.layer is not None}


def _compare_tensor(
    first: Source,
    second: Source,
    key: str,
    parts: Sequence[Part],
    found: Difference,
    most_elements: int,
    progress: Callable[[int], None],
) -> None:
    group = group_of(key)
    whole = found.tensors.setdefault(key, Drift())
    for part in parts:
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
