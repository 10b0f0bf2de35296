"""Encoded tensors, streams and compressed objects are read bit for bit, by everything that reads."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    MissingKeyError,
)
from megatron_datastates.format.codecs import PLANES
from megatron_datastates.format.index import Index
from megatron_datastates.format.merging import merge_indexes
from megatron_datastates.format.tables import Directory
from megatron_datastates.format.tail import Kind
from megatron_datastates.pipeline.loading import decoding, entries
from megatron_datastates.pipeline.loading.filling import fill
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Place
from megatron_datastates.threads import BackgroundThread
from tests.unit.by_hand import encoded_entry
from tests.unit.encoded import (
    COLUMNS,
    CUT,
    MIB,
    MOMENT,
    OBJECTS,
    ROWS,
    STREAMS,
    TENSORS,
    WEIGHT,
    builders,
    index_over,
    opened,
    write_encoded,
)
from tests.unit.encoded import directory as directory
from tests.unit.states import OPTIONS, bits

# -- reading ----------------------------------------------------------------------------------------------


def test_where_no_thread_can_be_started_the_caller_reads_footers_and_decodes(directory, monkeypatch):
    def fail(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    checkpoint = opened(directory)
    checkpoint.require(range(len(checkpoint.manifest.files)))
    found = checkpoint.read_tensors((key, None, None) for key in TENSORS)
    assert list(map(bits, found)) == list(map(bits, TENSORS.values()))


@pytest.mark.parametrize("key", TENSORS)
def test_whole_tensors_are_read_bit_for_bit(directory, key):
    found = opened(directory).read_tensor(key)
    assert (found.dtype, found.shape) == (TENSORS[key].dtype, TENSORS[key].shape)
    assert bits(found) == bits(TENSORS[key])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_slice_is_read_bit_for_bit(directory, data):
    offset, shape = [], []
    for size in WEIGHT.shape:
        offset.append(data.draw(st.integers(0, size)))
        shape.append(data.draw(st.integers(0, size - offset[-1])))
    box = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
    assert bits(opened(directory).read_tensor("weight", offset, shape)) == bits(WEIGHT[box])


def test_many_slices_in_one_pass_and_with_small_windows(directory, monkeypatch):
    monkeypatch.setattr(decoding, "_WINDOW_BYTES", 100_000)
    monkeypatch.setattr(decoding, "_BATCH_BYTES", 300_000)
    slices = [("weight", (row, row % 7), (40, 900)) for row in range(0, ROWS - 40, 90)]
    slices += [("moment", (3,), (2**19,)), ("plain", None, None), ("weight", (0, 1000), (ROWS, 1))]
    found = opened(directory).read_tensors(slices)
    for (key, offset, shape), tensor in zip(slices, found, strict=True):
        box = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True)) if shape else ...
        assert bits(tensor) == bits(TENSORS[key][box])


def test_a_slice_reads_only_the_frames_that_it_needs(directory, monkeypatch):
    decoded = []
    real = decoding.decode_frame
    monkeypatch.setattr(decoding, "decode_frame", lambda *args: decoded.append(args[-1]) or real(*args))
    checkpoint = opened(directory)
    row = checkpoint.read_tensor("weight", (600, 0), (1, 1001))
    assert bits(row) == bits(WEIGHT[600:601])
    assert len(decoded) == 1 and decoded[0].endswith("frame 2")  # 600 rows of 4004 bytes are 2.3 MiB
    assert checkpoint.costs.bytes_read <= 2 * MIB  # the blocks that the frame touches
    assert checkpoint.costs.bytes == 4004


def test_targets_of_other_strides_and_dtypes_are_filled(directory):
    exact, wide = torch.zeros(ROWS, 7), torch.zeros(2**19 + 3, dtype=torch.float64)
    wide_columns = torch.zeros(2000, 20, dtype=torch.bfloat16)[:, 3]
    fill(
        opened(directory),
        {
            "weight": (Place(tuple(WEIGHT.shape), (0, 10), (ROWS, 7)), exact),
            "moment": (Place(tuple(MOMENT.shape), (0,), tuple(MOMENT.shape)), wide),
        },
    )
    assert bits(exact) == bits(WEIGHT[:, 10:17])
    assert torch.equal(wide, MOMENT.to(torch.float64))
    fill(opened(directory), {"moment": (Place(tuple(MOMENT.shape), (5,), (2000,)), wide_columns)})
    assert bits(wide_columns) == bits(MOMENT[5:2005])


def test_objects_are_read_with_and_without_a_codec(directory):
    assert opened(directory).read_objects(OBJECTS) == OBJECTS


@pytest.mark.parametrize("key", STREAMS)
@pytest.mark.parametrize("window", [16 * MIB, 300_001])
def test_streams_are_read_in_buffers(directory, key, window, monkeypatch):
    monkeypatch.setattr(entries, "_STREAM_BYTES", window)
    checkpoint = opened(directory)
    assert sorted(checkpoint.streams) == sorted(STREAMS)
    buffers = [bytes(buffer) for buffer in checkpoint.open_stream(key)]
    assert b"".join(buffers) == STREAMS[key]
    assert all(0 < len(buffer) <= window for buffer in buffers)


def test_a_missing_stream_is_named(directory):
    with pytest.raises(MissingKeyError, match="no stream 'state'"):
        opened(directory).open_stream("state")


def test_the_checkpoint_is_whole(directory):
    verdict = verify(directory, options=OPTIONS)
    assert verdict.faults == []
    assert (verdict.tensors, verdict.objects, verdict.streams) == (4, 2, 4)


# -- what is wrong ----------------------------------------------------------------------------------------


def change(directory: Path, kind: Kind, name: str | int, **changes) -> None:
    """Writes the checkpoint with another record of one entry; all checksums of files are right."""
    parts = builders()
    for part in parts:
        for n, (entry, stored) in enumerate(part.entries):
            fragments = sum(one.kind == Kind.FRAGMENT for one, _ in part.entries[:n])
            if entry.kind == kind and name in (entry.name, fragments if kind == Kind.FRAGMENT else None):
                part.entries[n] = (entry._replace(**changes), stored)
                write_encoded(directory, parts)
                return
    raise AssertionError(name)


def refused(directory: Path, kind: Kind, name: str) -> str:
    """Returns the error of reading the changed entry; all others are read, and `verify` finds it, too."""
    checkpoint, errors = opened(directory), []
    for key in TENSORS:
        try:
            checkpoint.read_tensor(key)
        except DataStatesError as error:
            errors.append(("weight" if kind == Kind.FRAGMENT else "?", error))
    for key in OBJECTS:
        try:
            checkpoint.read_object(key)
        except DataStatesError as error:
            errors.append((key, error))
    for key in STREAMS:
        try:
            list(checkpoint.open_stream(key))
        except DataStatesError as error:
            errors.append((key, error))
    ((key, error),) = errors
    assert key == name
    faults = verify(directory, options=OPTIONS).faults
    assert faults
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("kind", "number", "name"),
    [(Kind.STREAM, "log", "log"), (Kind.OBJECT, "state", "state"), (Kind.FRAGMENT, 0, "weight")],
)
def test_an_unknown_codec_refuses_its_entry_and_nothing_else(tmp_path, kind, number, name):
    change(tmp_path / "c", kind, number, codec=77)
    text = refused(tmp_path / "c", kind, name)
    assert text.startswith("UnsupportedFormatError") and "codec 77" in text and "update" in text


@pytest.mark.parametrize(
    ("kind", "number", "name"),
    [(Kind.STREAM, "log", "log"), (Kind.OBJECT, "state", "state"), (Kind.FRAGMENT, 0, "weight")],
)
def test_frames_of_another_size_are_refused(tmp_path, kind, number, name):
    """Two frames whose border is a byte off: each is damaged, though the blocks' checksums are right."""
    parts = [entry for part in builders() for entry, _ in part.entries if entry.kind == kind]
    entry = parts[number] if kind == Kind.FRAGMENT else next(e for e in parts if e.name == number)
    sizes = list(entry.frame_sizes)
    if len(sizes) > 1:
        sizes[0], sizes[1] = sizes[0] - 1, sizes[1] + 1
        change(tmp_path / "c", kind, number, frame_sizes=tuple(sizes))
    else:
        change(tmp_path / "c", kind, number, bytes=entry.bytes + 1)
    assert refused(tmp_path / "c", kind, name).startswith("CorruptDataError")


