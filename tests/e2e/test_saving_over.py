"""A save over a checkpoint of another format: nothing of the older one is loaded."""

from pathlib import Path

import pytest

from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining

HOW = {
    "torch_dist": ["--ckpt-format", "torch_dist"],
    "datastates": ["--ckpt-format", "datastates", "--async-save"],
}


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [("torch_dist", "datastates"), ("datastates", "torch_dist")])
def test_later_save_is_loaded(first: str, second: str, pretraining: Pretraining, tmp_path: Path) -> None:
    """Another seed makes other weights, so that a mixture would show."""
    checkpoints = Checkpoints(tmp_path / "ck")
    arguments = [*LAYOUTS["tp2"], "--train-iters", "6", "--save", checkpoints.root]
    stop = ["--exit-interval", "4"]
    earlier = pretraining.run(*arguments, *stop, *HOW[first], "--seed", "7")
    if first == "torch_dist":
        # As Megatron before 0.19 leaves it. Megatron 0.19 prefers it to the common state in the checkpoint.
        (checkpoints.at(4) / "common.pt").write_bytes(b"stale")

    later = pretraining.run(*arguments, *stop, *HOW[second])

    assert earlier.differences(later) != []
    resumed = pretraining.run(*arguments, "--load", checkpoints.root, *HOW[first], "--exit-interval", "5")
    assert resumed.resumed_from(later) == 4
    if second != "torch_dist":
        checkpoints.assert_format(4, "datastates")
        assert not (checkpoints.at(4) / "common.pt").exists()
