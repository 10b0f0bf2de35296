"""What rank 0 looks at before it publishes, and two runs that save into one directory."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.convert.weights_only import drop_optimizer, plan_drop
from megatron_datastates.engine import atomic_files
from megatron_datastates.engine.faults import Faults
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.errors import SaveFailedError, StorageError
from megatron_datastates.format.directory import METADATA_NAME
from megatron_datastates.format.manifest import Ancestor, Manifest
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading import load as load_module
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing import directory_publisher, lateness, presence
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.publishing.indexes import IndexExchange
from megatron_datastates.pipeline.runs.branches import Origin
from megatron_datastates.pipeline.runs.runs import metadata_members
from megatron_datastates.pipeline.upkeep import remove as remove_module
from megatron_datastates.pipeline.upkeep.remove import remove_keys
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers import StreamSource
from megatron_datastates.providers.base import Mutability
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import State, new_saver, save


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(presence, "VISIBLE_SECONDS", 0.05)


def tensors(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000,), float(number)), "b": torch.full((7, 9), number)}


def assert_holds(directory: Path, number: int) -> None:
    checkpoint = ds.open(directory)
    for key, tensor in tensors(number).items():
        assert torch.equal(checkpoint.read_tensor(key), tensor)


@pytest.mark.parametrize(
    ("limit", "what"), [("MANIFEST_BYTES", "the manifest"), ("INDEX_BYTES", "the index")]
)
def test_nothing_is_published_that_no_load_would_read(monkeypatch, tmp_path: Path, limit: str, what: str):
    at = tmp_path / "ck"
    ds.save(tensors(1), at)
    monkeypatch.setattr(directory_publisher, limit, 99)
    with pytest.raises(SaveFailedError, match=f"{what} of this checkpoint has .* no load reads more than 99"):
        ds.save(tensors(2), at)
    assert_holds(at, 1)
    assert len(data_files(at)) == 1, "what was not published is removed"


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("data-*"))


def meanwhile(monkeypatch, change) -> None:
    """Calls a function when all ranks are durable, right before rank 0 looks."""
    look = directory_publisher.require_files

    def late(directory, manifest):
        change(directory)
        look(directory, manifest)

    monkeypatch.setattr(directory_publisher, "require_files", late)


def remove_a_file(directory: Path) -> None:
    data_files(directory)[-1].unlink()


def cut_a_file(directory: Path) -> None:
    os.truncate(data_files(directory)[-1], 4096)


def put_a_link(directory: Path) -> None:
    path = data_files(directory)[-1]
    path.rename(directory / "elsewhere")
    path.symlink_to("elsewhere")


def put_a_directory(directory: Path) -> None:
    path = data_files(directory)[-1]
    path.unlink()
    path.mkdir()


def remove_the_index(directory: Path) -> None:
    next(directory.glob("index-*")).unlink()


def remove_the_directory(directory: Path) -> None:
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    "change",
    [remove_a_file, cut_a_file, put_a_link, put_a_directory, remove_the_index, remove_the_directory],
)
def test_what_is_gone_when_all_are_durable_is_not_published(tmp_path, monkeypatch, change):
    directory = tmp_path / "iter_0000001"
    meanwhile(monkeypatch, change)
    saver = new_saver()
    publication = save(saver, directory, tensors(1))
    saver.close()
    assert publication.outcome is Outcome.FAILED
    assert "were not found in" in str(publication.error)
    assert not (directory / MANIFEST_NAME).exists()


def test_a_panic_while_indexes_are_stored_fails_the_save(saver, tmp_path, monkeypatch):
    """Clients in Rust panic with a BaseException; polls would wait for a thread that has ended."""

    def panics(*args):
        raise BaseException("a panic")

    with monkeypatch.context() as patch:
        patch.setattr(IndexExchange, "store", panics)
        publication = save(saver, tmp_path, tensors(1))
    assert publication.outcome is Outcome.FAILED and "a panic" in str(publication.error)
    assert save(saver, tmp_path, tensors(2)).outcome is Outcome.PUBLISHED
    assert_holds(tmp_path, 2)


def test_a_directory_that_is_gone_is_not_made_anew(tmp_path):
    directory, saver = tmp_path / "iter_0000001", new_saver()
    publication = saver.start(directory, State(tensors(1)))
    while not publication.save.is_durable:
        publication.save.advance()
    shutil.rmtree(directory)
    assert publication.wait() is Outcome.FAILED
    saver.close()
    assert "is gone" in str(publication.error) and not directory.exists()


def test_an_earlier_checkpoint_survives_a_save_that_lost_its_files(tmp_path, monkeypatch):
    saver = new_saver()
    save(saver, tmp_path, tensors(1))
    with monkeypatch.context() as patch:
        meanwhile(patch, remove_a_file)
        assert save(saver, tmp_path, tensors(2)).outcome is Outcome.FAILED
    assert_holds(tmp_path, 1)
    assert save(saver, tmp_path, tensors(3)).outcome is Outcome.PUBLISHED
    saver.close()
    assert_holds(tmp_path, 3)
    assert len(data_files(tmp_path)) == 1


@pytest.mark.parametrize("function", ["_file_sizes", "read_regular"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_errors_of_a_network_file_system_may_pass(saver, tmp_path, monkeypatch, function, code):
    monkeypatch.setattr(presence, "VISIBLE_SECONDS", 10.0)
    works, calls = getattr(presence, function), itertools.count()

    def fails_twice(*args):
        if next(calls) < 2:
            raise OSError(code, os.strerror(code), str(args[0]))
        return works(*args)

    monkeypatch.setattr(presence, function, fails_twice)
    monkeypatch.setattr(presence, "files_in_manifest", lambda path: set())
    assert save(saver, tmp_path / "c", tensors(1)).outcome is Outcome.PUBLISHED
    assert next(calls) > 2
    assert_holds(tmp_path / "c", 1)


def test_while_the_new_manifest_cannot_be_read_nothing_is_removed(tmp_path, monkeypatch, caplog):
    """It may be another job's by now, which shares files with the one that was replaced."""
    saver, works = new_saver(), directory_publisher.files_in_manifest
    save(saver, tmp_path, tensors(1))
    calls = itertools.count()  # the second is the one after the rename

    def fails_after_the_rename(path, *args):
        if next(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return works(path, *args)

    monkeypatch.setattr(directory_publisher, "files_in_manifest", fails_after_the_rename)
    assert save(saver, tmp_path, tensors(2)).outcome is Outcome.PUBLISHED
    saver.close()
    assert len(data_files(tmp_path)) == 2 and "files of earlier saves were not removed" in caplog.text
    assert_holds(tmp_path, 2)


def test_files_that_appear_late_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(presence, "VISIBLE_SECONDS", 10.0)
    missing, looks = presence.missing_files, itertools.count()
    monkeypatch.setattr(
        presence, "missing_files", lambda *args: ["data"] if next(looks) < 2 else missing(*args)
    )
    saver = new_saver()
    assert save(saver, tmp_path, tensors(1)).outcome is Outcome.PUBLISHED
    saver.close()


@pytest.mark.parametrize("trouble", ["an error", "a file that appears late"])
def test_a_look_at_many_files_may_take_longer_than_the_wait_for_them(saver, tmp_path, monkeypatch, trouble):
    """Of 16,384 files in a network file system, say: what goes wrong in the first look may still pass."""
    works, looks = presence._file_sizes, itertools.count()

    def slow(directory, wanted):
        number = next(looks)
        if number == 0:
            time.sleep(0.1)
            if trouble == "an error":
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(directory))
            return {}
        return works(directory, wanted)

    monkeypatch.setattr(presence, "_file_sizes", slow)
    opened = presence._sizes_when_opened
    monkeypatch.setattr(
        presence, "_sizes_when_opened", lambda *args: {} if next(looks) == 1 else opened(*args)
    )
    assert save(saver, tmp_path / "c", tensors(1)).outcome is Outcome.PUBLISHED
    assert_holds(tmp_path / "c", 1)


