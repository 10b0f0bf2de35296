"""A checkpoint of ours and one of DCP's own in one directory, saved without Megatron: which one counts?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import megatron_datastates as ds
from megatron_datastates.dcp import DataStatesReader, DataStatesWriter
from megatron_datastates.errors import NotACheckpointError, SaveFailedError
from megatron_datastates.format.directory import FILES_OF_TORCH_DIST
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing import directory_publisher
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.runs.runs import format_answered, format_of
from tests.unit.command import run
from tests.unit.states import SMALL, State, new_saver

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BOTH = "holds two checkpoints: .metadata is of torch_dist or DCP"


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3, 4), value)}


def save_by_dcp(path: Path, value: float) -> None:
    dcp.save(state(value), storage_writer=dcp.FileSystemWriter(path))


def save_by_ours(how: str, path: Path, value: float) -> None:
    if how == "ds.save":
        ds.save(state(value), path, **SMALL)
    else:
        dcp.save(state(value), storage_writer=DataStatesWriter(path))


def loaded(how: str, path: Path) -> float:
    target = state(0)
    if how == "ds.save":
        ds.load(path, into=target)
    else:
        dcp.load(target, storage_reader=DataStatesReader(path))
    return float(target["w"].unique())


def names(path: Path) -> set[str]:
    return {one.name for one in path.iterdir()}


@pytest.fixture(params=["ds.save", "DataStatesWriter"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_dcp_saved_over_ours_counts(how: str, tmp_path: Path) -> None:
    save_by_ours(how, tmp_path, 1)
    save_by_dcp(tmp_path, 2)
    with pytest.raises((NotACheckpointError, CheckpointException), match=BOTH):
        loaded(how, tmp_path)
    assert format_of(tmp_path) == "torch_dist"
    assert "torch_dist" in run("show", tmp_path)[1]
    (tmp_path / ".metadata").unlink()  # as the error says
    assert loaded(how, tmp_path) == 1


def test_a_directory_that_nothing_describes_has_no_format(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert format_of(tmp_path) is None and format_answered(tmp_path) == "unknown"


def test_what_is_left_of_a_replaced_one_does_not_count(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> None:
        raise OSError("nothing was removed")

    save_by_dcp(tmp_path, 1)
    monkeypatch.setattr(directory_publisher, "remove_replaced", killed)
    save_by_ours(how, tmp_path, 2)
    assert ".metadata" in names(tmp_path)
    assert loaded(how, tmp_path) == 2
    assert format_of(tmp_path) == "datastates"
    save_by_ours(how, tmp_path, 3)
    assert loaded(how, tmp_path) == 3
    save_by_dcp(tmp_path, 4)
    with pytest.raises((NotACheckpointError, CheckpointException), match=BOTH):
        loaded(how, tmp_path)
    monkeypatch.undo()
    save_by_ours(how, tmp_path, 5)
    assert loaded(how, tmp_path) == 5


def test_metadata_json_says_what_counts_where_it_is(tmp_path: Path) -> None:
    ds.save(state(1), tmp_path, **SMALL)
    save_by_dcp(tmp_path, 2)
    metadata = tmp_path / "metadata.json"
    metadata.write_text('{"sharded_backend": "datastates", "sharded_backend_version": 1}')
    assert loaded("ds.save", tmp_path) == 1
    metadata.write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    with pytest.raises(NotACheckpointError, match=BOTH):
        loaded("ds.save", tmp_path)


TORCH_DIST_METADATA = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'  # Megatron's


def test_a_save_replaces_a_checkpoint_of_megatrons(how: str, tmp_path: Path) -> None:
    save_by_dcp(tmp_path, 1)
    (tmp_path / "metadata.json").write_text(TORCH_DIST_METADATA)
    save_by_ours(how, tmp_path, 2)
    assert format_of(tmp_path) == "datastates" and loaded(how, tmp_path) == 2
    code, out, _ = run("verify", tmp_path)
    assert code == 0 and "good" in out
    save_by_dcp(tmp_path, 3)
    with pytest.raises((NotACheckpointError, CheckpointException), match=BOTH):
        loaded(how, tmp_path)


def test_metadata_json_is_durably_gone_before_what_it_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash could bring it back, and not the rest: no checkpoint would count."""
    synced, sync = [], directory_publisher.sync_directory

    def record(directory: Path) -> None:
        synced.append((directory, names(directory) & {"metadata.json", ".metadata"}))
        sync(directory)

    save_by_dcp(tmp_path, 1)
    (tmp_path / "metadata.json").write_text(TORCH_DIST_METADATA)
    monkeypatch.setattr(directory_publisher, "sync_directory", record)
    saver = new_saver()
    extras = PublicationExtras(superseded=FILES_OF_TORCH_DIST)
    publication = saver.start(tmp_path, State(state(2)), extras=extras)
    assert publication.wait() is Outcome.PUBLISHED
    saver.close()
    assert synced == [(tmp_path, {".metadata"})]
    assert not names(tmp_path) & {"metadata.json", ".metadata"}


