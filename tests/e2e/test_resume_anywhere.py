"""Runs of Megatron's loop resume from the default optimizer layout in any layout, with no flag and no gather.

The truth is the same chain of runs that save fully reshardable state, bit for bit.
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import has_optimizer_maps
from tests.support.tiny import LAYOUTS, Checkpoints, Ending, Pretraining

OFFLOADED = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
CHAIN = {2: "tp2", 4: "pp2", 6: "dp2"}
loadable = pytest.mark.skipif(
    metadata.version("megatron-core") < "0.19",
    reason="torch_dist's own checkpoint of it is refused by torch.load",
)
HOW = {
    "swiglu": ["--swiglu"],
    "untied": ["--untie-embeddings-and-output-weights"],
    "half offloaded": pytest.param([*OFFLOADED, "--optimizer-offload-fraction", "0.5"], marks=loadable),
    # The scale doubles every third step, so at each resume it has been good for some.
    "loss scaler": ["--fp16", "--initial-loss-scale", "4096", "--loss-scale-window", "3"],
}
SAID = "holds the optimizer state in other buckets than this run's"


def follow(pretraining: Pretraining, root: Path, *how: str, ckpt_format: str = "datastates") -> list[Ending]:
    """Takes two steps in each layout of CHAIN; each run loads what the one before it saved."""
    checkpoints, endings = Checkpoints(root), []
    for stop, layout in CHAIN.items():
        ending = pretraining.run(
            *(*LAYOUTS[layout], *how, "--train-iters", "6", "--exit-interval", str(stop)),
            *("--save", root, "--load", root, "--ckpt-format", ckpt_format),
        )
        assert [rank.begun_at for rank in ending.ranks] == [stop - 2, stop - 2]
        checkpoints.assert_format(stop, ckpt_format)
        endings.append(ending)
    return endings


@pytest.mark.long
@pytest.mark.conformance
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_chain_of_default_layouts_trains_as_fully_reshardable_state_does(
    how: list[str], pretraining: Pretraining, tmp_path: Path
) -> None:
    ours = follow(pretraining, tmp_path / "ours", *how)
    stock = follow(pretraining, tmp_path / "stock", *how, RESHARDABLE, ckpt_format="torch_dist")
    for layout, one, other in zip(CHAIN.values(), ours, stock, strict=True):
        assert [rank.begun for rank in one.ranks] == [rank.begun for rank in other.ranks], layout
        assert one.differences(other) == [], layout
    assert [ending.log.count(SAID) for ending in ours] == [0, 1, 1]
    assert has_optimizer_maps(Checkpoint.open(Checkpoints(tmp_path / "ours").at(6)))


@pytest.mark.long
@pytest.mark.conformance
def test_chain_of_fully_reshardable_layouts_trains_as_with_torch_dist(
    ckpt_format: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    ours = follow(pretraining, tmp_path / "ours", RESHARDABLE, ckpt_format=ckpt_format)
    stock = follow(pretraining, tmp_path / "stock", RESHARDABLE, ckpt_format="torch_dist")
    for layout, one, other in zip(CHAIN.values(), ours, stock, strict=True):
        assert one.differences(other) == [], layout
        for mine, theirs in zip(one.ranks, other.ranks, strict=True):
            assert mine.begun == theirs.begun, layout


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_run_without_mixed_precision_resumes_as_from_fully_reshardable_state(
    layout: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    """From its default layout, Megatron resumes no such run: it writes to what requires gradients."""
    endings = []
    for name, how in {"datastates": [], "torch_dist": [RESHARDABLE]}.items():
        place = ["--save", tmp_path / name, "--load", tmp_path / name, "--ckpt-format", name, *how]
        pretraining.run(*LAYOUTS["tp2"], *place, "--exit-interval", "2", without=["--bf16"])
        endings.append(pretraining.run(*LAYOUTS[layout], *place, without=["--bf16"]))
    ours, stock = endings
    assert [rank.begun_at for rank in ours.ranks] == [2, 2]
    assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
    assert ours.differences(stock) == []


@pytest.mark.long
@pytest.mark.skipif(
    metadata.version("megatron-core") < "0.19", reason="no hybrid model loads a GPT's checkpoint"
)
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_checkpoint_of_a_gpt_resumes_as_a_hybrid_model(
    layout: str, pretraining: Pretraining, tmp_path: Path
) -> None:
    """Its optimizer's state included, which Megatron loads only if it is stored as fully reshardable."""
    gpt = [*LAYOUTS["tp2"], "--save", tmp_path / "ours", "--ckpt-format", "datastates", "--swiglu"]
    saved = pretraining.run(*gpt)
    datastates("convert", tmp_path / "ours", tmp_path / "stock", "--all", "--optimizer", "fully-reshardable")
    hybrid = [*LAYOUTS[layout], "--hybrid-layer-pattern", "*-*-", "--swiglu", "--ckpt-step", "2"]
    ours, stock = (
        pretraining.run(
            *(*hybrid, "--load", tmp_path / folder, "--ckpt-format", name), environment={"TINY_HYBRID": "1"}
        )
        for folder, name in {"ours": "datastates", "stock": "torch_dist"}.items()
    )
    assert "optimizer state will be loaded" in ours.log and "model lacks" not in ours.log
    assert (SAID in ours.log) == (layout == "pp2"), "else the buckets hold the same under the same names"
    assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
    assert ours.differences(stock) == []
    if layout == "tp2":  # sums are of the same order, and the second step has the state of the first
        for step in ("step 3", "step 4"):
            losses = [
                {name: value for name, value in run.ranks[0].states[step].items() if name.startswith("loss")}
                for run in (saved, ours)
            ]
            assert losses[0] and losses[0] == losses[1]


