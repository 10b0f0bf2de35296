"""The restore half of state providers: each reads what the checkpoint has under its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_datastates.errors import MissingKeyError
from megatron_datastates.pipeline.loading.filling import fill
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.providers.base import Place, StateProvider, TensorSource
from megatron_datastates.providers.collect import restore_failed


class PrefixReader:
    """A StateReader of one checkpoint, for the provider with a certain name."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = f"{name}." if name else ""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        index = self._checkpoint.index
        return {key: index.describe(self._prefix + key)[1] for key in self._own(index.tensors)}

    @property
    def objects(self) -> list[str]:
        return self._own(self._checkpoint.index.objects)

    @property
    def streams(self) -> list[str]:
        return self._own(self._checkpoint.index.streams)

    def _own(self, keys: Mapping[str, Any]) -> list[str]:
        return [key[len(self._prefix) :] for key in keys if key.startswith(self._prefix)]

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoint has nothing under this name."""
        index = self._checkpoint.index
        return not any(map(self._own, (index.tensors, index.objects, index.streams)))

    def read_into(self, targets: Mapping[str, torch.Tensor | TensorSource]) -> None:
        """Fills tensors in place. Raises as `fill`."""
        fill(
            self._checkpoint,
            {self._prefix + key: _place_and_tensor(target) for key, target in targets.items()},
        )

    def read_object(self, key: str) -> Any:
        """Returns an object. Raises as Checkpoint.read_objects."""
        return self._checkpoint.read_object(self._prefix + key)

    def open_stream(self, key: str) -> Iterator[memoryview]:
        """Yields the buffers of a stream. Raises as Checkpoint.open_stream."""
        return self._checkpoint.open_stream(self._prefix + key)

    def below(self, name: str) -> PrefixReader:
        below = PrefixReader(self._checkpoint, name)
        below._prefix = self._prefix + below._prefix
        return below


def _place_and_tensor(target: torch.Tensor | TensorSource) -> tuple[Place, torch.Tensor]:
    tensor, place = (target, None) if isinstance(target, torch.Tensor) else (target.tensor, target.place)
    shape = tuple(tensor.shape)
    if place is None:
        return Place(shape, (0,) * len(shape), shape), tensor
    if shape != place.shape and _sizes(shape) == _sizes(place.shape):  # as in a save
        tensor = tensor.detach().view(place.shape)
    return place, tensor


def _sizes(shape: Sequence[int]) -> list[int]:
    """Returns the sizes of the dimensions with more or less than one element."""
    return [size for size in shape if size != 1]


def restore(checkpoint: Checkpoint, providers: Mapping[str, StateProvider]) -> None:
    """Restores each provider from what the checkpoint has under its name.

    Raises:
        ProviderError: the `restore` of a provider raised an exception; it is the cause.
        MissingKeyError: the checkpoint has nothing under the name of one of them.
    """
    require_stored(checkpoint, providers)
    for name, provider in providers.items():
        try:
            provider.restore(PrefixReader(checkpoint, name))
        except Exception as error:
            raise restore_failed(name, provider, error) from error


def require_stored(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raises MissingKeyError if the checkpoint has nothing under the name of one of these providers."""
    saved = {provider.name for provider in checkpoint.manifest.providers}  # some with nothing to store
    for name in names:
        is_there = name in saved or not name or checkpoint.manifest.is_repaired
        if not is_there and PrefixReader(checkpoint, name).is_empty:
            raise MissingKeyError(
                f"{checkpoint.directory} has no state of the provider {name!r}: it was saved without it; "
                "load without this provider, or under the name that it was saved with"
            )
