"""Files that another program put in place: pipes, devices, and files that claim more than they hold."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import megatron_datastates as ds
from megatron_datastates.cli.main import app
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources.torch_dist import TorchDistSource
from megatron_datastates.convert.sources.zarr_legacy import LegacyZarrSource
from megatron_datastates.engine.reader import read_footer, read_header, read_small
from megatron_datastates.errors import DataStatesError, FormatError, StorageError, printable
from megatron_datastates.files import (
    DOCUMENT_BYTES,
    MANIFEST_BYTES,
    TRACKER_BYTES,
    open_regular,
    read_regular,
)
from megatron_datastates.format.directory import METADATA_NAME
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.training import tracker_recovery
from megatron_datastates.pipeline.runs.runs import may_be_ours, stored_backend
from megatron_datastates.pipeline.runs.tracker import require_tracked, tracked_iteration
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.support.descriptors import open_files
from tests.unit import legacy_zarr
from tests.unit.converting import convert_to, save_with_dcp
from tests.unit.states import OPTIONS, SMALL

pytestmark = pytest.mark.timeout(60)  # opening a pipe would wait forever


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    ds.save({"w": torch.arange(5000), "x": [1]}, tmp_path / "c", **SMALL)
    (tmp_path / "c" / METADATA_NAME).write_text('{"sharded_backend": "datastates"}')
    return tmp_path / "c"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    save_with_dcp(tmp_path / "t", {"w": torch.arange(200_000), "x": [1]})
    return tmp_path / "t"


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


IN_PLACE = pytest.mark.parametrize("put", [pipe, device])


@IN_PLACE
@pytest.mark.parametrize("pattern", [MANIFEST_NAME, "index-*", "data-*", METADATA_NAME])
def test_a_file_that_is_not_regular_is_refused_at_once(ours: Path, put, pattern: str) -> None:
    (path,) = ours.glob(pattern)
    put(path)
    with contextlib.suppress(DataStatesError):
        ds.open(ours, **SMALL).read_tensor("w")
        assert pattern == METADATA_NAME, "the file was needed"
    with contextlib.suppress(DataStatesError):
        assert verify(ours, options=OPTIONS).faults
    with contextlib.suppress(DataStatesError):
        open_source(ours).read_object("x")
    may_be_ours(ours)
    assert stored_backend(ours) == (None if pattern == METADATA_NAME else "datastates")


@IN_PLACE
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_that_is_not_regular_is_not_converted(theirs: Path, tmp_path: Path, put, name: str) -> None:
    put(theirs / name)
    with pytest.raises(DataStatesError):
        convert_to(theirs, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@IN_PLACE
def test_a_companion_that_is_not_a_regular_file_is_not_converted(theirs: Path, tmp_path: Path, put) -> None:
    (theirs / "modelopt").mkdir()
    (theirs / "modelopt" / "state.pt").touch()
    put(theirs / "modelopt" / "state.pt")
    with pytest.raises(OSError, match="expected a regular file"):
        convert_to(theirs, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@IN_PLACE
def test_a_tracker_that_is_not_a_regular_file_names_no_iteration(tmp_path: Path, put) -> None:
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.write_text("5")
    put(path)
    assert tracked_iteration(path) is None
    with pytest.raises(StorageError, match="expected a regular file"):
        require_tracked(path)
    tracker_recovery.mend(path)


@IN_PLACE
def test_the_native_reader_refuses_a_file_that_is_not_regular(tmp_path: Path, put) -> None:
    """It replaces a data file whose footer has been read already."""
    ds.save({"w": torch.arange(5000)}, tmp_path / "c", **SMALL)
    checkpoint = ds.open(tmp_path / "c", **SMALL)
    checkpoint.require([0])
    put(checkpoint.file_path(0))
    with pytest.raises(StorageError, match="expected a regular file"):
        checkpoint.read_tensor("w")


@pytest.mark.parametrize("read", [read_footer, read_header])
def test_headers_and_footers_are_read_from_regular_files_only(tmp_path: Path, read) -> None:
    os.mkfifo(tmp_path / "f")
    with pytest.raises(StorageError, match="expected a regular file, found a pipe"):
        read(tmp_path / "f", 8192)


def sparse(path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def test_a_file_that_claims_more_than_it_can_hold_is_not_read(ours: Path) -> None:
    sparse(ours / MANIFEST_NAME, 8 << 30)
    with pytest.raises(StorageError, match=f"expected at most {MANIFEST_BYTES} bytes, found {8 << 30}"):
        ds.open(ours, **SMALL)
    sparse(ours / METADATA_NAME, DOCUMENT_BYTES + 1)
    assert stored_backend(ours) is None
    with pytest.raises(StorageError):
        read_small(ours / METADATA_NAME, DOCUMENT_BYTES)
    sparse(ours / "tracker", TRACKER_BYTES + 1)
    assert tracked_iteration(ours / "tracker") is None


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("pattern", ["index-*", "data-*"])
def test_a_file_of_another_size_than_its_manifest_says_is_refused(
    ours: Path, pattern: str, more: int
) -> None:
    (path,) = ours.glob(pattern)
    size = path.stat().st_size
    os.truncate(path, size + more)
    with pytest.raises(DataStatesError, match=f"has {size + more} bytes, its manifest says {size}"):
        ds.open(ours, **SMALL).read_tensor("w")


@pytest.mark.parametrize("size", [0, 10, 100])
def test_a_file_shorter_than_a_header_is_no_data_file(tmp_path: Path, size: int) -> None:
    (tmp_path / "data").write_bytes(bytes(size))
    for read in (read_header, read_footer):
        with pytest.raises(DataStatesError):
            read(tmp_path / "data", size)


def test_directories_and_missing_files_raise_the_systems_errors(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    assert open_files(tmp_path) == [], "it is closed again"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing", 10)


HOSTILE_METADATA = {
    "a large index in the memo": b"\x80\x04Nr\xfe\xff\xff\xff0.",
    "a large index in digits": b"\x80\x04Np4294967294\n0.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 32) + b".",
    "long array of bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 32) + b".",
    "long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 32) + b".",
    "long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 32) + b"N.",
    "long number": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b".",
}
LIMITED = """
import resource, sys
from pathlib import Path
import torch
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources.torch_dist import TorchDistSource
from megatron_datastates.errors import FormatError
before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + (256 << 20),) * 2)
for directory in map(Path, sys.argv[1:]):
    try:
        source = open_source(directory)
        source.read_tensor("w")
    except FormatError as error:
        assert "MemoryError" not in str(error), (directory, error)
    else:
        raise AssertionError(directory)
