"""What prune looks at again before each removal: what may keep a checkpoint by now, and not all others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_datastates.cli.prune import other_formats
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.runs.jobs import note_job
from megatron_datastates.pipeline.upkeep import retention
from megatron_datastates.pipeline.upkeep.prune import prune
from megatron_datastates.pipeline.upkeep.retention import RetentionRules
from tests.unit.command import run
from tests.unit.pruning import NUMBERS, complete, place
from tests.unit.pruning import root as root
from tests.unit.pruning import saved as saved
from tests.unit.test_prune import save_job, track
from tests.unit.test_prune_beside_saves import at_point


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Gets a run's directory each time that all of its iterations are looked at."""
    found, look = list[Path](), retention._look
    monkeypatch.setattr(retention, "_look", lambda path, *more: (found.append(path), look(path, *more))[1])
    return found


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the tracker names it": (lambda root: (root / TRACKER_NAME).write_text("200"), "the tracker names it"),
    "another prune removes one of the last": (lambda root: shutil.rmtree(place(root, 300)), "of the last 3"),
    "another removal of the newest begins": (
        lambda root: (place(root, 500) / MANIFEST_NAME).unlink(),
        "one of the last 3",
    ),
    "a link leads to it": (lambda root: (root / "best").symlink_to("iter_0000200"), "the link best points"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_needed_since_the_plan_stays(
    change: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile, why = CHANGES[change]
    reported: dict[int, str] = {}
    at_point(monkeypatch, "remove directory", lambda: meanwhile(root))  # of 100
    gone = prune(root, RetentionRules(keep_last=3), stays=lambda one, why: reported.update({one.number: why}))
    assert [one.number for one in gone] == [100] and reported.keys() == {200} and why in reported[200]


def test_what_somebody_else_has_removed_since_the_plan_is_neither_gone_nor_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_point(monkeypatch, "remove directory", lambda: shutil.rmtree(place(root, 200)))
    reported: list[str] = []
    gone = prune(root, RetentionRules(keep_last=3), stays=lambda one, why: reported.append(why))
    assert [one.number for one in gone] == [100] and reported == []


def test_all_iterations_are_looked_at_again_only_after_a_change(
    root: Path, monkeypatch: pytest.MonkeyPatch, looks: list[Path]
) -> None:
    at_point(monkeypatch, "remove directory", lambda: (root / TRACKER_NAME).write_text("400"))
    assert len(prune(root, RetentionRules(keep_last=1))) == 3
    assert len(looks) == 2 and complete(root) == [400, 500]


def test_all_iterations_are_looked_at_once_where_nothing_changes(root: Path, looks: list[Path]) -> None:
    assert len(prune(root, RetentionRules(keep_last=1))) == 4 and len(looks) == 1


def test_all_iterations_are_looked_at_once_where_only_the_optimizers_go(
    tmp_path: Path, looks: list[Path]
) -> None:
    save_job(tmp_path, NUMBERS)
    track(tmp_path, 500)
    code, printed, _ = run("prune", tmp_path, "--keep-last", 1, "--drop-optimizer", "--yes")
    assert code == 0 and len(looks) == 1, printed


@pytest.mark.parametrize("others", [False, True], ids=["datastates", "and torch_dist"])
def test_the_cost_of_a_removal_does_not_grow_with_the_run(
    others: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("stat", "lstat", "open", "scandir", "listdir"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, of=original, n=name, **k: (asked.append(n), of(*a, **k))[1])

    def cost_of_each(count: int) -> float:
        larger = tmp_path / f"with {count}"
        for number in range(1, count):
            shutil.copytree(place(root, 100), place(larger, number))
        shutil.copytree(place(root, 500), place(larger, 500))
        track(larger, 500)
        asked.clear()
        gone = prune(larger, RetentionRules(keep_last=1), other_formats(larger) if others else {})
        assert len(gone) == count - 1
        return len(asked) / count

    few, many = cost_of_each(10), cost_of_each(40)
    assert many < 1.1 * few


def test_what_a_job_has_gone_back_to_since_the_plan_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first save has begun: the list of jobs names it, and the tracker what it has left."""
    saved = save_job(tmp_path, NUMBERS)
    track(tmp_path, 500)
    resumed, own = SaveId.parse(saved[200].save_id), SaveId(run_id=7, ordinal=1)
    at_point(monkeypatch, "remove directory", lambda: note_job(tmp_path, own, 200, resumed=resumed))
    reported: dict[int, str] = {}
    prune(tmp_path, RetentionRules(keep_last=1), stays=lambda one, why: reported.update({one.number: why}))
    assert reported == {200: "the newest complete one"}


def test_of_two_branches_none_goes_once_the_tracked_checkpoint_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone shows which of them is the present one."""
    first = save_job(tmp_path, [100])[100]
    save_job(tmp_path, [400, 500], first)
    save_job(tmp_path, [200, 300], first)
    track(tmp_path, 200)
    at_point(monkeypatch, "remove directory", lambda: shutil.rmtree(place(tmp_path, 200)))
    prune(tmp_path, RetentionRules(keep_last=1))
    assert complete(tmp_path) == [300, 500]
