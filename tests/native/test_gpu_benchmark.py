"""The GPU benchmark, tried on the fake driver: that it runs, and what it keeps when a part of it does not."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import benchmark, picture, processes, results, training
from benchmarks.gpu.__main__ import RESULTS, main, parse
from benchmarks.gpu.environment import FAKE, ROOT, split

SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"
HELD: dict[str, Any] = {
    "cases": {"16 GiB": {"held_ms": 5.5}},
    "first_save": {"device_bytes_not_named": 0, "device_bytes_by_torch": 0},
    "device_bytes_of_later_saves": 0,
    "device_bytes_by_torch": 4096,
}
MEASURED: dict[str, Any] = {
    "copies": {case: {"discard_to_bare": ratio} for case, ratio in (("large", 0.97), ("many", 0.94))},
    "held": HELD,
    "loads": {"device_bytes_by_torch": 0, "device_to_disk": 0.8},
    "steps": {
        "discard": {"slowdown_of_the_mean_percent": 2.9, "slowdown_of_the_copying_step_percent": 3.1},
        "disk": {"slowdown_of_the_mean_percent": -0.5},
    },
    "held_one_connection": {"cases": {"16 GiB": {"held_ms": 4.5}}},
}

ENDS_EARLY = """
import pathlib, sys
report = '{"part": "copies", "repeats": 1}\\n{"part": "copies", "repeats": 2}\\n{"part": "cop'
pathlib.Path(sys.argv[sys.argv.index("--into") + 1]).write_text(report)
sys.exit(5 if sys.argv[1] == "copies" else 0)
"""

# Each thing that a save should not do, done on purpose: the values that are printed must show it.
BAD_ON_PURPOSE = """
import json, pathlib, sys, time
from benchmarks.gpu import device as devices, copies, held, memory
from benchmarks.gpu.context import Part
from benchmarks.gpu.driver import BareCopies
from benchmarks.gpu.saves import DeviceSaves
import torch
folder = pathlib.Path(sys.argv[1])
device = devices.Device(folder)
shard = devices.make_shard(8 << 20, 4)
found = {}

slow = {
    "discard": DeviceSaves(device, folder, 64 << 20, discard=True, copy_limit=20 << 20),
    "small_pool": DeviceSaves(device, folder, 64 << 20, discard=True),
}
for saves in slow.values():
    saves.make_pool()
(values,) = copies.compare(slow, BareCopies(device.driver, 8 << 20, folder), shard, [0])
found |= {name: values[f"{name}_to_bare"] for name in slow}

torch.cuda.synchronize = lambda: time.sleep(0.05)
parts = slow["small_pool"].held(shard, synchronize=True, work=lambda: time.sleep(0.2))
found |= {"held": parts["held"], "synchronize": parts["synchronize"]}
torch.cuda.synchronize = lambda: None
parts = slow["discard"].held(shard, synchronize=True, work=None)
found["fenced_too_early"] = parts["fence"]

taken, start = 0, DeviceSaves.start
devices.Device.free_bytes = lambda self: (64 << 20) - taken
def start_and_take(self, provider):
    global taken
    taken += 4096
    return start(self, provider)
DeviceSaves.start = start_and_take
saves = DeviceSaves(device, folder, 64 << 20, discard=True)
found["first_save"] = held.measure_first_save(device, saves, shard, held.Work())

memory.free_bytes = lambda: 10 << 20
report = {}
held.measure_held(Part(device, folder, True, time.monotonic(), lambda **values: report.update(values)))
found |= {"cases": list(report["cases"]), "left_out": report["left_out"]}
found["least"] = memory.fitting([1 << 40], device, folder)
print(json.dumps(found))
"""


def run_script(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = os.environ | {"PYTHON": sys.executable, "WHEELS": "none"} | environment
    command = [SCRIPT, *map(str, arguments)]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=280)


def run_as_part(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Makes parts run a program of the test's."""
    (folder / "part.py").write_text(program)
    monkeypatch.setattr(benchmark, "PART_COMMAND", (sys.executable, str(folder / "part.py")))


