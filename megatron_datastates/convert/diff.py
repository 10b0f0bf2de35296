"""Compares two checkpoints tensor by tensor and layer by layer, with few elements in memory at a time.

Objects (random generator states, arguments, the common state) are not compared.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
_PART_BYTES = 16 << 20  # of a tensor, compared in one go
_THREADS = 2  # which compare while the next part is read: each is about as fast as a disk
_AHEAD = 3  # parts that were read and not compared yet


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
    most_elements = max(memory_bytes // _BYTES_PER_ELEMENT // (_AHEAD + 1), 1)
    with ThreadPoolExecutor(_THREADS) as pool:
        pending: deque[tuple[str, Part, int, Future[Drift]]] = deque()

        def settle(most: int) -> None:  # in the order of the parts, so that sums are the same in every run
            while len(pending) > most:
                key, part, size, drift = pending.popleft()
                _add(found, key, part, drift.result())
                progress(size)

        for key in comparison.both:
            if not _is_comparable(first, second, key, found):
                progress(_bytes_of(first, key, comparison.parts[key]))
                continue
            found.tensors[key] = Drift()
            found.groups.setdefault(group_of(key), Drift())
            most = min(most_elements, _PART_BYTES // element_bytes(first.tensors[key].dtype))
            for part in comparison.parts[key]:
                for offset, shape in cut_box(part.offset, part.shape, most):
                    left, right = (source.read_tensor(key, offset, shape) for source in (first, second))
                    pending.append((key, part, left.nbytes, pool.submit(compare, left, right)))
                    settle(_AHEAD)
        settle(0)
    return found


def _is_comparable(first: Source, second: Source, key: str, found: Difference) -> bool:
    """Notes what differs besides elements; returns whether these can be compared."""
    one, other = first.tensors[key], second.tensors[key]
    if one.dtype != other.dtype:
        found.retyped[key] = (one.dtype, other.dtype)
    if one.global_shape == other.global_shape:
        return True
    found.reshaped[key] = (one.global_shape, other.global_shape)
    for shape in found.reshaped[key]:
        found.layers_apart |= _layers_of_model(key, shape)
    return False


def _layers_of_model(key: str, global_shape: Sequence[int]) -> set[tuple[str, int]]:
    if not is_weight(key):
        return set()
    return {part.layer for part in parts_of(key, global_shape) if part.layer is not None}


def _add(found: Difference, key: str, part: Part, drift: Drift) -> None:
    """Adds what a part of a tensor has contributed."""
    group = group_of(key)
    found.tensors[key].add(drift)
    found.groups[group].add(drift)
    if part.layer is not None:
        found.layers.setdefault(group, {}).setdefault(part.layer, Drift()).add(drift)


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
