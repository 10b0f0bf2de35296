"""A load of a checkpoint that is not there: it is known cheaply, and the error names those that are."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import pytest
import torch

from megatron_datastates.errors import DataStatesError, NotACheckpointError
from megatron_datastates.mcore.training.absent import problem_of_chosen, require_there
from megatron_datastates.mcore.training.load import _require_chosen
from megatron_datastates.pipeline.saver import Saver
from tests.unit.states import save

pytest.importorskip("megatron.training")


@pytest.mark.parametrize("kind", ["local", "global", None])
def test_a_chosen_iteration_may_be_a_non_persistent_one(
    kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron then loads it: of local checkpoints only its manager knows where they are."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    args = argparse.Namespace(load=str(tmp_path), ckpt_step=5, ckpt_backend="datastates", finetune=False)
    args.non_persistent_ckpt_type, args.non_persistent_global_ckpt_dir = kind, None
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: args)
    with (
        contextlib.nullcontext()
        if kind
        else pytest.raises(NotACheckpointError, match=r"--ckpt-step 5: .* found no iteration. Restore")
    ):
        _require_chosen("load")


def test_each_of_many_ranks_lists_a_run_without_a_look_at_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 checkpoints, 16,384 ranks would ask the file system 6 million questions before the error."""
    for iteration in range(1, 40):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    (tmp_path / "iter_40").mkdir()  # Megatron loads none of this name
    asked: list[Path] = []
    for name in ("stat", "open", "scandir", "listdir"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path, *args, of=original, **kw: (asked.append(path), of(path, *args, **kw))[1]
        )
    expected = r"the tracker .* expected iter_0000050 in .*, found the iterations 1, 2, .*, 39\. Choose"
    with pytest.raises(DataStatesError, match=expected) as error:
        require_there(tmp_path / "iter_0000050", None)
    monkeypatch.undo()
    assert isinstance(error.value.__cause__, NotACheckpointError)
    assert 1 < len(asked) < 5


def test_a_checkpoint_is_not_there_if_its_directory_is_empty(tmp_path: Path) -> None:
    """A deletion that was ended leaves such a one: a run may resume from an older checkpoint all the same."""
    for iteration in (1, 2):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    (tmp_path / "iter_0000001" / "file").touch()
    require_there(tmp_path / "iter_0000001", None)
    expected = r"expected iter_0000002 in .*, found that directory empty, and the iterations 1\. Choose"
    with pytest.raises(DataStatesError, match=expected):
        require_there(tmp_path / "iter_0000002", None)


def test_a_chosen_iteration_is_not_there_if_its_save_has_failed(tmp_path: Path, saver: Saver) -> None:
    """Only its empty directory is: the error names the iterations that are complete."""
    save(saver, tmp_path / "iter_0000001", {"w": torch.ones(3)})
    for iteration in (2, 3):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    expected = f"--ckpt-step 2: expected iter_0000002 in {tmp_path}, found the iterations 1. Choose"
    assert str(problem_of_chosen(tmp_path, 2)).startswith(expected)
    assert problem_of_chosen(tmp_path, 1) is None
