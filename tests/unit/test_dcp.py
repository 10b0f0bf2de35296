"""PyTorch's distributed checkpoints in one process: what is stored, refused and shown."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import WriteResult

import megatron_datastates as ds
from megatron_datastates.dcp import DataStatesReader, DataStatesWriter
from megatron_datastates.dcp.facts import Facts
from megatron_datastates.engine.staging import FileSave
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    MismatchError,
    NotACheckpointError,
    OptionError,
    SaveFailedError,
    StorageError,
)
from megatron_datastates.format.manifest import Manifest, OtherFile
from megatron_datastates.format.values import SaveId, is_dcp_file_name
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publishing import directory_publisher, layouts
from megatron_datastates.pipeline.publishing.directory_publisher import DirectoryPublisher
from megatron_datastates.pipeline.runs.opening import read_manifest
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.upkeep.repair import repair
from tests.unit.by_hand import Part, fragment, index_of, write_checkpoint
from tests.unit.command import run
from tests.unit.states import SMALL, data_files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(scale: float = 1.0) -> dict[str, Any]:
    return {
        "model": {
            "w": torch.nn.Parameter(torch.arange(12.0).reshape(3, 4) * scale),
            "empty": torch.empty(0, 3, dtype=torch.bfloat16),
            "scalar": torch.tensor(2.5 * scale),
        },
        "optim": {"groups": [{"lr": 0.1 * scale, "params": ["w"]}, {"lr": None}], "0": {"1": scale}},
        "step": int(7 * scale),
    }


def blank() -> dict[str, Any]:
    zeros = {key: torch.zeros_like(value) for key, value in state()["model"].items()}
    groups = [{"lr": -1, "params": ["-"]}, {"lr": -1}]
    return {"model": zeros, "optim": {"groups": groups, "0": {"1": -1}}, "step": -1}


def save(value: dict[str, Any], directory: Path, **how: Any) -> None:
    dcp.save(value, storage_writer=DataStatesWriter(directory, **SMALL), **how)


def load(into: dict[str, Any], directory: Path, **how: Any) -> dict[str, Any]:
    dcp.load(into, storage_reader=DataStatesReader(directory, **SMALL), **how)
    return into


def assert_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_equal(*pair)
    else:
        assert found == wanted


def cause_of(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    (failure,) = caught.value.failures.values()
    return failure[0]


# -- what is stored ---------------------------------------------------------------------------------------


def test_a_nested_state_comes_back_in_place(tmp_path: Path) -> None:
    save(state(), tmp_path / "c")
    assert_equal(load(blank(), tmp_path / "c"), state())


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    saved, into = state(), blank()
    torch.set_default_device("meta")  # for which a GPU may stand
    try:
        save(saved, tmp_path / "c")
        load(into, tmp_path / "c")
    finally:
        torch.set_default_device(None)
    assert_equal(into, saved)


def test_metadata_and_nesting_are_those_of_dcps_own_writer(tmp_path: Path) -> None:
    save(state(), tmp_path / "ours")
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    reader = DataStatesReader(tmp_path / "ours")
    ours, theirs = reader.read_metadata(), dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert ours.planner_data == theirs.planner_data
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, known in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[key]
        if isinstance(known, TensorStorageMetadata):
            without_strides(known.properties)
        for field in ("size", "properties", "chunks"):
            assert getattr(found, field, None) == getattr(known, field, None), key
    assert ours.state_dict_metadata["model.w"].properties.requires_grad
    assert ours.storage_meta.checkpoint_id == str(tmp_path / "ours")
    assert ours.storage_meta.save_id and ours.storage_meta.load_id == reader.load_id


@pytest.mark.parametrize("keys", [None, {"optim"}, {"model.w"}])
def test_a_state_can_be_rebuilt_without_a_model(tmp_path: Path, keys: set[str] | None) -> None:
    found = []
    for writer, reader in (
        (DataStatesWriter(tmp_path / "ours"), DataStatesReader(tmp_path / "ours")),
        (dcp.FileSystemWriter(tmp_path / "theirs"), dcp.FileSystemReader(tmp_path / "theirs")),
    ):
        dcp.save(state(), storage_writer=writer)
        found.append({})
        _load_state_dict(found[-1], reader, planner=_EmptyStateDictLoadPlanner(keys=keys), no_dist=True)
    assert found[1]
    assert_equal(found[0], found[1])


def test_equal_values_are_serialized_once_and_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are equal, but not the same, are not mixed up; those that can change are not looked at."""
    values = [
        0,
        0.0,
        -0.0,
        False,
        1,
        True,
        1.0,
        1 + 0j,
        "1",
        b"1",
        None,
        math.nan,
        torch.Size([1]),
        [1],
        (1,),
        (1.0,),
        (0.9, 0.95),
        (1, [2]),
    ]
    serialized: list[object] = []
    original = torch.save
    monkeypatch.setattr(torch, "save", lambda value, *a: serialized.append(value) or original(value, *a))
    state = {f"group{i}": {str(at): value for at, value in enumerate(values)} for i in range(10)}
    dcp.save(state, storage_writer=DataStatesWriter(tmp_path / "c"))
    constants = [value for value in serialized if type(value) in (int, float, complex, str, bytes, bool)]
    assert len(constants) == 11, constants
    tuples = [value for value in serialized if type(value) is tuple]
    assert len(tuples) == 3 + 10, "the last one has a list, which may change"
    loaded = {name: dict.fromkeys(group) for name, group in state.items()}
    dcp.load(loaded, storage_reader=DataStatesReader(tmp_path / "c"))
    assert repr(loaded) == repr(state)


