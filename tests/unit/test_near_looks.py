"""How often the near tier looks into --save: with many ranks, each look costs its metadata servers much."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.near import drain
from megatron_datastates.pipeline.near.copying import Copier
from megatron_datastates.pipeline.near.near_save import NearSave
from megatron_datastates.pipeline.near.places import published_in
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.unit.states import SMALL, data_files
from tests.unit.test_near_tier import Nodes


class _Counting:
    """A directory's entries, each of which counts how often its status is asked for."""

    def __init__(self, entries: Any, counts: Counter[str]) -> None:
        self._entries, self._counts = entries, counts

    def __enter__(self) -> _Counting:
        return self

    def __exit__(self, *error: object) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[Any]:
        return (_Entry(entry, self._counts) for entry in self._entries)


class _Entry:
    def __init__(self, entry: os.DirEntry[str], counts: Counter[str]) -> None:
        self.name, self._entry, self._counts = entry.name, entry, counts

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._entry.is_file(follow_symlinks=follow_symlinks)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        self._counts[self.name] += 1
        return self._entry.stat(follow_symlinks=follow_symlinks)


def counted_scans(directory: Path, patched: pytest.MonkeyPatch) -> Counter[str]:
    """Returns how often the status of each file in a directory is asked for, and, by "", its names."""
    counts, scandir = Counter[str](), os.scandir

    def counting(path: Any = ".") -> Any:
        if path != directory:
            return scandir(path)
        counts[""] += 1
        return _Counting(scandir(path), counts)

    patched.setattr(os, "scandir", counting)
    return counts


def held_copies(prefix: str, patched: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that copies of files with such names wait for."""
    may_copy, copy = threading.Event(), Copier.copy

    def copy_later(self: Copier, source: Path, *more: Any) -> None:
        assert not source.name.startswith(prefix) or may_copy.wait(PATIENCE_SECONDS)
        copy(self, source, *more)

    patched.setattr(Copier, "copy", copy_later)
    return may_copy


def test_at_the_end_files_that_have_arrived_are_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.01)
    nodes, may_copy = Nodes(tmp_path), held_copies("data-00001-", monkeypatch)
    counts = counted_scans(nodes.directory(1), monkeypatch)
    nodes.save(1)
    closing = threading.Thread(target=nodes.close)
    closing.start()
    eventually(lambda: len(data_files(nodes.directory(1))) == 1)
    (there,) = data_files(nodes.directory(1))
    eventually(lambda: counts[there.name] > 0)
    first, looks = counts[there.name], counts[""]
    eventually(lambda: counts[""] > looks + 20)
    assert counts[there.name] <= max(first, 2), "once when it is found, and once while it is copied"
    may_copy.set()
    closing.join()
    assert counts[there.name] <= 5, "also before the save is published, and right before and after that"
    nodes.check(1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders whose manifests were read for the save that published them."""
    found, decode = list[str](), Manifest.decode_save_id

    def counted(data: bytes, name: str) -> SaveId:
        found.append(name.removesuffix(f"/{MANIFEST_NAME}"))
        return decode(data, name)

    monkeypatch.setattr(Manifest, "decode_save_id", staticmethod(counted))
    return found


def test_each_node_reads_the_manifest_of_a_drained_save_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    monkeypatch.setattr(drain, "_ROOM_SECONDS", 0.01)
    nodes, may_copy = Nodes(tmp_path), held_copies("data-00000-", monkeypatch)
    nodes.save(1)
    nodes.save(2)
    may_copy.set()
    eventually(lambda: nodes.is_far(2) and nodes.kept(0) == nodes.kept(1) == ["iter_0000002"])
    nodes.close()
    assert Counter(reads)[str(nodes.directory(1))] <= 2, "by each of two nodes"


def test_whether_a_save_is_far_is_seen_anew_though_an_unchanged_manifest_is_not_read(
    tmp_path: Path, reads: list[str]
) -> None:
    far = tmp_path / "iter_0000001"
    manifests = {name: tmp_path / name / MANIFEST_NAME for name in ("own", "other")}
    for manifest in manifests.values():
        ds.save({"w": torch.ones(3)}, manifest.parent, **SMALL)
    own = published_in(manifests["own"].parent)
    assert own is not None
    save = NearSave(own, 1, far, None, (), SimpleNamespace(), {}, None, threading.Lock(), is_drained=True)  # type: ignore[arg-type]

    def looks() -> tuple[bool, int]:
        reads.clear()
        return save.is_far and save.is_far, len(reads)

    assert looks() == (False, 0)
    far.mkdir()
    shutil.copy(manifests["other"], tmp_path / "new")
    (tmp_path / "new").rename(far / MANIFEST_NAME)
    assert looks() == (False, 1)
    assert looks() == (False, 0)
    shutil.copy(manifests["own"], tmp_path / "new")
    (tmp_path / "new").rename(far / MANIFEST_NAME)
    assert looks() == (True, 1)
    assert looks() == (True, 0)
    (far / MANIFEST_NAME).rename(tmp_path / "away")
    assert looks() == (False, 0)
    (tmp_path / "away").rename(far / MANIFEST_NAME)
    assert looks()[0] is True
    shutil.copy(manifests["other"], tmp_path / "new")
    (tmp_path / "new").rename(far / MANIFEST_NAME)
    assert looks() == (False, 1), "another save has taken its place"
    (far / MANIFEST_NAME).write_bytes(b"damaged")
    assert looks()[0] is False
    shutil.copy(manifests["own"], far / MANIFEST_NAME)
    assert looks() == (True, 1)
