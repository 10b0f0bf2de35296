"""Saves that fail: nothing is published, nothing is left, and what was there before is as it was."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_datastates as ds
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.staging import FileSave
from megatron_datastates.errors import NotACheckpointError, SaveFailedError
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.providers import ObjectSource, StreamSource
from megatron_datastates.providers.base import Mutability
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import SMALL, State, bits, data_files, new_saver, random_tensor, save

FIRST = {"w": random_tensor(torch.uint8, (3 << 20,), 1)}
SECOND = {"v": random_tensor(torch.uint8, (3 << 20,), 2)}
LIMIT_SECONDS = 60.0
STEPS = ["open", "reserve", "write", "truncate", "sync"]
STEPS += [f"{verb} {what}" for what in ("index", "manifest") for verb in ("write", "rename")]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_a_first_save_that_fails_leaves_no_checkpoint(tmp_path, step, mutability):
    saver = new_saver(faults=f"{step}:1:EIO")
    publication = save(saver, tmp_path / "c", FIRST, {"x": 1}, mutability)
    saver.close()
    assert publication.outcome is Outcome.FAILED
    assert "Input/output error" in publication.error
    assert f"saving to {tmp_path / 'c'} failed on 1 of 1 ranks: rank 0: " in publication.error
    with pytest.raises(NotACheckpointError):
        ds.open(tmp_path / "c", **SMALL)


def test_a_queue_of_megatrons_is_not_stuck_with_a_failed_save(tmp_path):
    """It asks again and again for the first one; a program may catch the error, and go on."""
    request = pytest.importorskip("megatron_datastates.mcore.save.request")
    saver = new_saver(faults="sync:1:EIO")
    publication = save(saver, tmp_path / "c", FIRST)
    saver.close()
    queue = type("Queue", (), {"async_calls": []})
    caller = request.DataStatesCaller(request.SaveHandle(publication, "raise"), [], queue)
    with pytest.raises(SaveFailedError, match="Input/output error"):
        caller.is_current_async_call_done()
    assert caller.is_current_async_call_done()


def test_a_queue_of_megatrons_that_calls_a_save_in_a_forked_child_does_nothing_there():
    """Without our hook, a queue does: polled there, the save would hang, or be published by two processes."""
    request = pytest.importorskip("megatron_datastates.mcore.save.request")
    publication = SimpleNamespace(wait=lambda: os._exit(1), outcome=Outcome.PENDING)
    handle = request.SaveHandle(publication, "raise")
    child = os.fork()
    if child == 0:
        try:
            handle()
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_save_whose_bytes_are_discarded_is_never_published(tmp_path):
    """The option that measures copies: set by mistake, it must not pass for a checkpoint."""
    saver = new_saver(discard=True)
    publication = save(saver, tmp_path / "c", FIRST, {"x": 1})
    saver.close()
    assert publication.outcome is Outcome.FAILED
    assert "option 'discard' stores nothing" in publication.error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("step", STEPS)
def test_a_later_save_that_fails_leaves_the_earlier_one(tmp_path, step):
    saver = new_saver()
    save(saver, tmp_path / "c", FIRST)
    saver.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    failing = new_saver(faults=f"{step}:1:EIO")
    assert save(failing, tmp_path / "c", SECOND).outcome is Outcome.FAILED
    failing.close()
    after = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    assert {name: after[name] for name in before} == before
    assert not [name for name in set(after) - set(before) if name.startswith("data-")]
    assert bits(ds.open(tmp_path / "c", **SMALL).read_tensor("w")) == bits(FIRST["w"])


def test_a_save_after_a_failed_one_is_published(tmp_path):
    saver = new_saver(faults="write:2:ENOSPC,rename manifest:1:EIO")
    outcomes = [save(saver, tmp_path / "c", FIRST).outcome for _ in range(3)]
    saver.close()
    assert outcomes == [Outcome.FAILED, Outcome.FAILED, Outcome.PUBLISHED]
    assert len(os.listdir(tmp_path / "c")) == 3
    assert bits(ds.open(tmp_path / "c", **SMALL).read_tensor("w")) == bits(FIRST["w"])


def test_starting_a_save_that_cannot_be_made_raises_nothing(saver, tmp_path):
    publication = saver.start(tmp_path / "c", State({"w": torch.eye(3).to_sparse()}))
    assert publication.wait() is Outcome.FAILED
    assert "'w'" in publication.error and "sparse" in publication.error


def test_a_provider_that_raises_fails_the_save_and_is_quoted(saver, tmp_path):
    class Broken(State):
        def entries(self):
            raise RuntimeError("no objects today")

    publication = saver.start(tmp_path / "c", Broken(FIRST))
    assert publication.wait() is Outcome.FAILED
    assert "RuntimeError: no objects today" in publication.error
    assert not (tmp_path / "c" / MANIFEST_NAME).exists()


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_an_object_that_cannot_be_serialized_fails_the_save(saver, tmp_path, mutability):
    publication = save(saver, tmp_path / "c", FIRST, {"x": lambda: None}, mutability)
    assert publication.outcome is Outcome.FAILED
    assert "pickle" in publication.error
    publication.join()  # the file is removed in the background
    assert not list(tmp_path.rglob("data-*"))


class Failing:
    """A provider that holds a tensor, and whose frames do when it fails."""

    def __init__(self, tensor, how, mutability):
        self.tensor, self.how, self.mutability = tensor, how, mutability

    def entries(self):
        local = self.tensor
        if self.how == "entries":
            self._fail(local)
        if self.how == "object":
            yield ObjectSource("o", [lambda: local], self.mutability)
        yield StreamSource("s", lambda write: self._fail(local), self.mutability)

    def _fail(self, local):
        try:
            raise KeyError(local.sum())
        except KeyError as error:
            if self.how == "group":
                raise ExceptionGroup("several", [error, ValueError()]) from None
            raise RuntimeError("no streams today") from error


@pytest.mark.parametrize("how", ["entries", "object", "stream", "group"])
@pytest.mark.parametrize("mutability", [Mutability.NOW, Mutability.NEVER], ids=lambda m: m.name)
def test_a_failed_save_holds_no_tensor(saver, tmp_path, how, mutability):
    """Without the garbage collector, too: Megatron's --manual-gc."""
    tensor = torch.ones(1000)
    storage = StorageWeakRef(tensor.untyped_storage())
    gc.disable()
    try:
        providers = [{"p": Failing(tensor, how, mutability)}]
        publication = saver.start(tmp_path / "c", lambda: providers.pop())
        assert publication.wait() is Outcome.FAILED
        publication.join()
        del tensor
        assert storage.expired()
    finally:
        gc.enable()
    cause = publication.save.cause.__cause__
    if how != "object":
        assert f'File "{__file__}", line ' in cause.__notes__[0] and "in _fail" in cause.__notes__[0]


