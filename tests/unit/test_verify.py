"""Verify over checkpoints built by hand, with extents and coverage that no sound save would write."""

from __future__ import annotations

import errno
import json
import struct
from unittest import mock

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine.reader import Reader
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    EngineError,
    FormatError,
    StorageError,
    UnsupportedFormatError,
)
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.unit.by_hand import SAVE, Part, data_file, fragment, index_of, write_checkpoint
from tests.unit.states import OPTIONS, SMALL, bits, save
from tests.unit.test_hostile_index import crafted
from tests.unit.verifying import OBJECT, TWO, A, B, faults, read, w


def test_a_sound_checkpoint_made_by_hand_is_good_and_read(tmp_path):
    part = Part(pieces=[(4096, A)], objects={"x": (4160, OBJECT)})
    write_checkpoint(tmp_path, [part, TWO[1]], index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)], {"x": 0}))
    verdict = verify(tmp_path, options=OPTIONS)
    assert verdict.good, verdict.faults
    assert (verdict.files, verdict.tensors, verdict.objects, verdict.bytes_checked) == (2, 1, 1, 2 * 8192)
    assert read(tmp_path) == A + B


def test_a_checkpoint_under_the_name_of_another_iteration_is_noted(tmp_path):
    at = tmp_path / "iter_0000007"
    ds.save({"w": torch.ones(4)}, at, iteration=7)
    assert verify(at, options=OPTIONS).notes == []
    moved = at.rename(tmp_path / "iter_0000008")
    verdict = verify(moved, options=OPTIONS)
    assert verdict.good and verdict.notes == [f"{moved} holds iteration 7, as its manifest says"]
    ds.save({"w": torch.ones(4)}, moved)
    assert verify(moved, options=OPTIONS).notes == [], "a program need not say the iteration"


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
    found = ds.open(tmp_path, **SMALL).read_tensor("w", [2], [6])
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
def test_data_past_the_end_is_found_and_not_read(tmp_path, offset):
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, offset)]))
    path = tmp_path / SAVE.data_file_name(1)
    assert faults(tmp_path) == [f"{path}: 'w' lies beyond the end of the data"]
    place = rf"places 'w' at bytes \[{offset}, {offset + 8}\) of {path}, which has 8192 bytes of data"
    with pytest.raises(FormatError, match=place):
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
        ds.open(tmp_path, **SMALL).read_object("x")


def test_all_faults_are_reported_and_not_only_the_first(tmp_path):
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


def test_progress_counts_every_byte(tmp_path):
    reported: list[int] = []
    write_checkpoint(tmp_path, TWO, index_of([(w(0, 8), 0, 4096), (w(8, 8), 1, 4096)]))
    verify(tmp_path, options=OPTIONS, progress=reported.append)
    assert sum(reported) == 2 * 8192


def test_an_index_that_cannot_be_decoded_raises(tmp_path):
    write_checkpoint(tmp_path, TWO, b"nonsense")
    with pytest.raises(FormatError, match="does not begin as a datastates index does"):
        verify(tmp_path, options=OPTIONS)


def test_an_absurd_shape_is_reported_before_memory_is_allocated(tmp_path):
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


@pytest.mark.parametrize("quick", [False, True])
def test_an_optimizer_map_that_does_not_fit_is_found(tmp_path, saver, quick):
    bucket = {"name": "b", "elements": 9, "states": ["param"], "parameters": []}
    text = json.dumps({"format_version": 1, "buckets": [bucket]})
    save(saver, tmp_path, {"group.b.param": torch.zeros(8)}, {"group.datastates_map/shard_0_1": [text]})
    verdict = verify(tmp_path, quick=quick, options=OPTIONS)
    (found,) = verdict.faults
    assert "'group.b.param' has shape (8,), and its optimizer map says (9,)" in found


def test_an_optimizer_map_that_cannot_be_read_for_lack_of_memory_is_no_fault(tmp_path, saver, monkeypatch):
    text = json.dumps({"format_version": 1, "buckets": []})
    save(saver, tmp_path, {"w": torch.zeros(8)}, {"group.datastates_map/shard_0_1": [text]})
    lack = EngineError("make staging slots: Cannot allocate memory", code=errno.ENOMEM)
    monkeypatch.setattr(Reader, "read", mock.Mock(side_effect=lack))
    verdict = verify(tmp_path, quick=True, options=OPTIONS)
    assert not verdict.good and (verdict.faults, verdict.unread) == ([], [str(lack)])


@pytest.mark.parametrize(
    ("place", "lack"),
    [
        ("providers.objects.Unpickler.load", MemoryError()),
        ("providers.objects.Unpickler.load", RuntimeError("DefaultCPUAllocator: not enough memory")),
        ("providers.members.zipfile.ZipFile", MemoryError()),
        ("pipeline.loading.load.Checkpoint.read_object_bytes", EngineError("start reader thread")),
    ],
)
def test_an_object_that_memory_or_threads_lack_for_is_neither_a_fault_nor_checked(
    tmp_path, saver, monkeypatch, place, lack
):
    save(saver, tmp_path, {"w": torch.zeros(8)}, {"state": [1]})
    monkeypatch.setattr(f"megatron_datastates.{place}", mock.Mock(side_effect=lack))
    verdict = verify(tmp_path, options=OPTIONS)
    why = str(lack) if isinstance(lack, EngineError) else "there is not enough memory"
    assert (verdict.faults, verdict.unread) == ([], [f"object 'state': {why}"])


def test_a_fault_of_one_tensor_does_not_hide_that_of_another(tmp_path):
    """`a` has a dtype of a later release, and the block with `w` is corrupt."""
    places = [(fragment("a", [8], [0], [8]), 0, 5000), (w(0, 8, 8), 0, 4096)]
    index = bytearray(index_of(places).encode())
    struct.pack_into("<H", index, 56 + 4, 99)  # in the row of the first key
    write_checkpoint(tmp_path, [Part(pieces=[(4096, A)])], bytes(index))
    path = tmp_path / SAVE.data_file_name(0)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CorruptDataError, match=r"at byte offset 0 has a wrong checksum\. It holds data of 'w'"
    ):
        read(tmp_path)
    assert [fault for fault in faults(tmp_path) if "has a wrong checksum. It holds data of 'w'." in fault]
    path.unlink()
    with pytest.raises(StorageError, match="Rank 0 wrote 'w' to it"):
        read(tmp_path)
