"""Conversions and diffs of checkpoints whose ranks have two data files, one of an earlier save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_datastates.config import MIB
from megatron_datastates.convert.diff import Difference, choose_comparison, diff
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources import datastates as source_module
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Entry, Mutability, Place, StateReader, TensorSource
from megatron_datastates.providers.objects import ObjectSource
from tests.unit.converting import contents, convert_to
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import OPTIONS, bits

RANKS, ROWS, COLUMNS = 2, 600, 1001
BASE = torch.arange(RANKS * ROWS * COLUMNS, dtype=torch.float32).reshape(RANKS * ROWS, COLUMNS)


class Shards:
    """Rows of two global tensors, of which one is not expected to change, and an object of this rank."""

    def __init__(self, rank: int, adapter: torch.Tensor, base: torch.Tensor = BASE) -> None:
        self._rank, self._adapter, self._base = rank, adapter, base

    def entries(self) -> Iterator[Entry]:
        for key, whole, stable in (("base", self._base, True), ("adapter", self._adapter, False)):
            rows = len(whole) // RANKS
            place = Place(tuple(whole.shape), (self._rank * rows, 0), (rows, whole.shape[1]))
            part = whole[self._rank * rows : (self._rank + 1) * rows]
            yield TensorSource(key, part, Mutability.NOW, place, stable)
        yield ObjectSource(f"rng/{self._rank}", [self._rank])

    def restore(self, reader: StateReader) -> None:
        raise NotImplementedError


def adapter_of(number: int) -> torch.Tensor:
    return torch.full((4, 3), float(number))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Saves twice: the second checkpoint shares a file of each rank with the first."""
    folder, ranks = tmp_path_factory.mktemp("run"), RanksInTurn(RANKS, link_from=MIB)
    for number in range(2):
        publication = ranks.save(
            folder / str(number), [Shards(rank, adapter_of(number)) for rank in range(RANKS)]
        )
        assert publication.outcome is Outcome.PUBLISHED, publication.error
    ranks.close()
    files = Checkpoint.open(folder / "1", OPTIONS).manifest.files
    assert [(file.rank, file.group, bool(file.save_id)) for file in files] == [
        (0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True),
    ]  # fmt: skip
    return folder


def compared(one: Path, other: Path) -> Difference:
    first, second = open_source(one), open_source(other)
    return diff(first, second, choose_comparison(first, second))


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_a_conversion_to_the_same_format_has_one_file_a_rank(run, tmp_path, ranks):
    made = convert_to(run / "1", tmp_path / "made", format="datastates", ranks=ranks, verify=True)
    assert contents(made) == contents(open_source(run / "1"))
    assert bits(made.read_tensor("base")) == bits(BASE)
    files = Checkpoint.open(tmp_path / "made", OPTIONS).manifest.files
    assert [(file.rank, file.group, file.save_id) for file in files] == [
        (rank, 0, "") for rank in range(ranks or RANKS)
    ]
    assert verify(tmp_path / "made", options=OPTIONS).faults == []


@pytest.mark.parametrize("is_near", [True, False])
def test_what_the_page_cache_has_is_read_from_there(run, tmp_path, is_near, monkeypatch):
    asked: list[Path] = []
    monkeypatch.setattr(source_module, "is_in_memory", lambda path: asked.append(path) or is_near)
    made = convert_to(run / "1", tmp_path / "made", format="torch_dist", verify=True)
    assert contents(made) == contents(open_source(run / "1")) and asked


def test_a_conversion_keeps_what_each_rank_stored(run, tmp_path):
    made = convert_to(run / "1", tmp_path / "made", format="datastates")
    index = Checkpoint.open(tmp_path / "made", OPTIONS).index
    assert dict(index.objects) == {"rng/0": 0, "rng/1": 1}
    for key in ("base", "adapter"):
        entry = made.tensors[key]
        assert [(f, o[0]) for f, o in zip(entry.files, entry.offsets, strict=True)] == [
            (rank, rank * entry.global_shape[0] // RANKS) for rank in range(RANKS)
        ]


def test_torch_dist_and_back(run, tmp_path):
    convert_to(run / "1", tmp_path / "dcp", format="torch_dist", verify=True)
    back = convert_to(tmp_path / "dcp", tmp_path / "back", format="datastates", verify=True)
    assert contents(back) == contents(open_source(run / "1"))
    assert compared(tmp_path / "dcp", run / "1").equal and compared(run / "1", tmp_path / "back").equal


def test_a_diff_of_two_that_share_files_finds_what_changed(run):
    found = compared(run / "0", run / "1")
    assert {key: drift.changed for key, drift in found.tensors.items()} == {"base": 0, "adapter": 12}
    assert found.tensors["adapter"].largest_absolute == 1.0 and not found.equal


def test_a_diff_finds_a_change_in_a_file_that_was_written_anew(run, tmp_path):
    ranks, changed = RanksInTurn(RANKS, link_from=MIB), BASE.clone()
    changed[-1, -1] += 1
    ranks.save(tmp_path / "c", [Shards(rank, adapter_of(1), changed) for rank in range(RANKS)])
    ranks.close()
    found = compared(run / "1", tmp_path / "c")
    assert {key: drift.changed for key, drift in found.tensors.items()} == {"base": 1, "adapter": 0}