def test_what_a_program_is_handling_while_a_save_fails_keeps_its_traceback(saver, tmp_path):
    def break_down():
        try:
            raise KeyError("a batch")
        except KeyError as error:
            raise RuntimeError("training is over") from error

    try:
        break_down()
    except RuntimeError as error:
        publication = save(saver, tmp_path / "c", FIRST, {"x": lambda: None})
        assert publication.outcome is Outcome.FAILED and "pickle" in publication.error
        for one in (error, error.__cause__):
            assert traceback.extract_tb(one.__traceback__)[-1].name == "break_down"


def test_two_objects_of_one_key_fail_the_save(saver, tmp_path):
    class Twice(State):
        def entries(self):
            return [*super().entries(), *super().entries()]

    publication = saver.start(tmp_path / "c", Twice({}, {"x": 1}))
    assert publication.wait() is Outcome.FAILED
    assert "'x' is given twice" in publication.error


def test_a_directory_that_cannot_be_made_fails_the_save(saver, tmp_path):
    (tmp_path / "file").write_text("in the way")
    publication = save(saver, tmp_path / "file" / "c", FIRST)
    assert publication.outcome is Outcome.FAILED
    assert str(tmp_path / "file") in publication.error


def test_a_fence_past_its_deadline_lets_the_trainer_go_and_the_save_fails(tmp_path):
    saver = new_saver(fence_deadline=0.05, copy_limit=1)
    state = State({"w": random_tensor(torch.uint8, (20 << 20,))}, mutability=Mutability.AT_FENCE)
    publication = saver.start(tmp_path / "c", state)
    FENCE.wait("the step")
    assert publication.wait() is Outcome.FAILED
    assert "the step waited 0.05 s for its copies (--datastates-fence-deadline)" in publication.error
    saver.close()
    assert not (tmp_path / "c" / MANIFEST_NAME).exists()


