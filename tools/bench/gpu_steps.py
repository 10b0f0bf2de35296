"""A training-like step with and without a save beside it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from gpu_device import Device, make_shard
from gpu_saves import SLOT, Saving, Tell, await_copies, rounds

from megatron_datastates.config import GIB, MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Publication

_LONGER = 1.5  # how much longer than the copy the step shall be


class Training:
    """Transformer layers, forward and backward as often as it takes; then all of the state is overwritten."""

    def __init__(self, small: bool) -> None:
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
        self.parameters = list(self._layers.parameters())
        self.moments = make_shard(4 * MIB if small else 2 * GIB, 20 if small else 200)
        self.state = {f"parameter{i}": p.detach() for i, p in enumerate(self.parameters)} | self.moments
        self.passes = 1

    def step(self) -> None:
        for _ in range(self.passes):
            self._layers(self._input).float().square().mean().backward()
        FENCE.wait("the optimizer step")
        with torch.no_grad():
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-1e-6)
                parameter.grad = None
            for moment in self.moments.values():
                moment.add_(1)
        torch.cuda.synchronize()

    def calibrate(self, seconds: float) -> None:
        """Makes a step take at least so long."""
        for passes in (1, 1, 3):
            self.passes = passes
            begin = time.perf_counter()
            self.step()
            taken = time.perf_counter() - begin
        self.passes = max(round(self.passes * seconds / taken), 1) + 1


def measure_steps(device: Device, folder: Path, small: bool, until: float, tell: Tell) -> None:
    """Three steps a round: without a save, with one (the copy is shorter), and while the file is written."""
    training = Training(small)
    total = sum(tensor.nbytes for tensor in training.state.values())
    saving = Saving(device, folder, total + 8 * SLOT)
    saving.copied(training.state)
    staging = saving.copied(training.state)["staging"]
    training.calibrate(_LONGER * staging)
    training.step()
    samples: dict[str, list[float]] = {"alone": [], "beside": [], "writing": [], "staging": []}
    for number in rounds(until, 2 if small else 25):
        if number % 2:  # the order changes, so that a drift of clocks harms neither
            samples["alone"].append(_timed(training))
        publications: list[Publication] = []
        begin = time.perf_counter()
        publications.append(saving.start(training.state))
        samples["beside"].append(_timed(training, begin))
        samples["writing"].append(_timed(training))
        samples["staging"].append(await_copies(publications[0]))
        saving.drop(publications[0])
        if not number % 2:
            samples["alone"].append(_timed(training))
        _tell(samples, tell)
    tell(bytes=total, passes=training.passes)
    saving.close()


def _timed(training: Training, begin: float | None = None) -> float:
    begin = time.perf_counter() if begin is None else begin
    training.step()
    return time.perf_counter() - begin


def _tell(samples: dict[str, list[float]], tell: Tell) -> None:
    def slowdown(name: str) -> float:
        ratios = [x / y - 1 for x, y in zip(samples[name], samples["alone"], strict=True)]
        return 100 * statistics.median(ratios)

    alone, staging = statistics.median(samples["alone"]), statistics.median(samples["staging"])
    tell(
        repeats=len(samples["alone"]),
        step_alone_ms=1e3 * alone,
        step_beside_ms=1e3 * statistics.median(samples["beside"]),
        step_while_writing_ms=1e3 * statistics.median(samples["writing"]),
        staging_ms=1e3 * staging,
        step_longer_than_copy=alone > staging,
        slowdown_percent=slowdown("beside"),
        slowdown_while_writing_percent=slowdown("writing"),
    )
