"""States of hybrid models, LLaVA, multi-latent attention and Muon reshard as torch_dist's do, bit for bit;
Muon resumes exactly.
"""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.multirank.layouts import DENSE, FUSED_MLA, MLA, PP2, TP2, Layout
from tests.support.world import World

HYBRID: Layout = {
    "model": "hybrid",
    "is_hybrid_model": True,
    "mamba_state_dim": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
}
LLAVA: Layout = {"model": "llava"}
needs_muon = pytest.mark.skipif(
    not find_spec("emerging_optimizers") or metadata.version("megatron-core") < "0.19",
    reason="emerging-optimizers is not installed, or Megatron makes Muon in another way",
)


def reshard(world: World, folder: Path, layout: Layout, kind: str | None) -> list[str]:
    """Returns the names that rank 0 loaded into the first layout."""
    pairs = [(layout | TP2, [layout | PP2, layout]), (layout | PP2, [layout | TP2])]
    reports = world.run("model_ranks:reshard", folder, pairs, kind, timeout_seconds=120)
    loaded: list[str] = reports[0]["loaded"][0][0]
    return loaded


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fully_reshardable", None])
def test_hybrid_models_fit_other_layouts(world: World, tmp_path: Path, kind: str | None) -> None:
    loaded = reshard(world, tmp_path, HYBRID, kind)
    assert any("mixer" in name for name in loaded)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fully_reshardable", None])
def test_models_with_vision_fit_other_layouts(world: World, tmp_path: Path, kind: str | None) -> None:
    loaded = reshard(world, tmp_path, LLAVA, kind)
    assert any("vision_model" in name for name in loaded)


def test_default_optimizer_state_of_hybrid_models_fits_other_layouts(world: World, tmp_path: Path) -> None:
    world.run("anywhere_ranks:save", tmp_path, [HYBRID | TP2], "dp_reshardable", timeout_seconds=120)
    for rank in world.run(
        "anywhere_ranks:load", tmp_path, 0, [HYBRID | PP2, HYBRID], {}, timeout_seconds=120
    ):
        assert rank["restated"] == [1, 1]
        assert any("mixer" in key for key in rank["compared"][0])


@pytest.mark.parametrize("saved", [MLA, FUSED_MLA], ids=["two projections", "one"])
def test_multi_latent_attention_fits_other_layouts(world: World, tmp_path: Path, saved: Layout) -> None:
    """Whether the down projections of attention are two parameters or one. Bit for bit as torch_dist's."""
    loading = [MLA | PP2, FUSED_MLA | PP2, MLA | TP2, FUSED_MLA]
    reports = world.run(
        "model_ranks:reshard", tmp_path, [(saved | TP2, loading), (saved | PP2, loading)], None,
        timeout_seconds=120,
    )  # fmt: skip
    assert all(any("_down_proj" in name for name in names) for names in reports[0]["loaded"][0])


@pytest.mark.parametrize("saved", [MLA, FUSED_MLA], ids=["two projections", "one"])
def test_default_optimizer_state_of_multi_latent_attention_fits_other_layouts(
    world: World, tmp_path: Path, saved: Layout
) -> None:
    world.run("anywhere_ranks:save", tmp_path, [saved | TP2], "dp_reshardable", timeout_seconds=120)
    loading = [MLA | PP2, FUSED_MLA | PP2, MLA, FUSED_MLA, MLA | TP2, FUSED_MLA | TP2]
    for rank in world.run("anywhere_ranks:load", tmp_path, 0, loading, {}, timeout_seconds=120):
        own = loading.index(saved | TP2)
        assert rank["restated"] == [int(number != own) for number in range(len(loading))]
        assert any("linear_q_down_proj" in key for key in rank["compared"][0])


@needs_muon
@pytest.mark.parametrize(("kind", "layout"), [("layer-wise muon", DENSE), ("muon", TP2), ("muon", DENSE)])
def test_muon_resumes_exactly(world: World, tmp_path: Path, kind: str, layout: Layout) -> None:
    for rank in world.run("model_ranks:resume", tmp_path / "c", layout, kind, timeout_seconds=120):
        assert rank["unequal"] == []
        assert any("momentum_buffer" in name for name in rank["compared"])
        assert any("exp_avg_sq" in name for name in rank["compared"])


@needs_muon
@pytest.mark.parametrize("kind", ["muon", "layer-wise muon"])
def test_muons_state_fits_other_layouts(world: World, tmp_path: Path, kind: str) -> None:
    reports = world.run("model_ranks:reshard", tmp_path, [(TP2, [DENSE, PP2])], kind, timeout_seconds=120)
    assert any("momentum_buffer" in name for name in reports[0]["loaded"][0][0])
