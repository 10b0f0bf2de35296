"""Near tiers in mishaps: restarts within a process, damaged files, links that lead nowhere, left-overs."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_datastates.config import MIB
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.directory import COMMON_FILE, METADATA_NAME, TRACKER_NAME
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.mcore.training import tracker_writing
from megatron_datastates.pipeline.near import copying, drain, removal, replicas, room, tier
from megatron_datastates.pipeline.near.places import manifest_in, near_run, published_in
from megatron_datastates.pipeline.near.removal import remove_saves
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.upkeep.repair import RepairRefusedError, repair
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.threads import BackgroundThread
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.unit.states import data_files, flip
from tests.unit.test_near_replicas import Cluster
from tests.unit.test_near_tier import Nodes, abandon, killed, recover, states_of
from tests.unit.test_two_files_a_rank import Shards, adapter_of

OTHER_RUN = 0xB


def restart(nodes: Nodes, run_id: int = OTHER_RUN) -> None:
    """Does what a session does when torch.distributed was initialized anew in the same process."""
    for saver in nodes.ranks.savers:
        saver.session._run_id, saver.session._ordinal = run_id, 0


def test_what_is_not_trained_is_stored_once_in_save_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save before has left the near tier by then, as always where it is far and one is kept."""
    synced: list[Path] = []
    monkeypatch.setattr(drain, "sync_directory", synced.append, raising=False)
    nodes = Nodes(tmp_path, link_from=MIB)
    for iteration in (1, 2, 3):
        shards = [Shards(rank, adapter_of(iteration)) for rank in (0, 1)]
        nodes.ranks.save(nodes.directory(iteration), shards)
        kept = [nodes.directory(iteration).name]
        eventually(lambda kept=kept: nodes.kept(0) == nodes.kept(1) == kept)
    nodes.close()
    for rank in (0, 1):
        files = {path.stat().st_ino for path in nodes.run.glob(f"iter_*/data-{rank:05d}.1-*")}
        assert len(files) == 1
    assert sorted(synced) == [nodes.directory(iteration) for iteration in (2, 2, 3, 3)]
    assert all(verify(nodes.directory(iteration)).good for iteration in (1, 2, 3))


def test_a_copy_that_is_a_link_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    synced: list[tuple[str, bool]] = []

    def sync(folder: Path) -> None:
        names = [path.name for path in folder.glob("data-*.1-*")]
        synced.append((folder.name, len(names) == 2))

    monkeypatch.setattr(replicas, "sync_directory", sync, raising=False)
    nodes = Nodes(tmp_path, link_from=MIB, near_replicas=1)
    for iteration in (1, 2):
        nodes.ranks.save(nodes.directory(iteration), [Shards(rank, adapter_of(iteration)) for rank in (0, 1)])
    assert synced == [("iter_0000002", True)] * 2
    nodes.close()


def test_a_copy_of_an_earlier_save_is_not_linked_where_it_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    nodes = Nodes(tmp_path, link_from=MIB, near_replicas=1, near_keep=2, drain_every=9)
    for iteration in (1, 2):
        nodes.ranks.save(nodes.directory(iteration), [Shards(rank, adapter_of(iteration)) for rank in (0, 1)])
        (copied,) = nodes.near(0, iteration).glob("data-00001.1-*")
        assert copied.read_bytes() == (nodes.near(1, iteration) / copied.name).read_bytes()
        os.truncate(copied, MIB)
    nodes.close()


