"""What the native engine reaches on this machine, beside what its disk and its memory can do.

Every comparison is made in one run: its contenders take turns, several times, and medians are reported. The
bars are those the project has set itself (README.md, "Benchmarks"); a bar that is not met is shown as such.

    python tools/bench/engine.py                      # everything: about 6 minutes and 5 GiB of disk
    python tools/bench/engine.py --only write --gib 1 --repeats 3
    python tools/bench/engine.py --only sweep         # threads and slot sizes, behind the defaults
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import disk
import machine
import numpy as np
import torch
import typer
from rich.console import Console
from rounds import Bar, in_turns, median, print_bars, spread

from megatron_datastates.config import GIB, KIB, MIB, Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saver import Run, Saver
from megatron_datastates.providers.base import Mutability, StateProvider
from megatron_datastates.providers.objects import PickledObject
from megatron_datastates.providers.tensors import TensorProvider

POOL = 256 * MIB
Tensors = dict[str, torch.Tensor]
Result = dict[str, Any]
notes = Console(stderr=True)


# -- saves ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds since the save was asked for, but `fence`, which is the fence's own."""

    start: float
    fence: float
    durable: float
    published: float


class Savings:
    """Saves into a folder of their own, one after the other; each is removed when it has been timed."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.saver = Saver(Options(**({"staging_memory": POOL} | options)), Run())
        self.saver.warm_up()
        self._folder = folder
        self._names = itertools.count()

    def once(self, provider: StateProvider) -> Timing:
        path = self._folder / f"save-{id(self)}-{next(self._names)}"
        os.sync()  # what was removed before must not be paid for here
        begin = time.perf_counter()
        publication = self.saver.start(path, provider)
        started = time.perf_counter()
        FENCE.wait("the benchmark")
        fenced = time.perf_counter()
        durable = 0.0
        while publication.poll() is Outcome.PENDING:
            if publication.save.is_durable and not durable:
                durable = time.perf_counter()
            time.sleep(0.0005)
        if publication.outcome is not Outcome.PUBLISHED:
            raise RuntimeError(publication.error)
        end = time.perf_counter()
        publication.join()
        shutil.rmtree(path)
        return Timing(started - begin, fenced - started, (durable or end) - begin, end - begin)

    def close(self) -> None:
        self.saver.close()


@contextmanager
def saving(folder: Path, **options: Any) -> Iterator[Savings]:
    savings = Savings(folder, **options)
    try:
        yield savings
    finally:
        savings.close()


def tensors_of(count: int, size: int) -> Tensors:
    """`count` tensors of `size` bytes in one allocation, resident, none of them zero."""
    memory = torch.arange(count * size, dtype=torch.int32).to(torch.uint8) if count * size < GIB else None
    if memory is None:
        memory = torch.full((count * size,), 37, dtype=torch.uint8)
    # One byte apart from its neighbours each, so that the engine cannot join them into one copy.
    return {f"decoder.layers.{i}.weight": memory[i * size : (i + 1) * size - 1] for i in range(count)}


def lazily(tensors: Tensors) -> TensorProvider:
    return TensorProvider(tensors, Mutability.AT_FENCE)


# -- the measurements -----------------------------------------------------------------------------------


def measure_write(folder: Path, gib: float, repeats: int) -> tuple[Result, list[Bar]]:
    """Rate from the start of a save until it is durable, beside the disk's own."""
    size = int(gib * GIB)
    state = lazily(tensors_of(max(size // (64 * MIB), 1), 64 * MIB))
    with saving(folder) as ours, saving(folder, checksums=False) as unchecked:
        contenders: dict[str, Callable[[], float]] = {
            "datastates": lambda: size / ours.once(state).durable,
            "datastates without checksums": lambda: size / unchecked.once(state).durable,
        }
        for yardstick in disk.yardsticks():
            contenders[str(yardstick)] = lambda y=yardstick: disk.write_rate(y, folder, size)
        found = in_turns(repeats, contenders)
    rates = {name: median(values) / 1e9 for name, values in found.items() if median(values)}
    best = max((name for name in rates if not name.startswith("datastates")), key=rates.__getitem__)
    result = {
        "bytes": size,
        "gb_per_s": {name: round(rate, 3) for name, rate in rates.items()},
        "spread_gb_per_s": {name: spread([v / 1e9 for v in found[name]]) for name in rates},
        "best_of_the_disk": best,
    }
    ratio = rates["datastates"] / rates[best]
    return result, [Bar("write rate, of the disk's best", ratio, 0.95, "", at_least=True)]


def measure_start(folder: Path, repeats: int) -> tuple[Result, list[Bar]]:
    """How long the call that starts a save holds its caller, with a structure that was saved before."""
    tensors = {f"{n:,} tensors of 512 B": (n, lazily(tensors_of(n, 512))) for n in (10, 1_000, 100_000)}
    runs = {
        f"{n:,} runs of one tensor": (n, lazily({"w": torch.ones(n, 3, 400, dtype=torch.uint8)[:, :2, :300]}))
        for n in (10, 1_000, 100_000)
    }
    sizes = {
        f"1,000 tensors of {size // KIB} KiB": (1_000, lazily(tensors_of(1_000, size)))
        for size in (4 * KIB, 64 * KIB, MIB)
    }
    result: Result = {}
    bars = []
    for cases in (tensors, runs, sizes):
        with saving(folder, staging_memory=2 * GIB) as ours:
            found = in_turns(
                repeats,
                {name: (lambda state=state: ours.once(state).start) for name, (_, state) in cases.items()},
            )
        for name, (count, _) in cases.items():
            held = median(found[name])
            result[name] = {
                "held_ms": round(held * 1e3, 3),
                "spread_ms": spread([1e3 * v for v in found[name]]),
            }
            bars.append(Bar(f"start: {name}", held * 1e3, 1 + count / 1e3, "ms", at_least=False))
    return result, bars


def measure_tiny(folder: Path, repeats: int) -> tuple[Result, list[Bar]]:
    """Many tiny tensors beside few large ones of the same bytes: as a whole, and from the engine's start."""
    states = {"100,000 of 4 KiB": tensors_of(100_000, 4 * KIB), "25 of 16 MB": tensors_of(25, 16_000 * KIB)}
    size = 100_000 * 4 * KIB
    engine_only: dict[str, list[float]] = {name: [] for name in states}
    with saving(folder) as ours:

        def rate(name: str, state: TensorProvider) -> float:
            timing = ours.once(state)
            engine_only[name].append(size / (timing.durable - timing.start))
            return size / timing.durable

        providers = {name: lazily(tensors) for name, tensors in states.items()}
        found = in_turns(repeats, {name: (lambda n=name, p=p: rate(n, p)) for name, p in providers.items()})
    rates = {name: median(values) / 1e9 for name, values in found.items()}
    alone = {name: median(values[1:]) / 1e9 for name, values in engine_only.items()}
    result = {
        "bytes": size,
        "gb_per_s": {name: round(rate, 3) for name, rate in rates.items()},
        "gb_per_s_once_started": {name: round(rate, 3) for name, rate in alone.items()},
        "spread_gb_per_s": {name: spread([v / 1e9 for v in values]) for name, values in found.items()},
    }
    whole, started = (r["100,000 of 4 KiB"] / r["25 of 16 MB"] for r in (rates, alone))
    return result, [
        Bar("tiny tensors, of the rate of large ones", whole, 0.8, "", at_least=True),
        Bar("the same, once the save was started", started, 0.8, "", at_least=True),
    ]


def measure_memory(folder: Path, gib: float) -> tuple[Result, list[Bar]]:
    """Growth of the resident memory of a process that saves, at its peak."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=_grow, args=(str(folder), gib, other))
    child.start()
    other.close()
    growth = pipe.recv()
    child.join()
    result = {"bytes": int(gib * GIB), "pool_mib": POOL // MIB, "growth_mib": round(growth / MIB, 1)}
    return result, [Bar("resident memory", growth / MIB, POOL / MIB + 64, "MiB", at_least=False)]


def _grow(folder: str, gib: float, pipe: Any) -> None:
    state = lazily(tensors_of(int(gib * GIB) // (64 * MIB), 64 * MIB))
    with saving(Path(folder)) as small:  # imports and first uses are not part of a save
        small.once(lazily(tensors_of(4, MIB)))
    before = machine.status_bytes("VmRSS")
    machine.reset_peak()
    with saving(Path(folder)) as ours:
        ours.once(state)
    pipe.send(machine.status_bytes("VmHWM") - before)


def measure_interference(folder: Path, gib: float, repeats: int) -> tuple[Result, list[Bar]]:
    """How much slower memory traffic on one core becomes while a save drains."""
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    copied = context.Value(ctypes.c_double, 0.0, lock=False)
    stop = context.Event()
    traffic = context.Process(target=_copy_without_end, args=(cores[-1], copied, stop), daemon=True)
    traffic.start()
    while copied.value == 0.0:
        time.sleep(0.01)

    def rate_during(work: Callable[[], Any]) -> float:
        begin, before = time.perf_counter(), copied.value
        work()
        return float(copied.value - before) / (time.perf_counter() - begin)

    state = lazily(tensors_of(int(gib * GIB) // (64 * MIB), 64 * MIB))
    try:
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:-1])  # threads of the engine inherit it
        with saving(folder) as apart:
            os.sched_setaffinity(0, cores)
            with saving(folder) as anywhere:
                found = in_turns(
                    repeats,
                    {
                        "alone": lambda: rate_during(lambda: time.sleep(1.0)),
                        "beside a save on the other cores": lambda: rate_during(lambda: apart.once(state)),
                        "beside a save on any core": lambda: rate_during(lambda: anywhere.once(state)),
                    },
                )
    finally:
        os.sched_setaffinity(0, cores)
        stop.set()
        traffic.join()
    rates = {name: median(values) for name, values in found.items()}
    slower = {name: 1 - rate / rates["alone"] for name, rate in rates.items() if name != "alone"}
    result = {
        "copied_gb_per_s": {name: round(rate / 1e9, 3) for name, rate in rates.items()},
        "slowed_by": {name: round(share, 4) for name, share in slower.items()},
    }
    bar = Bar(
        "memory traffic slowed", 100 * slower["beside a save on the other cores"], 10, "%", at_least=False
    )
    return result, [bar]


def _copy_without_end(core: int, copied: Any, stop: Any) -> None:
    """Reads and writes memory far beyond the caches of a core, as a training step does."""
    os.sched_setaffinity(0, [core])
    a = np.ones(GIB, np.uint8)
    b = np.empty_like(a)
    while not stop.is_set():
        for at in range(0, len(a), 4 * MIB):
            np.copyto(b[at : at + 4 * MIB], a[at : at + 4 * MIB])
            copied.value += 4 * MIB


def measure_objects(repeats: int) -> tuple[Result, list[Bar]]:
    """What 400 objects that may change cost before the save returns, beside torch.save."""
    kinds: list[Callable[[int], Any]] = [
        lambda i: {"rng": torch.get_rng_state(), "tracker": {"model": torch.zeros(16, dtype=torch.uint8)}},
        lambda i: {"step": i, "betas": (0.9, 0.95), "lr": 1e-4, "name": f"group{i}"},
        lambda i: torch.full((600,), i % 200, dtype=torch.uint8),
        lambda i: None,
    ]
    objects = [PickledObject(f"o{i}", [kinds[i % 4](i)], Mutability.NOW) for i in range(400)]

    def timed(work: Callable[[PickledObject], Any]) -> float:
        begin = time.perf_counter()
        for item in objects:
            work(item)
        return time.perf_counter() - begin

    found = in_turns(
        repeats,
        {
            "copied": lambda: timed(lambda item: item.snapshot()),
            "torch.save": lambda: timed(lambda item: item.serialize()),
        },
    )
    return {name: {"ms": round(median(values) * 1e3, 3)} for name, values in found.items()}, []


def measure_sweep(folder: Path, gib: float, repeats: int) -> tuple[Result, list[Bar]]:
    """The rate for numbers of threads and sizes of slots: where the defaults come from."""
    size = int(gib * GIB)
    state = lazily(tensors_of(size // (64 * MIB), 64 * MIB))
    grid = itertools.product((1, 2), (1, 2, 4, 8), (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB))
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        grid, again = itertools.tee(grid)
        for copy_threads, write_threads, slot in again:
            options = {"copy_threads": copy_threads, "write_threads": write_threads, "slot_size": slot}
            with saving(folder, **options) as ours:
                ours.once(lazily(tensors_of(1, 256 * MIB)))
                rate = size / ours.once(state).durable / 1e9
            found.setdefault(f"{copy_threads}/{write_threads}/{slot // MIB}", []).append(rate)
    rates = {name: round(median(values), 3) for name, values in found.items()}
    best = max(rates, key=rates.__getitem__)
    return {"copy threads/write threads/slot MiB": rates, "best": best, "repeats": repeats}, []


# -- the whole ------------------------------------------------------------------------------------------

PARTS = ("write", "start", "tiny", "memory", "interference", "objects", "sweep")


def run(
    gib: Annotated[float, typer.Option(help="Bytes of the large state, in GiB.")] = 4.0,
    repeats: Annotated[int, typer.Option(help="Rounds of every comparison; medians are reported.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help=f"Parts to run, of {', '.join(PARTS)}.")] = None,
    folder: Annotated[Path, typer.Option(help="Where to write; on the disk in question.")] = Path(),
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Measures the engine on this machine and prints a table (all parts but the sweep, by default)."""
    chosen = only or [part for part in PARTS if part != "sweep"]
    unknown = set(chosen) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    measurements: dict[str, Callable[[Path], tuple[Result, list[Bar]]]] = {
        "write": lambda inside: measure_write(inside, gib, repeats),
        "start": lambda inside: measure_start(inside, 3 * repeats),
        "tiny": lambda inside: measure_tiny(inside, 2 * repeats),
        "memory": lambda inside: measure_memory(inside, gib),
        "interference": lambda inside: measure_interference(inside, gib, repeats),
        "objects": lambda inside: measure_objects(5 * repeats),
        "sweep": lambda inside: measure_sweep(inside, min(gib, 2.0), min(repeats, 3)),
    }
    results: Result = {
        "machine": machine.describe(folder),
        "gib": gib,
        "repeats": repeats,
        "options": _defaults(),
    }
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(prefix="datastates-bench-", dir=folder) as inside:
        for part in chosen:
            with notes.status(f"measuring: {part}"):
                results[part], found = measurements[part](Path(inside))
            bars += found
            notes.print_json(json.dumps({part: results[part]}))
    results["bars"] = [bar.plain() for bar in bars]
    if bars:
        print_bars(bars)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


def _defaults() -> dict[str, Any]:
    options = Options()
    return {
        name: getattr(options, name) for name in ("slot_size", "copy_threads", "write_threads", "direct_io")
    }


if __name__ == "__main__":
    typer.run(run)
