"""What cannot be converted, and what an interrupt or a fault leaves: nothing."""

from __future__ import annotations

import fcntl
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_datastates.config import MIB
from megatron_datastates.convert import job
from megatron_datastates.convert.job import Plan, convert, plan_conversion
from megatron_datastates.convert.source import open_source
from megatron_datastates.errors import CorruptDataError, DataStatesError, FormatError, StorageError
from tests.unit.converting import LEAST, convert_to, save_with_dcp
from tests.unit.states import data_files


class Runs:
    """A pickle that runs code where it may."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_metadata_that_names_code_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(FormatError, match=r"\.metadata was not read: it names posix\.mkdir"):
        open_source(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps([1]), pickle.dumps({})])
def test_metadata_that_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(FormatError, match=r"\.metadata is"):
        open_source(tmp_path)


def rewrite(directory: Path, change: Callable[[Any], None]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def leave_directory(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../else.distcp"


def through_extension(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


def too_many_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks *= 2


def leave_tensor(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks[0].offsets = torch.Size([1])


def another_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].properties.dtype = torch.int32


def cut_off(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = 1 << 30


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (leave_directory, "no name of a file beside it"),
        (through_extension, "stream.zstd"),
        (too_many_chunks, "two fragments both hold"),
        (leave_tensor, "has a fragment"),
        (another_dtype, "it is float32"),
        (cut_off, "it is cut off"),
    ],
)
def test_a_source_that_cannot_be_used_leaves_nothing(
    change: Callable[[Any], None], reason: str, format: str, tmp_path: Path
) -> None:
    save_with_dcp(tmp_path / "source", {"a": torch.ones(3)})
    rewrite(tmp_path / "source", change)
    with pytest.raises(DataStatesError, match=reason):
        convert_to(tmp_path / "source", tmp_path / "target", format=format)
    assert os.listdir(tmp_path) == ["source"]


def test_a_target_that_exists_is_left_alone(by_dcp: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(StorageError, match="target exists"):
        convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"] and not os.listdir(tmp_path / "target")


def test_no_room_is_told_before_anything_is_written(
    by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 20 * MIB})
    monkeypatch.setattr(job.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"has 21\.0 MB free, and 21\.0 MB are needed"):
        convert_to(by_dcp, tmp_path / "target")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_end_in_the_middle_leaves_nothing(
    by_dcp: Path, tmp_path: Path, format: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_MOST_WINDOW_BYTES", MIB)
    count = 0

    def moved(done: int) -> None:
        nonlocal count
        count += 1
        assert count < 8, "nobody stopped"
        if count == 3:
            raise error

    plan = plan_conversion(open_source(by_dcp), tmp_path / "target", format=format, ranks=2)
    with pytest.raises(error):
        convert(plan, LEAST, moved=moved)
    assert not os.listdir(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


def test_what_an_earlier_try_left_is_replaced(by_dcp: Path, tmp_path: Path) -> None:
    left = tmp_path / ".target.converting"
    left.mkdir()
    (left / "data-00000-0123456789abcdef-1.bin").write_bytes(b"half")
    made = convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"]
    assert len(data_files(tmp_path / "target")) == len(made.stored_by_rank())


def test_another_conversion_to_the_same_target_is_left_alone(by_dcp: Path, tmp_path: Path) -> None:
    under_way = tmp_path / ".target.converting"
    under_way.mkdir()
    (under_way / "file").write_bytes(b"half")
    descriptor = os.open(under_way, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="another conversion writes into"):
        convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == [".target.converting"]
    assert (under_way / "file").read_bytes() == b"half"
    os.close(descriptor)
    convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_verify_finds_what_was_not_written_as_it_was_read(
    by_dcp: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = job._commit

    def damage(plan: Plan, *rest: Any) -> None:
        commit(plan, *rest)
        path = max(plan.workplace.iterdir(), key=lambda path: path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(job, "_commit", damage)
    with pytest.raises(CorruptDataError, match="'large'"):
        convert_to(by_dcp, tmp_path / "target", format=format, verify=True)
    assert not os.listdir(tmp_path)