def test_what_ds_save_stored_can_be_rebuilt_too(tmp_path: Path) -> None:
    ds.save({"model": {"w": torch.ones(3)}, "step": 7}, tmp_path, **SMALL)
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={"model.w", "step"})
    _load_state_dict(found, DataStatesReader(tmp_path), planner=planner, no_dist=True)
    assert_equal(found, {"model.w": torch.ones(3), "step": 7})


def test_ds_load_reads_it_by_the_same_names(tmp_path: Path) -> None:
    save(state(), tmp_path / "c")
    found = ds.load(tmp_path / "c", into={"model": blank()["model"], "step": None})
    assert_equal(found, {"model": state()["model"], "step": 7})


def test_one_writer_serves_many_saves_also_over_another_one(tmp_path: Path) -> None:
    writer, reader = DataStatesWriter(tmp_path / "a"), DataStatesReader(tmp_path / "nothing")
    for scale, name in ((1, "a"), (2, "b"), (3, "a"), (4, "a")):
        dcp.save(state(scale), storage_writer=writer, checkpoint_id=tmp_path / name)
        found = blank()
        dcp.load(found, storage_reader=reader, checkpoint_id=tmp_path / name)
        assert_equal(found, state(scale))
        assert len(os.listdir(tmp_path / name)) == 4  # one save's data file, index, manifest and facts
    dcp.save(state(5), storage_writer=writer)
    assert_equal(load(blank(), tmp_path / "a"), state(5))


def test_a_checkpoint_of_dcps_own_is_replaced(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path))
    save(state(2), tmp_path)
    assert not list(tmp_path.glob("*.distcp")) and not (tmp_path / ".metadata").exists()
    assert_equal(load(blank(), tmp_path), state(2))


def test_an_empty_state_is_a_checkpoint(tmp_path: Path) -> None:
    save({}, tmp_path / "c")
    assert DataStatesReader(tmp_path / "c").read_metadata().state_dict_metadata == {}


def test_a_save_and_a_load_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    dcp.save(state(), storage_writer=DataStatesWriter(tmp_path / "c", report_file=str(path)))
    dcp.load(blank(), storage_reader=DataStatesReader(tmp_path / "c", report_file=str(path)))
    saved, loaded = map(json.loads, path.read_text().splitlines())
    assert (saved["event"], saved["mode"], saved["state"], saved["ranks"]) == ("save", "dcp", "published", 1)
    assert saved["bytes"] > 0 and loaded["state"] == "loaded" and loaded["bytes"] > 0


def test_compressed_state_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    dcp.save(state(), storage_writer=DataStatesWriter(tmp_path, compress=3))
    assert_equal(load(blank(), tmp_path), state())


# -- what is refused --------------------------------------------------------------------------------------


