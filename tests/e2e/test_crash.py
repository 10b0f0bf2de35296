"""A killed run resumes from the newest published checkpoint, and goes on as if never killed."""

import re
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.tiny import LAYOUTS, TRACKER, Checkpoints, Pretraining, Running

SIGKILLED = [-signal.SIGKILL, -signal.SIGKILL]


def start_to_be_killed(pretraining: Pretraining, root: Path, ckpt_format: str) -> Running:
    """A run that saves every second step, slow enough to be killed before its last one."""
    mode = ["--async-save"] if ckpt_format == "datastates" else []
    return pretraining.start(
        *(*LAYOUTS["tp2"], "--train-iters", str(STEPS), "--step-delay-ms", "400"),
        *("--save", root, "--save-interval", "2", "--ckpt-format", ckpt_format, *mode),
    )


def resume_arguments(root: Path, ckpt_format: str) -> list[str]:
    everything = [*LAYOUTS["tp2"], "--train-iters", str(STEPS), "--ckpt-format", ckpt_format]
    return [*everything, "--save", str(root), "--load", str(root)]


@pytest.mark.parametrize("moment", ["tracker names first", "second save begun"])
def test_killed_run_resumes_exactly(
    moment: str,
    ckpt_format: str,
    pretraining: Pretraining,
    reference: Reference,
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    killed = start_to_be_killed(pretraining, checkpoints.root, ckpt_format)
    reached = {
        "tracker names first": lambda: checkpoints.tracked() == 2,
        "second save begun": lambda: checkpoints.at(4).exists(),
    }
    killed.job.wait_until(reached[moment], timeout_seconds=60)
    assert killed.job.kill().exits == SIGKILLED
    left_by_kill = checkpoints.tracked()

    resumed = pretraining.run(*resume_arguments(checkpoints.root, ckpt_format))

    assert resumed.resumed_from(reference("tp2")) == left_by_kill
    assert resumed.differences(reference("tp2")) == []
    checkpoints.assert_format(STEPS, ckpt_format)


def test_unreadable_tracker_falls_back_to_newest_published_checkpoint(
    ckpt_format: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    if ckpt_format != "datastates":
        pytest.skip("stock Megatron exits with code 0, untrained")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    stopped_at_4 = ["--exit-interval", "4", "--save-interval", "2"]
    pretraining.run(*resume_arguments(checkpoints.root, ckpt_format), *stopped_at_4)
    assert checkpoints.published() == [2, 4]
    (checkpoints.root / TRACKER).write_text("")

    resumed = pretraining.run(*resume_arguments(checkpoints.root, ckpt_format))

    told = [line for line in resumed.log.splitlines() if TRACKER in line]
    assert any(re.search(r"iter(ation)?[ _]+0*4\b", line) for line in told), resumed.log[-4000:]
    assert resumed.resumed_from(reference("tp2")) == 4
    assert resumed.differences(reference("tp2")) == []


def test_unpublished_checkpoint_is_not_fallen_back_to(
    ckpt_format: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    if ckpt_format != "datastates":
        pytest.skip("only our format tells a published checkpoint from a torn one")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    stopped_at_4 = ["--exit-interval", "4", "--save-interval", "2"]
    pretraining.run(*resume_arguments(checkpoints.root, ckpt_format), *stopped_at_4)
    (checkpoints.at(4) / "datastates.manifest").unlink()
    (checkpoints.root / TRACKER).write_text("")

    resumed = pretraining.run(*resume_arguments(checkpoints.root, ckpt_format))

    assert resumed.resumed_from(reference("tp2")) == 2
    assert resumed.differences(reference("tp2")) == []
