"""FSDP in Megatron's loop: torch's (`--use-torch-fsdp2`) in our format, and Megatron's through DCP."""

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import PATH, PRELOAD, Checkpoints, Pretraining

pytestmark = pytest.mark.skipif(
    metadata.version("megatron-core") < "0.19", reason="tried with megatron-core 0.19 only"
)
# Megatron asks for another number of connections with FSDP.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
TORCH_FSDP2 = ["--use-torch-fsdp2", "--untie-embeddings-and-output-weights"]
MEGATRON_FSDP = [
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
    *("--ckpt-format", "fsdp_dtensor", "--untie-embeddings-and-output-weights"),
]


@pytest.fixture(scope="module")
def fsdp_forge() -> Iterator[RankForge]:
    with RankForge((*PRELOAD, "fsdp_rank"), (Path(__file__).parent, *PATH)) as parent:
        yield parent


def test_torchs_fsdp2_saves_and_resumes_as_torch_dist_does(pretraining: Pretraining, tmp_path: Path) -> None:
    """The first iteration after the resume: Megatron itself does not restore Adam's step for the second."""
    endings = []
    for name in ("datastates", "torch_dist"):
        place = ["--save", tmp_path / name, "--load", tmp_path / name, "--ckpt-format", name]
        first = pretraining.run(*TORCH_FSDP2, *place, "--exit-interval", "2", environment=ENVIRONMENT)
        Checkpoints(tmp_path / name).assert_format(2, name)
        endings.append([first, pretraining.run(*TORCH_FSDP2, *place, environment=ENVIRONMENT)])
    for ours, stock in zip(*endings, strict=True):
        assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
        assert ours.differences(stock) == []
    assert [rank.begun_at for rank in endings[0][1].ranks] == [2, 2]


@pytest.mark.skipif(not find_spec("einops"), reason="Megatron-FSDP needs einops")
def test_megatrons_fsdp_resumes_from_what_dcp_saved_with_our_writer(
    fsdp_forge: RankForge, tmp_path: Path
) -> None:
    pretraining = Pretraining(fsdp_forge, tmp_path / "runs", "fsdp_rank:main")
    endings = {}
    for name in ("ours", "stock"):
        environment = ENVIRONMENT | {"WRITER": name}
        place = [*MEGATRON_FSDP, "--save", tmp_path / name, "--load", tmp_path / name]
        pretraining.run(*place, "--exit-interval", "2", environment=environment)
        endings[name] = pretraining.run(*place, environment=environment)
    written = {path.suffix for path in (tmp_path / "ours" / "iter_0000002").iterdir()}
    assert ".manifest" in written and ".distcp" not in written, written
    ours, stock = endings.values()
    assert [rank.begun_at for rank in ours.ranks] == [2, 2]
    assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
    assert ours.differences(stock) == []