def test_a_wrong_sha256_is_found(tmp_path):
    change(tmp_path / "c", Kind.STREAM, "raw", sha256=b"x" * 32)
    assert "stream 'raw' is corrupt: its SHA-256" in refused(tmp_path / "c", Kind.STREAM, "raw")
    change(tmp_path / "c", Kind.OBJECT, "state", sha256=b"x" * 32)
    assert "object 'state' is corrupt: its SHA-256" in refused(tmp_path / "c", Kind.OBJECT, "state")
    change(tmp_path / "c", Kind.FRAGMENT, 0, sha256=b"x" * 32)
    (fault,) = verify(tmp_path / "c", options=OPTIONS).faults  # a load may read a part of it
    assert "'weight'" in fault and "SHA-256" in fault


@pytest.mark.parametrize("rows", [CUT - 1, CUT + 1])
def test_a_fragment_of_another_size_than_the_index_says_is_refused(tmp_path, rows):
    parts = builders()
    number = next(n for n, (entry, _) in enumerate(parts[0].entries) if entry.kind == Kind.FRAGMENT)
    offset = parts[0].entries[number][0].offset
    data = WEIGHT[:rows].numpy().tobytes()
    parts[0].entries[number] = encoded_entry(Kind.FRAGMENT, "", offset, data, PLANES, 4)
    write_encoded(tmp_path / "c", parts)
    text = refused(tmp_path / "c", Kind.FRAGMENT, "weight")
    assert text.startswith("FormatError") and f"decodes to {len(data)} bytes, the index says" in text


