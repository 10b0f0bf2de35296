"""Ranks whose environments differ, in the training loop: all raise the same error before the first step."""

import re
from pathlib import Path

import pytest

from tests.support.tiny import LAYOUTS, Pretraining

pytestmark = pytest.mark.conformance
ERROR = re.compile(r"^(?:\[rank\d\]: )?(?:\w+\.)*RanksDifferError: (.*)$", re.MULTILINE)


@pytest.mark.parametrize("when", ["at the beginning of training", "at the load"])
def test_ranks_that_would_skip_other_saves_do_not_train(
    when: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    root = tmp_path / "ck"
    arguments = [*LAYOUTS["dp2"], "--ckpt-format", "datastates", "--async-save", "--save", str(root)]
    arguments += ["--save-interval", "1", "--datastates-copy-limit", "200kB"]
    if when == "at the load":
        arguments += ["--load", str(root)]
        pretraining.run(*arguments, "--train-iters", "2")
    own = {"TINY_VARIABLE_OF_RANK_1": "MEGATRON_DATASTATES_WHILE_SAVING=skip"}
    before = sorted(root.glob("iter_*"))

    outcome = pretraining.fail(*arguments, "--train-iters", "4", environment=own)

    assert outcome.exits == [1, 1], outcome.log[-3000:]
    errors = [ERROR.findall(log)[-1] for log in outcome.log.split("--- rank")[1:]]
    assert len(set(errors)) == 1
    assert errors[0].startswith("ranks differ: on rank 1 (node ")
    assert "--datastates-while-saving is 'skip', not 'wait' as on rank 0 (node " in errors[0]
    assert sorted(root.glob("iter_*")) == before
    assert "wrap_save_checkpoint" not in outcome.log
    is_at_load = "wrap_load_checkpoint" in outcome.log
    assert is_at_load is (when == "at the load")
