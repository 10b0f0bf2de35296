"""FSDP in Megatron's loop: torch's (`--use-torch-fsdp2`) in our format, and Megatron's through DCP."""

import json
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import megatron_datastates as ds
from megatron_datastates.cli.main import app
from tests.support.ranks import Outcome, RankForge
from tests.support.tiny import DRAWN_BY_LOADER, MANIFEST, PATH, PRELOAD, Checkpoints, Ending, Pretraining

pytestmark = pytest.mark.skipif(
    metadata.version("megatron-core") < "0.19", reason="tried with megatron-core 0.19 only"
)
# Megatron asks for another number of connections with FSDP.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
TORCH_FSDP2 = ["--use-torch-fsdp2", "--untie-embeddings-and-output-weights"]
FSDP = [
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
    "--untie-embeddings-and-output-weights",
]
MEGATRON_FSDP = [*FSDP, "--ckpt-format", "fsdp_dtensor"]
OURS = [*FSDP, "--ckpt-format", "datastates"]
MODES = {"sync": [], "async": ["--async-save"]}
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


@pytest.fixture(scope="module")
def whole(fsdp_forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """Returns a run of Megatron-FSDP that neither saves nor loads."""
    folder = tmp_path_factory.mktemp("whole")
    pretraining = Pretraining(fsdp_forge, folder, "fsdp_rank:main")
    return pretraining.run(*MEGATRON_FSDP, environment=ENVIRONMENT | {"WRITER": "stock"})


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


def in_steps(run: Ending, other: Ending) -> list[str]:
    """Returns where two runs differ before they end, where a save has left weights as DTensors."""
    return [one for one in run.differences(other) if ", end, " not in one]


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


@pytest.mark.long
@needs_einops
def test_megatrons_fsdp_resumes_exactly_from_what_dcp_saved_with_our_writer(
    run: Run, whole: Ending, tmp_path: Path
) -> None:
    """The first run has no `--load`: Megatron's look at an empty directory steps the optimizer once."""
    run(*MEGATRON_FSDP, "--save", tmp_path / "c", "--exit-interval", "2")
    assert_ours(tmp_path / "c" / "iter_0000002")
    resumed = run(*MEGATRON_FSDP, "--load", tmp_path / "c")
    assert [rank.begun_at for rank in resumed.ranks] == [2, 2]
    assert not_restored(resumed, whole) <= {DRAWN_BY_LOADER}
    assert resumed.differences(whole) == []


@needs_einops
@pytest.mark.parametrize("mode", MODES)
def test_megatrons_fsdp_saves_as_any_other_run_and_resumes_exactly(
    mode: str, run: Run, whole: Ending, tmp_path: Path
) -> None:
    """The checkpoint of step 2 is copied during step 3."""
    checkpoints, report = Checkpoints(tmp_path / "c"), tmp_path / "report.jsonl"
    slow = ["--datastates-copy-limit", "500kB", "--datastates-report-file", report, "--save-interval", "2"]
    saved = run(*OURS, *MODES[mode], *slow, "--save", checkpoints.root)
    assert in_steps(saved, whole) == []
    assert checkpoints.published() == [2, 4] and checkpoints.tracked() == 4
    assert_ours(checkpoints.at(2))
    first, _ = saves_of(report)
    assert (first["state"], first["eager_bytes"]) == ("published", 0) and first["lazy_bytes"]
    assert (first["fence_ms"] > 0) == (mode == "async"), "the step must come during the copy"

    resumed = run(*OURS, *MODES[mode], "--load", checkpoints.root, "--ckpt-step", "2")

    assert [rank.begun_at for rank in resumed.ranks] == [2, 2]
    assert not_restored(resumed, whole) <= {DRAWN_BY_LOADER}
    assert resumed.differences(whole) == []


@pytest.fixture
def failing(fsdp_forge: RankForge, tmp_path: Path) -> Callable[..., Outcome]:
    def fail(*arguments: str | Path, rank: int = 0, plan: str = "", **more: str) -> Outcome:
        pretraining = Pretraining(fsdp_forge, tmp_path / "failing", "fsdp_rank:main")
        environment = ENVIRONMENT | {"WRITER": "stock", f"TINY_FAULTS_OF_RANK_{rank}": plan} | more
        return pretraining.fail(*arguments, environment=environment)

    return fail


@needs_einops
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("rank", "plan"), [(1, "sync:2:EIO"), (0, "write manifest:2:ENOSPC"), (1, "reserve:2:ENOSPC")]
)
def test_a_failed_save_of_megatrons_fsdp_ends_all_ranks_and_keeps_the_one_before(
    rank: int, plan: str, mode: str, failing: Callable[..., Outcome], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    outcome = failing(
        *OURS, *MODES[mode], "--save", checkpoints.root, "--save-interval", "2", rank=rank, plan=plan
    )
    assert outcome.exits == [1, 1], outcome.log[-3000:]
    assert outcome.log.count("MegatronSaveFailedError: saving to") >= 2
    assert f"failed on 1 of 2 ranks: rank {rank}: " in outcome.log and "Nothing was published" in outcome.log
    assert checkpoints.published() == [2] and checkpoints.tracked() == 2
    assert not list(checkpoints.at(4).iterdir()), "nothing is left"


@needs_einops
def test_megatrons_fsdp_continues_after_a_failed_save_with_warn(
    fsdp_forge: RankForge, whole: Ending, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    pretraining = Pretraining(fsdp_forge, tmp_path / "runs", "fsdp_rank:main")
    saving = ["--save", checkpoints.root, "--save-interval", "1", "--datastates-on-failure", "warn"]
    for how in MODES.values():
        environment = ENVIRONMENT | {"WRITER": "stock", "TINY_FAULTS_OF_RANK_1": "sync:2:EIO"}
        ending = pretraining.run(*OURS, *how, *saving, environment=environment)
        assert in_steps(ending, whole) == []
        assert ending.log.count("Training continues") == 1, "on rank 0"
        assert checkpoints.published() == [1, 3, 4]


@needs_einops
def test_megatrons_fsdp_resumes_exactly_from_an_older_checkpoint_where_the_newest_are_damaged(
    run: Run, whole: Ending, tmp_path: Path
) -> None:
    """The load of the damaged one has filled a part of the state by then."""
    checkpoints = Checkpoints(tmp_path / "c")
    run(*OURS, "--save", checkpoints.root, "--save-interval", "1", "--exit-interval", "3")
    for iteration in (2, 3):
        (data,) = checkpoints.at(iteration).glob("data-00001-*")
        with data.open("r+b") as file:
            file.seek(data.stat().st_size // 2)
            file.write(b"damage")
    falling_back = ["--datastates-fallback", "2", "--datastates-on-damage", "fallback"]
    resumed = run(*OURS, "--load", checkpoints.root, *falling_back)
    assert "iter_0000001 verifies. It is loaded now" in resumed.log
    assert [rank.begun_at for rank in resumed.ranks] == [1, 1]
    assert not_restored(resumed, whole) <= {DRAWN_BY_LOADER}
    assert in_steps(resumed, whole) == []


@needs_einops
def test_damage_in_a_checkpoint_of_megatrons_fsdp_is_named_on_all_ranks(
    run: Run, failing: Callable[..., Outcome], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    run(*OURS, "--save", checkpoints.root, "--save-interval", "2")
    data = next(iter(sorted(checkpoints.at(4).glob("data-00001-*"))))
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        file.write(bytes(4096))
    outcome = failing(*OURS, "--load", checkpoints.root, "--datastates-fallback", "1")
    assert outcome.exits == [1, 1]
    errors = [line for line in outcome.log.splitlines() if "MegatronLoadFailedError: " in line]
    assert len(errors) >= 2 and all(data.name in line for line in errors), outcome.log[-3000:]
    assert all("iter_0000002 verifies" in line for line in errors)


@pytest.mark.long
@needs_einops
def test_what_stock_saves_over_a_checkpoint_of_ours_counts(run: Run, whole: Ending, tmp_path: Path) -> None:
    """Our manifest stays there, and does not make the newer one unreadable."""
    checkpoints = Checkpoints(tmp_path / "c")
    for kind in (OURS, MEGATRON_FSDP):
        run(*kind, "--save", checkpoints.root, "--exit-interval", "2", writer="stock")
    assert {".metadata", MANIFEST} <= {path.name for path in checkpoints.at(2).iterdir()}
    for kind in (OURS, MEGATRON_FSDP):
        resumed = run(*kind, "--load", checkpoints.root, writer="stock")
        assert [rank.begun_at for rank in resumed.ranks] == [2, 2]
        assert resumed.differences(whole) == []


@needs_einops
def test_conversions_of_megatrons_fsdp_resume(run: Run, whole: Ending, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    run(*OURS, "--save", checkpoints.root, "--exit-interval", "2")
    converted = Checkpoints(tmp_path / "dcp")
    done = CliRunner().invoke(app, ["convert", str(checkpoints.root), str(converted.root)])
    assert done.exit_code == 0, done.output
    resumed = run(*OURS, "--load", converted.root, writer="stock")
    assert [rank.begun_at for rank in resumed.ranks] == [2, 2]
    assert resumed.differences(whole) == []


@needs_einops
def test_the_command_line_tools_know_what_megatrons_fsdp_saves(run: Run, tmp_path: Path) -> None:
    """Both directories have the same state; see tests/unit/test_through_dcp.py."""
    summaries = []
    for name, kind in (("ours", OURS), ("stock", MEGATRON_FSDP)):
        checkpoint = tmp_path / name / "iter_0000002"
        run(*kind, "--save", checkpoint.parent, "--exit-interval", "2", writer="stock")
        assert len(output_of("verify", checkpoint).splitlines()) == 1, "no note"
        assert output_of("args", checkpoint, "--keys", "use_megatron_fsdp") == "use_megatron_fsdp: true\n"
        rows = output_of("show", checkpoint).splitlines()[1:7]
        summaries.append({row.split()[0]: row for row in rows} | {"saved": rows[0].partition("by")[2]})
    assert summaries[0] == summaries[1]
    assert summaries[0]["saved"] == " 2 ranks (DP2)"
    assert summaries[0]["weights"] == "weights     429,568 parameters in float32, 1.72 MB in 28 tensors"
    assert summaries[0]["optimizer"] == "optimizer   exp_avg, exp_avg_sq, 3.44 MB in 56 tensors"
    (tmp_path / "ours" / "iter_0000002" / MANIFEST).unlink()
    assert "common state" not in output_of("repair", tmp_path / "ours" / "iter_0000002")
    resumed = run(*OURS, "--load", tmp_path / "ours", writer="stock")
    assert [rank.begun_at for rank in resumed.ranks] == [2, 2]


def output_of(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@needs_einops
def test_a_users_provider_is_saved_with_megatrons_fsdp_and_restored(
    run: Run, failing: Callable[..., Outcome], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    how = [*OURS, "--async-save", "--save", checkpoints.root, "--load", checkpoints.root]
    how += ["--datastates-providers", "steps_provider:Steps", "--save-interval", "2"]
    run(*how, "--exit-interval", "2")
    run(*how)
    for steps in (2, 4):
        saved = ds.open(checkpoints.at(steps))
        assert [saved.read_object(f"steps.rank{rank}.count") for rank in (0, 1)] == [{"count": steps}] * 2
    failed = failing(*how, STEPS_FAIL_ON_RANK_1="restore")
    assert failed.exits == [1, 1] and failed.log.count("restore does not work today") >= 2


@needs_einops
def test_megatrons_fsdp_saves_to_near_tiers(run: Run, whole: Ending, tmp_path: Path) -> None:
    far, near = Checkpoints(tmp_path / "far"), tmp_path / "near"
    how = ["--async-save", "--save", far.root, "--save-interval", "2", "--datastates-near", f"{near}-$RANK"]
    run(*OURS, *how, "--exit-interval", "2")
    assert far.published() == [2] and far.tracked() == 2
    for path in (far.at(2), next(Path(f"{near}-1").iterdir()) / "iter_0000002"):
        assert [one.name[:4] for one in path.iterdir() if one.suffix == ".pt"] == ["dcp-"]
    resumed = run(*OURS, "--load", far.root)
    assert [rank.begun_at for rank in resumed.ranks] == [2, 2]
    assert resumed.differences(whole) == []


@pytest.mark.long
@needs_einops
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])
def test_megatrons_fsdp_loads_on_other_ranks_as_from_stock(
    run: Run, tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    """Both directories have the same tensors: the runs that save them are the same."""
    endings = []
    for writer, kind in (("ours", OURS), ("stock", MEGATRON_FSDP)):
        place = tmp_path / writer
        saving = ["--save", place, "--exit-interval", "2"]
        run(*kind, *saving, writer="stock", ranks=saved_by)
        endings.append(run(*MEGATRON_FSDP, "--load", place, writer="stock", ranks=loaded_by))
    assert_ours(tmp_path / "ours" / "iter_0000002")
    ours, stock = endings
    assert [rank.begun_at for rank in ours.ranks] == [2] * loaded_by
    assert [rank.begun for rank in ours.ranks] == [rank.begun for rank in stock.ranks]
    assert ours.differences(stock) == []
