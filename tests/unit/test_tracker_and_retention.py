"""What a damaged tracker is taken for, and what retention may delete."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import gc
import inspect
import logging
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import Options
from megatron_datastates.engine import atomic_files
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import SaveId
from megatron_datastates.mcore.training import arguments, retention, tracker_recovery, tracker_writing
from megatron_datastates.pipeline import saver_pool
from megatron_datastates.pipeline.runs import tracker
from tests.support.capabilities import bound_by_permissions
from tests.unit.states import SMALL

OURS, OTHERS, UNFINISHED = "datastates.manifest", "metadata.json", "data-00000-0011223344556677-1.bin"


@pytest.fixture
def root(tmp_path):
    """Checkpoints: ours at 100, another format's at 200, an unfinished one at 300."""
    for iteration, name in {100: OURS, 200: OTHERS, 300: UNFINISHED}.items():
        directory = tmp_path / f"iter_{iteration:07d}"
        directory.mkdir()
        (directory / name).write_text('{"sharded_backend": "torch_dist"}')
    return tmp_path


def read(root: Path, text: str) -> str:
    """Returns what Megatron reads where the tracker says `text`."""
    (root / TRACKER_NAME).write_text(text)
    return tracker_recovery.wrap_read_metadata(lambda name: Path(name).read_text(), str(root / TRACKER_NAME))


def deleted(root: Path, iteration: int) -> bool:
    """Returns whether retention's deletion of an iteration is let through."""
    asked: list[int] = []
    retention.wrap_async_delete_checkpoint_impl(
        lambda path, number: asked.append(number), str(root), iteration
    )
    return asked == [iteration]


def test_damaged_tracker_means_the_newest_complete_checkpoint_in_whatever_format(root, caplog):
    assert read(root, "") == read(root, "1\x000") == "200"
    assert "iteration 200" in caplog.text


def test_only_rank_0_logs_that_the_tracker_is_damaged(root, caplog, monkeypatch):
    """All ranks read it, and fall back to the same checkpoint: thousands of lines would say so."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read(root, "") == "200" and read(root, "iter_0000100") == "100" and not caplog.text
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert read(root, "") == "200" and len(caplog.records) == 1


def test_the_name_of_a_directory_in_the_tracker_means_that_one(root: Path, caplog) -> None:
    """As a person writes it who sets a run back: it is not damaged, and the newest one is not wanted."""
    assert read(root, "iter_0000100\n") == "100"
    assert "taken for iteration 100" in caplog.text and "Falling back" not in caplog.text
    assert tracker.tracked_iteration(root / TRACKER_NAME) == 100, "to prune and near tiers"
    tracker_recovery.mend(root / TRACKER_NAME)
    assert (root / TRACKER_NAME).read_text() == "100"
    assert read(root, "iter_") == read(root, "iter_100 ?") == "200"


def test_a_rank_that_cannot_look_at_the_checkpoints_takes_what_the_others_have_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They wait for it in Megatron's `read_metadata`, which returns the highest iteration of all."""

    def fail(*args: Any) -> dict[int, Path]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def highest(of_others: int) -> Callable[[str], tuple[int, bool]]:
        def read_metadata(name: str) -> tuple[int, bool]:
            text = Path(name).read_text()
            is_release = text == "release"
            return max(0 if is_release else int(text), of_others), is_release

        return read_metadata

    monkeypatch.setattr(tracker_recovery, "complete_in", fail)
    name = str(root / TRACKER_NAME)
    (root / TRACKER_NAME).touch()
    assert tracker_recovery.wrap_read_metadata(highest(200), name) == (200, False)
    assert "the other ranks fall back to iteration 200" in caplog.text
    assert tracker_recovery.wrap_read_metadata(highest(1), name) == (1, False), "the first one of a run"
    with pytest.raises(OSError, match="Input/output"):  # nor has any other rank found one
        tracker_recovery.wrap_read_metadata(highest(0), name)