@pytest.mark.parametrize("age", ["before the file", "before its data"])
def test_a_listing_of_nfs_that_is_old_does_not_fail_a_save(tmp_path, monkeypatch, age):
    def old_listing(directory, wanted):
        return {} if age == "before the file" else dict.fromkeys(wanted, 0)

    monkeypatch.setattr(presence, "_file_sizes", old_listing)
    saver = new_saver()
    assert save(saver, tmp_path, tensors(1)).outcome is Outcome.PUBLISHED
    saver.close()
    assert_holds(tmp_path, 1)


def test_metadata_json_is_written_whole_with_the_manifest(tmp_path):
    content = b'{"sharded_backend": "datastates"}'
    saver = new_saver()
    for _ in range(2):
        saver.start(tmp_path, State(tensors(1)), extras=PublicationExtras(metadata=content)).wait()
        assert (tmp_path / METADATA_NAME).read_bytes() == content
    saver.close()


def test_files_of_others_are_durable_before_the_manifest_names_them(tmp_path, monkeypatch):
    """Megatron writes its common state beside our files, and syncs nothing."""
    synced: list[str] = []
    sync, other = os.fsync, tmp_path / "other.pt"

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        assert not (tmp_path / MANIFEST_NAME).exists() or other.name in synced
        sync(descriptor)

    other.write_bytes(b"what another program has written")
    monkeypatch.setattr(os, "fsync", fsync)
    saver = new_saver()
    extras = PublicationExtras(other_files=(other.name,))
    assert saver.start(tmp_path, State(tensors(1)), extras=extras).wait() is Outcome.PUBLISHED
    saver.close()
    assert other.name in synced


