"""Conversions that are refused or interrupted: they leave nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fractions
import inspect
import os
import pathlib
import pickle
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata

import megatron_datastates as ds
from megatron_datastates.config import MIB
from megatron_datastates.convert import job, limits, planning, work_directory
from megatron_datastates.convert.job import convert
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import Plan, plan_conversion
from megatron_datastates.convert.sources import pickles
from megatron_datastates.convert.sources.tensor_records import load_tensor_record
from megatron_datastates.convert.work_directory import locked_work_directory
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    StorageError,
    UnsafeObjectError,
)
from megatron_datastates.format.values import MANIFEST_NAME
from tests.support.capabilities import bound_by_permissions
from tests.unit.command import run
from tests.unit.converting import LEAST, convert_to, save_with_dcp
from tests.unit.states import data_files


class Runs:
    """A pickle that runs code where it is allowed to."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_metadata_that_names_code_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(FormatError, match=r"\.metadata was not read: it names posix\.mkdir"):
        open_source(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_object_that_no_load_accepts_is_refused_or_passed_by_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "source", {"w": torch.ones(3), "own": [fractions.Fraction(1, 3)]})
    with pytest.raises(UnsafeObjectError, match=r"'own' cannot be loaded.*Fraction.*trust-objects"):
        convert_to(tmp_path / "source", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    monkeypatch.setenv("MEGATRON_DATASTATES_TRUST_OBJECTS", "on")
    convert_to(tmp_path / "source", tmp_path / "ours")
    assert ds.open(tmp_path / "ours").read_object("own") == [fractions.Fraction(1, 3)]


@pytest.mark.parametrize("data", [b"", b"nonsense", pickle.dumps([1]), pickle.dumps({})])
def test_a_file_that_is_not_metadata_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(FormatError, match=r"\.metadata is"):
        open_source(tmp_path)


def test_a_tensor_without_a_fragment_is_refused(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "source", {"w": torch.ones(3), "none": torch.empty(0, 3)})
    rewrite(tmp_path / "source", lambda metadata: metadata.state_dict_metadata["none"].chunks.clear())
    with pytest.raises(FormatError, match=r"'none' of shape \(0, 3\) has no fragment, expected an empty one"):
        convert_to(tmp_path / "source", tmp_path / "ours")


def test_verification_misses_tensors_that_were_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "source", {"w": torch.ones(3), "none": torch.empty(0, 3)})
    rewrite(tmp_path / "source", lambda metadata: metadata.state_dict_metadata["none"].chunks.clear())
    monkeypatch.setattr(planning, "_require_coverage", lambda source: None)
    plan = plan_conversion(open_source(tmp_path / "source"), tmp_path / "ours")
    with pytest.raises(CorruptDataError, match="tensor 'none' differs"):
        convert(plan, LEAST, verify=True)