def test_what_is_published_near_while_an_older_save_is_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process renames the newer manifest right after this one has read the older one."""
    nodes = Nodes(tmp_path, faults="drain write:0:EIO")
    older = nodes.save(1).save.context.save_id
    folder = nodes.near(0, 1)
    before = (folder / MANIFEST_NAME).read_bytes()
    newer = nodes.save(1).save.context.save_id
    (folder / MANIFEST_NAME).rename(folder / ".newer")
    (folder / MANIFEST_NAME).write_bytes(before)

    def meanwhile(path: Path) -> Manifest | None:
        found = manifest_in(path)
        if (path / ".newer").exists():
            (path / ".newer").rename(path / MANIFEST_NAME)
        return found

    monkeypatch.setattr(removal, "manifest_in", meanwhile)
    remove_saves(folder, {older})
    assert published_in(folder) == newer
    assert [path.name for path in data_files(folder)] == [newer.data_file_name(0)]
    abandon(nodes)


@pytest.mark.parametrize("is_beside_another", [False, True])
def test_what_an_earlier_job_left_stays_beside_files_of_a_job_that_may_be_running(
    is_beside_another: bool, tmp_path: Path
) -> None:
    run, folder = tmp_path / "near", tmp_path / "near" / "iter_0000001"
    folder.mkdir(parents=True)
    earlier, own = SaveId(1, 1), SaveId(2, 1)
    (folder / earlier.data_file_name(0)).touch()
    own_room = room.Room(keep=1)
    save = SimpleNamespace(save_id=own, near=run / "iter_0000002", far=tmp_path / "iter_0000002", is_far=True)
    own_room.begin(save)
    if is_beside_another:
        (folder / SaveId(3, 1).data_file_name(0)).touch()
    own_room.make([save], lambda save: False, lambda save: None)
    assert folder.exists() is is_beside_another


# -- restarts within the process ----------------------------------------------------------------------------


def test_after_a_restart_within_the_process_later_saves_are_the_newer_ones(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, drain_every=10)
    for iteration in (1, 2, 3):
        nodes.save(iteration)
    restart(nodes)
    nodes.save(4)
    eventually(lambda: nodes.kept(0) == nodes.kept(1) == ["iter_0000004"])
    nodes.close()
    nodes.check(4)


def test_what_is_complete_first_of_two_worlds_does_not_replace_the_later_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {}, {"faults": "drain write:0:EIO"})
    for iteration in (1, 2, 3):
        nodes.save(iteration)
    restart(nodes)
    nodes.save(4)
    (file,) = nodes.near(1, 3).glob("data-00001-*")
    shutil.copy(file, nodes.directory(3))
    eventually(lambda: nodes.is_far(3))
    drain = nodes.ranks.savers[0].near.drain  # type: ignore[union-attr]
    eventually(lambda: [save.far for save in drain._queue.saves] == [nodes.directory(4)])
    abandon(nodes)


def test_nodes_agree_on_which_save_is_drained_after_one_has_joined_in_a_restart(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, drain_every=2)
    nodes.ranks.savers[1].near._published = 1  # type: ignore[union-attr]
    restart(nodes)
    nodes.save(1)
    nodes.save(2)
    eventually(lambda: nodes.is_far(2))
    nodes.close()
    assert not nodes.is_far(1)


def test_what_restarts_within_the_process_have_interrupted_leaves_the_near_tier(tmp_path: Path) -> None:
    """A manifest may name its files already, so the save itself leaves them."""
    nodes = Nodes(tmp_path)
    nodes.save(1)
    for iteration, run_id in ((10, 0xB), (20, 0xC)):
        interrupted = [
            saver.start(nodes.directory(iteration), state, far_published=nodes.ranks.note_far)
            for saver, state in zip(nodes.ranks.savers, states_of(iteration), strict=True)
        ]
        while not all(save._publishing for save in interrupted):
            for save in reversed(interrupted):
                save.poll()
        for save in interrupted:
            save.abandon("torch.distributed was initialized anew")
            assert save.poll() is Outcome.FAILED
        restart(nodes, run_id)
        nodes.save(iteration - 5)
        nodes.save(iteration - 4)
    kept = [nodes.directory(16).name]
    eventually(lambda: nodes.kept(0) == nodes.kept(1) == kept)
    nodes.close()
    nodes.check(16)


def test_the_tracker_follows_the_order_in_which_saves_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save after a restart went to --save right away; then the drain brings one from before it."""
    monkeypatch.setattr(tracker_writing, "_tracked", {})
    for iteration in (5, 10, 20):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    before, after = SaveId(1, 7), SaveId(OTHER_RUN, 1)
    for save_id, iteration, number, tracked in [
        (after, 10, 1, "10"),
        (before, 5, 0, "10"),
        (after, 20, 2, "20"),
    ]:
        tracker_writing._track(tmp_path, iteration, save_id, None, number, True)
        assert (tmp_path / TRACKER_NAME).read_text() == tracked


def test_a_recovery_without_threads_takes_longer_and_nothing_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, near_keep=2, faults="drain write:0:EIO")
    nodes.save(3)
    nodes.save(4)
    abandon(nodes)
    start = BackgroundThread.start

    def deny(thread: BackgroundThread) -> None:
        if getattr(thread._function, "__name__", "") == "_make_calls":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(BackgroundThread, "start", deny)
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 4
    nodes.check(4)


