"""A model on the fake device, its trainer, and what becomes of its saves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.config import Options
from megatron_datastates.engine import staging
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.fake_cuda.provider import label_as_device
from tests.native.harness import KIB

SLOT = 64 * KIB
AFTER = 9  # what the optimizer's kernels write


class Trainer:
    """A model on the fake device, and the stream that trains it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.stream = cuda, cuda.new_stream()
        self._savers: list[Saver] = []
        self.model = {
            f"layer{i}": torch.randint(0, 200, (SLOT + 40 * i,), dtype=torch.uint8) for i in range(6)
        }
        self.initial = {key: tensor.clone() for key, tensor in self.model.items()}

    def saver(self, slots: int = 64, **options: Any) -> Saver:
        fixed = {"staging_memory": slots * SLOT, "slot_size": SLOT, "driver": self.cuda.path}
        self._savers.append(Saver(Options(**(fixed | options)), SaveSession()))
        return self._savers[-1]

    def optimizer_step(self, fenced: bool = True) -> None:
        """Overwrites the model, as far as the host is concerned at once."""
        if fenced:
            FENCE.wait("the optimizer step")
        for tensor in self.model.values():
            self.cuda.launch_fill(self.stream, tensor.data_ptr(), AFTER, tensor.nbytes)

    def close(self) -> None:
        for saver in self._savers:
            saver.close()
        FENCE.forget()


@pytest.fixture
def trainer(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    made = Trainer(cuda)
    monkeypatch.setattr(staging, "_current_stream", lambda device: made.stream)
    label_as_device(monkeypatch)
    yield made
    cuda.let_go()
    made.close()


def assert_published(publication: Publication, directory: Path, wanted: dict[str, torch.Tensor]) -> None:
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    checkpoint = Checkpoint.open(directory)
    for key, tensor in wanted.items():
        assert torch.equal(checkpoint.read_tensor(key), tensor), key


def failure(publication: Publication) -> str:
    assert publication.wait() is Outcome.FAILED
    return str(publication.error)


def samples_of(trainer: Trainer) -> int:
    return len(trainer.model)  # each has one