class Stranger:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch " + os.environ.get("TRACE", "/nowhere"),)


def test_an_object_that_no_load_would_accept_is_not_saved(tmp_path: Path) -> None:
    save(state(1), tmp_path)
    with pytest.raises(CheckpointException) as caught:
        save({"x": Stranger()}, tmp_path)
    error = cause_of(caught)
    assert isinstance(error, SaveFailedError)
    assert "object 'x' was not saved, as no load would accept it" in str(error)
    assert_equal(load(blank(), tmp_path), state(1))
    assert len(data_files(tmp_path)) == 1


class OwnBytes(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = ["own", torch.load(value, weights_only=False)]


def test_a_planner_of_ones_own_gets_the_bytes_of_safe_objects_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    save({"n": (1, {"a": 2.5})}, tmp_path / "c")
    assert load({"n": None}, tmp_path / "c", planner=OwnBytes()) == {"n": ["own", (1, {"a": 2.5})]}
    dcp.save({"n": Stranger()}, storage_writer=DataStatesWriter(tmp_path / "d", trust_objects=True))
    with pytest.raises(CheckpointException) as caught:
        load({"n": None}, tmp_path / "d", planner=OwnBytes())
    assert "was not loaded" in str(cause_of(caught))
    assert not (tmp_path / "trace").exists()


class Odd(dcp.DefaultSavePlanner):
    """Makes what `how` says of each item."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        if write_item.type is WriteItemType.BYTE_IO:
            return {"json": io.BytesIO(b"{}"), "text": "{}"}.get(self.how, found)
        return found[:1] if self.how == "slice" else found

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        if self.how == "forgets":
            return SavePlan(plan.items)
        return SavePlan(plan.items[:-1], plan.storage_data) if self.how == "drops" else plan


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("json", "the bytes of the object 'n' cannot be stored"),
        ("text", "is an object, and its planner made a str"),
        ("slice", r"tensor 'w' has shape \(1,\), and the plan says \(3,\)"),
        ("forgets", "A planner's finish_plan has to keep it"),
    ],
)
def test_what_a_planner_makes_is_checked(tmp_path: Path, how: str, text: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.ones(3), "n": 1}, tmp_path / "c", planner=Odd(how))
    with pytest.raises(DataStatesError, match=text):
        raise cause_of(caught)
    assert not (tmp_path / "c" / "datastates.manifest").exists()


def test_a_planner_whose_metadata_say_more_than_was_stored_is_refused_at_the_load(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "x": torch.ones(3)}, tmp_path / "c", planner=Odd("drops"))
    with pytest.raises(CheckpointException, match="x"):
        load({"w": torch.zeros(3), "x": torch.zeros(3)}, tmp_path / "c")


class Annotating(dcp.DefaultSavePlanner):
    """Has data of its own in the metadata, which are not plain."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=Stranger())


@pytest.mark.parametrize(("planner", "faults"), [(Annotating, ""), (None, "sync:1:ENOSPC")])
def test_the_file_of_a_failed_save_is_gone_before_its_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner: Callable[[], Any] | None, faults: str
) -> None:
    """The program may end then, and its threads with it."""
    remove = FileSave.remove

    def remove_late(file: FileSave) -> None:
        time.sleep(0.3)
        remove(file)

    monkeypatch.setattr(FileSave, "remove", remove_late)
    monkeypatch.setenv("MEGATRON_DATASTATES_FAULTS", faults)
    with pytest.raises(CheckpointException):
        save({"w": torch.ones(3), "n": 1}, tmp_path, planner=planner and planner())
    assert not data_files(tmp_path)


def test_a_planners_own_data_have_to_be_plain(tmp_path: Path) -> None:
    save(state(1), tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointException) as caught:
        save(state(2), tmp_path, planner=Annotating())
    assert "was not saved, as no load would accept it" in str(cause_of(caught))
    assert sorted(os.listdir(tmp_path)) == before
    assert_equal(load(blank(), tmp_path), state(1))


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"s": torch.eye(3).to_sparse()}, tmp_path / "c")
    assert "only strided tensors can be saved" in str(cause_of(caught))
    with pytest.raises(CheckpointException) as caught:
        save({"optimizer.datastates_map/shard_0_1": torch.ones(1)}, tmp_path / "c")
    assert "reserved for optimizer maps" in str(cause_of(caught))
    assert isinstance(cause_of(caught).__cause__, MismatchError)


