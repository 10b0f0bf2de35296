"""Memory freed, shared or unmapped while a lazy save reads it: whoever does that waits for the copies."""

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates import mcore
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.mcore import autoload, fences
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.tensors import TensorProvider
from megatron_datastates.providers.transforms import Cast
from tests.native.device_trainer import SLOT, Trainer, assert_published, failure
from tests.native.device_trainer import trainer as trainer
from tests.native.fake_cuda.provider import DeviceTensors
from tests.unit.states import new_saver

WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "untyped": lambda tensor: tensor.untyped_storage().resize_(0),
    "typed, as FSDP": lambda tensor: tensor._typed_storage()._resize_(0),
    "shared": lambda tensor: tensor.share_memory_(),
}
fences.install()
autoload()


def is_copied(publication: Publication) -> bool:
    save = publication.save._save
    assert save is not None
    return save.status()["bytes_staged"] == save.status()["bytes_planned"]


def slow_save(trainer: Trainer, folder: Path, **options: Any) -> Publication:
    trainer.cuda.delay_copies(seconds=0.05)
    publication = trainer.saver(**options, lazy_delay=3600.0).start(folder, DeviceTensors(trainer.model))
    assert not is_copied(publication)
    return publication


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_giving_up_the_storage_of_a_source_waits_for_its_copies(
    trainer: Trainer, tmp_path: Path, way: str, fenced: bool
) -> None:
    """Also after the fence, which leaves the last copies to the order of streams."""
    publication = slow_save(trainer, tmp_path)
    if fenced:
        FENCE.wait("a step")
    WAYS[way](trainer.model["layer5"])
    assert is_copied(publication)
    assert_published(publication, tmp_path, trainer.initial)
    assert publication.save.fence_seconds > 0 and not FENCE.readers


def test_a_storage_that_no_save_reads_waits_for_nothing(trainer: Trainer, tmp_path: Path) -> None:
    trainer.cuda.hold_stream(trainer.stream)
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model))
    other = torch.zeros(1000)
    other.untyped_storage().resize_(0)
    assert not is_copied(publication)
    trainer.model["layer0"].data = torch.zeros(10, dtype=torch.uint8)
    with torch.no_grad():
        trainer.model["layer1"].set_(torch.zeros(10, dtype=torch.uint8))
    assert not is_copied(publication), "other memory for a tensor leaves the old one to the save"
    trainer.cuda.release_stream(trainer.stream)
    assert_published(publication, tmp_path, trainer.initial)
    assert not FENCE.readers, "nobody asks once the copies are over"


def test_after_its_deadline_the_save_fails_and_the_memory_goes_when_nothing_copies_from_it(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.cuda.hold_stream(trainer.stream)
    saver = trainer.saver(fence_deadline=0.2)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    released = threading.Event()

    def release() -> None:
        released.set()
        trainer.cuda.release_stream(trainer.stream)

    timer = threading.Timer(1.0, release)
    timer.start()
    trainer.model["layer0"].untyped_storage().resize_(0)
    assert released.is_set()
    assert "not everything was copied within 0.2 s" in failure(publication)
    timer.join()


def test_host_memory_may_be_released_by_a_thread_that_works_for_the_trainer(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP frees in hooks on autograd's thread. Without the wait the copying thread would crash."""
    monkeypatch.undo()  # no device in this test
    tensors = {str(i): torch.full((64 * SLOT,), i, dtype=torch.uint8) for i in range(4)}
    wanted = {key: tensor.clone() for key, tensor in tensors.items()}
    saver = trainer.saver(copy_limit=64 * SLOT * 4, lazy_delay=3600.0)
    publication = saver.start(tmp_path, TensorProvider(tensors, Mutability.AT_FENCE))
    assert not is_copied(publication)

    def work() -> None:
        for tensor in tensors.values():
            tensor.untyped_storage().resize_(0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_published(publication, tmp_path, wanted)


# -- memory savers ------------------------------------------------------------------------------------------

CLASS = """
class TorchMemorySaver:
    def pause(self, tag=None):
        self.seen = tag, LOOK()
"""
LAYOUTS = {
    "new": {"__init__.py": "from .entrypoint import TorchMemorySaver", "entrypoint.py": CLASS},
    "new, class not exported": {
        "__init__.py": "from . import entrypoint\nthe_saver = entrypoint.TorchMemorySaver()",
        "entrypoint.py": CLASS,
    },
    "old": {"__init__.py": CLASS},
}
VLLM = {
    "__init__.py": "",
    "device_allocator/__init__.py": "",
    "device_allocator/cumem.py": CLASS.replace("TorchMemorySaver", "CuMemAllocator").replace(
        "pause", "sleep"
    ),
}


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, files: dict[str, str]) -> None:
    """Installs a package of that name, with the interface of the real one."""
    for name, text in files.items():
        path = folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pause_of_torch_memory_saver_waits_for_all_copies(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    stand_in(monkeypatch, tmp_path / "packages", "torch_memory_saver", LAYOUTS[layout])
    package = importlib.import_module("torch_memory_saver")
    home = getattr(package, "entrypoint", package)
    publication = slow_save(trainer, tmp_path / "saved")
    home.LOOK = lambda: is_copied(publication)
    saver = home.TorchMemorySaver()
    saver.pause(tag="weights")
    assert saver.seen == ("weights", True)
    assert_published(publication, tmp_path / "saved", trainer.initial)
    forget("torch_memory_saver")


def test_vllms_sleep_waits_for_all_copies(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path / "packages", "vllm", VLLM)
    home = importlib.import_module("vllm.device_allocator.cumem")
    publication = slow_save(trainer, tmp_path / "saved")
    home.LOOK = lambda: is_copied(publication)
    saver = home.CuMemAllocator()
    saver.sleep("weights")
    assert saver.seen == ("weights", True)
    assert_published(publication, tmp_path / "saved", trainer.initial)
    forget("vllm")


def test_a_memory_saver_without_its_hook_point_is_reported_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, tmp_path, "torch_memory_saver", {"__init__.py": "answer = 42"})
    with caplog.at_level(logging.WARNING):
        assert importlib.import_module("torch_memory_saver").answer == 42
    assert "no torch_memory_saver.entrypoint.TorchMemorySaver.pause" in caplog.text
    assert "call megatron_datastates.fence() before unmapping device memory" in caplog.text
    forget("torch_memory_saver")


@pytest.mark.parametrize("fence", [ds.fence, mcore.fence], ids=["ds.fence", "mcore.fence"])
def test_an_explicit_fence_is_enough_to_unmap(
    trainer: Trainer, tmp_path: Path, fence: Callable[[], None]
) -> None:
    publication = slow_save(trainer, tmp_path)
    fence()
    assert is_copied(publication)
    assert publication.wait() is Outcome.PUBLISHED


def test_memory_that_is_not_encoded_later_waits_for_nothing(tmp_path: Path) -> None:
    """Megatron frees activations in each forward and backward pass."""
    tensor, other = torch.arange(1000.0), torch.zeros(1000)
    saver = new_saver(lazy_delay=3600.0)
    provider = Cast(TensorProvider({"w": tensor}, Mutability.AT_FENCE), torch.float16)
    publication = saver.start(tmp_path / "c", provider)
    other.untyped_storage().resize_(0)
    assert not publication.save.tail.wait_read(0.0), "nothing has begun"
    tensor.untyped_storage().resize_(0)
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    assert torch.equal(ds.open(tmp_path / "c").read_tensor("w"), torch.arange(1000.0).half())
    saver.close()
