"""Resumes from what a tracker names, although a newer checkpoint continues it: rank 0's log says so."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_datastates.format.directory import TRACKER_NAME, iteration_name
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.load import state
from megatron_datastates.mcore.load.opening import open_checkpoint
from megatron_datastates.mcore.training import lagging
from megatron_datastates.mcore.training import load as loads
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.runs import branches
from megatron_datastates.pipeline.runs.branches import Origin, origin_in
from tests.unit.states import State, new_saver


class Run:
    """A run whose first job has saved 1, 2 and 3; the tracker names 1, and was written before 2 was saved."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.root, self.caplog = root, caplog
        self.save(Origin(), 1, 2, 3)
        self.track(1, hours_ago=1)
        self.args = SimpleNamespace(load=str(root), ckpt_step=None, finetune=False, rank=0)
        monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: self.args)
        caplog.set_level(logging.INFO, logger="megatron_datastates")

    def save(self, origin: Origin, *iterations: int) -> None:
        saver = new_saver()
        extras = PublicationExtras(origin=origin)
        for iteration in iterations:
            there = self.root / iteration_name(iteration)
            saver.start(there, State({"w": torch.ones(3)}, {}), extras=extras).wait()
        saver.close()

    def track(self, iteration: int, hours_ago: float = 0.0) -> None:
        tracker = self.root / TRACKER_NAME
        tracker.write_text(str(iteration))
        at = tracker.stat().st_mtime - 3600 * hours_ago
        os.utime(tracker, (at, at))

    def resume(self, folder: str = "") -> str:
        """Loads what the tracker, or --ckpt-step, names; returns what was logged."""

        def load_checkpoint() -> tuple[int, int]:
            iteration = self.args.ckpt_step or int((self.root / TRACKER_NAME).read_text())
            directory = state.current().directory = str(self.root / folder / iteration_name(iteration))
            open_checkpoint(directory)
            return iteration, 0

        self.caplog.clear()
        loads.wrap_load_checkpoint(load_checkpoint)
        return self.caplog.text

    def unpublish(self, iteration: int) -> None:
        (self.root / iteration_name(iteration) / MANIFEST_NAME).unlink()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Run:
    return Run(tmp_path, monkeypatch, caplog)


def test_a_tracker_that_lags_is_said_with_what_loads_the_newest_checkpoint(run: Run) -> None:
    said = run.resume()
    assert "WARNING" in said and len(run.caplog.records) == 1
    assert f"{run.root}/iter_0000001 was loaded, as the tracker names it, although iteration 3, which" in said
    assert "start again with --ckpt-step 3 before this job saves" in said
    run.unpublish(3)  # its save was killed
    assert "although iteration 2," in run.resume()
    run.unpublish(2)
    assert run.resume() == ""


def test_a_run_that_was_set_back_by_hand_is_information(run: Run) -> None:
    run.track(1)
    said = run.resume()
    assert "although iteration 3," in said and "WARNING" not in said and "INFO" in said


def test_what_a_rollback_has_left_is_not_named(run: Run) -> None:
    """A second job went back to 1 and was killed at its second save, before it wrote the tracker."""
    run.save(origin_in(run.root / iteration_name(1), 1), 2)
    run.track(2)
    assert run.resume() == "", "3 is of the branch that was left"
    run.track(1, hours_ago=1)
    assert "although iteration 2," in run.resume(), "3 continues 1, too, and the second job has left it"
    run.save(origin_in(run.root / iteration_name(2), 2), 4)
    assert "although iteration 4," in run.resume()


def test_where_a_job_has_begun_anew_what_continues_the_loaded_one_is_named(run: Run) -> None:
    run.save(Origin(), 10)
    assert "although iteration 2," in run.resume()


def test_what_was_chosen_and_what_ckpt_step_cannot_choose_is_not_named(run: Run) -> None:
    run.args.ckpt_step = 1
    assert run.resume() == ""
    run.args.ckpt_step = None
    (run.root / "non_persistent").mkdir()
    for iteration in (1, 2, 3):
        (run.root / iteration_name(iteration)).rename(run.root / "non_persistent" / iteration_name(iteration))
    assert run.resume("non_persistent") == ""


def test_the_look_costs_one_list_and_the_manifests_of_three_checkpoints(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rollback, hundreds of newer ones may be there, each with a manifest of megabytes."""
    run.save(Origin(), *range(10, 40))  # by a job that began anew
    run.unpublish(39)
    lists, read = list[object](), set[Path]()
    names_in, read_regular = lagging.names_in, branches.read_regular
    monkeypatch.setattr(lagging, "names_in", lambda path: (lists.append(path), names_in(path))[1])
    monkeypatch.setattr(branches, "read_regular", lambda path, n: (read.add(path), read_regular(path, n))[1])
    assert "although iteration 2," in run.resume()
    assert lists == [run.root] and {path.parent for path in read} == {
        run.root / iteration_name(iteration) for iteration in (1, 2, 38)
    }


def test_no_load_fails_as_its_run_cannot_be_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lagging, "names_in", fail)
    assert run.resume() == ""
