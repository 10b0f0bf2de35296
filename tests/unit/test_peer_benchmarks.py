"""benchmarks.peers and benchmarks.training: tries with tiny states, and what is made of their samples."""

import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.command import resume
from benchmarks.peers.contenders import Contender, Facts
from benchmarks.peers.measures import PARTS, Peers, Plan, Round, summary
from benchmarks.peers.memory import PeakMemory
from benchmarks.peers.ranks import Job, Load, Ranks, Save
from benchmarks.peers.states import BYTES_PER_PARAMETER, Model, State
from benchmarks.rounds import within
from benchmarks.training.measures import summary as summary_of_runs
from benchmarks.training.measures import sustained
from benchmarks.training.restores import LOSSES
from benchmarks.training.runs import Case, Run, Setting, _measure, _times
from benchmarks.training.runs import Model as TrainedModel
from benchmarks.training.turns import measure_blocks
from benchmarks.training.turns import summary as summary_of_turns
from benchmarks.worlds import World
from megatron_datastates.providers.tensors import is_frozen
from tests.unit.test_benchmarks import run, try_out

MODEL = Model(2, 32, 64)


@pytest.mark.long
def test_every_contender_is_measured_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    results = try_out("peers", tmp_path)
    part = results["parts"]["disk, 1 rank"]
    assert part["left_out"] == {} and part["tensors"] == 4 * (3 + 2 * 12)
    assert part["contenders"].keys() == {"datastates", "datastates async", "torch_dist", "torch.save"}
    for name, one in part["contenders"].items():
        assert one["exact"] and one["first"]["exact"], name
        assert one["held_ms"] > 0 < one["durable_s"] and one["load_s"].keys() == {"cold", "warm"}
        assert sum(one["parts_ms"].values()) == pytest.approx(one["held_ms"], abs=0.05)
        assert one["stored_bytes"] >= part["bytes"] and one["files"] >= 2
        assert one["settings"] and one["syncs"]
    assert part["ratios"]["torch_dist"]["held"] > 0 < part["disk"]["write"]["gb_per_s"]
    table = (tmp_path / "peers.md").read_text()
    assert "| datastates async |" in table and "torch 2" in table and "does not sync" in table
    assert "<svg" in (tmp_path / "peers.svg").read_text()


@pytest.mark.long
def test_a_try_of_training_reports_what_saves_cost(tmp_path: Path) -> None:
    results = try_out("training", tmp_path)
    part = results["parts"]["small, DP 1"]
    base, ours = part["cases"]["no checkpoints"], part["cases"]["datastates async, every 1"]
    assert base["goodput"] == 1 and "saves" not in base
    assert ours["saves"] == part["iterations"] == 2
    assert ours["blocked_ms_per_save"] > 0 < ours["end_to_end_s"]
    expected = ours["checkpoint_bytes"] / ours["blocked_ms_per_save"] / 1e6
    assert ours["throughput_gb_per_s"] == pytest.approx(expected, rel=0.05, abs=0.001)
    assert "| datastates async, every 1 |" in (tmp_path / "training.md").read_text()
    assert "<svg" in (tmp_path / "training.svg").read_text()


@pytest.mark.long
def test_a_try_of_the_near_tier_reports_restores_and_the_interval_sustained(tmp_path: Path) -> None:
    results = try_out("training", tmp_path, "--only", "near tier", "--only", "near tier, restore")
    saving = [one for one in results["parts"]["near tier"]["cases"].values() if "saves" in one]
    assert len(saving) == 3 and all(one["sustained_s"] > 0 for one in saving)
    restores = results["parts"]["near tier, restore"]["restores"]
    assert restores.keys() == LOSSES.keys()
    for name, one in restores.items():
        assert one["load_s"] > one["brought_s"] > 0
        assert (one["far_mb"] > 0) is ("lost" in name), "what is near is read there"
    assert "a node lost, not in --save" in (tmp_path / "training.md").read_text()


@pytest.mark.long
def test_a_try_of_turns_saves_in_every_other_block(tmp_path: Path) -> None:
    turns = try_out("training", tmp_path, "--only", "in turns")["parts"]["in turns"]["turns"]
    assert turns["quick"]["blocks"] == 1 and turns["quick"]["blocked_ms"] > 0
    assert turns["quick"]["ratio"] > 0
    assert "| quick: 2 layers of 32" in (tmp_path / "training.md").read_text()


