"""Whole saves from a device, from provider to published checkpoint, on the fake driver."""

import gc
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_datastates.engine import staging
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.runs.runs import is_published
from megatron_datastates.providers.base import Mutability
from tests.native.device_trainer import AFTER, SLOT, Trainer, assert_published, failure
from tests.native.device_trainer import trainer as trainer
from tests.native.fake_cuda.provider import DeviceTensors
from tests.native.harness import see_in_time
from tests.native.sampling import BLOCK
from tests.support.waiting import eventually
from tests.unit.states import Chained

CURRENT_STREAM = staging._current_stream  # without the fixture's replacement
NEVER = 3600.0  # seconds; longer than a test: copies begin at the first poll or fence


def test_a_save_holds_what_the_model_was_when_it_began(trainer: Trainer, tmp_path: Path) -> None:
    trainer.cuda.delay_copies(seconds=0.01)
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step()
    assert_published(publication, tmp_path, trainer.initial)
    trainer.cuda.synchronize(trainer.stream)
    assert set(trainer.model["layer0"].tolist()) == {AFTER}


def test_a_fence_holds_back_the_stream_of_the_saves_device(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the current device is another one, as in a thread that has not chosen any."""
    current, streams = [0], {0: trainer.stream, 1: trainer.cuda.new_stream()}

    def current_stream(device: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=streams[current[0] if device is None else device])

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(staging, "_current_stream", CURRENT_STREAM)
    trainer.cuda.delay_copies(seconds=0.01)
    publication = trainer.saver(tripwire=False).start(tmp_path, DeviceTensors(trainer.model))
    current[0] = 1
    trainer.optimizer_step()
    assert_published(publication, tmp_path, trainer.initial)


@pytest.mark.parametrize("paranoid", [False, True])
def test_a_step_without_the_fence_fails_the_save(trainer: Trainer, tmp_path: Path, paranoid: bool) -> None:
    saver = trainer.saver(tripwire=not paranoid, paranoid=paranoid, lazy_delay=NEVER)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step(fenced=False)
    trainer.cuda.synchronize(trainer.stream)
    error = failure(publication)
    assert "'layer" in error and "changed too early" in error and "megatron_datastates.fence()" in error
    assert not is_published(tmp_path)


def test_a_chunk_that_differs_is_reported_with_a_few_of_its_tensors(trainer: Trainer, tmp_path: Path) -> None:
    model = {f"bias{i}": torch.zeros(10) for i in range(20)}
    saver = trainer.saver(tripwire=False, paranoid=True, lazy_delay=NEVER)
    publication = saver.start(tmp_path, DeviceTensors(model))
    model["bias7"] += 1
    assert "one of the tensors 'bias0', 'bias1', 'bias10', 'bias11', 'bias12' and 15 more changed" in failure(
        publication
    )


def test_a_step_without_the_fence_shows_in_the_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    """Shows that the tests above can fail, and what the tripwire is for."""
    saver = trainer.saver(tripwire=False, lazy_delay=NEVER)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step(fenced=False)
    trainer.cuda.synchronize(trainer.stream)
    assert publication.wait() is Outcome.PUBLISHED
    last = Checkpoint.open(tmp_path).read_tensor("layer5")
    assert not torch.equal(last, trainer.initial["layer5"])


def test_neither_start_nor_fence_waits_for_the_device(trainer: Trainer, tmp_path: Path) -> None:
    trainer.cuda.hold_stream(trainer.stream)
    saver = trainer.saver()
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step()
    assert not trainer.cuda.is_idle(trainer.stream)  # nothing has run, yet the host came through
    trainer.cuda.release_stream(trainer.stream)
    assert_published(publication, tmp_path, trainer.initial)


def test_what_may_change_at_once_is_safe_without_a_fence(trainer: Trainer, tmp_path: Path) -> None:
    trainer.cuda.delay_copies(seconds=0.02)
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model, Mutability.NOW))
    trainer.optimizer_step(fenced=False)
    assert_published(publication, tmp_path, trainer.initial)


def test_a_save_without_lazy_copies_needs_no_fence(trainer: Trainer, tmp_path: Path) -> None:
    trainer.cuda.delay_copies(seconds=0.02)
    publication = trainer.saver(lazy=False).start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step(fenced=False)
    assert_published(publication, tmp_path, trainer.initial)


def test_eager_and_lazy_state_make_one_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    eager = {"rng": torch.arange(100, dtype=torch.uint8)}
    wanted = trainer.initial | {"rng": eager["rng"].clone()}
    both = Chained(DeviceTensors(trainer.model), DeviceTensors(eager, Mutability.NOW))
    trainer.cuda.delay_copies(seconds=0.01)
    publication = trainer.saver(slots=2).start(tmp_path, both)
    trainer.cuda.launch_fill(trainer.stream, eager["rng"].data_ptr(), AFTER, 100)
    trainer.optimizer_step()
    assert_published(publication, tmp_path, wanted)


def test_the_trainer_continues_at_the_fences_deadline(trainer: Trainer, tmp_path: Path) -> None:
    """Two slots, and a device that stands still: the rest of the copies cannot even be enqueued."""
    saver = trainer.saver(slots=2, fence_deadline=0.3)
    trainer.cuda.hold_stream(trainer.stream)
    publication = saver.start(tmp_path / "late", DeviceTensors(trainer.model))
    begin = time.monotonic()
    trainer.optimizer_step()
    assert time.monotonic() - begin > 0.2
    trainer.cuda.release_stream(trainer.stream)
    assert "waited 0.3 s for its copies" in failure(publication)
    assert not is_published(tmp_path / "late")
    trainer.cuda.synchronize(trainer.stream)
    now = {key: tensor.clone() for key, tensor in trainer.model.items()}
    assert_published(saver.start(tmp_path / "next", DeviceTensors(trainer.model)), tmp_path / "next", now)


def test_a_fence_waits_for_copies_and_not_for_writes(trainer: Trainer, tmp_path: Path) -> None:
    """Two slots for seven chunks: the last two are copied when the fifth is written. Their writes stall."""

    def passes_before_the_writes(milliseconds: int) -> bool:
        wanted, folder = (
            {key: one.clone() for key, one in trainer.model.items()},
            tmp_path / str(milliseconds),
        )
        faults = f"write:6:stall={milliseconds},write:7:stall={milliseconds}"
        publication = trainer.saver(slots=2, faults=faults).start(folder, DeviceTensors(trainer.model))
        trainer.optimizer_step()
        assert publication.save._save is not None
        status = publication.save._save.status()
        assert status["bytes_planned"] > 6 * SLOT
        assert_published(publication, folder, wanted)
        trainer.cuda.synchronize(trainer.stream)
        return bool(status["bytes_written"] <= 5 * SLOT)

    see_in_time(passes_before_the_writes)


def test_strided_tensors_change_after_the_fence_only(trainer: Trainer, tmp_path: Path) -> None:
    """They are read in place, as all others are."""
    memory = torch.randint(0, 200, (400, 600), dtype=torch.uint8)
    trainer.model = {"transposed": memory.t(), "columns": memory[:, 5:77], "row": memory[0].expand(3, 600)}
    wanted = {key: tensor.clone() for key, tensor in trainer.model.items()}
    trainer.cuda.delay_copies(seconds=0.002)
    publication = trainer.saver(slots=2).start(tmp_path, DeviceTensors(trainer.model))
    FENCE.wait("the optimizer step")
    trainer.cuda.launch_fill(trainer.stream, memory.data_ptr(), AFTER, memory.nbytes)
    assert_published(publication, tmp_path, wanted)


def test_strided_tensors_changed_without_the_fence_fail_the_save(trainer: Trainer, tmp_path: Path) -> None:
    memory = torch.randint(0, 200, (400, 600), dtype=torch.uint8)
    saver = trainer.saver(slots=2, lazy_delay=NEVER)
    publication = saver.start(tmp_path, DeviceTensors({"transposed": memory.t()}))
    trainer.cuda.launch_fill(trainer.stream, memory.data_ptr(), AFTER, memory.nbytes)
    trainer.cuda.synchronize(trainer.stream)
    assert "tensor 'transposed' changed too early" in failure(publication)


def test_sources_are_dropped_on_the_trainers_thread_when_they_were_read(
    trainer: Trainer, tmp_path: Path
) -> None:
    dropped: list[int] = []
    trainer.cuda.hold_stream(trainer.stream)
    provider = DeviceTensors({"layer": torch.ones(3 * SLOT, dtype=torch.uint8)})
    publication = trainer.saver().start(tmp_path, provider)
    assert publication.save._save is not None and publication.save._save._sources is not None
    held = publication.save._save._sources[-1]  # a view of the tensor that the provider was given
    weakref.finalize(held, lambda: dropped.append(threading.get_ident()))
    del held
    provider.by_key.clear()
    publication.poll()
    assert not dropped
    trainer.cuda.release_stream(trainer.stream)
    eventually(lambda: publication.poll() and dropped, "the save drops its sources")
    assert dropped == [threading.get_ident()]
    publication.wait()


def test_saves_in_turn_leave_nothing_on_the_device(trainer: Trainer, tmp_path: Path) -> None:
    saver = trainer.saver(slots=3)
    for step in range(5):
        publication = saver.start(tmp_path / str(step), DeviceTensors(trainer.model), mode="sync")
        FENCE.wait("the optimizer step")
        assert publication.wait() is Outcome.PUBLISHED
        del publication
    gc.collect()
    # Two events of the last save, which the saver still knows, and the copier's; the samples of two saves.
    eventually(lambda: trainer.cuda.live_events <= 3, "threads have let go of the saves")
    assert trainer.cuda.registered_bytes <= 3 * SLOT + 2 * BLOCK
