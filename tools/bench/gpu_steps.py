"""Training-like steps, in runs of a fixed length: without a save, and with one that begins each run.

A step has what a save can get in the way of: large matrix products, hundreds of small kernels, and `.item()`,
whose copy to the host takes its turn with ours. How often a save begins depends on no disk and no copy.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpu_device import CONNECTIONS, Device, bytes_of, make_shard
from gpu_saves import Saving, Tell, fitting, pool_for, rounds, tmpfs

from megatron_datastates.config import GIB, MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Publication

_SMALL_KERNELS, _ITEMS = 320, 8  # of each step


class Training:
    """Transformer layers, forward and backward, small kernels; then all of the state is overwritten."""

    def __init__(self, small: bool, moments_bytes: int) -> None:
        width, layers = (32, 1) if small else (2048, 4)
        self._layers = torch.nn.Sequential(
            *(
                torch.nn.TransformerEncoderLayer(
                    width,
                    width // 16 if small else 16,
                    4 * width,
                    dropout=0.0,
                    batch_first=True,
                    device="cuda",
                    dtype=torch.bfloat16,
                )
                for _ in range(layers)
            )
        )
        self._input = torch.randn(1 if small else 8, 16 if small else 2048, width, device="cuda").bfloat16()
        self._norms = [torch.ones(256, device="cuda") for _ in range(16)]
        self.parameters = list(self._layers.parameters())
        self.moments = make_shard(moments_bytes, 20 if small else 200)
        self.state = {f"parameter{i}": p.detach() for i, p in enumerate(self.parameters)} | self.moments
        self.passes = 1

    def step(self) -> None:
        """One iteration, until its own stream is idle; copies on others may go on."""
        for _ in range(self.passes):
            loss = self._layers(self._input).float().square().mean()
            loss.backward()
            for number in range(_SMALL_KERNELS // self.passes + 1):
                self._norms[number % len(self._norms)].mul_(1.0001)
                if number % (_SMALL_KERNELS // _ITEMS) == 0:
                    self._norms[0][0].item()
            loss.item()
        FENCE.wait("the optimizer step")
        with torch.no_grad():
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-1e-6)
                parameter.grad = None
            for moment in self.moments.values():
                moment.add_(1)
        torch.cuda.current_stream().synchronize()

    def calibrate(self, seconds: float) -> None:
        """Has a step take about so long on this GPU."""
        for _ in range(3):
            begin = time.perf_counter()
            self.step()
            taken = time.perf_counter() - begin
        self.passes = max(round(seconds / taken), 1)
        self.step()


def measure_steps(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """Runs of steps by turns: alone, and with a save into a back end that discards, on tmpfs, on disk."""
    wanted = [4 * MIB] if small else [GIB, 4 * GIB]
    sizes, left_out = fitting(wanted, device, folder, host_copies=5.0)
    training = Training(small, sizes[-1])
    training.calibrate(0.002 if small else 0.25)
    steps = 3 if small else 6  # from save to save: 1.5 s
    room, total = pool_for(training.state), bytes_of(training.state)
    memory = tmpfs(folder, total)
    if memory is None:
        left_out.append("tmpfs: /dev/shm is not there, or has no room")
    savings = {"discard": Saving(device, folder, room, backend="discard")}
    if memory is not None:
        savings["tmpfs"] = Saving(device, memory, room)
    savings["disk"] = Saving(device, folder, room)
    tell(connections=CONNECTIONS, bytes=total, passes=training.passes, steps_a_run=steps, left_out=left_out)
    try:
        for saving in savings.values():
            saving.make_pool()
            _run(training, saving, steps)
        samples: dict[str, list[list[float]]] = {name: [] for name in ("alone", *savings)}
        staging: list[float] = []
        for number in rounds(until, 2 if small else 12):
            for name in _turns(list(samples), number):
                times, copied = _run(training, savings.get(name), steps)
                samples[name].append(times)
                if name == "discard":
                    staging.append(copied)
            tell(repeats=number + 1, staging_ms=1e3 * statistics.median(staging), **_summary(samples))
        for saving in savings.values():
            saving.close()
    finally:
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)


def _turns(names: list[str], number: int) -> list[str]:
    """In another order each round, so that a drift of clocks harms none."""
    first = number % len(names)
    return names[first:] + names[:first]


def _run(training: Training, saving: Saving | None, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and of the copies of the save that began with the first one (0: not done).

    The first step counts from the save's start. Without a save it has the same synchronize.
    """
    publication: Publication | None = None
    times = []
    torch.cuda.synchronize()
    for number in range(steps):
        begin = time.perf_counter()
        if number == 0:
            if saving is not None:
                publication = saving.start(training.state)
            torch.cuda.synchronize()  # as Megatron's timers do
        if publication is not None:
            publication.poll()
        training.step()
        times.append(time.perf_counter() - begin)
    if saving is None or publication is None:
        return times, 0.0
    copied = publication.save.times()["staging"]
    failure = publication.save.failure
    assert copied or failure is None, failure
    saving.drop(publication)
    return times, copied


def _summary(samples: dict[str, list[list[float]]]) -> dict[str, Any]:
    """By kind of run: all steps, and the first ones, in which copies run; ratios round by round."""
    found: dict[str, Any] = {}
    for name, runs in samples.items():
        every = [seconds for run in runs for seconds in run]
        found[name] = {
            "step_ms": 1e3 * statistics.median(every),
            "step_ms_mean": 1e3 * statistics.fmean(every),
            "copying_step_ms": 1e3 * statistics.median(run[0] for run in runs),
        }
        if name == "alone":
            continue
        pairs = list(zip(runs, samples["alone"], strict=True))
        found[name] |= {
            f"{kind}_percent": 100 * statistics.median(of(run) / of(alone) - 1 for run, alone in pairs)
            for kind, of in (
                ("slowdown_of_the_median", statistics.median),
                ("slowdown_of_the_mean", statistics.fmean),
                ("slowdown_of_the_copying_step", lambda run: run[0]),
            )
        }
    return found
