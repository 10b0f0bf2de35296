"""A resumed run equals the one that was never interrupted, to the last bit, on every rank."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import STEPS, Reference
from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, Checkpoints, Pretraining

OPTIMIZER = {"dp_reshardable": [], "fully_reshardable": ["--dist-ckpt-optim-fully-reshardable"]}
MODE = {"async": ["--async-save"], "sync": []}
WRITERS = {"parallel_save": [], "plain_save": ["--no-ckpt-fully-parallel-save"]}
ITERATIONS = ["--train-iters", str(STEPS)]
OVERLAPPED = ["--overlap-grad-reduce", "--overlap-param-gather"]
VIRTUAL = [*LAYOUTS["pp2"], "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"]
SCHEDULES: dict[str, tuple[int, list[str]]] = {  # ranks, and arguments
    "overlapped gathers": (2, OVERLAPPED),
    "virtual stages": (2, VIRTUAL),
    # With both, the pass after a save gathers all weights again, while they are copied.
    "virtual stages with overlapped gathers": (4, [*OVERLAPPED, *VIRTUAL, "--global-batch-size", "4"]),
}


def saves_reported(report: Path) -> list[tuple[int, str, str]]:
    """Returns (iteration, mode, state) of each save in a report file."""
    events = [json.loads(line) for line in report.read_text().splitlines()]
    saves = [event for event in events if event["event"] == "save"]
    return [(save["iteration"], save["mode"], save["state"]) for save in saves]


@pytest.mark.parametrize("layout", list(reversed(LAYOUTS)))
@pytest.mark.parametrize("optimizer", OPTIMIZER)
@pytest.mark.parametrize("mode", MODE)
@pytest.mark.parametrize("writers", WRITERS)
def test_resumed_run_equals_uninterrupted_one(
    layout: str,
    optimizer: str,
    mode: str,
    writers: str,
    ckpt_format: str,
    pretraining: Pretraining,
    reference: Reference,
    tmp_path: Path,
) -> None:
    if mode == "async" and ckpt_format != "datastates":
        pytest.skip("stock --async-save needs a worker process that knows no stand-ins")
    checkpoints, report = Checkpoints(tmp_path / "checkpoints"), tmp_path / "report.jsonl"
    how: list[str | Path] = [*LAYOUTS[layout], *ITERATIONS, "--ckpt-format", ckpt_format]
    how += [*OPTIMIZER[optimizer], *WRITERS[writers]]
    saving: list[str | Path] = ["--save", checkpoints.root, "--save-interval", "3", *MODE[mode]]
    if ckpt_format == "datastates":
        saving += ["--datastates-report-file", report]

    saved = pretraining.run(*how, *saving)
    resumed = pretraining.run(*how, "--load", checkpoints.root, "--ckpt-step", "3")

    assert saved.differences(reference(layout)) == [], "saving changed what was trained"
    assert resumed.resumed_from(reference(layout)) == 3
    assert resumed.differences(reference(layout)) == []
    checkpoints.assert_format(3, ckpt_format)
    assert checkpoints.tracked() == STEPS
    if ckpt_format == "datastates":
        assert saves_reported(report) == [(3, mode, "published"), (STEPS, mode, "published")]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_run_with_another_schedule_equals_the_uninterrupted_one(
    schedule: str, forge: RankForge, tmp_path: Path
) -> None:
    """From a full save and from a prepared one. Each run saves at its end, which gathers the last weights."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    ranks, arguments = SCHEDULES[schedule]
    pretraining = Pretraining(forge, tmp_path / "runs", ranks=ranks)
    how = [*arguments, *ITERATIONS, "--ckpt-format", "datastates"]
    only_last = ["--save-interval", "1000", "--save"]
    uninterrupted = pretraining.run(*how, *only_last, tmp_path / "uninterrupted")
    saved = pretraining.run(*how, "--async-save", "--save-interval", "2", "--save", checkpoints.root)
    assert saved.differences(uninterrupted) == [], "saving changed what was trained"
    for step in (2, 4):
        load = ["--load", checkpoints.root, "--ckpt-step", str(step)]
        resumed = pretraining.run(*how, *load, *only_last, tmp_path / f"resumed{step}")
        assert [rank.begun_at for rank in resumed.ranks] == [step] * ranks
        assert resumed.differences(uninterrupted) == []


@pytest.mark.conformance
def test_formats_alternate_from_one_resume_to_the_next_without_flags(
    ckpt_format: str, pretraining: Pretraining, reference: Reference, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    previous = reference("tp2")
    for stop, name in {2: "torch_dist", 4: ckpt_format, 6: "torch_dist"}.items():
        ending = pretraining.run(
            *(*LAYOUTS["tp2"], *ITERATIONS, "--exit-interval", str(stop)),
            *("--save", checkpoints.root, "--load", checkpoints.root, "--ckpt-format", name),
        )
        assert stop == 2 or ending.resumed_from(previous) == stop - 2
        assert ending.differences(reference("tp2")) == []
        checkpoints.assert_format(stop, name)
        previous = ending
