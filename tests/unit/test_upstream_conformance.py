"""The runner of Megatron's own tests: what it counts, and how it compares that with its record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.upstream_conformance import Result, _parse, differences, merge, record

TOOL = Path(__file__).resolve().parents[2] / "tools/upstream_conformance.py"

TINY_TESTS = """
import os
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor, load, save

RANK = int(os.environ["RANK"])

def state():
    return {"a": ShardedTensor.from_rank_offsets("a", torch.full((3,), float(RANK)), (0, RANK, 2))}

@pytest.fixture(autouse=True)
def ranks():
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")

def test_saves(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp().parent / "shared"
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    save(state(), str(folder))
    assert (folder / "datastates.manifest").exists()
    assert load(state(), str(folder))["a"].tolist() == [RANK] * 3

def test_fails_on_one_rank():
    assert RANK == 0
    torch.distributed.barrier()

def test_goes_past_the_strategy(tmp_path_factory):
    torch.distributed.checkpoint.save({"a": torch.ones(1)}, checkpoint_id=tmp_path_factory.mktemp("dcp"))

@pytest.mark.parametrize("number", [1, 2])
def test_of_numbers(number):
    torch.distributed.barrier()
    assert number < LIMIT

def test_skipped():
    pytest.skip("not today")
"""


def test_files_of_the_user_are_where_the_command_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--recorded r.json --logs logs --scratch scratch"
    monkeypatch.setattr(sys, "argv", ["tool", "checkout", *options.split()])
    chosen = _parse()
    found = [chosen.checkout, chosen.recorded, chosen.logs, chosen.scratch]
    assert found == [tmp_path / name for name in ("checkout", "r.json", "logs", "scratch")]


def entry(tests: int, *exceptions: tuple[str, str, str, list[str]]) -> dict[str, object]:
    names = ("ours", "stock", "why", "tests")
    return {
        "modes": ["ours", "stock"],
        "tests": tests,
        "saves": 0,
        "exceptions": [dict(zip(names, item, strict=True)) for item in exceptions],
    }


def reported(outcome: str, at: float = 0.0, error: str = "", **saves: int) -> dict[str, object]:
    return {"outcome": outcome, "error": error, "at": at, "saves": saves}


def run(checkout: Path, recorded: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, checkout, "--ranks", "2", "--recorded", recorded, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    tests = folder / "tests/unit_tests/dist_checkpointing"
    tests.mkdir(parents=True)
    (tests / "test_tiny.py").write_text(f"LIMIT = 3\n{TINY_TESTS}")
    (folder / "megatron/core").mkdir(parents=True)
    (folder / "megatron/core/package_info.py").write_text("VERSION = (7, 8, 9, '')\n")
    return folder


@pytest.mark.long
def test_outcomes_as_recorded_exit_with_0_and_others_with_1_and_a_list(
    checkout: Path, tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded.json"
    tiny = entry(
        6,
        ("fail", "fail", "it is meant to", ["test_fails_on_one_rank"]),
        ("not ours", "pass", "saves by itself", ["test_goes_past_the_strategy"]),
        ("skip", "skip", "not today", ["test_skipped"]),
    )
    recorded.write_text(json.dumps({"ranks": 2, "releases": {"7.8.9": {"test_tiny.py": tiny}}}))
    good = run(checkout, recorded)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "3 pass, 1 fail, 1 skip, 1 not ours; 2 saves by us" in good.stdout

    source = checkout / "tests/unit_tests/dist_checkpointing/test_tiny.py"
    source.write_text(source.read_text().replace("LIMIT = 3", "LIMIT = 2"))
    bad = run(checkout, recorded)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert "test_of_numbers[2]: expected pass, got fail: " in bad.stdout
    assert bad.stdout.count("expected") == 1


def test_without_tests_exits_with_2(tmp_path: Path) -> None:
    assert run(tmp_path, tmp_path / "recorded.json").returncode == 2


def test_a_test_that_passes_though_a_failure_is_recorded_differs() -> None:
    found = differences(entry(1, ("fail", "pass", "a fault", ["t"])), {"t": Result("pass")}, "ours", True)
    assert found == ["t: expected fail, got pass (recorded reason: a fault)"]


def test_a_bare_name_stands_for_all_parameters_of_a_test() -> None:
    known = entry(2, ("skip", "pass", "", ["t"]))
    results = {"t[1]": Result("skip"), "t[2]": Result("skip")}
    assert differences(known, results, "ours", True) == []
    assert len(differences(known, results, "stock", True)) == 2


def test_tests_that_vanished_differ_unless_only_some_were_asked_for() -> None:
    assert differences(entry(2), {"t": Result("pass")}, "ours", True) == ["has 1 tests, 2 are recorded"]
    assert differences(entry(2), {"t": Result("pass")}, "ours", False) == []


def test_what_is_recorded_is_what_is_expected_and_the_other_mode_stays() -> None:
    stock = {"a": Result("fail", "needs TE"), "b[1]": Result("pass"), "b[2]": Result("pass")}
    ours = {"a": Result("pass"), "b[1]": Result("fail", "boom"), "b[2]": Result("fail", "boom")}
    both = record(record(None, stock, "stock", {"TE": "no TE"}), ours, "ours", {})
    assert differences(both, stock, "stock", True) == differences(both, ours, "ours", True) == []
    assert {(item["why"], *item["tests"]) for item in both["exceptions"]} == {
        ("no TE", "a"),
        ("UNEXPLAINED boom", "b"),
    }


def test_a_mode_that_was_never_run_is_not_taken_for_passed() -> None:
    known = record(None, {"a": Result("pass"), "b": Result("fail", "boom")}, "ours", {})
    assert differences(known, {"a": Result("pass")}, "stock", True) == ["is not recorded: 1 tests"]
    (exception,) = known["exceptions"]
    assert (exception["ours"], exception["stock"], exception["tests"]) == ("fail", "not run", ["b"])


def test_one_failing_rank_fails_the_test_and_the_first_failure_says_why() -> None:
    late, early = reported("fail", 2.0, "peer is gone"), reported("fail", 1.0, "boom")
    assert merge({0: late, 1: early, 2: reported("pass", 3.0)}, "ours") == Result("fail", "boom")


def test_a_test_that_saves_past_us_does_not_pass() -> None:
    by_rank = {0: reported("pass", ours=1, stock=1), 1: reported("pass", ours=1)}
    assert merge(by_rank, "ours").outcome == "not ours"
    assert merge(by_rank, "stock").outcome == "pass"
