"""The directory of an asynchronous save: the trainer asks nothing of --save, and nobody misses it there."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_datastates.config import Options
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.training import retention, tracker_writing

pytest.importorskip("megatron.training")
pytestmark = pytest.mark.skipif(
    versions.installed().writes_common_file, reason="this release writes a file there itself"
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("_is_near", "_is_ours"):
        monkeypatch.setattr(tracker_writing, name, False)
    return tmp_path / "run"


@pytest.mark.parametrize("is_near", [True, False], ids=["near", "direct"])
def test_asynchronous_saves_ask_nothing_of_save_on_the_trainer(
    is_near: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hang. A data loader's directory is still made: Megatron writes there at once."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.training import checkpointing

    made, client = list[str](), serialization.maybe_msc

    def make(name: str, check_parent: bool = True) -> None:
        made.append(name)

    retain = 10 if is_near else None
    arguments = SimpleNamespace(async_save=True, save_retain_interval=retain, save=str(root), rank=0)
    monkeypatch.setattr(checkpointing, "ensure_directory_exists", make)
    monkeypatch.setattr(checkpointing, "get_args", lambda: arguments)
    with tracker_writing.saving(Options(near=str(tmp_path / "near") if is_near else "")):
        checkpointing.ensure_directory_exists(str(root / "iter_0000300"), check_parent=False)
        assert next(serialization.maybe_msc.Path(str(tmp_path)).iterdir(), None) is None
        checkpointing.ensure_directory_exists("loader/iter_0000300/train.pt")
    assert made == ["loader/iter_0000300/train.pt"]
    assert serialization.maybe_msc is client and checkpointing.ensure_directory_exists is make
    monkeypatch.setattr(os.path, "exists", Mock(side_effect=AssertionError("looked into --save")))
    with retention.saving(300):
        pass
    monkeypatch.undo()


@pytest.mark.parametrize("rank", [0, 1])
def test_modelopt_finds_the_directory_of_an_asynchronous_save(
    rank: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 0, nvidia-modelopt opens a file there as soon as `dist_checkpointing.save` has returned."""
    from megatron.training import checkpointing

    found = list[bool]()

    def save_sharded_modelopt_state(model: Any, checkpoint_name: str, strategy: Any) -> None:
        found.append(Path(checkpoint_name).is_dir())

    arguments = SimpleNamespace(async_save=True, save_retain_interval=None, save=str(root), rank=rank)
    monkeypatch.setattr(checkpointing, "get_args", lambda: arguments)
    monkeypatch.setattr(
        checkpointing, "save_sharded_modelopt_state", save_sharded_modelopt_state, raising=False
    )
    with tracker_writing.saving(Options()):
        checkpointing.ensure_directory_exists(str(root / "iter_0000300"), check_parent=False)
        assert not root.exists()
        checkpointing.save_sharded_modelopt_state([], str(root / "iter_0000300"), ("torch_dist", 1))
    assert found == [rank == 0]
    assert checkpointing.save_sharded_modelopt_state is save_sharded_modelopt_state
