"""States of Megatron's distributed optimizer, dense and with experts, reshard as torch_dist's do."""

from pathlib import Path

import pytest

from tests.multirank.layouts import CP2, DENSE, EP2, EP4, EXPERTS, PP2, TP2, VPP2, Layout
from tests.support.world import World


@pytest.mark.long
def test_fully_reshardable_state_fits_other_layouts(world: World, tmp_path: Path) -> None:
    pairs = [(DENSE, [TP2, VPP2, CP2]), (TP2, [DENSE, PP2]), (EXPERTS | EP2, [EXPERTS | EP2]), (CP2, [TP2])]
    reports = world.run("model_ranks:reshard", tmp_path, pairs, "fully_reshardable", timeout_seconds=150)
    assert any(name.endswith(".exp_avg_sq") for name in reports[0]["loaded"][0][0])


@pytest.mark.long
def test_fully_reshardable_state_of_two_optimizers_fits_other_expert_parallel_sizes(
    world: World, tmp_path: Path
) -> None:
    pairs = [(EXPERTS | EP4, [EXPERTS | EP2, EXPERTS | EP2 | PP2]), (EXPERTS | EP2, [EXPERTS | EP4])]
    reports = world.run(
        "model_ranks:reshard", tmp_path, pairs, "fully_reshardable", ranks=4, timeout_seconds=200
    )
    assert any(name.startswith("optimizer.1.") for name in reports[0]["loaded"][0][0])


@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 4)])
def test_bucket_state_fits_other_data_parallel_sizes(
    world: World, tmp_path: Path, writers: int, readers: int
) -> None:
    how = (tmp_path, [DENSE, EXPERTS | EP2], "dp_reshardable")
    world.run("model_ranks:save_several", *how, ranks=writers, timeout_seconds=120)
    reports = world.run("model_ranks:load_several", *how, ranks=readers, timeout_seconds=120)
    dense, experts = reports[0]["loaded"]
    assert any(name.endswith(".exp_avg_sq") for name in dense)
    assert any(name.startswith("optimizer.1.") for name in experts), "two optimizers in a chain"


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 2)])
def test_bucket_state_fits_data_parallel_sizes_that_do_not_divide_each_other(
    world: World, tmp_path: Path, writers: int, readers: int
) -> None:
    how = (tmp_path, [DENSE], "dp_reshardable")
    world.run("model_ranks:save_several", *how, ranks=writers, timeout_seconds=120)
    reports = world.run("model_ranks:load_several", *how, ranks=readers, timeout_seconds=120)
    assert any(name.endswith(".exp_avg_sq") for name in reports[0]["loaded"][0])


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("dp_zero_gather_scatter", [TP2]),
        ("not distributed", [DENSE, PP2]),
        ("precision-aware dp_reshardable", [TP2]),
    ],
)
def test_other_kinds_of_optimizer_state_fit_the_layouts_that_torch_dists_fit(
    world: World, tmp_path: Path, kind: str, others: list[Layout]
) -> None:
    reports = world.run("model_ranks:reshard", tmp_path, [(TP2, others)], kind, timeout_seconds=150)
    assert any(name.endswith(".exp_avg_sq") for name in reports[0]["loaded"][0][0])
