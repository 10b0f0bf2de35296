"""Copies keep to the device's allocations, as its driver demands, on the fake one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_datastates.config import Options
from megatron_datastates.engine import staging
from megatron_datastates.engine._native import Milestone
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.session import SaveSession
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.fake_cuda.provider import DeviceTensors, label_as_device
from tests.native.harness import (
    KIB,
    MIB,
    Copy,
    Engines,
    Save,
    finish_read,
    make_reader,
    random_bytes,
    save_whole,
    start_read,
)
from tests.native.harness import Request as ReadRequest

SLOT = 64 * KIB


def fill(memory: np.ndarray, seed: int) -> np.ndarray:
    memory[:] = random_bytes(len(memory), seed)
    return memory


def test_neighbours_of_different_storages_are_copied_apart(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    first, second = (fill(cuda.allocate(10 * KIB), seed) for seed in (1, 2))
    assert second.ctypes.data == first.ctypes.data + 10 * KIB
    copies = [
        Copy(memory, at, device=True, storage=storage)
        for at, memory, storage in ((0, first, 1), (10 * KIB, second, 2))
    ]
    save_whole(device_engines(), tmp_path / "data", copies, stream=cuda.new_stream())


def test_the_driver_refuses_a_copy_that_leaves_an_allocation(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """Shows that the test above can fail: with one storage named for both, they are one copy."""
    first, second = (fill(cuda.allocate(10 * KIB), seed) for seed in (1, 2))
    copies = [Copy(first, 0, device=True), Copy(second, 10 * KIB, device=True)]
    save = Save(device_engines(), tmp_path / "data", copies, stream=cuda.new_stream())
    assert "invalid argument" in save.failure()


def test_neighbours_of_one_storage_are_one_copy(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    memory = fill(cuda.allocate(2 * SLOT), 1)
    copies = [Copy(memory[i : i + KIB], i, device=True, storage=7) for i in range(0, len(memory), KIB)]
    save_whole(device_engines(tripwire=False), tmp_path / "data", copies, stream=cuda.new_stream())
    assert [call.split()[1] for call in cuda.calls("cuMemcpyDtoHAsync")] == [str(SLOT)] * 2


@pytest.mark.parametrize("rows", [2, 40, 3000])
def test_rows_that_end_with_their_allocation_do_not_leave_it(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path, rows: int
) -> None:
    memory = fill(cuda.allocate(rows * 96), 1)  # of each row the last 32 bytes, so that nothing follows
    view = memory.reshape(rows, 96)[:, 64:]
    cuda.allocate(KIB)
    save_whole(device_engines(), tmp_path / "data", [Copy(view, 0, device=True)], stream=cuda.new_stream())


def test_memory_that_is_freed_too_early_is_noticed(
    cuda: FakeCuda, device_engines: Engines, tmp_path: Path
) -> None:
    """The other tests show that sources are kept until their copies are done."""
    memory, stream = fill(cuda.allocate(SLOT), 1), cuda.new_stream()
    cuda.hold_stream(stream)
    save = Save(
        device_engines(tripwire=False), tmp_path / "data", [Copy(memory, 0, device=True)], stream=stream
    )
    save.expect(Milestone.ENQUEUED)
    cuda.free(memory)
    cuda.release_stream(stream)
    save.finish()
    assert cuda.take_misuse() == ["misuse: device memory was freed before its copy"]


def test_reads_into_neighbouring_allocations_stay_apart(cuda: FakeCuda, tmp_path: Path) -> None:
    data = random_bytes(4 * KIB, 3)
    (tmp_path / "data").write_bytes(data.tobytes())
    first, second = (cuda.allocate(2 * KIB) for _ in range(2))
    requests = [
        ReadRequest(at, 2 * KIB, memory.ctypes.data, device=True)
        for at, memory in ((0, first), (2 * KIB, second))
    ]
    reader = make_reader(driver=cuda.path)
    job = start_read(
        reader, [(str(tmp_path / "data"), len(data), b"")], requests, cuda.new_stream(), adopt=False
    )
    assert finish_read(job)[2] == ""
    assert np.array_equal(np.concatenate([first, second]), data)


def test_tensors_in_neighbouring_allocations_are_saved_whole(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch's storages down: two tensors that follow each other in memory and in the file."""
    label_as_device(monkeypatch)
    stream = cuda.new_stream()
    monkeypatch.setattr(staging, "_current_stream", lambda device: stream)
    blocks = [cuda.allocate(MIB) for _ in range(3)]
    tensors = {f"t{i}": torch.frombuffer(block, dtype=torch.uint8) for i, block in enumerate(blocks)}
    views = {f"v{i}": tensors["t2"][i * 4096 : (i + 1) * 4096] for i in range(8)}
    for tensor in tensors.values():
        tensor.random_(0, 256)
    state = {"t0": tensors["t0"], "t1": tensors["t1"]} | views
    saver = Saver(
        Options(staging_memory=8 * MIB, slot_size=4 * MIB, driver=cuda.path, tripwire=False), SaveSession()
    )
    publication = saver.start(tmp_path, DeviceTensors(state))
    FENCE.wait("the test")
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    saver.close()
    stored = Checkpoint.open(tmp_path)
    for key, tensor in state.items():
        assert torch.equal(stored.read_tensor(key), tensor), key
    sizes = sorted(int(call.split()[1]) for call in cuda.calls("cuMemcpyDtoHAsync"))
    assert sizes == [8 * 4096, MIB, MIB]  # views of one storage are one copy
