"""State of the default optimizer layout loads into any other, bit for bit, with nothing gathered at save."""

import json
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.multirank.layouts import (
    CP2,
    DENSE,
    EP2,
    EP4,
    EXPERTS,
    PP2,
    TP1_OF_EXPERTS,
    TP2,
    TP2_OF_EXPERTS,
    VPP2,
    Layout,
)
from tests.support.world import World
from tests.unit import command

pytestmark = pytest.mark.conformance

LAYER_WISE = "layer-wise"
NOT_DISTRIBUTED, OFFLOADED = "not distributed", "half offloaded dp_reshardable"  # as in model_ranks.py
RELEASE = metadata.version("megatron-core")
offloading = pytest.mark.skipif(RELEASE < "0.17", reason="0.16 does not offload without Transformer Engine")
groups_by_rate = pytest.mark.skipif(
    RELEASE < "0.19",
    reason="before 0.19, Megatron confuses groups that differ in their rate (its pull request 4705)",
)
KINDS = ["dp_reshardable", pytest.param(OFFLOADED, marks=offloading)]
TIED: Layout = {"tied": True}
UNEVEN: Layout = PP2 | {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
EMBEDDING = "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight"


def test_dense_state_fits_other_layouts_of_four_ranks(world: World, tmp_path: Path) -> None:
    saved = [TP2, TIED | PP2, VPP2 | {"mtp_num_layers": 1}]
    run(world, tmp_path, "save", saved, "dp_reshardable", ranks=4)
    found = [
        run(world, tmp_path, "load", 0, [DENSE, TP2, PP2 | TP2, CP2 | PP2, VPP2], {}, ranks=4),
        run(world, tmp_path, "load", 1, [TIED, TIED | TP2, TIED | UNEVEN], {}, ranks=4),
        run(
            world,
            tmp_path,
            "load",
            2,
            [layout | {"mtp_num_layers": 1} for layout in (UNEVEN, TP2)],
            {},
            ranks=4,
        ),
    ]
    assert [rank["restated"] for rank in found] == [[1, 0, 1, 1, 1], [1, 1, 1], [1, 1]]
    assert all(EMBEDDING in keys for rank in found for keys in rank["compared"])


def test_dense_state_of_four_ranks_fits_fewer(world: World, tmp_path: Path) -> None:
    run(world, tmp_path, "save", [TP2 | PP2], "dp_reshardable", ranks=4)
    for ranks, layouts in {2: [DENSE, PP2], 1: [DENSE], 3: [DENSE]}.items():
        run(world, tmp_path, "load", 0, layouts, {}, ranks=ranks)


@pytest.mark.parametrize("parallel", [False, True])
def test_ranks_read_the_maps_of_all_groups_together(world: World, tmp_path: Path, parallel: bool) -> None:
    """Else each rank would open a file of each data-parallel group."""
    run(world, tmp_path, "save", [TP2 | PP2], "dp_reshardable", ranks=4)
    how = {"parallel": parallel}
    reports = world.run("anywhere_ranks:load", tmp_path, 0, [CP2 | PP2], how, ranks=4, timeout_seconds=200)
    own = [report["maps"][0] for report in reports]  # where a rank looks whether it has the stored layout
    others = [key for report in reports for key in report["maps"][1:]]
    assert len(others) == len(set(others)) == 4 and set(own) <= set(others)


@pytest.mark.parametrize(
    "how",
    [
        {"split_qkv": True},
        {"bucket_size": 5000},
        pytest.param({"decoupled_lr": 0.5, "bucket_size": 5000}, marks=groups_by_rate),
    ],
    ids=["split QKV", "small buckets", "groups and small buckets"],
)
def test_state_of_two_ranks_fits_other_layouts(world: World, tmp_path: Path, how: Layout) -> None:
    """Also of factories that split a tensor unlike SwiGLU's, and of several groups of several buckets."""
    run(world, tmp_path, "save", [TP2 | how, DENSE | how], "dp_reshardable", ranks=2)
    found = run(world, tmp_path, "load", 0, [DENSE | how, PP2 | how], {}, ranks=2)
    keys = found["compared"][0]
    assert isinstance(keys, list) and ("split_qkv" in how) == any("qkv.weight.query" in key for key in keys)
    run(world, tmp_path, "load", 1, [TP2 | how, PP2 | how], {}, ranks=2)
    run(world, tmp_path, "load", 0, [DENSE | how], {}, ranks=1)


def test_vocabulary_padded_for_three_ranks_fits_two(world: World, tmp_path: Path) -> None:
    six = {"hidden_size": 48, "num_attention_heads": 6}
    run(world, tmp_path, "save", [six | {"tensor_model_parallel_size": 3}], "dp_reshardable", ranks=3)
    run(world, tmp_path, "load", 0, [six | TP2], {}, ranks=2)


def test_experts_fit_one_rank_and_four(world: World, tmp_path: Path) -> None:
    many = EXPERTS | EP2 | TP1_OF_EXPERTS
    for name, (saved, ranks), (other, others) in (
        ("fewer", (many, 4), (EXPERTS, 1)),
        ("more", (EXPERTS, 1), (many, 4)),
    ):
        run(world, tmp_path / name, "save", [saved], "dp_reshardable", ranks=ranks)
        run(world, tmp_path / name, "load", 0, [other], {}, ranks=others)


def test_experts_fit_other_layouts(world: World, tmp_path: Path) -> None:
    run(world, tmp_path, "save", [EXPERTS | EP2, EXPERTS], "dp_reshardable", ranks=4)
    others = [
        EXPERTS,
        EXPERTS | EP4,
        EXPERTS | TP2_OF_EXPERTS,
        EXPERTS | EP2 | PP2,
        EXPERTS | EP2 | TP1_OF_EXPERTS,
    ]
    run(world, tmp_path, "load", 0, others, {}, ranks=4)
    run(world, tmp_path, "load", 1, [EXPERTS | EP2], {}, ranks=4)


@pytest.mark.parametrize("kind", ["fully_reshardable", NOT_DISTRIBUTED])
def test_bucket_state_fits_other_kinds_of_optimizers(world: World, tmp_path: Path, kind: str) -> None:
    run(world, tmp_path, "save", [TP2 | TIED], "dp_reshardable", ranks=2)
    run(world, tmp_path, "load", 0, [TIED | PP2, TIED], {"kind": kind, "strict": "log_all"}, ranks=2)


@pytest.mark.skipif(RELEASE < "0.17", reason="0.16 has no such optimizer without Transformer Engine")
def test_state_of_a_precision_aware_optimizer_fits_other_layouts(world: World, tmp_path: Path) -> None:
    kind = "precision-aware dp_reshardable"
    run(world, tmp_path, "save", [TP2], kind, ranks=2)
    run(world, tmp_path, "load", 0, [PP2, DENSE], {"kind": kind}, ranks=2)


@pytest.mark.skipif(RELEASE < "0.19", reason="older ones keep no remainders, or check nothing of them")
def test_remainders_of_main_parameters_fit_the_same_optimizer_alone(world: World, tmp_path: Path) -> None:
    kind = "remainders dp_reshardable"
    run(world, tmp_path, "save", [TP2], kind, ranks=2)
    run(world, tmp_path, "load", 0, [PP2, DENSE], {"kind": kind}, ranks=2)
    for layout in (TP2, PP2):
        for report in world.run("anywhere_ranks:refuse", tmp_path, layout, timeout_seconds=200):
            assert "has only the remainders of main parameters" in report["error"]


@offloading
@pytest.mark.parametrize("kind", ["dp_reshardable", OFFLOADED])
def test_state_of_an_offloaded_optimizer_fits_any_layout(world: World, tmp_path: Path, kind: str) -> None:
    """Its own layout included, where Megatron alone restores no step."""
    run(world, tmp_path, "save", [TP2], OFFLOADED, ranks=2)
    found = run(world, tmp_path, "load", 0, [PP2, DENSE, TP2], {"kind": kind}, ranks=2)
    assert found["restated"] == [1, 1, int(kind == OFFLOADED)]


@offloading
def test_any_state_fits_an_offloaded_optimizer(world: World, tmp_path: Path) -> None:
    kinds = ["dp_reshardable", "fully_reshardable"]
    even = {"hidden_size": 128, "ffn_hidden_size": 128}
    for kind in kinds:
        run(world, tmp_path / kind, "save", [TP2 | even], kind, ranks=2)
        run(world, tmp_path / kind, "load", 0, [PP2 | even, TP2 | even], {"kind": OFFLOADED}, ranks=2)


@offloading
def test_lists_of_offloaded_parameters_need_not_be_of_one_length(world: World, tmp_path: Path) -> None:
    reports = world.run("anywhere_ranks:merge_steps", tmp_path, DENSE, timeout_seconds=200)
    assert any("Cannot merge two lists with different lengths" in report["stock"] for report in reports)


@pytest.mark.parametrize("kind", ["fully_reshardable", NOT_DISTRIBUTED])
def test_state_by_parameter_fits_the_buckets_of_any_layout(world: World, tmp_path: Path, kind: str) -> None:
    even = TIED | {"hidden_size": 128, "ffn_hidden_size": 128}  # else Megatron's save of the former fails
    run(world, tmp_path, "save", [TP2 | even], kind, ranks=2)
    found = run(world, tmp_path, "load", 0, [even | PP2, even, even | TP2], {}, ranks=2)
    assert found["restated"] == [1, 1, 1]


@pytest.mark.skipif(RELEASE < "0.19", reason="it is made in another way before 0.19")
def test_state_of_a_layer_wise_optimizer_fits_buckets_and_bucket_state_fits_it(
    world: World, tmp_path: Path
) -> None:
    even = {"hidden_size": 128, "ffn_hidden_size": 128}
    run(world, tmp_path / "buckets", "save", [TP2 | even], "dp_reshardable", ranks=2)
    run(world, tmp_path / "buckets", "load", 0, [even, PP2 | even], {"kind": LAYER_WISE}, ranks=2)
    run(world, tmp_path / "whole", "save", [even], LAYER_WISE, ranks=2)
    run(world, tmp_path / "whole", "load", 0, [even, TP2 | even, PP2 | even], {}, ranks=2)


@pytest.mark.long
@pytest.mark.skipif(
    not find_spec("emerging_optimizers") or RELEASE < "0.19",
    reason="emerging-optimizers is not installed, or Megatron makes no buckets beside Muon",
)
def test_muons_state_fits_other_layouts_with_the_buckets_beside_it(world: World, tmp_path: Path) -> None:
    """Megatron's loop makes both of `--optimizer muon --use-distributed-optimizer`."""
    kind = "layer-wise muon"
    run(world, tmp_path, "save", [DENSE, TP2], f"{kind} beside buckets", ranks=2)
    how = {"kind": f"{kind} beside buckets"}
    for number, layouts in enumerate([[TP2, PP2, DENSE], [DENSE, PP2, TP2]]):
        found = run(world, tmp_path, "load", number, layouts, how, ranks=2)
        assert found["restated"] == [1, 1, 0]
        for name in ("momentum_buffer", "exp_avg_sq", "param"):
            assert any(f"optimizer.state.{name}." in key for key in found["compared"][0])
    run(world, tmp_path, "load", 0, [TP2, PP2, DENSE], {"kind": kind}, ranks=2)
    run(world, tmp_path / "whole", "save", [TP2], kind, ranks=2)
    run(world, tmp_path / "whole", "load", 0, [DENSE, PP2, TP2], how, ranks=2)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_dists_state_by_parameter_fits_the_buckets_of_any_layout(
    world: World, tmp_path: Path, kind: str
) -> None:
    """For programs whose request does not follow the checkpoint, as that of Megatron's own loop does."""
    even = TIED | {"hidden_size": 128, "ffn_hidden_size": 128}
    saved = [TP2 | even, EXPERTS | EP2 | even]
    run(world, tmp_path, "save_as_torch_dist", saved, "fully_reshardable", ranks=2)
    assert not list(tmp_path.glob("*/*.manifest")) and list(tmp_path.glob("0/*.distcp"))
    run(world, tmp_path, "load", 0, [even | PP2, even, even | TP2], {"kind": kind}, ranks=2)
    run(world, tmp_path, "load", 1, [EXPERTS | even], {"kind": kind}, ranks=1)


def test_torch_dists_buckets_of_another_layout_are_refused_with_what_works(
    world: World, tmp_path: Path
) -> None:
    run(world, tmp_path, "save_as_torch_dist", [TP2], "dp_reshardable", ranks=2)
    for layout in (PP2, DENSE):
        for report in world.run("anywhere_ranks:refuse", tmp_path, layout, timeout_seconds=200):
            assert "has no optimizer map, which would say where each parameter lies" in report["error"]
            assert "save once with --ckpt-format datastates" in report["error"]
    run(world, tmp_path, "load", 0, [TP2], {}, ranks=2)


def test_tools_read_state_of_every_layout_by_parameter(world: World, tmp_path: Path) -> None:
    saved = [TP2 | PP2, VPP2 | {"mtp_num_layers": 1}, EXPERTS | EP2]
    run(world, tmp_path, "save", saved, "dp_reshardable", ranks=4)
    for place in (tmp_path / str(number) for number in range(len(saved))):
        truth = read_truth(place)
        shown = json.loads(datastates("show", place, "--optimizer", "--json"))["tensors"]
        assert {row["key"]: tuple(row["shape"]) for row in shown} == {key: truth[key].shape for key in truth}
        exported = place.with_name(f"{place.name}-exported")
        datastates("export", place, exported, "--stacked", "--keys", "optimizer.state.*")
        found = load_file(exported / "model.safetensors")
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[key], truth[key]) for key in truth)


def read_truth(place: Path) -> dict[str, torch.Tensor]:
    """Returns what ranks have written beside a checkpoint, as anywhere_ranks.py reads it."""
    found: dict[str, torch.Tensor] = {}
    for path in place.parent.glob(f"{place.name}-truth-*"):
        for key, offset, whole, values in torch.load(path, weights_only=True):
            target = found.setdefault(key, torch.full(whole, float("nan"), dtype=values.dtype))
            target[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = values
    return found


def datastates(*arguments: str | Path) -> str:
    """Runs the command and returns what it prints."""
    code, printed, errors = command.run(*arguments)
    assert code == 0, errors
    return printed


def run(world: World, folder: Path, what: str, *arguments: object, ranks: int) -> dict[str, list[object]]:
    """Returns what rank 0 reports, after checking that all ranks agree on which loads were restated."""
    reports = world.run(f"anywhere_ranks:{what}", folder, *arguments, ranks=ranks, timeout_seconds=200)
    assert all(report.get("restated") == reports[0].get("restated") for report in reports)
    return reports[0]