def rewrite(directory: Path, change: Callable[[Any], None]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def sets_attribute(what: bytes, name: str) -> bytes:
    """Returns a pickle program that sets an attribute of the object that `what` leaves on the stack."""
    return what + b"N}" + text(name) + text("changed") + b"s\x86b0"


ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
FUNCTION = b"ctorch.serialization\n_get_layout\n"


@pytest.mark.parametrize(
    "program",
    [
        sets_attribute(b"cpathlib\nPurePosixPath\n", "_str"),
        sets_attribute(b"cpathlib\nPosixPath\n", "__fspath__"),
        *(
            sets_attribute(b"ctorch.distributed.checkpoint.metadata\n" + name + b"\n", "changed")
            for name in (b"Metadata", b"ChunkStorageMetadata", b"BytesStorageMetadata", b"MetadataIndex")
        ),
        sets_attribute(b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n", "changed"),
        sets_attribute(b"cmegatron.core\nAnything\n", "changed"),
        sets_attribute(ENCODING, "changed"),
        sets_attribute(ENCODING + b"K\x00\x85R", "changed"),  # of a member
        sets_attribute(FUNCTION, "__doc__"),
        sets_attribute(b"ctorch\nSize\n", "changed"),
        sets_attribute(b"ctorch\nfloat32\n", "changed"),
        sets_attribute(b"cbuiltins\nset\n", "changed"),
        sets_attribute(b"ccollections\nOrderedDict\n", "changed"),
    ],
)
def test_metadata_cannot_change_the_process(program: bytes, tmp_path: Path) -> None:
    watched = [
        pathlib.PurePosixPath, pathlib.PosixPath, pickles._strided, pickles.Unread, pickles._Fields,
        *filter(inspect.isclass, pickles._KNOWN.values()), dcp_metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo, *dcp_metadata._MEM_FORMAT_ENCODING,
        *(getattr(dcp_metadata, name) for _, name in pickles._KNOWN if hasattr(dcp_metadata, name)),
    ]  # fmt: skip
    functions = [one for one in pickles._KNOWN.values() if isinstance(one, pickles.Function)]
    before, calls = [dict(vars(one)) for one in watched], [one._call for one in functions]
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + program + b"N.")
    with pytest.raises(FormatError):
        open_source(tmp_path)
    assert [dict(vars(one)) for one in watched] == before
    assert [one._call for one in functions] == calls


@pytest.mark.parametrize("name", ["_rebuild_tensor_v2", "_rebuild_parameter"])
def test_a_tensors_record_cannot_change_the_process(name: str) -> None:
    program = sets_attribute(b"ctorch._utils\n" + name.encode() + b"\n", "__doc__")
    with pytest.raises(FormatError, match="it would change a function"):
        load_tensor_record(b"\x80\x04" + program + b"N.", "here")


def storage(metadata: Any) -> Any:
    return metadata.state_dict_metadata["a"]


def one_index(metadata: Any) -> Any:
    return next(iter(metadata.storage_data))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.storage_data.update({one_index(m): {}}),
        lambda m: m.storage_data.update({"x": 1}),
        lambda m: setattr(m.storage_data[one_index(m)], "relative_path", "\ud800"),
        lambda m: setattr(storage(m), "size", None),
        lambda m: setattr(storage(m), "size", ("x",)),
        lambda m: setattr(storage(m), "size", (3.5,)),
        lambda m: setattr(storage(m), "chunks", None),
        lambda m: setattr(storage(m), "chunks", [1]),
        lambda m: setattr(storage(m), "properties", None),
        lambda m: setattr(storage(m).properties, "dtype", None),
        lambda m: setattr(storage(m).chunks[0], "offsets", None),
        lambda m: setattr(storage(m).chunks[0], "offsets", (0.5,)),
        lambda m: setattr(storage(m).chunks[0], "offsets", (-1,)),
        lambda m: setattr(storage(m).chunks[0], "sizes", (1 << 70,)),
        lambda m: object.__setattr__(one_index(m), "offset", 5),
        lambda m: m.state_dict_metadata.update({5: storage(m)}),
        lambda m: m.state_dict_metadata.update({b"z": storage(m)}),
        lambda m: m.state_dict_metadata.update({"s\udcff": storage(m)}),
    ],
)
def test_metadata_of_wrong_types_is_damaged(change: Callable[[Any], None], tmp_path: Path) -> None:
    save_with_dcp(tmp_path, {"a": torch.ones(3)})
    rewrite(tmp_path, change)
    with pytest.raises(FormatError, match=r"\.metadata"):
        open_source(tmp_path)


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
        (leave_directory, "expected a file in the same directory"),
        (through_extension, "stream.zstd"),
        (too_many_chunks, "two fragments both hold"),
        (leave_tensor, "does not contain its fragment"),
        (another_dtype, "it has dtype float32"),
        (cut_off, "is truncated"),
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


def test_a_disk_without_room_is_refused_before_anything_is_written(
    by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 20 * MIB})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=r"has 21\.0 MB free, and 21\.0 MB are needed"):
        convert_to(by_dcp, tmp_path / "target")
    assert not os.listdir(tmp_path)