def test_names_above_the_directory_are_made_durable(tmp_path, monkeypatch):
    """Megatron makes the directory of an iteration, and syncs nothing."""
    synced: list[Path] = []
    sync = presence.sync_directory
    monkeypatch.setattr(presence, "sync_directory", lambda path: (synced.append(path), sync(path)))
    directory = tmp_path / "run" / "iter_0000001"
    directory.mkdir(parents=True)
    saver = new_saver()
    save(saver, directory, tensors(1))
    saver.close()
    assert synced == [directory.parent, tmp_path]


# -- two runs -----------------------------------------------------------------------------------------------


class TwoRuns:
    """Two jobs, each with a run id of its own, that save into one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.savers = [new_saver(), new_saver()]

    def start(self, run: int, number: int, resumed: Publication | None = None) -> Publication:
        """Starts a save of a run that goes on, perhaps, from a save of the other one."""
        origin = None if resumed is None else Origin(1, (Ancestor(1, str(resumed.save.context.save_id)),))
        extras = PublicationExtras(origin=origin)
        return self.savers[run].start(self.directory, State(tensors(number)), extras=extras)

    def close(self) -> None:
        FENCE.forget()
        for saver in self.savers:
            saver.close()


@pytest.fixture
def runs(tmp_path):
    made = TwoRuns(tmp_path / "iter_0000001")
    yield made
    made.close()


def test_savers_of_two_runs_have_different_run_ids(runs):
    ids = {runs.start(run, 1).save.context.save_id.run_id for run in (0, 1)}
    assert len(ids) == 2


@pytest.mark.parametrize("is_requeued", [False, True])
def test_a_save_leaves_what_another_run_has_not_published_yet(runs, is_requeued):
    """Also if it resumes from that run, which may not have ended: requeued jobs overlap."""
    slow = runs.start(0, 1)
    while not slow.save.is_durable:
        slow.save.advance()
    assert runs.start(1, 2, slow if is_requeued else None).wait() is Outcome.PUBLISHED
    assert_holds(runs.directory, 2)
    assert slow.wait() is Outcome.PUBLISHED
    assert_holds(runs.directory, 1)
    assert len(data_files(runs.directory)) == 1, "what was replaced is removed"


def test_a_requeued_job_does_not_remove_what_its_predecessor_is_about_to_name(runs, monkeypatch):
    """Between the look at all files and the rename of the manifest, nobody looks."""
    sync, has_looked, is_published = directory_publisher.sync_above, threading.Event(), threading.Event()

    def after_the_other(directory: Path) -> None:
        if not has_looked.is_set():
            has_looked.set()
            assert is_published.wait(30.0)
        sync(directory)

    monkeypatch.setattr(directory_publisher, "sync_above", after_the_other)
    slow = runs.start(0, 1)
    while not has_looked.is_set():
        assert slow.poll() is Outcome.PENDING
    assert runs.start(1, 2, slow).wait() is Outcome.PUBLISHED
    is_published.set()
    assert slow.wait() is Outcome.PUBLISHED, slow.error
    assert_holds(runs.directory, 1)


@pytest.mark.parametrize("after", ["the look at the manifest", "the look at ages"])
def test_what_a_stalled_job_publishes_while_another_removes_what_was_left_stays(runs, monkeypatch, after):
    """Both waited for storage that hung for an hour, and go on at one time."""
    assert runs.start(0, 1).wait() is Outcome.PUBLISHED
    about_to_rename = runs.directory / ".datastates-manifest.tmp"
    (runs.directory / MANIFEST_NAME).rename(about_to_rename)
    for path in runs.directory.iterdir():
        os.utime(path, (0, 0))
    looks = {
        "the look at the manifest": (directory_publisher, "files_in_manifest"),
        "the look at ages": (atomic_files, "_runs_under_way"),
    }
    look = getattr(*looks[after])

    def meanwhile(*arguments: object) -> set[int]:
        found = look(*arguments)
        assert not found
        if len(arguments) > 1:  # not the look at what is replaced
            about_to_rename.touch()
            about_to_rename.rename(runs.directory / MANIFEST_NAME)
        return found

    monkeypatch.setattr(*looks[after], meanwhile)
    assert runs.start(1, 2).wait() is Outcome.PUBLISHED
    assert_holds(runs.directory, 1)
    assert verify(runs.directory).good


@pytest.mark.parametrize("order", ["aabb", "abab", "abba", "baab", "baba", "bbaa"])
def test_two_runs_that_save_in_turns_leave_a_whole_checkpoint(runs, order):
    """Whatever was published last is what loads."""
    number, last = 0, None
    open_saves: dict[str, tuple[Publication, int]] = {}
    for name in order * 3:
        if name in open_saves:
            publication, started = open_saves.pop(name)
            assert publication.wait() is Outcome.PUBLISHED, publication.error
            last = started
            assert_holds(runs.directory, started)
        else:
            number += 1
            open_saves[name] = (runs.start("ab".index(name), number), number)
    if last is not None:
        assert Manifest.decode((runs.directory / MANIFEST_NAME).read_bytes(), "manifest")


# -- readers beside writers ---------------------------------------------------------------------------------


def test_a_reader_that_meets_a_save_into_the_directory_opens_the_new_manifest(tmp_path, monkeypatch):
    saver = new_saver()
    save(saver, tmp_path, tensors(1))
    open_index = load_module.open_index

    def late(path, *args):
        monkeypatch.setattr(load_module, "open_index", open_index)
        save(saver, tmp_path, {"other": torch.ones(3)})
        return open_index(path, *args)

    monkeypatch.setattr(load_module, "open_index", late)
    assert list(Checkpoint.open(tmp_path, reuse=False).index.tensors) == ["other"]
    saver.close()


def test_a_checkpoint_that_is_replaced_while_it_is_read_says_so(tmp_path):
    saver = new_saver()
    save(saver, tmp_path, tensors(1))
    checkpoint = ds.open(tmp_path)
    save(saver, tmp_path, tensors(2))
    with pytest.raises(StorageError, match=r"replaced by another save while it was read: load again"):
        checkpoint.read_tensor("a")
    saver.close()


def test_a_save_that_publishes_beside_a_removal_of_keys_stays(tmp_path, monkeypatch):
    saver = new_saver()
    save(saver, tmp_path, {"a": torch.zeros(8), "b": torch.zeros(8)})
    write_whole = remove_module.write_whole

    def late(path, *args):
        monkeypatch.setattr(remove_module, "write_whole", write_whole)
        save(saver, tmp_path, {"a": torch.ones(8), "c": torch.ones(8)})
        write_whole(path, *args)

    monkeypatch.setattr(remove_module, "write_whole", late)
    with pytest.raises(StorageError, match=r"no keys were removed from .*: a save, or another removal"):
        remove_keys(tmp_path, "b")
    saver.close()
    assert {name: tensor.tolist() for name, tensor in ds.load(tmp_path).items()} == {
        "a": [1.0] * 8,
        "c": [1.0] * 8,
    }
    assert sum(name.startswith("index-") for name in os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("what", ["keys", "optimizer"])
def test_a_save_that_publishes_while_what_replaces_an_older_one_is_synced_stays(tmp_path, monkeypatch, what):
    saver, point = new_saver(), Faults.point
    save(saver, tmp_path, {"a": torch.zeros(8), "optimizer.b": torch.zeros(8)})

    def late(faults: Faults, name: str) -> None:
        if name == "rename manifest":
            monkeypatch.setattr(Faults, "point", point)
            save(saver, tmp_path, {"a": torch.ones(8), "c": torch.ones(8)})
        point(faults, name)

    plan = plan_drop(tmp_path)
    monkeypatch.setattr(Faults, "point", late)
    with pytest.raises(StorageError, match=r"a save(, or another removal of keys,)? has published into it"):
        remove_keys(tmp_path, "optimizer.") if what == "keys" else drop_optimizer(plan)
    saver.close()
    assert {name: tensor.tolist() for name, tensor in ds.load(tmp_path).items()} == {
        "a": [1.0] * 8,
        "c": [1.0] * 8,
    }
    assert len(list(tmp_path.iterdir())) == 3, "nothing is left of what was not published"


def test_a_removal_of_keys_publishes_nothing_where_the_manifest_was_removed_meanwhile(tmp_path, monkeypatch):
    """As by `datastates prune`, which removes the data files next."""
    ds.save({"a": torch.ones(8), "b": torch.zeros(8)}, tmp_path)
    write_whole = remove_module.write_whole

    def late(path, *args):
        monkeypatch.setattr(remove_module, "write_whole", write_whole)
        (tmp_path / MANIFEST_NAME).unlink()
        write_whole(path, *args)

    monkeypatch.setattr(remove_module, "write_whole", late)
    with pytest.raises(StorageError, match="no keys were removed from"):
        remove_keys(tmp_path, "b")
    assert not (tmp_path / MANIFEST_NAME).exists()


def test_an_index_that_another_removal_of_the_same_keys_has_published_stays(tmp_path, monkeypatch):
    ds.save({"a": torch.ones(8), "b": torch.zeros(8)}, tmp_path)
    write_whole = remove_module.write_whole

    def late(path, *args):
        monkeypatch.setattr(remove_module, "write_whole", write_whole)
        remove_keys(tmp_path, "b")
        write_whole(path, *args)

    monkeypatch.setattr(remove_module, "write_whole", late)
    with pytest.raises(StorageError, match="no keys were removed from"):
        remove_keys(tmp_path, "b")
    assert {name: tensor.tolist() for name, tensor in ds.load(tmp_path).items()} == {"a": [1.0] * 8}


def test_keys_that_are_removed_while_a_checkpoint_is_read_are_not_taken_for_damage(tmp_path):
    saver = new_saver()
    save(saver, tmp_path, {"a": torch.zeros(8), "b": torch.zeros(8)})
    checkpoint = Checkpoint.open(tmp_path, reuse=False)
    remove_keys(tmp_path, "b")
    with pytest.raises(StorageError, match=r"lost keys to a removal while it was read: load again"):
        checkpoint.read_tensor("a")
    saver.close()


def test_a_reader_that_meets_a_removal_of_keys_opens_the_new_manifest(tmp_path, monkeypatch):
    saver = new_saver()
    save(saver, tmp_path, {"a": torch.zeros(8), "b": torch.zeros(8)})
    saver.close()
    open_index = load_module.open_index

    def late(path, *args):
        monkeypatch.setattr(load_module, "open_index", open_index)
        remove_keys(tmp_path, "b")
        return open_index(path, *args)

    monkeypatch.setattr(load_module, "open_index", late)
    assert list(Checkpoint.open(tmp_path, reuse=False).index.tensors) == ["a"]


def test_an_index_that_is_gone_is_an_error(tmp_path):
    saver = new_saver()
    save(saver, tmp_path, tensors(1))
    saver.close()
    remove_the_index(tmp_path)
    with pytest.raises(StorageError, match="index-"):
        Checkpoint.open(tmp_path, reuse=False)


def test_an_empty_metadata_json_is_a_missing_one(tmp_path):
    saver = new_saver()
    save(saver, tmp_path, tensors(1))
    saver.close()
    (tmp_path / METADATA_NAME).write_bytes(b"")
    verdict = verify(tmp_path)
    assert verdict.good and "is empty: the save was killed" in " ".join(verdict.notes)
    assert metadata_members(tmp_path) == {}


# -- what tests/model has found -----------------------------------------------------------------------------


def test_files_stay_once_a_manifest_named_them_though_another_one_is_in_its_place(runs, monkeypatch):
    """The other run's manifest is not durable yet: a crash would bring the first one back."""
    first = runs.start(0, 1)
    monkeypatch.setattr(
        directory_publisher.DirectoryPublisher,
        "_write_metadata",
        lambda *args: replaced_and_then_failing(runs),
    )
    assert first.wait() is Outcome.FAILED
    assert "No space left" in str(first.error) and "its files were kept" in str(first.error)
    (runs.directory / "first").rename(runs.directory / MANIFEST_NAME)  # as a crash may
    assert_holds(runs.directory, 1)


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "is silent"])
def test_a_rename_that_was_made_and_reported_as_failed_costs_no_file(answers, tmp_path, monkeypatch):
    """As of NFS, whose answer was lost, and which then answers again, or does not."""
    replace = os.replace

    def replace_and_fail(source, target):
        replace(source, target)
        if target.name == MANIFEST_NAME:
            if not answers:
                monkeypatch.setattr(presence, "read_regular", refuse)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", replace_and_fail)
    saver = new_saver()
    publication = save(saver, tmp_path, tensors(1))
    saver.close()
    assert publication.outcome is Outcome.FAILED and "its files were kept" in str(publication.error)
    assert_holds(tmp_path, 1)


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_manifest_that_was_not_sent_keeps_no_files_though_storage_is_silent(step, tmp_path, monkeypatch):
    monkeypatch.setattr(presence, "read_regular", refuse)
    saver = new_saver(faults=f"{step} manifest:1:EIO")
    publication = save(saver, tmp_path, tensors(1))
    saver.close()
    assert publication.outcome is Outcome.FAILED and "Nothing was published" in str(publication.error)
    assert list(tmp_path.iterdir()) == []


