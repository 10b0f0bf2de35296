"""The near tier in trouble: rollbacks, jobs that are not quite dead, full or failing disks, lost files."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import MIB
from megatron_datastates.engine.atomic_files import write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import StorageError, UnsupportedFormatError
from megatron_datastates.format.directory import COMMON_FILE, TRACKER_NAME
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.mcore.training import tracker_writing
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.near import copying, drain, holdings, publish_queue, publishing, tier
from megatron_datastates.pipeline.near.copying import Copier, Limit
from megatron_datastates.pipeline.near.job_notes import JobNote
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.places import manifest_in, near_folder, published_in, save_ids_in
from megatron_datastates.pipeline.near.publish_queue import PublishQueue
from megatron_datastates.pipeline.near.recovery import recover_newest
from megatron_datastates.pipeline.near.removal import remove_saves
from megatron_datastates.pipeline.near.room import Room
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing import directory_publisher, presence
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.runs.branches import origin_in
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.unit.states import OPTIONS, SMALL, State, bits, data_files, random_tensor
from tests.unit.test_near_tier import Nodes, abandon, killed, recover, states_of


def next_job(root: Path, run_id: int = 5, **changes: Any) -> Nodes:
    nodes = Nodes(root, **changes)
    for saver in nodes.ranks.savers:
        saver.session._run_id = run_id
    return nodes


# -- what earlier jobs have left near ----------------------------------------------------------------------


def test_what_earlier_jobs_left_makes_room(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    unfinished = nodes.near(0, 7)
    shutil.copytree(nodes.near(0, 3), unfinished, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    again = next_job(tmp_path)
    again.save(4)
    eventually(lambda: again.is_far(4))
    again.save(5)
    again.close()
    assert again.kept(0) == again.kept(1) == ["iter_0000005"]


def test_what_an_earlier_job_left_beside_a_save_goes_with_it(tmp_path: Path) -> None:
    """Also with the last one that goes: no other job may follow."""
    nodes = killed(tmp_path)
    for node in (0, 1):
        shutil.copytree(
            nodes.near(node, 3), nodes.near(node, 4), ignore=shutil.ignore_patterns(MANIFEST_NAME)
        )
    again = next_job(tmp_path)
    for iteration in (4, 5):
        again.save(iteration)
    again.close()
    assert again.kept(0) == again.kept(1) == ["iter_0000005"]


def test_what_an_earlier_job_left_goes_with_the_only_save_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a node that has copied its files before rank 0 publishes."""
    published, publish = threading.Event(), PublishQueue._publish

    def late(self: PublishQueue, save: NearSave) -> None:
        time.sleep(1.0)
        publish(self, save)
        published.set()

    monkeypatch.setattr(PublishQueue, "_publish", late)
    killed(tmp_path)  # with iteration 3 near
    again = next_job(tmp_path)
    again.save(4)
    again.close()
    assert published.is_set() and again.kept(0) == again.kept(1) == ["iter_0000004"]


