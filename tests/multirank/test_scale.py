"""The simulator of large checkpoints (benchmarks/scale) predicts what real ranks store."""

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.scale.models import Model, Parallel
from benchmarks.scale.ranks import rank_states
from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.multirank.layouts import EP2, PP2, TP2, Layout
from tests.support.fragments import fragments_of
from tests.support.world import World

RANKS, BUCKET = 4, 4000
PLAIN: Layout = {"num_query_groups": 2, "add_bias_linear": False, "normalization": "RMSNorm"}
EXPERTS: Layout = PLAIN | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "allgather",
    "expert_tensor_parallel_size": 1,
}
TINY = Model("tiny", layers=4, hidden=32, ffn=48, heads=4, groups=2, vocabulary=100, vocabulary_divisor=8)
TINY_EXPERTS = dataclasses.replace(TINY, ffn=24, experts=4)
OTHERS = (
    "rng_state/",
    "core_attention",
    "final_layernorm._extra",
)  # of the training loop, of Transformer Engine

Contents = tuple[set[tuple[Any, ...]], dict[str, int]]


def stored(directory: Path) -> Contents:
    """Returns (key, dtype, global shape, offset, shape, file) per fragment, and the file of each object."""
    checkpoint = Checkpoint.open(directory)
    assert [file.rank for file in checkpoint.manifest.files] == list(range(RANKS))
    found = {
        (*dataclasses.astuple(fragment), extent.file)
        for key, entry in checkpoint.index.tensors.items()
        for fragment, extent in fragments_of(entry, key)
    }
    return found, dict(checkpoint.index.objects)


def predicted(model: Model, parallel: Parallel) -> Contents:
    fragments: set[tuple[Any, ...]] = set()
    objects: dict[str, int] = {}
    for rank, state in enumerate(rank_states(model, parallel)):
        mine = {(*dataclasses.astuple(fragment), rank) for fragment in state.fragments}
        assert len(mine) == len(state.fragments) == len(state.eager)
        fragments |= mine
        objects |= {key: rank for key in state.objects if not any(part in key for part in OTHERS)}
    return fragments, objects


def test_simulated_ranks_store_what_real_ones_do(world: World, tmp_path: Path) -> None:
    cases = [
        (PLAIN | TP2, TINY, Parallel(tp=2, dp=2, bucket_elements=BUCKET)),
        (PLAIN | PP2, TINY, Parallel(pp=2, dp=2, bucket_elements=BUCKET)),
        (
            PLAIN | {"gated_linear_unit": False},
            dataclasses.replace(TINY, gated=False),
            Parallel(dp=4, bucket_elements=BUCKET),
        ),
        (EXPERTS | EP2 | TP2, TINY_EXPERTS, Parallel(tp=2, dp=2, ep=2, bucket_elements=BUCKET)),
        (EXPERTS | EP2, TINY_EXPERTS, Parallel(dp=4, ep=2, bucket_elements=BUCKET)),
        (EXPERTS | EP2 | PP2, TINY_EXPERTS, Parallel(pp=2, dp=2, ep=2, bucket_elements=BUCKET)),
    ]
    layouts = [layout for layout, _, _ in cases]
    world.run("scale_ranks:save_in_buckets", tmp_path, layouts, BUCKET, ranks=RANKS, timeout_seconds=200)
    for number, (layout, model, parallel) in enumerate(cases):
        found = stored(tmp_path / str(number) / "ours")
        expected = predicted(model, parallel)
        assert expected[0] == found[0], f"{layout}: {sorted(expected[0] ^ found[0])[:20]}"
        assert expected[1] == found[1], layout
