"""Conversion between formats without Megatron: nothing changes there and back."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import megatron_datastates as ds
from megatron_datastates.config import MIB
from megatron_datastates.convert import job, limits
from megatron_datastates.convert.job import no_progress
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sinks import datastates
from megatron_datastates.convert.sinks.sink import stream_fragments
from megatron_datastates.convert.sources import archives
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.sources.torch_dist import TorchDistSource
from megatron_datastates.convert.workers import Workers
from megatron_datastates.engine import atomic_files
from megatron_datastates.errors import FormatError
from megatron_datastates.format.directory import OPTIMIZER_MAPS_NAME
from megatron_datastates.format.header import HEADER_BYTES
from megatron_datastates.format.manifest import DROPPED
from megatron_datastates.format.values import MANIFEST_NAME, OPTIMIZER_MAP_NAME, element_bytes
from megatron_datastates.pipeline.publishing.presence import other_file_entry
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability, Place, StateReader, TensorSource
from megatron_datastates.providers.objects import ObjectSource, check_stored
from tests.unit.command import run
from tests.unit.converting import contents, convert_to, dcp_state, save_with_dcp
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import SMALL, bits, data_files, random_tensor, save

COMMON = ObjectSource("", {"iteration": 1}, Mutability.NEVER).serialize()


def test_a_checkpoint_of_dcp_is_read_bit_for_bit(by_dcp: Path) -> None:
    source = open_source(by_dcp)
    state = dcp_state()
    assert source.format == "torch_dist"
    assert set(source.tensors) == set(state) and source.objects == ["object"]
    for key, tensor in state.items():
        read = source.read_tensor(key)
        assert (read.dtype, read.shape, bits(read)) == (tensor.dtype, tensor.shape, bits(tensor)), key
    part = source.read_tensor("transposed", (1, 7, 3), (2, 50, 30))
    assert bits(part) == bits(state["transposed"][1:3, 7:57, 3:33])


def test_fragments_are_cut_between_elements(tmp_path: Path) -> None:
    dtypes = [torch.int8, torch.complex128, torch.bfloat16, torch.int8, torch.float64, torch.float32]
    tensors = {str(n): random_tensor(dtype, (5 + n,), n) for n, dtype in enumerate(dtypes)}
    save_with_dcp(tmp_path / "dcp", tensors | {"none": torch.empty(0)})
    source, found = open_source(tmp_path / "dcp"), dict.fromkeys([*tensors, "none"], b"")
    for part, data in stream_fragments(source, [(key, 0) for key in found], np.empty(64, np.uint8)):
        item = element_bytes(source.tensors[part.key].dtype)
        assert part.begin == len(found[part.key]) and part.begin % item == part.size % item == 0
        found[part.key] += data.tobytes()
    assert found == {key: bits(tensor) for key, tensor in tensors.items()} | {"none": b""}


def test_conjugated_views_of_dcp_are_converted_to_their_values(tmp_path: Path) -> None:
    value = torch.randn(3, 2, dtype=torch.complex64)
    save_with_dcp(tmp_path / "dcp", {"conj": value.conj(), "neg": value.conj().imag})
    convert_to(tmp_path / "dcp", tmp_path / "ours")
    found = ds.load(tmp_path / "ours")
    assert found["conj"].equal(value.conj()) and found["neg"].equal(-value.imag)
    assert run("diff", tmp_path / "dcp", tmp_path / "ours")[0] == 0


def test_a_conversion_there_and_back_changes_nothing(by_dcp: Path, tmp_path: Path) -> None:
    ours = convert_to(by_dcp, tmp_path / "ours")
    back = convert_to(tmp_path / "ours", tmp_path / "back")
    assert (ours.format, back.format) == ("datastates", "torch_dist")
    assert contents(ours) == contents(back) == contents(open_source(by_dcp))
    verdict = verify(tmp_path / "ours")
    assert verdict.good and verdict.unchecked_files == 0, verdict.faults
    assert ds.open(tmp_path / "ours").manifest.iteration == 12


def test_dcp_loads_a_checkpoint_converted_to_torch_dist(by_dcp: Path, tmp_path: Path) -> None:
    convert_to(by_dcp, tmp_path / "ours")
    convert_to(tmp_path / "ours", tmp_path / "back")
    before = dcp_state()
    state = {key: torch.zeros_like(tensor) for key, tensor in before.items()} | {"object": None}
    dcp.load(state, checkpoint_id=tmp_path / "back")
    assert {key: bits(state[key]) for key in before} == {key: bits(before[key]) for key in before}
    assert state["object"] == "words"


def test_a_tensor_larger_than_the_memory_goes_through_windows(
    by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: list[int] = []
    monkeypatch.setattr(limits, "_MOST_WINDOW_BYTES", MIB)
    for kind in (type(open_source(by_dcp)), type(convert_to(by_dcp, tmp_path / "first"))):
        read = kind.read_ranges

        def noted(self: Source, ranges: Any, window: Any, read: Any = read) -> None:
            largest.append(len(window))
            read(self, ranges, window)

        monkeypatch.setattr(kind, "read_ranges", noted)
    convert_to(by_dcp, tmp_path / "ours", verify=True)
    convert_to(tmp_path / "ours", tmp_path / "back", verify=True)
    assert max(largest) <= MIB and len(largest) > 4 * 20
    monkeypatch.undo()
    assert contents(open_source(tmp_path / "back")) == contents(open_source(by_dcp))


def test_an_object_larger_than_a_window_is_written_whole_and_gaps_are_zero(
    by_dcp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "source", dcp_state() | {"object": os.urandom(3 * MIB)})
    monkeypatch.setattr(limits, "_MOST_WINDOW_BYTES", MIB)
    monkeypatch.setattr(datastates.np, "empty", lambda count, dtype: np.full(count, 0xAA, dtype))
    made = convert_to(tmp_path / "source", tmp_path / "made")
    assert made.read_object("object") == open_source(tmp_path / "source").read_object("object")
    (file,) = data_files(tmp_path / "made")
    rest = bytearray(file.read_bytes())
    for entry in ds.open(tmp_path / "made").index.tensors.values():
        for at, size in zip(entry.file_offsets.tolist(), entry.file_bytes.tolist(), strict=True):
            rest[at : at + size] = bytes(size)
    footer = ds.open(tmp_path / "made").footer(0)
    objects = min(extent.offset for extent in footer.objects.values())
    assert not any(rest[HEADER_BYTES:objects])


def test_an_object_of_many_windows_is_read_once_to_check_it_and_once_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "source", {"w": torch.ones(3), "object": os.urandom(5 * MIB)})
    monkeypatch.setattr(limits, "_MOST_WINDOW_BYTES", MIB)
    reads: list[str] = []
    read = TorchDistSource.read_object
    monkeypatch.setattr(
        TorchDistSource, "read_object", lambda source, key: reads.append(key) or read(source, key)
    )
    convert_to(tmp_path / "source", tmp_path / "made")
    assert len(reads) == 2


def test_the_first_error_stops_all_workers() -> None:
    workers, started = Workers(2, no_progress), threading.Event()

    def work(number: int) -> None:
        if number == 0:
            assert started.wait(60)
            raise OSError("first")
        started.set()
        while True:
            workers.progress(0)

    with pytest.raises(OSError, match="first"):
        workers.run(range(2), work)


def test_other_files_and_megatrons_metadata_are_copied(by_dcp: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_with_dcp(source, {"a": torch.ones(3)})
    (source / "common.pt").write_bytes(COMMON)
    (source / "modelopt_state").mkdir()
    (source / "modelopt_state" / "state").write_bytes(b"state")
    (source / "integrity.json").write_text('{"files": {"gone": "0"}}')
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    convert_to(source, tmp_path / "ours")
    assert ds.open(tmp_path / "ours").read_other("common.pt") == COMMON
    convert_to(tmp_path / "ours", tmp_path / "back", verify=True)
    for directory, name in (("ours", "datastates"), ("back", "torch_dist")):
        made = tmp_path / directory
        assert (made / "common.pt").read_bytes() == COMMON
        assert (made / "modelopt_state" / "state").read_bytes() == b"state"
        assert not (made / "integrity.json").exists()
        assert f'"sharded_backend": "{name}"' in (made / "metadata.json").read_text()
        assert '"common_backend": "torch"' in (made / "metadata.json").read_text()


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_files_that_a_framework_has_added_to_a_published_checkpoint_are_copied(
    format: str, tmp_path: Path
) -> None:
    """As Bridge adds run_config.yaml, without which it does not resume. Left-overs are none of these."""
    source = tmp_path / "source"
    ds.save({"a": torch.ones(3)}, source, **SMALL)
    for name in ("run_config.yaml", "common.pt", ".datastates-claim-0123", "x.tmp"):
        (source / name).write_text("text")
    made = convert_to(source, tmp_path / "made", format=format, verify=True)
    assert (tmp_path / "made" / "run_config.yaml").read_text() == "text"
    assert made.other_files == ["run_config.yaml"]


def test_a_large_file_that_others_have_added_is_copied_and_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can load one of more than 4 GiB: a conversion failed after all had been written."""
    save_with_dcp(tmp_path / "dcp", {"a": torch.ones(3)})
    with (tmp_path / "dcp" / "extra.bin").open("wb") as file:
        file.truncate(80 * MIB)
    (tmp_path / "dcp" / "small.bin").write_bytes(b"x")
    monkeypatch.setattr(atomic_files, "OBJECT_BYTES", 64 * MIB)
    made = convert_to(tmp_path / "dcp", tmp_path / "ours", verify=True)
    assert made.manifest is not None
    names = {one.name for one in made.manifest.others}
    assert "small.bin" in names and "extra.bin" not in names
    assert (tmp_path / "ours" / "extra.bin").stat().st_size == 80 * MIB
    assert made.other_files == ["extra.bin", "small.bin"] and verify(tmp_path / "ours").good