# -- damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "flipped in a section", "truncated", "missing"])
def test_a_node_with_a_damaged_index_does_not_publish(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = killed(tmp_path)
    (path,) = nodes.near(0, 3).glob("index-*")
    data = path.read_bytes()
    if how == "flipped":
        flip(path, 10)
    elif how == "flipped in a section":
        manifest = manifest_in(nodes.near(0, 3))
        assert manifest is not None
        flip(path, manifest.index.directory_bytes + 1)
    elif how == "truncated":
        path.write_bytes(data[:-10])
    else:
        path.unlink()
    iteration, said = Cluster(monkeypatch, nodes.roots).recover(nodes.run)
    assert iteration == 3, said
    nodes.check(3)
    assert (nodes.run / TRACKER_NAME).read_text() == "3"


def test_with_all_indexes_damaged_nothing_is_published(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    for node in (0, 1):
        (path,) = nodes.near(node, 3).glob("index-*")
        flip(path, 10)
    assert recover(nodes)[0] is None
    assert not nodes.is_far(3) and not (nodes.run / TRACKER_NAME).exists()


def test_what_is_checked_is_not_what_a_near_tier_has_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = killed(tmp_path)
    recover(nodes)
    (path,) = nodes.directory(3).glob("data-00000-*")
    flip(path, 100_000)
    monkeypatch.setenv("MEGATRON_DATASTATES_NEAR", str(nodes.roots[0]))
    assert any(path.name in fault for fault in verify(nodes.directory(3)).faults)
    (nodes.directory(3) / MANIFEST_NAME).unlink()
    with pytest.raises(RepairRefusedError, match="it has faults"):
        repair(nodes.directory(3))


# -- links --------------------------------------------------------------------------------------------------


def test_a_link_inside_a_mount_that_is_away_leads_to_the_same_near_folder(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, faults="drain write:0:EIO")
    mount, away = tmp_path / "mnt", tmp_path / "away"
    (mount / "fs2" / "alice" / "run").mkdir(parents=True)
    (mount / "home").mkdir()
    (mount / "home" / "alice").symlink_to("../fs2/alice")
    nodes.run = mount / "home" / "alice" / "run"
    folder = near_run(nodes.roots[0], nodes.run)
    nodes.save(1)
    mount.rename(away)
    plain = tmp_path / "plain"
    plain.touch()
    eventually(lambda: _takes_the_place_of(plain, mount))  # nothing below it can be looked at
    assert nodes.save(2).outcome is Outcome.PUBLISHED
    abandon(nodes)
    assert [path.name for path in nodes.roots[0].glob("*-*")] == [folder.name]
    assert published_in(folder / "iter_0000002") is not None


def _takes_the_place_of(file: Path, directory: Path) -> bool:
    """Returns whether a file could be renamed to where a drain may have made a directory meanwhile."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        file.replace(directory)
    return not file.exists()


# -- what is removed ----------------------------------------------------------------------------------------


def test_left_overs_are_removed_by_save_and_not_what_has_come_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier job has left 5 and 6; while 5 is removed, which takes long, this one saves 6 itself."""
    earlier = Nodes(tmp_path, near_keep=2, faults="drain write:0:EIO")
    earlier.save(5)
    earlier.save(6)
    abandon(earlier)
    nodes = Nodes(tmp_path)
    restart(nodes)
    begun, may_go_on = threading.Event(), threading.Event()
    listdir = removal.os.listdir

    def slow(path: Path) -> list[str]:
        if Path(path) == nodes.near(0, 5):
            begun.set()
            assert may_go_on.wait(PATIENCE_SECONDS)
        return listdir(path)

    nodes.save(4)
    monkeypatch.setattr(removal.os, "listdir", slow)
    if not begun.wait(PATIENCE_SECONDS):
        pytest.fail("left-overs were not looked at")
    saved = nodes.save(6)
    may_go_on.set()
    eventually(lambda: nodes.is_far(6))
    nodes.close()
    assert saved.outcome is Outcome.PUBLISHED
    nodes.check(6)
    assert nodes.kept(0) == ["iter_0000006"]
    assert published_in(nodes.near(0, 6)) == saved.save.context.save_id


def test_a_save_goes_with_files_of_earlier_ones_that_it_has_linked(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, faults="drain write:0:EIO")
    saved = nodes.save(3).save.context.save_id
    abandon(nodes)
    folder = nodes.near(0, 3)
    manifest = manifest_in(folder)
    assert manifest is not None
    other = SaveId(saved.run_id, saved.ordinal + 1)
    (folder / other.data_file_name(0)).write_bytes(b"of a save that has begun")
    remove_saves(folder, {saved})
    assert sorted(path.name for path in folder.glob("data-*")) == [other.data_file_name(0)]
    remove_saves(folder, {other})
    assert not folder.exists()


def test_a_save_of_the_same_iteration_keeps_the_files_that_it_has_linked(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, link_from=MIB, drain_every=2)
    for number in (0, 1):
        states = [
            Shards(rank, adapter_of(number), torch.arange(2.0 * MIB).reshape(-1, 1024)) for rank in (0, 1)
        ]
        assert nodes.ranks.save(nodes.directory(5), states).outcome is Outcome.PUBLISHED
    eventually(lambda: nodes.is_far(5))
    nodes.close()
    for folder in (nodes.directory(5), nodes.near(0, 5)):
        manifest = manifest_in(folder)
        assert manifest is not None
        assert [f.name for f in manifest.files if f.rank == 0 and not (folder / f.name).exists()] == []
    assert verify(nodes.directory(5)).faults == []


def test_a_folder_with_a_damaged_manifest_and_another_directory_goes(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    folder = nodes.near(0, 3)
    save_id = published_in(folder)
    assert save_id is not None
    flip(folder / MANIFEST_NAME, 40)
    remove_saves(folder, {save_id})
    assert not folder.exists()
    nodes.near(1, 3).joinpath("own").mkdir()
    remove_saves(nodes.near(1, 3), {save_id})
    assert [path.name for path in nodes.near(1, 3).iterdir()] == ["own"]


def test_a_file_that_vanishes_in_save_keeps_no_later_checkpoint_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (3600.0,))  # node 1 tries again when it has another save
    nodes = Nodes(tmp_path, {}, {"faults": "drain write:1:EIO"})
    nodes.save(1)
    (file,) = nodes.near(0, 1).glob("data-00000-*")
    first, other = (saver.near.drain for saver in nodes.ranks.savers)  # type: ignore[union-attr]
    eventually(lambda: any(file.name in save.arrived for save in first._queue.saves))  # rank 0 has seen it
    eventually(lambda: [save.attempts for save in other._to_copy] == [1])  # nobody writes there any more
    shutil.rmtree(nodes.directory(1))
    nodes.save(2)
    eventually(lambda: nodes.is_far(2) and not first._queue.saves)  # the first one can never be whole
    nodes.close()
    nodes.check(2)
    assert "files are missing there, and iter_0000002 is complete" in caplog.text


@pytest.mark.parametrize("faults", ["", "drain write:0:EIO"], ids=["", "--save fails"])
def test_a_save_that_has_copies_stays_until_a_later_one_is_as_safe(
    faults: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, near_replicas=1, drain_every=10, faults=faults)
    nodes.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(replicas, "download", _unreachable)
        assert nodes.save(2).ranks_without_copies == 2
    if faults:
        time.sleep(0.5)
        assert nodes.kept(0) == nodes.kept(1) == ["iter_0000001", "iter_0000002"]
        nodes.save(3)
        eventually(lambda: nodes.kept(0)[0] == nodes.kept(1)[0] == "iter_0000002")
        abandon(nodes)
        return
    eventually(lambda: nodes.is_far(2))  # though it is not the tenth
    eventually(lambda: nodes.kept(0) == ["iter_0000002"])  # other nodes look when they save again
    nodes.close()
    nodes.check(2)


def _unreachable(*arguments: object, **named: object) -> None:
    raise OSError(113, "No route to host")


def test_a_save_without_room_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "free_bytes", lambda root: 10)
        assert nodes.save(1).outcome is Outcome.PUBLISHED
    assert nodes.is_far(1) and nodes.kept(0) == nodes.kept(1) == []
    nodes.close()


def test_the_limit_of_the_drain_ends_with_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 64 << 10)  # the first one never waits
    nodes = Nodes(tmp_path, drain_limit=1000)  # 2 MB a node would take half an hour
    nodes.save(1)
    nodes.close()
    nodes.check(1)


