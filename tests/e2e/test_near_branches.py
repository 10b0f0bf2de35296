"""Runs that were rolled back: a resume goes on with the newest branch, which it knows by the manifests.

One rank. Branch A saves iteration 2, and then newer ones in its near tier only, until it is killed. Branch B
is the run rolled back to iteration 2.
"""

import shutil
from pathlib import Path

import pytest

from megatron_datastates.format.manifest import Ancestor, Manifest
from tests.support.ranks import RankForge
from tests.support.tiny import MANIFEST, Checkpoints, Ending, Pretraining, waits_in

STEPS = 40
NEVER = ["--datastates-drain-every", "1000"]  # of a job that is killed, no checkpoint becomes far


class Run:
    """A run on one rank, its near tier, and --save."""

    def __init__(self, forge: RankForge, folder: Path) -> None:
        self._pretraining = Pretraining(forge, folder / "runs", ranks=1)
        self.far, self._near = Checkpoints(folder / "far" / "run"), folder / "near"
        self._folder = folder

    def keep(self) -> None:
        """Keeps a copy of all checkpoints."""
        for name in ("far", "near"):
            shutil.copytree(self._folder / name, self._folder / "kept" / name)

    def restore(self) -> None:
        """Puts what is in the copy in the place of all checkpoints."""
        for name in ("far", "near"):
            shutil.rmtree(self._folder / name)
            shutil.copytree(self._folder / "kept" / name, self._folder / name)

    def _arguments(self, *more: str, near: bool = True) -> list[str]:
        save = str(self.far.root)
        return [
            *("--train-iters", str(STEPS), "--ckpt-format", "datastates", "--async-save"),
            *("--save", save, "--load", save, "--save-interval", "2"),
            *(("--datastates-near", str(self._near)) if near else ()),
            *more,
        ]

    def run(self, *more: str, near: bool = True) -> Ending:
        return self._pretraining.run(*self._arguments(*more, near=near))

    def near(self) -> list[int]:
        """Returns the iterations that are published in the near tier."""
        return sorted(int(path.parent.name[5:]) for path in self._near.glob(f"*/iter_*/{MANIFEST}"))

    def kill_at(self, iteration: int, *more: str) -> int:
        """Runs until this iteration is published near, kills the run, and returns the newest one there."""
        how = self._arguments(*NEVER, "--step-delay-ms", "200", *more)
        running = self._pretraining.start(*how, environment=waits_in(12))
        running.job.wait_until(lambda: bool(self.near()) and self.near()[-1] >= iteration, 60)
        running.job.kill()
        return self.near()[-1]

    def kill_in_first_save(self, *more: str) -> None:
        """Runs until the index of the first save is about to be written; nothing of it is published."""
        environment = {"MEGATRON_DATASTATES_FAULTS": "write index:1:kill"}
        self._pretraining.start(*self._arguments(*NEVER, *more), environment=environment).fail()

    def lose(self, iteration: int) -> None:
        """Removes the data files of a checkpoint from the near tier."""
        for path in self._near.glob(f"*/iter_{iteration:07d}/data-*"):
            path.unlink()

    def manifest(self, iteration: int) -> Manifest:
        path = self.far.at(iteration) / MANIFEST
        return Manifest.decode(path.read_bytes(), str(path))

    def ancestors(self, iteration: int) -> list[Ancestor]:
        return list(self.manifest(iteration).ancestors)

    def ancestor(self, iteration: int) -> Ancestor:
        return Ancestor(iteration, str(self.manifest(iteration).save_id))


@pytest.fixture(scope="module")
def killed(forge: RankForge, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, int]:
    """Returns a run with iteration 2 far and newer ones only near, and the newest of these."""
    run = Run(forge, tmp_path_factory.mktemp("run"))
    run.run("--exit-interval", "2")
    assert run.far.tracked() == 2
    newest = run.kill_at(6)
    assert run.far.tracked() == 2 and run.far.published() == [2]
    run.keep()
    return run, newest


@pytest.fixture
def branch_a(killed: tuple[Run, int]) -> tuple[Run, int]:
    """Returns that run, in the same place: names in a near tier depend on it."""
    killed[0].restore()
    return killed


def test_a_resume_continues_a_run_that_was_killed(branch_a: tuple[Run, int]) -> None:
    run, newest = branch_a
    resumed = run.run("--exit-interval", str(newest + 2))
    assert resumed.ranks[0].begun_at == newest
    assert run.ancestors(2) == []
    assert run.ancestors(newest) == [run.ancestor(2)]
    assert run.ancestors(newest + 2) == [run.ancestor(2), run.ancestor(newest)]


def test_a_rollback_by_a_job_without_near_tier(branch_a: tuple[Run, int]) -> None:
    run, newest = branch_a
    run.run("--ckpt-step", "2", "--exit-interval", "4", near=False)
    assert run.far.tracked() == 4 and run.ancestors(4) == [run.ancestor(2)]
    resumed = run.run("--exit-interval", "6")
    assert resumed.ranks[0].begun_at == 4
    assert f"iter_{newest:07d} in a near tier is skipped: it does not follow iteration 4" in resumed.log


def test_a_rollback_whose_first_save_is_lost(branch_a: tuple[Run, int]) -> None:
    run, newest = branch_a
    later = run.kill_at(newest + 1, "--ckpt-step", "2", "--save-interval", str(newest + 1))
    run.lose(later)
    resumed = run.run("--exit-interval", "4")
    assert resumed.ranks[0].begun_at == 2
    left = f"iter_{newest:07d} in a near tier is skipped: a later job continued from iteration 2 without it"
    assert left in resumed.log


def test_a_rollback_that_is_killed_in_its_first_save(branch_a: tuple[Run, int]) -> None:
    run, newest = branch_a
    run.kill_in_first_save("--ckpt-step", "2", "--save-interval", str(newest + 1))
    assert run.near()[-1] == newest
    resumed = run.run("--exit-interval", "4")
    assert resumed.ranks[0].begun_at == 2
    left = f"iter_{newest:07d} in a near tier is skipped: a later job continued from iteration 2 without it"
    assert left in resumed.log


def test_a_wanted_iteration_is_brought_from_the_near_tier(branch_a: tuple[Run, int]) -> None:
    run, newest = branch_a
    resumed = run.run("--ckpt-step", str(newest), "--exit-interval", str(newest + 2))
    assert resumed.ranks[0].begun_at == newest
    assert f"iteration {newest} is not in" in resumed.log
    assert run.ancestors(newest + 2) == [run.ancestor(2), run.ancestor(newest)]
