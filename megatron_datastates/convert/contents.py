"""Inspects a checkpoint of any format: its stored tensors, and optimizer state by parameter.

Statistics are computed part by part, so that no whole tensor is held in memory.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.convert.parts import Part, parts_of, stacked_key
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.sources.torch_dist import TorchDistTensor
from megatron_datastates.errors import MismatchError, MissingKeyError
from megatron_datastates.format.index import TensorEntry
from megatron_datastates.format.values import element_bytes
from megatron_datastates.pipeline.optimizer import StateTensor, optimizer_state
from megatron_datastates.plan.boxes import cut_box

if TYPE_CHECKING:
    import torch

PART_BYTES = 16 << 20  # of a tensor, read in one go
_AHEAD = 2  # parts that are read, or being read, while another is computed
Read = Callable[[Sequence[int], Sequence[int]], "torch.Tensor"]  # takes an offset and a shape


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
    box_files: npt.NDArray[np.integer[Any]] | None = None  # (n,), numbers of files, where they are known

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
        import torch  # here, so that commands that only look need none

        from megatron_datastates.convert.drift import KINDS, raw_bytes
        from megatron_datastates.engine.native import summarize_numbers

        if values.dtype not in KINDS:
            values = (values.abs() if values.is_complex() else values).to(torch.float64)
        finite, nans, low, high, total, squares = summarize_numbers(KINDS[values.dtype], raw_bytes(values))
        self.nans += nans
        self.infinities += values.numel() - finite - nans
        if finite == 0:
            return
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)
        self.finite += finite
        self.total += total
        self.squares += squares


def contents(source: Source, pattern: str = "*", *, optimizer: bool = False) -> list[Content]:
    """Lists tensors whose keys match a shell pattern, in order of their keys.

    Args:
        optimizer: list optimizer state by parameter instead of stored tensors.

    Raises:
        MissingKeyError: `optimizer` is set, and the checkpoint has no optimizer map.
        DataStatesError: the checkpoint cannot be read.
    """
    if optimizer:
        states = _states(source)
        return _matching(
            states, lambda key: states[key].global_shape, pattern, lambda key: _state_content(states[key])
        )
    keys = sorted(source.tensors)
    if isinstance(source, DataStatesSource):
        source.checkpoint.index.preload(keys)
    return _matching(
        keys, lambda key: source.tensors[key].global_shape, pattern, lambda key: _stored_content(source, key)
    )


def _matching(
    keys: Collection[str],
    shape_of: Callable[[str], Sequence[int]],
    pattern: str,
    content_of: Callable[[str], Content],
) -> list[Content]:
    """Returns tensors whose keys match, and else their layers that do, by the names of Megatron's modules."""
    found = []
    for key in sorted(keys):
        if fnmatch.fnmatchcase(key, pattern):
            found.append(content_of(key))
            continue
        parts = [part for part in parts_of(key, shape_of(key)) if fnmatch.fnmatchcase(part.name, pattern)]
        if parts:
            whole = content_of(key)
            found += [_layer_of(whole, part) for part in parts]
    return found


def _layer_of(whole: Content, part: Part) -> Content:
    """Returns one layer of a tensor that several are stacked in."""
    layer = part.offset[0]
    mine = (whole.offsets[:, 0] <= layer) & (layer < whole.offsets[:, 0] + whole.shapes[:, 0])
    files = None if whole.box_files is None else whole.box_files[mine]

    def read(offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return whole.read((layer, *offset), (1, *shape)).reshape(tuple(shape))

    return Content(
        part.name,
        whole.dtype,
        part.shape[1:],
        whole.offsets[mine][:, 1:],
        whole.shapes[mine][:, 1:],
        None if files is None else len(np.unique(files)),
        read,
    )


def find_content(source: Source, key: str) -> Content:
    """Returns a stored tensor, the optimizer state of a parameter, or a layer of either, by its name.

    Raises:
        MissingKeyError: there is no such tensor.
    """
    if key in source.tensors:
        return _stored_content(source, key)
    stack, layer = stacked_key(key) or ("", 0)
    if stack in source.tensors:
        return _numbered(_stored_content(source, stack), key, layer)
    states = optimizer_state(source.checkpoint) if isinstance(source, DataStatesSource) else {}
    if key in states:
        return _state_content(states[key])
    if stack in states:
        return _numbered(_state_content(states[stack]), key, layer)
    raise MissingKeyError(
        f"{source.directory} contains no tensor or object {key!r}: `datastates show` lists the keys"
    )


def _numbered(whole: Content, name: str, layer: int) -> Content:
    count = whole.global_shape[0] if whole.global_shape else 0
    if layer >= count:
        raise MissingKeyError(f"{name!r}: {whole.key!r} has {count} layers, numbered from 0")
    rest = whole.global_shape[1:]
    return _layer_of(whole, Part(name, None, (layer, *(0 for _ in rest)), (1, *rest), True))


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
    files = entry.files if isinstance(entry, TensorEntry | TorchDistTensor) else None
    count = None if files is None else len(np.unique(files))

    def read(offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return source.read_tensor(key, offset, shape)

    return Content(
        key, entry.dtype, tuple(entry.global_shape), entry.offsets, entry.shapes, count, read, files
    )


def _state_content(state: StateTensor) -> Content:
    offsets = np.array([p.shard.offset for p in state.pieces], np.int64)
    shapes = np.array([p.shard.shape for p in state.pieces], np.int64)
    files = {f for p in state.pieces for f in state.checkpoint.index.tensor(p.key).files.tolist()}
    return Content(state.key, state.dtype, state.global_shape, offsets, shapes, len(files), state.read)


def statistics(
    contents: Sequence[Content], progress: Callable[[int], None] = lambda bytes_done: None
) -> list[Statistics | None]:
    """Computes the statistics of tensors; reads the next parts meanwhile, box by box as they are stored.

    Calls `progress` with the number of bytes that are done since the last call.

    Returns:
        Those of each tensor; None for a dtype that torch cannot convert to float64.
    """
    found: list[Statistics | None] = [Statistics() for _ in contents]
    with ThreadPoolExecutor(1) as reader:
        pending: deque[tuple[int, Future[torch.Tensor]]] = deque()

        def settle(most: int) -> None:
            while len(pending) > most:
                number, part = pending.popleft()
                values, sum_of = part.result(), found[number]
                try:
                    if sum_of is not None:
                        sum_of.add(values)
                except NotImplementedError:
                    found[number] = None
                progress(values.numel() * values.element_size())

        for number, content in enumerate(contents):
            most = PART_BYTES // element_bytes(content.dtype)
            for offset, shape in zip(content.offsets.tolist(), content.shapes.tolist(), strict=True):
                for at, lengths in cut_box(offset, shape, most):
                    pending.append((number, reader.submit(content.read, at, lengths)))
                    settle(_AHEAD)
        settle(0)
    return found


def convert_dtype(values: torch.Tensor, dtype: torch.dtype, key: str) -> torch.Tensor:
    """Converts elements of the tensor `key` to `dtype`.

    Raises:
        MismatchError: torch cannot, or an imaginary part would be lost.
    """
    try:
        if not values.is_complex():
            return values.to(dtype)
    except NotImplementedError:
        pass
    name, wanted = (str(one).removeprefix("torch.") for one in (values.dtype, dtype))
    raise MismatchError(
        f"tensor {key!r}: {name} cannot be converted to {wanted}: leave out the conversion, or choose "
        "another dtype"
    )
