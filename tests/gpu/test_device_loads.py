"""Reads to a real device (tests/native has a fake one): bytes, order, no device memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_datastates.config import Options
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from megatron_datastates.plan.reads import ScheduledRead, plan_box
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider

MIB = 1 << 20
CYCLES_PER_SECOND = 1.5e9  # of torch.cuda._sleep, roughly
ROWS, COLUMNS = 4096, 3000


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(2)
    return torch.randn(ROWS, COLUMNS, device="cuda", generator=generator)


@pytest.fixture(scope="module")
def checkpoint(weight: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    saver = Saver(Options(staging_memory=64 * MIB), SaveSession())
    path = tmp_path_factory.mktemp("loads") / "c"
    publication = saver.start(path, TensorProvider({"weight": weight}, Mutability.NOW))
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    publication.join()
    yield Checkpoint.open(path, Options())
    saver.close()


def load(checkpoint: Checkpoint, target: torch.Tensor, row: int = 0, column: int = 0) -> None:
    """Reads the box of the stored tensor that begins at (row, column) into `target`."""
    box = plan_box(checkpoint.index.tensor("weight"), 0, (row, column), target.shape, target.stride())
    checkpoint.read([ScheduledRead(box, target.data_ptr(), target.is_cuda)])


def test_every_bit_arrives(checkpoint: Checkpoint, weight: torch.Tensor) -> None:
    whole = torch.zeros_like(weight)
    rows = torch.zeros(700, COLUMNS, device="cuda")
    columns = torch.zeros(ROWS, 129, device="cuda")
    strided = torch.zeros(700, 2, 500, device="cuda")[:, 0]
    transposed = torch.zeros(60, 700, device="cuda").t()
    host = torch.zeros(700, 129)
    for target, row, column in (
        (whole, 0, 0),
        (rows, 1000, 0),
        (columns, 0, 77),
        (strided, 33, 5),
        (transposed, 1, 2),
        (host, 1000, 77),
    ):
        load(checkpoint, target, row, column)
        wanted = weight[row : row + target.shape[0], column : column + target.shape[1]]
        assert torch.equal(target.to("cuda"), wanted)


def test_nothing_outside_the_target_is_written(checkpoint: Checkpoint) -> None:
    memory = torch.full((1000, 300), -7.0, device="cuda")
    load(checkpoint, memory[100:900, 50:250])
    memory[100:900, 50:250] = -7.0
    assert (memory == -7.0).all()


def test_load_runs_after_earlier_work_on_the_stream(checkpoint: Checkpoint, weight: torch.Tensor) -> None:
    target = torch.zeros_like(weight)
    load(checkpoint, target)  # allocates its memory and its stream
    torch.cuda.synchronize()
    torch.cuda._sleep(int(0.5 * CYCLES_PER_SECOND))
    target.fill_(9)
    load(checkpoint, target)
    assert torch.equal(target, weight)


def test_later_work_on_the_stream_sees_the_loaded_values(
    checkpoint: Checkpoint, weight: torch.Tensor
) -> None:
    target = torch.zeros_like(weight)
    load(checkpoint, target)
    assert torch.equal(target * 2, weight * 2)


def test_no_device_memory_is_allocated(checkpoint: Checkpoint, weight: torch.Tensor) -> None:
    target = torch.zeros_like(weight)
    load(checkpoint, target)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    for _ in range(3):
        load(checkpoint, target)
    assert torch.cuda.max_memory_allocated() == allocated
    assert free - torch.cuda.mem_get_info()[0] <= 2 << 20  # the driver takes pages of 2 MiB


def test_a_bad_block_does_not_reach_the_device(weight: torch.Tensor, tmp_path: Path) -> None:
    saver = Saver(Options(staging_memory=64 * MIB), SaveSession())
    publication = saver.start(tmp_path / "c", TensorProvider({"weight": weight}, Mutability.NOW))
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    publication.join()
    saver.close()
    checkpoint = Checkpoint.open(tmp_path / "c", Options())
    with checkpoint.file_path(0).open("r+b") as file:
        file.seek(5 * MIB + 17)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    target = torch.zeros_like(weight)
    with pytest.raises(Exception, match=r"corrupt.*byte offset 5242880"):
        load(checkpoint, target)
    first = (5 * MIB - 4096) // 4  # elements before the bad block
    assert not target.view(-1)[first : first + MIB // 4].any()
