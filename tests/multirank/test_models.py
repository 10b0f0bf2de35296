"""States of Megatron-Core's own models reshard as torch_dist's do, bit for bit: pipelines and vocabularies.

Each test saves in one layout and loads into others; `model_ranks.py` compares.
"""

from pathlib import Path

from tests.multirank.layouts import DENSE, PP2, TP2, VPP2, Layout
from tests.support.world import World

UNEVEN: Layout = PP2 | {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
BY_HAND: Layout = PP2 | {"pipeline_model_parallel_layout": "Ettt|tL"}
TIED: Layout = {"tied": True}
GROUPED: Layout = {"num_query_groups": 2}


def reshard(world: World, folder: Path, *pairs: tuple[Layout, list[Layout]]) -> list[list[list[str]]]:
    """Returns, by pair and layout, the names that rank 0 loaded."""
    reports = world.run("model_ranks:reshard", folder, pairs, None, timeout_seconds=120)
    loaded: list[list[list[str]]] = reports[0]["loaded"]
    return loaded


def test_swiglu_halves_and_padded_vocabularies_fit_other_tensor_parallel_sizes(
    world: World, tmp_path: Path
) -> None:
    reshard(world, tmp_path, (GROUPED, [GROUPED | TP2, GROUPED]), (TIED | TP2, [TIED, TIED | TP2]))


def test_pipelines_fit_other_pipelines(world: World, tmp_path: Path) -> None:
    loaded = reshard(world, tmp_path, (VPP2, [DENSE, UNEVEN, TP2]), (UNEVEN, [VPP2, BY_HAND]))
    assert any(".model1." in name for name in loaded[1][0]), "two chunks on each rank"


def test_tied_embeddings_fit_pipelines_that_copy_them(world: World, tmp_path: Path) -> None:
    reshard(
        world, tmp_path, (TIED | PP2, [TIED, TIED | TP2, TIED | VPP2]), (TIED, [TIED | PP2, TIED | BY_HAND])
    )


def test_layers_that_predict_several_tokens_fit_other_layouts(world: World, tmp_path: Path) -> None:
    two = DENSE | {"mtp_num_layers": 2}
    loaded = reshard(world, tmp_path, (two | PP2, [two, two | TP2]), (two, [two | PP2]))
    assert any(".mtp.layers.1." in name for name in loaded[0][0])
