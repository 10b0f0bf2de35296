"""The benchmarks' command lines, and tries with tiny states: that they run, and what they report.

benchmarks.gpu has its own test: tests/native/test_gpu_benchmark.py.
"""

import collections
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from benchmarks import tools
from benchmarks.ablation.parts import Mixed
from benchmarks.ablation.samples import save_once
from benchmarks.rounds import Bar, Rates, interleave
from benchmarks.saves import Saves
from benchmarks.states import host_tensors
from megatron_datastates.config import Options
from tests.support.programs import Programs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("ablation", "engine", "load", "scale", "tripwire", "peers", "training")
PARTS = ("plan", "commit", "load", "load_traced", "reshard", "reshard_traced")


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def try_out(name: str, tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """Returns the results of a quick try, which has to leave no other file."""
    scratch, out = tmp_path / "in", tmp_path / f"{name}.json"
    scratch.mkdir()
    ran = run(name, "--quick", "--folder", scratch, "--out", out, *arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not any(scratch.iterdir()), "nothing is left of what was measured"
    results: dict[str, Any] = json.loads(out.read_text())
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "ablation",
        "compression",
        "engine",
        "load",
        "scale",
        "gpu",
        "tripwire",
        "peers",
        "training",
        "near_simulation",
        "object_store",
        "tools",
    ],
)
def test_help_has_examples_of_commands_that_exist(name: str, programs: Programs) -> None:
    ran = programs.run(["-m", f"benchmarks.{name}", "--help"])
    assert ran.returncode == 0, ran.stderr
    assert f"python -m benchmarks.{name} " in ran.stdout and "--quick" in ran.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_part_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path, programs: Programs
) -> None:
    words = ["--only", "nothing", "--out", tmp_path / "out.json"]
    ran = programs.run(["-m", f"benchmarks.{name}", *words])
    assert ran.returncode == 2 and "nothing: expected one of: " in " ".join(ran.stderr.split())
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_the_engine_benchmark_reports_what_its_stored_results_have(tmp_path: Path) -> None:
    parts = ("write", "start", "tiny", "objects")
    results = try_out("engine", tmp_path, *(word for part in parts for word in ("--only", part)))
    committed = json.loads((RESULTS / "engine.json").read_text())
    assert results.keys() == committed.keys() - {"memory", "interference", "sweep"}
    for part in ("write", "tiny", "objects", "options", "machine"):
        assert results[part].keys() == committed[part].keys()
    assert {frozenset(start) for start in results["start"].values()} == {frozenset(("held_ms", "spread_ms"))}
    assert results["write"]["gb_per_s"]["datastates"] > 0
    assert len(results["bars"]) == 1 + len(results["start"]) + 2
    assert "<svg" in (tmp_path / "engine.svg").read_text()


@pytest.mark.long
def test_the_ablation_benchmark_reports_what_its_committed_results_have(tmp_path: Path) -> None:
    results = try_out("ablation", tmp_path)
    committed = json.loads((RESULTS / "ablation.json").read_text())
    assert results.keys() == committed.keys() | {"bars"}
    for part in ("overlap", "coalescing", "lazy"):
        assert results[part].keys() == committed[part].keys()
        found, expected = results[part]["contenders"], committed[part]["contenders"]
        assert {name: one.keys() for name, one in found.items()} == {
            name: one.keys() for name, one in expected.items()
        }
        assert all(value > 0 for one in found.values() for name, value in one.items() if name != "spread")
    assert "<svg" in (tmp_path / "ablation.svg").read_text()


