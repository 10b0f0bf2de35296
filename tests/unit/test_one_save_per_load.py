"""All that one load reads is of the same save, on this rank and on all ranks."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import Options
from megatron_datastates.errors import LoadFailedError, StorageError
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.mcore.load import agreement, opening, state
from megatron_datastates.mcore.training import load as loads
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.upkeep.remove import remove_keys


def test_a_load_stays_with_the_save_that_it_has_opened(tmp_path: Path) -> None:
    ds.save({"t": torch.ones(3)}, tmp_path)
    with state.opened():
        first = opening.open_checkpoint(tmp_path)
        ds.save({"t": torch.zeros(3)}, tmp_path)
        assert opening.open_checkpoint(tmp_path) is first
    assert opening.open_checkpoint(tmp_path).manifest.save_id != first.manifest.save_id


def test_another_save_between_two_openings_with_other_options_fails_the_load(tmp_path: Path) -> None:
    """Options decide how files are read, so that a load that changes them opens the checkpoint again."""
    ds.save({"t": torch.ones(3)}, tmp_path)
    options = Options()
    with state.opened(options=lambda: options):
        first = opening.open_checkpoint(tmp_path)
        options = Options(trust_objects=True)
        again = opening.open_checkpoint(tmp_path)
        assert again is not first and again.manifest.save_id == first.manifest.save_id
        ds.save({"t": torch.zeros(3)}, tmp_path)
        assert opening.open_checkpoint(tmp_path) is again
        options = Options()
        with pytest.raises(LoadFailedError, match=r"was replaced by another save while it was read") as found:
            opening.open_checkpoint(tmp_path)
    assert isinstance(found.value.__cause__, StorageError)


def test_the_checkpoint_that_a_training_loop_has_loaded_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds.save({"t": torch.ones(3)}, tmp_path)
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: SimpleNamespace(finetune=True))
    found: list[weakref.ref[Checkpoint]] = []

    def original() -> tuple[int, int]:
        found.extend(weakref.ref(opening.open_checkpoint(tmp_path)) for _ in range(2))
        assert found[0]() is found[1]() is not None
        return 0, 0

    monkeypatch.setattr(loads, "_options", Options)
    assert loads.wrap_load_checkpoint(original) == (0, 0)
    gc.collect()
    assert found[0]() is None


def two_saves(folder: Path) -> tuple[Path, Path]:
    """Returns the directories of two checkpoints whose manifests are of the same length."""
    found: dict[int, Path] = {}
    for number in itertools.count():
        one = folder / str(number)
        ds.save({"t": torch.ones(3)}, one)
        size = (one / MANIFEST_NAME).stat().st_size
        if size in found:
            break
        found[size] = one
    return found[size], one


@pytest.mark.parametrize("how", ["written in place", "moved, with the same time"])
def test_another_manifest_is_read_by_the_next_load(tmp_path: Path, how: str) -> None:
    """A program that copies checkpoints may write into the same file, or set the time of another."""
    directory, other = two_saves(tmp_path)
    first = opening.open_checkpoint(directory)
    manifest = directory / MANIFEST_NAME
    before = manifest.stat()
    for path in other.iterdir():
        if path.name != MANIFEST_NAME:
            shutil.copy(path, directory)
    if how == "written in place":
        manifest.write_bytes((other / MANIFEST_NAME).read_bytes())
        os.utime(manifest, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        moved = Path(shutil.copy(other / MANIFEST_NAME, tmp_path))
        os.utime(moved, ns=(before.st_atime_ns, before.st_mtime_ns))
        moved.replace(manifest)
    assert opening.open_checkpoint(directory).manifest.save_id != first.manifest.save_id


def are_equal(*terms: list[int]) -> bool:
    """Returns what ranks with these terms conclude."""
    return agreement.are_equal(*map(max, *terms))


def terms_of(*saves: SaveId | None) -> list[list[int]]:
    return [agreement._terms(None if save is None else (save, "index")) for save in saves]


def test_a_rank_that_opens_it_after_a_removal_of_keys_is_noticed(tmp_path: Path) -> None:
    """With a lenient strictness, that rank would leave out what the others load."""
    ds.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    opened = []
    for _ in range(2):
        one = agreement.Agreement(tmp_path, None)
        with state.opened(agreement=one):
            opening.open_checkpoint(tmp_path)
        opened.append(agreement._terms(one.opened))
        remove_keys(tmp_path, "b")
    assert not are_equal(*opened)


@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_ranks_with_the_same_save_are_equal(ranks: int) -> None:
    save = SaveId(2**62 + 12345, 7)
    assert are_equal(*terms_of(*[save] * ranks))
    assert are_equal(*terms_of(*[save] * ranks, None, None))
    assert are_equal(*terms_of(None, None))


@pytest.mark.parametrize("others", [1, 2, 999])
def test_one_rank_with_another_save_is_noticed(others: int) -> None:
    assert not are_equal(*terms_of(*[SaveId(5, 7)] * others, SaveId(5, 9)))
    assert not are_equal(*terms_of(*[SaveId(5, 7)] * others, SaveId(5, 9), None))


@pytest.mark.parametrize("digest", [b"\xff" * 32, bytes(32)])
def test_every_digest_fits_the_collective_and_differs_from_none(
    digest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashlib, "sha256", lambda data: SimpleNamespace(digest=lambda: digest))
    terms = agreement._terms((SaveId(5, 7), "index"))
    assert torch.tensor([terms, agreement._terms(None)]).tolist() == [terms, agreement._terms(None)]
    assert are_equal(terms, terms) and are_equal(terms, agreement._terms(None))
    assert not are_equal(terms, [-5, 5])


@pytest.mark.parametrize(("seconds", "rank"), [(0.0, 0), (3.25, 16383), (500_000.0, (1 << 24) - 1)])
def test_a_time_is_shared_with_its_rank(seconds: float, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: rank)
    found = agreement._with_rank(seconds)
    assert torch.tensor(found).item() == found and agreement._apart(found) == (seconds, rank)
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 0)
    assert agreement._with_rank(seconds + 2e-6) > found > agreement._with_rank(seconds - 2e-6)