def test_an_own_manifest_is_not_looked_at_again_and_its_checksum_is(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    path = nodes.near(0, 3) / MANIFEST_NAME
    manifest = manifest_in(nodes.near(0, 3))
    assert manifest is not None and published_in(nodes.near(0, 3)) == manifest.save_id
    assert type(manifest).decode(path.read_bytes(), "", is_own=True) == manifest
    flip(path, len(path.read_bytes()) // 2)
    assert published_in(nodes.near(0, 3)) is None
    with pytest.raises(DataStatesError, match="damaged"):
        type(manifest).decode(path.read_bytes(), "", is_own=True)


@pytest.mark.parametrize("names", [(), (COMMON_FILE,), (COMMON_FILE, METADATA_NAME)])
def test_what_megatron_made_for_a_save_that_stayed_near_is_removed(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    unused = tmp_path / "unused"
    unused.mkdir()
    for name in names:
        (unused / name).touch()
    room._remove_unused(unused)
    assert not unused.exists()


def test_what_another_job_begins_to_save_is_not_removed_with_an_unused_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / COMMON_FILE).touch()
    listed, data = os.listdir, tmp_path / SaveId(1, 1).data_file_name(0)

    def listed_before(directory: Path) -> list[str]:
        names = listed(directory)
        data.touch()
        return names

    monkeypatch.setattr(room.os, "listdir", listed_before)
    room._remove_unused(tmp_path)
    assert data.exists()
