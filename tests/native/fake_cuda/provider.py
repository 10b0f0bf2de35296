"""A state provider for tests: host tensors that say they lie on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_datastates.engine import staging
from megatron_datastates.pipeline.saving.plans import Structure
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider
from tests.native.fake_cuda.driver import FakeCuda


def label_as_device(patch: pytest.MonkeyPatch) -> None:
    """Makes all tensors of saves lie on the fake device from now on, which is the current one."""
    begin = staging.StagingEngine.begin

    def begin_on_device(self: Any, path: Any, header: Any, *args: Any, **kwargs: Any) -> Any:
        owners = kwargs.get("owners", args[3] if len(args) > 3 else ())
        for storage in owners:
            if FakeCuda.current is not None and storage.nbytes():
                FakeCuda.current.adopt(storage.data_ptr(), storage.nbytes())
        return begin(self, path, header, *args, **kwargs)

    patch.setattr(staging.StagingEngine, "begin", begin_on_device)
    patch.setattr(Structure, "devices", lambda self: [0] * len(self.keys))
    patch.setattr(staging, "_current_device", lambda: 0)


class DeviceTensors(TensorProvider):
    """Tensors for the fake driver, whose device pointers are host pointers; used with label_as_device.

    Holds the only reference.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], mutability: Mutability = Mutability.AT_FENCE
    ) -> None:
        super().__init__(tensors, mutability)
        self.by_key = tensors
