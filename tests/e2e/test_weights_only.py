"""Megatron loads what `datastates prune --drop-optimizer` has left, and resumes exactly from what it kept."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_datastates.cli.main import app
from tests.support.tiny import LAYOUTS, Checkpoints, Ending, Pretraining

COMMON = [*LAYOUTS["pp2"], "--train-iters", "6"]


@pytest.mark.parametrize("format", ["datastates", "torch_dist"])
def test_megatron_loads_weights_without_their_optimizer(
    format: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    saving = ["--save", checkpoints.root, "--save-interval", "2", "--exit-interval", "4"]
    saved = pretraining.run(*COMMON, *saving, "--ckpt-format", format, "--async-save")
    before = checkpoints.at(2).stat().st_ino

    done = CliRunner().invoke(
        app, ["prune", str(checkpoints.root), "--keep-last", "1", "--drop-optimizer", "--yes"]
    )

    assert done.exit_code == 0 and "dropped the optimizer of" in done.stdout, done.output
    assert checkpoints.at(2).stat().st_ino == before and checkpoints.complete() == [2, 4]
    loading = ["--load", checkpoints.root]
    old = pretraining.run(*COMMON, *loading, "--ckpt-step", "2", "--no-load-optim", "--no-load-rng")
    assert old.ranks[0].begun_at == 2
    assert models(old, None) == models(saved, "step 2")
    assert pretraining.run(*COMMON, *loading).resumed_from(saved) == 4
    refused = pretraining.fail(*COMMON, *loading, "--ckpt-step", "2")
    if format == "datastates":  # else Megatron's own error names the first key that lacks
        assert "the checkpoint has no optimizer state: " in refused.log, refused.log[-3000:]
    assert "in other buckets" not in refused.log and "of another parallel layout" not in refused.log


def models(ending: Ending, moment: str | None) -> list[dict[str, str]]:
    """Returns the parameters of each rank: those that it began with, or those of a moment."""
    found = [rank.begun if moment is None else rank.states[moment] for rank in ending.ranks]
    kept = [{name: value for name, value in each.items() if name.startswith("model")} for each in found]
    assert all(kept)
    return kept
