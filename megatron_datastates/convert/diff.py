"""Compares two checkpoints tensor by tensor and layer by layer, with few elements in memory at a time.

Objects (random generator states, arguments, the common state) are not compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from megatron_datastates.convert.batches import AHEAD, Cut, batches
from megatron_datastates.convert.drift import Drift, compare_all
from megatron_datastates.convert.parts import Part, choose_parts, group_of, is_weight, parts_of, place_of
from megatron_datastates.convert.views import Tensors
from megatron_datastates.convert.workers import ahead
from megatron_datastates.format.values import element_bytes

if TYPE_CHECKING:
    import torch

THREADS = 2  # which compare while the next batch is read: each is about as fast as a disk
_READ_AHEAD = 2  # batches that are read, or being read, before they are compared


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
    # By group, modules without a layer, such as `embedding.word_embeddings`.
    modules: dict[str, dict[str, Drift]] = dataclasses.field(default_factory=dict)
    # Layers of the model with tensors that were not compared: removed, added or reshaped.
    layers_apart: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    # Keys in either checkpoint, where all of it was to be compared.
    objects_not_compared: int = 0
    streams_not_compared: int = 0

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


def choose_comparison(first: Tensors, second: Tensors, patterns: Sequence[str] = ()) -> Comparison:
    """Chooses the tensors to compare.

    Raises:
        MissingKeyError: a pattern matches nothing in either checkpoint.
    """
    shapes = {
        key: (first if key in first.tensors else second).tensors[key].global_shape
        for key in first.tensors.keys() | second.tensors.keys()
    }
    chosen = choose_parts(shapes, patterns, f"{first.directory} or {second.directory}")
    both = [key for key in chosen if key in first.tensors and key in second.tensors]
    parts = {key: choice.parts for key, choice in chosen.items()}
    total = sum(bytes_of(first, key, parts[key]) for key in both)
    removed = [key for key in chosen if key not in second.tensors]
    return Comparison(both, removed, [key for key in chosen if key not in first.tensors], parts, total)


def bytes_of(source: Tensors, key: str, parts: Sequence[Part]) -> int:
    """Returns the size of parts of a tensor."""
    return sum(math.prod(part.shape) for part in parts) * element_bytes(source.tensors[key].dtype)


def diff(
    first: Tensors,
    second: Tensors,
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
    difference = Difference(removed=comparison.removed, added=comparison.added)
    for source, keys in ((first, difference.removed), (second, difference.added)):
        for key in keys:
            difference.layers_apart |= _layers_of_model(key, source.tensors[key].global_shape)
    compared: dict[str, list[Part]] = {}
    for key in comparison.both:
        if not _is_comparable(first, second, key, difference):
            progress(bytes_of(first, key, comparison.parts[key]))
            continue
        difference.tensors[key] = Drift()
        difference.groups.setdefault(group_of(key), Drift())
        compared[key] = comparison.parts[key]
    # A thread for each checkpoint: both are read at the same time, and each in its order.
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other, ThreadPoolExecutor(THREADS) as pool:

        def reads() -> Iterator[tuple[list[Cut], Future[list[torch.Tensor]], Future[list[torch.Tensor]]]]:
            for batch in batches(dict.fromkeys(compared, first), compared, memory_bytes):
                slices = [cut.slice for cut in batch]
                yield batch, one.submit(first.read_tensors, slices), other.submit(second.read_tensors, slices)

        def comparisons() -> Iterator[tuple[list[Cut], Future[list[Drift]]]]:
            for batch, left, right in ahead(reads(), _READ_AHEAD - 1):
                yield batch, pool.submit(compare_all, left.result(), right.result())

        # In the order of the batches, so that sums are the same in every run.
        for batch, drifts in ahead(comparisons(), AHEAD - (_READ_AHEAD - 1)):
            for cut, drift in zip(batch, drifts.result(), strict=True):
                _add(difference, cut.key, cut.part, drift)
            progress(sum(cut.bytes for cut in batch))
    return difference


def _is_comparable(first: Tensors, second: Tensors, key: str, difference: Difference) -> bool:
    """Notes what differs besides elements; returns whether these can be compared."""
    one, other = first.tensors[key], second.tensors[key]
    if one.dtype != other.dtype:
        difference.retyped[key] = (one.dtype, other.dtype)
    if one.global_shape == other.global_shape:
        return True
    difference.reshaped[key] = (one.global_shape, other.global_shape)
    for shape in difference.reshaped[key]:
        difference.layers_apart |= _layers_of_model(key, shape)
    return False


def _layers_of_model(key: str, global_shape: Sequence[int]) -> set[tuple[str, int]]:
    if not is_weight(key):
        return set()
    return {part.layer for part in parts_of(key, global_shape) if part.layer is not None}


def _add(difference: Difference, key: str, part: Part, drift: Drift) -> None:
    """Adds what a part of a tensor has contributed."""
    group = group_of(key)
    difference.tensors[key].add(drift)
    difference.groups[group].add(drift)
    if part.layer is not None:
        difference.layers.setdefault(group, {}).setdefault(part.layer, Drift()).add(drift)
    else:
        difference.modules.setdefault(group, {}).setdefault(place_of(key, None), Drift()).add(drift)
