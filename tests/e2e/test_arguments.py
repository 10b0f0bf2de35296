"""Megatron's command line with our format: what is accepted, refused and explained."""

from pathlib import Path

import pytest

from tests.support.ranks import Outcome, RankForge
from tests.support.tiny import RECIPES, Checkpoints

TINY = (RECIPES / "tiny.args").read_text().split()


@pytest.fixture
def parse(forge: RankForge, tmp_path: Path):
    def run(*arguments: str, environment: dict[str, str] | None = None) -> Outcome:
        job = forge.start(
            "tiny_rank:main",
            ranks=1,
            logs=tmp_path,
            arguments=[[*TINY, "--ckpt-format", "datastates", *arguments], str(tmp_path)],
            environment=environment,
        )
        return job.wait(60)

    return run


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--datastates-slot-size", "3000000", "a multiple of 1MiB, from 1MiB to 1GiB"),
        ("--datastates-staging-memory", "a lot", "2GiB, 500MB or 4096"),
        ("--datastates-staging-memory", "1MiB", "at least 8MiB"),
        ("--datastates-on-failure", "ignore", "raise or warn"),
        ("--datastates-direct-io", "maybe", "on or off"),
        ("--datastates-write-threads", "0", "from 1 to 64"),
        ("--datastates-fence-deadline", "-1", "a number of seconds above 0"),
    ],
)
def test_value_out_of_range_is_refused_with_the_range(parse, option: str, value: str, allowed: str) -> None:
    outcome = parse(option, value)
    assert outcome.exits == [2]
    assert f"argument {option}: " in outcome.log and value in outcome.log and allowed in outcome.log


def test_option_that_does_not_exist_is_refused(parse) -> None:
    outcome = parse("--datastates-slot-sizes", "4MiB")
    assert outcome.exits == [2]
    assert "--datastates-slot-sizes" in outcome.log


def test_bad_value_in_the_environment_is_refused_with_the_variables_name(parse) -> None:
    outcome = parse(environment={"MEGATRON_DATASTATES_SLOT_SIZE": "3"})
    assert outcome.exits == [1]
    assert "MEGATRON_DATASTATES_SLOT_SIZE='3'" in outcome.log and "a multiple of 1MiB" in outcome.log


def test_help_lists_the_format_and_its_options(forge: RankForge, tmp_path: Path) -> None:
    shown = " ".join(forge.run("help_rank:main", ranks=1, logs=tmp_path).succeeded().log.split())
    assert "torch_dist,torch_dcp,fsdp_dtensor,datastates}" in shown
    assert "--datastates-staging-memory SIZE" in shown and "25% of the free memory" in shown


@pytest.mark.parametrize("option", ["--save", "--load"])
def test_object_store_needs_megatrons_option(parse, option: str) -> None:
    outcome = parse(option, "msc://bucket/run")
    assert outcome.exits == [1]
    assert f"{option} msc://bucket/run is in an object store: give --enable-msc, too" in outcome.log


def test_object_store_is_refused_for_non_persistent_checkpoints(parse) -> None:
    outcome = parse("--non-persistent-global-ckpt-dir", "msc://bucket/run")
    assert outcome.exits == [1]
    assert "non-persistent checkpoints are not saved to an object store (msc://bucket/run)" in outcome.log


def test_last_format_given_wins(parse, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "ck"), "--train-iters", "1", "--save-interval", "1"]
    parse(*save, "--ckpt-format", "torch_dist").succeeded()
    Checkpoints(tmp_path / "ck").assert_format(1, "torch_dist")
