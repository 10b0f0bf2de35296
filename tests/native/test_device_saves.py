"""Whole saves from a device, from provider to published checkpoint, on the fake driver."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.config import Options
from megatron_datastates.engine import staging
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.held import trainer_held
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.plans import Structure
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.report import save_report
from megatron_datastates.pipeline.runs import is_published
from megatron_datastates.pipeline.saver import Saver, SaveSession
from megatron_datastates.providers.base import Mutability
from tests.native.fake_cuda.driver import FakeCuda
from tests.native.fake_cuda.provider import DeviceTensors, label_as_device
from tests.native.harness import KIB, eventually
from tests.native.sampling import BLOCK
from tests.native.test_fork import in_child
from tests.unit.states import Chained

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
    monkeypatch.setattr(staging, "_current_stream", lambda: made.stream)
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


def test_a_save_holds_what_the_model_was_when_it_began(trainer: Trainer, tmp_path: Path) -> None:
    trainer.cuda.delay_copies(seconds=0.01)
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step()
    assert_published(publication, tmp_path, trainer.initial)
    trainer.cuda.synchronize(trainer.stream)
    assert set(trainer.model["layer0"].tolist()) == {AFTER}


@pytest.mark.parametrize("paranoid", [False, True])
def test_a_step_without_the_fence_fails_the_save(trainer: Trainer, tmp_path: Path, paranoid: bool) -> None:
    trainer.cuda.delay_copies(seconds=0.05)
    saver = trainer.saver(tripwire=not paranoid, paranoid=paranoid)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step(fenced=False)
    error = failure(publication)
    assert "'layer" in error and "changed too early" in error and "call the fence first" in error
    assert not is_published(tmp_path)


def test_a_chunk_that_differs_is_told_by_a_few_of_its_tensors(trainer: Trainer, tmp_path: Path) -> None:
    model = {f"bias{i}": torch.zeros(10) for i in range(20)}
    saver = trainer.saver(tripwire=False, paranoid=True, faults="open:1:stall=1500")
    publication = saver.start(tmp_path, DeviceTensors(model))
    model["bias7"] += 1
    assert "one of the tensors 'bias0', 'bias1', 'bias10', 'bias11', 'bias12' and 15 more changed" in failure(
        publication
    )


def test_a_step_without_the_fence_shows_in_the_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    """That the tests above can fail, and what the tripwire is for."""
    trainer.cuda.delay_copies(seconds=0.05)
    publication = trainer.saver(tripwire=False).start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step(fenced=False)
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


def test_a_fence_lets_the_trainer_go_at_its_deadline(trainer: Trainer, tmp_path: Path) -> None:
    """Two slots, and a device that stands still: the rest of the copies cannot even be enqueued."""
    saver = trainer.saver(slots=2, fence_deadline=0.3)
    trainer.cuda.hold_stream(trainer.stream)
    publication = saver.start(tmp_path / "late", DeviceTensors(trainer.model))
    begin = time.monotonic()
    trainer.optimizer_step()
    assert 0.2 < time.monotonic() - begin < 5
    trainer.cuda.release_stream(trainer.stream)
    assert "waited 0.3 s for its copies" in failure(publication)
    assert not is_published(tmp_path / "late")
    trainer.cuda.synchronize(trainer.stream)
    now = {key: tensor.clone() for key, tensor in trainer.model.items()}
    assert_published(saver.start(tmp_path / "next", DeviceTensors(trainer.model)), tmp_path / "next", now)


def test_a_fence_waits_for_copies_and_not_for_writes(trainer: Trainer, tmp_path: Path) -> None:
    """Two slots for seven chunks: the last two are copied when the fifth is written. Their writes stall."""
    saver = trainer.saver(slots=2, faults="write:6:stall=2000,write:7:stall=2000")
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step()
    assert publication.save._save is not None
    status = publication.save._save.status()
    assert status["bytes_planned"] > 6 * SLOT
    assert status["bytes_written"] <= 5 * SLOT
    assert_published(publication, tmp_path, trainer.initial)


def test_a_fence_ends_at_its_deadline_in_mid_copy_and_training_goes_on(
    trainer: Trainer, tmp_path: Path
) -> None:
    cuda, saver = trainer.cuda, trainer.saver(slots=2, fence_deadline=0.3)
    cuda.delay_copies(seconds=0.1)
    publication = saver.start(tmp_path / "late", DeviceTensors(trainer.model))
    native = publication.save._save
    assert native is not None
    eventually(lambda: native.status()["bytes_staged"], "the first chunks are copied")
    cuda.hold_call("cuMemcpyDtoHAsync")  # the driver takes no more of them
    trainer.optimizer_step()
    cuda.synchronize(trainer.stream)
    assert {value for tensor in trainer.model.values() for value in tensor.tolist()} == {AFTER}
    cuda.let_go()
    assert "waited 0.3 s for its copies" in failure(publication)
    publication.join()
    status = native.status()
    assert 0 < int(str(status["bytes_staged"])) < int(str(status["bytes_planned"]))
    assert os.listdir(tmp_path / "late") == []
    after = {key: tensor.clone() for key, tensor in trainer.model.items()}
    again = saver.start(tmp_path / "next", DeviceTensors(trainer.model))
    trainer.optimizer_step()
    assert_published(again, tmp_path / "next", after)


def test_strided_tensors_change_behind_the_fence_only(trainer: Trainer, tmp_path: Path) -> None:
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
    trainer.cuda.delay_copies(seconds=0.002)
    publication = trainer.saver(slots=2).start(tmp_path, DeviceTensors({"transposed": memory.t()}))
    trainer.cuda.launch_fill(trainer.stream, memory.data_ptr(), AFTER, memory.nbytes)
    assert "tensor 'transposed' changed too early" in failure(publication)


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


def test_a_missing_driver_is_told_with_its_name_and_what_needs_it(trainer: Trainer, tmp_path: Path) -> None:
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
def test_a_failing_device_fails_the_save_and_not_the_training(
    trainer: Trainer, tmp_path: Path, call: str, nth: int
) -> None:
    saver = trainer.saver(slots=2)
    trainer.cuda.fail(call, nth)
    publication = saver.start(tmp_path / "failed", DeviceTensors(trainer.model))
    FENCE.wait("the optimizer step")
    error = failure(publication)
    assert call in error and "an illegal memory access was encountered" in error
    publication.join()
    assert not (tmp_path / "failed").exists() or os.listdir(tmp_path / "failed") == []
    trainer.cuda.let_go()
    again = saver.start(tmp_path / "next", DeviceTensors(trainer.model))
    FENCE.wait("the optimizer step")
    assert_published(again, tmp_path / "next", trainer.initial)


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


class FailingBehindCall:
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
    job, save._job = save._job, FailingBehindCall(save._job, nth)
    for _ in range(3):
        assert not save.sources_copied()
    save._job = job
    assert save.failure
    trainer.cuda.release_stream(trainer.stream)
    eventually(save.sources_copied, "the save drops its sources")


def test_saves_in_turn_leave_nothing_on_the_device(trainer: Trainer, tmp_path: Path) -> None:
    saver = trainer.saver(slots=3)
    for step in range(5):
        publication = saver.start(tmp_path / str(step), DeviceTensors(trainer.model), mode="sync")
        FENCE.wait("the optimizer step")
        assert publication.wait() is Outcome.PUBLISHED
        del publication
    gc.collect()
    assert (
        trainer.cuda.live_events <= 3
    )  # two of the last save, which the saver still knows, and the copier's
    assert trainer.cuda.registered_bytes <= 3 * SLOT + 2 * BLOCK  # of that save, and the one before


@pytest.mark.parametrize("mutability", [Mutability.NOW, Mutability.AT_FENCE])
def test_a_save_given_up_in_mid_copy_leaves_no_file(
    trainer: Trainer, tmp_path: Path, mutability: Mutability
) -> None:
    trainer.cuda.delay_copies(seconds=0.05)
    saver = trainer.saver(slots=2)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model, mutability))
    saver.close()
    assert publication.outcome is not Outcome.PUBLISHED
    assert os.listdir(tmp_path) == []


# -- the time at which lazy copies begin --------------------------------------------------------------------


def samples_of(trainer: Trainer) -> int:
    return len(trainer.model)  # each has one


@pytest.mark.parametrize("begin", ["poll", "fence"])
def test_lazy_copies_begin_at_the_first_poll_or_fence(trainer: Trainer, tmp_path: Path, begin: str) -> None:
    """Megatron's timers synchronize the device between the save and its next iteration."""
    saver = trainer.saver(lazy_delay=3600.0, fence_deadline=10.0)
    publication = saver.start(tmp_path, DeviceTensors(trainer.model))
    trainer.cuda.synchronize_device()
    time.sleep(0.2)
    assert trainer.cuda.copies_to_host == samples_of(trainer)
    if begin == "poll":
        publication.poll()
        eventually(lambda: trainer.cuda.copies_to_host > samples_of(trainer), "the copies begin")
    trainer.optimizer_step()
    assert trainer.cuda.copies_to_host > samples_of(trainer)
    assert_published(publication, tmp_path, trainer.initial)


