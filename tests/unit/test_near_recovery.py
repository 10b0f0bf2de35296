"""Before a load: what near tiers hold beside data files, what they lose meanwhile, and who reports it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from megatron_datastates.errors import StorageError
from megatron_datastates.format.directory import (
    COMMON_FILE,
    METADATA_NAME,
    TORCH_DIST_INDEX,
    TRACKER_NAME,
)
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.near import recovery
from megatron_datastates.pipeline.near.recovery import recover_newest
from tests.unit import ranks_in_turn
from tests.unit.states import OPTIONS
from tests.unit.test_near_replicas import NEVER_FAR, Cluster
from tests.unit.test_near_tier import Nodes, abandon

METADATA = b'{"sharded_backend": "datastates", "sharded_backend_version": 1}'
OTHER = "other.pt"


def test_files_beside_data_files_are_brought_and_those_of_another_format_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = functools.partial(ranks_in_turn.PublicationExtras, metadata=METADATA, other_files=(OTHER,))
    monkeypatch.setattr(ranks_in_turn, "PublicationExtras", extras)
    nodes = Nodes(tmp_path, faults=NEVER_FAR)
    directory = nodes.directory(3)
    directory.mkdir(parents=True)
    (directory / OTHER).write_bytes(b"what another program has written")
    nodes.save(3)
    abandon(nodes)
    (directory / OTHER).unlink()
    for name in (TORCH_DIST_INDEX, "__0_0.distcp", COMMON_FILE):
        (directory / name).write_bytes(b"of a checkpoint of torch_dist")
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 3
    nodes.check(3)
    assert (directory / OTHER).read_bytes() == b"what another program has written"
    assert (directory / METADATA_NAME).read_bytes() == METADATA
    for name in (TORCH_DIST_INDEX, "__0_0.distcp", COMMON_FILE):
        assert not (directory / name).exists()


@pytest.mark.parametrize("lost", [MANIFEST_NAME, "index-*"])
def test_a_checkpoint_that_loses_a_small_file_while_it_is_brought_is_left_for_an_older_one(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, faults=NEVER_FAR)
    nodes.save(2)
    nodes.save(3)
    abandon(nodes)
    manifest_in, small_files_of = recovery.manifest_in, recovery.small_files_of

    def lose(folder: Path) -> None:
        if folder == nodes.near(0, 3):
            for path in folder.glob(lost):
                path.unlink()

    def manifest_after(folder: Path) -> Manifest | None:
        if lost == MANIFEST_NAME:
            lose(folder)
        return manifest_in(folder)

    def small_files_after(folder: Path, manifest: Manifest) -> tuple[bytes, dict[str, bytes]]:
        lose(folder)
        return small_files_of(folder, manifest)

    monkeypatch.setattr(recovery, "manifest_in", manifest_after)
    monkeypatch.setattr(recovery, "small_files_of", small_files_after)
    iteration, said = Cluster(monkeypatch, nodes.roots).recover(nodes.run)
    assert iteration == 2 and "could not be copied there from the near tiers: rank 0: " in said, said
    nodes.check(2)
    assert not nodes.is_far(3) and (nodes.run / TRACKER_NAME).read_text() == "2"


def test_the_ranks_of_a_node_report_what_it_holds_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, faults=NEVER_FAR)
    nodes.save(3)
    abandon(nodes)
    near0, near1 = nodes.roots
    iteration, said = Cluster(monkeypatch, [near0, near0, near1, near1]).recover(nodes.run)
    assert iteration == 3 and "from 2 near tiers: 2 files were missing" in said
    nodes.check(3)


def test_a_near_tier_whose_name_is_empty_on_a_rank_fails_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISK_OF_THIS_NODE", "")
    with pytest.raises(StorageError, match=r"rank 0: the near tier \$DISK_OF_THIS_NODE .* is an empty path"):
        recover_newest(tmp_path / "run", dataclasses.replace(OPTIONS, near="$DISK_OF_THIS_NODE"))
