"""Small files in near tiers: what is stored with a save, what a load brings from there, and what is lost."""

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
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing import presence
from tests.unit import ranks_in_turn
from tests.unit.states import OPTIONS, data_files
from tests.unit.test_near_replicas import NEVER_FAR, Cluster
from tests.unit.test_near_tier import Nodes, abandon

METADATA = b'{"sharded_backend": "datastates", "sharded_backend_version": 1}'
OTHER = "other.pt"


def test_names_above_the_near_folder_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync = presence.sync_directory
    monkeypatch.setattr(presence, "sync_directory", lambda path: (synced.append(path), sync(path)))
    nodes = Nodes(tmp_path, faults=NEVER_FAR)
    nodes.save(1)
    abandon(nodes)
    for node, root in enumerate(nodes.roots):
        assert {nodes.near(node, 1).parent, root} <= set(synced)


def test_rank_0_without_a_near_tier_keeps_nothing_of_a_save_that_another_node_could_not_store(
    tmp_path: Path,
) -> None:
    nodes = Nodes(tmp_path, {"near": ""}, {"faults": "write manifest:1:EIO"})
    failed = nodes.save(1)
    assert failed.outcome is Outcome.FAILED and "Nothing was published" in str(failed.error)
    assert data_files(nodes.directory(1)) == []
    abandon(nodes)


@pytest.mark.parametrize("content", [b"what another program has written", b""])
def test_files_beside_data_files_are_brought_and_those_of_another_format_go(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = functools.partial(ranks_in_turn.PublicationExtras, metadata=METADATA, other_files=(OTHER,))
    monkeypatch.setattr(ranks_in_turn, "PublicationExtras", extras)
    nodes = Nodes(tmp_path, faults=NEVER_FAR)
    directory = nodes.directory(3)
    directory.mkdir(parents=True)
    (directory / OTHER).write_bytes(content)
    nodes.save(3)
    abandon(nodes)
    (directory / OTHER).unlink()
    for name in (TORCH_DIST_INDEX, "__0_0.distcp", COMMON_FILE):
        (directory / name).write_bytes(b"of a checkpoint of torch_dist")
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 3
    nodes.check(3)
    assert (directory / OTHER).read_bytes() == content
    assert (directory / METADATA_NAME).read_bytes() == METADATA
    for name in (TORCH_DIST_INDEX, "__0_0.distcp", COMMON_FILE):
        assert not (directory / name).exists()


def test_of_two_saves_of_an_iteration_the_files_of_the_later_one_are_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = functools.partial(ranks_in_turn.PublicationExtras, other_files=(OTHER,))
    monkeypatch.setattr(ranks_in_turn, "PublicationExtras", extras)
    nodes = Nodes(tmp_path, faults=NEVER_FAR)
    path = nodes.directory(3) / OTHER
    path.parent.mkdir(parents=True)
    for content in (b"of the first save", b"of the later one"):
        path.write_bytes(content)
        nodes.save(3)
    abandon(nodes)
    path.unlink()
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 3
    assert path.read_bytes() == b"of the later one"
    nodes.check(3)


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