@pytest.mark.parametrize("number", [3, 9])
def test_a_number_that_the_footer_does_not_have_is_refused(tmp_path, number):
    parts = builders()
    parts[0].fragments[0] = (
        parts[0].fragments[0][0],
        dataclasses.replace(parts[0].fragments[0][1], offset=number),
    )
    write_encoded(tmp_path / "c", parts)
    text = refused(tmp_path / "c", Kind.FRAGMENT, "weight")
    assert f"has 3 encoded fragments, and the index names number {number}" in text


def test_a_frame_that_does_not_decode_fails_the_read_in_whatever_batch_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "_WINDOW_BYTES", MIB)
    monkeypatch.setattr(decoding, "_BATCH_BYTES", 1)
    (sizes,) = (entry.frame_sizes for entry, _ in builders()[0].entries if entry.bytes == CUT * COLUMNS * 4)
    assert len(sizes) == 4
    for number in range(3):
        moved = [size - (n == number) + (n == number + 1) for n, size in enumerate(sizes)]
        change(tmp_path / str(number), Kind.FRAGMENT, 0, frame_sizes=tuple(moved))
        with pytest.raises(CorruptDataError, match=f"frame {number}"):
            opened(tmp_path / str(number)).read_tensor("weight")


def test_an_interrupt_as_a_thread_starts_leaves_none_that_writes_to_targets(directory, monkeypatch):
    start, decode, started = BackgroundThread.start, decoding.decode_frame, []

    def start_and_interrupt(thread):
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt  # the pool has not noted the thread yet

    def decode_late(*args):
        time.sleep(0.1)
        return decode(*args)

    monkeypatch.setattr(BackgroundThread, "start", start_and_interrupt)
    monkeypatch.setattr(decoding, "decode_frame", decode_late)
    target = torch.zeros_like(WEIGHT)
    with pytest.raises(KeyboardInterrupt):
        fill(opened(directory), {"weight": (Place(WEIGHT.shape, (0, 0), WEIGHT.shape), target)})
    left = target.clone()
    (thread,) = started
    thread.join()
    assert torch.equal(target, left)