def test_a_save_without_overlap_serializes_before_or_after_all_tensors(tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    class Witness:
        """Notes, when it is pickled, how far the tensors of its save are."""

        def __init__(self, when: str) -> None:
            self.when = when

        def __reduce__(self) -> tuple[Any, ...]:
            save = states[self.when]._save
            if save is None:
                seen[self.when] = "not begun"
            else:
                written = save._save.status()["bytes_written"] >= save.plan.layout.tensor_end
                seen[self.when] = "written" if written else "under way"
            return collections.OrderedDict, ()

    tensors = host_tensors(4, 1 << 20)
    states = {when: Mixed(tensors, [Witness(when)], when) for when in ("before", "after")}
    saves = Saves(tmp_path, Options(staging_memory=8 << 20, write_limit=20 << 20))
    for state in states.values():
        save_once(saves, state, state.started)
    saves.close()
    assert seen == {"before": "not begun", "after": "written"}


@pytest.mark.long
def test_the_load_benchmark_reports_what_its_stored_results_have(tmp_path: Path) -> None:
    results = try_out("load", tmp_path)
    committed = json.loads((RESULTS / "load.json").read_text())
    assert results.keys() == committed.keys()
    for part in ("loads", "again", "verify", "machine"):
        assert results[part].keys() == committed[part].keys()
    assert {name: one.keys() for name, one in results["optimizer"].items()} == {
        name: one.keys() for name, one in committed["optimizer"].items()
    }
    loads = results["loads"]
    assert loads["gb_per_s"]["plain, datastates"] > 0 < loads["gb_per_s"]["plain, torch_dist"]
    assert loads["bytes"]["plain, datastates"] == loads["bytes"]["plain, torch_dist"]
    assert "<svg" in (tmp_path / "load.svg").read_text()


@pytest.mark.long
def test_the_tripwire_benchmark_reports_what_its_stored_results_have(tmp_path: Path) -> None:
    results = try_out("tripwire", tmp_path)
    committed = json.loads((RESULTS / "tripwire.json").read_text())
    assert results.keys() == committed.keys() | {"bars"} and results["bars"] == []
    assert results["cost"].keys() == {"30 tensors of 128 KiB", "3 tensors of 4 MiB"}
    for part in ("cost", "device_samples"):
        found, expected = results[part].values(), committed[part].values()
        assert {frozenset(one) for one in found} == {frozenset(one) for one in expected}
    assert all(one["copies"] > 0 for one in results["device_samples"].values())
    caught, expected = results["reach"]["caught"], committed["reach"]["caught"]
    assert {name: one.keys() for name, one in caught.items()} == {
        name: one.keys() for name, one in expected.items()
    }
    assert set(caught["all of the large tensor"].values()) == {"1 of 1"}


@pytest.mark.long
def test_the_compression_benchmark_reports_what_its_committed_results_have(tmp_path: Path) -> None:
    results = try_out("compression", tmp_path)
    committed = json.loads((RESULTS / "compression.json").read_text())
    assert results.keys() == committed.keys()
    for limit in ("no limit", "200 MB/s", "50 MB/s"):
        assert {name: one.keys() for name, one in results[limit].items()} == {
            name: one.keys() for name, one in committed[limit].items()
        }
        plain, packed = results[limit]["plain"], results[limit]["zstd 1"]
        assert plain["stored_of_plain"] == plain["speed_of_plain"] == 1 > packed["stored_of_plain"] > 0
        assert packed["stored_mb"] < plain["stored_mb"] >= results["state_mb"]
    slowest = results["50 MB/s"]["plain"]
    assert slowest["durable_s"] >= 0.9 * slowest["stored_mb"] / 50, "the limit was in force"


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def contender(name: str) -> float:
        calls.append(name)
        return len(calls)

    found = interleave(2, {"a": lambda: contender("a"), "b": lambda: contender("b")})
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_rates_are_compared_with_the_disks_best_and_what_cannot_run_is_left_out() -> None:
    rates = Rates(
        {"ours": [2e9, 4e9, 9e9], "slow": [1e9], "fast": [8e9], "broken": [0.0]}, frozenset({"ours"})
    )
    assert rates.best_of_disk == "fast" and rates.of_disk("ours") == 0.5
    plain = rates.plain()
    assert plain["gb_per_s"] == {"ours": 4, "slow": 1, "fast": 8}
    assert plain["spread_gb_per_s"]["ours"] == [2, 9]


def test_a_bar_is_met_on_its_limit() -> None:
    assert (
        Bar("rate", 0.95, 0.95, "", at_least=True).met and not Bar("rate", 0.94, 0.95, "", at_least=True).met
    )
    assert Bar("time", 5, 5, "ms", at_least=False).met and not Bar("time", 6, 5, "ms", at_least=False).met


@pytest.mark.long
def test_every_measure_of_every_layout_is_reported(tmp_path: Path) -> None:
    results = try_out("scale", tmp_path)
    assert results["machine"]["packages"]["megatron-core"]
    assert results["layouts"].keys() == {"tiny-8", "tiny-MoE-16"}
    for name, layout in results["layouts"].items():
        assert str(layout["ranks"]) == name.rpartition("-")[2]
        assert all(layout[part]["status"] == "done" for part in PARTS), layout
        assert_planned(layout["plan"])
        assert_published_and_opened(layout)
    assert results["bars"] == [], "promises are about 16,384 ranks"
    assert "<svg" in (tmp_path / "scale.svg").read_text()


def assert_planned(plan: dict[str, Any]) -> None:
    assert plan["fragments"] > plan["largest_fragments"] >= plan["median_fragments"] > 0
    assert plan["largest_rank_ms"] > 0 < plan["median_rank_ms"]
    counts = [int(count) for count in plan["ms_by_fragments"]]
    assert counts == [counts[0] * factor for factor in (1, 2, 4, 8)]
    assert plan["steepness"] > 0


def assert_published_and_opened(layout: dict[str, Any]) -> None:
    commit, load, reshard = layout["commit"], layout["load"], layout["reshard"]
    assert commit["merged_index_bytes"] > layout["plan"]["largest_index_bytes"]
    assert commit["cached_seconds"] > 0 < commit["merge_seconds"]
    assert load["seconds"] > 0 < reshard["seconds"]
    assert load["reads"] >= load["requested"] > reshard["requested"] > 0
    assert layout["load_traced"]["mib"] > 0 < layout["reshard_traced"]["mib"]


@pytest.mark.parametrize(
    ("words", "differ"), [pytest.param(("show", "--stats"), False, marks=pytest.mark.long), (("diff",), True)]
)
def test_a_look_at_a_damaged_checkpoint_is_no_result(
    words: tuple[str, ...], differ: bool, tmp_path: Path
) -> None:
    """Damage has the exit code of a difference."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    for path in (good, bad):
        ds.save({"w": torch.arange(1000.0)}, path)
    (data,) = bad.glob("data-*")
    data.write_bytes(data.read_bytes().replace(torch.arange(8.0).numpy().tobytes(), bytes(32)))
    with pytest.raises(RuntimeError, match=r"wrong checksum|no result"):
        tools._look([good, bad] if differ else [bad], *words, differ=differ)
    tools._look([good, good] if differ else [good], *words)


@pytest.mark.long
def test_the_tools_benchmark_compares_conversions_with_cp_and_reports_rates(tmp_path: Path) -> None:
    found = try_out("tools", tmp_path)["contenders"]
    for name in ("datastates to torch_dist", "torch_dist to datastates"):
        assert 0 < found[name]["seconds_without_start"] < found[name]["seconds"]
        assert found[name]["of_cp"]["median"] > found[name]["of_cp_with_start"]["median"] > 0
    looks = {name.partition(" ")[0] for name in found if name.endswith(", tiny")}
    assert looks == {"show", "diff"} and all(found[name]["seconds"] > 0 for name in found)
    assert "| cp torch_dist |" in (tmp_path / "tools.md").read_text()
