"""What counts as a file that is there, before a manifest is published and after it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.publishing import presence
from megatron_datastates.pipeline.publishing.presence import missing_files, require_published
from megatron_datastates.threads import BackgroundThread


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "VISIBLE_SECONDS", 0.05)


@pytest.mark.parametrize("ranks", [3, presence._FEW_FILES + 1, 300])
@pytest.mark.parametrize("threads", ["as many as it wants", "no"])
def test_of_many_files_each_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, threads: str
) -> None:
    if threads == "no":
        monkeypatch.setattr(BackgroundThread, "start", refuse)
    for rank in range(ranks):
        (tmp_path / f"data-{rank}").write_bytes(bytes(rank))
    (tmp_path / "index").touch()
    files = [SimpleNamespace(name=f"data-{rank}", bytes=rank, rank=rank) for rank in range(ranks)]
    manifest: Any = SimpleNamespace(files=files, index=SimpleNamespace(name="index", bytes=0))
    assert missing_files(tmp_path, manifest) == []
    (tmp_path / "data-0").unlink()
    (tmp_path / "data-2").write_bytes(b"12345")
    assert missing_files(tmp_path, manifest) == [
        "data-0 of rank 0",
        "data-2 of rank 2 (has 5 bytes, expected 2)",
    ]
    assert len(missing_files(tmp_path / "none", manifest)) == ranks + 1


def refuse(thread: BackgroundThread) -> None:
    raise RuntimeError("can't start new thread")


def naming(size: int) -> Any:
    """Returns what is looked at of a manifest with one data file of a size."""
    file = SimpleNamespace(name="data", bytes=size, rank=0)
    return SimpleNamespace(files=[file], index=SimpleNamespace(name="index", bytes=0))


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("index")], ids=["directory", "pipe", "link"]
)
def test_what_is_no_regular_file_is_missing_whatever_its_size(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "index").touch()
    make(tmp_path / "data")
    for size in {(tmp_path / "data").lstat().st_size, 0}:
        assert missing_files(tmp_path, naming(size)) == ["data of rank 0"]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ESTALE, errno.EIO])
def test_only_an_answer_says_that_a_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "index").touch()

    def fail(path: Path, flags: int) -> int:
        raise OSError(code, os.strerror(code), os.fspath(path))

    monkeypatch.setattr(presence.os, "open", fail)
    if code in (errno.ESTALE, errno.EIO):
        with pytest.raises(OSError, match=os.strerror(code)):
            missing_files(tmp_path, naming(7))
    else:
        assert missing_files(tmp_path, naming(7)) == ["data of rank 0"]


def test_a_checkpoint_that_another_save_has_replaced_lacks_nothing(tmp_path: Path) -> None:
    ds.save({"w": torch.ones(10)}, tmp_path)
    path = tmp_path / MANIFEST_NAME
    encoded = path.read_bytes()
    manifest = Manifest.decode(encoded, MANIFEST_NAME)
    ds.save({"w": torch.zeros(10)}, tmp_path)
    require_published(tmp_path, manifest, encoded)
    path.write_bytes(encoded)
    with pytest.raises(DataStatesError, match="was published, but some of its files are missing now: data-"):
        require_published(tmp_path, manifest, encoded)
