"""The collective calls that a save and a load make in Megatron's own training loop."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, RECIPES
from tests.support.world import FILES_OF_MEGATRON

pytestmark = pytest.mark.conformance

# Before 0.19 Megatron waits for rank 0, which writes the common state into a file.
WHEN_WRITING_FILES = {"barrier": 1} if FILES_OF_MEGATRON else {}
PARTS = {"save_checkpoint", "start", "polls", "finalize"}


def test_only_the_first_save_of_a_run_makes_collective_calls_before_it_returns(
    forge: RankForge, tmp_path: Path
) -> None:
    report_file = tmp_path / "report.jsonl"
    arguments = [*(RECIPES / "tiny.args").read_text().split(), *LAYOUTS["tp2"], "--async-save"]
    arguments += ["--save", str(tmp_path / "ck"), "--save-interval", "3", "--train-iters", "9"]
    arguments += ["--ckpt-format", "datastates", "--datastates-report-file", str(report_file)]
    logs = tmp_path / "logs"
    outcome = forge.run("counting_rank:main", ranks=2, logs=logs, arguments=[arguments, str(logs)])
    outcome.succeeded()
    for rank in range(2):
        counts = json.loads((logs / f"rank{rank}.json").read_text())
        first, second, third = (counts[f"save {number}"] for number in (1, 2, 3))
        assert "broadcast" not in first, "the run's id came when training began"
        assert first["all_gather_object"] == 2, "Megatron's own checks of a new structure"
        assert second == third == WHEN_WRITING_FILES, "--ckpt-assume-constant-structure is our default"
        # Each poll sums flags; Megatron sums once more and waits twice when it finalizes. This package joins
        # records of fixed size once for each publication, and the layouts for the first one only.
        assert counts["poll"]["all_reduce of records"] == 3 + 1
        assert counts["poll"].keys() <= {"all_reduce of records", "all_reduce", "barrier"}
    saves = [json.loads(line) for line in report_file.read_text().splitlines()]
    assert [save["iteration"] for save in saves] == [3, 6, 9]
    for save in saves:
        assert save["held_parts_ms"].keys() >= PARTS, "all that holds the trainer is reported"
        outermost = ("save_checkpoint", "until_poll", "polls", "fence", "finalize")
        assert save["held_parts_ms"].keys() >= {*outermost} - {"fence"}, (
            "copies may have ended before the step"
        )
        parts = [save["held_parts_ms"].get(part, 0.0) for part in outermost]
        assert save["held_ms"] == pytest.approx(sum(parts), abs=0.1)


def counts_of_load(forge: RankForge, folder: Path, *how: str) -> dict[str, int]:
    """Returns rank 0's counts in load_checkpoint of a run that resumes from a checkpoint of another."""
    arguments = [*(RECIPES / "tiny.args").read_text().split(), *LAYOUTS["dp2"], *how]
    arguments += ["--save", str(folder / "ck"), "--load", str(folder / "ck"), "--save-interval", "2"]
    for name, exit_at in (("save", "2"), ("load", "3")):
        logs = folder / name
        everything = [*arguments, "--exit-interval", exit_at]
        forge.run("counting_rank:main", ranks=2, logs=logs, arguments=[everything, str(logs)]).succeeded()
    counts: dict[str, int] = json.loads((logs / "rank0.json").read_text())["load"]
    return counts


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "more"), [([], 4), (["--ckpt-fully-parallel-load"], 5)], ids=["plain", "parallel"]
)
def test_load_makes_four_or_five_reductions_more_than_with_torch_dist(
    options: list[str], more: int, forge: RankForge, tmp_path: Path
) -> None:
    """Of releases, after arguments and common state, of layouts, before an exchange, at the end."""
    stock = counts_of_load(forge, tmp_path / "stock", "--ckpt-format", "torch_dist", *options)
    ours = counts_of_load(forge, tmp_path / "ours", "--ckpt-format", "datastates", *options)
    expected = stock | {"all_reduce": stock.get("all_reduce", 0) + more}
    if FILES_OF_MEGATRON:  # these releases gather more for torch_dist
        assert ours.keys() <= expected.keys() and ours["all_reduce"] == expected["all_reduce"]
        assert all(count <= expected[call] for call, count in ours.items())
    else:
        assert ours == expected
