"""What is saved in buckets is read by parameter, as global tensors, equal to what the optimizer held."""

from pathlib import Path

import pytest

from tests.multirank.layouts import EP2, EP4, EXPERTS, PP2, TP1_OF_EXPERTS, TP2, VPP2, Layout
from tests.support.world import World

pytestmark = pytest.mark.conformance

# With these sizes no bucket has padding, with which Megatron's fully reshardable save fails.
EVEN: Layout = {"hidden_size": 128, "ffn_hidden_size": 128}
FC1 = "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"  # of SwiGLU: two halves
TIED: Layout = {"tied": True}


@pytest.mark.long
def test_state_in_buckets_equals_what_megatron_saves_as_fully_reshardable(
    world: World, tmp_path: Path
) -> None:
    layouts = [EVEN | TP2, EVEN | TP2 | PP2, EVEN | VPP2 | {"mtp_num_layers": 1}, EVEN | PP2 | TIED]
    reports = world.run("map_ranks:compare", tmp_path, layouts, True, ranks=4, timeout_seconds=200)
    assert all(FC1 in keys for keys in reports[0]["keys"])


@pytest.mark.long
def test_state_of_experts_in_buckets_equals_what_megatron_saves_as_fully_reshardable(
    world: World, tmp_path: Path
) -> None:
    even = EVEN | EXPERTS | {"moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 128}
    layouts = [even | EP2, even | EP2 | PP2, even | EP4, even | EP2 | TP1_OF_EXPERTS]
    reports = world.run("map_ranks:compare", tmp_path, layouts, True, ranks=4, timeout_seconds=200)
    for keys in reports[0]["keys"]:
        assert any(".exp_avg.decoder.layers.1" in key for key in keys), keys


def test_state_in_padded_buckets_equals_the_optimizers(world: World, tmp_path: Path) -> None:
    layouts = [PP2 | TIED | {"hidden_size": 64}, TP2 | VPP2, EXPERTS | EP2]
    world.run("map_ranks:compare", tmp_path, layouts, False, ranks=4, timeout_seconds=200)


def test_megatron_does_not_see_the_map_and_other_formats_store_none(world: World, tmp_path: Path) -> None:
    reports = world.run("map_ranks:hide", tmp_path, EXPERTS | EP2, ranks=4, timeout_seconds=120)
    # One of the dense parameters, and one for each expert-parallel rank.
    assert len(reports[0]["maps"]) == 3, reports[0]["maps"]
