"""Damaged, missing and exchanged files: load and verify find them, with the file, the offset and the key."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine.atomic_files import temporary_beside
from megatron_datastates.errors import CorruptDataError, DataStatesError, FormatError, StorageError
from megatron_datastates.format.index import index_name
from megatron_datastates.format.manifest import IndexEntry
from megatron_datastates.format.values import BLOCK_BYTES, MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.runs import opening
from megatron_datastates.pipeline.runs.damage import why_no_checkpoint
from megatron_datastates.pipeline.runs.jobs import JOBS_NAME
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.support.fragments import fragments_of
from tests.unit.states import OPTIONS, SMALL, bits, data_files, random_tensor

REGION = 4096
TENSORS = {
    "first": random_tensor(torch.uint8, (600_000,), 1),
    "second": random_tensor(torch.uint8, (500_000,), 2),
    "third": random_tensor(torch.float32, (1000, 40), 3),
}
OBJECTS = {"common": ["x" * 20_000]}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("good") / "c"
    ds.save(TENSORS | OBJECTS, directory, **SMALL)
    return directory


@pytest.fixture
def spoiled(good, tmp_path, monkeypatch) -> Path:
    """A copy to be damaged. What other tests have read of the same index is forgotten."""
    monkeypatch.setattr(opening, "_decoded", weakref.WeakValueDictionary())
    return Path(shutil.copytree(good, tmp_path / "c"))


def test_an_error_of_a_missing_file_reads_the_index_once(tmp_path, monkeypatch) -> None:
    ds.save({f"w{number}": torch.ones(3) for number in range(500)}, tmp_path, **SMALL)
    monkeypatch.setattr(opening, "_decoded", weakref.WeakValueDictionary())
    (file,) = data_files(tmp_path)
    file.unlink()
    checkpoint = Checkpoint.open(tmp_path, OPTIONS, reuse=False)
    reads, read = [], checkpoint.index.tensors.read
    checkpoint.index.tensors.read = lambda places: reads.append(places) or read(places)
    with pytest.raises(StorageError, match="Rank 0 wrote"):
        checkpoint.read_tensor("w7")
    assert len(reads) <= 2


def load_everything(directory: Path) -> None:
    checkpoint = ds.open(directory, **SMALL)
    for key in checkpoint.index.tensors:
        checkpoint.read_tensor(key)
    checkpoint.read_objects(checkpoint.index.objects)


def error_of_load(directory: Path) -> DataStatesError:
    with pytest.raises(DataStatesError) as caught:
        load_everything(directory)
    return caught.value


def with_flips(path: Path, step: int) -> Iterator[int]:
    """Turns one bit in every `step` bytes of the file, one at a time, and yields where."""
    random, data = np.random.default_rng(0), path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for start in range(0, len(data), step):
            at = start + int(random.integers(min(step, len(data) - start)))
            for value in (data[at] ^ 1 << int(random.integers(8)), data[at]):
                os.pwrite(file.fileno(), bytes([value]), at)
                if value != data[at]:
                    yield at


def keys_in_block(directory: Path, at: int) -> set[str]:
    checkpoint = ds.open(directory, **SMALL)
    places = {key: extent for key in TENSORS for _, extent in fragments_of(checkpoint.index.tensor(key), key)}
    places |= checkpoint.footer(0).objects
    begin = at // BLOCK_BYTES * BLOCK_BYTES
    end = begin + BLOCK_BYTES
    return {key for key, e in places.items() if e.offset < end and e.offset + e.bytes > begin}


def test_a_flipped_bit_anywhere_is_found_and_named(good, spoiled):
    (path,) = data_files(spoiled)
    footer_offset = ds.open(good, **SMALL).manifest.files[0].footer_offset
    assert footer_offset > BLOCK_BYTES
    for at in with_flips(path, REGION):
        texts = [str(error_of_load(spoiled)), *verify(spoiled, options=OPTIONS).faults]
        assert len(texts) == (3 if at < REGION else 2), texts  # damage of the header is reported twice
        assert all(str(path) in text for text in texts)
        if at >= footer_offset:
            assert all("footer" in text or "last bytes" in text for text in texts), texts
            continue
        for text in (texts[0], texts[-1]):
            assert re.search(rf"byte offset {at // BLOCK_BYTES * BLOCK_BYTES}\b", text), (at, text)
            assert {key for key in [*TENSORS, *OBJECTS] if key in text} == keys_in_block(good, at)
    load_everything(spoiled)  # so it was the flip that was found, each time


def test_verify_lists_every_corrupt_block(spoiled):
    (path,) = data_files(spoiled)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    data[BLOCK_BYTES + 5000] ^= 1
    path.write_bytes(data)
    assert [f"byte offset {block * BLOCK_BYTES} " in fault for block, fault in
            enumerate(verify(spoiled, options=OPTIONS).faults)] == [True, True]  # fmt: skip


def test_a_quick_verify_looks_at_no_data(spoiled):
    (path,) = data_files(spoiled)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert verify(spoiled, quick=True, options=OPTIONS).good


def test_tensors_in_sound_blocks_are_still_read(spoiled):
    (path,) = data_files(spoiled)
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES + 200_000] ^= 1
    path.write_bytes(data)
    checkpoint = ds.open(spoiled, **SMALL)
    assert bits(checkpoint.read_tensor("first")) == bits(TENSORS["first"])
    with pytest.raises(CorruptDataError, match="third"):
        checkpoint.read_tensor("third")


def test_nothing_of_a_corrupt_block_is_delivered(spoiled, monkeypatch):
    (path,) = data_files(spoiled)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    targets: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "empty", lambda *a, **k: targets.append(torch.zeros(*a, **k)) or targets[-1])
    with pytest.raises(CorruptDataError):
        ds.open(spoiled, **SMALL).read_tensor("first")
    assert not targets[0].any()


# -- files ------------------------------------------------------------------------------------------------


def both(directory: Path, pattern: str, error: type[Exception]) -> None:
    """Requires that a load raises, and verify reports, what the pattern says."""
    found = error_of_load(directory)
    assert isinstance(found, error), repr(found)
    assert re.search(pattern, str(found)), str(found)
    faults = verify(directory, options=OPTIONS).faults
    assert any(re.search(pattern, fault) for fault in faults), faults


def test_a_missing_data_file_is_named(spoiled):
    (path,) = data_files(spoiled)
    path.unlink()
    both(spoiled, f"{path} cannot be opened: No such file", StorageError)


@pytest.mark.parametrize("cut", [1, 4095, 4096, 100_000, 1_100_000])
def test_a_truncated_data_file_is_named_with_both_sizes(spoiled, cut):
    (path,) = data_files(spoiled)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - cut)
    both(spoiled, f"{path} has {size - cut} bytes, its manifest says {size}", StorageError)


def test_a_data_file_that_goes_away_after_it_was_opened_is_named(spoiled):
    checkpoint = ds.open(spoiled, **SMALL)
    checkpoint.footer(0)
    (path,) = data_files(spoiled)
    path.unlink()
    with pytest.raises(StorageError, match=f"{path}.*No such file"):
        checkpoint.read_tensor("first")


def test_a_data_file_that_shrinks_after_it_was_opened_is_named(spoiled):
    checkpoint = ds.open(spoiled, **SMALL)
    checkpoint.footer(0)
    (path,) = data_files(spoiled)
    os.truncate(path, 8192)
    with pytest.raises(StorageError, match=f"{path}.*truncated"):
        checkpoint.read_tensor("second")


def test_an_empty_data_file_is_named(spoiled):
    (path,) = data_files(spoiled)
    path.write_bytes(b"")
    both(spoiled, f"{path} has 0 bytes", StorageError)


def test_a_longer_data_file_is_named(spoiled):
    (path,) = data_files(spoiled)
    path.write_bytes(path.read_bytes() + b"\0")
    both(spoiled, f"{path} has .* truncated or replaced", StorageError)


def test_a_data_file_that_was_never_sealed_is_named(spoiled):
    (path,) = data_files(spoiled)
    path.write_bytes(bytes(path.stat().st_size))
    both(spoiled, f"{path} has no footer at its end: it was never sealed", FormatError)


def test_a_data_file_of_another_save_is_distinguished_from_damage(spoiled, tmp_path):
    (path,) = data_files(spoiled)
    ds.save(TENSORS | OBJECTS, tmp_path / "other", **SMALL)
    other = data_files(tmp_path / "other")[0]
    shutil.copy(other, path)
    save_id = other.name.split("-", 2)[2].removesuffix(".bin")
    both(spoiled, f"{path} belongs to save {save_id}, rank 0", StorageError)


def test_a_valid_footer_that_is_not_the_published_one_is_refused(spoiled):
    (path,) = data_files(spoiled)
    footer = ds.open(spoiled, **SMALL).footer(0)
    forged = dataclasses.replace(footer, layout_digest=b"another layout..").encode()
    path.write_bytes(path.read_bytes()[: footer.data_bytes] + forged)
    both(spoiled, f"{path} has a footer of checksum .*its manifest says {footer.crc:08x}", StorageError)


def faults_of(directory: Path) -> list[str]:
    """Returns what verify reports, or raises if it cannot begin."""
    try:
        return verify(directory, options=OPTIONS).faults
    except DataStatesError as error:
        return [str(error)]


def test_a_flipped_bit_anywhere_in_the_index_is_found(spoiled):
    (path,) = spoiled.glob("index-*")
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        pattern = rf"{path}\b.* is damaged: its SHA-256 differs"
        found = error_of_load(spoiled)
        assert isinstance(found, FormatError) and re.search(pattern, str(found)), (at, found)
        assert any(re.search(pattern, fault) for fault in faults_of(spoiled))


def test_a_damaged_part_of_the_index_spoils_its_own_tensor_only(spoiled):
    (path,) = spoiled.glob("index-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    checkpoint = ds.open(spoiled, **SMALL)
    assert bits(checkpoint.read_tensor("first")) == bits(TENSORS["first"])
    with pytest.raises(FormatError, match=f"{path}: the section of 'third' is damaged"):
        checkpoint.read_tensor("third")
    assert verify(spoiled, quick=True, options=OPTIONS).tensors == 3


def test_a_damaged_part_of_the_index_is_reported_by_one_share_of_a_verify_only(spoiled):
    (path,) = spoiled.glob("index-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    reported = [verify(spoiled, quick=True, share=(n, 3), options=OPTIONS).faults for n in range(3)]
    assert sorted(map(len, reported)) == [0, 0, 1]


def test_what_an_open_checkpoint_knows_of_an_index_does_not_hide_damage_from_verify(spoiled):
    checkpoint = ds.open(spoiled, **SMALL)
    checkpoint.index.preload(checkpoint.index.tensors)
    (path,) = spoiled.glob("index-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert len(faults_of(spoiled)) == 1


def test_a_directory_of_another_size_than_the_manifest_says_is_refused(spoiled):
    manifest = ds.open(spoiled, **SMALL).manifest
    data = (spoiled / manifest.index.name).read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    entry = IndexEntry(index_name(sha256), len(data), len(data), sha256)
    (spoiled / entry.name).write_bytes(data)
    (spoiled / MANIFEST_NAME).write_bytes(msgspec.structs.replace(manifest, index=entry).encode())
    with pytest.raises(FormatError, match=f"{entry.name} is damaged: its directory"):
        ds.open(spoiled, **SMALL)


@pytest.mark.parametrize("size", [0, 1, 60, -1])
def test_a_truncated_index_is_found(spoiled, size):
    (path,) = spoiled.glob("index-*")
    data = path.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(FormatError, match=f"{path} is damaged: it has {len(data[:size])} bytes"):
        ds.open(spoiled, **SMALL)


def test_an_index_that_shrinks_after_it_was_opened_is_found(spoiled):
    checkpoint = ds.open(spoiled, **SMALL)
    (path,) = spoiled.glob("index-*")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FormatError, match=f"{path} is damaged"):
        checkpoint.read_tensor("first")


def test_an_index_that_goes_away_after_it_was_opened_is_named(spoiled):
    checkpoint = ds.open(spoiled, **SMALL)
    (path,) = spoiled.glob("index-*")
    path.unlink()
    with pytest.raises(StorageError, match=f"cannot read {path}: No such file"):
        checkpoint.read_tensor("first")


def test_a_missing_index_is_named(spoiled):
    (path,) = spoiled.glob("index-*")
    path.unlink()
    with pytest.raises(StorageError, match=f"cannot read {path}: No such file"):
        ds.open(spoiled, **SMALL)


@pytest.mark.parametrize(
    "damage", [lambda d: b"", lambda d: d[:-1], lambda d: d.replace(b'"rank": 0', b'"rank": 1')]
)
def test_a_damaged_manifest_is_named(spoiled, damage: Callable[[bytes], bytes]):
    path = spoiled / MANIFEST_NAME
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FormatError, match=f"{path} "):
        ds.open(spoiled, **SMALL)


# -- checksums --------------------------------------------------------------------------------------------


def test_without_checksums_a_save_is_read_and_verify_says_so(tmp_path):
    ds.save(TENSORS | OBJECTS, tmp_path / "c", **SMALL, checksums=False)
    load_everything(tmp_path / "c")
    checkpoint = ds.open(tmp_path / "c", **SMALL)
    assert checkpoint.footer(0).block_checksums == b""
    assert bits(checkpoint.read_tensor("third")) == bits(TENSORS["third"])
    verdict = verify(tmp_path / "c", options=OPTIONS)
    assert (verdict.good, verdict.unchecked_files, verdict.bytes_checked) == (True, 1, 0)


def test_checksums_switched_off_at_load_are_not_looked_at(spoiled):
    (path,) = data_files(spoiled)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    checkpoint = Checkpoint.open(spoiled, dataclasses.replace(OPTIONS, checksums=False))
    assert bits(checkpoint.read_tensor("second")) == bits(TENSORS["second"])
    assert not verify(spoiled, options=dataclasses.replace(OPTIONS, checksums=False)).good


@pytest.mark.parametrize("names", [["iter_0000002", "iter_0000010"], ["mine", "step_7"]])
def test_for_a_directory_of_checkpoints_the_error_names_one(tmp_path: Path, names: list[str]) -> None:
    assert "holds no datastates checkpoint" in why_no_checkpoint(tmp_path)
    for name in names:
        (tmp_path / name).mkdir()
    if names[0] == "mine":
        assert "holds no datastates checkpoint" in why_no_checkpoint(tmp_path)
    (tmp_path / names[1] / MANIFEST_NAME).touch()
    temporary_beside(tmp_path / JOBS_NAME, SaveId(7, 1)).touch()  # a kill has left it
    assert why_no_checkpoint(tmp_path).endswith(f"choose one, as {tmp_path / names[1]}")