def test_a_conversion_to_the_same_format_notes_that_the_optimizer_was_dropped(tmp_path: Path) -> None:
    ds.save({"a": torch.ones(3)}, tmp_path / "source", **SMALL)
    path = tmp_path / "source" / MANIFEST_NAME
    manifest = ds.open(tmp_path / "source").manifest
    writer = {**manifest.writer, "optimizer": DROPPED, "torch": "1.0"}
    path.write_bytes(msgspec.structs.replace(manifest, writer=writer).encode())
    made = convert_to(tmp_path / "source", tmp_path / "made", format="datastates").manifest
    assert made is not None and made.is_without_optimizer
    assert made.writer["torch"] != "1.0"


MAP_KEY = f"optimizer.{OPTIMIZER_MAP_NAME}/shard_0_1"


def with_a_map(saver: Saver, directory: Path, value: Any = "a map") -> dict[str, Any]:
    save(saver, directory, {"a": torch.ones(3)}, {MAP_KEY: [value], "other/shard_0_1": [2]})
    return contents(open_source(directory))


def test_the_optimizer_map_survives_torch_dist_where_dcp_does_not_see_it(
    saver: Saver, tmp_path: Path
) -> None:
    before = with_a_map(saver, tmp_path / "ours")
    there = convert_to(tmp_path / "ours", tmp_path / "there", verify=True)
    back = convert_to(tmp_path / "there", tmp_path / "back", verify=True)
    assert contents(there) == contents(back) == before and f"object {MAP_KEY}" in before
    seen = dcp.FileSystemReader(tmp_path / "there").read_metadata().state_dict_metadata
    assert seen.keys() == {"a", "other/shard_0_1"}
    assert not (tmp_path / "back" / OPTIMIZER_MAPS_NAME).exists()