def refuse(path, most_bytes):
    raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))


def replaced_and_then_failing(runs: TwoRuns) -> None:
    (runs.directory / MANIFEST_NAME).rename(runs.directory / "first")
    (runs.directory / MANIFEST_NAME).write_bytes(b"of another run, not synced")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failed_save_leaves_no_index(tmp_path, monkeypatch):
    meanwhile(monkeypatch, remove_a_file)
    saver = new_saver()
    assert save(saver, tmp_path, tensors(1)).outcome is Outcome.FAILED
    saver.close()
    assert list(tmp_path.iterdir()) == []


def test_a_save_of_a_new_world_is_published_after_one_of_the_old_world(tmp_path, monkeypatch):
    """Which is abandoned between its look and its rename, and would replace the new one."""
    has_looked, later_is_published = threading.Event(), threading.Event()
    look = directory_publisher.require_files
    saver = new_saver()
    first = saver.start(tmp_path, State(tensors(1)))

    def dawdling(directory, manifest):
        look(directory, manifest)
        if manifest.save_id == first.save.context.save_id:
            has_looked.set()
            later_is_published.wait(1.0)

    monkeypatch.setattr(directory_publisher, "require_files", dawdling)
    while first.publisher._thread is None:
        first.poll()
    assert has_looked.wait(60.0)
    with monkeypatch.context() as patched:
        patched.setattr(Collectives, "is_current", lambda self: False)
        second = saver.start(tmp_path, State(tensors(2)))
    assert second.wait() is Outcome.PUBLISHED
    later_is_published.set()
    assert first.publisher.join(60.0)
    saver.close()
    assert_holds(tmp_path, 2)


