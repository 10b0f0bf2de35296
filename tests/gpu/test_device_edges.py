"""Tensors at the ends of their allocations, adjacent allocations, thousands of tensors, and a synchronize
between a save's start and its first poll: where a real driver may differ from the fake one.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import StagingEngine
from tests.gpu.device_save import DeviceSave, Tensors

KIB, MIB = 1 << 10, 1 << 20


class Allocations:
    """Separate allocations of device memory from the driver: torch would put many tensors into one."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._addresses: list[int] = []

    def take(self, size: int) -> torch.Tensor:
        """Returns a new allocation as a tensor of random bytes."""
        address = ctypes.c_ulonglong()
        code = self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        assert code == 0, f"cuMemAlloc failed with CUDA error {code}"
        self._addresses.append(address.value)
        tensor = torch.as_tensor(_Interface(address.value, size), device="cuda")
        assert tensor.data_ptr() == address.value  # not a copy
        return tensor.random_()

    def free(self) -> None:
        torch.cuda.synchronize()
        for address in self._addresses:
            self._driver.cuMemFree_v2(ctypes.c_ulonglong(address))


class _Interface:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 2,
        }


@pytest.fixture
def allocations() -> Iterator[Allocations]:
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # the context
    made = Allocations()
    yield made
    made.free()


def assert_saved(engine: StagingEngine, folder: Path, tensors: Tensors) -> None:
    """Saves them, overwrites them after the fence, and compares the file with what they were."""
    wanted = {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
    save = DeviceSave(engine, folder, tensors)
    save.fence()
    for tensor in tensors.values():
        tensor.zero_()
    save.finish()
    for key, found in save.stored().items():
        assert torch.equal(found, wanted[key]), key


@pytest.mark.parametrize("size", [2 * MIB, 20 * MIB, 2 * MIB + 512], ids=["2 MiB", "20 MiB", "odd"])
@pytest.mark.parametrize("width", [512, 4096 - 64, 7])
def test_a_strided_tensor_may_end_with_its_allocation(
    engine: StagingEngine, tmp_path: Path, allocations: Allocations, size: int, width: int
) -> None:
    """The last row ends where the memory ends: one full step more would lie outside."""
    memory = allocations.take(size)
    step = 4096
    first = size % step + step - width
    rows = (size - first) // step + 1
    tensor = memory.as_strided((rows, width), (step, 1), first)
    assert tensor[-1].data_ptr() + width == memory.data_ptr() + size
    assert_saved(engine, tmp_path, {"strided": tensor})


def test_a_wide_strided_tensor_may_end_with_its_allocation(
    engine: StagingEngine, tmp_path: Path, allocations: Allocations
) -> None:
    """Each row is larger than a slot and copied by itself, the last one up to the last byte of the memory."""
    memory = allocations.take(64 * MIB)
    pitch, width = 32 * MIB, 20 * MIB + 64
    tensor = memory.as_strided((2, width), (pitch, 1), pitch - width)
    assert tensor[-1].data_ptr() + width == memory.data_ptr() + memory.nbytes
    assert_saved(engine, tmp_path, {"wide": tensor})


def test_adjacent_allocations_are_saved_together(
    engine: StagingEngine, tmp_path: Path, allocations: Allocations
) -> None:
    """The driver refuses one copy across two allocations, also where their memory is adjacent."""
    parts = [allocations.take(2 * MIB) for _ in range(64)]
    addresses = {part.data_ptr() for part in parts}
    adjacent = sum(address + 2 * MIB in addresses for address in addresses)
    if adjacent == 0:
        pytest.skip("this driver put no two allocations side by side")
    parts.sort(key=lambda part: part.data_ptr())
    assert_saved(engine, tmp_path, {f"part{i:02}": part for i, part in enumerate(parts)})


def test_adjacent_segments_of_torch_are_saved_together(engine: StagingEngine, tmp_path: Path) -> None:
    """Does the same with torch's allocator, in which large tensors have separate allocations."""
    torch.cuda.empty_cache()
    tensors = {
        f"part{i:02}": torch.empty(20 * MIB, dtype=torch.uint8, device="cuda").random_() for i in range(16)
    }
    in_order = dict(sorted(tensors.items(), key=lambda item: item[1].data_ptr()))
    assert_saved(engine, tmp_path, in_order)


@pytest.mark.parametrize("order", ["by address", "shuffled"])
def test_thousands_of_small_tensors_are_saved(engine: StagingEngine, tmp_path: Path, order: str) -> None:
    sizes = [512 << (i % 5) for i in range(8000)]
    memory = torch.empty(sum(sizes) + 512 * len(sizes), dtype=torch.uint8, device="cuda").random_()
    tensors, at = {}, 0
    for i, size in enumerate(sizes):
        tensors[f"small{i}"] = memory[at : at + size]
        at += size + (512 if i % 3 else 0)  # some are adjacent, others are not
    keys = list(tensors)
    if order == "shuffled":
        keys = [keys[i] for i in torch.randperm(len(keys)).tolist()]
    assert_saved(engine, tmp_path, {key: tensors[key] for key in keys})


@pytest.mark.parametrize("eager", [False, True], ids=["at the fence", "now"])
def test_a_synchronize_between_start_and_poll_changes_nothing(
    engine: StagingEngine, tmp_path: Path, eager: bool
) -> None:
    """Megatron's timers synchronize right after save_checkpoint; then the loop polls, trains, and fences."""
    tensors = {
        f"layer{i}": torch.empty(32 * MIB, dtype=torch.uint8, device="cuda").random_() for i in range(8)
    }
    wanted = {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
    save = DeviceSave(engine, tmp_path, tensors, eager=frozenset(tensors if eager else ()))
    torch.cuda.synchronize()
    for _ in range(3):
        save.save.advance()
    work = torch.ones(1024, 1024, device="cuda")
    for _ in range(20):
        work = work @ work / 1024
    assert float(work[0, 0]) == 1.0  # an `.item()` beside the copies
    save.fence()
    FENCE.wait("second fence, with nothing left to wait for")
    for tensor in tensors.values():
        tensor.zero_()
    torch.cuda.synchronize()
    save.finish()
    for key, found in save.stored().items():
        assert torch.equal(found, wanted[key]), key
