"""Inspects a checkpoint of any format: its stored tensors, and optimizer state by parameter.

What only some commands or formats need is imported when it is used: `show` answers at once.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_datastates.convert.parts import Part, is_state, parts_of, stacked_key
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.errors import MismatchError, MissingKeyError, similar_keys
from megatron_datastates.format.directory import BACKEND
from megatron_datastates.format.values import element_bytes, is_optimizer_map

if TYPE_CHECKING:
    import torch

    from megatron_datastates.pipeline.loading.optimizer import StateTensor
    from megatron_datastates.plan.coverage import StoredBoxes

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
        return math.prod(self.global_shape) * element_bytes(self.dtype)


def contents(source: Source, pattern: str = "*", *, optimizer: bool = False) -> list[Content]:
    """Lists tensors whose keys match a shell pattern, in order of their keys.

    Args:
        optimizer: list optimizer state by parameter instead of stored tensors.

    Raises:
        MissingKeyError: `optimizer` is set, and nothing that is read says which parameter state is of.
        DataStatesError: the checkpoint cannot be read.
    """
    states = _optimizer_state(source) if optimizer else {}
    keys = sorted(filter(is_state, source.tensors) if optimizer else source.tensors)
    if optimizer and not keys and not states:
        if any(map(is_optimizer_map, source.objects)):
            raise MissingKeyError(
                f"{source.directory} is a checkpoint of {source.format}, and maps of optimizers are read of "
                f"{BACKEND} only: convert it to {BACKEND}, which keeps its map, or list its stored tensors "
                "without --optimizer"
            )
        raise MissingKeyError(
            f"{source.directory} has no optimizer map: list its stored tensors, which include any optimizer "
            "state, without --optimizer"
        )
    source.preload(keys)
    return _matching(
        # Of some optimizers of a chain in buckets, of others by parameter.
        {**{key: source.tensors[key] for key in keys}, **states},
        pattern,
        lambda key: _state_content(states[key]) if key in states else _stored_content(source, key),
    )


def _matching(
    tensors: Mapping[str, StoredBoxes], pattern: str, content_of: Callable[[str], Content]
) -> list[Content]:
    """Returns tensors whose keys match, and else their layers that do, by the names of Megatron's modules."""
    contents = []
    for key in sorted(tensors):
        if fnmatch.fnmatchcase(key, pattern):
            contents.append(content_of(key))
            continue
        parts = parts_of(key, tensors[key].global_shape)
        parts = [part for part in parts if fnmatch.fnmatchcase(part.name, pattern)]
        if parts:
            whole = content_of(key)
            contents += [_layer_of(whole, part) for part in parts]
    return contents


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
        _count(files),
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
    states = _optimizer_state(source)
    if key in states:
        return _state_content(states[key])
    if stack in states:
        return _numbered(_state_content(states[stack]), key, layer)
    stored = sorted([*source.objects, *source.tensors])
    below = [repr(one) for one in stored if one.startswith((f"{key}/", f"{key}."))]  # Megatron's objects
    similar = (
        f" (it has {' and '.join(below[:2])})" if below else similar_keys(key, [*source.tensors, *states])
    )
    raise MissingKeyError(
        f"{source.directory} contains no tensor or object {key!r}{similar}: `datastates show` lists the keys"
    )


def _numbered(whole: Content, name: str, layer: int) -> Content:
    count = whole.global_shape[0] if whole.global_shape else 0
    if layer >= count:
        raise MissingKeyError(f"{name!r}: {whole.key!r} has {count} layers, numbered from 0")
    rest = whole.global_shape[1:]
    return _layer_of(whole, Part(name, None, (layer, *(0 for _ in rest)), (1, *rest), True))


def _optimizer_state(source: Source) -> Mapping[str, StateTensor]:
    from megatron_datastates.pipeline.loading.optimizer import optimizer_state

    return {} if source.checkpoint is None else optimizer_state(source.checkpoint)


def _count(files: npt.NDArray[np.integer[Any]] | None) -> int | None:
    return None if files is None else len(set(files.tolist()))


def _stored_content(source: Source, key: str) -> Content:
    entry, files = source.tensors[key], source.files_of(key)

    def read(offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return source.read_tensor(key, offset, shape)

    return Content(
        key, entry.dtype, tuple(entry.global_shape), entry.offsets, entry.shapes, _count(files), read, files
    )


def _state_content(state: StateTensor) -> Content:
    files = {f for p in state.pieces for f in state.checkpoint.index.tensor(p.key).files.tolist()}
    return Content(
        state.key, state.dtype, state.global_shape, state.offsets, state.shapes, len(files), state.read
    )


def convert_dtype(values: torch.Tensor, dtype: torch.dtype, key: str) -> torch.Tensor:
    """Converts elements of the tensor `key` to `dtype`.

    Raises:
        MismatchError: torch cannot, or an imaginary part would be lost.
    """
    try:
        if not values.is_complex():
            return values.to(dtype)
    except NotImplementedError:  # torch's, of dtypes that it can only store
        pass
    name, wanted = (str(one).removeprefix("torch.") for one in (values.dtype, dtype))
    raise MismatchError(
        f"tensor {key!r}: {name} cannot be converted to {wanted}: leave out the conversion, or choose "
        "another dtype"
    )