@pytest.mark.parametrize("faults", ["rename manifest:1:EIO", "durable manifest:1:EIO"])
def test_the_old_one_counts_until_metadata_json_is_gone(faults: str, tmp_path: Path) -> None:
    save_by_dcp(tmp_path, 1)
    old = names(tmp_path)
    (tmp_path / "metadata.json").write_text(TORCH_DIST_METADATA)
    with pytest.raises(SaveFailedError):
        ds.save(state(2), tmp_path, **SMALL, faults=faults)
    assert old < names(tmp_path) and format_of(tmp_path) == "torch_dist"
    target = state(0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path))
    assert float(target["w"].unique()) == 1
    ds.save(state(3), tmp_path, **SMALL)
    assert loaded("ds.save", tmp_path) == 3


@pytest.mark.parametrize("is_of_megatron", [True, False])
def test_the_error_says_which_one_is_later_and_which_one_loads(is_of_megatron: bool, tmp_path: Path) -> None:
    ds.save(state(1), tmp_path, **SMALL)
    save_by_dcp(tmp_path, 2)
    if is_of_megatron:
        (tmp_path / "metadata.json").write_text(TORCH_DIST_METADATA)
    os.utime(tmp_path / "datastates.manifest", (0, 86400))
    os.utime(tmp_path / ".metadata", (0, 2 * 86400))
    code, _, reported = run("verify", tmp_path)
    times = ".metadata was written 1970-01-03 00:00:00 UTC, datastates.manifest 1970-01-02 00:00:00 UTC"
    assert code == 2 and times in reported
    assert ("names torch_dist, so Megatron loads the former" in reported) is is_of_megatron
    removed = ["metadata.json", ".metadata"] if is_of_megatron else [".metadata"]
    assert "To keep only the former, remove datastates.manifest;" in reported
    assert f"to keep only the latter, remove {' and '.join(removed)}" in reported
    kept = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-kept")))
    (kept / "datastates.manifest").unlink()
    assert run("verify", kept)[0] == 0
    for name in removed:
        (tmp_path / name).unlink()
    assert run("verify", tmp_path)[0] == 0 and loaded("ds.save", tmp_path) == 1


def test_a_save_leaves_a_metadata_json_of_ours(how: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(TORCH_DIST_METADATA.replace("torch_dist", "datastates"))
    save_by_ours(how, tmp_path, 1)
    assert "metadata.json" in names(tmp_path) and loaded(how, tmp_path) == 1


def test_a_repaired_checkpoint_counts(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_by_dcp(tmp_path, 1)
    monkeypatch.setattr(directory_publisher, "remove_replaced", lambda *arguments: None)
    save_by_ours(how, tmp_path, 2)
    (tmp_path / "datastates.manifest").unlink()
    code, out, _ = run("repair", tmp_path)
    assert code == 0 and "from now on this one counts" in out
    assert loaded(how, tmp_path) == 2


def test_a_damaged_manifest_replaces_nothing(tmp_path: Path) -> None:
    save_by_dcp(tmp_path, 1)
    (tmp_path / "datastates.manifest").write_bytes(b"datastates-manifest 1 2 00000000\n{}")
    assert format_of(tmp_path) == "torch_dist"


def test_a_manifest_names_what_it_replaced_and_no_more(tmp_path: Path) -> None:
    ds.save(state(1), tmp_path, **SMALL)
    assert b"replaced" not in (tmp_path / "datastates.manifest").read_bytes()
    save_by_dcp(tmp_path, 2)
    ds.save(state(3), tmp_path, **SMALL)
    assert Checkpoint.open(tmp_path).manifest.replaced
