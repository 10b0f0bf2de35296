"""Tensors on a device that are cast on their way to the file: torch copies them, on a stream of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider
from megatron_datastates.providers.transforms import Cast, Compressed
from tests.gpu.test_device_saves import busy
from tests.unit.states import new_saver


@pytest.fixture
def saver() -> Iterator[Saver]:
    made = new_saver()
    yield made
    made.close()


def cast(tensors: dict[str, torch.Tensor]) -> Cast:
    return Cast(TensorProvider(tensors, Mutability.AT_FENCE), torch.bfloat16)


def test_what_a_running_kernel_leaves_is_stored(saver: Saver, tmp_path: Path) -> None:
    tensor, after = torch.zeros(700, 1001, device="cuda"), torch.randn(700, 1001)
    source = after.cuda()
    busy(0.3)
    tensor.copy_(source)
    publication = saver.start(tmp_path / "c", cast({"w": tensor, "t": tensor.t()}))
    FENCE.wait("a change")
    tensor.zero_()
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    checkpoint, stored = ds.open(tmp_path / "c"), after.to(torch.bfloat16)
    assert torch.equal(checkpoint.read_tensor("w"), stored)
    assert torch.equal(checkpoint.read_tensor("t"), stored.t())


def test_what_the_trainer_launches_next_is_not_waited_for(saver: Saver, tmp_path: Path) -> None:
    tensor, done = torch.randn(4 << 20, device="cuda"), torch.cuda.Event()
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)  # is kept by torch: page-locking may wait, too
    torch.cuda.synchronize()
    publication = saver.start(tmp_path / "c", cast({"w": tensor}))
    busy(3.0)
    done.record()
    while not done.query() and not publication.save.is_durable:
        publication.poll()
        time.sleep(0.001)
    assert publication.save.is_durable and not done.query()
    assert publication.wait() is Outcome.PUBLISHED, publication.error


def test_conjugated_tensors_are_stored_as_their_values(saver: Saver, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    tensor = torch.randn(300, 1001, dtype=torch.complex64, device="cuda")
    views = {"conjugated": tensor.conj(), "negated": tensor.conj().imag}
    wanted = {key: view.cpu().resolve_conj().resolve_neg() for key, view in views.items()}
    publication = saver.start(tmp_path / "c", Compressed(TensorProvider(views, Mutability.AT_FENCE)))
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    checkpoint = ds.open(tmp_path / "c")
    assert all(torch.equal(checkpoint.read_tensor(key), value) for key, value in wanted.items())