def test_saves_of_one_run_that_overlap_are_published_one_after_the_other(tmp_path, monkeypatch):
    """The later one removes what the earlier has left: not between the earlier one's look and its rename."""
    later_is_published, look = threading.Event(), directory_publisher.require_files

    def dawdling(directory, manifest):
        look(directory, manifest)
        if manifest.ordinal == 1:
            later_is_published.wait(1.0)

    monkeypatch.setattr(directory_publisher, "require_files", dawdling)
    saver = new_saver()
    first, second = (saver.start(tmp_path, State(tensors(number))) for number in (1, 2))
    while first.publisher._thread is None:
        first.poll()
    assert second.wait() is Outcome.PUBLISHED
    later_is_published.set()
    assert first.wait() is Outcome.PUBLISHED, first.error
    saver.close()
    assert_holds(tmp_path, 2)


def test_what_is_taken_away_after_the_look_is_reported(tmp_path, monkeypatch):
    """Nobody may believe in a checkpoint that prune has removed while it was being published."""
    sync_above = directory_publisher.sync_above
    for remove in (remove_a_file, remove_the_index):
        with monkeypatch.context() as patch:
            patch.setattr(
                directory_publisher,
                "sync_above",
                lambda path, remove=remove: (sync_above(path), remove(path)),
            )
            saver = new_saver()
            publication = save(saver, tmp_path / remove.__name__, tensors(1))
            saver.close()
        assert publication.outcome is Outcome.FAILED
        assert "was published, but some of its files are missing now" in str(publication.error)


