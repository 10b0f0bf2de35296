"""One rank's save of CUDA tensors, and what its data file holds. Needs only torch and numpy."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import torch

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import StagingEngine
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.saving.milestones import SaveContext
from megatron_datastates.pipeline.saving.plans import locate, plan_state
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.providers import base
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.collect import Collected

Tensors = dict[str, torch.Tensor]
_ORDINALS = itertools.count(1)
_PATIENCE = 120.0  # seconds


class DeviceSave:
    """A save, started by the constructor. `start_seconds`, `fence_seconds`: time that each held the host."""

    def __init__(
        self,
        engine: StagingEngine,
        folder: Path,
        tensors: Tensors,
        eager: frozenset[str] = frozenset(),
        fence_deadline: float = 60.0,
    ) -> None:
        self._save_id = SaveId(1, next(_ORDINALS))
        self._folder = folder
        self._shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        state = base.Tensors()
        for key, tensor in tensors.items():
            state.add(key, tensor, Mutability.NOW if key in eager else Mutability.AT_FENCE)
        plan = plan_state(state, [])
        self.layout = plan.layout
        options = Options(fence_deadline=fence_deadline, lazy_delay=0.0)
        self.save = RankSave(SaveContext(self._save_id, folder, 0, 1), options)
        begin = time.perf_counter()
        self.save.start(engine, plan, locate(state), Collected(state))
        self.start_seconds = time.perf_counter() - begin

    def fence(self) -> None:
        begin = time.perf_counter()
        FENCE.wait("a kernel that overwrites the tensors")
        self.fence_seconds = time.perf_counter() - begin

    def finish(self) -> None:
        """Waits until the file is durable. Raises AssertionError with the save's error."""
        deadline = time.monotonic() + _PATIENCE
        while not self.save.is_durable:
            self.save.advance()
            assert self.save.failure is None, self.save.failure
            assert time.monotonic() < deadline, f"the save is not durable after {_PATIENCE} s"
            time.sleep(0.0005)
        self.save.join()

    @property
    def bytes_staged(self) -> int:
        assert self.save._save is not None
        return int(self.save._save.status()["bytes_staged"])

    @property
    def path(self) -> Path:
        return self._folder / self._save_id.data_file_name(0)

    def stored(self) -> Tensors:
        """Reads the tensors of a finished save from its file."""
        places = dict(zip(self.layout.order, self.layout.offsets.tolist(), strict=True))
        found = {}
        for number, (key, (shape, dtype)) in enumerate(self._shapes.items()):
            found[key] = torch.empty(shape, dtype=dtype)
            if size := found[key].nbytes:
                data = np.fromfile(self.path, np.uint8, size, offset=places[number])
                found[key] = torch.from_numpy(data).view(dtype).reshape(shape)
        return found
