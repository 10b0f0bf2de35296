"""Measures what a save costs training in Megatron's own loop on the GPU, and that it resumes with every bit.

Blocks of iterations with one save and blocks without take turns in one process; a block with a save is
compared with the two beside it. Each way to save has a process of its own, one after another. In one of them
each iteration of a block ends with a save, and iterations are long enough for what they write.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.context import Part
from benchmarks.gpu.environment import CONNECTIONS, IS_FAKE, ROOT
from benchmarks.gpu.memory import NO_TMPFS, tmpfs
from benchmarks.training.runs import FORMATS, Model, Span, checkpoint_bytes, free_port, outermost
from megatron_datastates.format.values import MANIFEST_NAME

_ARGUMENTS = ROOT / "recipes" / "tiny.args"
_MODEL = Model(2, 64, 32) if IS_FAKE else Model(24, 1024, 1024)
_MICRO_BATCH, _HEADS = (1, 4) if IS_FAKE else (4, 16)
_BATCH = 2 * _MICRO_BATCH
# Of iterations that take longer than writing a checkpoint to tmpfs does: 2.3 s, where it was measured.
_LARGE_BATCH = (2 if IS_FAKE else 18) * _MICRO_BATCH
_CHECKPOINT_BYTES = 14 * 12 * 24 * 1024 * 1024  # bf16 parameters, and fp32 ones with two moments; about
_BLOCK = 6  # iterations; two blocks are longer than a save of ours to tmpfs
_LONG_BLOCK = 6 if IS_FAKE else 12  # two are longer than torch_dist needs for a save, and a disk for ours
_SHORT_BLOCK = 4  # where each of its iterations ends with a save
_DIGESTED = 2  # the save before which the state is digested; nothing up to it counts
_LOG, _LOG_TAIL = "training.log", 3000


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a way to save, where, and for how many blocks of iterations."""

    way: str
    arguments: list[str]
    blocks: int
    on_tmpfs: bool
    block: int = _LONG_BLOCK
    is_resumed: bool = False  # from a checkpoint whose state was digested, which must come back
    is_counted: bool = False  # what its threads do in each step
    batch: int = _BATCH
    saves_each: bool = False  # iteration of a block, not the first one only
    label: str = ""  # what the way's arguments do not say
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """As in the results."""
        each = " in each iteration" * self.saves_each
        return f"{self.label}{self.way}{each}, {'tmpfs' if self.on_tmpfs else 'disk'}"

    @property
    def checkpoints(self) -> int:
        """How many there must be: the last iteration ends with one, too."""
        return self.blocks // 2 * (self.block if self.saves_each else 1) + 1


_FSDP = [
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
    "--untie-embeddings-and-output-weights",
]
_WORKER = "--use-persistent-ckpt-worker"  # without it, Megatron 0.19 saves synchronously


def measure_training(part: Part) -> None:
    """Reports iterations, held times by part and what saves cost, by way to save; then an exact resume."""
    try:
        import megatron.training  # noqa: F401
    except ImportError as error:
        part.report(status=f"left out: megatron.training does not import here ({error})")
        return
    model = dataclasses.asdict(_MODEL)
    part.report(model=model, micro_batch=_MICRO_BATCH, block=_BLOCK, ways={}, failed={})
    left_out: list[str] = []
    ways: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with tmpfs(part.folder, 1 << 20 if part.is_small else 6 * _CHECKPOINT_BYTES) as memory:
        if memory is None:
            left_out.append(NO_TMPFS)
        for run in _runs():
            folder = memory if run.on_tmpfs else part.folder
            remaining = part.deadline - time.monotonic()
            if folder is None or remaining < 40:
                left_out.append(f"{run.name}: no {'time' if folder else 'tmpfs'}")
                continue
            begin = time.monotonic()
            try:
                ways[run.name] = _measure(run, folder, remaining)
                ways[run.name]["seconds"] = time.monotonic() - begin
            except subprocess.TimeoutExpired:
                late = f"{run.name}: it did not end within the {remaining:.0f} s that were left"
                left_out.append(f"{late}; its log ends: {_end_of_log(folder)}")
            except RuntimeError as error:
                failed[run.name] = str(error)[-_LOG_TAIL:]
            part.report(ways=ways, failed=failed, left_out=left_out)
    if failed:
        raise RuntimeError(f"training failed: {', '.join(failed)}; the last: {failed.popitem()[1]}")


