"""Checkpoints load into other parallel layouts as those of torch_dist do, bit for bit."""

from pathlib import Path

import pytest

from tests.support.tiny import LAYOUTS, Checkpoints, Ending, Pretraining

CHAIN = {2: "tp2", 4: "pp2", 6: "dp2"}
COMMON = ["--train-iters", "6", "--dist-ckpt-optim-fully-reshardable"]


def reshard_along_chain(pretraining: Pretraining, root: Path, ckpt_format: str) -> list[Ending]:
    """Takes two steps in each layout of CHAIN; each run loads what the one before it saved."""
    checkpoints = Checkpoints(root)
    endings = []
    for stop, layout in CHAIN.items():
        ending = pretraining.run(
            *(*LAYOUTS[layout], *COMMON, "--exit-interval", str(stop)),
            *("--save", root, "--load", root, "--ckpt-format", ckpt_format),
        )
        assert [rank.begun_at for rank in ending.ranks] == [stop - 2, stop - 2]
        checkpoints.assert_format(stop, ckpt_format)
        endings.append(ending)
    return endings


@pytest.mark.long
@pytest.mark.conformance
def test_chain_of_layouts_trains_as_with_torch_dist(
    ckpt_format: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    ours = reshard_along_chain(pretraining, tmp_path / "ours", ckpt_format)
    stock = reshard_along_chain(pretraining, tmp_path / "stock", "torch_dist")
    for layout, one, other in zip(CHAIN.values(), ours, stock, strict=True):
        assert one.differences(other) == [], layout
        for mine, theirs in zip(one.ranks, other.ranks, strict=True):
            assert mine.begun == theirs.begun, layout
