"""The data loader of a script: its position is in the same checkpoint as the weights, and resumes exactly."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import megatron_datastates as ds
from tests.e2e.conftest import STEPS
from tests.support.ranks import RankForge
from tests.support.tiny import LAYOUTS, RANKS, Checkpoints, Ending, Pretraining

ATTACH = {"LOADER": "attach"}
ITERATIONS = ["--train-iters", str(STEPS)]
SAVED_AT = 2


class LoaderRuns:
    """Runs of a script with a data loader of its own."""

    def __init__(self, forge: RankForge, folder: Path) -> None:
        self.pretraining = Pretraining(forge, folder, target="loader_rank:main")
        self.seen: list[list[int]] = []  # by rank: the samples of the last run

    def run(self, *arguments: str | Path, environment: dict[str, str] = ATTACH) -> Ending:
        running = self.pretraining.start(*ITERATIONS, *arguments, environment=environment)
        ending = running.finish()
        self.seen = [
            json.loads((running.folder / f"data-rank{rank}.json").read_text()) for rank in range(RANKS)
        ]
        return ending


class Whole(NamedTuple):
    """An uninterrupted run: its end, the samples that each rank has seen, and its checkpoints."""

    ending: Ending
    seen: list[list[int]]
    checkpoints: Checkpoints


def saving(root: Path, *, every: int = SAVED_AT) -> list[str | Path]:
    return ["--save", root, "--save-interval", str(every), "--ckpt-format", "datastates", "--async-save"]


@pytest.fixture
def runs(forge: RankForge, tmp_path: Path) -> LoaderRuns:
    return LoaderRuns(forge, tmp_path / "runs")


@pytest.fixture(scope="module")
def whole(forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """Returns, by layout, an uninterrupted run that has saved. Each is run once."""

    @functools.cache
    def of(layout: str) -> Whole:
        folder = tmp_path_factory.mktemp("whole")
        runs, checkpoints = LoaderRuns(forge, folder / "runs"), Checkpoints(folder / "ck")
        ending = runs.run(*LAYOUTS[layout], *saving(checkpoints.root))
        return Whole(ending, runs.seen, checkpoints)

    return of


STORED = {"dp2": ["rank-0-of-2", "rank-1-of-2"], "tp2": ["rank-0-of-1"]}


@pytest.mark.parametrize("layout", STORED)
def test_a_run_resumes_in_the_middle_of_an_epoch_with_the_very_next_sample(
    layout: str, whole: Callable[[str], Whole], runs: LoaderRuns
) -> None:
    ending, seen, checkpoints = whole(layout)
    loading = ["--load", checkpoints.root, "--ckpt-step", str(SAVED_AT)]

    resumed = runs.run(*LAYOUTS[layout], *loading)

    steps_left = (STEPS - SAVED_AT) * len(seen[0]) // STEPS
    assert [len(samples) for samples in runs.seen] == [steps_left] * RANKS
    assert runs.seen == [samples[-steps_left:] for samples in seen]
    assert resumed.resumed_from(ending) == SAVED_AT
    assert resumed.differences(ending) == []
    objects = ds.open(checkpoints.at(SAVED_AT)).objects
    assert sorted(name for name in objects if name.startswith("dataloader")) == [
        f"dataloader.{name}" for name in STORED[layout]
    ]


def test_a_script_that_forgets_its_loader_does_not_train(
    whole: Callable[[str], Whole], runs: LoaderRuns
) -> None:
    layout = "dp2"
    ending, seen, checkpoints = whole(layout)
    loading = [*LAYOUTS[layout], "--load", checkpoints.root, "--ckpt-step", str(SAVED_AT)]

    failed = runs.pretraining.fail(*ITERATIONS, *loading)
    anew = runs.run(*loading, environment={"LOADER": "attach anew"})

    assert failed.exits == [1, 1] and "on 2 of 2 ranks no loader was set to it" in failed.log
    assert "attach_dataloader(loader)" in failed.log
    assert anew.resumed_from(ending) == SAVED_AT
    assert runs.seen == [samples[: len(ours)] for samples, ours in zip(seen, runs.seen, strict=True)]
    assert anew.differences(ending) != [], "other data, and yet the same weights: this test cannot fail"


def test_another_number_of_data_parallel_ranks_is_an_error_unless_strict_is_false(
    whole: Callable[[str], Whole], runs: LoaderRuns
) -> None:
    _, _, checkpoints = whole("dp2")
    weights = [*LAYOUTS["pp2"], "--load", checkpoints.root, "--no-load-optim", "--no-load-rng"]

    failed = runs.pretraining.fail(*ITERATIONS, "--ckpt-step", str(SAVED_AT), *weights, environment=ATTACH)
    begun = runs.run("--ckpt-step", str(SAVED_AT), *weights, environment={"LOADER": "attach not strict"})

    assert failed.exits == [1, 1]
    assert "has the positions of 2 data-parallel ranks, and this run has 1" in failed.log
    assert "The data loader starts from the beginning of its data" in begun.log


def test_megatrons_own_option_saves_into_the_checkpoint_and_writes_no_file(
    runs: LoaderRuns, tmp_path: Path
) -> None:
    checkpoints, files = Checkpoints(tmp_path / "ck"), tmp_path / "files"
    # With its rerun state, Megatron's own checkpoints do not resume with this strictness.
    own = [*LAYOUTS["dp2"], "--dataloader-save", files, "--rerun-mode", "disabled"]
    strict = ["--dist-ckpt-strictness", "raise_all"]

    whole, seen = runs.run(*own, *saving(checkpoints.root), environment={}), runs.seen
    resumed = runs.run(*own, "--load", checkpoints.root, "--ckpt-step", str(SAVED_AT), *strict)

    assert not files.exists()
    assert runs.seen == [samples[SAVED_AT:] for samples in seen]
    assert resumed.differences(whole) == []


@pytest.mark.parametrize("point", ["write manifest:2", "rename manifest:2"])
def test_a_kill_before_publication_leaves_neither_the_weights_nor_the_position(
    point: str, whole: Callable[[str], Whole], runs: LoaderRuns, tmp_path: Path
) -> None:
    layout = "dp2"
    ending, seen, _ = whole(layout)
    checkpoints, files = Checkpoints(tmp_path / "ck"), tmp_path / "files"
    faults = {"TINY_FAULTS_OF_RANK_0": f"{point}:kill"}

    killed = runs.pretraining.fail(
        *(*ITERATIONS, *LAYOUTS[layout], *saving(checkpoints.root), "--dataloader-save", files),
        environment=ATTACH | faults,
    )
    resumed = runs.run(*LAYOUTS[layout], "--load", checkpoints.root)

    assert killed.exits[0] == -9
    assert any(checkpoints.at(2 * SAVED_AT).glob("data-*")), "the kill came before the data was written"
    assert checkpoints.published() == [SAVED_AT] and checkpoints.tracked() == SAVED_AT
    assert not files.exists()
    assert resumed.resumed_from(ending) == SAVED_AT
    assert runs.seen == [samples[SAVED_AT:] for samples in seen]
    assert resumed.differences(ending) == []