def test_what_is_left_of_a_removal_that_was_killed_is_known_to_be_an_earlier_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stay forever, if only files without a save id were left."""
    nodes, folder, unlink = killed(tmp_path), tmp_path / "iter_0000003", Path.unlink
    saves, lengths = save_ids_in(nodes.near(0, 3)), list[int]()
    while not lengths or lengths[-1]:
        shutil.copytree(nodes.near(0, 3), folder)
        left = [len(lengths)]

        def until_killed(path: Path, missing_ok: bool = False, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            unlink(path, missing_ok)

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(Path, "unlink", until_killed)
            remove_saves(folder, saves)
        lengths.append(len(list(folder.iterdir())) if folder.exists() else 0)
        assert not lengths[-1] or save_ids_in(folder) == saves
        shutil.rmtree(folder, ignore_errors=True)
    assert len(lengths) > 4


def test_what_they_left_near_alone_stays_until_a_save_of_this_job_is_far(tmp_path: Path) -> None:
    killed(tmp_path)  # with iteration 3 near
    again = next_job(tmp_path, faults="drain write:0:EIO")
    shutil.copytree(again.near(1, 3), again.near(1, 4), ignore=shutil.ignore_patterns(MANIFEST_NAME))
    for iteration in (1, 2):
        again.save(iteration)
    time.sleep(0.5)  # in which the drains would remove it
    assert {"iter_0000001", "iter_0000002", "iter_0000003"} <= set(again.kept(0))
    assert "iter_0000003" in again.kept(1)
    assert "iter_0000004" in again.kept(1), "another node may have its manifest"
    abandon(again)


def test_a_save_that_goes_to_save_right_away_ends_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path)  # with iteration 3 near
    again = next_job(tmp_path, faults="drain write:0:EIO")
    again.save(1)
    assert "iter_0000003" in again.kept(0)
    with monkeypatch.context() as patched:
        patched.setattr(tier, "free_bytes", lambda root: 0)
        again.save(2)
    assert again.is_far(2)
    eventually(lambda: "iter_0000003" not in {*again.kept(0), *again.kept(1)})
    abandon(again)


def test_the_newest_of_them_stay_whatever_clocks_say(tmp_path: Path) -> None:
    first = Nodes(tmp_path, near_keep=3)
    for iteration in (1, 2, 3):
        first.save(iteration)
    first.close()
    for node in (0, 1):
        for n, iteration in enumerate((3, 1, 2)):
            os.utime(first.near(node, iteration) / MANIFEST_NAME, (1000 + n, 1000 + n))
    again = next_job(tmp_path, near_keep=3)
    again.save(4, origin_in(again.directory(3), 3))
    again.close()
    assert again.kept(0) == ["iter_0000002", "iter_0000003", "iter_0000004"]


# -- rollbacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_a_rolled_back_branch_is_not_brought_home(keep: int, tmp_path: Path) -> None:
    nodes = killed(tmp_path)  # with iteration 3 near
    again = next_job(tmp_path, near_keep=keep, faults="drain write:0:EIO")
    again.save(2)
    abandon(again)
    assert manifest_in(nodes.near(0, 2)) is not None
    for path in nodes.near(1, 2).glob("data-*"):
        (nodes.near(0, 2) / path.name).write_bytes(path.read_bytes())
    iteration, said = recover(nodes)
    assert iteration == 2, said


def test_a_save_of_a_run_that_was_rolled_back_is_far_before_it_counts(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.save(3)
    nodes.close()
    (nodes.run / TRACKER_NAME).write_text("3")
    again = next_job(tmp_path, faults="drain write:0:EIO")
    publication = again.save(2)
    assert publication.outcome is Outcome.PUBLISHED
    assert again.is_far(2), "else the next job would resume from iteration 3, which --save names"
    assert again.ranks.far == [publication.save.context.save_id]
    (nodes.run / TRACKER_NAME).write_text("2")  # as Megatron's loop does
    iteration, said = recover(nodes)
    assert iteration is None and "is skipped" in said, "iteration 3 is of another branch"
    assert all(record.is_near for record in again.save(4).records)
    abandon(again)


# -- two jobs --------------------------------------------------------------------------------------------


def test_a_job_that_is_not_quite_dead_removes_nothing_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_PAUSES", (60.0,))
    old = Nodes(tmp_path)
    old.save(1)
    new = next_job(tmp_path, faults="drain write:0:EIO")
    new.save(2)
    for saver in new.ranks.savers:  # which then pauses: else it may remove what the old one writes
        eventually(lambda own=saver.near.drain: own._to_copy[0].attempts)
    writing = new.near(0, 5)
    writing.mkdir()
    (begun,) = new.near(0, 2).glob("data-*")
    (writing / begun.name).write_bytes(b"half of it")
    old.save(3)
    old.close()
    assert old.is_far(3)
    assert manifest_in(new.near(0, 2)) is not None and begun.exists()
    assert list(writing.iterdir())
    abandon(new)


def test_two_jobs_write_the_same_small_file_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, save_id = tmp_path / MANIFEST_NAME, SaveId(5, 1)

    class Interrupted(Faults):
        def point(self, name: str) -> None:
            if name == "rename manifest":
                write_whole(path, b"{}", Faults(""), save_id)

    write_whole(path, b"{}", Interrupted(""), save_id)
    assert path.read_bytes() == b"{}" and list(tmp_path.iterdir()) == [path]


# -- room ------------------------------------------------------------------------------------------------


def test_room_that_other_ranks_of_the_node_have_taken_for_this_save_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = tmp_path / "near"
    nodes = Nodes(tmp_path, {"near": str(near)}, {"near": str(near)})
    states, directory = states_of(1), nodes.directory(1)
    monkeypatch.setattr(tier, "local_ranks", lambda: 2)
    monkeypatch.setattr(tier, "SPARE_BYTES", 1 << 20)

    def stored() -> int:
        return sum(path.stat().st_blocks * 512 for path in near.rglob("data-*"))

    monkeypatch.setattr(tier, "free_bytes", lambda root: (6 << 20) - stored())
    for saver in nodes.ranks.savers:
        assert saver.near is not None
        saver.near._ranks = 2
    first = nodes.ranks.savers[0].start(directory, states[0], far_published=nodes.ranks.note_far)
    eventually(lambda: stored() > 1_900_000)
    second = nodes.ranks.savers[1].start(directory, states[1], far_published=nodes.ranks.note_far)
    assert first.save.context.near is not None and second.save.context.near is not None
    for saver in nodes.ranks.savers:
        saver.close()


def test_what_saves_under_way_have_yet_to_write_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one of two saves at once would fail, as no space is reserved before a file is open."""
    nodes = Nodes(tmp_path, {"lazy_delay": 3600.0}, {})  # a save ends after its first poll
    monkeypatch.setattr(tier, "SPARE_BYTES", 1 << 20)
    monkeypatch.setattr(tier, "free_bytes", lambda root: 9 << 19)
    monkeypatch.setattr(tier, "occupied_bytes", lambda folder, save_id: 0)  # no file is open yet
    saver, state = nodes.ranks.savers[0], states_of(1)[0]  # of 2 MB

    def start(iteration: int) -> Publication:
        return saver.start(nodes.directory(iteration), state, far_published=nodes.ranks.note_far)

    first, second = start(1), start(2)
    assert first.save.context.near is not None and second.save.context.near is None
    first.abandon("the test needs it no more")
    assert start(3).save.context.near is not None
    saver.close()


