"""datastates plan: its bytes are those of the checkpoints that Megatron's own training loop writes."""

import shlex
from pathlib import Path

import pytest

from megatron_datastates.sizing.arguments import read_arguments
from megatron_datastates.sizing.planning import Grid, Plan, Storage, plan_arguments
from tests.support.tiny import RECIPES, Checkpoints, Pretraining

MODEL = shlex.split("--num-layers 4 --hidden-size 256 --train-iters 2")
LLAMA = shlex.split(
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 2 --ffn-hidden-size 704 --kv-channels 32"
)
EXPERTS = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights "
    "--moe-ffn-hidden-size 384 --moe-layer-freq ([0]*1+[1]*3)"
)
TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
VPP2 = ["--num-virtual-stages-per-pipeline-rank", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
BIASED_EXPERTS = shlex.split("--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather")
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]


def planned(arguments: list[str]) -> Plan:
    """Returns the plan of a run of two ranks."""
    read = read_arguments([RECIPES / "tiny.args"], arguments)
    tensor = read.number("tensor-model-parallel-size", 1)
    pipeline = read.number("pipeline-model-parallel-size", 1)
    grid = Grid(
        tensor, pipeline, 2 // tensor // pipeline, expert=read.number("expert-model-parallel-size", 1)
    )
    return plan_arguments(read, grid, Storage(1e9), 1e9)


@pytest.mark.parametrize(
    "arguments",
    [
        TP2,
        PP2,
        [],
        [*LLAMA, *TP2],
        [*LLAMA, *PP2],
        [*LLAMA, *RESHARDABLE, *TP2],
        ["--position-embedding-type", "learned_absolute", "--max-position-embeddings", "1024", *TP2],
        [*EXPERTS, *EP2],
        [*EXPERTS, *PP2],
        [*BIASED_EXPERTS, *EP2],
        [*EXPERTS, *PP2, *VPP2, "--moe-layer-freq", "2"],
        ["--position-embedding-type", "learned_absolute", "--use-rotary-position-embeddings"],
        ["--quick-geglu", "--attention-output-gate", *TP2],
        ["--padded-vocab-size", "4096", "--no-ckpt-fully-parallel-save"],
        [*RESHARDABLE, "--no-ckpt-fully-parallel-save"],
    ],
    ids=" ".join,
)
def test_a_plan_is_within_one_percent_of_the_checkpoint(
    arguments: list[str], pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    everything = [*MODEL, *arguments]
    pretraining.run(*everything, "--ckpt-format", "datastates", "--save", checkpoints.root)
    plan = planned(everything)
    files = [path.stat().st_size for path in checkpoints.at(2).glob("data-*")]
    assert plan.checkpoint_bytes == pytest.approx(sum(files), rel=0.01)
    # Megatron spreads weights over data-parallel ranks as whole tensors.
    assert plan.largest_rank_bytes == pytest.approx(max(files), rel=0.03)
    assert plan.files == len(list(checkpoints.at(2).iterdir()))
