"""Measures how much a save slows training-like steps, beside copies that torch enqueues all at once.

Steps come in series of a fixed length; a save begins with each series, or none does. A step has what a save
can slow down: large matrix products, hundreds of small kernels, and `.item()`, whose copy to the host takes
turns with ours. How often a save begins depends on no disk and no copy.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.context import Part
from benchmarks.gpu.device import make_shard
from benchmarks.gpu.environment import CONNECTIONS_LIMIT, IS_FAKE
from benchmarks.gpu.memory import NO_TMPFS, fitting, pool_for, tmpfs
from benchmarks.gpu.saves import DeviceSaves
from benchmarks.states import bytes_of
from megatron_datastates.config import GIB, MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Publication

_SMALL_KERNELS, _ITEMS = 320, 8  # of each step


class Training:
    """Transformer layers: forward, backward, small kernels, and a step that overwrites all of the state."""

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
        """Runs one iteration, until its own stream is idle; copies on other streams may go on."""
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
        """Sets the passes of a step so that it takes about `seconds` on this GPU."""
        for _ in range(3):
            begin = time.perf_counter()
            self.step()
            taken = time.perf_counter() - begin
        self.passes = max(round(seconds / taken), 1)
        self.step()


def measure_steps(part: Part) -> None:
    """Reports step times alone, and with saves that discard, on tmpfs, and on disk, in turns."""
    wanted = [4 * MIB] if part.is_small else [GIB, 4 * GIB]
    sizes, left_out = fitting(wanted, part.device, part.folder, host_copies=5.0)
    training = Training(part.is_small, sizes[-1])
    training.calibrate(0.002 if part.is_small else 0.25)
    steps = 3  # from save to save: 0.75 s
    total = bytes_of(training.state)
    bare = BareCopiesByTorch(training)
    with _contenders(part, training, left_out) as contenders:
        part.report(connections=CONNECTIONS_LIMIT, bytes=total, passes=training.passes)
        part.report(steps_a_run=steps, left_out=left_out)
        for saves in contenders.values():
            saves.make_pool()
            run_steps(training, saves, steps)
        samples: dict[str, list[list[float]]] = {name: [] for name in ("alone", "bare", *contenders)}
        staging: list[float] = []
        for number in part.rounds(2 if part.is_small else 12):
            for name in _rotated(list(samples), number):
                start = bare if name == "bare" else None
                times, copied = run_steps(training, contenders.get(name), steps, start)
                samples[name].append(times)
                if name == "discard":
                    staging.append(copied)
            staging_ms = 1e3 * statistics.median(staging)
            part.report(repeats=number + 1, staging_ms=staging_ms, **_summary(samples))


@contextlib.contextmanager
def _contenders(part: Part, training: Training, left_out: list[str]) -> Iterator[dict[str, DeviceSaves]]:
    """Yields saves by where they go, and closes them at the end; adds to `left_out` what cannot be had."""
    pool = pool_for(training.state)
    with tmpfs(part.folder, bytes_of(training.state)) as memory:
        found = {"discard": DeviceSaves(part.device, part.folder, pool, discard=True)}
        if memory is None:
            left_out.append(NO_TMPFS)
        else:
            found["tmpfs"] = DeviceSaves(part.device, memory, pool)
        found["disk"] = DeviceSaves(part.device, part.folder, pool)
        yield found
        for saves in found.values():
            saves.close()


def _rotated(names: list[str], number: int) -> list[str]:
    """Returns the names in another order each round, so that a drift of clocks harms none."""
    first = number % len(names)
    return names[first:] + names[:first]


class BareCopiesByTorch:
    """Copies all of the state, on a stream of its own, into page-locked memory."""

    def __init__(self, training: Training) -> None:
        self._stream = torch.cuda.Stream()
        self._state = list(training.state.values())
        self._copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=not IS_FAKE) for t in self._state]

    def __call__(self) -> None:
        """Enqueues all copies after what the trainer's stream has."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(self._copies, self._state, strict=True):
                copy.copy_(tensor, non_blocking=True)


def run_steps(
    training: Training, saves: DeviceSaves | None, steps: int, start: Callable[[], None] | None = None
) -> tuple[list[float], float]:
    """Runs a series of steps; returns the seconds of each, and those of the save's copies.

    The copies' seconds are 0 if they are not done, or if there is no save. The first step counts from the
    save's start. Without a save it has the same synchronize. `start` is called where a save would start.
    """
    publication: Publication | None = None
    times = []
    torch.cuda.synchronize()
    for number in range(steps):
        begin = time.perf_counter()
        if number == 0:
            if saves is not None:
                publication = saves.start_shard(training.state)
            if start is not None:
                start()
            torch.cuda.synchronize()  # as Megatron's timers do
        if publication is not None:
            publication.poll()
        training.step()
        times.append(time.perf_counter() - begin)
    if saves is None or publication is None:
        return times, 0.0
    copied = publication.save.times()["staging"]
    failure = publication.save.failure
    if failure is not None and not copied:
        raise RuntimeError(f"the save failed before its copies were done: {failure}")
    saves.discard(publication)
    return times, copied


def _summary(samples: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Returns times and slowdowns by kind of series, of all steps and of the first, in which copies run."""
    found: dict[str, Any] = {}
    for name, series in samples.items():
        every = [seconds for one in series for seconds in one]
        found[name] = {
            "step_ms": 1e3 * statistics.median(every),
            "step_ms_mean": 1e3 * statistics.fmean(every),
            "copying_step_ms": 1e3 * statistics.median(one[0] for one in series),
        }
        if name == "alone":
            continue
        pairs = list(zip(series, samples["alone"], strict=True))
        found[name] |= {
            f"{kind}_percent": 100 * statistics.median(of(one) / of(alone) - 1 for one, alone in pairs)
            for kind, of in (
                ("slowdown_of_the_median", statistics.median),
                ("slowdown_of_the_mean", statistics.fmean),
                ("slowdown_of_the_copying_step", lambda one: one[0]),
            )
        }
    return found