def test_saves_without_collectives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataStatesError, match="cannot save with use_collectives=False"):
        save(state(), tmp_path / "c", use_collectives=False)
    assert not (tmp_path / "c").exists()


def test_a_save_that_another_of_the_same_writer_overtakes_fails(tmp_path: Path) -> None:
    class Overtaken(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            thread = threading.Thread(target=dcp.save, args=[state(2)], kwargs=second)
            thread.start()
            thread.join()
            return super().finish_plan(new_plan)

    writer = DataStatesWriter(tmp_path / "first", **SMALL)
    second = {"storage_writer": writer, "checkpoint_id": tmp_path / "second"}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(1), storage_writer=writer, planner=Overtaken())
    assert f"began another one, to {tmp_path / 'second'}" in str(cause_of(caught))
    assert not (tmp_path / "first").exists()
    assert_equal(load(blank(), tmp_path / "second"), state(2))


class _SlowObjects(dcp.DefaultSavePlanner):
    """Serializes no object before it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            self.begun.set()
            assert self.may_go_on.wait(60)
        return super().resolve_data(write_item)


def test_a_save_that_overtakes_is_published_though_the_other_is_written_after_it(tmp_path: Path) -> None:
    planner = _SlowObjects()

    class Writer(DataStatesWriter):
        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            if threading.current_thread() is threading.main_thread():  # the second save has written, too
                planner.may_go_on.set()
                first.exception(60)
            super().finish(metadata, results)

    writer = Writer(tmp_path, **SMALL)
    first = dcp.async_save(state(1), checkpoint_id=tmp_path / "first", storage_writer=writer, planner=planner)
    assert isinstance(first, Future) and planner.begun.wait(60)
    dcp.save(state(2), checkpoint_id=tmp_path / "second", storage_writer=writer)
    assert "began another one" in str(first.exception())
    assert_equal(load(blank(), tmp_path / "second"), state(2))


def test_a_writer_whose_save_another_rank_has_failed_can_be_sent_to_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("of another rank, so that the writer has no part in it")

    writer = DataStatesWriter(tmp_path, **SMALL)
    with monkeypatch.context() as failing:
        failing.setattr(DataStatesWriter, "finish", fail)
        with pytest.raises(CheckpointException):
            dcp.save(state(), storage_writer=writer)
    dcp.save(state(), storage_writer=pickle.loads(pickle.dumps(writer)))
    assert_equal(load(blank(), tmp_path), state())


@pytest.mark.parametrize("fsyncs", [None, 1, 2, 3])
def test_a_signal_handler_that_saves_in_the_middle_of_a_save_gets_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsyncs: int | None
) -> None:
    """While the save is planned, or publishes: at its first fsync, and so on."""
    arrivals: list[int] = []
    refused: list[str] = []

    def arrive(*_: object) -> None:
        arrivals.append(1)
        if len(arrivals) == (fsyncs or 1):
            signal.raise_signal(signal.SIGUSR1)

    def on_signal(*_: object) -> None:
        with pytest.raises(CheckpointException) as found:
            save(state(2.0), tmp_path / "last")
        refused.append(str(found.value))

    planner = DefaultSavePlanner()
    on, name = (os, "fsync") if fsyncs else (planner, "resolve_data")
    called = getattr(on, name)
    monkeypatch.setattr(on, name, lambda *given: arrive() or called(*given))
    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        save(state(), tmp_path / "c", planner=planner)
    finally:
        signal.signal(signal.SIGUSR1, before)
    (text,) = refused
    assert "a signal handler only sets a flag" in text and not (tmp_path / "last").exists()
    assert_equal(load(blank(), tmp_path / "c"), state())
    save(state(3.0), tmp_path / "last")
    assert_equal(load(blank(), tmp_path / "last"), state(3.0))


def test_a_signal_handler_may_save_while_a_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait = [signal.raise_signal], RankSave.await_durable

    def interrupted(rank_save: RankSave) -> None:
        while waits:
            waits.pop()(signal.SIGUSR1)
        wait(rank_save)

    monkeypatch.setattr(RankSave, "await_durable", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: save(state(2.0), tmp_path / "last"))
    try:
        save(state(), tmp_path / "c")
    finally:
        signal.signal(signal.SIGUSR1, before)
    for name, scale in (("c", 1.0), ("last", 2.0)):
        assert_equal(load(blank(), tmp_path / name), state(scale))


def test_only_directories_are_accepted(tmp_path: Path) -> None:
    for kind in (DataStatesWriter, DataStatesReader):
        with pytest.raises(DataStatesError, match="is a URL"):
            kind("s3://bucket/checkpoint")
        for path in (Path("s3://bucket/checkpoint"), Path("msc://profile/checkpoint"), ""):
            with pytest.raises(DataStatesError):  # and not a directory below the current one
                kind(path)
        with pytest.raises(OptionError):
            kind(tmp_path, staging=1)
        assert kind.validate_checkpoint_id(str(tmp_path / "a")) and not kind.validate_checkpoint_id(
            "s3://b/c"
        )


def test_a_directory_of_dcps_own_is_not_taken_for_ours(tmp_path: Path) -> None:
    dcp.save(state(2), storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(NotACheckpointError, match="holds a checkpoint of torch_dist or DCP, not a"):
        DataStatesReader(tmp_path).read_metadata()


def test_an_unpublished_checkpoint_cannot_be_loaded(tmp_path: Path) -> None:
    save(state(), tmp_path)
    (tmp_path / "datastates.manifest").unlink()
    with pytest.raises(NotACheckpointError):
        DataStatesReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointException, match="NotACheckpointError"):
        load(blank(), tmp_path)


def test_a_rank_that_can_open_a_checkpoint_only_at_the_second_attempt_does_not_go_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP asks a second time, and then makes fewer collective calls than on the other ranks."""
    save(state(), tmp_path)
    opened, real = [], Checkpoint.open

    def open_late(*args: Any) -> Checkpoint:
        opened.append(args)
        if len(opened) == 1:
            raise StorageError("not there yet")
        return real(*args)

    monkeypatch.setattr(Checkpoint, "open", open_late)
    with pytest.raises(CheckpointException, match=r"only at the second attempt.*StorageError: not there yet"):
        load(blank(), tmp_path)
    assert_equal(load(blank(), tmp_path), state())


