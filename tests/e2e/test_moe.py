"""Experts and multi-token prediction in Megatron's own training loop: exact resume, other layouts."""

from pathlib import Path

import pytest

from tests.support.tiny import Checkpoints, Ending, Pretraining

EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "allgather"),
    # Adds a buffer that training changes before the optimizer steps, without any hook.
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
    *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--mtp-num-layers", "1"),
]
EP2 = ["--expert-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
FULLY_RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]


@pytest.fixture(scope="module")
def uninterrupted(forge: object, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """Runs experts on two ranks, without saving or loading."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return Pretraining(forge, folder).run(*EXPERTS, *EP2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [["--async-save"], [*FULLY_RESHARDABLE, "--async-save"], []],
    ids=["async", "async, fully reshardable", "sync"],
)
def test_resumed_run_with_experts_equals_uninterrupted_one(
    how: list[str], uninterrupted: Ending, pretraining: Pretraining, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    everything = [*EXPERTS, *EP2, *how, "--ckpt-format", "datastates"]
    saved = pretraining.run(*everything, "--save", checkpoints.root)
    resumed = pretraining.run(*everything, "--load", checkpoints.root, "--ckpt-step", "2")
    assert saved.differences(uninterrupted) == [], "saving changed what was trained"
    assert resumed.resumed_from(uninterrupted) == 2
    assert resumed.differences(uninterrupted) == []
    checkpoints.assert_format(2, "datastates")
    names = resumed.ranks[0].begun
    for part in ("expert_bias", "experts.local_experts", "mtp.layers.0", "optimizer 1."):
        assert any(part in name for name in names), f"this run has no {part}"


@pytest.mark.long
def test_experts_reshard_as_with_torch_dist(pretraining: Pretraining, tmp_path: Path) -> None:
    # With expert parallelism Megatron has two optimizers, without it one, and cannot load one into the other.
    chain = {2: EP2, 4: [*PP2, "--no-load-optim"], 6: []}

    def follow(root: Path, ckpt_format: str) -> list[Ending]:
        checkpoints, endings = Checkpoints(root), []
        for stop, layout in chain.items():
            endings.append(
                pretraining.run(
                    *(*EXPERTS, *layout, *FULLY_RESHARDABLE, "--train-iters", "6"),
                    *("--exit-interval", str(stop), "--ckpt-format", ckpt_format),
                    *("--save", root, "--load", root),
                )
            )
            assert [rank.begun_at for rank in endings[-1].ranks] == [stop - 2, stop - 2]
            checkpoints.assert_format(stop, ckpt_format)
        return endings

    ours, stock = follow(tmp_path / "ours", "datastates"), follow(tmp_path / "stock", "torch_dist")
    for stop, one, other in zip(chain, ours, stock, strict=True):
        assert [rank.begun for rank in one.ranks] == [rank.begun for rank in other.ranks], stop
        assert one.differences(other) == [], stop
