"""Saves from a device that fail or are abandoned, on the fake driver."""

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_datastates.config import Options
from megatron_datastates.engine import staging
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saving.held import trainer_held
from megatron_datastates.pipeline.saving.plans import Structure
from megatron_datastates.providers.base import Mutability
from tests.native.device_trainer import AFTER, Trainer, assert_published, failure, samples_of
from tests.native.device_trainer import trainer as trainer
from tests.native.fake_cuda.provider import DeviceTensors
from tests.native.test_fork import in_child
from tests.support.waiting import eventually


def test_a_fence_that_ends_in_mid_copy_fails_the_save_only(trainer: Trainer, tmp_path: Path) -> None:
    cuda, saver = trainer.cuda, trainer.saver(slots=2, fence_deadline=0.3)
    cuda.hold_copies()
    publication = saver.start(tmp_path / "late", DeviceTensors(trainer.model))
    native = publication.save._save
    assert native is not None
    eventually(lambda: cuda.copies_to_host == samples_of(trainer) + 3, "two slots are being filled")
    cuda.hold_call("cuMemcpyDtoHAsync")  # the driver takes no more copies
    cuda.release_copies()
    eventually(lambda: native.status()["bytes_staged"], "the first chunks are copied")
    trainer.optimizer_step()
    cuda.synchronize(trainer.stream)
    assert {value for tensor in trainer.model.values() for value in tensor.tolist()} == {AFTER}
    cuda.let_go()
    assert "waited 0.3 s for its copies" in failure(publication)
    publication.join()
    status = native.status()
    assert 0 < int(str(status["bytes_staged"])) < int(str(status["bytes_planned"]))
    assert not list((tmp_path / "late").glob("*"))
    after = {key: tensor.clone() for key, tensor in trainer.model.items()}
    again = saver.start(tmp_path / "next", DeviceTensors(trainer.model))
    trainer.optimizer_step()
    assert_published(again, tmp_path / "next", after)


def test_tensors_on_several_devices_are_refused(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Structure, "devices", lambda self: [*[0] * (len(self.keys) - 1), 1])
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model))
    error = failure(publication)
    assert (
        "tensors on cuda:0 and cuda:1, and the current device is cuda:0: start one process per device"
        in error
    )
    assert os.listdir(tmp_path) == []


def test_tensors_on_another_device_than_the_current_one_are_refused(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies were ordered after another stream than the one that wrote their sources."""
    monkeypatch.setattr(staging, "_current_device", lambda: 1)
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model))
    assert "tensors on cuda:0, and the current device is cuda:1" in failure(publication)


def test_a_missing_driver_is_named_with_what_needs_it(trainer: Trainer, tmp_path: Path) -> None:
    assert Options().driver == "libcuda.so.1"
    saver = trainer.saver(driver="/nowhere/libcuda.so.1")
    error = failure(saver.start(tmp_path, DeviceTensors(trainer.model)))
    assert "open the CUDA driver /nowhere/libcuda.so.1" in error
    assert "a tensor on a GPU cannot be saved or loaded without it" in error


@pytest.mark.parametrize(
    "call",
    ["cuMemcpyDtoHAsync", "cuEventSynchronize", "cuEventRecord", "cuStreamWaitEvent", "cuEventCreate"],
)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failing_device_fails_the_save_and_not_training(
    trainer: Trainer, tmp_path: Path, call: str, nth: int
) -> None:
    saver = trainer.saver(slots=2)
    trainer.cuda.fail(call, nth)
    publication = saver.start(tmp_path / "failed", DeviceTensors(trainer.model))
    FENCE.wait("the optimizer step")
    error = failure(publication)
    assert call in error and "an illegal memory access was encountered" in error
    publication.join()
    assert not list((tmp_path / "failed").glob("*"))
    trainer.cuda.let_go()
    again = saver.start(tmp_path / "next", DeviceTensors(trainer.model))
    FENCE.wait("the optimizer step")
    assert_published(again, tmp_path / "next", trainer.initial)


class FailingAfterCall:
    """A native job that fails right after the nth call of it."""

    def __init__(self, job: Any, nth: int) -> None:
        self._job, self._left = job, nth

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            given = getattr(self._job, name)(*arguments)
            self._left -= 1
            if self._left == 0:
                self._job.cancel("meanwhile")
            return given

        return call


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_sources_outlive_their_copies_whenever_the_save_fails(
    trainer: Trainer, tmp_path: Path, nth: int
) -> None:
    """A poll asks more than once how far the save is, and it may fail in between."""
    trainer.cuda.hold_stream(trainer.stream)
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model))
    save = publication.save._save
    assert save is not None
    job, save._job = save._job, FailingAfterCall(save._job, nth)
    for _ in range(3):
        assert not save.sources_copied()
    save._job = job
    assert save.failure
    trainer.cuda.release_stream(trainer.stream)
    eventually(save.sources_copied, "the save drops its sources")


@pytest.mark.parametrize("mutability", [Mutability.NOW, Mutability.AT_FENCE])
def test_a_save_abandoned_in_mid_copy_leaves_no_file(
    trainer: Trainer, tmp_path: Path, mutability: Mutability
) -> None:
    trainer.cuda.delay_copies(seconds=0.05)
    saver = trainer.saver(slots=2)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model, mutability))
    saver.close()
    assert publication.outcome is not Outcome.PUBLISHED
    assert os.listdir(tmp_path) == []


# -- a save whose engine is gone ----------------------------------------------------------------------------


def test_a_save_may_be_polled_and_dropped_after_its_saver_was_closed(
    trainer: Trainer, tmp_path: Path
) -> None:
    saver = trainer.saver()
    with trainer_held("save_checkpoint"):
        publication = saver.start(tmp_path, DeviceTensors(trainer.model))
        saver.close()
    assert "the program ended" in failure(publication)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_child_that_goes_on_with_its_parents_save_harms_nothing(trainer: Trainer, tmp_path: Path) -> None:
    publication = trainer.saver(lazy_delay=60.0).start(tmp_path, DeviceTensors(trainer.model))

    def go_on() -> object:
        publication.save.fence("a step in a child")
        publication.save.advance()
        publication.save.on_trainer_released()
        return publication.save.failure

    assert "this save belongs to the parent of this process" in in_child(go_on)
    assert_published(publication, tmp_path, trainer.initial)