@pytest.mark.parametrize("first", [torch.Tensor.detach, torch.t])
@pytest.mark.parametrize("last", [torch.Tensor.detach, torch.t])
def test_the_last_of_targets_that_share_memory_counts(first: Any, last: Any, tmp_path: Path) -> None:
    """Also where they are strided: threads that fill both at once would leave parts of each."""
    saved = {"a": torch.ones(1024, 1024), "b": torch.full((1024, 1024), 2.0)}
    save(saved, tmp_path)
    for _ in range(3):
        memory = torch.zeros(1024, 1024)
        load({"a": first(memory), "b": last(memory)}, tmp_path)
        assert memory.unique().tolist() == [2.0]


class Placed(DefaultLoadPlanner):
    """Resolves a tensor to a target of its own, and may ask for more than it has been asked for."""

    def __init__(self, target: torch.Tensor, more: int = 0) -> None:
        super().__init__()
        self._target, self._more = target, more

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        more = torch.Size([self._more])
        return LoadPlan([dataclasses.replace(item, storage_offsets=more) for item in plan.items])

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


def test_a_target_without_memory_is_refused(tmp_path: Path) -> None:
    """To copy to it does nothing, so that the load would have returned."""
    save({"w": torch.ones(4)}, tmp_path)
    planner = Placed(torch.empty(4, device="meta"))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(4)}, storage_reader=DataStatesReader(tmp_path), planner=planner)
    assert "tensor 'w': the target is on the meta device" in str(cause_of(caught))