def test_another_checkpoint_in_the_directory_has_no_maps(saver: Saver, tmp_path: Path) -> None:
    with_a_map(saver, tmp_path / "ours")
    convert_to(tmp_path / "ours", tmp_path / "there")
    save_with_dcp(tmp_path / "there", {"a": torch.zeros(3)}, overwrite=True)
    assert list(open_source(tmp_path / "there").objects) == []


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[]",
        "{}",
        '{"index_sha256": "SHA", "maps": [1]}',
        '{"index_sha256": "SHA", "maps": {"a": "?"}}',
        '{"index_sha256": "SHA", "maps": {"other": "YQ=="}}',
    ],
)
def test_a_damaged_file_of_maps_is_refused(damaged: str, saver: Saver, tmp_path: Path) -> None:
    with_a_map(saver, tmp_path / "ours")
    convert_to(tmp_path / "ours", tmp_path / "there")
    digest = hashlib.sha256((tmp_path / "there" / ".metadata").read_bytes()).hexdigest()
    (tmp_path / "there" / OPTIMIZER_MAPS_NAME).write_text(damaged.replace("SHA", digest))
    with pytest.raises(FormatError, match=f"{OPTIMIZER_MAPS_NAME} is damaged"):
        open_source(tmp_path / "there")


@pytest.mark.parametrize("ranks", [1, 3, 1000, 1 << 60])
@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_fragments_are_distributed_over_files_by_bytes(
    by_dcp: Path, tmp_path: Path, ranks: int, format: str
) -> None:
    made = convert_to(by_dcp, tmp_path / "made", Limits(workers=3), ranks=ranks, format=format, verify=True)
    assert contents(made) == contents(open_source(by_dcp))
    files = made.stored_by_rank()
    assert len(files) == min(ranks, sum(len(file.fragments) for file in files))
    if ranks == 3:
        held = [sum(made.fragment(*one).bytes for one in file.fragments) for file in files]
        assert max(held) == 20 * MIB, "the large one is alone"