def test_room_is_needed_for_objects_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds.save({"w": torch.ones(3), "o": bytes(3_000_000)}, tmp_path / "source")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2_000_000}))
    with pytest.raises(StorageError, match=r"has 2\.00 MB free, and 3\.00 MB are needed"):
        convert_to(tmp_path / "source", tmp_path / "target")


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing(
    by_dcp: Path, tmp_path: Path, format: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MOST_WINDOW_BYTES", MIB)
    count = 0

    def progress(done: int) -> None:
        nonlocal count
        count += 1
        assert count < 8, "the workers did not stop"
        if count == 3:
            raise error

    plan = plan_conversion(open_source(by_dcp), tmp_path / "target", format=format, ranks=2)
    with pytest.raises(error):
        convert(plan, LEAST, progress=progress)
    assert not os.listdir(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


def test_what_an_earlier_try_left_is_replaced(by_dcp: Path, tmp_path: Path) -> None:
    left = tmp_path / ".target.converting"
    left.mkdir()
    (left / "data-00000-0123456789abcdef-1.bin").write_bytes(b"half")
    made = convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"]
    assert len(data_files(tmp_path / "target")) == len(made.stored_by_rank())


@pytest.mark.parametrize("is_killed", [False, True])
def test_copies_of_read_only_directories_are_removed_after_a_failure(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "source", {"a": torch.ones(3)})
    for folder in (tmp_path / "source" / "added" / "below", tmp_path / "source" / "added"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_bytes(b"a: 1")
        folder.chmod(0o555)
    with bound_by_permissions():
        with monkeypatch.context() as failing:
            failing.setattr(job, "rename_to_target", interrupt)
            if is_killed:
                failing.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            with pytest.raises(KeyboardInterrupt):
                convert_to(tmp_path / "source", tmp_path / "made" / "target")
        if not is_killed:
            assert os.listdir(tmp_path) == ["source"]
        convert_to(tmp_path / "source", tmp_path / "made" / "target")
    copied = tmp_path / "made" / "target" / "added" / "below" / "config.yaml"
    assert copied.read_bytes() == b"a: 1" and copied.parent.stat().st_mode & 0o777 == 0o555
    assert os.listdir(tmp_path / "made") == ["target"]


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def with_a_directory_of_somebody(tmp_path: Path) -> None:
    (tmp_path / ".target.converting").mkdir()
    (tmp_path / ".target.converting" / "thesis").write_bytes(b"kept")


def with_a_link(tmp_path: Path) -> None:
    with_a_directory_of_somebody(tmp_path)
    (tmp_path / ".target.converting").rename(tmp_path / "mine")
    (tmp_path / ".target.converting").symlink_to("mine")


def with_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / ".target.converting").symlink_to("nowhere")


def with_a_file(tmp_path: Path) -> None:
    (tmp_path / ".target.converting").write_bytes(b"kept")


@pytest.mark.parametrize(
    "before", [with_a_directory_of_somebody, with_a_link, with_a_dangling_link, with_a_file]
)
def test_what_no_conversion_made_is_not_deleted(
    before: Callable[[Path], None], by_dcp: Path, tmp_path: Path
) -> None:
    before(tmp_path)
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        StorageError,
        match=r"\.target\.converting (is not a directory|contains 'thesis', which)",
    ):
        convert_to(by_dcp, tmp_path / "target")
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize("name", ["inside", "modelopt/inside"])
def test_a_target_within_its_source_is_refused(name: str, tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "source", {"a": torch.ones(3)})
    (tmp_path / "link").symlink_to("source")
    before = os.listdir(tmp_path / "source")
    with pytest.raises(StorageError, match=r"lies inside its source, .*source:"):
        convert_to(tmp_path / "source", tmp_path / "link" / name)
    assert os.listdir(tmp_path / "source") == before


@pytest.mark.parametrize("name", ["", "kept.tmp"])
def test_a_source_where_the_target_is_made_is_not_emptied(name: str, tmp_path: Path) -> None:
    """A kill right before the last step leaves a complete checkpoint of such a name."""
    source = tmp_path / "made" / ".target.converting" / name
    save_with_dcp(source, {"a": torch.ones(3)})
    (tmp_path / "link").symlink_to(source)
    before = os.listdir(source)
    for given in (source, tmp_path / "link"):
        with pytest.raises(StorageError, match=r"\.converting, where .*made/target is made: rename it"):
            convert_to(given, tmp_path / "made" / "target")
    assert os.listdir(source) == before


@pytest.mark.parametrize("name", ["self", "modelopt/self"])
def test_a_link_to_a_directory_that_it_is_in_is_refused_by_name(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_with_dcp(source, {"a": torch.ones(3)})
    (source / "modelopt").mkdir()
    (source / name).symlink_to(source)
    why = "is a symbolic link to a directory that it is in"
    with pytest.raises(StorageError, match=rf"source/{name} {why}.*: remove it"):
        convert_to(source, tmp_path / "target")
    assert os.listdir(tmp_path) == ["source"]


def test_what_a_link_to_another_directory_names_is_copied(tmp_path: Path) -> None:
    source, tokenizer = tmp_path / "source", tmp_path / "tokenizer"
    save_with_dcp(source, {"a": torch.ones(3)})
    tokenizer.mkdir()
    (tokenizer / "vocabulary.txt").write_text("one")
    (source / "assets").mkdir()
    (source / "assets" / "tokenizer").symlink_to(tokenizer)
    convert_to(source, tmp_path / "target")
    assert (tmp_path / "target" / "assets" / "tokenizer" / "vocabulary.txt").read_text() == "one"


def test_a_pipe_in_a_directory_that_is_copied_is_one_error_with_its_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_with_dcp(source, {"a": torch.ones(3)})
    (source / "modelopt").mkdir()
    os.mkfifo(source / "modelopt" / "pipe")
    with pytest.raises(OSError, match="found a pipe") as raised:
        convert_to(source, tmp_path / "target")
    assert raised.value.filename == str(source / "modelopt" / "pipe")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "[" * 100_000, b"\xff"])