@pytest.mark.skipif(metadata.version("megatron-core") < "0.19", reason="older ones were not tried")
def test_the_optimizer_of_a_multimodal_model_resumes_in_another_layout(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """It puts its name before all keys, and makes an object of the sharding type."""
    endings = []
    for name, how in {"datastates": [], "torch_dist": [RESHARDABLE]}.items():
        run = ["--ckpt-format", name, *how, "--save", tmp_path / name, "--load", tmp_path / name]
        mimo = {"TINY_MIMO_OPTIMIZER": "1"}
        pretraining.run(*LAYOUTS["tp2"], *run, "--exit-interval", "2", environment=mimo)
        endings.append(pretraining.run(*LAYOUTS["pp2"], *run, environment=mimo))
    ours, stock = endings
    assert SAID in ours.log
    assert [rank.begun_at for rank in ours.ranks] == [2, 2]
    assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
    assert ours.differences(stock) == []


@pytest.mark.long
def test_steps_of_an_offloaded_optimizer_are_restored_in_its_own_layout(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    """As from fully reshardable state: from its default layout, Megatron restores other steps."""
    layout = [*LAYOUTS["tp2"], *OFFLOADED]
    endings = []
    for name, how in {"datastates": [], "torch_dist": [RESHARDABLE]}.items():
        place = ["--save", tmp_path / name, "--load", tmp_path / name, "--ckpt-format", name, *how]
        pretraining.run(*layout, *place, "--exit-interval", "2")
        endings.append(pretraining.run(*layout, *place))
    ours, stock = endings
    assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
    assert ours.differences(stock) == []


@pytest.mark.long
@pytest.mark.conformance
def test_stock_megatron_resumes_in_any_layout_from_a_converted_checkpoint(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    saved = [*LAYOUTS["tp2"], "--save", tmp_path / "ours", "--ckpt-format", "datastates", "--swiglu"]
    pretraining.run(*saved, "--exit-interval", "2")
    convert = {
        "stock": ["ours", "--optimizer", "fully-reshardable", "--verify"],
        "plain": ["ours", "--verify"],
        "back": ["plain", "--verify"],
    }
    for target, (source, *options) in convert.items():
        datastates("convert", tmp_path / source, tmp_path / target, "--all", *options)
    endings = [
        pretraining.run(
            *(*LAYOUTS["pp2"], "--load", tmp_path / folder, "--ckpt-format", name, "--swiglu"),
            *("--dist-ckpt-strictness", "log_all"),
        )
        for folder, name in {"ours": "datastates", "back": "datastates", "stock": "torch_dist"}.items()
    ]
    assert [rank.begun_at for rank in endings[0].ranks] == [2, 2]
    unexpected = re.compile(r"dp_group_idx|datastates_map|optimizer\.state")  # log_all lists such keys
    assert not any(unexpected.search(ending.log) for ending in endings)
    for other in endings[1:]:
        assert [rank.begun for rank in other.ranks] == [rank.begun for rank in endings[0].ranks]
        assert other.differences(endings[0]) == []


def test_weights_that_the_model_lacks_are_named(pretraining: Pretraining, tmp_path: Path) -> None:
    """From torch_dist's default layout, Megatron resumes no such run: its buckets are smaller."""
    place = ["--save", tmp_path, "--load", tmp_path, "--ckpt-format", "datastates"]
    pretraining.run(*LAYOUTS["pp2"], *place, "--exit-interval", "2")
    endings = {
        layout: pretraining.run(*LAYOUTS[layout], *place[2:], "--disable-bias-linear", *how)
        for layout, how in {"tp2": [], "pp2": ["--ckpt-fully-parallel-load"]}.items()
    }
    for ending in endings.values():
        assert ending.ranks[0].begun_at == 2
        warnings = re.findall(r"has (\d+) tensors that this run's model lacks: .*", ending.log)
        assert warnings == ["4"], "once, of the whole model"
        assert "'decoder.layers.mlp.linear_fc1.bias', 'decoder.layers.mlp.linear_fc2.bias', " in ending.log
    moved = pretraining.run(*LAYOUTS["tp2"], *place[2:])
    assert SAID in moved.log and "model lacks" not in moved.log


def test_a_checkpoint_without_a_map_is_refused_with_what_is_missing(
    pretraining: Pretraining, tmp_path: Path
) -> None:
    pretraining.run(
        *LAYOUTS["tp2"], "--save", tmp_path, "--ckpt-format", "torch_dist", "--exit-interval", "2"
    )
    outcome = pretraining.fail(*LAYOUTS["pp2"], "--load", tmp_path, "--ckpt-format", "datastates")
    assert all(outcome.exits)
    assert "has no optimizer map, which would say where each parameter lies" in outcome.log


def datastates(*arguments: str | Path) -> None:
    """Runs the command."""
    command = [sys.executable, "-m", "megatron_datastates", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