def test_the_interval_sustained_is_that_of_the_slower_stage(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    saves = [(2, 10.0, 9.0), (3, 20.0, 2.0), (4, 21.0, 3.5)]  # iteration, begin, seconds until published
    lines: list[dict[str, Any]] = [
        {"event": "save", "iteration": number, "started_at": begin, "published_ms": 1e3 * seconds}
        for number, begin, seconds in saves
    ]
    lines += [{"event": "drain", "iteration": number, "node_copying_ms": 6e3} for number, _, _ in saves]
    report.write_text("\n".join(map(json.dumps, lines)))
    published, copied = _times(report, 2)
    assert (published, copied) == ((2.0, 2.5), (6.0, 6.0)), "without the wait for the save before it"
    once = Run({}, 1.0, 0.0, 0.0, 0.0, 3, 1, published=published, copied=copied)
    for every, expected in ((0, 2.25), (1, 6.0), (2, 3.0), (3, 2.25)):
        assert sustained(Case("datastates async", 1, 1, every), [once]) == expected
    assert sustained(Case("datastates async", 1), [dataclasses.replace(once, published=())]) is None


def test_parts_that_were_measured_are_kept_and_others_are_added(tmp_path: Path) -> None:
    out = tmp_path / "training.json"
    kept = {"date": "2026-01-02"}
    described = {"machine": machine.describe(tmp_path)}
    out.write_text(json.dumps(described | {"parts": {"small, DP 1": kept}}))
    assert resume(out, described)["parts"] == {"small, DP 1": kept}
    another = {"machine": described["machine"] | {"cpu": "another"}}
    with pytest.raises(click.BadParameter, match="results with another machine"):
        resume(out, another)
    later = {"machine": described["machine"] | {"date": "2030-01-02", "disk_free_gib": 0}}
    assert resume(out, later)["machine"]["date"] == described["machine"]["date"]


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A world of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Kept(Contender):
    """Keeps the state in memory until it is loaded; may copy late, or forget a tensor."""

    facts = Facts("", "")
    late = forgetful = False

    def prepare(self, state: State) -> Any:
        return [p.data for p in state.parameters.values()] + [piece.tensor for piece in state.pieces]

    def start(self, prepared: Any, directory: Path) -> None:
        self._prepared = prepared
        if not self.late:
            self._copies = [tensor.clone() for tensor in prepared]

    def poll(self) -> bool:
        is_complete = not self.late or hasattr(self, "_asked")
        self._asked = True
        if self.late and is_complete:
            self._copies = [tensor.clone() for tensor in self._prepared]
        return is_complete

    def load(self, state: State, directory: Path) -> None:
        pairs = list(zip(self.prepare(state), self._copies, strict=True))
        for tensor, copy in pairs[self.forgetful :]:
            tensor.copy_(copy)


@pytest.mark.parametrize(("flaw", "exact"), [("", True), ("late", False), ("forgetful", False)])
@pytest.mark.usefixtures("alone")
def test_a_contender_that_stores_other_bits_is_found_out(flaw: str, exact: bool, tmp_path: Path) -> None:
    ranks = Ranks(MODEL)
    contender = ranks._made["kept"] = Kept()
    if flaw:
        setattr(contender, flaw, True)
    save = ranks(Job("save", "kept", str(tmp_path)))
    load = ranks(Job("load", "kept", str(tmp_path), steps=save.steps))
    assert (load.difference is None) == exact
    assert save.held == sum(save.parts.values()) and save.parts.keys() == set(PARTS)
    assert save.durable >= save.finished >= 0


def test_shares_of_the_optimizer_cover_it_once() -> None:
    for ranks in (1, 2, 4):
        states = [State(MODEL, rank, ranks) for rank in range(ranks)]
        spans = sorted(
            (piece.start, piece.start + len(piece.tensor))
            for state in states
            for piece in state.pieces
            if piece.kind == "exp_avg"
        )
        assert spans[0][0] == 0 and spans[-1][1] == MODEL.elements
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert MODEL.bytes == BYTES_PER_PARAMETER * MODEL.elements
    assert (
        Model.of_bytes(2 << 30, 64).bytes
        <= 2 << 30
        < Model(64, Model.of_bytes(2 << 30, 64).hidden + 16).bytes
    )


def test_parameters_are_trained_ones() -> None:
    """Frozen ones go to a file of their own, which is linked from the last checkpoint."""
    assert not any(map(is_frozen, State(MODEL, 0, 1).parameters.values()))


def test_one_flipped_bit_is_seen() -> None:
    state = State(MODEL, 0, 1)
    state.step()
    assert state.difference(1) is None and state.difference(0) is not None
    last = state.pieces[-1]
    last.tensor.view(torch.int32)[-1] ^= 1
    assert state.difference(1) == last.key


def a_round(held: float, difference: str | None = None) -> Round:
    parts = {"prepare": held / 2, "call": held / 2, "fence": 0.0, "polls": 0.0}
    save = Save(parts, 0.1, 2.0, 4.0, 1)
    return Round(save, {kind: Load(1.0, difference) for kind in ("cold", "warm")}, 3, 100)


def test_a_summary_has_medians_and_names_what_differs() -> None:
    rounds = [a_round(0.1), a_round(0.3), a_round(0.2, "exp_avg.0")]
    found = summary(rounds, 8_000_000_000)
    assert found["held_ms"] == 200 and found["spread_held_ms"] == [100, 300]
    assert found["write_gb_per_s"] == 2 and found["read_gb_per_s"] == {"cold": 8, "warm": 8}
    assert not found["exact"] and found["differs"] == "exp_avg.0"
    assert summary(rounds[:2], 1)["exact"]


def test_a_contender_that_returned_other_bits_is_not_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def a_round_of(peers: Peers, world: Any, name: str, watch: bool = False) -> Round:
        wrong = {"torch.save": not watch, "DCP save": watch}.get(name, False)
        return dataclasses.replace(a_round(0.1, "exp_avg.0" if wrong else None), memory=1)

    def first_rounds(peers: Peers, names: list[str]) -> tuple[Any, dict[str, Round]]:
        peers.facts = dict.fromkeys(names, Facts("", ""))
        return io.BytesIO(), {name: a_round_of(peers, None, name, watch=True) for name in names}

    monkeypatch.setattr(Peers, "_round", a_round_of)
    monkeypatch.setattr(Peers, "_first_rounds", first_rounds)
    names = ["datastates", "datastates async", "torch_dist", "torch.save", "DCP save"]
    found = Peers(Plan(1, MODEL, 1, 0.0, 0.0, names), tmp_path).measure()
    assert found["contenders"].keys() == set(names) and found["ratios"].keys() == {"torch_dist"}


def fail_or_stop(arguments: Sequence[Any]) -> Any:
    def serve(job: str) -> str:
        if job == "stop":
            os._exit(3)
        if job == "fail" and dist.get_rank() == 0:
            raise ValueError("no space")
        if job == "fail":
            dist.barrier()
        return job

    return serve


@pytest.mark.long
def test_a_world_reports_a_failure_even_if_other_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.worlds._PATIENCE_SECONDS", 1.0)
    world = World(2, fail_or_stop)
    assert world.do("echo") == ["echo", "echo"]
    with pytest.raises(RuntimeError, match=r"fail: rank 0: ValueError.*no space"):
        world.do("fail")
    assert world.is_dead
    world.close()
    world = World(1, fail_or_stop)
    with pytest.raises(RuntimeError, match="a rank ended"):
        world.do("stop")
    world.close()


@pytest.mark.long
def test_a_contender_that_fails_is_left_out_with_its_reason(tmp_path: Path) -> None:
    plan = Plan(1, MODEL, 1, 0.0, 0.0, ["torch_dist async, nvrx", "torch.save"])
    peers = Peers(plan, tmp_path)
    found = peers.measure()
    assert found["contenders"].keys() == {"torch.save"}
    assert "nvidia-resiliency-ext" in found["left_out"]["torch_dist async, nvrx"]


@pytest.mark.long
def test_peak_memory_counts_what_was_given_back() -> None:
    code = (
        "import sys; print(flush=True); sys.stdin.readline(); block = b'1' * (64 << 20); "
        "print(flush=True); sys.stdin.readline(); del block; print(flush=True); sys.stdin.readline()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # A process of its own: in this one, garbage of other tests may be given back meanwhile.
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:  # type: ignore[call-overload]

        def go_on() -> None:
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()

        process.stdout.readline()
        with PeakMemory([process.pid]) as peak:
            go_on()
            deadline = time.monotonic() + 30
            while peak.growth < 60 << 20 and time.monotonic() < deadline:
                time.sleep(0.01)
            go_on()
        process.kill()
    assert 60 << 20 < peak.growth < 128 << 20


def test_rounds_end_when_there_is_no_time_for_another() -> None:
    assert list(within(3, 60)) == [0, 1, 2]
    assert list(within(3, 0)) == [0]


def test_times_of_a_run_are_those_after_the_warm_up() -> None:
    setting = Setting(TrainedModel(1, 1, 1), 1, iterations=4, warm_up=2)
    steps = [(float(10 * i), 10 * i + 5.0) for i in range(4)]
    spans = {
        "step": steps,
        "save": [(5.0, 9.0), (25.0, 26.0), (35.0, 37.0)],  # the first is part of the warm-up
        "poll": [(20.0, 20.5), (25.5, 25.9), (38.0, 41.0)],  # one lies in a save; the last is the final wait
        "fence": [(21.0, 21.25)],
    }
    found = _measure(setting, spans, 3, 100)
    assert found.iterations == {3: 10.0}
    assert found.seconds == 41 - 20 and found.waited == 3
    assert found.blocked == pytest.approx(1 + 2 + 0.5 + 0.25) and found.first_save == 4


def test_a_summary_of_runs_compares_each_round_with_its_own_base() -> None:
    setting = Setting(TrainedModel(1, 1, 1), 1, iterations=4, warm_up=0)
    plain = [Run({1: 1.0, 2: 1.0}, seconds, 0.0, 0.0, 0.0, 0, 0) for seconds in (10.0, 20.0)]
    saving = [Run({1: 1.0, 2: 3.0}, seconds, 0.5, 0.0, 0.7, 2, 10**9) for seconds in (12.5, 25.0)]
    found = summary_of_runs(setting, Case("datastates async", 2), saving, plain)
    assert found["goodput"] == 0.8 and found["saves"] == 2
    assert found["iteration_with_checkpoint_ms"] == 3000 and found["iteration_without_checkpoint_ms"] == 1000
    assert found["blocked_ms_per_save"] == 250 and found["throughput_gb_per_s"] == 4
    assert found["lost_ms_per_save"] == pytest.approx(1e3 * (2.5 + 5) / 2 / 2)


def test_blocks_with_saves_are_compared_with_those_beside_them() -> None:
    seconds = [9, 2, 2, 9, 3, 3, 9, 2, 2, 9, 5, 5, 9, 4, 4]  # of each block, the first is not counted
    begins = [float(sum(seconds[:at])) for at in range(len(seconds) + 1)]
    saves = [(begins[at], begins[at] + 0.5) for at in (4, 5, 6, 10, 11, 12, 15)]
    spans = {
        "step": [(begin, begin + 0.1) for begin in begins],
        "save": saves,
        "poll": [(begins[4] + 0.25, begins[4] + 0.5), (begins[7], begins[7] + 1.0)],  # one lies in a save
        "fence": [],
    }
    found = measure_blocks(spans, block=3, uncounted=1)
    assert found == {"without_s": [2, 2, 4], "with_s": [3, 5], "blocked_s": (5 * 0.5 + 1) / 5}
    other = {"without_s": [2.0, 2.0], "with_s": [2.5], "blocked_s": 0.9, "checkpoint_bytes": 7}
    both = summary_of_turns([found | {"checkpoint_bytes": 7}, other])
    assert both["ratio"] == 1.5 and both["cost_ms"] == 1000 and both["blocks"] == 3
    assert both["quartiles"] == [1.375, pytest.approx((3 / 2 + 5 / 3) / 2, abs=1e-4)]


def test_a_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    ran = run("training", "--format", "tar", "--folder", tmp_path)
    assert ran.returncode == 2 and "unknown format tar" in " ".join(ran.stderr.split())