def test_an_object_that_must_be_written_at_once_holds_the_trainer_no_longer_than_the_deadline(tmp_path):
    saver = new_saver(fence_deadline=0.5, write_limit=1)
    publication = saver.start(tmp_path / "c", State({}, {"x": bytearray(64 << 20)}))
    assert publication.wait() is Outcome.FAILED
    assert "no staging memory became free in time for objects that may change at once" in publication.error
    saver.close()
    assert not (tmp_path / "c" / MANIFEST_NAME).exists()


def test_what_a_failed_start_may_still_be_copying_is_not_freed(tmp_path, monkeypatch):
    saver = new_saver(fence_deadline=0.05, copy_limit=1)
    with monkeypatch.context() as patched:
        patched.setattr(FileSave, "sources_copied", lambda save: False)  # as while a copy is under way
        publication = saver.start(tmp_path / "c", State({"w": random_tensor(torch.uint8, (20 << 20,))}))
        save = publication.save._save
    assert "were not copied within 0.05 s" in str(save.failure)
    assert len(save._sources) == 2, "the header and the tensor"
    assert publication.wait() is Outcome.FAILED
    saver.close()


def test_a_save_that_was_never_awaited_is_abandoned_at_the_end(tmp_path, caplog):
    saver = new_saver()
    saver.start(tmp_path / "c", State(FIRST, mutability=Mutability.AT_FENCE))
    saver.close()
    assert f"the save to {tmp_path / 'c'} was not published" in caplog.text
    assert not list((tmp_path / "c").glob("*"))
    FENCE.wait("the step")  # nobody stands there any more


def test_an_abandoned_save_holds_no_memory(tmp_path):
    """A restart within the process makes the model again, beside whatever is held of the old one."""
    saver = new_saver(lazy_delay=3600.0)
    tensor = torch.ones(1000)
    publication = saver.start(tmp_path / "0", State({"a": tensor}, mutability=Mutability.AT_FENCE))
    storage = StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert not storage.expired()
    publication.abandon("the queue was aborted")
    gc.collect()
    assert storage.expired() and not FENCE.readers
    saver.close()


def test_the_trainer_does_not_wait_for_storage_to_remove_the_file_of_a_failed_save(tmp_path, monkeypatch):
    """One rank's storage is full, another's hangs: with --datastates-on-failure warn, training goes on."""
    removes, may_remove, waiting = FileSave.remove, threading.Event(), []

    def remove(file):
        waiting.append(threading.current_thread())
        may_remove.wait(LIMIT_SECONDS)
        removes(file)

    monkeypatch.setattr(FileSave, "remove", remove)
    ranks = RanksInTurn(2, own=[{}, {"faults": "sync:1:ENOSPC"}])
    saves = [saver.start(tmp_path, State({"x": torch.ones(1000)})) for saver in ranks.savers]
    while not saves[0].save.is_durable:
        time.sleep(0.01)
    while any(not one.is_over for one in saves):
        for one in saves:
            one.poll()
    assert threading.current_thread() not in waiting, "in a poll"
    assert saves[0].is_at_work and saves[0].outcome is Outcome.FAILED
    may_remove.set()
    assert all(one.join(LIMIT_SECONDS) for one in saves) and not data_files(tmp_path)
    ranks.close()
