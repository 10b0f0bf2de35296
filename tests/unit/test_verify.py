"""Verify over checkpoints built by hand: extents and coverage that no sound save would ever give."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import shutil
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
import torch

from megatron_datastates.engine import reader
from megatron_datastates.engine.reader import read_footer
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    StorageError,
    UnsupportedFormatError,
)
from megatron_datastates.format.header import Header
from megatron_datastates.format.manifest import OtherFile
from megatron_datastates.format.values import BLOCK_BYTES, MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.verify import verify, verify_checkpoint
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.objects import ObjectSource
from tests.unit.by_hand import SAVE, Part, data_file, file_entry, fragment, index_of, write_checkpoint
from tests.unit.states import OPTIONS, bits, save
from tests.unit.test_hostile_index import crafted

OBJECT = ObjectSource("x", 7, Mutability.NEVER).serialize()
A, B = bytes(range(1, 9)), bytes(range(11, 19))
TWO = [Part(pieces=[(4096, A)]), Part(pieces=[(4096, B)])]


def w(offset: int, size: int, total: int = 16):
    return fragment("w", [total], [offset], [size])


def faults(directory: Path) -> list[str]:
    return verify(directory, options=OPTIONS).faults


def read(directory: Path, key: str = "w") -> bytes:
    return bits(Checkpoint.open(directory, OPTIONS).read_tensor(key))


def test_a_sound_checkpoint_made_by_hand_is_good_and_read(tmp_path):
    part = Part(pieces=[(4096, A)], objects={"x": (4160, OBJECT)})
    write_checkpoint(tmp_path, [part, TWO[1]], index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)], {"x": 0}))
    verdict = verify(tmp_path, options=OPTIONS)
    assert verdict.good, verdict.faults
    assert (verdict.files, verdict.tensors, verdict.objects, verdict.bytes_checked) == (2, 1, 1, 2 * 8192)
    assert read(tmp_path) == A + B


def test_a_hole_is_found_and_not_read_over(tmp_path):
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(9, 7), 1, 4096)]))
    assert faults(tmp_path) == ["tensor 'w' has holes: 15 elements of shape (16,) are stored"]
    with pytest.raises(FormatError, match="'w' has holes: 15 of 16"):
        read(tmp_path)


def test_an_overlap_is_found_and_not_read_over(tmp_path):
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8, 15), 0, 4096), (w(7, 8, 15), 1, 4096)]))
    assert faults(tmp_path) == ["tensor 'w': two fragments both hold the element at (7,)"]
    with pytest.raises(FormatError, match="two fragments both hold"):
        read(tmp_path)


def test_an_overlap_that_makes_up_for_a_hole_is_found_and_not_read_over(tmp_path):
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(0, 8), 1, 4096)]))
    assert faults(tmp_path) == ["tensor 'w': two fragments both hold the element at (0,)"]
    with pytest.raises(FormatError, match=r"two fragments both hold the element at \(0,\)"):
        read(tmp_path)


def test_a_sound_slice_of_a_tensor_with_holes_is_read(tmp_path):
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096)]))
    found = Checkpoint.open(tmp_path, OPTIONS).read_tensor("w", [2], [6])
    assert bits(found) == A[2:]


def test_a_tensor_without_fragments_is_a_hole(tmp_path):
    index = crafted(columns=[[]] * 6, files=1)
    write_checkpoint(tmp_path, [Part()], index)
    assert faults(tmp_path) == ["tensor 'w' has holes: 0 elements of shape (4, 2) are stored"]


def test_a_scalar_stored_twice_is_found(tmp_path):
    scalar = fragment("w", [], [], [])
    write_checkpoint(tmp_path, TWO, index_of([(scalar, 0, 4096), (scalar, 1, 4096)]))
    assert faults(tmp_path) == ["tensor 'w': two fragments both hold the element at ()"]


def test_empty_fragments_neither_overlap_nor_count(tmp_path):
    places = [(w(0, 8, 8), 0, 4096), (w(3, 0, 8), 0, 4100), (w(3, 0, 8), 1, 4096), (w(8, 0, 8), 1, 4096)]
    write_checkpoint(tmp_path, TWO, index_of(places))
    assert faults(tmp_path) == []
    assert read(tmp_path) == A


@pytest.mark.parametrize("offset", [8192 - 7, 8192, 2**40])
def test_data_behind_the_end_is_found_and_not_read(tmp_path, offset):
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, offset)]))
    path = tmp_path / SAVE.data_file_name(1)
    assert faults(tmp_path) == [f"{path}: 'w' lies beyond the end of the data"]
    with pytest.raises(FormatError, match=f"beyond the end of the data of {path}"):
        read(tmp_path)


def test_tensors_that_share_bytes_are_found(tmp_path):
    places = [(fragment(key, [8], [0], [8]), 0, offset) for key, offset in (("a", 4096), ("b", 4100))]
    write_checkpoint(tmp_path, TWO[:1], index_of(places))
    assert faults(tmp_path) == [f"{tmp_path / SAVE.data_file_name(0)}: 'b' overlaps 'a'"]


def test_a_tensor_within_another_does_not_hide_a_third(tmp_path):
    sizes = {"a": (4096, 1000), "b": (4100, 8), "c": (4200, 8)}
    places = [(fragment(key, [size], [0], [size]), 0, offset) for key, (offset, size) in sizes.items()]
    write_checkpoint(tmp_path, TWO[:1], index_of(places))
    path = tmp_path / SAVE.data_file_name(0)
    assert faults(tmp_path) == [f"{path}: 'b' overlaps 'a'", f"{path}: 'c' overlaps 'a'"]


def test_an_object_that_shares_bytes_with_a_tensor_is_found(tmp_path):
    part = Part(pieces=[(4096, A)], objects={"x": (4100, OBJECT)})
    write_checkpoint(tmp_path, [part], index_of([(w(0, 8, 8), 0, 4096)], {"x": 0}))
    assert faults(tmp_path) == [f"{tmp_path / SAVE.data_file_name(0)}: 'x' overlaps 'w'"]


def test_an_object_that_its_file_does_not_hold_is_found(tmp_path):
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8, 8), 0, 4096)], {"x": 1}))
    path = tmp_path / SAVE.data_file_name(1)
    assert faults(tmp_path) == [f"{path} does not hold object 'x'"]
    with pytest.raises(FormatError, match=f"{path} does not hold object 'x'"):
        Checkpoint.open(tmp_path, OPTIONS).read_object("x")


@pytest.mark.parametrize(("save_id", "rank"), [(SaveId(SAVE.run_id, 9), 0), (SAVE, 1)])
def test_a_header_of_another_save_is_found(tmp_path, save_id, rank):
    part = Part(pieces=[(0, Header(save_id, rank, 1).encode()), (4096, A)])
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


def test_all_faults_are_told_and_not_only_the_first(tmp_path):
    places = [
        (w(0, 8), 0, 4096),
        (fragment("v", [8], [0], [7]), 1, 4096),
        (fragment("u", [8], [0], [8]), 1, 4096),
    ]
    manifest = write_checkpoint(tmp_path, TWO, index_of(places, {"x": 1}))
    (tmp_path / manifest.files[0].name).unlink()
    found = faults(tmp_path)
    for text in (
        "cannot be opened",
        "does not hold object 'x'",
        "overlaps",
        "'w' has holes",
        "'v' has holes",
    ):
        assert sum(text in fault for fault in found) == 1, found
    assert len(found) == 5


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


def test_progress_tells_every_byte(tmp_path):
    reported: list[int] = []
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]))
    verify(tmp_path, options=OPTIONS, progress=reported.append)
    assert sum(reported) == 2 * 8192


def test_an_index_that_cannot_be_decoded_raises(tmp_path):
    write_checkpoint(tmp_path, TWO, b"nonsense")
    with pytest.raises(FormatError, match="does not begin as a datastates index does"):
        verify(tmp_path, options=OPTIONS)


def test_an_absurd_shape_is_told_before_memory_is_asked_for(tmp_path):
    write_checkpoint(tmp_path, TWO, index_of([(fragment("w", [2**61], [0], [8]), 0, 4096)]))
    assert "has holes" in faults(tmp_path)[0]
    with pytest.raises(FormatError, match="has holes"):
        read(tmp_path)


@pytest.mark.parametrize("keep", ["manifest", "index", "footer"])
def test_a_checkpoint_of_a_later_release_says_to_update(tmp_path, keep):
    fields = {"format_version": 3} if keep == "manifest" else {}
    index = crafted(version=3) if keep == "index" else index_of([(w(0, 8, 8), 0, 4096)])
    write_checkpoint(tmp_path, TWO, index, **fields)
    if keep == "footer":
        later = data_file(TWO[0], 0, 2, format_version=3)
        (tmp_path / SAVE.data_file_name(0)).write_bytes(later)
    with pytest.raises(UnsupportedFormatError, match=r"written by a later release.*update"):
        read(tmp_path)


def test_a_directory_that_is_no_checkpoint_raises(tmp_path):
    with pytest.raises(DataStatesError):
        verify(tmp_path, options=OPTIONS)


# -- what surrounds the data files ------------------------------------------------------------------------


def whole(directory: Path, parts: list[Part] = TWO, **fields):
    return write_checkpoint(directory, parts, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]), **fields)


def test_a_directory_that_is_removed_meanwhile_is_a_fault(tmp_path):
    """By `datastates prune`, for instance."""
    write_checkpoint(tmp_path / "c", TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]))
    checkpoint = Checkpoint.open(tmp_path / "c", OPTIONS)
    shutil.rmtree(tmp_path / "c")
    reported = verify_checkpoint(checkpoint, OPTIONS).faults
    assert f"{tmp_path / 'c'} cannot be listed: No such file or directory" in reported


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
    whole(directory, iteration=8)
    (directory / "notes.txt").write_text("")
    (directory / SaveId(1, 1).data_file_name(0)).write_text("")
    verdict = verify(directory, options=OPTIONS)
    assert verdict.good
    for text in ("metadata.json is missing", "notes.txt does not", "1-1.bin does not", "holds iteration 8"):
        assert sum(text in note for note in verdict.notes) == 1, verdict.notes
    assert len(verdict.notes) == 4


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
    assert SAVE.data_file_name(1) in second and f"byte offset {3 << 20} is corrupt" in second
    assert sum(reported) == verdict.bytes_checked == 4 << 20


def test_a_read_that_fails_once_is_no_fault_and_counts_once(tmp_path):
    whole(tmp_path)
    options = dataclasses.replace(OPTIONS, faults="read:2:EIO", read_threads=1)
    reported: list[int] = []
    verdict = verify(tmp_path, options=options, progress=reported.append)
    assert verdict.good
    assert sum(reported) == verdict.bytes_checked == 2 * 8192


@pytest.mark.parametrize("quick", [False, True])
def test_an_optimizer_map_that_does_not_fit_is_found(tmp_path, saver, quick):
    bucket = {"name": "b", "elements": 9, "states": ["param"], "parameters": []}
    text = json.dumps({"format_version": 1, "buckets": [bucket]})
    save(saver, tmp_path, {"group.b.param": torch.zeros(8)}, {"group.datastates_map/shard_0_1": [text]})
    verdict = verify(tmp_path, quick=quick, options=OPTIONS)
    (found,) = verdict.faults
    assert "'group.b.param' has shape (8,), and its optimizer map says (9,)" in found


def test_what_is_wrong_with_one_tensor_does_not_hide_what_is_told_of_another(tmp_path):
    """`a` has a dtype of a later release, and the block with `w` is corrupt."""
    places = [(fragment("a", [8], [0], [8]), 0, 5000), (w(0, 8, 8), 0, 4096)]
    index = bytearray(index_of(places).encode())
    struct.pack_into("<H", index, 56 + 4, 99)  # in the row of the first key
    write_checkpoint(tmp_path, [Part(pieces=[(4096, A)])], bytes(index))
    path = tmp_path / SAVE.data_file_name(0)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"at byte offset 0\. It holds data of 'w'"):
        read(tmp_path)
    assert [fault for fault in faults(tmp_path) if "is corrupt; it holds data of 'w'" in fault]
    path.unlink()
    with pytest.raises(StorageError, match="Rank 0 wrote 'w' to it"):
        read(tmp_path)


def test_of_many_bad_blocks_the_first_are_told_and_the_others_counted(tmp_path):
    blocks = 40
    size = blocks * BLOCK_BYTES
    write_checkpoint(tmp_path, [Part(data_bytes=size)], index_of([(w(0, 8, 8), 0, 4096)]))
    path = tmp_path / SAVE.data_file_name(0)
    data = bytearray(path.read_bytes())
    data[5:size:BLOCK_BYTES] = b"\1" * blocks
    path.write_bytes(data)
    reported = faults(tmp_path)
    assert sum("the block at byte offset" in fault for fault in reported) == 16
    assert reported[-1] == f"{path}: 24 more of its blocks are corrupt"


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
def test_a_file_that_opens_and_cannot_be_read_is_told_by_its_name(tmp_path, monkeypatch, call):
    """As one with a bad sector, or of a network file system that lost it."""
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