def test_a_copy_under_a_name_that_megatron_does_not_load_is_none_to_resume_from(root: Path) -> None:
    shutil.copytree(root / "iter_0000100", root / "iter_400")
    assert read(root, "") == "200"
    assert retention.deletable(root, 1) == [root / "iter_0000100"], "neither the copy nor the newest one"


def test_metadata_of_ours_without_a_manifest_is_no_checkpoint(root):
    (root / "iter_0000200" / OTHERS).write_text('{"sharded_backend": "datastates"}')
    assert read(root, "") == "100"


def test_whole_tracker_is_believed(root):
    assert read(root, "100") == "100"
    assert read(root, "release") == "release"


def test_a_tracker_that_cannot_be_read_now_is_not_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another branch of the run may have the newest checkpoint: nobody but the tracker knows."""

    def fail(*args: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for module in (tracker_recovery, tracker):
        monkeypatch.setattr(module, "read_regular", fail)
    assert read(root, "100") == "100", "Megatron reads it, or raises its error"
    tracker_recovery.mend(root / TRACKER_NAME)
    assert (root / TRACKER_NAME).read_text() == "100" and caplog.text == ""


def test_a_damaged_tracker_that_cannot_be_read_again_is_repaired(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / TRACKER_NAME).write_text("damaged")
    reads = iter([b"damaged"])

    def read_once(*args: Any) -> bytes:
        for text in reads:
            return text
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tracker_recovery, "read_regular", read_once)
    tracker_recovery.mend(root / TRACKER_NAME)
    assert (root / TRACKER_NAME).read_text() == "200"


def test_damaged_tracker_of_a_run_that_never_chose_us_is_left_alone(root):
    (root / "iter_0000100" / OURS).unlink()
    assert read(root, "") == ""


def test_the_first_save_of_ours_in_such_a_run_does_not_remove_its_tracker(root: Path) -> None:
    """Without a tracker, Megatron would begin anew after a kill of that save."""
    (root / "iter_0000100" / OURS).unlink()
    (root / TRACKER_NAME).touch()
    tracker_recovery.mend(root / TRACKER_NAME)
    assert (root / TRACKER_NAME).read_text() == "200"
    (root / TRACKER_NAME).write_text("")
    (root / "iter_0000200" / OTHERS).unlink()
    tracker_recovery.mend(root / TRACKER_NAME)
    assert not (root / TRACKER_NAME).exists(), "none is complete"


def test_a_checkpoint_of_another_format_that_the_tracker_named_is_not_called_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_writing, "_tracked", {})
    (root / TRACKER_NAME).write_text("200")
    (root / "iter_0000200" / SaveId(2, 9).data_file_name(0)).touch()  # an earlier job has been killed there
    tracker_writing._track(root, 400, SaveId(1, 1), 1000, 1, False)
    assert (root / TRACKER_NAME).read_text() == "400" and caplog.text == ""
    assert not (root / "iter_0000200").exists()


def test_a_checkpoint_that_cannot_be_listed_is_not_deleted_and_fails_no_save(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_writing, "_tracked", {})
    (root / TRACKER_NAME).write_text("200")
    with bound_by_permissions():
        (root / "iter_0000200").chmod(0o311)
        tracker_writing._track(root, 400, SaveId(1, 1), 1000, 1, False)
    (root / "iter_0000200").chmod(0o755)
    assert (root / TRACKER_NAME).read_text() == "400" and (root / "iter_0000200" / OTHERS).exists()
    assert "iter_0000200 was not deleted (--save-retain-interval): " in caplog.text


def test_retention_of_ours_deletes_nothing_through_a_link_and_nothing_incomplete(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_writing, "_tracked", {})
    elsewhere = tmp_path_factory.mktemp("archive") / "saved"
    ds.save({"w": torch.ones(3)}, elsewhere, **SMALL)
    (root / "iter_0000150").symlink_to(elsewhere)
    for ordinal, named in enumerate((150, 300), 1):
        (root / TRACKER_NAME).write_text(str(named))
        tracker_writing._track(root, 400, SaveId(1, ordinal), 1000, ordinal, False)
        assert (root / TRACKER_NAME).read_text() == "400"
    assert (elsewhere / OURS).exists() and (root / "iter_0000300" / UNFINISHED).exists()


def test_there_is_nothing_to_clean_up_or_to_log_before_the_first_save(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retention.wrap_cleanup_old_non_persistent_checkpoint(lambda *args: None, str(root / "new"), 1)
    assert caplog.text == ""


def test_nothing_is_cleaned_up_while_the_tracker_cannot_be_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    clean_up = functools.partial(retention.wrap_cleanup_old_non_persistent_checkpoint, lambda *args: None)
    with monkeypatch.context() as broken:
        broken.setattr(tracker, "read_regular", fail)
        clean_up(str(root), 1)
    assert (root / "iter_0000100").exists()
    assert "were not cleaned up: [Errno 5] Input/output error" in caplog.text
    clean_up(str(root), 1)
    assert not (root / "iter_0000100").exists()


def test_without_a_thread_a_cleanup_deletes_all_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would be rank 0's alone, and the others would wait for it."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    retention.wrap_cleanup_old_non_persistent_checkpoint(lambda *args: None, str(root), 1, do_async=True)
    assert not (root / "iter_0000100").exists() and retention._deletions == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_deletion_that_never_began_is_not_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise error

    arguments = SimpleNamespace(save=str(root), rank=1)
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: arguments)
    monkeypatch.setattr(retention, "_deletions", {})
    clean_up = functools.partial(retention.wrap_cleanup_old_non_persistent_checkpoint, lambda *args: None)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", fail)
        clean_up(str(root), 1)
    with retention.saving(100):
        pass


@pytest.mark.parametrize(
    ("tracked", "others_go"), [("200", True), ("300", False), ("400", False), ("", False)]
)
def test_retention_deletes_only_beside_a_complete_latest_checkpoint(root, tracked, others_go):
    (root / TRACKER_NAME).write_text(tracked)
    assert deleted(root, 100) is others_go
    assert not deleted(root, 200) or tracked != "200"


def test_retention_waits_for_a_tracker_that_is_being_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / TRACKER_NAME).write_text("")
    clock = SimpleNamespace(
        monotonic=lambda: 0.0, sleep=lambda seconds: (root / TRACKER_NAME).write_text("200")
    )
    monkeypatch.setattr(retention, "time", clock)
    assert deleted(root, 100)


def test_a_deletion_takes_the_manifest_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And syncs the directory before anything else goes."""
    (root / TRACKER_NAME).write_text("200")
    left: list[tuple[str, list[str]]] = []
    folder = root / "iter_0000100"
    (folder / "data").write_text("")

    def look(when: str) -> None:
        left.append((when, sorted(one.name for one in folder.iterdir())))

    monkeypatch.setattr(atomic_files, "sync_directory", lambda directory: look("synced"))
    delete = functools.partial(
        retention.wrap_async_delete_checkpoint_impl, lambda path, number: look("deleted")
    )
    delete(str(root), 100)
    assert left == [("synced", ["data"]), ("deleted", ["data"])]


