"""Small files that others rely on: whole or not at all, and in which order things become durable."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

import pytest

from megatron_datastates.engine import atomic_files
from megatron_datastates.engine.atomic_files import remove_replaced, write_whole
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import OptionError, StorageError
from megatron_datastates.format.directory import FILES_OF_TORCH_DIST, METADATA_NAME
from megatron_datastates.format.values import MANIFEST_NAME, SaveId, save_id_in_name

NONE = Faults("")
INDEX = "index-" + "0" * 32
SAVE = SaveId(7, 5)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_the_file_holds_exactly_the_data(tmp_path, data):
    for _ in range(2):
        write_whole(tmp_path / MANIFEST_NAME, data, NONE, SAVE)
        assert (tmp_path / MANIFEST_NAME).read_bytes() == data
    assert os.listdir(tmp_path) == [MANIFEST_NAME]


def test_a_shorter_file_replaces_a_longer_one(tmp_path):
    write_whole(tmp_path / MANIFEST_NAME, b"long" * 100, NONE, SAVE)
    write_whole(tmp_path / MANIFEST_NAME, b"short", NONE, SAVE)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == b"short"


@pytest.mark.parametrize("name", [MANIFEST_NAME, INDEX])
@pytest.mark.parametrize("step", ["write", "rename"])
@pytest.mark.parametrize("old", [None, b"the old one"])
def test_a_failure_before_the_rename_leaves_what_was_there(tmp_path, name, step, old):
    path = tmp_path / name
    if old is not None:
        path.write_bytes(old)
    kind = "manifest" if name == MANIFEST_NAME else "index"
    with pytest.raises(OSError, match="injected"):
        write_whole(path, b"the new one", Faults(f"{step} {kind}:1:ENOSPC"), SAVE)
    assert (path.read_bytes() if path.exists() else None) == old
    write_whole(path, b"the new one", NONE, SAVE)  # and what it left is in nobody's way
    assert path.read_bytes() == b"the new one"


def test_a_failure_after_the_rename_leaves_the_new_file(tmp_path):
    with pytest.raises(OSError, match="injected"):
        write_whole(tmp_path / MANIFEST_NAME, b"new", Faults("durable manifest:1:EIO"), SAVE)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == b"new"


def test_data_is_durable_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    steps: list[str] = []

    def recording(name: str):
        original = getattr(os, name)

        def call(*args):
            steps.append(name if name != "fsync" else f"fsync {_kind_of(args[0])}")
            return original(*args)

        return call

    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(atomic_files.os, name, recording(name))
    write_whole(tmp_path / MANIFEST_NAME, b"data", NONE, SAVE)
    assert steps == ["write", "fsync file", "replace", "fsync directory"]


def test_a_name_is_durable_once_a_file_has_appeared(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(atomic_files, "sync_directory", synced.append)
    with atomic_files.appearing(tmp_path / INDEX, SAVE) as temporary:
        temporary.write_bytes(b"data")
    assert synced == [tmp_path] and (tmp_path / INDEX).read_bytes() == b"data"


def _kind_of(descriptor: int) -> str:
    return "directory" if Path(f"/proc/self/fd/{descriptor}").is_dir() else "file"


def test_short_writes_are_resumed(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(atomic_files.os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    write_whole(tmp_path / MANIFEST_NAME, b"0123456789", NONE, SAVE)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == b"0123456789"


@pytest.mark.parametrize(("code", "is_failure"), [("EINVAL", False), ("EBADF", False), ("EIO", True)])
def test_a_directory_that_cannot_be_synced_is_no_failure(tmp_path, monkeypatch, code, is_failure):
    """Some network file systems cannot sync a directory, and their metadata is synchronous."""
    fsync = os.fsync

    def refusing(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(getattr(errno, code), "refused")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(OSError, match="refused") if is_failure else contextlib.nullcontext():
        write_whole(tmp_path / MANIFEST_NAME, b"x", Faults(""), SaveId(1, 1))
    assert (tmp_path / MANIFEST_NAME).read_bytes() == b"x"


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / MANIFEST_NAME, b"data", NONE, SAVE)


def raising(code):
    def call(*_):
        raise OSError(code, os.strerror(code))

    return call


def populate(directory: Path, names: list[str]) -> None:
    for name in names:
        (directory / name).write_bytes(b"x")


def test_what_is_replaced_is_removed_and_nothing_else(tmp_path):
    """Files of another run without a manifest may be of a save under way; an index may be another's, too."""
    kept = [SAVE.data_file_name(0), INDEX]
    others = [MANIFEST_NAME, METADATA_NAME, "common.pt", "my-data.bin", "index-" + "1" * 32]
    others += [SaveId(7, 6).data_file_name(0), SaveId(9, 9).data_file_name(1), SAVE.data_file_name(1)]
    others += [f".datastates-{MANIFEST_NAME}-{SaveId(9, 1)}.tmp"]
    old = [SaveId(7, 4).data_file_name(0), f".datastates-{MANIFEST_NAME}-{SaveId(7, 4)}.tmp"]
    replaced = [SaveId(10, 8).data_file_name(0), SAVE.data_file_name(0)]  # the latter is kept all the same
    populate(tmp_path, [*kept, *others, *old, replaced[0]])
    assert sorted(remove_replaced(tmp_path, set(kept), SAVE, replaced)) == sorted([*old, replaced[0]])
    assert sorted(os.listdir(tmp_path)) == sorted(kept + others)


