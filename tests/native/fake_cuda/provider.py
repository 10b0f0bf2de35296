"""A state provider for tests: host tensors that say they lie on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from megatron_datastates.providers.base import Mutability, ObjectSource
from megatron_datastates.providers.tensors import TensorMemory, tensor_source


class DeviceTensors:
    """For the fake driver, whose device pointers are host pointers. Holds the only reference."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], mutability: Mutability = Mutability.AT_FENCE
    ) -> None:
        self.by_key = tensors
        self._mutability = mutability

    def tensors(self) -> Iterator[TensorMemory]:
        for key, tensor in self.by_key.items():
            yield dataclasses.replace(tensor_source(key, tensor, self._mutability), device=0)

    def objects(self) -> Iterator[ObjectSource]:
        return iter(())
