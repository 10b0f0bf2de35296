"""Near tiers after a rollback: a node that was away does not bring back what a later job has abandoned."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from megatron_datastates.errors import FormatError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.values import SaveId
from megatron_datastates.pipeline.near import drain
from megatron_datastates.pipeline.near.jobs import JOBS_NAME, Job, abandoned_by, jobs_in, note_job
from tests.unit.test_near_tier import Nodes, abandon, killed, recover
from tests.unit.test_near_tier_trouble import next_job

A, B, C = 0xA, 0xB, 0xC


# -- lists -----------------------------------------------------------------------------------------------


def test_each_job_is_noted_once_in_order(tmp_path: Path) -> None:
    assert jobs_in(tmp_path) == []
    for save_id, iteration in ((SaveId(A, 1), 1), (SaveId(B, 3), 7), (SaveId(A, 2), 9), (SaveId(C, 1), 0)):
        note_job(tmp_path, save_id, iteration)
    assert jobs_in(tmp_path) == [Job(A, 1), Job(B, 7), Job(C, 0)]
    assert (tmp_path / JOBS_NAME).read_text().startswith("000000000000000a 1\n000000000000000b 7\n")


@pytest.mark.parametrize("text", [b"x", b"000000000000000a 1\n\n", b"000000000000000a", b"\xff\xfe"])
def test_a_damaged_list_is_refused_and_kept(text: bytes, tmp_path: Path) -> None:
    (tmp_path / JOBS_NAME).write_bytes(text)
    with pytest.raises(FormatError, match="is damaged"):
        note_job(tmp_path, SaveId(A, 1), 1)
    assert (tmp_path / JOBS_NAME).read_bytes() == text


@pytest.mark.parametrize(
    ("run_id", "iteration", "later"),
    [
        (A, 10, B),  # B went on from before 7
        (A, 7, B),
        (A, 6, None),  # B may have begun with it
        (B, 12, C),
        (B, 8, None),
        (C, 20, None),  # the newest job
        (0xD, 20, None),  # a job that no list names
    ],
)
def test_a_checkpoint_is_abandoned_if_a_later_job_saved_an_earlier_iteration(
    run_id: int, iteration: int, later: int | None
) -> None:
    lists = [[], [Job(A, 1)], [Job(A, 1), Job(B, 7), Job(C, 9)]]
    found = abandoned_by(run_id, iteration, lists)
    assert (found and found.run_id) == later


# -- jobs ------------------------------------------------------------------------------------------------


def away_and_back(tmp_path: Path) -> Nodes:
    """Returns node 1 alone after a rollback that it did not see; its near tier has iteration 10, whole."""
    nodes = Nodes(tmp_path)
    for iteration in (5, 10):
        nodes.save(iteration)
    nodes.close()
    for path in nodes.near(0, 10).glob("data-*"):  # as with copies on other nodes
        shutil.copy(path, nodes.near(1, 10))
    shutil.move(nodes.roots[1], tmp_path / "away")
    (nodes.run / TRACKER_NAME).write_text("5")  # as --ckpt-step 5 takes it
    shutil.rmtree(nodes.directory(10))
    after = next_job(tmp_path)
    for iteration in (7, 8):
        after.save(iteration)
    after.close()
    (after.run / TRACKER_NAME).write_text("8")
    shutil.rmtree(after.roots[1])
    shutil.move(tmp_path / "away", after.roots[1])
    shutil.rmtree(after.roots[0])
    third = next_job(tmp_path, run_id=6)
    third.roots.reverse()
    return third


def test_a_node_that_was_away_does_not_bring_back_an_abandoned_branch(tmp_path: Path) -> None:
    third = away_and_back(tmp_path)
    iteration, said = recover(third)
    assert iteration is None and (third.run / TRACKER_NAME).read_text() == "8"
    assert "iter_0000010 in a near tier is left: a later job" in said and "saved iteration 7" in said
    assert str(third.run / JOBS_NAME) in said
    (third.run / JOBS_NAME).unlink()
    assert recover(third)[0] == 10, "as the line says"
    third.close()


def test_a_job_that_goes_on_is_no_rollback(tmp_path: Path) -> None:
    nodes = killed(tmp_path)  # with iteration 3 near
    assert recover(nodes)[0] == 3
    again = next_job(tmp_path, faults="drain write:0:EIO")
    again.save(4)
    abandon(again)
    for path in again.near(1, 4).glob("data-*"):
        shutil.copy(path, again.near(0, 4))
    assert recover(next_job(tmp_path, run_id=6))[0] == 4


def test_jobs_are_noted_in_save_and_in_near_tiers(tmp_path: Path) -> None:
    for run_id, iteration in ((4, 1), (5, 21)):
        nodes = next_job(tmp_path, run_id=run_id)
        nodes.save(iteration)
        nodes.save(iteration + 10)
        nodes.close()
    for folder in (nodes.run, nodes.near(0, 1).parent, nodes.near(1, 1).parent):
        assert jobs_in(folder) == [Job(4, 1), Job(5, 21)]


def test_a_list_that_cannot_be_written_is_tried_again_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[Path] = []

    def failing(folder: Path, save_id: SaveId, iteration: int) -> None:
        attempts.append(folder)
        if attempts.count(folder) < 3:
            raise OSError(5, "Input/output error")
        note_job(folder, save_id, iteration)

    monkeypatch.setattr(drain, "note_job", failing)
    nodes = next_job(tmp_path)
    with caplog.at_level(logging.WARNING):
        for iteration in (1, 2, 3, 4):
            nodes.save(iteration)
        nodes.close()
    assert jobs_in(nodes.run) == [Job(5, 1)]
    assert caplog.text.count("this job is not noted there yet") == 2, "once on each of the two ranks"
    for iteration in (3, 4):
        nodes.check(iteration)