def test_damaged_metadata_json_is_reported_before_anything_is_written(text: Any, tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "source", {"a": torch.ones(3)})
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "source" / "metadata.json").write_bytes(data)
    with pytest.raises(FormatError, match=r"metadata\.json is damaged"):
        plan_conversion(open_source(tmp_path / "source"), tmp_path / "target")


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    source, odd = tmp_path / "source", tmp_path / os.fsdecode(b"odd\xff")
    save_with_dcp(source, {"a": torch.ones(3)})
    with pytest.raises(StorageError, match="is not UTF-8"):
        convert_to(source, odd)
    source.rename(odd)
    with pytest.raises(StorageError, match="is not UTF-8"):
        open_source(odd)
    assert os.listdir(tmp_path) == [odd.name]


def test_another_conversion_to_the_same_target_is_left_alone(by_dcp: Path, tmp_path: Path) -> None:
    under_way = tmp_path / ".target.converting"
    under_way.mkdir()
    (under_way / "__0_0.distcp").write_bytes(b"half")
    descriptor = os.open(under_way, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="another conversion is making"):
        convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == [".target.converting"]
    assert (under_way / "__0_0.distcp").read_bytes() == b"half"
    os.close(descriptor)
    convert_to(by_dcp, tmp_path / "target")
    assert os.listdir(tmp_path) == ["target"]


