"""A state provider for tests: host tensors that say they lie on a device."""

from __future__ import annotations

import pytest
import torch

from megatron_datastates.engine import staging
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import Structure, TensorProvider


def label_as_device(patch: pytest.MonkeyPatch) -> None:
    """All tensors of saves are on the fake device from now on, and it is the current one."""
    patch.setattr(Structure, "devices", lambda self: [0] * len(self.keys))
    patch.setattr(staging, "_current_device", lambda: 0)


class DeviceTensors(TensorProvider):
    """For the fake driver, whose device pointers are host pointers, behind label_as_device.

    Holds the only reference.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], mutability: Mutability = Mutability.AT_FENCE
    ) -> None:
        super().__init__(tensors, mutability)
        self.by_key = tensors
