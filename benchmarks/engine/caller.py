"""How long a save holds its caller: the call that starts it, and copies of objects before it returns."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Result
from benchmarks.engine.saves import Sizes, timed_saves
from benchmarks.rounds import Bar, interleave, median, spread
from benchmarks.states import host_tensors, lazy
from megatron_datastates.config import KIB
from megatron_datastates.providers.base import CopyBudget, Mutability
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.tensors import TensorProvider

_OBJECTS = 400
Cases = dict[str, tuple[int, TensorProvider]]  # by name: how many copies it takes, and the state


def measure_start(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Measures how long starting a save holds the caller, for structures that were saved before."""
    tensors: Cases = {f"{n:,} tensors of 512 B": (n, lazy(host_tensors(n, 512))) for n in sizes.counts}
    # "Runs" are strided copies; the name stays, so that results can be compared with earlier ones.
    spans: Cases = {f"{n:,} runs of one tensor": (n, _strided(n)) for n in sizes.counts}
    larger: Cases = {
        f"1,000 tensors of {size // KIB} KiB": (1_000, lazy(host_tensors(1_000, size)))
        for size in sizes.tensor_sizes
    }
    result: Result = {}
    bars = []
    for cases in (tensors, spans, larger):
        with timed_saves(folder, staging_memory=sizes.start_pool_bytes) as saves:

            def held(state: TensorProvider, saves: Any = saves) -> float:
                return float(saves.once(state).start)

            contenders = {name: functools.partial(held, state) for name, (_, state) in cases.items()}
            found = interleave(3 * sizes.repeats, contenders)
        for name, (count, _) in cases.items():
            held_ms = 1e3 * median(found[name])
            spread_ms = spread([1e3 * v for v in found[name]])
            result[name] = {"held_ms": round(held_ms, 3), "spread_ms": spread_ms}
            bars.append(Bar(f"start: {name}", held_ms, 1 + count / 1e3, "ms", at_least=False))
    return result, bars


def _strided(count: int) -> TensorProvider:
    """Returns a state of one tensor that takes `count` strided copies, of two rows of 300 bytes each."""
    return lazy({"w": torch.ones(count, 3, 400, dtype=torch.uint8)[:, :2, :300]})


def measure_objects(sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Measures copying 400 objects that may change, which happens before a save returns; and torch.save."""
    kinds: list[Callable[[int], Any]] = [
        lambda i: {"rng": torch.get_rng_state(), "tracker": {"model": torch.zeros(16, dtype=torch.uint8)}},
        lambda i: {"step": i, "betas": (0.9, 0.95), "lr": 1e-4, "name": f"group{i}"},
        lambda i: torch.full((600,), i % 200, dtype=torch.uint8),
        lambda i: None,
    ]
    objects = [ObjectSource(f"o{i}", [kinds[i % 4](i)], Mutability.NOW) for i in range(_OBJECTS)]

    def seconds(work: Callable[[ObjectSource], Any]) -> float:
        begin = time.perf_counter()
        for item in objects:
            work(item)
        return time.perf_counter() - begin

    contenders = {
        "copied": lambda: seconds(lambda item: item.snapshot(CopyBudget(1 << 30))),
        "torch.save": lambda: seconds(lambda item: item.serialize()),
    }
    found = interleave(5 * sizes.repeats, contenders)
    return {name: {"ms": round(median(values) * 1e3, 3)} for name, values in found.items()}, []
