"""The simulator of large checkpoints, tried on tiny models: that it runs, and what it reports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench import machine

SCRIPT = Path(machine.__file__).with_name("scale.py")
PARTS = ("plan", "commit", "load", "load_traced", "reshard", "reshard_traced")


def simulate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--quick", "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_every_measure_of_every_layout_is_reported(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    ran = simulate(tmp_path / "in", "--out", str(tmp_path / "scale.json"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not any((tmp_path / "in").iterdir()), "nothing is left of what was measured"
    results = json.loads((tmp_path / "scale.json").read_text())
    assert results["machine"]["packages"]["megatron-core"]
    assert results["layouts"].keys() == {"tiny-8", "tiny-MoE-16"}
    for name, layout in results["layouts"].items():
        assert str(layout["ranks"]) == name.rpartition("-")[2]
        assert all(layout[part]["status"] == "done" for part in PARTS), ran.stderr
        assert_planned(layout["plan"])
        assert_committed_and_opened(layout)
    assert results["bars"] == [], "promises are about 16,384 ranks"
    assert "<svg" in (tmp_path / "scale.svg").read_text()


def assert_planned(plan: dict[str, Any]) -> None:
    assert plan["fragments"] > plan["largest_fragments"] >= plan["median_fragments"] > 0
    assert plan["largest_rank_ms"] > 0 < plan["median_rank_ms"]
    counts = [int(count) for count in plan["ms_by_fragments"]]
    assert counts == [counts[0] * factor for factor in (1, 2, 4, 8)]
    assert plan["steepness"] > 0


def assert_committed_and_opened(layout: dict[str, Any]) -> None:
    commit, load, reshard = layout["commit"], layout["load"], layout["reshard"]
    assert commit["merged_index_bytes"] > layout["plan"]["largest_index_bytes"]
    assert commit["cached_seconds"] > 0 < commit["merge_seconds"]
    assert load["seconds"] > 0 < reshard["seconds"]
    assert load["reads"] >= load["requested"] > reshard["requested"] > 0
    assert layout["load_traced"]["mib"] > 0 < layout["reshard_traced"]["mib"]
