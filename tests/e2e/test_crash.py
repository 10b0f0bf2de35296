"""A killed run resumes from the newest published checkpoint, and continues as if never killed."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.e2e.conftest import STEPS, Reference
from tests.support.tiny import LAYOUTS, TRACKER, Checkpoints, Pretraining, waits_in

SIGKILLED = [-signal.SIGKILL, -signal.SIGKILL]
MANY_STEPS, INTERVAL = 12, 5
STOPPED_AT_4 = ["--exit-interval", "4", "--save-interval", "2"]


def train(steps: int, root: Path, ckpt_format: str) -> list[str]:
    """Returns the arguments of a run that resumes from `root` if there is a checkpoint."""
    how = [*LAYOUTS["tp2"], "--train-iters", str(steps), "--ckpt-format", ckpt_format]
    return [*how, "--save", str(root), "--load", str(root)]


@pytest.mark.conformance
@pytest.mark.parametrize("moment", ["after first save", "in second save"])
def test_killed_run_resumes_exactly(
    moment: str,
    ckpt_format: str,
    pretraining: Pretraining,
    reference: Reference,
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    arguments = train(MANY_STEPS, checkpoints.root, ckpt_format)
    mode = ["--async-save"] if ckpt_format == "datastates" else []
    killed = pretraining.start(
        *(*arguments, *mode, "--save-interval", str(INTERVAL), "--step-delay-ms", "100"),
        environment=waits_in(MANY_STEPS),
    )
    killed.job.wait_until(lambda: checkpoints.tracked() == INTERVAL, timeout_seconds=60)
    if moment == "in second save":
        killed.job.wait_until(checkpoints.at(2 * INTERVAL).exists, timeout_seconds=60)
    assert killed.job.kill().exits == SIGKILLED
    left_by_kill = checkpoints.tracked()
    long_ago = time.time() - 700.0  # as if the job had waited in a queue: its predecessor may not have ended
    for path in checkpoints.root.glob("iter_*/*"):
        os.utime(path, (long_ago, long_ago))

    resumed = pretraining.run(*arguments, "--save-interval", str(INTERVAL))

    uninterrupted = reference("tp2", MANY_STEPS)
    assert resumed.resumed_from(uninterrupted) == left_by_kill
    assert resumed.differences(uninterrupted) == []
    checkpoints.assert_format(MANY_STEPS, ckpt_format)
    for iteration in checkpoints.published():
        names = Checkpoint.open(checkpoints.at(iteration)).manifest.names
        found = {path.name for path in checkpoints.at(iteration).iterdir()} - {"tokenizer"}  # Megatron's main
        assert found == names | {"datastates.manifest", "metadata.json"}, (
            "what the killed run left is removed"
        )


def test_unreadable_tracker_falls_back_to_newest_published_checkpoint(
    ckpt_format: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    if ckpt_format != "datastates":
        pytest.skip("stock Megatron exits with code 0, untrained")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    pretraining.run(*train(STEPS, checkpoints.root, ckpt_format), *STOPPED_AT_4)
    assert checkpoints.published() == [2, 4]
    (checkpoints.root / TRACKER).write_text("")

    resumed = pretraining.run(*train(STEPS, checkpoints.root, ckpt_format))

    lines = [line for line in resumed.log.splitlines() if TRACKER in line]
    assert any(re.search(r"iter(ation)?[ _]+0*4\b", line) for line in lines), resumed.log[-4000:]
    assert resumed.resumed_from(reference("tp2")) == 4
    assert resumed.differences(reference("tp2")) == []


def test_a_tracker_that_lags_is_followed_and_one_line_names_the_newer_checkpoint(
    ckpt_format: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    """As a kill leaves it that comes after a save was published, and before the tracker was written."""
    if ckpt_format != "datastates":
        pytest.skip("manifests say what continues a checkpoint")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    pretraining.run(*train(STEPS, checkpoints.root, ckpt_format), *STOPPED_AT_4)
    tracker = checkpoints.root / TRACKER
    tracker.write_text("2")
    before = (checkpoints.at(4) / "datastates.manifest").stat().st_mtime - 1.0
    os.utime(tracker, (before, before))

    resumed = pretraining.run(*train(STEPS, checkpoints.root, ckpt_format))

    assert resumed.resumed_from(reference("tp2")) == 2
    assert resumed.log.count("as the tracker names it, although iteration 4, which continues it,") == 1


def test_unreadable_tracker_does_not_fall_back_to_an_unpublished_checkpoint(
    ckpt_format: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    if ckpt_format != "datastates":
        pytest.skip("only our format distinguishes a published checkpoint from a torn one")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    pretraining.run(*train(STEPS, checkpoints.root, ckpt_format), *STOPPED_AT_4)
    (checkpoints.at(4) / "datastates.manifest").unlink()
    (checkpoints.root / TRACKER).write_text("")

    resumed = pretraining.run(*train(STEPS, checkpoints.root, ckpt_format))

    assert resumed.resumed_from(reference("tp2")) == 2
    assert resumed.differences(reference("tp2")) == []