def test_room_for_encoded_tensors_is_wanted_before_their_size_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "free_bytes", lambda root: 65 * MIB)  # 64 MiB are to be left
    nodes = Nodes(tmp_path, compress=1)
    assert [record.is_near for record in nodes.save(1).records] == [False, False]
    nodes.close()


def test_a_variable_that_a_node_lacks_makes_no_directory_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NODE_DISK", raising=False)
    nodes = Nodes(tmp_path, {}, {"near": "$NODE_DISK/checkpoints"})
    assert [record.is_near for record in nodes.save(1).records] == [True, False]
    assert "a variable in its name is not set" in caplog.text and not list(tmp_path.glob("$*"))
    nodes.close()
    nodes.check(1)


def test_why_a_near_tier_is_not_used_is_said_before_its_list_of_jobs_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    note_job = drain.Drain.note_job

    def noted(own: drain.Drain, note: JobNote, folders: list[Path]) -> None:
        if any(folder.is_relative_to("/proc") for folder in folders):
            said.append(caplog.text)
        note_job(own, note, folders)

    monkeypatch.setattr(drain.Drain, "note_job", noted)
    monkeypatch.setenv("LOCAL_RANK", "0")  # which writes its node's list
    nodes = Nodes(tmp_path, {"near": "/proc/nope"}, {})
    assert [record.is_near for record in nodes.save(1).records] == [False, True]
    nodes.close()
    assert said and "/proc/nope is not used" in said[0]


def test_what_failed_saves_left_makes_room(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {}, {"faults": "rename manifest:1:EIO"})
    assert nodes.save(1).outcome is Outcome.FAILED
    for iteration in (2, 3):
        nodes.save(iteration)
    nodes.close()
    nodes.check(3)
    for node in (0, 1):
        full = [path.parent.name for path in nodes.roots[node].glob("*/iter_*/data-*")]
        assert full == ["iter_0000003"]


@pytest.mark.parametrize("began", [True, False])
def test_of_a_failed_save_what_another_needs_in_its_folder_is_left(tmp_path: Path, began: bool) -> None:
    failed, later = SaveId(1, 7), SaveId(1, 8)
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    names = [failed.data_file_name(0), failed.data_file_name(3), "nodes.json", "metadata.json"]
    others = [later.data_file_name(0)] if began else []
    for name in names + others:
        (folder / name).touch()
    remove_saves(folder, {failed})
    assert folder.exists() == began
    assert not began or set(os.listdir(folder)) == {*names[2:], *others}


