"""Restarts within the process (Megatron's --inprocess-restart), in the middle of saves, polls and loads."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import PATH, PRELOAD, Checkpoints, Pretraining

STEPS = 40
ARGUMENTS = ["--train-iters", str(STEPS), "--lr-decay-iters", str(STEPS), "--ckpt-format", "datastates"]


@pytest.fixture(scope="module")
def restarting_forge() -> Iterator[RankForge]:
    with RankForge((*PRELOAD, "restarting_rank"), (Path(__file__).parent, *PATH)) as parent:
        yield parent


@pytest.mark.long
@pytest.mark.parametrize("mode", [["--async-save"], []], ids=["async", "sync"])
@pytest.mark.parametrize("tier", ["near", "far"])
def test_a_run_that_is_restarted_within_its_process_ends_as_an_undisturbed_one(
    mode: list[str], tier: str, restarting_forge: RankForge, tmp_path: Path
) -> None:
    calm, restarted = Checkpoints(tmp_path / "calm"), Checkpoints(tmp_path / "restarted")
    training = Pretraining(restarting_forge, tmp_path / "runs", "restarting_rank:main", ranks=1)
    undisturbed = Pretraining(restarting_forge, tmp_path / "calm runs", ranks=1)
    saving: list[str | Path] = [*ARGUMENTS, "--save-interval", "1", *mode]
    near = ["--datastates-near", str(tmp_path / "near")] if tier == "near" else []
    expected = undisturbed.run(*saving, "--save", calm.root)

    ending = training.run(
        *(*saving, *near, "--save", restarted.root, "--load", restarted.root),
        environment={"SEED": f"{mode} {tier}"},
    )

    assert ending.differences(expected) == []
    assert restarted.tracked() == STEPS == restarted.published()[-1]
    assert ending.log.count("\ntraining ...") == 6, "five restarts"