def test_a_manifest_that_is_taken_away_is_reported_and_its_files_stay(tmp_path, monkeypatch):
    check = directory_publisher.require_published

    def late(directory, *args):
        (directory / MANIFEST_NAME).rename(directory / "taken")
        check(directory, *args)

    monkeypatch.setattr(directory_publisher, "require_published", late)
    saver = new_saver()
    publication = save(saver, tmp_path, tensors(1))
    saver.close()
    assert publication.outcome is Outcome.FAILED and "was removed right after" in str(publication.error)
    (tmp_path / "taken").rename(tmp_path / MANIFEST_NAME)
    assert_holds(tmp_path, 1)


# -- which rank is late -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("write:1:stall=600", "nothing was written to its data file"),
        ("sync:1:stall=600", "nothing was written to its data file"),
        ("write manifest:1:stall=600", "it has not published the checkpoint"),
        ("write:1:stall=1", ""),
    ],
)
def test_the_rank_whose_storage_hangs_says_so(tmp_path, monkeypatch, caplog, faults, said):
    if said:
        monkeypatch.setattr(lateness, "LATE_SECONDS", 0.2)
    saver = new_saver(faults=faults)
    assert save(saver, tmp_path / "c", tensors(1)).outcome is Outcome.PUBLISHED
    saver.close()
    found = [line for line in caplog.messages if "keeps all others waiting" in line]
    about_it = [line for line in found if said in line]  # on a busy machine, other steps may be late, too
    assert bool(found) == bool(about_it) == bool(said) and len(about_it) <= 10, (
        "not at each of hundreds of polls"
    )
    assert all(f"rank 0 on node {socket.gethostname()}" in line for line in found)
    assert all(str(tmp_path / "c") in line for line in found)


