"""FSDP in Megatron's loop: torch's (`--use-torch-fsdp2`) in our format, and Megatron's through DCP."""

import json
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankForge
from tests.support.tiny import DRAWN_BY_LOADER, PATH, PRELOAD, Checkpoints, Ending, Pretraining

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
needs_einops = pytest.mark.skipif(not find_spec("einops"), reason="Megatron-FSDP needs einops")
Run = Callable[..., Ending]


@pytest.fixture(scope="module")
def fsdp_forge() -> Iterator[RankForge]:
    with RankForge((*PRELOAD, "fsdp_rank"), (Path(__file__).parent, *PATH)) as parent:
        yield parent


@pytest.fixture
def run(fsdp_forge: RankForge, tmp_path: Path) -> Run:
    def run(*arguments: str | Path, writer: str = "ours", ranks: int = 2) -> Ending:
        folder = tmp_path / f"runs-{writer}-{ranks}-{len(list(tmp_path.iterdir()))}"
        pretraining = Pretraining(fsdp_forge, folder, "fsdp_rank:main", ranks)
        return pretraining.run(*arguments, environment=ENVIRONMENT | {"WRITER": writer})

    return run


def not_restored(resumed: Ending, first: Ending) -> set[str]:
    """Returns what the resumed run began with otherwise than the first run had ended.

    But for the loss, which no checkpoint has, and Megatron-FSDP's weights: these are DTensors until the first
    step after a load. The optimizer's main parameters are the same weights.
    """
    unequal: set[str] = set()
    for now, then in zip(resumed.ranks, first.ranks, strict=True):
        state = then.states[f"step {now.begun_at}"]
        unequal |= {
            name for name in now.begun.keys() | state.keys() if now.begun.get(name) != state.get(name)
        }
    return {name for name in unequal if not name.startswith(("loss", "model 0 module.module.module"))}


def saves_of(report: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [json.loads(line) for line in report.read_text().splitlines()]
    return [event for event in events if event["event"] == "save"]


def assert_ours(checkpoint: Path) -> None:
    written = {path.suffix for path in checkpoint.iterdir()}
    assert ".manifest" in written and ".distcp" not in written, written


def test_torchs_fsdp2_saves_and_resumes_as_torch_dist_does(pretraining: Pretraining, tmp_path: Path) -> None:
    """Megatron restores all but Adam's step, which its groups have: it does not call `load_state_dict`.

    The checkpoint of step 2 is copied during step 3.
    """
    endings = []
    report = tmp_path / "report.jsonl"
    slow = ["--async-save", "--datastates-copy-limit", "3MB", "--datastates-report-file", report]
    for name, how in (("datastates", slow), ("torch_dist", [])):
        place = ["--save", tmp_path / name, "--load", tmp_path / name, "--ckpt-format", name]
        first = pretraining.run(*TORCH_FSDP2, *place, *how, "--exit-interval", "3", environment=ENVIRONMENT)
        Checkpoints(tmp_path / name).assert_format(2, name)
        resumed = pretraining.run(*TORCH_FSDP2, *place, "--ckpt-step", "2", environment=ENVIRONMENT)
        assert not_restored(resumed, first) == {"optimizer 0.0 options", "optimizer 0.1 options"}
        endings.append([first, resumed])
    for ours, stock in zip(*endings, strict=True):
        assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
        assert ours.differences(stock) == []
    assert [rank.begun_at for rank in endings[0][1].ranks] == [2, 2]
    saves = saves_of(report)
    assert [save["eager_bytes"] for save in saves] == [0, 0] and saves[0]["lazy_bytes"]
    assert saves[0]["fence_ms"] > 0, "the step must come during the copy"


def test_torchs_fsdp2_weights_are_copied_until_the_step(pretraining: Pretraining, tmp_path: Path) -> None:
    """Nothing else is saved, so that the step waits for weights, which the inner optimizer does not know."""
    root, report = tmp_path / "c", tmp_path / "report.jsonl"
    how = [*TORCH_FSDP2, "--ckpt-format", "datastates", "--no-save-optim"]
    slow = ["--async-save", "--datastates-copy-limit", "600kB", "--datastates-report-file", report]
    saved = pretraining.run(*how, *slow, "--save", root, "--exit-interval", "3", environment=ENVIRONMENT)
    first, last = saves_of(report)
    assert first["eager_bytes"] == last["eager_bytes"] == 0 and first["lazy_bytes"]
    assert first["fence_ms"] > 0, "the step must come during the copy"
    loading = ["--load", root, "--ckpt-step", "2", "--no-load-optim"]
    resumed = pretraining.run(*how, *loading, environment=ENVIRONMENT)
    assert [rank.begun_at for rank in resumed.ranks] == [2, 2]
    assert not any(name.startswith("model") for name in not_restored(resumed, saved))


@needs_einops
def test_megatrons_fsdp_resumes_exactly_from_what_dcp_saved_with_our_writer(run: Run, tmp_path: Path) -> None:
    """The first run has no `--load`: Megatron's look at an empty directory steps the optimizer once."""
    whole = run(*MEGATRON_FSDP)
    run(*MEGATRON_FSDP, "--save", tmp_path / "c", "--exit-interval", "2")
    assert_ours(tmp_path / "c" / "iter_0000002")
    resumed = run(*MEGATRON_FSDP, "--load", tmp_path / "c")
    assert [rank.begun_at for rank in resumed.ranks] == [2, 2]
    assert not_restored(resumed, whole) <= {DRAWN_BY_LOADER}
    assert resumed.differences(whole) == []


@needs_einops
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])
def test_megatrons_fsdp_loads_on_other_ranks_as_from_stock(
    run: Run, tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    """Both directories have the same tensors: the runs that save them are the same."""
    endings = []
    for writer in ("ours", "stock"):
        place = tmp_path / writer
        saving = ["--save", place, "--exit-interval", "2"]
        run(*MEGATRON_FSDP, *saving, writer=writer, ranks=saved_by)
        endings.append(run(*MEGATRON_FSDP, "--load", place, writer=writer, ranks=loaded_by))
    assert_ours(tmp_path / "ours" / "iter_0000002")
    ours, stock = endings
    assert [rank.begun_at for rank in ours.ranks] == [2] * loaded_by
    assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
    assert ours.differences(stock) == []
