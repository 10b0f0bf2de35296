"""A user's own state provider in Megatron's loop: saved with the model, resumed exactly, named in errors."""

from pathlib import Path

import pytest

import megatron_datastates as ds
from tests.e2e.conftest import STEPS, Reference
from tests.support.ranks import Outcome, RankForge
from tests.support.tiny import LAYOUTS, RANKS, Checkpoints, Pretraining

SAVED_AT = 3
# With its rerun state, Megatron's own checkpoints do not resume with --dist-ckpt-strictness raise_all.
HOW = [
    *LAYOUTS["tp2"],
    "--train-iters",
    str(STEPS),
    "--ckpt-format",
    "datastates",
    "--rerun-mode",
    "disabled",
]
FUNCTION = "steps_provider:Steps"
OPTION = ["--datastates-providers", FUNCTION]


@pytest.fixture
def pretraining(forge: RankForge, tmp_path: Path) -> Pretraining:
    return Pretraining(forge, tmp_path / "runs", target="steps_provider:main")


def install(folder: Path) -> dict[str, str]:
    """Installs a package whose entry point is the provider; returns the environment that sees it."""
    metadata = folder / "steps-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: steps\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[megatron_datastates.providers]\nsteps = {FUNCTION}\n")
    return {"INSTALLED": str(folder)}


@pytest.mark.parametrize("registered", ["by a package", "by the option", "by the environment"])
def test_a_users_provider_is_saved_with_the_model_and_resumes_exactly(
    registered: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    option = OPTION if registered == "by the option" else []
    environment = install(tmp_path / "site") if registered == "by a package" else {}
    if registered == "by the environment":
        environment = {"MEGATRON_DATASTATES_PROVIDERS": FUNCTION}
    whole, resumed = Checkpoints(tmp_path / "whole"), Checkpoints(tmp_path / "resumed")
    saving = ["--save-interval", str(SAVED_AT), "--async-save"]
    loading = ["--load", whole.root, "--ckpt-step", str(SAVED_AT), "--dist-ckpt-strictness", "raise_all"]

    pretraining.run(*HOW, *option, "--save", whole.root, *saving, environment=environment)
    ending = pretraining.run(
        *HOW, *option, "--save", resumed.root, *saving, *loading, environment=environment
    )

    assert ending.resumed_from(reference("tp2")) == SAVED_AT
    assert ending.differences(reference("tp2")) == []
    assert state_of(whole, SAVED_AT) == state_of_steps(SAVED_AT)
    assert state_of(resumed, STEPS) == state_of(whole, STEPS) == state_of_steps(STEPS)


def state_of(checkpoints: Checkpoints, iteration: int) -> list[object]:
    """Returns what a checkpoint has of the provider: the table, and each rank's count and log."""
    checkpoint = ds.open(checkpoints.at(iteration))
    counts = [checkpoint.read_object(f"steps.rank{rank}.count") for rank in range(RANKS)]
    logs = [b"".join(map(bytes, checkpoint.open_stream(f"steps.rank{rank}.log"))) for rank in range(RANKS)]
    return [checkpoint.read_tensor("steps.table")[:, :STEPS].tolist(), counts, logs]


def state_of_steps(steps: int) -> list[object]:
    rows = [
        [100 * (rank + 1) + step if step < steps else 0 for step in range(STEPS)] for rank in range(RANKS)
    ]
    log = b"".join(b"%d;" % (step + 1) for step in range(steps))
    return [rows, [{"count": steps}] * RANKS, [log] * RANKS]


def assert_named_on_all_ranks(failed: Outcome, action: str, cause: str) -> None:
    assert failed.exits == [1] * RANKS, failed.log[-3000:]
    for log in failed.log.split("--- rank")[1:]:
        message = f"rank 1: the state provider 'steps' (Steps) failed in the {action}: RuntimeError: {cause}"
        assert message in log.replace("ProviderError: ", ""), log[-3000:]


@pytest.mark.parametrize("mode", [["--async-save"], []], ids=["async", "sync"])
def test_entries_that_fail_on_one_rank_fail_the_save_on_all(
    mode: list[str], pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    saving = ["--save", checkpoints.root, "--save-interval", str(SAVED_AT), *mode]

    failed = pretraining.fail(*HOW, *OPTION, *saving, environment={"STEPS_FAIL_ON_RANK_1": "entries"})

    assert_named_on_all_ranks(failed, "save", "entries does not work today")
    assert checkpoints.published() == [] and checkpoints.tracked() is None


def test_a_restore_that_fails_on_one_rank_fails_the_load_on_all(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    pretraining.run(*HOW, *OPTION, "--save", checkpoints.root, "--save-interval", str(SAVED_AT))

    loading = [*HOW, *OPTION, "--load", checkpoints.root]
    failed = pretraining.fail(*loading, environment={"STEPS_FAIL_ON_RANK_1": "restore"})

    assert_named_on_all_ranks(failed, "load", "restore does not work today")


def test_fine_tuning_takes_the_weights_alone(pretraining: Pretraining, tmp_path: Path) -> None:
    checkpoints, tuned = Checkpoints(tmp_path / "ck"), Checkpoints(tmp_path / "tuned")
    pretraining.run(*HOW, *OPTION, "--save", checkpoints.root, "--save-interval", str(SAVED_AT))

    tuning = ["--load", checkpoints.root, "--finetune", "--save", tuned.root, "--exit-interval", "2"]
    pretraining.run(*HOW, *OPTION, *tuning)

    assert state_of(tuned, 2) == state_of_steps(2)


def test_a_function_that_does_not_exist_is_an_error_before_training(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    failed = pretraining.fail(*HOW, "--datastates-providers", "steps_provider:Missing", "--save", tmp_path)
    assert failed.exits == [1] * RANKS
    assert "--datastates-providers steps_provider:Missing cannot be imported: AttributeError" in failed.log
