"""What Megatron-LM's main has and no release: finalizers, arguments of the fully parallel wrappers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_datastates.mcore.hooks import versions
from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.support.ranks import RankForge
from tests.support.tiny import PATH, PRELOAD, Checkpoints, Pretraining

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(versions.installed_version() < "0.20", reason="new in main: make test-main"),
]
FULLY_PARALLEL = ["--ckpt-format", "datastates", "--async-save", "--ckpt-fully-parallel-load"]


@pytest.fixture(scope="module")
def main_forge() -> Iterator[RankForge]:
    with RankForge((*PRELOAD, "main_rank"), (Path(__file__).parent, *PATH)) as parent:
        yield parent


@pytest.fixture
def training(main_forge: RankForge, tmp_path: Path) -> Pretraining:
    return Pretraining(main_forge, tmp_path / "runs", "main_rank:main")


def test_finalizers_of_main_run_after_the_checkpoint_is_published(
    training: Pretraining, tmp_path: Path
) -> None:
    """With logits to be written, all finalizers but the rollouts' belong to the logits' own request."""
    save = tmp_path / "c"
    for folder in (save, tmp_path / "logits"):
        folder.mkdir()
    arguments = [*FULLY_PARALLEL, "--save", save, "--rl-durable-rollout-bank"]
    training.run(*arguments, environment={"LOGITS": str(tmp_path / "logits")})
    assert {path.name: json.loads(path.read_text()) for path in save.glob("bank-*")} == {
        "bank-2.json": True,
        "bank-4.json": True,
    }
    written = sorted(path.name for path in (tmp_path / "logits").iterdir())
    assert written == ["logits-0-2", "logits-0-4", "logits-1-2", "logits-1-4"]
    assert (Checkpoints(save).published(), Checkpoints(save).tracked()) == ([2, 4], 4)
    assert (save / "iter_0000004" / "tokenizer").is_dir()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ckpt-fully-parallel-load-per-rank-objects"],
        ["--no-ckpt-load-validate-sharding-integrity"],
        ["--no-ckpt-load-validate-sharding-integrity", "--ckpt-assume-constant-structure"],
    ],
    ids=["objects", "unchecked", "unchecked-constant"],
)
def test_arguments_of_the_fully_parallel_wrappers_resume_exactly(
    training: Pretraining, tmp_path: Path, arguments: list[str]
) -> None:
    asked = [*FULLY_PARALLEL, *arguments]
    whole = training.run(*asked, "--save", tmp_path / "c")
    resumed = training.run(*asked, "--load", tmp_path / "c", "--ckpt-step", "2")
    assert resumed.resumed_from(whole) == 2
    assert resumed.differences(whole) == []


def test_the_stored_distribution_of_shards_is_made_and_read(training: Pretraining, tmp_path: Path) -> None:
    kept = ["--ckpt-pg-tensors-cache-path", tmp_path / "kept"]
    whole = training.run(*FULLY_PARALLEL, *kept, "--ckpt-pg-tensors-cache-create", "--save", tmp_path / "c")
    assert list((tmp_path / "kept").iterdir())
    again = training.run(*FULLY_PARALLEL, *kept, "--save", tmp_path / "d")
    resumed = training.run(*FULLY_PARALLEL, *kept, "--load", tmp_path / "d", "--ckpt-step", "2")
    assert again.differences(whole) == resumed.differences(whole) == []


def test_a_stored_distribution_by_which_a_rank_would_store_what_it_lacks_is_not_used(
    training: Pretraining, tmp_path: Path
) -> None:
    """A load has made it, which asks on all ranks for what rank 0 alone has in a save."""
    gathered = ["--dist-ckpt-optim-fully-reshardable", "--distrib-optim-fully-reshardable-mem-efficient"]
    asked = [*FULLY_PARALLEL, *gathered]
    kept = ["--ckpt-pg-tensors-cache-path", tmp_path / "kept"]
    whole = training.run(*asked, "--save", tmp_path / "c")
    training.run(
        *asked, *kept, "--ckpt-pg-tensors-cache-create", "--load", tmp_path / "c", "--ckpt-step", "2"
    )
    training.run(*asked, *kept, "--save", tmp_path / "d")
    stored = [Checkpoint.open(Checkpoints(tmp_path / name).at(4)).tensors for name in "cd"]
    assert stored[0].keys() == stored[1].keys()
    resumed = training.run(*asked, "--load", tmp_path / "d", "--ckpt-step", "2")
    assert resumed.differences(whole) == []