def _runs() -> list[Run]:
    """Returns all runs, the most telling first."""
    ours = FORMATS["datastates async"]
    theirs = ["--ckpt-format", "torch_dist", "--ckpt-assume-constant-structure"]
    each = Run("datastates async", ours, 7, on_tmpfs=True, block=_SHORT_BLOCK)
    worker = Run("torch_dist async", [*theirs, "--async-save", _WORKER], 5, on_tmpfs=True)
    fsdp = Run(
        "datastates async",
        [*ours, *_FSDP],
        7 if IS_FAKE else 11,
        on_tmpfs=True,
        block=_BLOCK,
        is_resumed=True,
        label="Megatron-FSDP, ",
        environment={CONNECTIONS: "8"},  # Megatron-FSDP refuses one
    )
    return [
        dataclasses.replace(each, batch=_LARGE_BATCH, saves_each=True),
        fsdp,
        *([] if IS_FAKE else [worker]),  # processes that Megatron spawns have no stand-ins for a GPU
        Run("datastates async", ours, 7 if IS_FAKE else 15, on_tmpfs=True, block=_BLOCK, is_counted=True),
        Run("datastates async", ours, 7, on_tmpfs=False, is_counted=True, is_resumed=True),
        Run("torch_dist", theirs, 5, on_tmpfs=True),
        Run("datastates", FORMATS["datastates"], 5, on_tmpfs=True),
    ]


def _measure(run: Run, folder: Path, seconds: float) -> dict[str, Any]:
    begin, checkpoints, report = time.monotonic(), folder / "training", folder / "report.jsonl"
    try:
        options = ["--save-blocks", str(run.block)]
        options += ["--save-each"] * run.saves_each
        is_ours = "datastates" in run.arguments
        if run.is_resumed:
            options += ["--digest-save", str(_DIGESTED)]
        options += ["--count"] * run.is_counted
        arguments = [*run.arguments, "--save", str(checkpoints)]
        arguments += ["--datastates-report-file", str(report)] if is_ours else []
        iterations = run.blocks * run.block + 1
        found = _train(folder, options, iterations, arguments, seconds, run.batch, run.environment)
        # torch_dist writes metadata.json first, and checkpoints of Megatron-FSDP have none.
        size, saves = checkpoint_bytes(checkpoints, MANIFEST_NAME if is_ours else ".metadata")
        if run.saves_each:
            result = summarize_each(found["spans"], run.block)
        else:
            result = summarize(found["spans"], _DIGESTED if run.is_resumed else 1, run.block)
        if run.is_counted:
            result |= {"counters": _counted(found["counters"], run)}
        result |= {"checkpoint_bytes": size, "checkpoints": saves}
        if report.exists():
            result["report"] = [json.loads(line) for line in report.read_text().splitlines()]
        if saves != run.checkpoints:
            raise RuntimeError(f"expected {run.checkpoints} complete checkpoints, found {saves}")
        if run.is_resumed:
            try:
                result["resume"] = _resume(run, folder, checkpoints, found["saved"], begin + seconds)
            except subprocess.TimeoutExpired:
                result["resume"] = {"left_out": "no time"}
        return result
    finally:
        shutil.rmtree(checkpoints, ignore_errors=True)
        report.unlink(missing_ok=True)


def _counted(steps: list[dict[str, int]], run: Run) -> dict[str, dict[str, float]]:
    """Returns medians of what was counted in steps while copies ran, and in blocks without a save.

    The first save does not count.
    """
    copying, plain = [], []
    for number, counted in enumerate(steps):
        block, at = divmod(number, run.block)
        if block >= 3 and block % 2 and at == 1:
            copying.append(counted)
        elif block >= 2 and not block % 2:
            plain.append(counted)
    return {
        name: {key: statistics.median(one.get(key, 0) for one in found) for key in found[0]}
        for name, found in (("copying", copying), ("plain", plain))
        if found
    }


def _resume(run: Run, folder: Path, checkpoints: Path, saved: dict[str, Any], end: float) -> dict[str, Any]:
    """Loads the checkpoint whose state was digested before it was saved; raises if one bit differs."""
    arguments = [*run.arguments, "--load", str(checkpoints), "--ckpt-step", str(saved["iteration"])]
    arguments += ["--override-opt_param-scheduler"]  # for the run is shorter
    iterations = saved["iteration"] + 2
    left = end - time.monotonic()
    found = _train(folder, ["--digest-load"], iterations, arguments, left, environment=run.environment)
    loaded = found["loaded"]
    same = ("iteration", "sha256", "tensors", "bytes")
    if any(saved[key] != loaded[key] for key in same):
        raise RuntimeError(f"the resumed state is not what was saved: saved {saved}, loaded {loaded}")
    load = found["spans"]["load"][0]
    return {"is_exact": True, "load_seconds": load[1] - load[0], **{key: loaded[key] for key in same}}