def test_a_hole_in_an_encoded_tensor_is_refused_before_memory_is_asked_for(tmp_path):
    parts = builders()
    del parts[0].fragments[0]
    write_encoded(tmp_path / "c", parts)
    with pytest.raises(FormatError, match="holes"):
        opened(tmp_path / "c").read_tensor("weight")


def test_verify_finds_fragments_that_are_used_twice(tmp_path):
    parts = builders()
    weight, moment = parts[0].fragments[0], parts[0].fragments[2]
    parts[0].fragments[2] = (moment[0], weight[1])
    write_encoded(tmp_path / "c", parts)
    faults = verify(tmp_path / "c", options=OPTIONS).faults
    assert any("encoded fragment 0 belongs to both" in fault for fault in faults), faults


def test_verify_finds_entries_that_overlap(tmp_path):
    parts = builders()
    entry, stored = parts[1].entries[0]
    parts[1].entries[0] = (entry._replace(sha256=bytes(32), offset=entry.offset - 4096), stored)
    write_encoded(tmp_path / "c", parts)
    assert any("'raw' overlaps 'plain'" in fault for fault in verify(tmp_path / "c", options=OPTIONS).faults)


@pytest.mark.parametrize("what", ["log", "weight", "state"])
def test_a_flipped_bit_is_found_and_named_once(tmp_path, what):
    manifest = write_encoded(tmp_path / "c")
    checkpoint = opened(tmp_path / "c")
    file = 1 if what == "state" else 0
    footer = checkpoint.footer(file)
    places = {
        "log": footer.streams.get("log"),
        "weight": footer.fragments[0],
        "state": footer.objects.get("state"),
    }
    path = tmp_path / "c" / manifest.files[file].name
    data = bytearray(path.read_bytes())
    data[places[what].offset + 20] ^= 1
    path.write_bytes(data)
    (fault,) = verify(tmp_path / "c", options=OPTIONS).faults
    assert "is corrupt" in fault and f"'{what}'" in fault
    read = {
        "log": lambda: list(checkpoint.open_stream("log")),
        "weight": lambda: checkpoint.read_tensor("weight"),
        "state": lambda: checkpoint.read_object("state"),
    }
    with pytest.raises(CorruptDataError, match="a wrong checksum"):
        read[what]()


def test_absurd_logical_bytes_of_an_object_are_refused_before_memory_is_asked_for(tmp_path):
    parts, frames = builders(), 5000
    entry, stored = parts[1].entries[-1]
    assert entry.name == "state"
    stored = stored[:40] * frames
    lie = entry._replace(
        bytes=frames * MIB, stored_bytes=40 * frames, frame_sizes=(40,) * frames, sha256=bytes(32)
    )
    parts[1].entries[-1] = (lie, stored)
    parts[1].at = lie.offset + lie.stored_bytes
    write_encoded(tmp_path / "c", parts)
    with pytest.raises(FormatError, match="decodes to 5242880000 bytes, expected at most"):
        opened(tmp_path / "c").read_object("state")


def test_an_encoded_tensor_without_its_codec_in_part_is_refused_by_the_merge():
    one, two = builders()
    plain = index_over([one])
    other = Index({"weight": dataclasses.replace(index_over([two]).tensor("weight"), encoded=False)}, {})
    place = np.array([4096], np.uint64)
    changed = dataclasses.replace(other.tensor("weight"), files=np.zeros(1, np.uint32), file_offsets=place)
    own = Index({"weight": changed}, {})
    parts = [index.encode() for index in (plain, own)]
    with pytest.raises(FormatError, match="disagree: encoded float32"):
        merge_indexes(Directory(data, "it", len(data)) for data in parts)