"""


def test_hostile_files_of_torch_dist_take_little_memory(tmp_path: Path, theirs: Path) -> None:
    """The process that reads them may take 256 MiB more."""
    directories = []
    for number, data in enumerate(HOSTILE_METADATA.values()):
        directories.append(tmp_path / f"metadata{number}")
        directories[-1].mkdir()
        (directories[-1] / ".metadata").write_bytes(data)
    directories.append(tmp_path / "deflated")
    shutil.copytree(theirs, directories[-1])
    deflate_pickle(directories[-1] / "__0_0.distcp", TorchDistSource(theirs))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, directories)], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def deflate_pickle(path: Path, source: TorchDistSource) -> None:
    """Replaces the tensor's archive by a compressed pickle of 512 MiB, which ends at the same byte."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02X" + struct.pack("<I", 1 << 29) + bytes(1 << 29))
    record = source.tensors["w"].records[0]
    assert record is not None and record.bytes > len(packed.getvalue())
    with path.open("r+b") as file:
        file.seek(record.offset + record.bytes - len(packed.getvalue()))
        file.write(packed.getvalue())


# -- terminals ------------------------------------------------------------------------------------------

KEY = "a\x1b]0;owned\x07\r\n\x9b2J\u202eb"


def test_control_characters_become_escapes() -> None:
    assert printable("plain é [1]\t") == "plain é [1]\\t"
    assert printable("a\nb\x1b[0m", keep="\n") == "a\nb\\x1b[0m"
    assert str(FormatError(KEY)).isprintable() or "\n" in str(FormatError(KEY))
    assert "\x1b" not in printable(KEY) and "\u202e" not in printable(KEY) and printable(KEY).isprintable()


@pytest.fixture
def odd_keys(tmp_path: Path) -> Iterator[Path]:
    for name, value in (("c", 1.0), ("d", 2.0)):
        ds.save({KEY: torch.full((3,), value), f"o{KEY}": ["\x1b[31m"]}, tmp_path / name, **SMALL)
    yield tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("show", "c"), ("show", "c", "--stats"), ("verify", "c"), ("cat", "c", KEY), ("cat", "c", f"o{KEY}"),
        ("cat", "c", f"{KEY}?"), ("diff", "c", "d"), ("show", "c", f"{KEY}?"), ("show", "c", "--json"),
        ("verify", "damaged"),
    ],
)  # fmt: skip
def test_no_control_character_reaches_a_terminal(odd_keys: Path, command: tuple[str, ...]) -> None:
    shutil.copytree(odd_keys / "c", odd_keys / "damaged")
    (data,) = (odd_keys / "damaged").glob("data-*")
    with data.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff")
    arguments = [str(odd_keys / part) if part in ("c", "d", "damaged") else part for part in command]
    result = CliRunner().invoke(app, arguments)
    shown = result.stdout + result.stderr
    assert shown and all(c.isprintable() or c == "\n" for c in shown), shown


@IN_PLACE
def test_other_files_of_an_array_are_not_opened(tmp_path: Path, put) -> None:
    legacy_zarr.write_array(tmp_path / "c" / "w", torch.ones(2), (2,))
    for name in (".zattrs", "zarr.json", ".zgroup", ".zmetadata"):
        (tmp_path / "c" / "w" / name).write_text("{}")
        put(tmp_path / "c" / "w" / name)
    assert LegacyZarrSource(tmp_path / "c").read_tensor("w").tolist() == [1, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [1] * 70, "chunks": [1] * 70},
        {"shape": [1 << 63], "chunks": [1 << 63]},
        {"shape": [10**30], "chunks": [10**30]},
    ],
)
def test_an_array_of_an_impossible_shape_is_refused(tmp_path: Path, changes) -> None:
    legacy_zarr.write_array(tmp_path / "c" / "w", torch.ones(2), (2,))
    document = tmp_path / "c" / "w" / ".zarray"
    document.write_text(json.dumps(json.loads(document.read_text()) | changes))
    with pytest.raises(FormatError, match="is impossible"):
        _ = LegacyZarrSource(tmp_path / "c").tensors["w"].offsets
