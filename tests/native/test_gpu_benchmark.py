"""The GPU benchmark, tried on the fake driver: that it runs, and what it keeps when a part of it does not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.bench import gpu

SCRIPT = Path(gpu.__file__).with_name("gpu.sh")
MEASURED: dict[str, Any] = {
    "copies": {"engine_to_bare": 0.97},
    "held": {
        "cases": {"16 GiB": {"held_ms": 5.5}},
        "device_bytes_by_driver": 0,
        "device_bytes_by_torch": 0,
    },
    "loads": {"device_bytes_by_torch": 0, "device_to_disk": 0.8},
    "steps": {"slowdown_percent": 1.0, "step_longer_than_copy": True},
}

ENDS_EARLY = """
import pathlib, sys
told = '{"part": "copies", "repeats": 1}\\n{"part": "copies", "repeats": 2}\\n{"part": "cop'
pathlib.Path(sys.argv[sys.argv.index("--into") + 1]).write_text(told)
sys.exit(5 if sys.argv[1] == "copies" else 0)
"""


def test_the_whole_benchmark_runs_on_the_fake_driver(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "WHEELS": "none", "OUT": str(tmp_path / "not here")}
    command = [SCRIPT, "--fake", "--out", tmp_path / "out", "--folder", tmp_path]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing is left of what was measured
    (path,) = (tmp_path / "out").iterdir()
    assert path.name.startswith("gpu-fake-")
    results = json.loads(path.read_text())
    assert results["of"] == gpu.MEANINGLESS and gpu.MEANINGLESS in ran.stdout
    parts = results["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(
        gpu.PART_SECONDS.keys() - {"tests"}, "done"
    )
    assert parts["copies"]["engine_to_bare"] > 0 < parts["copies"]["many_tensors"]["engine_to_bare"]
    assert parts["held"]["left_out"] == [] and len(parts["held"]["cases"]) == 4
    assert parts["steps"]["repeats"] == 2
    assert parts["pipeline"]["small_pool"]["durable_gb_per_s"] > 0
    assert parts["loads"]["to_device_gb_per_s"] > 0 < parts["loads"]["to_host_gb_per_s"]
    megatron = parts["megatron"]
    assert megatron["tensors_left_to_the_fence"] == megatron["tensors"]
    stock = {f"torch_dist_{way}" for way in ("sync", "async_fork", "async_persistent")}
    assert stock | {"datastates", "datastates_sync"} <= megatron["ways"].keys()
    assert stock <= megatron["ratios"].keys()
    assert [row["measured"] for row in results["bars"][2:4]] == [0, 0]


def test_a_process_that_is_late_ends_with_all_that_it_started(tmp_path: Path) -> None:
    begin = time.monotonic()
    hangs = f"sleep 1000 & echo $! > {tmp_path}/child; wait"
    assert gpu.run_process(["sh", "-c", hangs], 1.0, tmp_path / "log") == "ended after its 1 s"
    assert time.monotonic() - begin < 60
    stat = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    deadline = time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # its parent is gone
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_fails_tells_why(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo no such thing >&2; exit 7"]
    assert gpu.run_process(command, 60.0, tmp_path / "log") == "failed with 7: no such thing"


def test_a_part_that_ends_in_its_middle_keeps_what_it_told_and_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_part.py").write_text(ENDS_EARLY)
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setenv("OUT", "set")
    benchmark = gpu.Benchmark(gpu.parse(["--out", str(tmp_path / "out"), "--folder", str(tmp_path)]))
    benchmark.run(["copies"])
    benchmark.run(["held"])
    path = benchmark.write()
    benchmark.close()
    assert {file.name for file in path.parent.iterdir()} == {path.name, "gpu-copies.log", "gpu-held.log"}
    results = json.loads(path.read_text())
    assert results["parts"]["copies"]["status"].startswith("failed with 5")
    assert results["parts"]["copies"]["repeats"] == 2
    assert results["parts"]["held"]["status"].startswith("failed")  # it never said that it had measured
    assert all(row["met"] is None for row in results["bars"])


def test_parts_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    benchmark = gpu.Benchmark(gpu.parse(["--out", str(tmp_path), "--budget", "5"]))
    benchmark.run(["steps"])
    benchmark.close()
    assert benchmark.parts == {"steps": {"status": "left out: no time was left"}}


def test_bars_are_met_missed_or_not_measured() -> None:
    assert [row["met"] for row in gpu.check_bars(MEASURED)] == [True, False, True, True, True, False, True]
    assert [row["met"] for row in gpu.check_bars({})] == [None] * 7
    short = MEASURED | {"steps": {"slowdown_percent": 1.0, "step_longer_than_copy": False}}
    assert gpu.check_bars(short)[-1]["met"] is None


def test_results_of_a_gpu_go_where_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert gpu.parse([]).out == SCRIPT.parent / "results"
    assert gpu.parse(["--fake"]).out == gpu.ROOT / "build" / "bench"
    monkeypatch.setenv("OUT", "/elsewhere")
    assert gpu.parse([]).out == Path("/elsewhere")
    assert gpu.parse(["--fake"]).out == gpu.ROOT / "build" / "bench"