def test_whose_the_files_of_the_checkpoint_are_is_not_asked(tmp_path, monkeypatch):
    """There is one for each rank, and the trainer of rank 0 shares the GIL with this."""
    asked: list[str] = []
    kept, old = [SAVE.data_file_name(rank) for rank in range(5)], SaveId(7, 4).data_file_name(0)
    populate(tmp_path, [MANIFEST_NAME, *kept, old])

    def noting(name):
        asked.append(name)
        return save_id_in_name(name)

    monkeypatch.setattr(atomic_files, "save_id_in_name", noting)
    assert remove_replaced(tmp_path, set(kept), SAVE, ()) == [old]
    assert set(asked) == {MANIFEST_NAME, old}


def test_what_saves_of_dead_jobs_have_left_is_removed(tmp_path):
    """Silent for an hour, or ten minutes if its run is continued; a run is as old as its youngest file."""
    over, dead, slow, ending, silent = (SaveId(run, 1) for run in (3, 4, 5, 8, 2))
    younger = SaveId(SAVE.run_id, SAVE.ordinal + 1)
    left = [over.data_file_name(0), dead.data_file_name(0), dead.data_file_name(1)]
    kept = [SAVE.data_file_name(0), SaveId(6, 1).data_file_name(0)]  # the latter is named, as it is shared
    kept += [
        slow.data_file_name(0),
        slow.data_file_name(1),
        ending.data_file_name(0),
        silent.data_file_name(0),
        younger.data_file_name(0),
        MANIFEST_NAME,
        "notes",
    ]
    populate(tmp_path, [*left, *kept])
    hour_ago = (tmp_path / MANIFEST_NAME).stat().st_mtime - atomic_files.MIN_AGE_SECONDS
    for name in {*left, *kept} - {slow.data_file_name(1), MANIFEST_NAME}:
        since = hour_ago + {over: 3000, ending: 3010, silent: 10}.get(save_id_in_name(name), 0)
        os.utime(tmp_path / name, (since, since))
    assert sorted(remove_replaced(tmp_path, set(kept[:2]), SAVE, (), continued={3, 8})) == sorted(left)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_what_makes_the_others_a_checkpoint_of_torch_dist_is_removed_first(tmp_path, monkeypatch):
    """A kill in between must not leave one that lacks files."""
    files = ["__0_0.distcp", ".metadata", f".datastates-{MANIFEST_NAME}-{SaveId(7, 4)}.tmp"]
    removed, unlink = [], Path.unlink
    populate(tmp_path, [MANIFEST_NAME, *files])

    def note(path, missing_ok=False):
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", note)
    remove_replaced(tmp_path, {MANIFEST_NAME}, SAVE, (), FILES_OF_TORCH_DIST)
    assert removed[0] == ".metadata" and sorted(removed) == sorted(files)


