"""`datastates convert` between runs of Megatron's own loop, which resume bit for bit from either format."""

from pathlib import Path

import pytest

from megatron_datastates.convert.job import convert, no_progress
from megatron_datastates.convert.limits import Limits
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import plan_conversion
from megatron_datastates.convert.run import ConversionRequest, convert_run
from megatron_datastates.convert.team import Team
from tests.e2e.test_moe import EP2, EXPERTS
from tests.support.tiny import LAYOUTS, TRACKER, Checkpoints, Ending, Pretraining

FULLY_RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
RUNS = {
    "tp2": LAYOUTS["tp2"],
    "tp2, fully reshardable": [*LAYOUTS["tp2"], *FULLY_RESHARDABLE],
    "pp2": LAYOUTS["pp2"],
    "dp2, fully reshardable": [*LAYOUTS["dp2"], *FULLY_RESHARDABLE],
    "experts": [*EXPERTS, *EP2],
}


@pytest.mark.conformance
@pytest.mark.parametrize("name", RUNS)
def test_run_resumes_exactly_from_a_converted_checkpoint_and_from_one_converted_back(
    name: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    stock = Checkpoints(tmp_path / "stock")
    saved = pretraining.run(*RUNS[name], "--ckpt-format", "torch_dist", "--save", stock.root)
    everything = ConversionRequest(verify=True)
    convert_run(stock.root, tmp_path / "ours", everything, Team(), lambda plan, stage: no_progress)
    convert_run(tmp_path / "ours", tmp_path / "back", everything, Team(), lambda plan, stage: no_progress)

    for root, ckpt_format in ((tmp_path / "ours", "datastates"), (tmp_path / "back", "torch_dist")):
        made = Checkpoints(root)
        made.assert_format(2, ckpt_format)
        assert made.tracked() == stock.tracked()
        resumed = resume(pretraining, root, name, ckpt_format)
        assert resumed.resumed_from(saved) == 2
        assert resumed.differences(saved) == []


@pytest.mark.long
@pytest.mark.conformance
def test_run_resumes_exactly_from_a_conversion_to_another_number_of_files(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    ours = Checkpoints(tmp_path / "ours")
    saved = pretraining.run(*RUNS["tp2"], "--ckpt-format", "datastates", "--save", ours.root)
    for ckpt_format, ranks in (("datastates", 1), ("datastates", 5), ("torch_dist", 3)):
        made = Checkpoints(tmp_path / f"{ckpt_format} {ranks}")
        plan = plan_conversion(open_source(ours.at(2)), made.at(2), format=ckpt_format, ranks=ranks)
        convert(plan, Limits(), verify=True)
        (made.root / TRACKER).write_text("2")
        resumed = resume(pretraining, made.root, "tp2", ckpt_format)
        assert resumed.resumed_from(saved) == 2
        assert resumed.differences(saved) == []


def resume(pretraining: Pretraining, root: Path, name: str, ckpt_format: str) -> Ending:
    how = ["--ckpt-format", ckpt_format, "--load", root, "--ckpt-step", "2"]
    return pretraining.run(*RUNS[name], *how)
