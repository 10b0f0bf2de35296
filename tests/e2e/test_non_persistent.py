"""Non-persistent checkpoints and retention: what is saved, resumed from, kept and deleted."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, MANIFEST, TRACKER, Checkpoints, Pretraining

FORMATS = {
    "datastates async": ["--ckpt-format", "datastates", "--async-save"],
    "datastates": ["--ckpt-format", "datastates"],
    "torch_dist": ["--ckpt-format", "torch_dist"],
}
EVERY_STEP = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "1"]


def train(root: Path, *arguments: str | Path, steps: int = STEPS) -> list[str]:
    how = [*LAYOUTS["tp2"], "--train-iters", str(steps), "--save", str(root), "--load", str(root)]
    return [*how, "--save-interval", "4", *map(str, arguments)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "own_directory"), [*((name, False) for name in FORMATS), ("datastates async", True)]
)
def test_newer_non_persistent_checkpoint_is_resumed_from(
    name: str, own_directory: bool, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    """Saves 1, 2, 3 (non-persistent), 4 (persistent), 5 and 6 (non-persistent); cleanup keeps 5 and 6."""
    root = tmp_path / "ck"
    other = Checkpoints(tmp_path / "np" if own_directory else root / "non_persistent")
    where = ["--non-persistent-global-ckpt-dir", other.root] if own_directory else []
    how = [*FORMATS[name], *EVERY_STEP, *where]
    pretraining.run(*train(root, *how, "--exit-interval", "6", steps=9))

    assert Checkpoints(root).complete() == [4] and Checkpoints(root).tracked() == 4
    assert other.tracked() == 6
    # An async save that was in flight when the next one began is left to a later cleanup.
    assert other.complete()[-2:] == [5, 6] if "async" in name else other.complete() == [5, 6]
    if name != "torch_dist":
        assert Checkpoints(root).published() == [4] and other.published() == other.complete()
    newest = pretraining.run(*train(root, *how, "--exit-interval", "7", steps=9))
    assert newest.resumed_from(reference("tp2", 9)) == 6
    assert newest.differences(reference("tp2", 9)) == []


def test_older_non_persistent_checkpoint_is_not_resumed_from(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    root, how = tmp_path / "ck", ["--ckpt-format", "datastates", "--async-save", *EVERY_STEP]
    first = pretraining.run(*train(root, *how, "--exit-interval", "4"))
    resumed = pretraining.run(*train(root, *how, "--exit-interval", "5"))
    assert resumed.resumed_from(first) == 4
    assert "non-persistent checkpoints are older than persistent checkpoint" in resumed.log


def test_local_checkpoints_share_the_async_queue(pretraining: Pretraining, tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext", reason="Megatron's local checkpoints are made by it")
    root, local = tmp_path / "ck", tmp_path / "local"
    every_step = ["--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "1"]
    how = [*FORMATS["datastates async"], *every_step, "--non-persistent-local-ckpt-dir", local]
    first = pretraining.run(*train(root, *how, "--exit-interval", "6", steps=9))
    assert Checkpoints(root).published() == [4]
    assert {path.name[:12] for path in local.glob("*/iter_*")} == {"iter_0000006"}
    resumed = pretraining.run(*train(root, *how, "--exit-interval", "7", steps=9))
    assert resumed.resumed_from(first) == 6


def test_local_checkpoints_hold_states_that_the_first_one_did_not_have(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """Their structure is constant only if the user says so. The first gradients overflow, as fp16's may."""
    pytest.importorskip("nvidia_resiliency_ext", reason="Megatron's local checkpoints are made by it")
    local = ["--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "2"]
    how = ["--ckpt-format", "datastates", "--train-iters", "14", *local]
    how += ["--non-persistent-local-ckpt-dir", str(tmp_path / "local")]
    how += ["--fp16", "--initial-loss-scale", "250000", "--hysteresis", "1", "--save-interval", "7"]
    how += ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck")]
    without = ["--use-distributed-optimizer"]
    first = pretraining.run(*how, "--exit-interval", "12", without=without)
    resumed = pretraining.run(*how, "--exit-interval", "13", without=without)
    assert resumed.resumed_from(first) == 12


@pytest.fixture(scope="module")
def complete(forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves one complete checkpoint and returns its directory."""
    folder = tmp_path_factory.mktemp("complete")
    how = ["--ckpt-format", "datastates", "--exit-interval", "1"]
    Pretraining(forge, folder / "runs").run(*train(folder / "ck", *how))
    return Checkpoints(folder / "ck").at(1)


@pytest.fixture
def with_old_directories(complete: Path, tmp_path: Path) -> Checkpoints:
    """Makes untracked non-persistent checkpoints: 8 and 90 are complete, 7 and 95 are not."""
    old = Checkpoints(tmp_path / "ck" / "non_persistent")
    for iteration in (8, 90):
        shutil.copytree(complete, old.at(iteration))
    for iteration in (7, 95):
        shutil.copytree(complete, old.at(iteration), ignore=lambda *_: [MANIFEST, "metadata.json"])
    return old


@pytest.mark.conformance
@pytest.mark.parametrize("mode", [["--async-save"], []], ids=["async", "sync"])
def test_cleanup_counts_complete_checkpoints_and_keeps_those_tracked_or_in_flight(
    mode: list[str], with_old_directories: Checkpoints, pretraining: Pretraining, tmp_path: Path
) -> None:
    """A new run saves, slowly, where an old run left checkpoints of later iterations.

    Megatron takes 95, which is not complete, for the newest and deletes all others, including the latest
    checkpoint and the files of saves in flight, which then cannot be published.
    """
    old = with_old_directories
    how = ["--ckpt-format", "datastates", *EVERY_STEP, *mode, "--datastates-write-limit", "8MB"]
    how += ["--save-interval", "1000"]
    ending = pretraining.run(*train(tmp_path / "ck", *how, "--exit-interval", "4"))
    left = sorted(int(path.name[5:]) for path in old.root.glob("iter_*"))
    assert old.tracked() == 4 and 4 in old.published()
    assert 90 in left, "the newest complete one"
    assert 95 in left, "newer than all complete ones: another process may be writing it"
    assert 7 not in left, "left by a crash, and older"
    assert 8 not in left, "complete, and not the newest"
    assert mode or left == [3, 4, 90, 95]
    resumed = pretraining.run(*train(tmp_path / "ck", *how, "--exit-interval", "5"))
    assert resumed.resumed_from(ending) == 4


@pytest.mark.conformance
@pytest.mark.parametrize("name", FORMATS)
def test_retention_deletes_what_it_deletes_with_torch_dist(
    name: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    retain = ["--save-interval", "1", "--save-retain-interval", "2"]
    ending = pretraining.run(*train(checkpoints.root, *FORMATS[name], *retain))
    assert sorted(checkpoints.root.glob("iter_*")) == [checkpoints.at(iteration) for iteration in (2, 4, 6)]
    assert checkpoints.complete() == [2, 4, 6] and checkpoints.tracked() == 6
    assert "successfully deleted checkpoint from iteration       5" in ending.log


@pytest.mark.parametrize("mode", [["--async-save"], []], ids=["async", "sync"])
def test_retention_survives_a_truncated_tracker(
    mode: list[str], pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    """Megatron, having saved, ends with an error on rank 0 only: int('')."""
    checkpoints = Checkpoints(tmp_path / "ck")
    how = ["--ckpt-format", "datastates", *mode, "--save-interval", "2"]
    pretraining.run(*train(checkpoints.root, *how, "--exit-interval", "4"))
    (checkpoints.root / TRACKER).write_text("")

    resumed = pretraining.run(*train(checkpoints.root, *how, "--save-retain-interval", "6"))

    assert resumed.resumed_from(reference("tp2")) == 4
    assert checkpoints.published() == [2, 6], "4 is the one that retention was about to delete"
    assert checkpoints.tracked() == STEPS


def test_retention_never_deletes_a_checkpoint_that_is_tracked_or_being_saved(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """A run that resumes from 2 finds 4 in the tracker: at the save of 3, retention would delete 4 in the
    background, while 4 is being saved again."""
    checkpoints = Checkpoints(tmp_path / "ck")
    how = ["--ckpt-format", "datastates", "--async-save", "--save-interval", "1"]
    how += ["--exit-interval", "4"]
    pretraining.run(*train(checkpoints.root, *how))
    again = pretraining.run(
        *train(checkpoints.root, *how, "--ckpt-step", "2", "--save-retain-interval", "1000")
    )
    assert again.ranks[0].begun_at == 2
    assert checkpoints.tracked() == 4 and 4 in checkpoints.published()
    last = pretraining.run(*train(checkpoints.root, *how, "--exit-interval", "5"))
    assert last.resumed_from(again) == 4
