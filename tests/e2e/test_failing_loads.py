"""A damaged checkpoint in the training loop: all ranks raise the same error, with the flags to resume."""

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.ranks import Outcome, RankForge
from tests.support.tiny import LAYOUTS, MANIFEST, Checkpoints, Pretraining

pytestmark = pytest.mark.conformance

COMMON = [*LAYOUTS["tp2"], "--train-iters", str(STEPS)]
LOOK = "--datastates-fallback"


@pytest.fixture(scope="module")
def saved(forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 1 to 4."""
    folder = tmp_path_factory.mktemp("saved")
    how = ["--ckpt-format", "datastates", "--async-save", "--save-interval", "1", "--exit-interval", "4"]
    Pretraining(forge, folder / "runs").run(*COMMON, *how, "--save", folder / "ck")
    return folder / "ck"


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Checkpoints:
    return Checkpoints(Path(shutil.copytree(saved, tmp_path / "ck")))


def flip_bit(checkpoints: Checkpoints, iteration: int, rank: int = 1) -> Path:
    path = next(checkpoints.at(iteration).glob(f"data-{rank:05d}-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def error_of(outcome: Outcome, error: str = "MegatronLoadFailedError") -> str:
    """Returns the message of the error that ended every rank."""
    assert outcome.exits == [1, 1], outcome.log[-3000:]
    ending = rf"^(?:\[rank\d\]: )?(?:\w+\.)*{error}: (.*)$"
    found = [re.findall(ending, log, re.MULTILINE)[-1] for log in outcome.log.split("--- rank")[1:]]
    assert len(found) == 2 and found[0] == found[1], found
    return found[0]


def load(checkpoints: Checkpoints, *options: str) -> list[str]:
    return [*COMMON, "--load", str(checkpoints.root), *options]


def test_newest_whole_checkpoint_is_named_with_the_flag_that_resumes_from_it(
    checkpoints: Checkpoints, pretraining: Pretraining, reference: Reference
) -> None:
    newest, older = flip_bit(checkpoints, 4), flip_bit(checkpoints, 3, rank=0)

    error = error_of(pretraining.fail(*load(checkpoints, LOOK, "2")))

    assert f"rank 1: {newest}, which rank 1 wrote, is corrupt" in error
    named = re.search(r"iter_0000002 verifies: resume with (--ckpt-step \d+)\.$", error)
    assert named, error
    resumed = pretraining.run(*load(checkpoints, *named[1].split()))
    assert resumed.resumed_from(reference("tp2")) == 2
    assert resumed.differences(reference("tp2")) == []
    assert older.exists()


def test_a_run_that_may_fall_back_resumes_from_the_newest_whole_checkpoint(
    checkpoints: Checkpoints, pretraining: Pretraining, reference: Reference
) -> None:
    flip_bit(checkpoints, 4)
    flip_bit(checkpoints, 3, rank=0)
    saving = ["--ckpt-format", "datastates", "--async-save", "--save-interval", "2"]
    how = [*saving, "--save", str(checkpoints.root), LOOK, "2", "--datastates-on-damage", "fallback"]
    resumed = pretraining.run(*load(checkpoints, *how, "--exit-interval", "4"))
    assert "iter_0000002 verifies. It is loaded now (--datastates-on-damage fallback)" in resumed.log
    assert resumed.resumed_from(reference("tp2")) == 2
    again = pretraining.run(*load(checkpoints, *how))
    assert again.resumed_from(resumed) == 4 and "verifies" not in again.log
    assert checkpoints.tracked() == 6 and {2, 4, 6} <= {*checkpoints.complete()}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ([LOOK, "1"], r"No older checkpoint in .* verifies \(iter_0000003\)\.$"),
        ([LOOK, "2", "--ckpt-step", "4"], r"resume with --ckpt-step 2\.$"),
    ],
)
def test_a_run_falls_back_only_where_that_is_sure_to_be_meant(
    how: list[str], said: str, checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    flip_bit(checkpoints, 4)
    flip_bit(checkpoints, 3, rank=0)
    outcome = pretraining.fail(*load(checkpoints, *how, "--datastates-on-damage", "fallback"))
    assert re.search(said, error_of(outcome))


def test_no_more_checkpoints_are_verified_than_allowed(
    checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    flip_bit(checkpoints, 4)
    flip_bit(checkpoints, 3, rank=0)
    outcome = pretraining.fail(*load(checkpoints, LOOK, "1"))
    error = error_of(outcome)
    assert error.endswith(f"No older checkpoint in {checkpoints.root} verifies (iter_0000003).")
    looked = re.findall(r"iter_(\d+): .* checked in", outcome.log)
    assert looked == ["0000003"], "one line, of one rank"


def test_a_newer_one_of_torch_dist_which_is_not_verified_is_named(
    checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    flip_bit(checkpoints, 4)
    shutil.rmtree(checkpoints.at(3))
    checkpoints.at(3).mkdir()
    (checkpoints.at(3) / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (checkpoints.at(3) / ".metadata").touch()
    error = error_of(pretraining.fail(*load(checkpoints, LOOK, "1")))
    assert "iter_0000002 verifies: resume with --ckpt-step 2. Only datastates checkpoints were" in error
    assert "iter_0000003, of another format, may lose less training" in error
    assert error.endswith("then resume with --ckpt-step 3.")


def test_error_names_the_option_that_looks_for_an_older_checkpoint(
    checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    flip_bit(checkpoints, 4)
    outcome = pretraining.fail(*load(checkpoints))
    assert f". Start again with {LOOK} N" in error_of(outcome), "a sentence of its own"
    assert "checked in" not in outcome.log


def test_a_damaged_release_is_not_said_to_be_avoided_by_choosing_an_iteration(
    checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    """Megatron loads `release` also with --ckpt-step, which is not refused therefore."""
    release = checkpoints.at(4).rename(checkpoints.root / "release")
    next(release.glob("data-00001-*")).write_bytes(b"")
    tracker = checkpoints.root / "latest_checkpointed_iteration.txt"
    tracker.write_text("release")
    how = ["--ckpt-format", "datastates", "--ckpt-step", "9", LOOK, "2"]
    outcome = pretraining.fail(*load(checkpoints, *how))
    assert f"The tracker {tracker} says release, so that --ckpt-step chooses nothing" in error_of(outcome)
    assert "checked in" not in outcome.log


def test_a_chosen_iteration_that_is_not_there_is_named_with_those_that_are(
    checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    shutil.rmtree(checkpoints.at(2))
    outcome = pretraining.fail(*load(checkpoints, "--ckpt-format", "datastates", "--ckpt-step", "2"))
    found = f"expected iter_0000002 in {checkpoints.root}, found the iterations 1, 3, 4. Choose"
    assert error_of(outcome, "NotACheckpointError").startswith(f"--ckpt-step 2: {found}")


@pytest.mark.parametrize(
    ("how", "named", "missing"),
    [
        (["--load"], "the tracker {}", 4),
        (["--finetune", "--ckpt-step", "9", "--load"], "--ckpt-step 9", 9),
        (["--pretrained-checkpoint"], "the tracker {}", 4),
    ],
    ids=["tracker", "finetune", "pretrained"],
)
def test_a_checkpoint_that_is_named_and_not_there_is_an_error_with_those_that_are(
    how: list[str], named: str, missing: int, checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    shutil.rmtree(checkpoints.at(4))
    outcome = pretraining.fail(*COMMON, "--ckpt-format", "datastates", *how, checkpoints.root, LOOK, "9")
    error = error_of(outcome)
    named = named.format(checkpoints.root / "latest_checkpointed_iteration.txt")
    expected = f"expected iter_{missing:07d} in {checkpoints.root}, found the iterations 1, 2, 3. Choose"
    assert f"ranks 0, 1: {named} names a checkpoint that is not there: {expected}" in error
    assert error.endswith("iter_0000003 verifies: resume with --ckpt-step 3.")


@pytest.mark.parametrize(
    "last", [3, 4], ids=["non-persistent one is damaged", "non-persistent one is in between"]
)
def test_flags_that_are_named_get_past_non_persistent_checkpoints(
    last: int, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    temporary = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "1"]
    how = ["--ckpt-format", "datastates", "--save-interval", "2", "--exit-interval", str(last)]
    pretraining.run(*COMMON, *how, *temporary, "--save", checkpoints.root)
    non_persistent = Checkpoints(checkpoints.root / "non_persistent")
    assert checkpoints.published() == ([2] if last == 3 else [2, 4])
    assert non_persistent.tracked() == 3
    flip_bit(non_persistent if last == 3 else checkpoints, last)

    error = error_of(pretraining.fail(*load(checkpoints, LOOK, "1", *temporary)))

    named = re.search(r"iter_0000002 verifies: resume with (--ckpt-step 2), without (\S+), which", error)
    assert named and named[2] in temporary, error
    resumed = pretraining.run(*load(checkpoints, *named[1].split()))
    assert resumed.resumed_from(reference("tp2")) == 2


DISK_ERRORS = {"plain": ["--no-load-rng"], "parallel": ["--ckpt-fully-parallel-load"]}


@pytest.mark.parametrize("how", DISK_ERRORS)
@pytest.mark.parametrize("rank", [0, 1])
def test_disk_error_on_one_rank_ends_all_with_the_same_error(
    rank: int, how: str, checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    environment = {f"TINY_FAULTS_OF_RANK_{rank}": "read:1:EIO"}
    error = error_of(pretraining.fail(*load(checkpoints, *DISK_ERRORS[how]), environment=environment))
    assert f"failed on 1 of 2 ranks: rank {rank}: " in error and "Input/output error" in error


@pytest.mark.parametrize("how", DISK_ERRORS)
def test_unseen_manifest_on_all_ranks_ends_all_with_the_same_error(
    how: str, checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    (checkpoints.at(4) / "datastates.manifest").unlink()
    error = error_of(pretraining.fail(*load(checkpoints, *DISK_ERRORS[how], LOOK, "3")))
    assert "ranks 0, 1: " in error and "unfinished datastates checkpoint" in error
    assert error.endswith("iter_0000003 verifies: resume with --ckpt-step 3.")


@pytest.mark.parametrize("how", [["--ckpt-format", "datastates"], []], ids=["ours", "torch_dist"])
def test_a_chosen_save_that_was_killed_is_said_to_be_unfinished(
    how: list[str], checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    """Megatron does not know the format of its directory, which has no metadata.json yet."""
    for name in (MANIFEST, "metadata.json"):
        (checkpoints.at(4) / name).unlink()
    error = error_of(pretraining.fail(*load(checkpoints, "--ckpt-step", "4", LOOK, "1", *how)))
    assert f"ranks 0, 1: {checkpoints.at(4)} holds an unfinished datastates checkpoint: " in error
    assert error.endswith("iter_0000003 verifies: resume with --ckpt-step 3.")


def test_mismatch_with_the_model_does_not_start_a_search_for_older_checkpoints(
    checkpoints: Checkpoints, pretraining: Pretraining
) -> None:
    """An older checkpoint would not fit either."""
    outcome = pretraining.fail(*load(checkpoints, "--ffn-hidden-size", "192", LOOK, "3"))
    assert outcome.exits == [1, 1]
    assert "has global shape" in outcome.log and "verifies" not in outcome.log


def test_checksums_switched_off_are_not_checked(checkpoints: Checkpoints, pretraining: Pretraining) -> None:
    """The flag works in a run without --ckpt-format datastates, too."""
    flip_bit(checkpoints, 4)
    ending = pretraining.run(*load(checkpoints, "--datastates-checksums", "off"))
    assert ending.ranks[0].begun_at == 4
