"""Transformations: state providers around state providers, which store the same state in other bytes.

    Compressed(inner)                        byte planes and zstd; restored bit by bit
    Cast(inner, torch.bfloat16, "*exp_avg*") floating tensors in a smaller dtype: for archives

They nest, also as values of trees: `{"model": ..., "optimizer": Compressed(Cast(...))}`. Both work on parts
of a MiB: no tensor is ever whole in host memory beside the original. A load knows from the checkpoint how
its bytes are stored, so a restore needs no transformation.

What is transformed is read by the save's finishing thread: tensors that stay unchanged until the next fence
make that fence wait until they are encoded, and what may change at once holds the trainer that long.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from megatron_datastates.errors import CHANGED_TOO_EARLY, DataStatesError, MismatchError, OptionError
from megatron_datastates.format.codecs import PLANES, ZSTD, require_zstandard
from megatron_datastates.format.strides import footprint_elements
from megatron_datastates.format.tail import Kind
from megatron_datastates.providers.base import (
    CopyBudget,
    EmptyObjects,
    Encoding,
    Entry,
    Mutability,
    Place,
    StateProvider,
    StateReader,
    TailSource,
    Tensors,
    TensorSource,
    Write,
    bad_mutability,
)
from megatron_datastates.providers.collect import kind_of, notes_of
from megatron_datastates.providers.named import Tree
from megatron_datastates.providers.objects import empty_sources
from megatron_datastates.providers.samples import Samples
from megatron_datastates.providers.tensors import check_dtype, dtype_name

logger = logging.getLogger(__name__)
_PART_BYTES = 1 << 20  # of a tensor, in host memory at a time
_HIGHEST_LEVEL = 19
_NO_NUMBERS = ("float8_e8m0fnu", "float4_e2m1fn_x2")  # no sign and no zero; two numbers in a byte


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedTensor:
    """One tensor that is written to the tail part by part, cast or encoded.

    Attributes:
        dtype: of the elements as they are stored.
        written_after: an event on the tensor's device that precedes every read of it; None on the host.
        samples: of its bytes when the save began, if they are compared.
    """

    source: TensorSource
    dtype: torch.dtype
    encoding: Encoding | None = None
    written_after: Any = None
    samples: Samples | None = None

    kind = Kind.FRAGMENT

    @property
    def key(self) -> str:
        return self.source.key

    @property
    def mutability(self) -> Mutability:
        return self.source.mutability

    @property
    def storage(self) -> int:
        """The storage that is read, as an UntypedStorage's `_cdata`."""
        return int(self.source.tensor.untyped_storage()._cdata)

    @property
    def place(self) -> Place:
        """Where the tensor lies in the global one."""
        shape = tuple(self.source.tensor.shape)
        return self.source.place or Place(shape, (0,) * len(shape), shape)

    def renamed(self, key: str) -> EncodedTensor:
        """Returns the same tensor under another key (collect.renamed)."""
        return dataclasses.replace(self, source=self.source._replace(key=key))

    def snapshot(self, budget: CopyBudget) -> None:
        """Returns None: the tensor is encoded before the save returns."""

    def write(self, write: Write) -> None:
        """Passes on the stored elements, row-major. DataStatesError: they have changed too early."""
        tensor = self.source.tensor
        for number, part in enumerate(_parts(tensor, _PART_BYTES // tensor.element_size())):
            write(self._host_bytes(part))
            if self.samples is not None and not self.samples.are_same(number):
                raise DataStatesError(
                    f"tensor {self.key!r} {CHANGED_TOO_EARLY} before it was read to be cast or compressed. "
                    "Code that changes it must call `megatron_datastates.fence()` first"
                )

    def _host_bytes(self, part: torch.Tensor) -> memoryview:
        if part.is_cuda:
            part = _READER.read(part, self.written_after)
        stored = part.to(self.dtype).contiguous().resolve_conj().resolve_neg()
        if self.dtype is not self.source.tensor.dtype:
            _check_room(self.key, part, stored)
        # Not `reshape`, as a tensor of one element may have any stride, and then torch views no bytes of it.
        data = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8)
        return memoryview(np.from_dlpack(data))  # after `numpy()`, the program could not resize its storage


def _check_room(key: str, values: torch.Tensor, stored: torch.Tensor) -> None:
    """Raises MismatchError if the dtype of `stored` has no room for a number of `values`.

    It becomes infinite or no number there, or else, as infinity does, the largest one: torch 2.11 makes NaN
    of what float8_e4m3fn has no room for, and 2.14 makes 448.
    """
    if not values.numel():
        return
    low, high = values.aminmax()  # far faster than `isfinite`
    limits = torch.finfo(stored.dtype)
    if -limits.max <= low.item() and high.item() <= limits.max:
        return
    rounded_up_to = limits.max + limits.eps * 2.0 ** math.floor(math.log2(limits.max)) / 2
    fits = stored.float().isfinite()
    lost = (values.isfinite() & ~fits) | ((values.abs() > rounded_up_to) & fits)
    if lost.any():
        found, dtype = values[lost][0].item(), dtype_name(stored.dtype)
        raise MismatchError(
            f"tensor {key!r} cannot be cast to {dtype}: it has {found:g}, expected numbers from "
            f"-{limits.max:g} to {limits.max:g}; choose another dtype, or patterns that leave this tensor out"
        )


def sampled(source: TailSource) -> TailSource:
    """Returns a source that compares samples of its bytes with those of now, if it is one that can.

    Called on the trainer's thread, for tensors that must not change before the next fence.
    """
    if not isinstance(source, EncodedTensor) or source.mutability is not Mutability.AT_FENCE:
        return source
    tensor = source.source.tensor
    if tensor.is_cuda or not tensor.numel() or not tensor.is_contiguous():
        return source
    return dataclasses.replace(source, samples=Samples(tensor, _PART_BYTES))


def encoded_tensor(source: TensorSource) -> EncodedTensor:
    """Returns a tensor for the tail, to be read from now on. Called on the trainer's thread."""
    tensor = source.tensor
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch.nn.UninitializedParameter):
        raise MismatchError(
            f"tensor {source.key!r} is a {type(tensor).__qualname__}: expected a torch.Tensor with values"
        )
    check_dtype(source.key, tensor.dtype)
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise MismatchError(
            f"tensor {source.key!r} has layout {tensor.layout} and is on {tensor.device}: expected a strided "
            "tensor on the host or on a CUDA device"
        )
    _check_elements(source)
    event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
    # Detached now: a parameter may be given other memory before it is read, as in saves without encoding.
    return EncodedTensor(source._replace(tensor=tensor.detach()), tensor.dtype, None, event)