class Quantized(torch.Tensor):
    """Wraps a tensor; a part of it is a copy, as of classes of Transformer Engine that have no slices."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        found = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), kwargs: Any = None) -> Any:
        first = arguments[0]
        if function is torch.ops.aten.detach.default:
            return Quantized(first.inner)
        if function is torch.ops.aten.copy_.default and isinstance(first, Quantized):
            first.inner.copy_(arguments[1])
            return first
        return function(*(one.inner.clone() if isinstance(one, cls) else one for one in arguments))


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_would_be_read_into_a_copy_of_a_part_is_refused(fragments: int, tmp_path: Path) -> None:
    whole = torch.arange(16, dtype=torch.uint8).reshape(4, 4)
    parts = whole.chunk(fragments)
    offsets = [4096 + 64 * number for number in range(fragments)]
    places = [
        (fragment("w", [4, 4], [number * len(part), 0], list(part.shape)), 0, offset)
        for number, (part, offset) in enumerate(zip(parts, offsets, strict=True))
    ]
    pieces = [(offset, part.numpy().tobytes()) for part, offset in zip(parts, offsets, strict=True)]
    write_checkpoint(tmp_path, [Part(pieces=pieces)], index_of(places))
    target = Quantized(torch.zeros(4, 4))
    if fragments == 1:
        load({"w": target}, tmp_path)
        assert torch.equal(target.inner, whole.float())
        return
    with pytest.raises(CheckpointException) as caught:
        load({"w": target}, tmp_path)
    assert "tensor 'w': the target is of a class of tensors whose parts are copies" in str(cause_of(caught))


def test_a_plan_that_leaves_its_fragment_is_refused(tmp_path: Path) -> None:
    """What lies there are the bytes of other tensors."""
    save({"w": torch.ones(4), "x": torch.full((64,), 7.0)}, tmp_path)
    planner = Placed(memory := torch.zeros(4), more=2)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(4)}, storage_reader=DataStatesReader(tmp_path), planner=planner)
    assert "tensor 'w': the load plan asks for (4,) at (2,) of a fragment of shape (4,)" in str(
        cause_of(caught)
    )
    assert not memory.any()


def test_a_plan_may_ask_for_nothing_anywhere(tmp_path: Path) -> None:
    """As torch's planner does where a rank has no part of a tensor."""

    class Nothing(Placed):
        def create_local_plan(self) -> LoadPlan:
            items = super().create_local_plan().items
            return LoadPlan([dataclasses.replace(item, lengths=torch.Size([0])) for item in items])

    save({"w": torch.ones(4)}, tmp_path)
    planner = Nothing(memory := torch.zeros(4), more=9)
    dcp.load({"w": torch.zeros(4)}, storage_reader=DataStatesReader(tmp_path), planner=planner)
    assert not memory.any()


def test_columns_of_one_tensor_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
    halves = [whole[:, :4], whole[:, 4:]]
    places = [(fragment("w", [8, 8], [0, 4 * n], [8, 4]), 0, 4096 + 64 * n) for n in range(2)]
    pieces = [(4096 + 64 * n, half.contiguous().numpy().tobytes()) for n, half in enumerate(halves)]
    write_checkpoint(tmp_path, [Part(pieces=pieces)], index_of(places))
    reads, read = [], Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, *rest: reads.append(rest) or read(self, *rest))
    into = {"w": torch.zeros(8, 8, dtype=torch.uint8)}
    load(into, tmp_path)
    assert torch.equal(into["w"], whole)
    assert len(reads) == 1


def test_a_tensor_with_a_hole_is_not_loaded_in_part(tmp_path: Path) -> None:
    places = [(fragment("w", [4, 4], [0, 0], [2, 4]), 0, 4096)]
    write_checkpoint(tmp_path, [Part(pieces=[(4096, bytes(8))])], index_of(places))
    with pytest.raises(CheckpointException) as caught:
        load({"w": torch.zeros(4, 4, dtype=torch.uint8)}, tmp_path)
    assert "tensor 'w' has holes: 8 elements of shape (4, 4) are stored" in str(cause_of(caught))


