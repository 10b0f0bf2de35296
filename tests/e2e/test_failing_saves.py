"""A save that fails on one rank in the training loop: all ranks raise the same error, and nothing is lost."""

import os
import re
import signal
from pathlib import Path

import pytest

from megatron_datastates.reports.reading import read_reports
from tests.e2e.conftest import STEPS, Reference
from tests.support.ranks import Outcome
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining
from tests.support.world import FILES_OF_MEGATRON

MODES = {"async": ["--async-save"], "sync": []}
SAVED_AT = {"first": 2, "second": 4, "last": 6}
PLANS = {
    "first": "sync:1:EIO",
    "second": "sync:2:EIO",
    "last": "sync:3:EIO",
}  # each save syncs its data file once


def train(root: Path, *arguments: str) -> list[str]:
    saving = ["--save", str(root), "--load", str(root), "--save-interval", "2"]
    how = [*LAYOUTS["tp2"], "--train-iters", str(STEPS), "--ckpt-format", "datastates"]
    return [*how, *saving, *arguments]


def failing(rank: int, plan: str) -> dict[str, str]:
    return {f"TINY_FAULTS_OF_RANK_{rank}": plan}


def errors(outcome: Outcome) -> list[str]:
    """Returns the message of the exception that ended each rank."""
    ending = r"^(?:\[rank\d\]: )?(?:\w+\.)*MegatronSaveFailedError: (.*)$"
    found = [re.findall(ending, log, re.MULTILINE) for log in ranks_of(outcome.log)]
    return [messages[-1] for messages in found if messages]


def ranks_of(log: str) -> list[str]:
    return log.split("--- rank")[1:]


