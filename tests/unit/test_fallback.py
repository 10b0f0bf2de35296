"""Which older checkpoint is named after a damaged one; and that shares of a verification add up."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.convert.weights_only import drop_optimizer, plan_drop
from megatron_datastates.engine.reader import Reader, ReadOutcome
from megatron_datastates.errors import EngineError
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.upkeep.fallback import FallbackSearch, find_older_checkpoint
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.support.capabilities import bound_by_permissions
from tests.unit.by_hand import Part, fragment, index_of, write_checkpoint
from tests.unit.states import OPTIONS, SMALL, data_files


def make(root: Path, *iterations: int, **options: bool) -> None:
    for iteration in iterations:
        ds.save(
            {"w": torch.full((5000,), float(iteration))}, root / f"iter_{iteration:07d}", **SMALL, **options
        )


def damage(root: Path, iteration: int) -> None:
    (path,) = data_files(root / f"iter_{iteration:07d}")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def look(root: Path, iteration: int, most: int) -> FallbackSearch:
    return find_older_checkpoint(root / f"iter_{iteration:07d}", root, most, Collectives(), OPTIONS)


def test_the_newest_that_is_older_and_whole_is_found(tmp_path):
    make(tmp_path, 1, 2, 3, 4, 5)
    damage(tmp_path, 3)
    damage(tmp_path, 4)
    assert look(tmp_path, 4, 9) == FallbackSearch(2, True, [3])


@pytest.mark.parametrize(("whole", "expected"), [(True, FallbackSearch(2, True, [4], other=5)), (False, 3)])
def test_a_newer_one_of_another_format_is_not_verified_and_is_named(tmp_path, whole, expected):
    make(tmp_path, 2, 4, 6)
    damage(tmp_path, 4)
    for iteration in (1, 3, 5, 7):
        path = tmp_path / f"iter_{iteration:07d}"
        path.mkdir()
        if whole or iteration != 5:
            (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
            (path / ".metadata").touch()
    found = look(tmp_path, 6, 9)
    assert found == expected if whole else found.other == expected


def test_a_copy_under_a_name_that_megatron_does_not_load_is_not_verified(tmp_path):
    make(tmp_path, 1, 4)
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_3")
    assert look(tmp_path, 4, 9) == FallbackSearch(1)


def test_an_older_one_of_another_format_is_not_named(tmp_path):
    make(tmp_path, 2, 4)
    path = tmp_path / "iter_0000001"
    path.mkdir()
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (path / ".metadata").touch()
    assert look(tmp_path, 4, 9) == FallbackSearch(2)


def test_a_newer_one_of_another_format_is_named_if_megatron_loads_it(tmp_path):
    make(tmp_path, 1, 4)
    for name in ("iter_0000002", "iter_3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (tmp_path / name / ".metadata").touch()
    assert look(tmp_path, 4, 9) == FallbackSearch(1, other=2)


def test_no_more_are_looked_at_than_asked_for(tmp_path):
    make(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 2)
    damage(tmp_path, 3)
    assert look(tmp_path, 4, 2) == FallbackSearch(None, True, [3, 2])


def test_iteration_zero_cannot_be_asked_for_and_is_not_named(tmp_path):
    make(tmp_path, 0, 4)
    assert look(tmp_path, 4, 9) == FallbackSearch()


def test_what_was_not_published_is_not_looked_at(tmp_path):
    make(tmp_path, 1, 2, 4)
    (tmp_path / "iter_0000002" / "datastates.manifest").unlink()
    assert look(tmp_path, 4, 1) == FallbackSearch(1, True, [])


def test_one_that_cannot_be_looked_at_is_not_passed_over_in_silence(tmp_path, caplog):
    make(tmp_path, 1, 2, 4)
    hidden = tmp_path / "iter_0000002"
    with bound_by_permissions():
        hidden.chmod(0)
        found = look(tmp_path, 4, 9)
    hidden.chmod(0o755)
    assert found == FallbackSearch(1, True, [2])
    assert f"{hidden} cannot be listed: Permission denied" in caplog.text


def test_one_whose_data_cannot_be_read_is_not_taken(tmp_path):
    make(tmp_path, 1, 2, 4)
    (path,) = data_files(tmp_path / "iter_0000002")
    with bound_by_permissions():
        path.chmod(0)
        assert look(tmp_path, 4, 9) == FallbackSearch(1, True, [2], [2])


def test_one_without_its_optimizer_comes_last_and_is_said_to_be_that(tmp_path):
    make(tmp_path, 1, 4)
    weights = tmp_path / "iter_0000002"
    ds.save({"w": torch.ones(9), "optimizer.state.exp_avg.w": torch.ones(9)}, weights, **SMALL)
    plan = plan_drop(weights)
    assert plan is not None
    drop_optimizer(plan)
    assert look(tmp_path, 4, 9) == FallbackSearch(1)
    damage(tmp_path, 1)
    assert look(tmp_path, 4, 9) == FallbackSearch(2, True, [1], is_without_optimizer=True)


def test_nothing_is_older_than_what_is_no_iteration(tmp_path):
    make(tmp_path, 1)
    assert (
        find_older_checkpoint(tmp_path / "release", tmp_path, 3, Collectives(), OPTIONS) == FallbackSearch()
    )
    assert (
        find_older_checkpoint(
            tmp_path / "gone" / "iter_0000003", tmp_path / "gone", 3, Collectives(), OPTIONS
        )
        == FallbackSearch()
    )


def test_missing_checksums_are_reported(tmp_path):
    make(tmp_path, 1, checksums=False)
    assert look(tmp_path, 4, 1) == FallbackSearch(1, False, [])


def test_without_threads_a_rank_checks_its_share_itself(tmp_path, monkeypatch):
    """The other ranks wait for its sums."""
    make(tmp_path, 1, 2)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert look(tmp_path, 4, 1) == FallbackSearch(2, True, [])


@pytest.mark.parametrize("lack", [EngineError("start reader thread", code=errno.EAGAIN), MemoryError()])
def test_a_rank_without_memory_or_threads_finds_no_damage(tmp_path, monkeypatch, lack):
    """Else --datastates-on-damage fallback would load an older one than it must."""
    make(tmp_path, 1, 2, 3)
    lacking = [lack]
    original = Reader.read

    def read(reader: Reader, *args: Any) -> ReadOutcome:
        if lacking:
            raise lacking.pop()
        return original(reader, *args)

    monkeypatch.setattr(Reader, "read", read)
    assert look(tmp_path, 4, 9) == FallbackSearch(2, True, [3], unread=[3])


@pytest.mark.parametrize("shares", [1, 2, 3, 5])
def test_shares_of_a_verification_find_every_fault_once(tmp_path, shares):
    """A hole in one tensor, an object that is not there, a bad block, and a file that is gone."""
    parts = [Part(pieces=[(4096, bytes(8))]) for _ in range(3)]
    tensors = [(fragment(name, [9], [0], [8 + n]), n, 4096) for n, name in enumerate(["hole", "whole"])]
    write_checkpoint(tmp_path, parts, index_of(tensors, {"x": 2}))
    everything = verify(tmp_path, options=OPTIONS)
    assert len(everything.faults) == 2, everything.faults
    (one, two, _) = data_files(tmp_path)
    one.unlink()
    data = bytearray(two.read_bytes())
    data[4096] ^= 1
    two.write_bytes(data)
    faults = sorted(verify(tmp_path, options=OPTIONS).faults)
    found = [verify(tmp_path, share=(nth, shares), options=OPTIONS) for nth in range(shares)]
    assert sorted(fault for verdict in found for fault in verdict.faults) == faults
    assert len(faults) == 4, faults