def test_lazy_copies_begin_by_themselves_in_a_loop_that_neither_polls_nor_fences(
    trainer: Trainer, tmp_path: Path
) -> None:
    publication = trainer.saver(lazy_delay=0.05).start(tmp_path, DeviceTensors(trainer.model))
    eventually(lambda: publication.save.times()["staging"] > 0, "the copies are over")
    assert_published(publication, tmp_path, trainer.initial)


def test_that_time_counts_from_the_end_of_save_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    """Which may take long, waiting for other ranks."""
    with trainer_held("save_checkpoint"):
        publication = trainer.saver(lazy_delay=0.05).start(tmp_path, DeviceTensors(trainer.model))
        time.sleep(0.3)
        assert trainer.cuda.copies_to_host == samples_of(trainer)
    eventually(lambda: trainer.cuda.copies_to_host > samples_of(trainer), "the copies begin")
    assert_published(publication, tmp_path, trainer.initial)


def test_the_report_says_how_long_the_trainers_stream_waited(trainer: Trainer, tmp_path: Path) -> None:
    trainer.cuda.delay_copies(seconds=0.02)
    publication = trainer.saver(tripwire=False).start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step()
    trainer.cuda.synchronize(trainer.stream)
    assert_published(publication, tmp_path, trainer.initial)
    report = save_report(publication, "async")
    assert report["stream_wait_ms"] >= 20 and report["ranks_ms"]["stream_wait"]["max"] >= 20