def test_a_failed_save_into_the_folder_of_a_published_one_takes_nothing_of_it(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {}, {"faults": "rename manifest:2:EIO"}, near_keep=2)
    nodes.save(1)
    assert nodes.save(1).outcome is Outcome.FAILED
    for iteration in (2, 3):
        nodes.save(iteration)
    eventually(lambda: nodes.is_far(3))
    nodes.close()
    for iteration in (1, 2, 3):
        nodes.check(iteration)


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "is silent"])
def test_a_manifest_near_whose_rename_was_made_and_reported_as_failed_keeps_its_files(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load may find it: without its files, it would be a lost checkpoint."""
    nodes, replace = Nodes(tmp_path, {}, {"near": ""}), os.replace  # only one node has a near tier

    def refuse(path: Path, most_bytes: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def replace_and_fail(source: Path, target: Path) -> None:
        replace(source, target)
        if target.name == MANIFEST_NAME:
            if not answers:
                monkeypatch.setattr(presence, "read_regular", refuse)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", replace_and_fail)
    failed = nodes.save(1)
    assert failed.outcome is Outcome.FAILED and "its files were kept" in str(failed.error)
    manifest = manifest_in(nodes.near(0, 1))
    assert manifest is not None
    there = [*data_files(nodes.near(0, 1)), *data_files(nodes.directory(1))]
    assert [file.name for file in manifest.files] == [path.name for path in there]
    abandon(nodes)


# -- the drain -------------------------------------------------------------------------------------------


def test_each_nth_is_counted_among_the_saves_of_the_near_tier(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, drain_every=2)
    for iteration in (1, 2, 3, 4):
        for saver in nodes.ranks.savers:
            saver.session.agree(saver.options)
            saver.session.next_id()  # of a save that no near tier sees, such as a non-persistent one
        nodes.save(iteration)
    eventually(lambda: nodes.is_far(4))
    assert [iteration for iteration in (1, 2, 3, 4) if nodes.is_far(iteration)] == [2, 4]
    nodes.close()


def test_a_save_of_which_a_part_is_in_save_already_is_not_left_near(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {}, {"near": ""}, drain_every=2)
    nodes.save(1)
    eventually(lambda: nodes.is_far(1))
    nodes.close()
    nodes.check(1)


def test_a_file_that_cannot_be_read_does_not_keep_later_saves_from_save(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {"faults": "drain write:1:EIO"}, {})
    nodes.save(1)
    (path,) = nodes.near(0, 1).glob("data-*")
    path.unlink()
    path.mkdir()  # any error but a missing file
    nodes.save(2)
    eventually(lambda: nodes.is_far(2))
    nodes.close()
    nodes.check(2)
    assert not nodes.is_far(1)


def test_a_tracker_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)

    class FailsOnce(list[SaveId]):
        failed = False

        def append(self, value: SaveId) -> None:
            if not self.failed:
                self.failed = True
                raise OSError(28, "No space left on device")
            super().append(value)

    nodes.ranks.far = FailsOnce()
    publication = nodes.save(1)
    nodes.close()
    assert nodes.ranks.far == [publication.save.context.save_id]


def test_what_arrives_while_rank_0_looks_is_published_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1's files of both saves arrive after one of them was found missing, and before the other look."""
    nodes, may_copy = Nodes(tmp_path), threading.Event()
    copy, look = Copier.copy, publish_queue.missing_data_files
    first_drain = nodes.ranks.savers[0].near.drain  # type: ignore[union-attr]

    def copy_later(self: Copier, source: Path, target: Path, *more: Any) -> None:
        assert not source.name.startswith("data-00001-") or may_copy.wait(PATIENCE_SECONDS)
        copy(self, source, target, *more)

    def arrive_meanwhile(directory: Path, manifest: Manifest, *more: Any) -> list[str]:
        missing = look(directory, manifest, *more)
        if len(first_drain._queue.saves) == 2 and not may_copy.is_set():
            may_copy.set()
            eventually(lambda: all(len(data_files(nodes.directory(number))) == 2 for number in (1, 2)))
        return missing

    monkeypatch.setattr(Copier, "copy", copy_later)
    monkeypatch.setattr(publish_queue, "missing_data_files", arrive_meanwhile)
    saves = [nodes.save(number).save.context.save_id for number in (1, 2)]
    nodes.close()
    assert may_copy.is_set() and nodes.ranks.far == saves


# -- lost files ------------------------------------------------------------------------------------------


def test_a_save_whose_near_files_were_removed_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path)
    store = publishing.NearPublishing._store

    def store_after_a_clean_up(self: publishing.NearPublishing, *parts: Any) -> None:
        for path in list(nodes.near(1, 1).glob("data-*")):
            path.unlink()
        store(self, *parts)

    monkeypatch.setattr(publishing.NearPublishing, "_store", store_after_a_clean_up)
    failed = nodes.save(1)
    assert failed.outcome is Outcome.FAILED and "data-00001-" in (failed.error or "")
    abandon(nodes)