@pytest.mark.conformance
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", PLANS)
def test_failure_on_one_rank_ends_all_with_the_same_error(
    which: str, mode: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    arguments = train(checkpoints.root, *MODES[mode])

    outcome = pretraining.fail(*arguments, environment=failing(1, PLANS[which]))

    assert outcome.exits == [1, 1], outcome.log[-3000:]
    found = errors(outcome)
    assert len(found) == 2 and len(set(found)) == 1, found
    assert "rank 1: sync" in found[0] and "Input/output error" in found[0]
    assert str(checkpoints.at(SAVED_AT[which])) in found[0] and "Nothing was published" in found[0]
    before = [iteration for iteration in SAVED_AT.values() if iteration < SAVED_AT[which]]
    assert checkpoints.published() == checkpoints.complete() == before
    assert checkpoints.tracked() == (before[-1] if before else None)
    assert {path.name for path in checkpoints.at(SAVED_AT[which]).iterdir()} == FILES_OF_MEGATRON
    if which == "second":
        resumed = pretraining.run(*arguments)
        assert resumed.resumed_from(reference("tp2")) == before[-1]
        assert resumed.differences(reference("tp2")) == []
        assert checkpoints.published() == [2, 4, 6]


# Of six saves, one per iteration, four fail, each at another stage.
STAGES = {
    0: "write manifest:1:ENOSPC,rename manifest:1:EIO",  # the second and the third
    1: "reserve:1:ENOSPC,open:5:EIO",  # the first, the fifth
}


@pytest.mark.conformance
@pytest.mark.parametrize("mode", MODES)
def test_failures_with_warn_cost_only_the_failed_saves(
    mode: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    arguments = train(checkpoints.root, *MODES[mode], "--save-interval", "1")
    plans = failing(0, STAGES[0]) | failing(1, STAGES[1])

    ending = pretraining.run(*arguments, "--datastates-on-failure", "warn", environment=plans)

    assert ending.differences(reference("tp2")) == [], "failed saves changed what was trained"
    assert checkpoints.published() == checkpoints.complete() == [4, 6]
    assert checkpoints.tracked() == 6
    logs = ranks_of(ending.log)
    own = [re.findall(r"save \S+ on rank (\d): (\w+)", log) for log in logs]
    assert [len(of_rank) for of_rank in own] == [2, 2], "each rank logs what has failed on it"
    assert own[1] == [("1", "reserve"), ("1", "open")]
    assert "Training continues" not in logs[1], "nor what is in the log of rank 0"
    warnings = [line for line in logs[0].splitlines() if "Training continues" in line]
    causes = ["rank 1: reserve", "rank 0: ", "rank 0: ", "rank 1: open"]
    assert len(warnings) == len(causes), warnings
    for iteration, cause, line in zip((1, 2, 3, 5), causes, warnings, strict=True):
        assert cause in line and str(checkpoints.at(iteration)) in line
    if mode == "sync":  # else the order in which they end is not known
        none = ", and none was published before."
        counts = ["", f"2 saves have failed{none}", f"3 saves have failed{none}", ""]
        for count, line in zip(counts, warnings, strict=True):
            assert count in line and ("saves have failed" in line) is bool(count)
    resumed = pretraining.run(*arguments, "--ckpt-step", "4")
    assert resumed.resumed_from(reference("tp2")) == 4
    assert checkpoints.published() == [4, 5, 6], "directories of failed saves can be used again"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", [[], ["--exit-interval", "6"]], ids=["end", "exit"])
def test_a_run_whose_last_save_failed_does_not_end_as_if_it_were_saved(
    end: list[str], mode: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "ck")
    arguments = [*train(checkpoints.root, *MODES[mode], *end), "--datastates-on-failure", "warn"]
    outcome = pretraining.fail(*arguments, environment=failing(1, "sync:2:EIO,sync:3:EIO"))
    assert outcome.exits == [1, 1], outcome.log[-3000:]
    found = errors(outcome)
    assert len(found) == 2 and len(set(found)) == 1, found
    assert str(checkpoints.at(6)) in found[0] and "It was the last save of the run" in found[0]
    assert "2 saves have failed since iter_0000002 was published" in found[0]
    assert checkpoints.published() == [2] and checkpoints.tracked() == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_directory_that_cannot_be_made_fails_its_save_on_all_ranks(
    mode: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    """As on a full disk, where Megatron's attempt to make it would end the job: rank 0 alone makes it."""
    checkpoints = Checkpoints(tmp_path / "ck")
    checkpoints.root.mkdir()
    checkpoints.at(2).touch()  # what is there is no directory
    arguments = train(checkpoints.root, *MODES[mode])

    ending = pretraining.run(*arguments, "--datastates-on-failure", "warn")

    assert ending.differences(reference("tp2")) == []
    (warning,) = [line for line in ending.log.splitlines() if "Training continues" in line]
    assert "failed on 2 of 2 ranks: rank 0: make directory" in warning
    assert checkpoints.published() == checkpoints.complete() == [4, 6]
    assert checkpoints.tracked() == 6


def test_failing_non_persistent_save_with_warn_leaves_its_tracker(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    every_step = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "1"]
    how = ["--async-save", "--datastates-on-failure", "warn", "--exit-interval", "3"]
    outcome = pretraining.fail(*train(root, *how, *every_step), environment=failing(1, "sync:3:EIO"))
    assert "Training continues" in outcome.log
    assert outcome.exits == [1, 1] and "It was the last save of the run" in errors(outcome)[0]
    assert Checkpoints(root).tracked() == 2
    assert Checkpoints(root / "non_persistent").published() == [1]
    assert Checkpoints(root / "non_persistent").tracked() == 1


def test_saves_that_come_too_early_are_skipped_and_counted_but_never_the_last(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """The first save takes seconds to sync, and saves are made in every iteration."""
    root = tmp_path / "ck"
    how = [*LAYOUTS["tp2"], "--train-iters", "8", "--ckpt-format", "datastates", "--async-save"]
    skipping = ["--save", str(root), "--save-interval", "1", "--datastates-while-saving", "skip"]
    slow = failing(0, "sync:1:stall=4000")
    reports = tmp_path / "reports.jsonl"
    skipping += ["--datastates-report-file", str(reports)]
    saved = pretraining.run(*how, *skipping, "--exit-interval", "6", environment=slow)
    published = Checkpoints(root).published()
    skipped = re.findall(
        r"iteration (\d+) is not saved, because the save to .*iter_0000001 is not", saved.log
    )
    assert published[0] == 1 and published[-1] == 6 and "skipped so far: 1)" in saved.log
    assert sorted({*map(int, skipped)} | {*published}) == list(range(1, 7)) and skipped
    found = read_reports([reports])
    assert [skip.iteration for skip in found.skips] == [*map(int, skipped)]
    assert [save.iteration for save in found.saves] == published
    resumed = pretraining.run(*how, "--load", str(root))
    assert resumed.resumed_from(saved) == 6


def test_a_skipped_save_is_made_after_all_where_a_signal_ends_the_run(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """The first save takes seconds to sync; meanwhile the run is to end, in an iteration with a save."""
    root = tmp_path / "ck"
    how = [*LAYOUTS["tp2"], "--ckpt-format", "datastates", "--async-save", "--exit-signal-handler"]
    skipping = ["--save", str(root), "--save-interval", "1", "--datastates-while-saving", "skip"]
    slow = failing(0, "sync:1:stall=6000")
    running = pretraining.start(
        *how, *skipping, "--train-iters", "40", "--step-delay-ms", "100", environment=slow
    )
    running.job.wait_until(lambda: "is not saved, because" in running.job.log(), 60)
    os.kill(running.job.pids[1], signal.SIGTERM)
    saved = running.finish()
    assert saved.log.count("the save that was just skipped is made after all") == 1, "rank 0 says it"
    last = Checkpoints(root).tracked()
    assert last is not None and Checkpoints(root).published() == [1, last]
    resumed = pretraining.run(
        *how, "--train-iters", "40", "--load", str(root), "--exit-interval", str(last + 1)
    )
    assert resumed.resumed_from(saved) == last


@pytest.mark.parametrize("mutation", ["reloaded_module", "replaced_strategy"])
def test_a_save_that_others_have_taken_out_of_our_hands_raises(
    mutation: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    """Megatron then saves in its own format."""
    how: list[str | Path] = ["--save", tmp_path / "ck", "--ckpt-format", "datastates"]
    failed = pretraining.fail(*how, environment={"TINY_MUTATION": f"{mutation}:1"})
    assert all(failed.exits)
    assert "iteration 2 was not saved in the datastates format, but in another one" in failed.log
    assert Checkpoints(tmp_path / "ck").published() == []