class Shards:
    """Boxes of a matrix, at the given offsets and of the given shapes."""

    def __init__(self, *boxes: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self.boxes = boxes

    def entries(self) -> Iterator[TensorSource]:
        for offset, shape in self.boxes:
            data = torch.full(shape, 1.0 + offset[0])
            yield TensorSource("w", data, Mutability.NOW, Place((6, 4), offset, shape))

    def restore(self, reader: StateReader) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_a_fragment_without_elements_hides_no_other_at_its_offset(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    boxes = [((0, 0), (3, 4)), ((0, 0), (0, 4)), ((3, 0), (3, 4))]
    ranks = RanksInTurn(3)
    ranks.save(tmp_path / "ours", [Shards(boxes[n]) for n in order])
    ranks.close()
    made = convert_to(tmp_path / "ours", tmp_path / "made", verify=True)
    expected = open_source(tmp_path / "ours").read_tensor("w")
    assert expected[:, 0].tolist() == [1.0] * 3 + [4.0] * 3
    assert bits(made.read_tensor("w")) == bits(expected)
    state = {"w": torch.zeros(6, 4)}
    dcp.load(state, checkpoint_id=tmp_path / "made")
    assert bits(state["w"]) == bits(expected)
    code, output, _ = run("verify", tmp_path / "made")
    assert code == 0 and ": good: " in output
    for format in ("datastates", "torch_dist"):
        again = convert_to(tmp_path / "made", tmp_path / format, verify=True, format=format)
        assert bits(again.read_tensor("w")) == bits(expected)


def test_files_of_the_other_format_beside_a_source_are_not_copied(tmp_path: Path) -> None:
    both = tmp_path / "both"
    save_with_dcp(both, {"a": torch.ones(3)})
    convert_to(both, tmp_path / "ours")
    for file in (tmp_path / "ours").iterdir():
        (both / file.name).write_bytes(file.read_bytes())
    (both / "common.pt").write_bytes(COMMON)
    (both / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    made = convert_to(both, tmp_path / "made", verify=True)
    assert verify(tmp_path / "made").good and contents(made) == contents(open_source(both))
    assert made.other_files == ["common.pt"]
    (both / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    back = convert_to(both, tmp_path / "back", verify=True)
    assert contents(back) == contents(made) and len(list((tmp_path / "back").glob("*.distcp"))) == 1


def test_files_of_another_format_named_in_a_manifest_are_not_copied(tmp_path: Path) -> None:
    """They would overwrite what was just written."""
    ds.save({"a": torch.ones(3)}, tmp_path / "ours", **SMALL)
    source = open_source(tmp_path / "ours")
    assert isinstance(source, DataStatesSource)
    for name in ("__0_0.distcp", ".metadata", "metadata.json", "common.pt"):
        (tmp_path / "ours" / name).write_bytes(COMMON if name == "common.pt" else b"{}")
        source.checkpoint.manifest.others.append(other_file_entry(tmp_path / "ours" / name, check_stored))
    assert source.other_files == ["common.pt"]


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_files_of_others_are_durable_before_the_target_appears(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_dcp(tmp_path / "source", {"a": torch.ones(3)})
    (tmp_path / "source" / "common.pt").write_bytes(COMMON)
    (tmp_path / "source" / "modelopt").mkdir()
    (tmp_path / "source" / "modelopt" / "state.pt").write_bytes(b"state")
    synced: set[int] = set()
    fsync, rename = os.fsync, job.rename_to_target

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def noted_rename(work_directory: Path, target: Path, claim: str) -> None:
        for name in ("common.pt", "modelopt", "modelopt/state.pt"):
            assert (work_directory / name).stat().st_ino in synced, name
        rename(work_directory, target, claim)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(job, "rename_to_target", noted_rename)
    convert_to(tmp_path / "source", tmp_path / "made", format=format)


@pytest.mark.parametrize(("offset", "shape"), [((3, 0), (2, 4)), ((5, 1), (1, 2)), ((0, 1), (10, 1))])
def test_a_slice_of_a_large_fragment_takes_no_more_memory_than_it_has(
    offset: tuple[int, int], shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"rows": random_tensor(torch.bfloat16, (10, 4), 1)}
    tensors["columns"] = random_tensor(torch.float32, (4, 10), 2).T
    save_with_dcp(tmp_path / "source", tensors)
    source, read, sizes = open_source(tmp_path / "source"), archives.read_exactly, []

    def noted(file: Any, at: int, target: Any, where: str) -> None:
        sizes.append(target.nbytes)
        read(file, at, target, where)

    monkeypatch.setattr(archives, "read_exactly", noted)
    for key, tensor in tensors.items():
        end = [o + n for o, n in zip(offset, shape, strict=True)]
        expected = tensor[offset[0] : end[0], offset[1] : end[1]]
        found = source.read_tensor(key, offset, shape)
        assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, expected.shape, bits(expected))
        assert max(sizes, default=0) <= found.nbytes


def test_a_slice_over_several_fragments_is_put_together(tmp_path: Path) -> None:
    boxes = [((0, 0), (3, 2)), ((0, 2), (3, 2)), ((3, 0), (3, 2)), ((3, 2), (3, 2))]
    ranks = RanksInTurn(4)
    ranks.save(tmp_path / "ours", [Shards(box) for box in boxes])
    ranks.close()
    made = convert_to(tmp_path / "ours", tmp_path / "made")
    assert made.read_tensor("w", (1, 1), (4, 2)).tolist() == [[1, 1], [1, 1], [4, 4], [4, 4]]
    assert made.read_tensor("w").tolist() == [[1] * 4] * 3 + [[4] * 4] * 3
