"""Every load leaves one line in the report file, whether it succeeds or fails."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import megatron_datastates as ds
from megatron_datastates.config import Options
from megatron_datastates.dcp import DataStatesReader
from megatron_datastates.errors import MismatchError, NotACheckpointError
from megatron_datastates.pipeline.load_report import reported_load

STATE = {"weight": torch.arange(1000.0), "note": ["a"]}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A checkpoint, the file for reports of its loads, and the report of its save."""
    report = ds.save(STATE, tmp_path / "ck", iteration=12)
    return tmp_path / "ck", tmp_path / "reports.jsonl", report


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_load_reports_what_it_read_and_how_long_it_took(
    saved: tuple[Path, Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    directory, reports, of_save = saved
    with caplog.at_level(logging.INFO):
        ds.load(directory, into={"weight": torch.zeros(1000)}, report_file=str(reports))
    (report,) = lines(reports)
    facts = {"event": "load", "state": "loaded", "error": None, "iteration": 12, "rank": 0, "ranks": 1}
    assert report.items() >= facts.items()
    assert (report["directory"], report["save_id"]) == (str(directory), of_save["save_id"])
    assert report["bytes"] == 4000
    assert report["bytes_read"] >= report["bytes"]
    parts = [report[name] for name in ("opening_ms", "planning_ms", "reading_ms")]
    assert min(parts) > 0 and sum(parts) <= report["total_ms"] + 0.01
    assert report["started_at"] <= time.time() - report["total_ms"] / 1000 + 0.001
    assert report["read_mb_per_s"] > 0
    assert "ranks_ms" not in report, "ds.load communicates with no other rank"
    assert f"datastates: loaded 0.0 MB from {directory}" in caplog.text


def test_the_slowest_rank_is_reported_where_it_is_known(
    saved: tuple[Path, Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    directory, reports, _ = saved
    with (
        caplog.at_level(logging.INFO),
        reported_load(directory, lambda: Options(report_file=str(reports))) as tracker,
    ):
        tracker.slowest = {"opening": (0.01, 7), "planning": (0.2, 9), "reading": (1.25, 17)}
    (report,) = lines(reports)
    assert report["ranks_ms"]["opening"] == {"max": 10.0, "slowest_rank": 7}
    assert report["ranks_ms"]["reading"] == {"max": 1250.0, "slowest_rank": 17}
    assert "; longest of all ranks: reading on rank 17, 1250.0 ms" in caplog.text


def test_every_load_reports_its_own_costs(saved: tuple[Path, Path, dict[str, Any]]) -> None:
    directory, reports, _ = saved
    for _ in range(2):
        ds.load(directory, report_file=str(reports))
    first, second = lines(reports)
    assert first["bytes"] == second["bytes"] > 4000
    assert first["bytes_read"] == second["bytes_read"]


@pytest.mark.parametrize(
    ("wanted", "rounded"),
    [(torch.bfloat16, 1), (torch.float32, 0), (torch.float64, 0)],
    ids=lambda value: str(value).removeprefix("torch."),
)
@pytest.mark.parametrize("how", ["ours", "dcp"])
def test_a_load_into_a_narrower_dtype_says_so_once(
    how: str,
    wanted: torch.dtype,
    rounded: int,
    saved: tuple[Path, Path, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, reports, _ = saved
    target = torch.zeros(1000, dtype=wanted)
    if how == "ours":
        ds.load(directory, into={"weight": target}, report_file=str(reports))
    else:
        reader = DataStatesReader(directory, report_file=str(reports))
        dcp.load({"weight": target}, storage_reader=reader, no_dist=True)
    assert torch.equal(target, torch.arange(1000.0).to(wanted))
    (report,) = lines(reports)
    assert report["rounded_tensors"] == rounded
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    expected = (
        f"1 of the tensors loaded from {directory} may have been rounded: "
        "'weight', for one, was loaded from float32 as bfloat16"
    )
    assert [text for text in warnings if "rounded" in text] == [expected] * rounded


def test_dcp_does_not_make_integers_of_floats(saved: tuple[Path, Path, dict[str, Any]]) -> None:
    target = torch.full((1000,), 7, dtype=torch.int32)
    with pytest.raises(CheckpointException, match=r"float32 and cannot become torch\.int32"):
        dcp.load({"weight": target}, storage_reader=DataStatesReader(saved[0]), no_dist=True)
    assert torch.equal(target, torch.full((1000,), 7, dtype=torch.int32))


def test_a_failed_load_reports_its_error(saved: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    directory, reports, of_save = saved
    with pytest.raises(MismatchError):
        ds.load(directory, into={"weight": torch.zeros(999)}, report_file=str(reports))
    with pytest.raises(NotACheckpointError):
        ds.load(tmp_path / "none", report_file=str(reports))
    mismatch, nothing = lines(reports)
    assert (mismatch["state"], mismatch["save_id"]) == ("failed", of_save["save_id"])
    assert mismatch["error"].startswith("MismatchError: tensor 'weight'")
    assert (nothing["state"], nothing["save_id"], nothing["iteration"]) == ("failed", None, None)
    assert str(tmp_path / "none") in nothing["error"]


def test_a_load_from_an_object_store_is_reported_with_its_url(tmp_path: Path) -> None:
    reports = tmp_path / "reports.jsonl"
    with reported_load("msc://store/run/iter_0000002", lambda: Options(report_file=str(reports))):
        pass
    assert [line["directory"] for line in lines(reports)] == ["msc://store/run/iter_0000002"]
