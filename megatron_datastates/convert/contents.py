"""Inspects a checkpoint of any format: its stored tensors, and optimizer state by parameter.

Statistics are computed part by part, so that no whole tensor is held in memory.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.errors import MismatchError, MissingKeyError
from megatron_datastates.format.index import TensorEntry
from megatron_datastates.format.values import element_bytes
from megatron_datastates.pipeline.optimizer import StateTensor, optimizer_state
from megatron_datastates.plan.boxes import cut_box

PART_BYTES = 16 << 20  # of a tensor, read in one go
Read = Callable[[Sequence[int], Sequence[int]], torch.Tensor]  # takes an offset and a shape


@dataclasses.dataclass(frozen=True)
class Content:
    """One tensor for inspection: n boxes of d dimensions tile it."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: npt.NDArray[np.int64]  # (n, d), elements
    shapes: npt.NDArray[np.int64]  # (n, d), elements
    files: int | None  # how many hold it; None where the format does not say
    read: Read

    @property
    def bytes(self) -> int:
        """Returns the size of all elements."""
        return math.prod(self.global_shape) * element_bytes(self.dtype)


@dataclasses.dataclass
class Statistics:
    """Statistics of a tensor's elements.

    `finite` elements are neither NaN nor infinite; minimum, maximum, mean and norm are of these alone. They
    are computed in float64, so integers beyond 2^53 are rounded; complex numbers count by absolute value.
    """

    finite: int = 0
    nans: int = 0
    infinities: int = 0
    minimum: float | None = None
    maximum: float | None = None
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float | None:
        """Returns the mean of the finite elements, or None if there are none."""
        return self.total / self.finite if self.finite else None

    @property
    def norm(self) -> float:
        """Returns the square root of the sum of squares."""
        return math.sqrt(self.squares)

    def add(self, values: torch.Tensor) -> None:
        """Adds elements to the statistics."""
        plain = values.abs() if values.is_complex() else values
        numbers = plain.reshape(-1).to(torch.float64)
        finite = numbers[torch.isfinite(numbers)]
        nans = int(torch.isnan(numbers).sum())
        self.nans += nans
        self.infinities += numbers.numel() - finite.numel() - nans
        if finite.numel() == 0:
            return
        low, high = finite.min().item(), finite.max().item()
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)
        self.finite += finite.numel()
        self.total += finite.sum().item()
        self.squares += finite.square().sum().item()


def contents(source: Source, pattern: str = "*", *, optimizer: bool = False) -> list[Content]:
    """Lists tensors whose keys match a shell pattern, in order of their keys.

    Args:
        optimizer: list optimizer state by parameter instead of stored tensors.

    Raises:
        MissingKeyError: `optimizer` is set, and the checkpoint has no optimizer map.
        DataStatesError: the checkpoint cannot be read.
    """
    if optimizer:
        return [
            _state_content(one) for key, one in _states(source).items() if fnmatch.fnmatchcase(key, pattern)
        ]
    keys = sorted(key for key in source.tensors if fnmatch.fnmatchcase(key, pattern))
    if isinstance(source, DataStatesSource):
        source.checkpoint.index.preload(keys)
    return [_stored_content(source, key) for key in keys]


def find_content(source: Source, key: str) -> Content:
    """Returns a stored tensor or else the optimizer state of a parameter. Raises MissingKeyError."""
    if key in source.tensors:
        return _stored_content(source, key)
    states = optimizer_state(source.checkpoint) if isinstance(source, DataStatesSource) else {}
    if key not in states:
        raise MissingKeyError(
            f"{source.directory} contains no tensor or object {key!r}: `datastates show` lists the keys"
        )
    return _state_content(states[key])


def _states(source: Source) -> dict[str, StateTensor]:
    states = optimizer_state(source.checkpoint) if isinstance(source, DataStatesSource) else {}
    if not states:
        raise MissingKeyError(
            f"{source.directory} has no optimizer map: list its stored tensors, which include any optimizer "
            "state, without --optimizer"
        )
    return states


def _stored_content(source: Source, key: str) -> Content:
    entry = source.tensors[key]
    files = len(np.unique(entry.files)) if isinstance(entry, TensorEntry) else None

    def read(offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return source.read_tensor(key, offset, shape)

    return Content(key, entry.dtype, tuple(entry.global_shape), entry.offsets, entry.shapes, files, read)


def _state_content(state: StateTensor) -> Content:
    offsets = np.array([p.shard.offset for p in state.pieces], np.int64)
    shapes = np.array([p.shard.shape for p in state.pieces], np.int64)
    files = {f for p in state.pieces for f in state.checkpoint.index.tensor(p.key).files.tolist()}
    return Content(state.key, state.dtype, state.global_shape, offsets, shapes, len(files), state.read)


def statistics(content: Content, progress: Callable[[int], None] = lambda bytes_done: None) -> Statistics:
    """Computes the statistics of a tensor, reading it box by box as it is stored.

    Calls `progress` with the number of bytes read since the last call.
    """
    found = Statistics()
    for offset, shape in zip(content.offsets.tolist(), content.shapes.tolist(), strict=True):
        for at, lengths in cut_box(offset, shape, PART_BYTES // element_bytes(content.dtype)):
            found.add(content.read(at, lengths))
            progress(math.prod(lengths) * element_bytes(content.dtype))
    return found


def convert_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts to `dtype`. Raises MismatchError where torch cannot, or an imaginary part would be lost."""
    try:
        if not values.is_complex():
            return values.to(dtype)
    except NotImplementedError:
        pass
    name, wanted = (str(one).removeprefix("torch.") for one in (values.dtype, dtype))
    raise MismatchError(
        f"{name} cannot be converted to {wanted}: leave out the conversion, or choose another dtype"
    )