def test_retention_leaves_a_checkpoint_that_was_moved_elsewhere(root: Path, tmp_path_factory, caplog) -> None:
    """Its manifest went, and Megatron, which deletes no link, left the rest: no checkpoint any more."""
    (root / TRACKER_NAME).write_text("200")
    elsewhere = tmp_path_factory.mktemp("archive") / "iter_0000100"
    (root / "iter_0000100").rename(elsewhere)
    (root / "iter_0000100").symlink_to(elsewhere)
    assert not deleted(root, 100)
    assert (elsewhere / OURS).exists() and "is not deleted: it is a link" in caplog.text


def test_the_garbage_collector_runs_during_a_deletion(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron switches it off in the process that it forks for a deletion."""
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    (root / TRACKER_NAME).write_text("200")
    collects: list[bool] = []
    monkeypatch.setattr(checkpointing.shutil, "rmtree", lambda path: collects.append(gc.isenabled()))
    original = inspect.unwrap(
        checkpointing._async_delete_checkpoint_impl,
        stop=lambda one: one.__globals__["__name__"] == "contextlib",
    )
    original(str(root), 100)
    assert collects == [False], "as Megatron has it"
    retention.wrap_async_delete_checkpoint_impl(original, str(root), 100)
    assert collects == [False, True]


def being_saved(directory: Path) -> Any:
    """Returns what retention looks at of an asynchronous save."""
    context = SimpleNamespace(directory=directory)
    return SimpleNamespace(is_at_work=True, save=SimpleNamespace(context=context))


def test_what_saves_are_writing_is_not_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback, say, into a directory that an earlier save had completed."""
    (root / TRACKER_NAME).write_text("200")
    again, other = being_saved(root / "iter_0000100"), being_saved(root / "iter_0000400")
    monkeypatch.setattr(saver_pool._session(), "begun", [again, other])
    assert not deleted(root, 100) and retention.deletable(root, 1) == []
    other.is_at_work = False
    assert not deleted(root, 100) and retention.deletable(root, 1) == []
    again.is_at_work, other.is_at_work = False, True
    assert deleted(root, 100) and retention.deletable(root, 1) == [root / "iter_0000100"]


def test_what_is_about_to_be_saved_is_not_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(save=str(root), rank=1)
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: arguments)
    (root / TRACKER_NAME).write_text("200")
    with retention.saving(100):
        assert not deleted(root, 100) and retention.deletable(root, 1) == []
    assert deleted(root, 100) and retention.deletable(root, 1) == [root / "iter_0000100"]