def test_a_directory_that_another_conversion_has_made_anew_since_it_was_opened_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / ".target.converting", work_directory._open
    with contextlib.ExitStack() as other:

        def open_late(path: Path) -> int:
            descriptor = opened(path)  # of a conversion that fails now
            shutil.rmtree(path)
            monkeypatch.setattr(work_directory, "_open", opened)
            other.enter_context(locked_work_directory(path, tmp_path / "target", ()))
            (path / "__0_0.distcp").write_bytes(b"half")
            return descriptor

        monkeypatch.setattr(work_directory, "_open", open_late)
        with (
            pytest.raises(StorageError, match=f"another conversion is making {tmp_path / 'target'}: "),
            locked_work_directory(path, tmp_path / "target", ()),
        ):
            pass
        assert (path / "__0_0.distcp").read_bytes() == b"half"
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("lists_late", [False, True], ids=["", "listed though gone"])
def test_where_locks_are_of_one_node_a_conversion_that_lost_its_files_makes_no_target(
    lists_late: bool, by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another node has emptied the directory, and is writing there.

    Also where the lost files are still listed: on NFS, listings may be a minute old.
    """
    path, rename = tmp_path / ".target.converting", job.rename_to_target
    monkeypatch.setattr(work_directory, "lock", lambda descriptor: True)
    with contextlib.ExitStack() as other:

        def rename_late(*arguments: Any) -> None:
            names = os.listdir(path)
            other.enter_context(locked_work_directory(path, tmp_path / "target", ()))
            (path / "__0_0.distcp").write_bytes(b"half")
            with monkeypatch.context() as patched:
                if lists_late:
                    patched.setattr(os, "listdir", lambda directory: names)
                rename(*arguments)

        monkeypatch.setattr(job, "rename_to_target", rename_late)
        with pytest.raises(StorageError, match=f"another conversion is making {tmp_path / 'target'}: "):
            convert_to(by_dcp, tmp_path / "target")
        assert (path / "__0_0.distcp").read_bytes() == b"half", "which goes on"
    assert not os.listdir(tmp_path)


def test_a_conversion_for_whose_claim_there_is_no_room_leaves_nothing(
    by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(OSError, match="No space left"):
        convert_to(by_dcp, tmp_path / "runs" / "target")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("format", ["torch_dist", "datastates"])
@pytest.mark.parametrize("late", ["while it writes a file", "before it publishes"])
def test_where_locks_are_of_one_node_a_conversion_leaves_the_files_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, late: str
) -> None:
    """The other one goes on, and made a target that lacked a file, or had the index of this one."""
    source, target = tmp_path / "source", tmp_path / "target"
    path, names = tmp_path / ".target.converting", ("__0_0.distcp", ".metadata", MANIFEST_NAME)
    save_with_dcp(source, {"large": torch.ones(12 * MIB)})
    monkeypatch.setattr(work_directory, "lock", lambda descriptor: True)
    plan = plan_conversion(open_source(source), target, format=format)
    with contextlib.ExitStack() as other:

        def begin_other() -> None:
            other.enter_context(locked_work_directory(path, target, ()))
            for name in names:
                (path / name).write_bytes(b"half")

        def interrupt(bytes_done: int) -> None:
            if late == "while it writes a file":
                begin_other()
                raise KeyboardInterrupt

        if late == "before it publishes":
            monkeypatch.setattr(plan.source, "require_unchanged", begin_other)
        with pytest.raises((StorageError, KeyboardInterrupt)):
            convert(plan, LEAST, progress=interrupt)
        assert [(path / name).read_bytes() for name in names] == 3 * [b"half"]
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_verify_finds_what_was_not_written_as_it_was_read(
    by_dcp: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = job.verify_conversion

    def damage(plan: Plan, *rest: Any) -> None:
        path = max(plan.work_directory.iterdir(), key=lambda path: path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        verify(plan, *rest)

    monkeypatch.setattr(job, "verify_conversion", damage)
    with pytest.raises(CorruptDataError, match="'large'"):
        convert_to(by_dcp, tmp_path / "target", format=format, verify=True)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_verify_finds_what_has_changed_in_a_source_since_it_was_written(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MOST_WINDOW_BYTES", MIB)
    tensors = {"a": torch.ones(3), "large": torch.full((600, 1024), 2.0), "none": torch.empty(0, 3)}
    save_with_dcp(tmp_path / "source", tensors)
    convert_to(tmp_path / "source", tmp_path / "good", format=format, verify=True)
    path = tmp_path / "source" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(tensors["large"].numpy().tobytes()) + (2 << 20)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"__0_0\.distcp, tensor 'large' at .*, so it is corrupt"):
        convert_to(tmp_path / "source", tmp_path / "target", format=format, verify=True)
    assert sorted(os.listdir(tmp_path)) == ["good", "source"]


def before_others_are_copied(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Calls `change` once the tensors were read."""
    copy_others = job._copy_others

    def changed(plan: Plan) -> None:
        change()
        copy_others(plan)

    monkeypatch.setattr(job, "_copy_others", changed)


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("changed", [".metadata", "__0_0.distcp", "common.pt"])
def test_a_source_that_is_saved_again_meanwhile_gives_no_mixture(
    changed: str, is_linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "source", {"a": torch.ones(3)})
    (tmp_path / "source" / "common.pt").write_bytes(b"common")
    path = tmp_path / "source" / changed
    if is_linked:
        path.rename(tmp_path / "behind")
        path.symlink_to(tmp_path / "behind")
    before_others_are_copied(monkeypatch, lambda: path.write_bytes(path.read_bytes()))
    with pytest.raises(StorageError, match=f"{changed} has changed since it was opened: a save into"):
        convert_to(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_file_of_a_later_save_that_has_not_ended_is_noted(is_newer: bool, tmp_path: Path) -> None:
    """Nothing changes while the source is read, so the copy is a mixture."""
    for number, name in enumerate(("source", "later")):
        save_with_dcp(tmp_path / name, {key: torch.full((3,), number) for key in "ab"}, thread_count=2)
    source, published = tmp_path / "source", (tmp_path / "source" / ".metadata").stat().st_mtime
    shutil.copy(tmp_path / "later" / "__0_0.distcp", source)
    at = published + 1 if is_newer else published
    os.utime(source / "__0_0.distcp", (at, at))
    code, printed, _ = run("convert", source, tmp_path / "target")
    made = open_source(tmp_path / "target")
    assert code == 0 and {made.read_tensor(key)[0].item() for key in "ab"} == {0, 1}
    note = "newer than .metadata, which a save writes last"
    assert (note in printed, note in run("verify", source)[1]) == (is_newer, is_newer)
    assert not is_newer or "parts of two saves: __0_0.distcp" in printed


def test_a_common_pt_of_ours_that_is_saved_again_meanwhile_gives_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "stock", {"a": torch.ones(3)})
    path = tmp_path / "source" / "common.pt"
    torch.save({"iteration": 5}, tmp_path / "stock" / "common.pt")
    convert_to(tmp_path / "stock", tmp_path / "source")
    before_others_are_copied(monkeypatch, lambda: torch.save({"iteration": 6}, path))
    with pytest.raises(StorageError, match=r"common\.pt has changed since it was opened"):
        convert_to(tmp_path / "source", tmp_path / "target")


def test_what_no_save_has_written_may_change_while_a_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    save_with_dcp(source, {"a": torch.ones(3)})
    for name in (".nfs000001", "convert.log"):
        (source / name).write_bytes(b"x")

    def change() -> None:
        (source / ".nfs000001").unlink()  # as NFS does once nobody has the file open
        (source / "convert.log").write_bytes(b"x, and more")
        for path in list(source.iterdir()):  # a mount that numbers its files anew
            (tmp_path / "copy").write_bytes(path.read_bytes())
            shutil.copystat(path, tmp_path / "copy")
            (tmp_path / "copy").rename(path)

    before_others_are_copied(monkeypatch, change)
    assert convert_to(source, tmp_path / "target").read_tensor("a").tolist() == [1.0] * 3


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_a_damaged_file_of_others_is_not_copied_as_if_it_were_whole(format: str, tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "stock", {"a": torch.ones(3)})
    torch.save({"iteration": 5, "rate": 0.5}, tmp_path / "stock" / "common.pt")
    convert_to(tmp_path / "stock", tmp_path / "source")
    torch.save({"iteration": 5, "rate": 0.25}, tmp_path / "source" / "common.pt")
    source = open_source(tmp_path / "source")
    with pytest.raises(CorruptDataError, match=r"source/common\.pt is not the file that was saved"):
        plan_conversion(source, tmp_path / "target", format=format)  # before anything is copied
    assert sorted(os.listdir(tmp_path)) == ["source", "stock"]


def test_archives_that_were_written_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_with_dcp(tmp_path / "source", {"a": torch.arange(8.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    made = convert_to(tmp_path / "source", tmp_path / "made", verify=True)
    assert made.read_tensor("a").tolist() == list(range(8))