def test_the_report_counts_bytes_on_the_device_and_on_the_host(trainer: Trainer, tmp_path: Path) -> None:
    publication = trainer.saver().start(tmp_path, DeviceTensors(trainer.model))
    trainer.optimizer_step()
    assert_published(publication, tmp_path, trainer.initial)
    share = save_report(publication, "async")["providers"][""]
    total = sum(tensor.nbytes for tensor in trainer.initial.values())
    assert share["host_bytes"] == 0 and share["device_bytes"] == share["lazy_bytes"] == total


def test_memory_may_be_unmapped_when_a_save_that_is_not_lazy_returns(
    trainer: Trainer, tmp_path: Path
) -> None:
    """As frameworks do that put a model to sleep right after its save."""
    blocks = [trainer.cuda.allocate(SLOT) for _ in range(4)]
    model = {f"w{i}": torch.frombuffer(block, dtype=torch.uint8) for i, block in enumerate(blocks)}
    wanted = {key: tensor.random_(0, 256).clone() for key, tensor in model.items()}
    trainer.cuda.delay_copies(seconds=0.02)
    publication = trainer.saver(lazy=False).start(tmp_path, DeviceTensors(model))
    for block in blocks:
        trainer.cuda.free(block)
        block[:] = AFTER
    assert_published(publication, tmp_path, wanted)


@pytest.mark.parametrize("owner", ["nothing to save", "failed start"])
def test_what_follows_save_checkpoint_counts_for_every_save(
    trainer: Trainer, tmp_path: Path, owner: str
) -> None:
    """Also on a rank without tensors, and where the start failed: all ranks' times are compared."""
    nothing = owner == "nothing to save"
    saver = trainer.saver() if nothing else trainer.saver(driver="/nowhere/libcuda.so.1")
    with trainer_held("save_checkpoint"):
        publication = saver.start(tmp_path, DeviceTensors({} if nothing else trainer.model))
    time.sleep(0.1)
    assert publication.wait() is (Outcome.PUBLISHED if nothing else Outcome.FAILED)
    assert 0.1 <= publication.save.held.parts["until_poll"] < publication.save.held.total


# -- a save whose engine is gone ----------------------------------------------------------------------------


def test_a_save_may_be_polled_and_let_go_when_its_saver_was_closed(trainer: Trainer, tmp_path: Path) -> None:
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


def test_a_poll_for_an_earlier_save_lets_a_later_ones_copies_begin(trainer: Trainer, tmp_path: Path) -> None:
    """Megatron's queue polls its head alone."""
    saver = trainer.saver(lazy_delay=3600.0)
    first = saver.start(tmp_path / "first", DeviceTensors(trainer.model))
    with trainer_held("save_checkpoint"):
        second = saver.start(tmp_path / "second", DeviceTensors(trainer.model))
    first.poll()
    eventually(lambda: second.save.times()["staging"] > 0, "the later save's copies are over")
    assert "until_poll" in second.save.held.parts
    for publication in (first, second):
        assert publication.wait() is Outcome.PUBLISHED
