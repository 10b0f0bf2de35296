"""A state provider for tests: host tensors that say they lie on a device."""

from __future__ import annotations

import torch

from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider


class DeviceTensors(TensorProvider):
    """For the fake driver, whose device pointers are host pointers. Holds the only reference.

    The test has Structure.devices say that all are on one.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], mutability: Mutability = Mutability.AT_FENCE
    ) -> None:
        super().__init__(tensors, mutability)
        self.by_key = tensors