def test_a_save_waits_while_retention_deletes_its_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = SimpleNamespace(save=str(root), rank=1)
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: arguments)
    (root / TRACKER_NAME).write_text("200")
    begun, goes_on, is_over = threading.Event(), threading.Event(), []

    def delete(path: str, number: int) -> None:
        begun.set()
        assert goes_on.wait(10.0)
        is_over.append(True)

    impl = functools.partial(retention.wrap_async_delete_checkpoint_impl, delete)
    thread = threading.Thread(target=impl, args=(str(root), 100))
    thread.start()
    assert begun.wait(10.0)
    with retention.saving(400):
        assert is_over == [], "that is another directory"
    threading.Timer(0.2, goes_on.set).start()
    with retention.saving(100):
        assert is_over == [True]
    thread.join()


def test_a_save_waits_until_megatron_has_deleted_its_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    waits: list[bool] = []
    monkeypatch.setattr(checkpointing, "_deletion_processes", [Mock()], raising=False)
    monkeypatch.setattr(checkpointing, "get_args", lambda: SimpleNamespace(save=str(root), rank=0))
    monkeypatch.setattr(
        checkpointing, "finalize_deletion_processes", lambda blocking: waits.append(blocking), raising=False
    )
    monkeypatch.setattr(tracker_writing, "_is_near", False)
    for iteration in (100, 400):
        with retention.saving(iteration):
            assert waits == [True]