@pytest.mark.parametrize("name", ["", "data"])
def test_a_state_provider_that_hangs_is_named_and_not_the_storage(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setattr(lateness, "LATE_SECONDS", 0.2)

    class Provider(State):
        def entries(self):
            yield from super().entries()
            yield StreamSource("log", self.wait, Mutability.NEVER)

        @staticmethod
        def wait(write):
            time.sleep(1)
            write(b"abc")

    saver = new_saver()
    named = {"": State(tensors(1)), name: Provider({})} if name else {"": Provider(tensors(1))}
    assert saver.start(tmp_path / "c", lambda: named).wait() is Outcome.PUBLISHED
    saver.close()
    found = [line for line in caplog.messages if "keeps all others waiting" in line]
    whose = f" of state provider {name!r}" if name else ""
    key = f"{name}.log" if name else "log"
    assert found and all(f"waiting: '{key}'{whose} has not been written for" in line for line in found)
    assert not any("storage" in line for line in found)


@pytest.mark.parametrize(
    "ranks",
    [range(4096), range(0, 1024, 4), range(3, 1024, 4), range(4, 4096, 16), range(512, 4096, 72)],
    ids=["all", "the first of each node", "the last", "of larger nodes", "of odd groups"],
)
def test_where_many_ranks_hang_some_of_them_say_so(monkeypatch, caplog, ranks):
    monkeypatch.setattr(lateness, "LATE_SECONDS", 0.0)
    for rank in ranks:
        one = lateness.Lateness("c", rank)
        one.look(7, "nothing was written")
        one.look(7, "nothing was written", len(ranks))
    assert 8 <= len(caplog.messages) <= 32
    like = f"like {len(ranks) - 1} others, keeps all others waiting"
    assert all(like in line for line in caplog.messages)


def parts_of(ranks):
    return [State({f"w{rank}": torch.ones(8)}) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("late", "said"), [([2], "wait for rank 2 to finish"), ([1, 2], "wait for 2 of 4 ranks to finish")]
)
def test_rank_0_says_which_rank_it_waits_for(tmp_path, monkeypatch, caplog, late, said):
    """Operators read its log first."""
    monkeypatch.setattr(lateness, "LATE_SECONDS", 0.2)
    faults = [{"faults": "sync:1:stall=1200"} if rank in late else {} for rank in range(4)]
    ranks = RanksInTurn(4, faults)
    assert ranks.save(tmp_path / "c", parts_of(4)).outcome is Outcome.PUBLISHED
    ranks.close()
    found = [line for line in caplog.messages if "is not published: for" in line]
    assert 1 <= len([line for line in found if said in line]) <= 10
    assert all(str(tmp_path / "c") in line for line in found)


def test_rank_0_does_not_speak_of_others_before_it_has_written_itself(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lateness, "LATE_SECONDS", 0.2)
    ranks = RanksInTurn(2, [{"faults": "sync:1:stall=1200"}, {}])
    assert ranks.save(tmp_path / "c", parts_of(2)).outcome is Outcome.PUBLISHED
    ranks.close()
    assert "is not published: for" not in caplog.text and "rank 0 on node" in caplog.text


def test_what_hangs_is_logged_again_after_twice_the_time(monkeypatch, caplog):
    seconds, late = 0.0, lateness.Lateness("c", 3)
    monkeypatch.setattr(lateness.time, "monotonic", lambda: seconds)
    logged = []
    for seconds in range(0, 1000, 10):
        before = len(caplog.messages)
        late.look("moved" if seconds < 500 else "once more", "nothing was written")
        logged += [seconds] * (len(caplog.messages) - before)
    assert logged == [60, 120, 240, 480, 560, 620, 740, 980]
