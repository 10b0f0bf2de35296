"""Rates of whole saves: against the disk's limit, of tiny tensors, by numbers of threads and slot sizes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

from benchmarks import disk
from benchmarks.command import Result
from benchmarks.engine.saves import Sizes, large_state, timed_saves
from benchmarks.rounds import Bar, Rates, interleave, median, spread
from benchmarks.states import host_tensors, lazy
from megatron_datastates.config import KIB, MIB

_OURS = ("datastates", "datastates without checksums")
_LARGE_BYTES = 16_000 * KIB  # of each tensor that tiny ones are compared with


def measure_write(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Measures the rate from the start of a save until it is durable, next to the disk's own."""
    state, size = large_state(sizes.bytes), sizes.bytes
    with timed_saves(folder) as checked, timed_saves(folder, checksums=False) as unchecked:
        contenders: dict[str, Callable[[], float]] = {
            _OURS[0]: lambda: size / checked.once(state).durable,
            _OURS[1]: lambda: size / unchecked.once(state).durable,
        }
        found = interleave(sizes.repeats, contenders | disk.writers(folder, size))
    rates = Rates(found, frozenset(_OURS))
    bar = Bar("write rate, of the disk's best", rates.of_disk(_OURS[0]), 0.95, "", at_least=True)
    return {"bytes": size} | rates.plain(), [bar]


def measure_tiny(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Compares saves of many tiny tensors with those of few large ones of the same bytes."""
    size = sizes.tiny_tensors * 4 * KIB
    count = max(size // _LARGE_BYTES, 1)
    tiny, large = f"{sizes.tiny_tensors:,} of 4 KiB", f"{count} of 16 MB"
    states = {
        tiny: lazy(host_tensors(sizes.tiny_tensors, 4 * KIB)),
        large: lazy(host_tensors(count, size // count)),
    }
    once_started: dict[str, list[float]] = {name: [] for name in states}
    with timed_saves(folder) as saves:

        def rate(name: str) -> float:
            timing = saves.once(states[name])
            once_started[name].append(size / (timing.durable - timing.start))
            return size / timing.durable

        found = interleave(2 * sizes.repeats, {name: functools.partial(rate, name) for name in states})
    rates = {name: median(values) / 1e9 for name, values in found.items()}
    started = {name: median(values[1:]) / 1e9 for name, values in once_started.items()}  # without the warm-up
    result = {
        "bytes": size,
        "gb_per_s": {name: round(value, 3) for name, value in rates.items()},
        "gb_per_s_once_started": {name: round(value, 3) for name, value in started.items()},
        "spread_gb_per_s": {name: spread([v / 1e9 for v in values]) for name, values in found.items()},
    }
    whole, after = rates[tiny] / rates[large], started[tiny] / started[large]
    return result, [
        Bar("tiny tensors, of the rate of large ones", whole, 0.8, "", at_least=True),
        Bar("the same, once the save was started", after, 0.8, "", at_least=True),
    ]


def measure_sweep(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Measures the rate by numbers of threads and slot sizes: the source of the defaults."""
    size, repeats = min(sizes.bytes, sizes.sweep_bytes), min(sizes.repeats, 3)
    state, warm_up = large_state(size), large_state(min(size, 256 * MIB))
    grid = list(itertools.product((1, 2), (1, 2, 4, 8), (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB)))
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for copy_threads, write_threads, slot in grid:
            options = {"copy_threads": copy_threads, "write_threads": write_threads, "slot_size": slot}
            with timed_saves(folder, **options) as saves:
                saves.once(warm_up)
                rate = size / saves.once(state).durable / 1e9
            found.setdefault(f"{copy_threads}/{write_threads}/{slot // MIB}", []).append(rate)
    rates = {name: round(median(values), 3) for name, values in found.items()}
    best = max(rates, key=rates.__getitem__)
    return {"copy threads/write threads/slot MiB": rates, "best": best, "repeats": repeats}, []
