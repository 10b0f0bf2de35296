"""States to be saved in one process, and what they look like bit by bit.

A test that only needs a checkpoint calls `ds.save(state, directory, **SMALL)`. What is below that front door
(`State`, `new_saver`, `save`) is for tests of what it does not offer; each says what that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_datastates.config import MIB, Options
from megatron_datastates.format.values import DTYPES
from megatron_datastates.pipeline.publication import Publication
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.providers.base import Entry, Mutability, StateProvider, StateReader
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.tensors import TensorProvider

SMALL = {"staging_memory": 8 * MIB, "slot_size": MIB}  # options for ds.save and its likes: many chunks
OPTIONS = Options(**SMALL)
KNOWN_DTYPES = [name for name in DTYPES if hasattr(torch, name)]  # of this torch; older ones have fewer


class State:
    """Tensors and objects that change at the same time.

    The front door saves objects as `NOW` only, and refuses an optimizer map, and an object with a tensor's
    name: Megatron's states have all of these.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        objects: Mapping[str, Any] | None = None,
        mutability: Mutability = Mutability.NOW,
    ) -> None:
        self._tensors, self._objects, self._mutability = dict(tensors), dict(objects or {}), mutability

    def entries(self) -> Iterator[Entry]:
        yield from TensorProvider(self._tensors, self._mutability).entries()
        for key, value in self._objects.items():
            yield ObjectSource(key, value, self._mutability)

    def restore(self, reader: StateReader) -> None:
        raise NotImplementedError


class Chained:
    """Several providers as one without a name of its own."""

    def __init__(self, *providers: StateProvider) -> None:
        self._providers = providers

    def entries(self) -> Iterator[Entry]:
        for provider in self._providers:
            yield from provider.entries()

    def restore(self, reader: StateReader) -> None:
        raise NotImplementedError


def new_saver(**changes: Any) -> Saver:
    """Makes a saver with a session of its own: another run, for the files that it meets.

    The front door's savers share one session and live until the process ends; tests close this one, and look
    at the steps of its saves.

    Args:
        changes: options that differ from OPTIONS.
    """
    return Saver(dataclasses.replace(OPTIONS, **changes), SaveSession())


def save(
    saver: Saver,
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any] | None = None,
    mutability: Mutability = Mutability.NOW,
) -> Publication:
    """Saves and waits for the outcome, which may be a failure."""
    publication = saver.start(directory, State(tensors, objects, mutability))
    publication.wait()
    return publication


def bits(tensor: torch.Tensor) -> bytes:
    """Returns the elements in row-major order as bytes, so that NaNs and signed zeros compare, too."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Makes a tensor of any bits that the dtype can have."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize * torch.Size(shape).numel()
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).reshape(shape)


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("data-*.bin"))


def flip(path: Path, at: int) -> None:
    """Flips a bit of a file in its place: others that look meanwhile see its whole size."""
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1]))


class Yields:
    """A provider of these entries, which restores nothing."""

    def __init__(self, *entries: Entry) -> None:
        self._entries = entries
        self.was_restored = False

    def entries(self) -> Iterator[Entry]:
        yield from self._entries

    def restore(self, reader: Any) -> None:
        self.was_restored = True