def test_a_file_of_megatrons_that_is_gone_from_save_becomes_far_with_the_rest(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, drain_every=2)
    common = nodes.directory(1) / COMMON_FILE
    common.parent.mkdir(parents=True)
    torch.save({"iteration": 1}, common)
    content = common.read_bytes()
    extras = PublicationExtras(other_files=(COMMON_FILE,))
    saves = _begun(nodes, 1, extras)
    eventually(lambda: [save.poll() for save in reversed(saves)] == [Outcome.PUBLISHED] * 2)
    common.unlink()
    nodes.close()
    nodes.check(1)
    assert common.read_bytes() == content


def test_megatron_writes_no_tracker_where_it_could_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    near = tmp_path / "near"
    arguments = SimpleNamespace(save=str(tmp_path / "far"))
    monkeypatch.setattr(checkpointing, "get_args", lambda: arguments)
    monkeypatch.setattr(tracker_writing, "_is_near", False)  # retention reads it: put back when the test ends
    for iteration in (1, 2):
        with tracker_writing.saving(dataclasses.replace(OPTIONS, near=str(near))):
            tracker = Path(checkpointing.get_checkpoint_tracker_filename(arguments.save))
        near.mkdir(exist_ok=True)
        near.rename(tmp_path / f"gone{iteration}")  # before the save is over
        assert int(tracker.read_text()) == 0, "Megatron's retention has nothing to delete"
        tracker.write_text(str(iteration))


# -- loads -----------------------------------------------------------------------------------------------