def _train(
    folder: Path,
    options: list[str],
    iterations: int,
    arguments: list[str],
    seconds: float,
    batch: int = _BATCH,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Trains in a process of its own; returns its record.

    Raises:
        RuntimeError: it failed; with the end of its log.
        subprocess.TimeoutExpired: it took too long.
    """
    record, log = folder / "record.json", folder / _LOG
    words = [word for word in _ARGUMENTS.read_text().split() if IS_FAKE or word != "--use-cpu-initialization"]
    words += [*_MODEL.arguments, "--num-attention-heads", str(_HEADS)]
    words += ["--micro-batch-size", str(_MICRO_BATCH), "--global-batch-size", str(batch)]
    words += ["--train-iters", str(iterations), "--lr-decay-iters", "1000", "--log-interval", "1000"]
    words += ["--distributed-backend", "gloo" if IS_FAKE else "nccl", *arguments]
    # Why a run takes too long, such as one that waits for a worker, shows in its log.
    options = ["--record", str(record), "--dump-after", f"{max(seconds - 15.0, 1.0):.0f}", *options]
    command = [sys.executable, "-m", "benchmarks.gpu.trainer", *options, "--", *words]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place |= {"TORCHDYNAMO_DISABLE": "1"}  # compiling would take longer than the training
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        with log.open("wb") as out:
            ended = subprocess.run(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **place, **environment},
                cwd=ROOT,
                timeout=max(seconds, 1.0),
            )
        if ended.returncode or not record.exists():
            raise RuntimeError(
                f"training ended with {ended.returncode}; its log ends:\n{_end_of_log(folder)}"
            )
        return dict(json.loads(record.read_text()))
    finally:
        record.unlink(missing_ok=True)


def _end_of_log(folder: Path) -> str:
    return (folder / _LOG).read_text(errors="replace")[-_LOG_TAIL:]


def summarize(spans: dict[str, list[Span]], uncounted: int, block: int = _BLOCK) -> dict[str, Any]:
    """Returns medians over the blocks whose saves count: held time by part, and what a save costs, in ms.

    Args:
        spans: as benchmarks.training.rank records them; in every other block, the first iteration ends with
            a save.
        uncounted: how many saves, the first ones, do not count.
        block: iterations of one.
    """
    begins = [begin for begin, _ in spans["step"]]
    iterations = [after - before for before, after in pairwise(begins)]
    sums = [sum(iterations[at : at + block]) for at in range(0, len(iterations) - block + 1, block)]
    saves = spans["save"]
    costs, held, copying, longer = [], [], [], []
    for number, at in enumerate(range(1, len(sums) - 1, 2)):
        if number < uncounted:
            continue
        beside = iterations[(at - 1) * block : at * block] + iterations[(at + 1) * block : (at + 2) * block]
        copying.append(iterations[at * block + 1])
        longer.append(copying[-1] / statistics.median(beside) - 1)
        costs.append(sums[at] - (sums[at - 1] + sums[at + 1]) / 2)
        begin, end = saves[number][0], begins[(at + 2) * block]
        parts = {
            name: sum(b - a for a, b in outermost(spans, name) if begin <= a < end)
            for name in ("save", "poll", "fence")
        }
        held.append(parts | {"held": sum(parts.values())})
    plain = [iterations[at * block : (at + 1) * block] for at in range(2, len(sums), 2)]
    middle = {name: 1e3 * statistics.median(one[name] for one in held) for name in held[0]}
    iteration = 1e3 * statistics.median(seconds for one in plain for seconds in one)
    return {
        "saves": len(held),
        "iteration_ms": iteration,
        "held_ms": middle.pop("held"),
        "held_ms_most": 1e3 * max(one["held"] for one in held),
        "parts_ms": middle,
        "cost_ms": 1e3 * statistics.median(costs),
        "cost_ms_spread": [1e3 * min(costs), 1e3 * max(costs)],
        "cost_of_an_iteration": 1e3 * statistics.median(costs) / iteration,
        "copying_iteration_ms": 1e3 * statistics.median(copying),
        "copying_iteration_longer_percent": 100 * statistics.median(longer),
        "first_save_ms": 1e3 * (saves[0][1] - saves[0][0]),
        "held_ms_by_save": [{name: 1e3 * seconds for name, seconds in one.items()} for one in held],
        "iterations_ms": [1e3 * seconds for seconds in iterations],
    }


def summarize_each(spans: dict[str, list[Span]], block: int) -> dict[str, Any]:
    """Returns what saves in each iteration of every other block cost, beside the blocks around it.

    The first block with saves does not count, nor the first iteration after such a block, in which its last
    save may still be written.
    """
    begins = [begin for begin, _ in spans["step"]]
    iterations = [after - before for before, after in pairwise(begins)]
    blocks = [iterations[at : at + block] for at in range(0, len(iterations) - block + 1, block)]
    longer, held = [], []
    for number in range(3, len(blocks) - 1, 2):
        beside = statistics.fmean(blocks[number - 1][1:] + blocks[number + 1][1:])
        longer.append(statistics.fmean(blocks[number]) / beside - 1)
        begin, end = begins[number * block], begins[(number + 1) * block]
        inside = [
            b - a for name in ("save", "poll", "fence") for a, b in outermost(spans, name) if begin <= a < end
        ]
        held.append(sum(inside) / block)
    plain = [seconds for number in range(2, len(blocks), 2) for seconds in blocks[number][1:]]
    return {
        "saves": len(longer) * block,
        "iteration_ms": 1e3 * statistics.fmean(plain),
        "iteration_longer_percent": 100 * statistics.median(longer),
        "iteration_longer_percent_by_block": [100 * one for one in longer],
        "held_ms": 1e3 * statistics.median(held),
        "iterations_ms": [1e3 * seconds for seconds in iterations],
    }