@pytest.mark.long
@pytest.mark.timeout(600)  # three calls, of two minutes each on a busy machine
def test_all_calls_run_on_the_fake_driver_and_become_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for call in benchmark.CALLS:
        options = ("--fake", "--call", call, "--out", out, "--folder", tmp_path)
        ran = run_script(*options, OUT=str(tmp_path / "not here"))
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert benchmark.MEANINGLESS in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing is left of what was measured
    assert not list(Path("/dev/shm").glob("datastates-bench-*"))
    *calls, whole = sorted(out.iterdir())
    assert [call.stem[-6:] for call in calls] == ["-call1", "-call2", "-call3"]
    whole_results = json.loads(whole.read_text())
    assert whole_results["of"] == benchmark.MEANINGLESS and whole_results["native_module"] == "as found"
    parts = whole_results["parts"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(
        benchmark.PART_SECONDS.keys() - {"tests"}, "done"
    )
    assert parts["page_locking"]["collapsed"]["4_threads"]["lock_gb_per_s"] > 0
    assert parts["page_locking"]["pools"]["0.125 GiB"]["seconds"] > 0
    for suffix, connections in (("", None), ("_one_connection", "1"), ("_8_for_copies", "1")):
        steps = parts[f"steps{suffix}"]
        assert steps["connections"] == connections and steps["repeats"] == 2
        assert {"alone", "discard", "disk"} <= steps.keys()
    for suffix, connections in (("", None), ("_one_connection", "1")):
        held = parts[f"held{suffix}"]
        assert held["connections"] == connections
        assert held["left_out"] == [] and len(held["cases"]) == 4
        assert held["first_save"]["device_bytes_not_named"] == 0
        for case in held["cases"].values():
            assert case["held_ms"] == pytest.approx(sum(case["held_parts_ms"].values()))
            assert case["without_synchronize_parts_ms"]["synchronize"] == 0
    assert parts["pipeline"]["small_pool"]["durable_gb_per_s"] > 0
    assert parts["loads"]["to_device_gb_per_s"] > 0 < parts["loads"]["to_host_gb_per_s"]
    for case in ("large", "many", "small"):
        assert min(parts["copies"][case][f"{name}_to_bare"] for name in ("discard", "small_pool")) > 0
    ways = parts["training"]["ways"]
    assert {f"datastates async, {place}" for place in ("tmpfs", "disk")} <= ways.keys()
    assert ways["datastates async, disk"]["resume"]["is_exact"] and "torch_dist, tmpfs" in ways
    on_tmpfs = ways["datastates async, tmpfs"]
    assert on_tmpfs["counters"].keys() == {"copying", "plain"}
    assert on_tmpfs["counters"]["copying"]["ours_ns"] > on_tmpfs["counters"]["plain"].get("ours_ns", 0)
    each = ways["datastates async in each iteration, tmpfs"]
    assert each["saves"] == 8 and each["checkpoints"] == 13 and each["held_ms"] > 0
    orders = parts["small_copies"]["orders"]
    assert {"alone", "bare", "bursts_of_8_mib", "at_once", "without_samples"} <= orders.keys()
    assert all(order["samples"] >= 1 and order["item_us_most"] > 0 for order in orders.values())
    megatron = parts["megatron"]
    assert megatron["tensors_left_to_the_fence"] == megatron["tensors"]
    stock = {f"torch_dist_{way}" for way in ("sync", "async_fork", "async_persistent")}
    assert stock | {"datastates", "datastates_sync"} <= megatron["ways"].keys()
    assert megatron["ways"].keys() == megatron["without_synchronize"].keys()
    assert stock <= megatron["ratios"].keys()
    assert {"torch_dist_async_nvrx"} <= megatron["ways"].keys() | megatron["left_out"].keys()


@pytest.mark.long
def test_what_is_bad_shows(tmp_path: Path) -> None:
    """Slow copies, a synchronize that waits, an early fence, memory of the device, little host memory."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {FAKE: "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", BAD_ON_PURPOSE, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["discard"] < 0.5 * found["small_pool"]  # copies of one of them are limited
    assert found["synchronize"] >= 0.05
    assert 0.05 <= found["held"] < 0.2  # the forward and backward do not count
    assert found["fenced_too_early"] > 0.1
    assert found["first_save"]["device_bytes_not_named"] == 4096
    assert next(iter(found["cases"])) == f"{4 / 1024:g} GiB"  # 16 MiB did not fit
    assert found["left_out"] == ["0.015625 GiB: the host memory has room for a shard of 0.01 GiB"]
    (sizes, left_out) = found["least"]
    assert 0 < sizes[0] <= 4 << 20 and len(left_out) == 1


def test_a_module_that_was_carried_serves_where_it_is_asked_for(tmp_path: Path) -> None:
    ran = run_script("--fake", "--prebuilt", PREBUILT=str(tmp_path / "nothing"))
    assert ran.returncode == 1 and "--prebuilt" in ran.stderr


def test_a_process_that_is_late_ends_with_all_that_it_started(tmp_path: Path) -> None:
    hangs = f"sleep 1000 & echo $! > {tmp_path}/child; wait"
    assert processes.run_process(["sh", "-c", hangs], 1.0, tmp_path / "log") == "ended after its 1 s"
    stat = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    deadline = time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # its parent is gone
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_fails_leaves_its_last_lines(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo no such thing >&2; exit 7"]
    assert processes.run_process(command, 60.0, tmp_path / "log") == "failed with 7: no such thing"


def test_a_part_that_ends_early_keeps_its_results_and_affects_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_part(monkeypatch, tmp_path, ENDS_EARLY)
    monkeypatch.setenv("OUT", "set")
    running = benchmark.Benchmark(parse(["--out", str(tmp_path / "out"), "--folder", str(tmp_path)]))
    running.run(["copies"])
    running.run(["held"])
    path = running.write()
    running.close()
    assert {file.name for file in path.parent.iterdir()} == {path.name, "gpu-failed.log"}
    written = json.loads(path.read_text())
    assert written["parts"]["copies"]["status"].startswith("failed with 5")
    assert written["parts"]["copies"]["repeats"] == 2
    assert written["parts"]["held"]["status"].startswith("failed")  # it did not report that it was complete
    assert all(row["met"] is None for row in written["bars"])


def test_parts_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    running = benchmark.Benchmark(parse(["--out", str(tmp_path), "--budget", "5"]))
    running.run(["steps"])
    running.close()
    assert running.parts == {"steps": {"status": "left out: no time was left"}}


def test_results_are_there_while_a_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unseen").touch()
    unseen = f'pathlib.Path("{tmp_path}/unseen")'
    slow = ENDS_EARLY.replace("sys.exit(", f"import time\nwhile {unseen}.exists(): time.sleep(0.01)\n(")
    run_as_part(monkeypatch, tmp_path, slow)
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.3)
    running = benchmark.Benchmark(parse(["--out", str(tmp_path / "out"), "--folder", str(tmp_path)]))
    seen: list[Any] = []
    write = running.write

    def look() -> None:
        seen.append(json.loads(write().read_text())["parts"])
        if seen[-1] != {"copies": {"status": "under way"}}:
            (tmp_path / "unseen").unlink(missing_ok=True)

    monkeypatch.setattr(running, "write", look)
    running.run(["copies"])
    running.close()
    assert seen[-1] == {"copies": {"status": "under way", "repeats": 2}}


def test_bars_are_met_missed_or_not_measured() -> None:
    met = {row["bar"]: row["met"] for row in results.check_requirements(MEASURED) if row["met"] is not None}
    assert met == {
        "copies of large tensors >= 95%": True,
        "copies of 32 KiB >= 95%": False,
        "trainer held <= 5 ms for 16 GiB": False,
        "first save: only named device memory": True,
        "first save: no device memory of torch's": True,
        "later saves: no device memory": True,
        "later saves: no device memory of torch's": False,
        "mean step slowed by < 3%": True,
        "step while copies run slowed by < 3%": False,
        "mean step while the disk writes slowed by < 3%": True,
        "loads: no device memory of torch's": True,
        "loads to the device >= 85% of the disk": False,
        "trainer held <= 5 ms for 16 GiB, one connection": True,
    }
    assert all(row["met"] is None for row in results.check_requirements({}))


def results_of(date: str, parts: dict[str, Any], **values: str) -> dict[str, Any]:
    made = {"of": "GPU", "gpu": "NVIDIA X1", "date": date, "commit": "c", "native_module": "built here"}
    return made | values | {"parts": parts, "bars": []}


def test_results_of_two_calls_merge_and_the_latest_that_was_done_stays(tmp_path: Path) -> None:
    done, late = {"status": "done"}, {"status": "ended after its 9 s"}
    found = [
        results_of("2", {"held": late, "steps": {"status": "done", "repeats": 2}}, native_module="as found"),
        results_of("1", {"copies": {"status": "done"} | MEASURED["copies"], "held": done, "steps": done}),
    ]
    paths = [tmp_path / f"{number}.json" for number in range(2)]
    for path, one in zip(paths, found, strict=True):
        path.write_text(json.dumps(one))
    merged, path = benchmark.merge_files(paths, tmp_path)
    assert json.loads(path.read_text()) == merged and path.name.startswith("gpu-x1-")
    assert merged["parts"]["held"] == done and merged["parts"]["steps"]["repeats"] == 2
    assert merged["native_module"] == ["built here", "as found"]
    assert [row["met"] for row in merged["bars"]][:2] == [True, False]
    assert main(["--merge", *map(str, paths), "--out", str(tmp_path)]) == 0


def test_results_of_different_gpus_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"different machines: NVIDIA X1, NVIDIA X2"):
        results.merge([results_of("1", {}), results_of("2", {}, gpu="NVIDIA X2")])


def test_two_calls_fit_15_minutes_and_all_calls_are_all_parts() -> None:
    assert benchmark.CALL_SECONDS < 380
    assert sorted(part for parts in benchmark.CALLS.values() for part in parts) == sorted(
        benchmark.PART_SECONDS
    )
    for call in benchmark.CALLS:
        parsed = parse(["--call", str(call), "--spent", "40"])
        assert tuple(parsed.parts) == benchmark.CALLS[call]
        *others, last = (benchmark.PART_SECONDS[part] for part in parsed.parts)
        assert benchmark.CALL_SECONDS - 35 - sum(others) >= min(last, 70)  # 35 s for the build
        assert parsed.budget == benchmark.CALL_SECONDS - 40
    assert parse([]).budget == sum(benchmark.PART_SECONDS.values())


def test_the_results_of_a_gpu_can_be_drawn(tmp_path: Path) -> None:
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu-*-2*.json"))]
    newest = [one for one in found if {"megatron", "steps"} <= one["parts"].keys()][-1]
    picture.draw(newest, tmp_path / "gpu.svg")
    assert "<svg" in (tmp_path / "gpu.svg").read_text()


def test_a_save_in_a_training_costs_what_its_block_is_longer() -> None:
    """Blocks of two iterations of 1 s. The first save does not count, and what a save polls counts once."""
    lengths = [1.0] * 10
    lengths[2], lengths[6] = 1.25, 1.5  # these end with saves
    begins = list(itertools.accumulate(lengths, initial=0.0))
    ends = [(begins[number + 1] - 0.5, begins[number + 1] - 0.25) for number in (2, 6)]
    spans = {
        "step": [(begin, begin + 0.1) for begin in begins],
        "save": [ends[0], ends[1], (begins[-1], begins[-1])],
        "poll": [(ends[1][0], ends[1][0] + 0.125), (ends[1][1] + 0.125, ends[1][1] + 0.25)],
        "fence": [],
    }
    found = training.summarize(spans, uncounted=1, block=2)
    assert found["saves"] == 1 and found["iteration_ms"] == 1000 and found["cost_ms"] == 500
    assert found["copying_iteration_ms"] == 1000 and found["copying_iteration_longer_percent"] == 0
    assert found["parts_ms"] == {"save": 250, "poll": 125, "fence": 0} and found["held_ms"] == 375


def test_saves_in_each_iteration_are_compared_with_the_blocks_beside_them() -> None:
    """Blocks of two iterations of 1 s; the first with saves, and iterations after saves, do not count."""
    lengths = [1.0, 1.0, 9.0, 9.0, 7.0, 1.0, 1.25, 1.75, 5.0, 1.0]
    begins = list(itertools.accumulate(lengths, initial=0.0))
    saves = [(begin, begin + 0.25) for begin in begins[2:4] + begins[6:8]]
    spans = {"step": [(begin, begin + 0.1) for begin in begins], "save": saves, "poll": [], "fence": []}
    found = training.summarize_each(spans, block=2)
    assert found["saves"] == 2 and found["iteration_longer_percent"] == 50 and found["held_ms"] == 250
    assert found["iteration_ms"] == 1000


def test_a_part_names_how_cuda_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    one, copies = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
    monkeypatch.setenv(one, "32")
    for part, wanted in (
        ("steps", {}),
        ("steps_one_connection", {one: "1"}),
        ("steps_8_for_copies", {one: "1", copies: "8"}),
    ):
        environment = benchmark._environment([part])
        assert {name: environment[name] for name in (one, copies) if name in environment} == wanted
        assert split(part)[0] == "steps"


def test_results_of_a_gpu_go_where_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert parse([]).out == RESULTS
    assert parse(["--fake"]).out == ROOT / "build" / "bench"
    monkeypatch.setenv("OUT", "/elsewhere")
    assert parse([]).out == Path("/elsewhere")
    assert parse(["--fake"]).out == ROOT / "build" / "bench"
