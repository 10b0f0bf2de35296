"""Experts reshard over ranks as torch_dist's do, bit for bit, the router's expert_bias included."""

from pathlib import Path

from tests.multirank.layouts import EP2, EXPERTS, PP2, TP1_OF_EXPERTS, TP2_OF_EXPERTS, VPP2
from tests.support.world import World


def test_experts_fit_other_expert_parallel_sizes(world: World, tmp_path: Path) -> None:
    one, two = EXPERTS, EXPERTS | EP2
    pairs = [
        (two, [one, EXPERTS | TP2_OF_EXPERTS, EXPERTS | PP2]),
        (one, [two, EXPERTS | TP1_OF_EXPERTS]),
        (EXPERTS | TP2_OF_EXPERTS, [two]),
        (EXPERTS | VPP2, [two, one]),
    ]
    reports = world.run("model_ranks:reshard", tmp_path, pairs, None, timeout_seconds=150)
    for names in (names for pair in reports[0]["loaded"] for names in pair):
        for part in (".router.expert_bias", ".local_experts.1.linear_fc1.weight", ".shared_experts."):
            assert any(part in name for name in names), f"{part} was not loaded"