def test_damaged_facts_are_an_error(tmp_path: Path) -> None:
    save(state(), tmp_path)
    (path,) = tmp_path.glob("dcp-*.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match=path.name):
        DataStatesReader(tmp_path).read_metadata()


@pytest.mark.parametrize(
    "lie", [{"properties": [1]}, {"properties": {"model.w": 1}}, {"storage_meta": None}], ids=str
)
def test_facts_of_other_types_are_an_error(lie: dict[str, Any], tmp_path: Path) -> None:
    save(state(), tmp_path)
    (path,) = tmp_path.glob("dcp-*.pt")
    torch.save(vars(Facts()) | lie, path)
    manifest = read_manifest(tmp_path)
    manifest = msgspec.structs.replace(manifest, others=[OtherFile.of(path.name, path.read_bytes())])
    (tmp_path / "datastates.manifest").write_bytes(manifest.encode())
    with pytest.raises(FormatError, match=f"{path.name} does not hold what DCP knows"):
        DataStatesReader(tmp_path).read_metadata().state_dict_metadata["model.w"]


# -- the tools --------------------------------------------------------------------------------------------


def test_commands_read_it(tmp_path: Path) -> None:
    for iteration in (1, 2):
        save(state(iteration), tmp_path / "run" / f"iter_{iteration:07d}")
    first, second = sorted((tmp_path / "run").iterdir())
    code, out, _ = run("ls", tmp_path / "run", "--json")
    assert code == 0 and [one["complete"] for one in json.loads(out)] == [True, True]
    code, out, _ = run("show", first, "--json")
    shown = json.loads(out)
    assert {row["key"] for row in shown["tensors"]} == {"model.w", "model.empty", "model.scalar"}
    assert "optim.groups.0.lr" in {row["key"] for row in shown["objects"]}
    code, out, _ = run("verify", first)
    assert code == 0 and "note" not in out
    assert run("diff", first, first)[0] == 0
    assert run("diff", first, second)[0] == 1
    assert run("prune", tmp_path / "run", "--keep-last", "2", "--min-age", "0", "--yes")[0] == 0
    assert_equal(load(blank(), first), state(1))


def test_it_converts_to_dcps_own_format_with_its_nesting(tmp_path: Path) -> None:
    save(state(), tmp_path / "c")
    code, out, errors = run("convert", tmp_path / "c", tmp_path / "theirs", "--verify")
    assert code == 0, out + errors
    assert not list((tmp_path / "theirs").glob("dcp-*"))
    found = blank()
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "theirs"))
    assert_equal(found, state())
    known = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert known.planner_data["optim.groups.0.lr"] == ("optim", "groups", 0, "lr")


def test_a_lost_manifest_is_made_anew(tmp_path: Path) -> None:
    save(state(), tmp_path)
    known = DataStatesReader(tmp_path).read_metadata().planner_data
    (tmp_path / "datastates.manifest").unlink()
    repair(tmp_path)
    assert_equal(load(blank(), tmp_path), state())
    assert DataStatesReader(tmp_path).read_metadata().planner_data == known


WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = sys.modules["megatron.core"] = None
import torch, torch.distributed.checkpoint as dcp
from megatron_datastates.dcp import DataStatesReader, DataStatesWriter
dcp.save({"w": torch.ones(3)}, storage_writer=DataStatesWriter(sys.argv[1]))
state = {"w": torch.zeros(3)}
dcp.load(state, storage_reader=DataStatesReader(sys.argv[1]))
assert state["w"].all()
assert "megatron_datastates.mcore.save.strategy" not in sys.modules
"""


def test_megatron_need_not_be_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_MEGATRON, str(tmp_path / "c")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_nested_state_stays_nested_through_conversions(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    for source, target in (("theirs", "ours"), ("ours", "again"), ("again", "back")):
        to = "datastates" if target == "again" else ""
        code, _, said = run(
            "convert", tmp_path / source, tmp_path / target, "--verify", *(["--to", to] if to else [])
        )
        assert code == 0, said
    assert run("verify", tmp_path / "ours")[0] == run("verify", tmp_path / "back")[0] == 0
    for name in ("ours", "again"):
        assert_equal(load(blank(), tmp_path / name), state())
    found = blank()
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "back"), no_dist=True)
    assert_equal(found, state())
    for name in ("theirs", "back"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    assert_equal(torch.load(tmp_path / "back.pt"), torch.load(tmp_path / "theirs.pt"))
    metadata = [dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("theirs", "back")]
    assert metadata[0].planner_data == metadata[1].planner_data
    assert properties_of(tmp_path / "back") == properties_of(tmp_path / "theirs")
    assert properties_of(tmp_path / "back")["model.w"].requires_grad


def properties_of(directory: Path) -> dict[str, Any]:
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {k: one for k, one in entries.items() if isinstance(one, TensorStorageMetadata)}
    return {k: without_strides(one.properties) for k, one in tensors.items()}


def without_strides(properties: TensorProperties) -> TensorProperties:
    """torch 2.15 stores them, and nothing reads them."""
    vars(properties).pop("strides", None)
    return properties


def test_a_checkpoint_without_dcps_nesting_does_not_become_one_of_dcps(tmp_path: Path) -> None:
    flat = {"w": torch.ones(3, requires_grad=True)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(tmp_path / "theirs")
    dcp.save(flat, storage_writer=writer, planner=planner, no_dist=True)
    assert run("convert", tmp_path / "theirs", tmp_path / "ours")[0] == 0
    assert not any(map(is_dcp_file_name, os.listdir(tmp_path / "ours")))


def test_a_coordinator_does_not_keep_the_layouts_of_all_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_SPARE_BYTES", 0)
    forgotten: list[int] = []
    forget = layouts.LayoutStore.forget

    def noting(store: layouts.LayoutStore, epoch: int | None) -> None:
        forgotten.append(store._bytes)
        forget(store, epoch)

    monkeypatch.setattr(layouts.LayoutStore, "forget", noting)
    for size in range(1, 21):
        save({f"w{i}": torch.ones(size) for i in range(8)}, tmp_path / str(size))
    assert len(forgotten) >= 3 and max(forgotten) < 2 * min(forgotten)
    for size in (1, 20):
        found = load({f"w{i}": torch.zeros(size) for i in range(8)}, tmp_path / str(size))
        assert all(torch.equal(one, torch.ones(size)) for one in found.values())


def test_nothing_is_kept_of_a_save_for_the_life_of_the_process(tmp_path: Path) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(one) is SaveId for one in gc.get_objects())

    def save_often() -> None:
        for number in range(8):
            save({"w": torch.ones(1)}, tmp_path / str(number % 2))

    save_often()
    before = kept()
    save_often()
    assert kept() == before


def test_an_interrupt_of_the_publishing_is_not_an_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryPublisher, "publish", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.ones(1)}, tmp_path)
    assert [type(error) for error, _ in caught.value.failures.values()] == [KeyboardInterrupt]


def test_a_publishing_that_is_interrupted_does_not_keep_layouts_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_SPARE_BYTES", 0)
    stores: set[layouts.LayoutStore] = set()
    add = layouts.LayoutStore.add_providers

    def interrupted(store: layouts.LayoutStore, *rest: Any) -> None:
        stores.add(store)
        if not was_interrupted.exists():
            was_interrupted.touch()
            raise KeyboardInterrupt
        add(store, *rest)

    was_interrupted = tmp_path / "interrupted"
    monkeypatch.setattr(layouts.LayoutStore, "add_providers", interrupted)
    with pytest.raises((KeyboardInterrupt, CheckpointException)):
        save({"w": torch.ones(1)}, tmp_path / "0")
    save({"w": torch.ones(1)}, tmp_path / "1")
    assert [count for store in stores for count in store._uses.values() if count] == []


def test_saves_with_other_options_do_not_remove_what_one_is_about_to_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two threads may save into one directory: each save removes what earlier ones have left there."""
    found, require_files = threading.Event(), directory_publisher.require_files

    def save_compressed() -> None:
        found.wait(60.0)
        dcp.save({"w": torch.ones(1)}, storage_writer=DataStatesWriter(tmp_path, compress=1))

    other = threading.Thread(target=save_compressed)

    def before_the_rename(directory: Path, manifest: Manifest) -> None:
        require_files(directory, manifest)
        if threading.current_thread() is not other:
            found.set()
            other.join(1.0)

    monkeypatch.setattr(directory_publisher, "require_files", before_the_rename)
    other.start()
    save({"w": torch.zeros(1)}, tmp_path)
    other.join()
    assert torch.equal(load({"w": torch.zeros(1)}, tmp_path)["w"], torch.ones(1))