def test_what_is_saved_near_is_not_deleted_by_megatrons_retention(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--save may not have a newer one yet: the drain deletes, once it has."""
    (root / TRACKER_NAME).write_text("200")
    monkeypatch.setattr(tracker_writing, "_is_near", True)
    assert not deleted(root, 100) and (root / "iter_0000100" / OURS).exists()


def test_a_cleanup_leaves_links_and_what_is_newer_than_any_complete_one(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for iteration in (50, 60):
        (root / f"iter_{iteration:07d}").mkdir()
    elsewhere = tmp_path_factory.mktemp("archive") / "iter_0000070"
    elsewhere.mkdir()
    (elsewhere / OURS).write_text("")
    (root / "iter_0000070").symlink_to(elsewhere)
    names = [one.name for one in retention.deletable(root, 1)]
    assert names == ["iter_0000050", "iter_0000060", "iter_0000100"]


def test_a_tracker_is_repaired_by_another_file(root: Path) -> None:
    """A kill while it is written would leave it empty, as what had damaged it did."""
    path, before = root / TRACKER_NAME, root / "before"
    path.write_text("damaged")
    before.hardlink_to(path)
    tracker_recovery.mend(path)
    assert (path.read_text(), before.read_text()) == ("200", "damaged")


def test_retention_never_deletes_the_latest_checkpoint(root):
    (root / TRACKER_NAME).write_text("100")
    assert not deleted(root, 100)
    assert deleted(root, 200)


def test_parser_of_an_unknown_release_is_left_alone(caplog):
    parser = argparse.ArgumentParser()
    with caplog.at_level(logging.WARNING):
        assert arguments.wrap_add_checkpointing_args(lambda parser: parser, parser) is parser
    assert "no --ckpt-format" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--datastates-slot-siz=4MiB"],
            "--datastates-slot-siz: no such option; did you mean --datastates-slot-size?",
        ),
        (["--datastates-x", "1"], "--datastates-x: no such option; `datastates options` lists all"),
        (["--other"], "unrecognized arguments: --other"),
    ],
)
def test_a_misspelt_option_is_named_with_the_one_that_may_be_meant(given, said, capsys):
    def megatrons(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--ckpt-format", choices=["torch_dist"])
        return parser

    parser = arguments.wrap_add_checkpointing_args(megatrons, argparse.ArgumentParser(allow_abbrev=False))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(given)
    assert end.value.code == 2 and capsys.readouterr().err.endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("changes", "is_ours"),
    [
        ({}, True),
        ({"async_save": False}, False),
        ({"save_retain_interval": 10}, False),
        ({"verify_integrity": True}, False),  # what it names has Megatron's hashes by then
        ({"enable_msc": True}, True),  # the default before 0.18, where there is no client
        ({"uses_client": True}, False),
        ({"is_release": True}, False),
    ],
)
def test_whose_the_tracker_of_a_save_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_ours: bool
) -> None:
    """Either publishing writes it, or Megatron does: never neither."""
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    changes = {"async_save": True, "save_retain_interval": None, "save": str(root)} | changes
    is_release, uses_client = changes.pop("is_release", False), changes.pop("uses_client", False)
    monkeypatch.setattr(tracker_writing, "msc_is_enabled", lambda: uses_client)
    arguments = SimpleNamespace(**changes)
    monkeypatch.setattr(checkpointing, "get_args", lambda: arguments)
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: arguments)
    for name in ("_is_near", "_is_ours"):
        monkeypatch.setattr(tracker_writing, name, False)
    with tracker_writing.saving(Options(), is_release=is_release):
        megatrons = Path(checkpointing.get_checkpoint_tracker_filename(arguments.save))
        ours = tracker_writing.far_published(root / "iter_0000100")
    assert (ours is not None) == is_ours == (megatrons != root / TRACKER_NAME)
    if ours is not None:
        megatrons.write_text("100")
        assert not (root / TRACKER_NAME).exists()
        ours(SaveId(1, 1), False)
        assert (root / TRACKER_NAME).read_text() == "100"
        assert [path.name for path in root.glob("*tmp*")] == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_near_checkpoint_is_noted_in_wandb_before_it_is_in_save(
    is_there: bool,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The note is made by the last rank, and all others wait if it fails there."""
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    noted = []

    def add_file(path: str) -> None:  # as W&B's Artifact does
        if not Path(path).is_file():
            raise ValueError(f"Path is not a file: {path!r}")
        noted.append(Path(path).read_text())

    artifact = SimpleNamespace(add_reference=lambda *_, **__: None, add_file=add_file)
    run = SimpleNamespace(entity="e", project="p", log_artifact=lambda *_, **__: None)
    writer = SimpleNamespace(Artifact=lambda *_, **__: artifact, run=run)
    utils = checkpointing.wandb_utils
    monkeypatch.setattr(utils, "get_wandb_writer", lambda: writer)
    monkeypatch.setattr(utils, "on_save_checkpoint_success", utils.on_save_checkpoint_success)
    save = root if is_there else tmp_path / "not mounted"
    arguments = SimpleNamespace(async_save=True, save_retain_interval=None, save=str(save))
    monkeypatch.setattr(checkpointing, "get_args", lambda: arguments)
    for name in ("_is_near", "_is_ours"):
        monkeypatch.setattr(tracker_writing, name, False)
    with tracker_writing.saving(Options(near=str(tmp_path / "near"))):
        pass
    # Later, from the queue of asynchronous calls.
    path = checkpointing.get_checkpoint_tracker_filename(str(save))
    utils.on_save_checkpoint_success(str(save / "iter_0000100"), path, str(save), 100)
    assert noted == ["100"]
    assert is_there != ("W&B has no note of" in caplog.text)


def test_a_tracker_is_written_where_the_save_began_if_the_program_changes_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    arguments = SimpleNamespace(save=root.name, async_save=True, save_retain_interval=None)
    monkeypatch.setattr(checkpointing, "get_args", lambda: arguments)
    monkeypatch.setattr(tracker_writing, "_is_ours", True)
    monkeypatch.chdir(root.parent)
    ours = tracker_writing.far_published(Path(root.name, "iter_0000100"))
    monkeypatch.chdir("/")
    assert ours is not None
    ours(SaveId(1, 1), False)
    assert (root / TRACKER_NAME).read_text() == "100"


def test_retention_deletes_on_a_thread_where_megatron_forks(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    monkeypatch.setattr(checkpointing, "multiprocessing", multiprocessing)  # undone at the end
    arguments = SimpleNamespace(save=str(root), save_retain_interval=1000, rank=1)
    monkeypatch.setattr(checkpointing, "get_args", lambda: arguments)
    with retention.saving(400):
        pass
    assert checkpointing.multiprocessing.current_process() is multiprocessing.current_process()
    called = []
    # As in iter_finalize_fn of save_checkpoint.
    process = checkpointing.multiprocessing.get_context("fork").Process(
        target=lambda *args: called.append((os.getpid(), args)),
        args=(str(root), 100, False, True, 10, 3),
        daemon=True,
    )
    process.start()
    checkpointing._deletion_processes.append(process)
    checkpointing.finalize_deletion_processes(blocking=True)
    assert called == [(os.getpid(), (str(root), 100, False))], "the trainer's priority stays as it is"
    assert process not in checkpointing._deletion_processes


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_which_deletes_looks_at_the_directory_before_a_save(
    root: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A look by each of thousands of ranks, at one moment, while their trainers wait."""
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    monkeypatch.setattr(checkpointing, "get_args", lambda: SimpleNamespace(save=str(root), rank=rank))
    monkeypatch.setattr(checkpointing, "finalize_deletion_processes", lambda blocking: None, raising=False)
    monkeypatch.setattr(checkpointing, "_deletion_processes", [Mock()], raising=False)
    looked, exists = [], os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: (looked.append(path), exists(path))[1])
    with retention.saving(400):
        pass
    assert looked == [str(root / "iter_0000400")] * (rank == 0)


def test_a_save_elsewhere_has_megatrons_tracker(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_writing, "_is_ours", True)
    arguments = SimpleNamespace(save=str(root))
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: arguments)
    assert tracker_writing.far_published(root / "non_persistent" / "iter_0000100") is None


def test_what_megatron_writes_in_place_of_the_tracker_needs_no_file_in_memory(monkeypatch) -> None:
    """A sandbox may refuse such files, and the error would be rank 0's alone, which ends the job."""
    refused = Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted"))
    monkeypatch.setattr(tracker_writing, "_memory_file", None)
    monkeypatch.setattr(tracker_writing, "_unused", None)
    monkeypatch.setattr(tracker_writing, "msc_is_enabled", lambda: False)
    with monkeypatch.context() as sandbox:
        sandbox.setattr(os, "memfd_create", refused)
        path = Path(tracker_writing._unused_tracker())
    assert refused.called and path.read_text() == "0"
    path = Path(tracker_writing._unused_tracker())  # as soon as it can be
    assert path.is_relative_to("/proc/self/fd") and path.read_text() == "0"
