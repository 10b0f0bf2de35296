"""Verify over files that are missing, unreadable, of another save, or not ours."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import resource
import shutil
import struct
import zlib

import msgspec
import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine import reader
from megatron_datastates.engine.reader import read_footer
from megatron_datastates.errors import CorruptDataError, FormatError, StorageError
from megatron_datastates.format.header import Header
from megatron_datastates.format.manifest import OtherFile
from megatron_datastates.format.values import BLOCK_BYTES, MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.upkeep import verify as verifying
from megatron_datastates.pipeline.upkeep.verify import verify, verify_checkpoint
from tests.support.capabilities import bound_by_permissions
from tests.unit.by_hand import SAVE, Part, data_file, file_entry, fragment, index_of, write_checkpoint
from tests.unit.command import run
from tests.unit.states import OPTIONS, SMALL, data_files
from tests.unit.verifying import OBJECT, TWO, A, B, faults, read, w, whole


@pytest.mark.parametrize(
    ("save_id", "rank", "group"), [(SaveId(SAVE.run_id, 9), 0, 0), (SAVE, 1, 0), (SAVE, 0, 1)]
)
def test_a_header_of_another_save_is_found(tmp_path, save_id, rank, group):
    part = Part(pieces=[(0, Header(save_id, rank, 1, group=group).encode()), (4096, A)])
    write_checkpoint(tmp_path, [part], index_of([(w(0, 8, 8), 0, 4096)]))
    path = tmp_path / SAVE.data_file_name(0)
    assert faults(tmp_path) == [f"{path}: header and footer are of different saves"]


def test_a_file_of_another_rank_is_found(tmp_path):
    manifest = write_checkpoint(tmp_path, TWO, index_of([(w(0, 8, 8), 0, 4096)]))
    other = data_file(TWO[0], 1, 2)
    assert file_entry(other, 1).bytes == manifest.files[0].bytes
    (tmp_path / manifest.files[0].name).write_bytes(other)
    assert len(faults(tmp_path)) == 1
    assert "rank 1, group 0; its manifest names it as rank 0's" in faults(tmp_path)[0]


@pytest.mark.parametrize(
    ("content", "fault"), [(b"other", "is not the file that was saved"), (None, "No such file")]
)
def test_a_changed_or_missing_file_of_somebody_elses_is_found(tmp_path, content, fault):
    path = tmp_path / "common.pt"
    others = [OtherFile("common.pt", len(OBJECT), hashlib.sha256(OBJECT).hexdigest())]
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]), others=others)
    path.write_bytes(OBJECT)
    assert faults(tmp_path) == []
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    (found,) = faults(tmp_path)
    assert str(path) in found and fault in found


def test_a_file_that_cannot_be_used_does_not_stop_the_others(tmp_path):
    manifest = write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]))
    (tmp_path / manifest.files[0].name).unlink()
    verdict = verify(tmp_path, options=OPTIONS)
    assert (len(verdict.faults), verdict.bytes_checked) == (1, 8192)


def test_a_file_without_checksums_is_counted(tmp_path):
    parts = [TWO[0], Part(pieces=[(4096, B)], checksums=False)]
    write_checkpoint(tmp_path, parts, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]))
    verdict = verify(tmp_path, options=OPTIONS)
    assert (verdict.good, verdict.unchecked_files, verdict.bytes_checked) == (True, 1, 8192)
    assert read(tmp_path) == A + B


def test_a_directory_that_is_removed_meanwhile_is_a_fault(tmp_path):
    """`datastates prune` may remove it, for instance."""
    write_checkpoint(tmp_path / "c", TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]))
    checkpoint = ds.open(tmp_path / "c", **SMALL)
    shutil.rmtree(tmp_path / "c")
    reported = verify_checkpoint(checkpoint, OPTIONS).faults
    assert f"{tmp_path / 'c'} cannot be listed: No such file or directory" in reported


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_removed_or_saved_again_while_it_is_checked_is_not_called_faulty(
    is_replaced, tmp_path, monkeypatch
):
    directory, look = tmp_path / "c", verifying._check_files

    def change(*arguments):
        monkeypatch.undo()
        if is_replaced:
            ds.save({"w": torch.ones(3)}, directory, **SMALL)
        else:
            shutil.rmtree(directory)
        return look(*arguments)

    ds.save({"w": torch.ones(3)}, directory, **SMALL)
    monkeypatch.setattr(verifying, "_check_files", change)
    code, printed, errors = run("verify", directory)
    expected = "was replaced by another save" if is_replaced else "was removed while it was checked"
    assert code == 2 and expected in errors and "FAULTY" not in printed


def test_faults_are_reported_though_the_manifest_cannot_be_read_again(tmp_path, monkeypatch):
    def refuse(path):
        raise StorageError("the storage does not answer", code=errno.EIO)

    ds.save({"w": torch.ones(3)}, tmp_path / "c", **SMALL)
    (data,) = data_files(tmp_path / "c")
    data.unlink()
    monkeypatch.setattr(verifying, "read_manifest", refuse)
    code, printed, _ = run("verify", tmp_path / "c")
    assert code == 1 and "FAULTY" in printed


def test_ranks_that_disagree_about_their_number_are_found(tmp_path):
    manifest = whole(tmp_path)
    changed = msgspec.structs.replace(manifest, world_size=3)
    (tmp_path / MANIFEST_NAME).write_bytes(changed.encode())
    assert [fault.split(" was ")[1] for fault in faults(tmp_path)] == [
        "saved by one of 2 ranks, its manifest says 3"
    ] * 2


def test_a_data_file_that_claims_to_be_of_an_earlier_save_is_found(tmp_path):
    manifest = whole(tmp_path)
    earlier = SaveId(SAVE.run_id, 1)
    name = earlier.data_file_name(0)
    entry = msgspec.structs.replace(manifest.files[0], name=name, save_id=str(earlier))
    changed = msgspec.structs.replace(manifest, files=[entry, manifest.files[1]])
    (tmp_path / MANIFEST_NAME).write_bytes(changed.encode())
    (tmp_path / manifest.files[0].name).rename(tmp_path / name)
    (found,) = faults(tmp_path)
    assert f"{tmp_path / name} belongs to save {SAVE}, rank 0" in found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"sharded_backend": "datastates"}', None),
        (
            '{"sharded_backend": "torch_dist"}',
            "names the format 'torch_dist', and the manifest is of 'datastates'",
        ),
        ('{"sharded', "is damaged"),
        ("{}", "is damaged"),
    ],
)
def test_metadata_and_manifest_have_to_agree(tmp_path, text, fault):
    whole(tmp_path)
    (tmp_path / "metadata.json").write_text(text)
    found = faults(tmp_path)
    assert len(found) == (fault is not None)
    assert all(str(tmp_path / "metadata.json") in one and fault in one for one in found)


def test_what_is_unusual_and_no_fault_is_noted(tmp_path):
    directory = tmp_path / "iter_0000007"
    others = [OtherFile("common.pt", len(OBJECT), hashlib.sha256(OBJECT).hexdigest())]
    whole(directory, iteration=8, others=others)
    (directory / "common.pt").write_bytes(OBJECT)
    (directory / "notes.txt").write_text("")
    (directory / SaveId(1, 1).data_file_name(0)).write_text("")
    verdict = verify(directory, options=OPTIONS)
    assert verdict.good
    for text in ("metadata.json is missing", "notes.txt does not", "1-1.bin does not", "holds iteration 8"):
        assert sum(text in note for note in verdict.notes) == 1, verdict.notes
    assert len(verdict.notes) == 4
    (directory / "metadata.json").write_text("")
    verdict = verify(directory, options=OPTIONS)
    assert verdict.good and sum("metadata.json is empty" in note for note in verdict.notes) == 1


def test_metadata_that_cannot_be_read_is_not_called_missing(tmp_path):
    whole(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    with bound_by_permissions():
        (tmp_path / "metadata.json").chmod(0)
        verdict = verify(tmp_path, options=OPTIONS)
    assert not verdict.faults and len(verdict.unread) == 1 and "metadata.json" in verdict.unread[0]


def test_a_file_that_cannot_be_read_does_not_keep_others_from_being_checked(tmp_path):
    whole(tmp_path, [TWO[0], Part(data_bytes=4 << 20, pieces=[(4096, B)])])
    big = tmp_path / SAVE.data_file_name(1)
    data = bytearray(big.read_bytes())
    data[3 << 20] ^= 1
    big.write_bytes(data)
    # In the pass over both files the first read fails, and again when that file is read on its own.
    options = dataclasses.replace(OPTIONS, faults="read:1:EIO,read:2:EIO", read_threads=1)
    reported: list[int] = []
    verdict = verify(tmp_path, options=options, progress=reported.append)
    first, second = verdict.faults
    assert SAVE.data_file_name(0) in first and "Input/output error" in first
    assert SAVE.data_file_name(1) in second and f"byte offset {3 << 20} has" in second
    assert sum(reported) == verdict.bytes_checked == 4 << 20


def test_too_many_open_files_show_no_damage(tmp_path):
    whole(tmp_path)
    assert run("verify", "--quick", tmp_path)[0] == 0  # all modules are imported now
    os.close(lowest := os.dup(0))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        code, printed, errors = run("verify", "--quick", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (code, printed) == (2, "") and "Too many open files" in errors


def test_a_read_that_fails_once_is_no_fault_and_counts_once(tmp_path):
    whole(tmp_path)
    options = dataclasses.replace(OPTIONS, faults="read:2:EIO", read_threads=1)
    reported: list[int] = []
    verdict = verify(tmp_path, options=options, progress=reported.append)
    assert verdict.good
    assert sum(reported) == verdict.bytes_checked == 2 * 8192


def test_the_first_of_many_bad_blocks_are_named_and_the_others_counted(tmp_path):
    blocks = 40
    size = blocks * BLOCK_BYTES
    write_checkpoint(tmp_path, [Part(data_bytes=size)], index_of([(w(0, 8, 8), 0, 4096)]))
    path = tmp_path / SAVE.data_file_name(0)
    data = bytearray(path.read_bytes())
    data[5:size:BLOCK_BYTES] = b"\1" * blocks
    path.write_bytes(data)
    reported = faults(tmp_path)
    assert sum("the 1 MiB block at byte offset" in fault for fault in reported) == 16
    assert reported[-1] == f"{path}: 24 more of its blocks are corrupt"


def test_a_bad_block_is_described_as_a_load_describes_it(tmp_path):
    keys = [fragment(key, [8], [0], [8]) for key in "abcdef"]
    places = [(key, 1, 4096 + 8 * at) for at, key in enumerate(keys)]
    write_checkpoint(tmp_path, [Part(), Part(pieces=[(4096, A * 6)])], index_of(places))
    path = tmp_path / SAVE.data_file_name(1)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    (fault,) = faults(tmp_path)
    assert fault == (
        f"{path}, which rank 1 wrote, is corrupt: the 1 MiB block at byte offset 0 has a wrong checksum. "
        "It holds data of 'a', 'b', 'c', 'd' and 2 more."
    )
    with pytest.raises(CorruptDataError, match=re.escape(fault)):
        read(tmp_path, "a")


class FailingFile:
    """A file of which one call fails."""

    def __init__(self, file, call):
        self._file, self._call = file, call

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        if name == self._call:
            raise OSError(errno.EIO, "Input/output error")
        return getattr(self._file, name)


@pytest.mark.parametrize("call", ["seek", "read"])
def test_a_file_that_opens_and_cannot_be_read_is_named(tmp_path, monkeypatch, call):
    """Such is a file with a bad sector, or one that a network file system lost."""
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]))
    bad = tmp_path / SAVE.data_file_name(1)
    real = reader.open_regular

    def opened(path, *args):
        file = real(path, *args)
        if path != bad:
            return file
        return FailingFile(file, call)

    monkeypatch.setattr(reader, "open_regular", opened)
    with pytest.raises(StorageError, match=f"{bad} cannot be read: Input/output error. Rank 1 wrote 'w'"):
        read(tmp_path)
    assert any(f"{bad} cannot be read: Input/output error" in fault for fault in faults(tmp_path))


def test_a_footer_as_long_as_a_huge_file_is_not_read(tmp_path):
    manifest = write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]))
    path, size = tmp_path / manifest.files[1].name, 8 << 40
    trailer = struct.pack("<8sQQII", b"DSTAIL\x00\x01", 4096, size - 4096, 0, 0)
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(size - 36)
        file.write(trailer + struct.pack("<I", zlib.crc32(trailer)))
    with pytest.raises(FormatError, match=f"{path} is damaged: a footer of {size - 4096} bytes"):
        read_footer(path, size)


def test_a_footer_of_a_shorter_file_is_refused(tmp_path):
    """Its end is that of a sealed file, and so is its size by the manifest."""
    path = tmp_path / SAVE.data_file_name(0)
    sealed = data_file(Part(), 0, 1)
    path.write_bytes(bytes(4096) + sealed)
    text = f"data file {path} has {len(sealed) + 4096} bytes, and its footer says {len(sealed)}: it was"
    with pytest.raises(StorageError, match=re.escape(text)):
        read_footer(path, len(sealed) + 4096)