def _check_elements(source: TensorSource) -> None:
    """Raises MismatchError if a tensor has not as many elements in memory as its place says."""
    tensor, place = source.tensor, source.place
    if place is not None and math.prod(place.shape) != tensor.numel():
        raise MismatchError(
            f"tensor {source.key!r} has shape {tuple(tensor.shape)}: expected as many elements as its place "
            f"of shape {tuple(place.shape)}"
        )
    if tensor.numel() and not (tensor.untyped_storage().nbytes() and tensor.data_ptr()):
        raise MismatchError(
            f"tensor {source.key!r} has no memory of its own: it was offloaded, or is a "
            f"{type(tensor).__qualname__} that wraps other tensors; bring it back first, or save those, as a "
            "ds.Shard where they are parts, or a DTensor with megatron_datastates.dcp"
        )
    needed = tensor.storage_offset() + footprint_elements(tensor.shape, tensor.stride())
    found = tensor.untyped_storage().nbytes()
    if tensor.numel() and needed * tensor.itemsize > found:
        raise MismatchError(
            f"tensor {source.key!r} ends beyond its storage of {found} bytes: that was resized; resize it "
            "back before the save"
        )


def _parts(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yields parts of at most `most` elements: all elements in row-major order."""
    if tensor.numel() <= most:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(most)
    else:
        rows = max(most // max(tensor[0].numel(), 1), 1)
        for part in tensor.split(rows):
            yield from _parts(part[0], most) if part.numel() > most else [part]


class _DeviceReader(threading.local):
    """What a thread reads device memory with: a stream and page-locked memory of its own.

    The current stream of a thread that has chosen none is the one that most programs train on. A copy there
    would wait for all that the trainer has launched, and what it launches next for the copy.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._memory: torch.Tensor | None = None

    def read(self, part: torch.Tensor, written_after: Any) -> torch.Tensor:
        """Returns a copy of at most _PART_BYTES in host memory, read after that event."""
        # On the tensor's device: else leaving the stream would make a context on device 0, in every process.
        with torch.cuda.device(part.device):
            if part.device not in self._streams:
                self._streams[part.device] = torch.cuda.Stream(part.device)
            if self._memory is None:
                self._memory = torch.empty(_PART_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            stream = self._streams[part.device]
            with torch.cuda.stream(stream):
                if written_after is not None:
                    stream.wait_event(written_after)
                # Not in the copy: torch resolves views on the host then, and does not wait for the bytes.
                part = part.resolve_conj().resolve_neg()
                copy = self._memory[: part.nbytes].view(part.dtype).view(part.shape)
                copy.copy_(part, non_blocking=True)
            stream.synchronize()
            return copy.clone()


_READER = _DeviceReader()


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedSource:
    """An object or a stream of another provider, encoded."""

    source: TailSource
    encoding: Encoding

    @property
    def key(self) -> str:
        return self.source.key

    @property
    def mutability(self) -> Mutability:
        return self.source.mutability

    @property
    def kind(self) -> Kind:
        return self.source.kind

    def snapshot(self, budget: CopyBudget) -> EncodedSource | None:
        snapshot = self.source.snapshot(budget)
        return None if snapshot is None else EncodedSource(snapshot, self.encoding)

    def write(self, write: Write) -> bytes | None:
        return self.source.write(write)


class _Transformation:
    """A provider that changes the entries of an inner one, or of a tree of providers."""

    def __init__(self, inner: StateProvider | Mapping[Any, Any], mutability: Mutability) -> None:
        if not isinstance(mutability, Mutability):
            raise bad_mutability("a mapping's tensors", mutability)
        self.inner: StateProvider = inner if isinstance(inner, StateProvider) else Tree(inner, mutability)

    def _entries(self) -> Iterator[TensorSource | TailSource]:
        for entry in self.inner.entries():
            if isinstance(entry, Tensors):
                yield from entry.sources()
            elif isinstance(entry, EmptyObjects):
                yield from empty_sources(entry)
            else:
                yield entry

    def restore(self, reader: StateReader) -> None:
        """Restores what is inside; the checkpoint says how it was stored."""
        self.inner.restore(reader)


class Compressed(_Transformation):
    """The state of another provider, compressed without loss.

    Tensors and arrays are split into byte planes first: exponents of neighbors are alike, mantissas are not.
    Whether it pays depends on the disk: docs/benchmarks.md has measurements.

    Args:
        inner: a state provider, or nested mappings as for `ds.save`.
        level: of zstd, from 1 (fast) to 19 (small).
        mutability: how long the tensors of a mapping stay unchanged.

    Raises:
        MissingPackageError: the package zstandard is not installed.
        OptionError: there is no such level, or `mutability` is none.
    """

    def __init__(
        self,
        inner: StateProvider | Mapping[Any, Any],
        *,
        level: int = 1,
        mutability: Mutability = Mutability.NOW,
    ) -> None:
        super().__init__(inner, mutability)
        require_zstandard()
        if type(level) is not int or not 1 <= level <= _HIGHEST_LEVEL:
            raise OptionError(f"zstd has no level {level!r}: expected 1 (fast) to {_HIGHEST_LEVEL} (small)")
        self._level = level

    @property
    def notes(self) -> dict[str, str]:
        """What people who look at the checkpoint should know."""
        return {**notes_of(self.inner), "compressed": f"byte planes and zstd, level {self._level}"}

    def entries(self) -> Iterator[Entry]:
        for entry in self._entries():
            source = encoded_tensor(entry) if isinstance(entry, TensorSource) else entry
            if isinstance(source, EncodedTensor):
                encoding = Encoding(PLANES, source.dtype.itemsize, self._level)
                yield dataclasses.replace(source, encoding=encoding)
            else:
                yield EncodedSource(source, Encoding(ZSTD, 0, self._level))


class Cast(_Transformation):
    """The state of another provider, with floating-point tensors rounded to a smaller dtype.

    For archives: a load converts back, but what was rounded off is lost, so training that resumes from it
    does not continue as if it had not stopped. Objects and streams are stored as they are. A finite number
    that the dtype has no room for fails the save.

    Args:
        inner: a state provider, or nested mappings as for `ds.save`.
        dtype: what is stored, such as torch.bfloat16.
        keys: which tensors are cast: one of these patterns matches the key, as in a shell.
        mutability: how long the tensors of a mapping stay unchanged.

    Raises:
        OptionError: `dtype` is not a floating-point dtype, has no sign or no zero, or packs several numbers
            in a byte; or `mutability` is none.
    """

    def __init__(
        self,
        inner: StateProvider | Mapping[Any, Any],
        dtype: torch.dtype,
        *keys: str,
        mutability: Mutability = Mutability.NOW,
    ) -> None:
        super().__init__(inner, mutability)
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if not is_float or dtype_name(dtype) in _NO_NUMBERS:
            raise OptionError(
                f"tensors cannot be cast to {dtype!r}: expected a floating-point dtype with a sign and a "
                "zero, one number an element, such as torch.bfloat16"
            )
        if not all(isinstance(pattern, str) for pattern in keys):
            raise OptionError(f"tensors cannot be chosen by {keys!r}: expected patterns, such as '*exp_avg*'")
        self._dtype, self._keys = dtype, keys or ("*",)

    @property
    def notes(self) -> dict[str, str]:
        """What people who look at the checkpoint should know."""
        text = f"{', '.join(self._keys)} to {dtype_name(self._dtype)}: what was rounded off is lost"
        return {**notes_of(self.inner), "cast": text}

    def entries(self) -> Iterator[Entry]:
        for entry in self._entries():
            if isinstance(entry, TensorSource) and self._casts(entry.key, entry.tensor.dtype):
                entry = encoded_tensor(entry)
            if isinstance(entry, EncodedTensor) and self._casts(entry.key, entry.dtype):
                entry = dataclasses.replace(entry, dtype=self._dtype)
            yield entry

    def _casts(self, key: str, dtype: torch.dtype) -> bool:
        is_larger = dtype.is_floating_point and dtype.itemsize > self._dtype.itemsize
        return is_larger and any(fnmatch.fnmatchcase(key, pattern) for pattern in self._keys)

    def restore(self, reader: StateReader) -> None:
        """Restores what is inside, with the values that were stored, and says so."""
        logger.warning("restoring %s: %s", kind_of(self), self.notes["cast"])
        super().restore(reader)