def test_a_tracker_that_cannot_be_read_is_not_written_over(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    ds.save({"w": torch.ones(3)}, nodes.directory(9), **SMALL)
    tracker = nodes.run / TRACKER_NAME
    tracker.write_text("")  # a kill in the middle of writing it
    assert recover(nodes) == (None, ""), "a load falls back to iteration 9"
    tracker.unlink()
    tracker.mkdir()  # any error but a missing file
    with pytest.raises(StorageError, match=r"the tracker .* cannot be read"):
        recover(nodes)
    assert not nodes.is_far(3)


def test_what_cannot_be_written_now_does_not_cost_a_checkpoint(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    options = dataclasses.replace(OPTIONS, near=str(nodes.roots[0]), faults="drain write:1:ENOSPC")
    with pytest.raises(StorageError, match="No space left on device"):
        recover_newest(nodes.run, options)
    assert recover(nodes)[0] == 3


def test_a_folder_of_a_later_release_or_without_permission_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = killed(tmp_path)
    for name in ("iter_0000007", "iter_0000008"):
        shutil.copytree(nodes.near(0, 3), nodes.near(0, 3).with_name(name))
    later = nodes.near(0, 7) / MANIFEST_NAME
    decode, listdir = Manifest.decode, os.listdir

    def decode_as_earlier_release(data: bytes, where: str) -> Manifest:
        if where.endswith("iter_0000007"):
            raise UnsupportedFormatError("a later release wrote it")
        return decode(data, where)

    def refuse(path: Path) -> list[str]:
        if Path(path).name == "iter_0000008":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    (nodes.near(0, 8) / MANIFEST_NAME).unlink()
    monkeypatch.setattr(Manifest, "decode", decode_as_earlier_release)
    monkeypatch.setattr(os, "listdir", refuse)
    assert recover(nodes)[0] == 3
    assert later.exists()


def test_what_cannot_be_read_near_is_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = killed(tmp_path)
    manifest = nodes.near(0, 3) / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert recover(nodes) == (None, "")
    assert f"{manifest.parent} in the near tier is left out: its manifest cannot be read" in caplog.text
    caplog.clear()
    run = manifest.parent.parent
    shutil.rmtree(run)
    assert recover(nodes) == (None, "") and not caplog.text, "a new node has nothing"
    run.write_bytes(b"no directory")
    assert recover(nodes) == (None, "")
    assert f"{run} in the near tier is left out: " in caplog.text


def test_a_save_is_published_near_while_the_drain_hangs_in_save(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    publishing = nodes.ranks.savers[0].session.layouts.publishing
    with publishing, ThreadPoolExecutor(1) as thread:  # as while a manifest is written there
        save = thread.submit(nodes.save, 1)
        try:
            assert save.result(PATIENCE_SECONDS).outcome is Outcome.PUBLISHED
        finally:
            publishing.release()
            save.result()
            publishing.acquire()
    nodes.close()
    nodes.check(1)


def test_rank_0_waits_at_the_end_while_a_large_file_of_another_node_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the drains' clock, the file takes longer than rank 0 waits without any progress."""
    clock = SimpleNamespace(now=0.0, sleep=time.sleep)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(drain, "time", clock)
    monkeypatch.setattr(drain, "_STALLED_SECONDS", 2.5)
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(copying, "PIECE_BYTES", MIB)
    nodes = Nodes(tmp_path)
    first, other = (saver.near.drain for saver in nodes.ranks.savers)  # type: ignore[union-attr]

    def take_a_second(self: Limit, count: int) -> None:
        if self is other._limit:
            eventually(lambda: first._closing and first._progress == clock.now)  # it has seen the last piece
            clock.now += 1.0

    monkeypatch.setattr(Limit, "take", take_a_second)
    states = states_of(1)
    states[1] = State({"w1": torch.zeros(5 * MIB, dtype=torch.uint8)})
    nodes.ranks.save(nodes.directory(1), states)
    nodes.close()
    assert nodes.is_far(1) and "in the near tiers only" not in caplog.text
    assert clock.now == 6.0


def test_a_save_is_published_far_while_the_next_one_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node is late with the first save, and the copy of the second one takes long."""
    nodes, has_begun, may_end, copy = Nodes(tmp_path), threading.Event(), threading.Event(), Copier.copy

    def copy_in_turn(self: Copier, source: Path, target: Path, *more: Any) -> None:
        if target.parent == nodes.directory(2) and source.name.startswith("data-00000-"):
            has_begun.set()
            assert may_end.wait(PATIENCE_SECONDS)
        elif target.parent == nodes.directory(1) and source.name.startswith("data-00001-"):
            assert has_begun.wait(PATIENCE_SECONDS)
        copy(self, source, target, *more)

    monkeypatch.setattr(Copier, "copy", copy_in_turn)
    for iteration in (1, 2):
        nodes.save(iteration)
    eventually(lambda: nodes.is_far(1))
    assert not list(nodes.directory(2).glob("data-00000-*.bin"))
    may_end.set()
    nodes.close()
    for iteration in (1, 2):
        nodes.check(iteration)


def test_a_node_makes_room_once_rank_0_has_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_ROOM_SECONDS", 0.05)
    nodes, may_publish, publish = Nodes(tmp_path), threading.Event(), PublishQueue._publish

    def late(self: PublishQueue, save: NearSave) -> None:
        may_publish.wait()
        publish(self, save)

    monkeypatch.setattr(PublishQueue, "_publish", late)
    for iteration in (1, 2):
        nodes.save(iteration)
    other = nodes.ranks.savers[1].near.drain  # type: ignore[union-attr]
    eventually(lambda: not other._to_copy and not other._may_evict)
    assert nodes.kept(1) == ["iter_0000001", "iter_0000002"]
    may_publish.set()
    eventually(lambda: nodes.kept(0) == nodes.kept(1) == ["iter_0000002"])
    nodes.close()


def test_an_unexpected_error_beside_a_copy_does_not_begin_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.05)
    nodes, make, copy = Nodes(tmp_path), Room.make, drain.Drain._copy_file
    first = nodes.ranks.savers[0].near.drain  # type: ignore[union-attr]
    copied, has_raised = list[str](), threading.Event()

    def slow(self: drain.Drain, save: NearSave, file: FileEntry) -> None:
        if self is first:
            copied.append(file.name)
            self._may_evict = True
            has_raised.wait(PATIENCE_SECONDS)
        copy(self, save, file)

    def raises_once(self: Room, *arguments: Any) -> list[NearSave]:
        if self is first._room and copied and not has_raised.is_set():
            has_raised.set()
            raise ValueError("unexpected")
        return make(self, *arguments)

    monkeypatch.setattr(drain.Drain, "_copy_file", slow)
    monkeypatch.setattr(Room, "make", raises_once)
    nodes.save(1)
    nodes.close()
    nodes.check(1)
    assert len(copied) == 1 and "unexpected error in the drain" in caplog.text


def test_a_node_without_the_manifest_brings_files_of_earlier_saves(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    names = [SaveId(5, 7).data_file_name(1), SaveId(5, 3).data_file_name(1, 1)]
    for name in names:
        (folder / name).write_bytes(b"")
    held = {one.save_id: one.files for one in holdings.held_in(folder)}
    assert held[SaveId(5, 7)] == frozenset(names)


@pytest.mark.parametrize("compress", [0, 3])
def test_whatever_is_damaged_near_is_read_in_save(compress: int, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "iter_0000001"
    data = bytes(range(256)) * 8192
    state = {"w": random_tensor(torch.float32, (500_000,), 1), "o": {"data": data}}
    ds.save(state, directory, **SMALL, **({"compress": compress} if compress else {}))
    near = near_folder(tmp_path / "near", directory)
    shutil.copytree(directory, near)
    (path,) = data_files(near)
    damaged = bytearray(path.read_bytes())
    for at in range(5000, len(damaged) - 6000, 100_000):
        damaged[at] ^= 1
    path.write_bytes(damaged)
    options = dataclasses.replace(OPTIONS, near=str(tmp_path / "near"))
    assert Checkpoint.open(directory, options).read_object("o.data") == data
    assert bits(Checkpoint.open(directory, options).read_tensor("w")) == bits(state["w"])
    assert ds.load(directory, near=str(tmp_path / "near"))["o.data"] == data


# -- saves that overlap ----------------------------------------------------------------------------------


def test_a_save_is_not_over_before_an_earlier_one_that_a_node_is_still_storing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What drains keep, and remove, goes by the order in which saves have ended."""
    goes_on, store, free_bytes = threading.Event(), publishing.NearPublishing._store, tier.free_bytes
    nodes = Nodes(tmp_path)

    def slow(self: publishing.NearPublishing, *parts: Any) -> None:
        if self._context.rank == 1:
            goes_on.wait(PATIENCE_SECONDS)
        store(self, *parts)

    monkeypatch.setattr(publishing.NearPublishing, "_store", slow)
    saves = [_begun(nodes, 1)]
    monkeypatch.setattr(tier, "free_bytes", lambda root: 0 if root == nodes.roots[1] else free_bytes(root))
    saves.append(_begun(nodes, 2))  # node 1, whose tier is full, writes to --save

    def poll() -> bool:
        for save in reversed(saves[1]):
            save.poll()
        return False

    eventually(lambda: poll() or all(save.publisher.is_done for save in saves[1]))
    for _ in range(5):
        poll()
        assert saves[0][0].outcome is saves[1][0].outcome is Outcome.PENDING
    goes_on.set()
    eventually(lambda: poll() or saves[1][0].is_over)
    nodes.close()
    for iteration in (1, 2):
        nodes.check(iteration)


def test_a_drain_and_a_save_into_the_same_directory_publish_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one removes what the earlier one names: not between that one's look and its rename."""
    has_looked, is_over, look = threading.Event(), threading.Event(), directory_publisher.require_files

    def dawdling(directory: Path, manifest: Manifest) -> None:
        look(directory, manifest)
        if manifest.ordinal == 1:
            has_looked.set()
            is_over.wait(1.0)

    monkeypatch.setattr(directory_publisher, "require_files", dawdling)
    nodes = Nodes(tmp_path)
    assert nodes.save(1).publisher.near is not None
    eventually(has_looked.is_set)
    monkeypatch.setattr(tier, "free_bytes", lambda root: 0)
    later = nodes.save(1)
    is_over.set()
    assert later.outcome is Outcome.PUBLISHED and later.publisher.near is None
    nodes.close()
    nodes.check(1)
    assert published_in(nodes.directory(1)) == later.save.context.save_id


def _begun(nodes: Nodes, iteration: int, extras: PublicationExtras | None = None) -> list[Publication]:
    return [
        saver.start(nodes.directory(iteration), state, extras=extras, far_published=nodes.ranks.note_far)
        for saver, state in zip(nodes.ranks.savers, states_of(iteration), strict=True)
    ]