def test_nothing_is_removed_while_a_file_of_another_job_cannot_be_looked_at(tmp_path, monkeypatch):
    """It may be young, and its job be saving."""
    names = [MANIFEST_NAME, SaveId(4, 1).data_file_name(0), SaveId(7, 4).data_file_name(0)]
    populate(tmp_path, names)
    os.utime(tmp_path / names[1], (0, 0))
    monkeypatch.setattr(atomic_files, "changed_at", raising(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        remove_replaced(tmp_path, set(), SAVE, ())
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_what_is_replaced_stays_while_its_run_saves_again(tmp_path):
    """Files of unchanged tensors are in the directory already: what is under way has nothing else of them."""
    shared, under_way = SaveId(4, 1).data_file_name(0, 1), SaveId(4, 2).data_file_name(0)
    populate(tmp_path, [MANIFEST_NAME, shared, under_way])
    assert remove_replaced(tmp_path, set(), SAVE, [shared]) == []
    os.utime(tmp_path / under_way, (0, 0))
    assert remove_replaced(tmp_path, set(), SAVE, [shared]) == [under_way, shared]


def test_a_crash_does_not_bring_back_a_manifest_that_names_what_a_save_removes(tmp_path, monkeypatch):
    """The manifest that was read may not be durable yet; an older one may name what other runs have left."""
    left, steps, unlink = SaveId(3, 1).data_file_name(0), [], Path.unlink
    populate(tmp_path, [MANIFEST_NAME, left])
    os.utime(tmp_path / left, (0, 0))
    monkeypatch.setattr(atomic_files, "sync_directory", lambda path: steps.append("sync"))
    monkeypatch.setattr(Path, "unlink", lambda path, **how: (steps.append(path.name), unlink(path, **how)))
    remove_replaced(tmp_path, set(), SAVE, ())
    remove_replaced(tmp_path, set(), SAVE, ())
    assert steps == ["sync", left]


def test_a_file_that_a_save_under_way_has_linked_is_not_as_old_as_its_bytes(tmp_path):
    """It has the name of the earlier save that wrote it, as files of unchanged tensors do."""
    directory, before = tmp_path / "iter_0000002", tmp_path / "iter_0000001"
    shared, own = SaveId(4, 1).data_file_name(0, 1), SaveId(4, 2).data_file_name(0)
    directory.mkdir()
    before.mkdir()
    populate(before, [shared])
    populate(directory, [MANIFEST_NAME, own])
    long_ago = (directory / MANIFEST_NAME).stat().st_mtime - 2 * atomic_files.MIN_AGE_SECONDS
    os.utime(before / shared, (long_ago, long_ago))
    os.link(before / shared, directory / shared)
    assert remove_replaced(directory, set(), SAVE, ()) == []
    (before / shared).unlink()  # as retention does; no time shows when it was linked any more
    assert remove_replaced(directory, set(), SAVE, ()) == []


def test_a_failure_names_the_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / MANIFEST_NAME

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files.os, "write", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_whole(path, b"data", NONE, SAVE)
    assert os.listdir(tmp_path) == []


def test_what_is_refused_right_before_it_gets_its_name_leaves_no_other_file(tmp_path):
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(b"of another save")

    def refuse():
        raise StorageError("a save has published meanwhile")

    with pytest.raises(StorageError):
        write_whole(path, b"data", NONE, SAVE, before_rename=refuse)
    assert path.read_bytes() == b"of another save" and os.listdir(tmp_path) == [MANIFEST_NAME]


def test_two_runs_write_the_same_file_at_once(tmp_path, monkeypatch):
    """Each has a temporary file of its own."""
    path, replace = tmp_path / MANIFEST_NAME, os.replace
    other = SaveId(9, 1)

    def late(source, target):
        monkeypatch.setattr(atomic_files.os, "replace", replace)
        write_whole(path, b"theirs", NONE, other)
        replace(source, target)

    monkeypatch.setattr(atomic_files.os, "replace", late)
    write_whole(path, b"ours", NONE, SAVE)
    assert path.read_bytes() == b"ours" and os.listdir(tmp_path) == [MANIFEST_NAME]


# -- faults -----------------------------------------------------------------------------------------------


def test_a_fault_happens_at_its_nth_call_only():
    faults = Faults("write index:2:EIO,rename index:0:ENOSPC")
    faults.point("write index")
    with pytest.raises(OSError, match="Input/output error"):
        faults.point("write index")
    faults.point("write index")
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            faults.point("rename index")


def test_a_plan_that_could_never_happen_is_refused():
    with pytest.raises(OptionError, match="names 'committed index'"):
        Faults("write:1:EIO,committed index:1:kill")


def test_an_empty_plan_does_nothing():
    for _ in range(3):
        NONE.point("write manifest")


def test_of_a_checkpoint_that_is_replaced_the_index_goes_first(tmp_path, monkeypatch):
    """A kill in between leaves data that no index names, and no index without its data."""
    for name in (MANIFEST_NAME, ".metadata", "__0_0.distcp", "__1_0.distcp"):
        (tmp_path / name).touch()
    gone, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **how: (gone.append(path.name), unlink(path, **how)))
    remove_replaced(tmp_path, set(), SaveId(1, 1), (), FILES_OF_TORCH_DIST)
    assert gone[0] == ".metadata" and len(gone) == 3
